"""Python that we tell people to type is run: the fences and lines of README and guides, and the calls that messages advise.

Each has a fixture below: what stands before a block, or lines that hold the call, its placeholders filled. A new one without a fixture
fails, and so does a fixture without its suggestion. A function that a message names is public, or the message says of which module it is.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
from pathlib import Path

import pytest
import suggestions
from suggestions import ROOT, Suggestion

import rlhf_nb

pytestmark = pytest.mark.filterwarnings("ignore")
BEGIN = """
import os, sys, torch
from rlhf_nb import GRPOConfig, GRPOTrainer, PPOConfig, RewardModel, Rewards, SamplingConfig, SFTConfig, SFTTrainer, add_lora, evaluate, read_rows, save_model
from rlhf_nb.data import toy
tokenizer, model = toy.build_tokenizer(), toy.build_model(0, "tiny")
few_tokens = SamplingConfig(max_new_tokens=4)
few = dict(steps=1, epochs=None, mini_batch_size=8, console=False)
def short(prompts, completions): return [-float(len(c)) for c in completions]
def polite(prompts, completions): return [float("please" in c) for c in completions]
"""
SCORES = "values = scores_a = points = said = [1.0, 0.0, 1.0, 1.0] * 3; true = scores_b = [0.0, 0.0, 1.0, 1.0] * 3; clusters = names = [*'aabbccddeeff']\n"
SCORES += "from rlhf_nb.evaluate.intervals import *; from rlhf_nb.evaluate.metrics import *\n"
SFT = "rows = toy.sft_rows(16, 0); trainer = SFTTrainer(SFTConfig.preset('toy', output_dir='run', **few), model, tokenizer, rows, eval_rows=rows[:4])\n"
GRPO = "save_model(model, tokenizer, 'tiny'); config = GRPOConfig.preset('toy', output_dir='run', model=dict(name_or_path='tiny'), rollout_batch_size=8, num_generations=4, sampling=dict(max_new_tokens=8), **few)\n"
COLLECT = "from rlhf_nb.widgets.collect import PreferenceCollector\ncollector = PreferenceCollector(['Visitor: Hi!\\nPip:'], {'a': ['Owls eat mice.'], 'b': ['Foxes sleep.']}, path='labels.jsonl')\n"
SAMPLES = (
    GRPO
    + "from rlhf_nb.widgets.samples import read_samples\nGRPOTrainer(config.replace(kl_coef=0.05), model, tokenizer, reward=short, rows=toy.train_prompts(8)).fit()\nrows = [r for r in read_samples('run') if r['prompt'] == read_samples('run')[0]['prompt']]\n"
)
RESULTS = "from rlhf_nb.bench.results import Results, RowResult\nresults = others = Results(model='sft', suite='sums', fingerprint='f', settings={'seed': 0}, rows=[RowResult(id=str(i), score=i % 2) for i in range(8)])\n"
RESULTS += "from rlhf_nb.bench.capability import CapabilityTester\n"
FROZEN = (
    'CapabilityTester.freeze({"sums": results, "facts": others}, {"sums": 0.02, "facts": 0.03}).save("frozen.json")'
)
TEMPLATES = "from rlhf_nb.data.templates import make_chat_template, set_chat_template\n"
FORGOTTEN = "registry._METHODS.pop('focal_too')\nfrom rlhf_nb.pipeline.stages import PipelineConfig\nPipelineConfig.model_fields.pop('focal_too', None)\nPipelineConfig.model_rebuild(force=True)\n"
FOCAL = "exec(next(b for b in re.findall(r'^```python\\n(.*?)^```', contributing, 16 | 8) if 'class FocalConfig' in b).split('@register')[0])\nimport rlhf_nb.train.registry as registry\n"

RUN: dict[str, str] = {  # a suggestion, and lines that hold it; of a fence, and of words in backticks that run as they are, what comes before
    "with Dashboard(grpo).live(): grpo.fit()": GRPO + "from rlhf_nb import Dashboard\ngrpo = GRPOTrainer(config, model, tokenizer, reward=short, rows=toy.train_prompts(8))\n",
    "from rlhf_nb.scale.cluster import slurm_script": "", "from rlhf_nb.scale.cluster import kubernetes_manifest": "",
    'plan("path/to/model", Job(...), gpus=16, memory=80)': "from rlhf_nb.scale.plan import Job, plan\nsave_model(model, tokenizer, 'path/to/model')\nassert plan('path/to/model', Job('ppo', prompt=32, completion=32), gpus=16, memory=80)",
    "evaluate(..., decoder=...)": "from rlhf_nb.decode.choose import best_of_n\nassert evaluate(model, tokenizer, ['Visitor: Hi!\\nPip:'], {'short': short}, sampling=few_tokens, decoder=best_of_n(short, 2)).cost",
    "from rlhf_nb import GRPOConfig, GRPOTrainer": "",
    "import json\nfrom itertools import groupby": "import json\nopen('helpsteer2.jsonl', 'w').writelines(json.dumps(dict(prompt='p', response=r, helpfulness=n, correctness=n, coherence=n, complexity=n, verbosity=n)) + '\\n' for r, n in (('a', 4), ('b', 1)))\n",
    "from rlhf_nb.evaluate.intervals import compare_paired": "", "from rlhf_nb.bench.capability import CapabilityTester": "",
    "share_interval(values, clusters)": SCORES, "mean_interval(values, clusters)": SCORES, "mean_interval(values, clusters, bounds=(1, 5))": SCORES + "values = [v * 4 + 1 for v in values]\n",
    "compare_paired(points_of(scores_a, scores_b))": SCORES, "decide(points)": SCORES,
    "length_controlled(points, lengths_a, lengths_b)": SCORES + "lengths_a, lengths_b = [*range(1, 13)], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]\n", "pass_interval(right, n, k)": SCORES + "right, n, k = values, 4, 2\n",
    "majority_interval(said, wanted, n, k)": SCORES + "wanted, n, k = [1.0, 0.0, 1.0], 4, 3\n", "holm(p_values)": SCORES + "p_values = [0.01, 0.2]\n", "several_note(p_values)": SCORES + "p_values = [0.01, 0.2]\n",
    "calibration(said, true)": SCORES, "by_slice(values, names)": SCORES,
    FROZEN: RESULTS, 'CapabilityTester.read("frozen.json").test({...})': f"{RESULTS}{FROZEN}\nCapabilityTester.read('frozen.json').test({{'sums': results, 'facts': others}})",
    'FeedbackStore("feedback.jsonl")': "from rlhf_nb.feedback.store import FeedbackStore\n",
    "torch.use_deterministic_algorithms(True)": "", "from rlhf_nb.pipeline.sweep import sweep": "",
    "def brief(prompts, completions, answer, **columns)": "",
    "tokenizer.apply_chat_template(messages, tokenize=False).rstrip()": TEMPLATES + "set_chat_template(tokenizer); messages = [{'role': 'user', 'content': 'Hi!'}]\n",
    "evaluate(model, tokenizer, prompts, rewards, reference, seed=...)": "prompts, rewards, reference = ['Visitor: Hi!\\nPip:'], {'short': short}, model\nevaluate(model, tokenizer, prompts, rewards, reference, seed=0)",
    "evaluate(..., reference=base)": "assert evaluate(model, tokenizer, ['Visitor: Hi!\\nPip:'], {'short': short}, reference=toy.build_model(1, 'tiny')).summary()",
    "from rlhf_nb import learn\n\nworld": "def my_function(scores, n): return scores\n", "from rlhf_nb import learn\n\nprint": "os.mkdir('submissions'); open('submissions/ada.json', 'w').write('{\"student\": \"Ada\", \"answers\": {}}')\n",
    "model.generate(..., num_beams=4)": "model.generate(torch.tensor([[3, 4]]), num_beams=4, max_new_tokens=4)",
    "from rlhf_nb import read_rows\nfrom rlhf_nb.bench.evals import scorer": "save_model(model, tokenizer, 'tiny'); RewardModel.from_policy(model).save('runs/reward/model', tokenizer)\nimport json; open('pairs.jsonl', 'w').write(''.join(json.dumps(r) + chr(10) for r in toy.preference_rows(8, 0)))\n",
    "with Dashboard(trainer).live(): trainer.fit()": SFT + "from rlhf_nb import Dashboard\n", "Dashboard(...)": SFT + "from rlhf_nb import Dashboard\ntrainer.fit(); Dashboard('run')",
    'Dashboard("runs/ppo")': SFT.replace("'run'", "'runs/ppo'") + "from rlhf_nb import Dashboard\ntrainer.fit()\n", "from rlhf_nb import Dashboard, Runs": "",
    'Runs("runs")': SFT.replace("'run'", "'runs/ppo-0'") + "from rlhf_nb import Runs\ntrainer.fit()\n",
    'Runs("runs").note("ppo-0", "gold peaks at 120")': SFT.replace("'run'", "'runs/ppo-0'") + "from rlhf_nb import Runs\ntrainer.fit()\n",
    'Runs("runs").tag("ppo-0", "baseline")': SFT.replace("'run'", "'runs/ppo-0'") + "from rlhf_nb import Runs\ntrainer.fit()\n",
    'Runs("runs").compare("ppo-0", "ppo-1")': SFT.replace("'run'", "'runs/ppo-0'") + "from rlhf_nb import Runs\nimport shutil\ntrainer.fit(); shutil.copytree('runs/ppo-0', 'runs/ppo-1')\n",
    'config.save("run.yaml")': "config = SFTConfig(output_dir='run')\n",
    'add_weighted_adapter(..., combination_type="cat")': "from peft import LoraConfig, get_peft_model\nmodel = get_peft_model(model, LoraConfig(r=2, target_modules='all-linear'))\nmodel.add_adapter('b', LoraConfig(r=2, target_modules='all-linear'))\nmodel.add_weighted_adapter(['default', 'b'], [1.0, 1.0], 'both', combination_type='cat')",
    'save_model(trainer.method.model, tokenizer, "adapters/polite")': SFT.replace("few)", "few, model=dict(lora=dict(r=2)))").replace("model, tokenizer, rows", "None, None, rows"),
    "trainer.train()": SFT, "trainer.fit()": SFT, "trainer.evaluate(eval_dataset)": SFT + "trainer.fit(); eval_dataset = rows[:4]\n", "trainer.predict(rows)": SFT + "trainer.fit()\n",
    "dtype = torch.bfloat16": "",
    "import json\n\nfrom rlhf_nb.config import SamplingConfig": "import pathlib\nmodel.config.max_position_embeddings = 256\npathlib.Path('questions.jsonl').write_text('{\"prompt\": \"Hi!\", \"answer\": 3}'); save_model(model, tokenizer, 'MODEL')\n",
    # messages
    "CapabilityTester.freeze(...).save(path)": RESULTS + "CapabilityTester.freeze({'sums': results}, {'sums': 0.02}).save('frozen.json')",
    "set_chat_template(tokenizer, make_chat_template(user, assistant))": TEMPLATES + "user, assistant = 'Visitor:', 'Pip:'\n", "set_chat_template(tokenizer)": TEMPLATES, "set_chat_template(tokenizer, X)": TEMPLATES + "X = 'qwen3'\n",
    "FeedbackStore(FILE).add(...)": "from rlhf_nb.feedback.store import Feedback, FeedbackStore\nFeedbackStore('f.jsonl').add('u', Feedback('rating', 'up', 'p', ('a',), ('v1',), consent=True))",
    "learn.start(2, model=NAME)": "from rlhf_nb import learn\nsave_model(model, tokenizer, 'mine'); NAME = 'mine'\n",
    "learn.find_bug(4, 2)": "from rlhf_nb import learn\n", "learn.submit(NAME)": "from rlhf_nb import learn\nassert learn.submit('Ada').exists()", "mask.bool()": "mask = torch.ones(2)\n",
    "hydra(policy, reward_model)": "from rlhf_nb import LoraSettings\nfrom rlhf_nb.models.adapters import hydra\npolicy = toy.build_model(0, 'tiny'); reward_model = RewardModel.from_policy(add_lora(toy.build_model(0, 'tiny'), LoraSettings(r=2), adapter_name='reward'))\nassert hydra(policy, reward_model).reward",
    "save_model(..., merge=True)": "from rlhf_nb import LoraSettings\nsave_model(add_lora(model, LoraSettings(r=2)), tokenizer, 'whole', merge=True); assert os.path.exists('whole/model.safetensors')",
    "add_lora(model, config.model.lora)": "config = SFTConfig(output_dir='run', model=dict(lora=dict(r=2)))\n",
    "model.generate(..., prompt_lookup_num_tokens=10)": "model.generate(torch.tensor([[3, 4]]), prompt_lookup_num_tokens=10, max_new_tokens=4)",
    "model.generate(..., assistant_model=SMALL)": "model.generate(torch.tensor([[3, 4]]), assistant_model=toy.build_model(1, 'tiny'), max_new_tokens=4)",
    'PreferenceCollector(prompts, policies, path="labels.jsonl")': "from rlhf_nb.widgets.collect import PreferenceCollector\nprompts, policies = ['p'], {'a': ['x'], 'b': ['y']}\n",
    "agreement()": COLLECT + "assert collector.agreement() == []", "export(path, format=...)": COLLECT + "assert collector.export('rows.jsonl', format='unpaired') == 0",
    "ask_least_sure(members, tokenizer)": COLLECT + "collector.ask_least_sure([RewardModel.from_policy(toy.build_model(k, 'tiny')) for k in (0, 1)], tokenizer)",
    'Samples("runs/ppo", tokenizer)': SAMPLES + "from rlhf_nb.widgets.samples import Samples\nos.rename('run', 'runs/ppo') if os.makedirs('runs') is None else None\n",
    "without_each(row, reward, tokenizer)": SAMPLES + "from rlhf_nb.widgets.samples import without_each\nassert len(without_each(rows[0], short, tokenizer)['without']) == len(rows[0]['tokens'])",
    "RewardDebugger(row, model, tokenizer, pairs, pool, held_out)": SAMPLES + "from rlhf_nb.widgets.debugger import RewardDebugger\nrow, pairs, pool, held_out, model = rows[0], toy.preference_rows(16), [], [], RewardModel.from_policy(model)\nassert 'Training pairs' in RewardDebugger(row, model, tokenizer, pairs, pool, held_out).look(0)",
    "Rewards(..., on_error='skip')": "Rewards([short, polite], on_error='skip')", "functools.partial(CLASS, ...)": "import functools\nfunctools.partial(dict, a=1)()",
    "recomputed_layers(model)": "from rlhf_nb.scoring.recompute import recomputed_layers\nwith recomputed_layers(model): model(torch.tensor([[1, 2]])).logits.sum().backward()",
    "split_head(model)[0]": "from rlhf_nb.scoring.head import split_head\n", "config.replace(X=...)": "assert SFTConfig(output_dir='run').replace(seed=3).seed == 3",
    "register(name, X, rows=...)": FOCAL + "registry.register('focal_too', FocalConfig, rows='sft')(type('T', (SFTTrainer,), {'method_class': Focal}))\n" + FORGOTTEN,
    "logits.argmax(-1)": "logits = torch.randn(2, 3)\n", "fit(resume=True)": SFT + "trainer.fit(); trainer = SFTTrainer(SFTConfig.load('run').replace(steps=2), model, tokenizer, rows); trainer.fit(resume=True)",
    "list(...)": "list(iter(toy.sft_rows(2, 0)))", "read_rows(path)": "path = 'rows.jsonl'; open(path, 'w').write('{\"text\": \"Owls.\"}')\n",
    "make_pairs(prompts, policies)": "from rlhf_nb.widgets.collect import make_pairs\nprompts, policies = ['p'], {'a': ['x'], 'b': ['y']}\n",
    "from rlhf_nb import Dashboard": "", "Dashboard(X)": SFT + "from rlhf_nb import Dashboard\ntrainer.fit(); Dashboard('run')",
    "rescore([row], model, tokenizer)": GRPO + "from rlhf_nb.widgets.samples import read_samples, tokens_html, rescore\nGRPOTrainer(config, model, tokenizer, reward=short, rows=toy.train_prompts(8)).fit()\nsample = read_samples('run')[0]; assert tokens_html(rescore([sample], model, tokenizer)[0], by='entropy')",
}  # fmt: skip
ELSEWHERE = {  # what another file runs: its name, and the words that do
    'rlhf_nb.push_to_hub("runs/grpo", "owner/name")': ("tests/test_hub_push.py", "push_to_hub(run"),
    "trainer.push_to_hub()": ("tests/test_trl_scripts.py", ".push_to_hub("), "args=TrainingArguments(...)": ("tests/test_trl_scripts.py", "TrainingArguments("),
    "PPOTrainer(model, ref_model, reward_model, value_model, ...)": ("tests/test_trl_scripts.py", "PPOTrainer("), "from openai import OpenAI": ("tests/test_serve.py", ".chat.completions.create("),
    "engine.prepare(module, settings)": ("nbs/run/engine.ipynb", ".prepare("), "engine.generation_mode()": ("nbs/run/engine.ipynb", ".generation_mode("),
}  # fmt: skip
SPOKEN_OF = {  # no advice: what a class must have, what we call, what a function is called like
    "model(...)", "decode(encode(x)) == x", "frozen_modules()", "controls()", "fit()", "import rlhf_nb", "Rewards(rollout, needed=False)", "reset(**row)", "get_reward()",
    "f(prompts, completions)", "XmodPreTrainedModel.set_default_language()", "use_fast(False)", "sys.exit(importlib.util.find_spec('vllm') is None)",
    "len(prompt_ids)", "torch.cuda.is_bf16_supported()", "from rlhf_nb.pipeline.sweep import serve_job", "serve_job()", "score(completions)", "reset(self, row, seed)",
    "step(self, turn)", "step(turn)", "denominators()", "from rlhf_nb import SFTConfig, SFTTrainer",
}  # fmt: skip
OF_WHAT_IS_CALLED = {"fit"}  # of the trainer at hand
SAID = [*((s, "") for s in suggestions.python_on_pages()), *suggestions.python_in_messages()]


def key_of(text: str) -> str | None:
    """The entry of a suggestion: the whole, or what a fence begins with."""
    known = {*RUN, *ELSEWHERE, *SPOKEN_OF}
    return text if text in known else next((k for k in known if "\n" in text and text.startswith(k)), None)


def called(source: str) -> set[str]:
    """Names that are called."""
    calls = [n.func for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else f.id for f in calls if isinstance(f, ast.Attribute | ast.Name)}


def test_each_has_a_fixture_and_each_fixture_its_suggestion() -> None:
    new = {s.text: s.where for s, _ in SAID if key_of(s.text) is None}
    assert not new, f"run them: an entry in RUN: {new}"
    assert {*RUN, *ELSEWHERE, *SPOKEN_OF} == {key_of(s.text) for s, _ in SAID}
    for text, (place, words) in ELSEWHERE.items():
        assert words in (ROOT / place).read_text(encoding="utf-8"), text


@pytest.mark.parametrize("key", RUN, ids=lambda k: k[:80])
def test_it_runs(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_NB_LEARN", str(tmp_path / "learn.json"))
    monkeypatch.setattr(sys, "argv", ["notebook"])
    text = next(s.text for s, _ in SAID if key_of(s.text) == key)
    lines, space = RUN[key], {"__name__": "__main__", "re": re, "contributing": (ROOT / "CONTRIBUTING.md").read_text()}
    if "\n" in text or "..." not in text and not called(text) & called(lines):
        lines = f"{lines}\n{text}".replace(
            "max_new_tokens=512", "max_new_tokens=64"
        )  # as it is, but for a window of 128
    assert called(text) <= called(lines), f"the fixture of {text!r} does something else"
    Path("suggested.py").write_text(BEGIN + lines)  # a function's source can be asked for, as in a notebook
    exec(compile(BEGIN + lines, "suggested.py", "exec"), space)


@pytest.mark.parametrize(
    ("said", "sentence"), [(s, t) for s, t in SAID if t and key_of(s.text) in RUN], ids=lambda x: str(x)[:60]
)
def test_a_message_says_where_its_function_is(said: Suggestion, sentence: str) -> None:
    """A stranger can type it: it is public, or of a module that the sentence names, or a method of what is at hand."""
    for node in ast.walk(ast.parse(said.text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute)):
            continue
        root = node.func
        while isinstance(root, ast.Attribute | ast.Call):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        if (
            not isinstance(root, ast.Name)
            or root.id in {*rlhf_nb.__all__, *dir(builtins), "X", "functools", "torch", "learn"} | OF_WHAT_IS_CALLED
        ):
            continue
        if isinstance(node.func, ast.Attribute) and root.id.islower():
            continue  # of an object
        homes = [
            importlib.import_module(f"rlhf_nb.{m}")
            for m in re.findall(r"(?:rlhf_nb\.)?\b([a-z]+\.[a-z_]+)\b", sentence)
            if (ROOT / "rlhf_nb" / f"{m.replace('.', '/')}.py").exists()
        ]
        assert any(hasattr(home, root.id) for home in homes), (
            f"{said.where}: of which module is {root.id}? {sentence!r}"
        )


def test_public_names_are_what_they_say_in_any_order() -> None:
    """`rlhf_nb.evaluate` is a room and a public function: `from rlhf_nb import evaluate` gave the room once anything had imported it."""
    for room in (p.name for p in (ROOT / "rlhf_nb").iterdir() if (p / "__init__.py").exists()):
        importlib.import_module(f"rlhf_nb.{room}")
    assert all(callable(getattr(rlhf_nb, name)) for name in rlhf_nb.__all__ if name != "__version__")
