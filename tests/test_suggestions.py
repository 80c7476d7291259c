"""What we tell people to type works: each command line of README, guides, notebooks, help and messages is read by the program
itself, its settings are resolved, and (slow) it is run, with the placeholders filled by the files below. A new line without a
fixture fails.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import suggestions
import torch
import typer
from command import call
from suggestions import ROOT, Suggestion
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_nb.bench.suites import load_suite
from rlhf_nb.cli.main import app
from rlhf_nb.cli.settings import known_methods, load_config
from rlhf_nb.data import toy
from rlhf_nb.data.templates import make_chat_template, train_bpe
from rlhf_nb.models.heads import RewardModel
from rlhf_nb.models.load import save_model
from rlhf_nb.models.places import COMPLETE
from rlhf_nb.pipeline.sweep import read_sweep

LINES = suggestions.all_lines()
FILLED = {  # what a message fills in
    "{name}": "smollm2", "{model}": "smollm2", "{done.folder}": "tiny", "{output_dir}": "runs/demo", "{folder}": "runs/ppo",
    "{run}": "runs/ppo", "{path}": "runs/ppo", "{place}": "runs/ppo", "{base}": "smollm2", "{made.folder.parent}": "runs", "{out}": "other",
    "{processes}": "2", "{strategy}": "ddp", "{step}": "40", "{self.method}": "sft", "{method.name}": "sft", "{more}": "",
    "{self.folder}": "jobs/owls", "{store.path}": "feedback.jsonl", "{made.path}": "pairs.jsonl", "{method}": "dpo",
    "{made.method}": "ppo", "{run.run_dir.path}": "runs/ppo", "{command}": "ppo", "{first}": "smollm2_ppo",
    "{recipe_kind(path)}": "ppo", "{path.stem}": "smollm2_ppo", "{shlex.quote(path)}": "runs/ppo", "{num_processes}": "2", "{url}": "http://localhost:1/v1",
    "{EXAMPLES[name]}": "demo", "{line}": "demo",  # both are collected where they are made
}  # fmt: skip
FILLED_IN = {  # where the same word means something else
    "compare A B --suite NAME": "compare tiny other --suite sums", "eval/SUITE/A runs/eval/SUITE/B": "eval/old runs/eval/new",
    "METHOD --topology FILE": "dpo --topology cluster_topology.yaml", "--topology FILE": "--topology cluster_topology.yaml",
    "launch METHOD -n 4 --topology": "launch dpo -n 4 device=cpu --topology",
    "serve MODEL --feedback FILE": "serve tiny --feedback said.jsonl",
    "serve --feedback FILE": "serve tiny --feedback said.jsonl", "serve MODEL --traffic FILE": "serve tiny --traffic said.jsonl",
    "eval MODEL --suite {model}": "eval tiny --suite sums", "sample {name}": "sample tiny", "push {place} {name}": "push runs/ppo a/b",
    "{name} --config run/config.yaml": "ppo --config runs/ppo",
    "{made.method} --config {best}": "ppo --config run.yaml", "{…} data.path={made.path} ...": "dpo data.path=pairs.jsonl",
    "get {name}{more}": "get smollm2", "data {name}{…}": "data owner/name",
    "chat {name}{…}": "chat smollm2", "merge {…} --method": "merge A B -o OUT --method linear", "compare {folder} OTHER_FOLDER":
    "compare runs/eval/old runs/eval/new", "grpo --config {output_dir}": "grpo --config runs/grpo", "get {place}": "get owner/name", "strategy={strategy}{…}": "strategy=ddp --toy", "get {name} --from": "get smollm2 --from pypi", "--config {…}": "--config run.yaml",
}  # fmt: skip
WORDS = {  # metavariables
    "MODEL": "tiny", "A": "tiny", "B": "other", "C": "third", "PROMPT": "Hello.", "RUN": "runs/ppo", "COPY": "other", "FOLDER": "runs/ppo", "STEP": "40",
    "FORMAT": "safetensors", "OUT": "out", "SOUP": "soup", "TUNED": "other", "BEFORE": "tiny", "SFT": "tiny", "USER": "u-17", "SUITE": "sums",
    "METHOD": "sft", "GIB": "15", "FILE": "pairs.jsonl", "DATA": "questions.jsonl", "HELD_OUT_FILE": "held.jsonl", "VERSION": "8d1f0c2a77b1",
    "OWNER/NAME": "owner/name", "IMAGE": "registry/rlhf-nb", "NAME": "sums", "KEY=VALUE": "seed=1", "OTHER_FOLDER": "runs/eval/new", "MINE.yaml": "run_all.yaml",
    "NAME@REVISION": "owner/name@main",
}  # fmt: skip
OF_COMMAND: dict[str, dict[str, str]] = {  # metavariables that mean something else there
    "sft": {"FILE": "sft.jsonl"}, "process": {"FILE": "steps.jsonl"}, "ppo": {"FILE": "prompts.jsonl"}, "config": {"NAME": "zero3"},
    "grpo": {"FILE": "prompts.jsonl"}, "rlaif": {"FILE": "prompts.jsonl"},
    "get": {"NAME": "smollm2"}, "feedback": {"FILE": "feedback.jsonl"}, "reward": {"FILE": "pairs.jsonl"}, "push": {"NAME": "owner/name"}, "run": {"FILE": "pairs.jsonl", "run.yaml": "run_all.yaml"},
    "sample": {"FOLDER": "runs/reward/model", "...": "Hello."},
    "eval": {"FOLDER": "runs/reward/model"}, "compare": {"A": "runs/eval/old", "B": "runs/eval/new", "C": "runs/eval/sums/smollm2"}, "plan": {"FILE": "run.yaml"},
}  # fmt: skip
CONFIGS = {
    "eval": "bench.evals:EvalConfig",
    "cycle": "pipeline.cycle:CycleConfig", "data": "pipeline.data_look:LookConfig",
    "compare": "bench.compare:CompareConfig",
}  # fmt: skip


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the lines speak of, in the toy world."""
    here = tmp_path_factory.mktemp("world")
    texts = [f"{r['prompt']} {r['chosen']}" for r in toy.preference_rows(64, 0)]
    tok = train_bpe(texts, 384)
    tok.chat_template = make_chat_template()
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    shape |= {"max_position_embeddings": 1024, "eos_token_id": tok.eos_token_id, "bos_token_id": tok.bos_token_id}

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(vocab_size=len(tok), **shape))

    for i, name in enumerate(
        (
            "tiny",
            "other",
            "third",
            "runs/sft/model",
            "runs/ppo/model",
            "runs/demo/ppo/model",
            "cache/rlhf_nb/smollm2-135m-instruct",
        )
    ):
        save_model(made(i), tok, here / name)
    (here / "cache/rlhf_nb/smollm2-135m-instruct" / COMPLETE).touch()
    RewardModel.from_policy(made(1), seed=1).save(here / "runs/reward/model", tok)
    rows = {
        "pairs": toy.preference_rows(64, 0), "held": toy.preference_rows(16, 1), "sft": toy.sft_rows(32, 0), "prompts": toy.train_prompts(32),
        "train": toy.sft_rows(16, 0), "questions": [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)],
        "steps": [{"prompt": "Q", "completions": ["a", "b"], "labels": [True, False]}] * 8,
    }  # fmt: skip
    for name, each in rows.items():
        (here / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in each))
    for name in ("run", "jobs/owls/config", "sums"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / f"{name}.yaml").write_text("model: {name_or_path: tiny}\ndata: {path: toy}\nsteps: 1\nepochs: null\n")
    (here / "run_all.yaml").write_text("data: toy\nbase: {}\n")
    few = "{steps: 1, epochs: null, mini_batch_size: 8}"
    (here / "sweep.yaml").write_text(
        f"method: sft\ntoy: true\nseeds: 2\nsettings: {few}\nover: {{optimizer.lr: [0.001, 0.01]}}\n"
    )
    (here / "recipe.yaml").write_text(
        "method: linear\nmodels:\n- {model: tiny, weight: 1}\n- {model: other, weight: 1}\n"
    )
    (here / "rewards.py").write_text(
        "def short(prompts, completions):\n    return [-float(len(c)) for c in completions]\n"
    )
    for name in ("runs/ppo", "runs/demo", "runs/grpo", "runs/what-if"):
        (here / name).mkdir(parents=True, exist_ok=True)
        (here / name / "config.yaml").write_text("data: toy\n" if name == "runs/demo" else "steps: 1\nepochs: null\n")
    return here


