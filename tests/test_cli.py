"""The command line: settings in and out, a model that answers, the doctor; quick, on tiny models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from rlhf_nb.cli.main import app, find_config, recipe_kind, recipes
from rlhf_nb.config import ModelConfig
from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.models.load import save_model
from rlhf_nb.pipeline.doctor import check_memory, check_threads, doctor, estimate_memory
from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
from rlhf_nb.train.ppo import PPOConfig
from rlhf_nb.train.reward import RewardConfig
from rlhf_nb.train.sft import SFTConfig
from rlhf_nb.train.stage import read_json

torch.set_num_threads(1)  # small models, and other tests beside these
runner = CliRunner()
CONFIGS = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "run": PipelineConfig}
QUESTION = "Visitor: Where do owls live?\nPip:"


def call(*args: str, code: int = 0) -> str:
    """Run a command; returns what it printed (standard error included) after checking its exit code."""
    result = runner.invoke(app, list(args))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved untrained model."""
    return save_model(toy.build_model(0, "tiny"), toy.build_tokenizer(), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("preset", ["default", "toy"])
@pytest.mark.parametrize("kind", list(CONFIGS))
def test_config_show_and_init_give_back_the_config(kind: str, preset: str, tmp_path: Path) -> None:
    toy_flag = ["--toy"] if preset == "toy" else []
    wanted = CONFIGS[kind].load(None, ["seed=3"], preset)
    shown = call("config", "show", kind, "seed=3", *toy_flag)
    assert CONFIGS[kind].model_validate(yaml.safe_load(shown)) == wanted
    commented = tmp_path / "mine.yaml"
    commented.write_text(call("config", "init", kind, *toy_flag))
    assert "#" in commented.read_text()
    assert CONFIGS[kind].load(commented, ["seed=3"]) == wanted
    assert call("config", "show", kind, "seed=3", "--config", str(commented)) == shown


def test_recipes_are_found_by_name_and_valid() -> None:
    assert "hh_small" in recipes() and find_config("hh_small") == recipes()["hh_small"]
    for path in recipes().values():
        if recipe_kind(path) == "run":  # those of single methods: test_recipes.py
            assert PipelineConfig.load(path).sft is not None
            assert "/" not in str(PipelineConfig.load(path).data)
    assert "hh_small" in call("config", "show", "run", "--config", "hh_smal", code=1)


def test_help_names_every_command() -> None:
    shown = call("--help")
    for command in ("demo", "sft", "reward", "ppo", "run", "sample", "config", "doctor"):
        assert command in shown
        call(command, "--help")


def test_module_is_the_same_program(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rlhf_nb", "config", "show", "sft", "sed=1"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.strip().splitlines() == ["Error: sed: unknown key 'sed'. Did you mean 'seed'?"]


def test_sample_answers_and_repeats_itself(tiny_model: Path) -> None:
    args = ["sample", str(tiny_model), QUESTION.replace("\n", "\\n"), "Visitor: Tell me about bears.\nPip:"]
    first = call(*args, "--n", "2", "--max-new-tokens", "6", "--seed", "1")
    assert first.count("→") == 4 and QUESTION in first
    assert call(*args, "--n", "2", "--max-new-tokens", "6", "--seed", "1") == first
    assert call(*args, "--max-new-tokens", "6", "--greedy").count("→") == 2


def test_sample_from_nothing_is_one_sentence() -> None:
    shown = call("sample", "./no-such-model", "hello", code=1)
    assert shown.startswith("Error:") and "no-such-model" in shown and len(shown.strip().splitlines()) == 1


def test_a_stage_from_the_command_line_leaves_a_model_that_answers(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({k: r[k] for k in ("prompt", "completion")}) + "\n" for r in toy.sft_rows(40)))
    run = tmp_path / "run"
    options = [f"data.path={data}", f"output_dir={run}", "steps=3", "mini_batch_size=8", "console=false"]
    assert str(run / "model") in call("sft", "--toy", *options)
    assert read_json(run / "stage.json")["stage"] == "sft"
    assert "→" in call("sample", str(run / "model"), QUESTION, "--max-new-tokens", "4")


def test_pipeline_runs_resumes_and_refuses(tmp_path: Path) -> None:
    over = {
        "output_dir": str(tmp_path / "run"), "console": False, "eval_prompts": 8, "questions": 2, "base": {"size": "tiny"},
        "sft": {"steps": 2}, "reward": {"steps": 2}, "ppo": {"steps": 1, "rollout_batch_size": 16, "mini_batch_size": 16},
    }  # fmt: skip
    config = PipelineConfig.preset("toy", **over)
    said: list[str] = []
    results = RLHFPipeline(config, said.append).run()
    assert set(results["policies"]) == {"base", "sft", "ppo"} and len(results["samples"]) == 2
    assert {"gold", "proxy", "kl", "win_rate_gold"} <= set(results["policies"]["ppo"])
    assert "ppo" in (tmp_path / "run/report.html").read_text()
    assert read_json(tmp_path / "run/results.json") == json.loads(json.dumps(results))
    with pytest.raises(Exception, match="already holds a pipeline"):
        RLHFPipeline(config, said.append).run()
    with pytest.raises(Exception, match="sft was finished with other settings"):
        RLHFPipeline(config.replace(sft={"steps": 3}), said.append).run(resume=True)

    # as if it had been killed between the reward model and PPO: what is finished is skipped, the rest comes out the same
    (tmp_path / "run/ppo/stage.json").unlink()
    said.clear()
    again = RLHFPipeline(config, said.append).run(resume=True)
    assert [s for s in said if "skipped" in s] == [f"{s}: finished before, skipped." for s in ("base", "sft", "reward")]
    assert again["policies"] == results["policies"]
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    for stage in ("base", "sft", "ppo"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "run" / stage / "model")
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/reward/model").num_labels == 1


def levels(config: object) -> dict[str, str]:
    """The doctor's findings: what -> level."""
    return {f.what: f.level for f in doctor(config)}


def level_of(found: dict[str, str], word: str) -> str:
    """The level of the one finding that has a word in it."""
    hits = [level for what, level in found.items() if word in what]
    assert len(hits) == 1, (word, found)
    return hits[0]


def test_doctor_finds_what_is_wrong(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = toy.build_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side, tokenizer.chat_template = tokenizer.eos_token, "right", None
    save_model(toy.build_model(0, "tiny"), tokenizer, tmp_path / "model")
    config_file = tmp_path / "model/config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"attention_dropout": 0.1}))
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Where do owls live?"},
                {"role": "assistant", "content": "Owls live in the forest."},
            ]
        }
    ]
    (tmp_path / "chat.jsonl").write_text(json.dumps(rows[0]) + "\n")
    found = levels(
        SFTConfig(model={"name_or_path": str(tmp_path / "model")}, data={"path": str(tmp_path / "chat.jsonl")})
    )
    assert level_of(found, "PAD is EOS") == "note" and level_of(found, "chat template") == "error"
    assert level_of(found, "pads on the right") == "note" and level_of(found, "dropout") == "note"

    short = levels(SFTConfig.preset("toy", data={"max_length": 16, "max_prompt_length": 8}))
    assert level_of(short, "rows are cut") == "warning"
    long = [{"prompt": "Visitor: " + "owls " * 300, "completion": " Owls live in the forest."}]
    (tmp_path / "long.jsonl").write_text(json.dumps(long[0]) + "\n")
    window = levels(
        SFTConfig.preset(
            "toy", data={"path": str(tmp_path / "long.jsonl"), "max_prompt_length": 400, "max_length": 500}
        )
    )
    assert level_of(window, "window has 128") == "error"

    ppo = levels(PPOConfig.preset("toy", reward="gold", sampling={"top_p": 0.9, "temperature": 0.7}))
    assert level_of(ppo, "filtered (top_p=0.9)") == "warning" and level_of(ppo, "temperature") == "note"
    assert level_of(levels(PPOConfig.preset("toy")), "reward is not set") == "error"
    assert "no bf16" not in str(ppo) and not any(v == "error" for v in ppo.values())
    assert (
        level_of(levels(SFTConfig.preset("toy", data={"path": str(tmp_path / "none.jsonl")})), "none.jsonl") == "error"
    )


