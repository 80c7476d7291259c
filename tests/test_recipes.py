"""Every recipe of a single method: it loads, the doctor and the planner accept it, it trains, and its first lines say what a stranger wants to know."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlhf_nb.cli.main import app, recipe_kind, recipes
from rlhf_nb.core import Precision
from rlhf_nb.data.sums import STORIES, problems
from rlhf_nb.data.worlds import made_rows
from rlhf_nb.pipeline.doctor import doctor
from rlhf_nb.rewards.answers import Number
from rlhf_nb.scale.plan import plan
from rlhf_nb.scale.topology import decoder_shape, job_of
from rlhf_nb.train.registry import get
from rlhf_nb.train.stage import make_trainer

SINGLE = {name: path for name, path in recipes().items() if recipe_kind(path) != "run"}
MACHINES = {"t4": (16.0, 1), "gpu24": (24.0, 1), "node8": (80.0, 8)}  # GiB of a GPU, how many
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "num_attention_heads": 14, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "intermediate_size": 8960, "num_attention_heads": 12, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "intermediate_size": 18944, "num_attention_heads": 28, "tie_word_embeddings": False},
}  # fmt: skip

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model of some ten thousand parameters that knows the words of the problems, in the hub's layout."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    pattern = r"\d|\w+|\s|[^\w\s]"
    texts = [p.text for p in problems(2000)] + ["user: assistant:\n 0123456789", *STORIES]
    words = ["<pad>", "<eos>", "<unk>", *sorted({w for text in texts for w in re.findall(pattern, text)})]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = TEMPLATE
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            max_position_embeddings=4096,
            eos_token_id=1,
            pad_token_id=0,
            bos_token_id=None,
            **shape,
        )
    )
    folder = tmp_path_factory.mktemp("small")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_there_is_one_for_each_machine_and_method() -> None:
    wanted = {f"{place}_{method}" for place in ("smollm2", *MACHINES) for method in ("sft", "dpo", "grpo", "ppo")}
    assert wanted | {"legs_sft", "legs_process"} == set(SINGLE)


@pytest.mark.parametrize("name", sorted(SINGLE))
def test_a_recipe_loads_says_what_it_does_and_satisfies_the_doctor(name: str, small: Path, tmp_path: Path) -> None:
    path, kind = SINGLE[name], recipe_kind(SINGLE[name])
    text = path.read_text(encoding="utf-8")
    comment = [line for line in text.splitlines() if line.startswith("#")]
    command = re.search(r"rlhf-nb (?:launch )?(\w+) --config (\w+)", comment[0])
    assert 5 <= len(comment) <= 10 and command and command.groups() == (kind, name)
    cfg = get(kind).config.load(path)
    assert cfg.output_dir == f"runs/{name}" and cfg.data.path == ("legs" if name.startswith("legs") else "sums")
    here = cfg.replace(
        model=cfg.model.replace(name_or_path=str(small)),
        output_dir=str(tmp_path / "run"),
        device="cpu",
        precision="auto",
    )
    assert [f.what for f in doctor(here) if f.level == "error"] == []


@pytest.mark.parametrize("name", sorted(n for n in SINGLE if n.split("_")[0] in MACHINES))
def test_a_recipe_for_gpus_fits_on_them_by_the_planner(name: str) -> None:
    from transformers import Qwen2Config

    cfg = get(recipe_kind(SINGLE[name])).config.load(SINGLE[name])
    size = next(k for k in SHAPES if k in cfg.model.name_or_path)
    shape = decoder_shape(Qwen2Config(vocab_size=152_064, num_key_value_heads=2 if size != "7B" else 4, **SHAPES[size]))
    memory, gpus = MACHINES[name.split("_")[0]]
    half = torch.float16 if name.startswith("t4") else torch.bfloat16
    job = job_of(cfg, Precision(torch.device("cuda"), half, torch.float32, half, False, "a GPU"))
    found = plan(shape, job, gpus, memory)
    assert found.job.token_budget == cfg.token_budget and found.budget.peak < 0.9 * memory * 2**30


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "ppo", "kto", "reward"])
def test_the_word_problems_train_any_method(kind: str, small: Path, tmp_path: Path) -> None:
    path = SINGLE.get(f"smollm2_{kind}")
    words = [
        f"model.name_or_path={small}", f"output_dir={tmp_path}", "data.path=sums", "steps=1", "epochs=null", "mini_batch_size=8",
        "data.max_prompt_length=96", "data.max_length=128", "console=false", "device=cpu",
    ]  # fmt: skip
    if get(kind).online:
        words += ["rollout_batch_size=8", "sampling.max_new_tokens=4"]
    trainer = make_trainer(get(kind).config.load(path, words))
    trainer.held_out = trainer.held_out[:8]
    event = trainer.train_step()
    assert event["step"] == 1 and event["loss"] == event["loss"]
    if get(kind).online:
        assert trainer.method.rewards.names == ["right"]


def test_held_out_sums_are_never_trained_on() -> None:
    for kind in ("sft", "preference", "prompt", "unpaired"):
        rows, held = made_rows("sums", kind, 3) or ([], [])  # type: ignore[arg-type]

        def asked(row: dict[str, Any]) -> frozenset[str]:
            return frozenset(re.findall(r"\d+", row["prompt"][0]["content"]))

        assert rows and held and not {asked(r) for r in rows} & {asked(r) for r in held}
        assert made_rows("sums", kind, 4)[1] == held  # type: ignore[arg-type, index]
    judge = Number("answer")
    some = problems(20)
    assert judge([p.text for p in some], [f"{p.answer}" for p in some], answer=[p.answer for p in some]) == [1.0] * 20
    assert judge([p.text for p in some], [f"{p.has}" for p in some], answer=[p.answer for p in some]) == [0.0] * 20


def test_a_recipe_given_to_another_command_says_whose_it_is() -> None:
    for command, name, wanted in (
        ("run", "smollm2_grpo", "rlhf-nb grpo --config smollm2_grpo"),
        ("dpo", "toy_dpo", "rlhf-nb run --config toy_dpo"),
    ):
        result = CliRunner().invoke(app, [command, "--config", name])
        assert result.exit_code == 1 and wanted in result.output


def test_the_demo_with_a_real_model_asks_trains_and_asks_again(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    words = [
        f"model.name_or_path={small}",
        "steps=1",
        "rollout_batch_size=8",
        "mini_batch_size=8",
        "sampling.max_new_tokens=3",
        "device=cpu",
    ]
    result = CliRunner().invoke(app, ["demo", "--real", "--output-dir", str(folder), *words])
    assert result.exit_code == 0, result.output
    for said in ("1. Before", "step  1 of 1", "3. After", "Ten questions", "before, ", f"{folder}/model"):
        assert said in result.output
    found = json.loads((folder / "results.json").read_text())
    assert found["before"]["asked"] == len(found["answers"]) == 128 and 0 <= found["after"]["share"] <= 1
    again = CliRunner().invoke(app, ["demo", "--real", "--output-dir", str(folder), *words])
    assert again.exit_code == 0  # an earlier demo is replaced
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("data: {path: mine.jsonl}")
    (tmp_path / "mine" / "metrics.jsonl").write_text('{"type": "step", "step": 1}\n')
    refused = CliRunner().invoke(app, ["demo", "--real", "--output-dir", str(tmp_path / "mine"), *words])
    assert refused.exit_code == 1 and "no demo" in refused.output
    typo = CliRunner().invoke(app, ["demo", "--real", "stepss=3"])
    assert typo.exit_code == 1 and "Did you mean 'steps'?" in typo.output


def test_doctor_and_plan_say_what_a_step_costs_here_and_what_is_lighter(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rlhf_nb.scale.cost as cost

    words = [
        f"model.name_or_path={small}",
        f"output_dir={tmp_path}",
        "device=cpu",
        "critic=separate",
        "num_generations=1",
    ]
    words += ["model.lora=null"]
    said = CliRunner().invoke(app, ["plan", "ppo", "--config", "smollm2_ppo", *words, "--gpus", "1"]).output
    assert "On this machine" not in said  # a small model's step is no matter
    monkeypatch.setattr(cost, "_LARGE", 1000)
    said = CliRunner().invoke(app, ["plan", "ppo", "--config", "smollm2_ppo", *words, "--gpus", "1"]).output
    line = next(line for line in said.splitlines() if line.startswith("On this machine"))
    assert re.search(r"a step takes about \d+\.\d s .*and \d+\.\d GB\.$", line)
    assert "num_generations=8" in said or "critic=shared" in said
    findings = doctor(get("ppo").config.load(SINGLE["smollm2_ppo"], words))
    assert any("a step takes about" in f.what for f in findings)


def test_a_step_with_more_work_costs_more() -> None:
    from transformers import LlamaConfig

    from rlhf_nb.scale.cost import Speed, step_cost
    from rlhf_nb.scale.topology import Job, decoder_shape

    shape = decoder_shape(
        LlamaConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, vocab_size=512)
    )
    unit = Speed(1e-4, 3e-4, 1e-5, 3e-5, 1e-4, 1e-5, 0.0)

    def seconds(holds: tuple[Any, ...], group: int, inner: int = 1, method: str = "ppo") -> float:
        job = Job(
            method, 64, 16, token_budget=2048, mini_batch=64, rollout_batch=64, group=group, holds=holds, device="cpu"
        )
        return step_cost(shape, job, job, unit, inner).seconds

    shared, separate = ("policy", "reference"), ("policy", "critic", "reference")
    assert seconds(shared, 8) < 0.7 * seconds(shared, 1)
    assert seconds(shared, 1) < seconds(separate, 1) < seconds(separate, 1, inner=2)
    assert seconds(("policy",), 8, method="grpo") < seconds(shared, 8)