def words_of(line: Suggestion) -> list[str]:
    """The words of a suggestion, placeholders filled; an unknown one is a failure that says what to do."""
    text = line.text
    for old, new in FILLED_IN.items():
        text = text.replace(old, new)
    for old, new in FILLED.items():
        text = text.replace(old, new)
    unknown = re.findall(r"\{[a-z_.()\[\]…]+\}", text)
    assert not unknown, f"{line.where}: {line.text!r} fills in {unknown}: say in FILLED with what"
    words = shlex.split(text)
    mine = WORDS | OF_COMMAND.get(words[0], {})
    words = [w for w in words if w in mine or w not in ("...", "…")]
    out = []
    for word in words:
        key, sign, value = word.partition("=")
        if value in ("...", "…"):
            value = {"data": "pairs.jsonl", "model.name_or_path": "tiny", "then": "dpo"}.get(
                key, "http://localhost:1/v1"
            )
        word = mine.get(word, key + sign + mine.get(value, value))
        if re.fullmatch(r"[A-Z][A-Z_]+", word):
            pytest.fail(f"{line.where}: {line.text!r} has the placeholder {word}: say in WORDS what it stands for")
        out.append(word)
    return out


def read(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and what it would be called with; a wrong word ends the test."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("rlhf-nb", list(words), resilient_parsing=False)
    path, rest = [], [*getattr(context, "_protected_args", []), *context.args]
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        path.append(str(name))
        context = command.make_context(str(name), rest, parent=context)
        rest = [*getattr(context, "_protected_args", []), *context.args]
    return " ".join(path), dict(context.params)


def resolve(command: str, params: dict[str, Any]) -> None:
    """Whether its settings exist and fit together."""
    given = [w for key in ("overrides", "words") for w in params.get(key) or []]
    if command in known_methods() or command == "run":
        load_config(command, params["config"], given, params["toy"])
    elif params.get("kind") in {*known_methods(), "run"} and "overrides" in params:
        load_config(params["kind"], params["config"], given, params["toy"])
    elif command == "sweep":
        request = read_sweep(params["what"], given, **{"config": params["config"]} if params["config"] else {})
        load_config(request.method, request.config, request.words(), request.toy or params["toy"])
    elif command in CONFIGS:
        module, name = CONFIGS[command].split(":")
        settings = [w for w in params.get("results", given) if "=" in w]
        getattr(importlib.import_module(f"rlhf_nb.{module}"), name).load(params.get("config"), settings)
    if params.get("suite") and params["suite"] != "capitals.yaml" and command in ("eval", "compare"):
        load_suite(params["suite"], params["file"], params["limit"])


def mention(words: list[str]) -> bool:
    """Only a command's name, as in "`rlhf-nb serve` answers": its help must be there."""
    return len(words) == 1 or (len(words) == 2 and words[0] in ("config", "runs"))


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.where}: {line.text}"[:100])
def test_each_line_is_understood(line: Suggestion, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("XDG_CACHE_HOME", str(world / "cache"))
    words = words_of(line)
    if mention(words) or "--help" in words:
        call(*[w for w in words if w != "--help"], "--help")
        return
    if "--rollouts" in words:  # reads the run while it is parsed: run in the slow suite, with a run that has steps
        assert "--rollouts" in call(words[0], "--help")
        return
    resolve(*read(words))


def test_a_wrong_line_is_noticed(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite can fail: a wrong option, a wrong setting, a wrong command, an unknown placeholder."""
    monkeypatch.chdir(world)
    for wrong in ("report runs/ppo --outt x", "sft modell=toy", "samples tiny x", "eval tiny --suite sumz"):
        with pytest.raises(BaseException, match=".") as caught:
            resolve(*read(shlex.split(wrong)))
        assert not isinstance(caught.value, KeyboardInterrupt)
    with pytest.raises(AssertionError, match="FILLED"):
        words_of(Suggestion("here", "chat {nowhere}"))
    with pytest.raises(BaseException, match="WORDS"):
        words_of(Suggestion("here", "chat NOWHERE"))


KNOWN = {
    *re.findall(
        r"([A-Za-z][\w-]*)(?=[><=\s]|$)",
        re.sub(r"(?m)^(?!\w*requirements).*$", "", (ROOT / "settings.ini").read_text()),
    )
}
SOLE = {"rlhf_nb", "tensorboardX", "torch"}  # of no extra


def test_each_pip_line_names_a_package_that_an_extra_has() -> None:
    """A package that a message tells to install is one that this project declares, so its bounds and its extra exist."""
    texts = [(p.name, p.read_text(encoding="utf-8")) for p in suggestions.PAGES]
    texts += [(f"{p.name}:{n}", t) for p in suggestions.modules() for n, t in suggestions.constants(p)]
    extras, found = set(re.findall(r"(\w+)_requirements", (ROOT / "settings.ini").read_text())), 0
    for where, text in texts:
        for line in re.findall(r"pip install ([^`\n;()&]+)", text):
            for word in re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", line):
                if word.startswith(("-", "{", "constraints")) or not re.match(r"['\"]?[.A-Za-z]", word):
                    continue
                bare, _, extra = re.match(r"['\"]?([.\w-]*)(\[([\w,-]+)\])?", word).groups()  # type: ignore[union-attr]
                if word.rstrip(".,:;'\"") != word or extra or bare in KNOWN | SOLE | {"."}:
                    found += 1
                bare = bare.rstrip(".") or "."
                assert bare in KNOWN | SOLE | {"."}, f"{where}: pip install {word}"
                assert set((extra or "dev").split(",")) <= extras | {"test"}, f"{where}: {word}"
                if not word.endswith(("'", '"')) or word[-1] != word[0]:
                    break  # the sentence goes on
    assert found >= 12