def test_doctor_on_the_command_line() -> None:
    assert "error" not in call("doctor", "sft", "--toy")
    assert "reward=proxy" in call("doctor", "ppo", "--toy")  # as the training would begin
    assert [f.what for f in doctor(PPOConfig.preset("toy")) if f.level == "error"] == ["reward is not set"]


def test_doctor_counts_threads_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_threads(8, 2)[0].level == "warning" and check_threads(2, 2)[0].level == "ok"
    from rlhf_nb.core import decide_precision

    cpu = decide_precision("cpu")
    small = estimate_memory(toy.toy_model_config("tiny"), PPOConfig.preset("toy"), cpu)
    large = estimate_memory(toy.toy_model_config("large"), PPOConfig.preset("toy"), cpu)
    hydra = estimate_memory(
        toy.toy_model_config("large"), PPOConfig.preset("toy", critic="hydra", model={"lora": {"r": 4}}), cpu
    )
    parts, thin = large.by_role("step"), hydra.by_role("step")
    assert small.peak < large.peak and thin["optimizer"] < 0.2 * parts["optimizer"]
    weights = 4 * sum(p.numel() for p in toy.build_model(0, "large").parameters())
    assert parts["policy"] == parts["reference"] == weights  # and the reward model and the critic have no head
    assert parts["optimizer"] == 2 * (weights + parts["value"]) and parts["value"] == parts["reward"] <= weights
    assert check_memory(large, 0.5 * large.peak)[0].level == "error"
    assert check_memory(large, 10 * large.peak)[0].level == "ok"


def test_doctor_knows_a_gpu_that_only_emulates_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_nb import core
    from rlhf_nb.pipeline import doctor as module

    def t4(device: torch.device) -> core.GPU:
        return core.GPU("Tesla T4", (7, 5), False)

    monkeypatch.setattr(module, "probe_gpu", t4)
    monkeypatch.setattr(
        module, "decide_precision", lambda device, want, **size: core.decide_precision(torch.device("cuda"), want, t4)
    )
    findings, precision = module.check_precision(SFTConfig(model=ModelConfig()))
    assert precision.compute_dtype == torch.float16 and any("no bf16 units" in f.what for f in findings)


def test_demo_twice_in_a_row_and_never_over_another_run(tmp_path: Path) -> None:
    small = [
        "sft.steps=2",
        "reward.steps=2",
        "ppo.steps=1",
        "ppo.rollout_batch_size=16",
        "ppo.mini_batch_size=16",
        "eval_prompts=8",
        "base.size=tiny",
    ]
    folder = tmp_path / "demo"
    shown = [call("demo", "--output-dir", str(folder), *small) for _ in range(2)]
    for text in shown:
        assert "before (SFT)" in text and "after (PPO)" in text and "gold" in text and "nbs/tutorials/" in text
        assert str(folder / "report.html") in text
    assert [line for line in shown[0].splitlines() if "→" in line] == [
        line for line in shown[1].splitlines() if "→" in line
    ]
    assert "skipped" in call("run", "--config", str(folder), "--resume")
    other = tmp_path / "other"
    PipelineConfig(output_dir=str(other), data="mine.jsonl").save(other / "config.yaml")
    assert "no demo" in call("demo", "--output-dir", str(other), *small, code=1)


def test_plan_of_a_config_as_it_is_written(tmp_path: Path) -> None:
    """`config init` leaves the model at null; `plan` asks for one, and takes the toy's by its name, without a folder or a network."""
    path = tmp_path / "run.yaml"
    path.write_text(call("config", "init", "ppo"), encoding="utf-8")
    assert f"  rlhf-nb plan ppo --config {path} model.name_or_path=MODEL\n" in call(
        "plan", "ppo", "--config", str(path), code=1
    )
    named = call("plan", "ppo", "--config", str(path), "model.name_or_path=toy", "--gpus", "8")
    assert "| 8 | 0 |" in named
    assert f"- 8 GPUs: `rlhf-nb launch ppo --config {path} model.name_or_path=toy -n 8 --strategy ddp`" in named


NOTHING_SAID: dict[str, tuple[list[str], str]] = {
    "bare": (["sft"], "sft model.name_or_path=MODEL data.path=FILE"),
    "no data": (["sft", "model.name_or_path=m"], "sft model.name_or_path=m data.path=FILE"),
    "no model": (["dpo", "data.path=f.jsonl"], "dpo data.path=f.jsonl model.name_or_path=MODEL"),
    "reward": (["reward"], "reward model.name_or_path=MODEL data.path=FILE"),
    "ppo": (["ppo", "reward=r"], "ppo reward=r model.name_or_path=MODEL data.path=FILE"),
    "grpo": (["grpo"], "grpo model.name_or_path=MODEL data.path=FILE reward=FOLDER"),
    "rlaif": (["rlaif"], "rlaif model.name_or_path=MODEL data.path=FILE"),
    "pipeline": (["run"], "run sft.model.name_or_path=MODEL data=FILE"),
    "recipe": (["run", "--config", "hh_small"], "run --config hh_small data=FILE"),
    "doctor": (["doctor", "kto"], "doctor kto model.name_or_path=MODEL data.path=FILE"),
    "launch": (["launch", "sft", "-n", "2"], "launch sft model.name_or_path=MODEL data.path=FILE"),
}


@pytest.mark.parametrize("name", NOTHING_SAID)
def test_a_toy_only_for_who_asks_for_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an invented model nor invented data: the two lines that can be typed, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    args, line = NOTHING_SAID[name]
    said = call(*args, code=1).rstrip("\n")
    words = [w for w in args if not w.startswith("-")]
    kind = " ".join(words[:2] if words[0] in ("doctor", "launch") else words[:1])
    assert said.splitlines()[1:] == [f"  rlhf-nb {line}", f"  rlhf-nb {kind} --toy"], said
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_without_rows_asks_for_them() -> None:
    """In Python, too."""
    from rlhf_nb.data import toy
    from rlhf_nb.train.sft import SFTConfig, SFTTrainer

    with pytest.raises(ConfigError, match=r"model\.name_or_path is null.*'toy'"):
        SFTTrainer(SFTConfig())
    with pytest.raises(ConfigError, match=r"data\.path is null.*rows="):
        SFTTrainer(SFTConfig(), toy.build_model(), toy.build_tokenizer())
    with pytest.raises(ConfigError, match=r"sft\.model\.name_or_path and data must be set"):
        RLHFPipeline(PipelineConfig(reward=None, ppo=None)).run()


def test_a_mistyped_command_is_answered_once() -> None:
    said = call("rum", code=2)
    assert said.count("Did you mean") == 1 and "'run'" in said


@pytest.mark.parametrize(("kind", "said"), [("run", "stage by stage"), ("rlaif", "trains nothing")])
def test_what_cannot_be_planned_is_said(kind: str, said: str) -> None:
    assert said in call("plan", kind, code=1)
