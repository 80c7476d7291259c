"""Rewards by config: the same list from Python, a file, the command line, a pipeline, several processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command import call
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rlhf_nb.core import ConfigError, RewardError
from rlhf_nb.data import toy
from rlhf_nb.models.heads import RewardModel
from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
from rlhf_nb.run.callbacks import Callback, Flags
from rlhf_nb.run.log import History, read_metrics
from rlhf_nb.scale.cluster import kubernetes_manifest
from rlhf_nb.train.entries import build_rewards, named_files
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer
from rlhf_nb.train.online import load_reward
from rlhf_nb.train.online_dpo import OnlineDPOConfig
from rlhf_nb.train.ppo import PPOConfig, PPOTrainer
from rlhf_nb.train.registry import get
from rlhf_nb.train.rlaif import RLAIFConfig, make_judge
from rlhf_nb.train.rloo import RLOOConfig

REWARDS = """\
LIMIT = 6


def short(prompts, completions):
    return [-abs(len(text.split()) - LIMIT) / 10 for text in completions]


async def ends(prompts, completions, **columns):
    return [float(text.strip().endswith(".")) for text in completions]


def few(prompts, completions):
    return [1.0]
"""
ENTRIES: list[dict[str, Any]] = [
    {"file": "rewards.py", "fn": "short", "weight": 2.0},
    {"file": "rewards.py", "fn": "ends", "name": "stop", "retries": 1},
    {"fn": "rlhf_nb.data.toy:gold_reward", "weight": 0.0},
]


def settings(**over: Any) -> dict[str, Any]:
    """Two small steps in the toy world."""
    return {
        "model": {"name_or_path": "toy"}, "data": {"path": "toy", "max_prompt_length": 64}, "steps": 2, "epochs": None, "mini_batch_size": 8,
        "sampling": {"max_new_tokens": 8}, "device": "cpu", "console": False, "output_dir": "runs/r", "save_every": None,
    } | over  # fmt: skip


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a config file and the rewards beside it."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARDS)
    over = {"output_dir": str(tmp_path / "run"), "num_generations": 4, "rewards": ENTRIES}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings(**over)))
    return folder


def steps(folder: Path) -> list[dict[str, Any]]:
    """The numbers of a run's steps that don't depend on the machine."""
    found = [e for e in read_metrics(folder) if e["type"] == "step"]
    keep = ("step", "loss", "reward", "grad_norm")
    return [{k: v for k, v in e.items() if k in keep or k.startswith("rewards/")} for e in found]


def test_file_command_line_and_python_say_the_same(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = GRPOConfig.load(job / "run.yaml")
    GRPOTrainer(config).fit()
    sys.path.insert(0, str(job))
    space: dict[str, Any] = {}
    exec(compile(REWARDS, "cell", "exec"), space)
    from rlhf_nb.rewards.base import Rewards

    own = Rewards([space["short"], space["ends"], toy.gold_reward], [2.0, 1.0, 0.0], ["short", "stop", "gold_reward"])
    GRPOTrainer(config.replace(output_dir=str(tmp_path / "python"), rewards=[]), reward=own).fit()
    assert steps(tmp_path / "run") == steps(tmp_path / "python")
    assert {"rewards/short", "rewards/stop", "rewards/gold_reward"} <= steps(tmp_path / "run")[0].keys()
    monkeypatch.chdir(job)
    text = "rewards=[{file: rewards.py, fn: short, weight: 2.0}, {file: rewards.py, fn: ends, name: stop, retries: 1}, {fn: 'rlhf_nb.data.toy:gold_reward', weight: 0.0}]"
    typed = GRPOConfig.load(None, [text], "toy")
    monkeypatch.chdir(tmp_path)
    assert typed.rewards == config.rewards and named_files(typed) == [str(job / "rewards.py")]
    assert GRPOConfig.load(tmp_path / "run").rewards == config.rewards  # what the run wrote is read back, from anywhere


@pytest.mark.parametrize("kind", [PPOConfig, RLOOConfig, OnlineDPOConfig], ids=lambda k: k.__name__)
def test_every_online_method_takes_the_list(kind: Any, job: Path, tmp_path: Path) -> None:
    over = {"num_generations": 2} if kind is not PPOConfig else {}
    preset = kind.preset("toy").to_dict() | settings(output_dir=str(tmp_path / "m"), rollout_batch_size=8, **over)
    entries = [e | ({"file": str(job / "rewards.py")} if "file" in e else {}) for e in ENTRIES]
    trainer = get({PPOConfig: "ppo", RLOOConfig: "rloo", OnlineDPOConfig: "online"}[kind]).trainer(
        kind.model_validate(preset | {"rewards": entries, "steps": 1})
    )
    event = trainer.fit()[-1]
    assert -1 < event["rewards/short"] < 0 and "rewards/stop" in event and "rewards/gold_reward" in event


def test_pipeline_with_rewards_of_its_own(job: Path, tmp_path: Path) -> None:
    entries = [{"file": str(job / "rewards.py"), "fn": "short"}]
    base: dict[str, Any] = {
        "data": "toy",
        "base": {},
        "device": "cpu",
        "output_dir": str(tmp_path / "p"),
        "ppo": None,
        "sft": None,
    }
    alone = PipelineConfig.model_validate(base | {"reward": None, "grpo": settings(rewards=entries)})
    plan = RLHFPipeline(alone, say=lambda text: None)
    assert plan.needs("grpo") == ["base"] and plan.stage_config("grpo").reward is None
    with pytest.raises(ConfigError, match="or write grpo.rewards"):
        PipelineConfig.model_validate(base | {"reward": None, "grpo": settings()})
    made = str(tmp_path / "p" / "reward" / "model")
    both = RLHFPipeline(
        PipelineConfig.model_validate(base | {"reward": {}, "grpo": settings(rewards=[*entries, {"model": made}])}),
        say=lambda text: None,
    )
    assert both.needs("grpo") == ["base", "reward"]


def test_a_reward_model_alone_is_what_reward_names(tmp_path: Path) -> None:
    folder = str(tmp_path / "rm")
    RewardModel.from_policy(toy.build_model(0, "tiny"), seed=1).save(folder, toy.build_tokenizer())
    named = PPOConfig.preset("toy", **settings(reward=folder))
    listed = PPOConfig.preset("toy", **settings(rewards=[{"model": folder}]))
    a, b = (load_reward(c)[0] for c in (named, listed))
    assert isinstance(a, RewardModel) and isinstance(b, RewardModel)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y)
    trainer = PPOTrainer(listed.replace(output_dir=str(tmp_path / "a")), reward=[{"model": folder}, toy.gold_reward])
    assert trainer.method.rewards.names == ["reward_model", "gold_reward"]


def test_what_is_wrong_is_said_before_a_model_is_loaded(job: Path) -> None:
    with pytest.raises(ConfigError, match="reward is 'gold', and rewards has 1 entries"):
        GRPOConfig.preset("toy", reward="gold", rewards=[{"verify": "number"}])
    with pytest.raises(ConfigError, match=r"rewards\[1\].*rewards.py has no function 'ednds'. Did you mean 'ends'"):
        build_rewards([{"verify": "number"}, {"file": str(job / "rewards.py"), "fn": "ednds"}])
    (job / "rewards.py").write_text(
        "import json\n\n\ndef f(prompts, completions):\n    return [0.0]\n\n\nf([], [])[1]\n"
    )
    with pytest.raises(ConfigError, match="rewards.py', line 8: IndexError"):
        GRPOTrainer(GRPOConfig.load(job / "run.yaml"))


def test_a_wrong_number_of_scores_names_the_function(job: Path, tmp_path: Path) -> None:
    config = GRPOConfig.load(job / "run.yaml", ["rewards=[{file: " + str(job / "rewards.py") + ", fn: few}]"])
    with pytest.raises(RewardError, match="reward function 'few' returned 1 numbers for 8 completions"):
        GRPOTrainer(config).fit()


def test_pods_must_see_the_file(job: Path) -> None:
    config = GRPOConfig.load(job / "run.yaml")
    how: dict[str, Any] = {"claim": "c", "files": named_files(config)}
    with pytest.raises(ConfigError, match="outside the volume at '/shared': no pod would see it"):
        kubernetes_manifest(["grpo"], "/shared/run", "image", **how)
    assert kubernetes_manifest(["grpo"], str(job / "run"), "image", mount=str(job), **how)


def test_the_command_line_names_the_line(job: Path) -> None:
    (job / "rewards.py").write_text("import math\n\nlimit = math.sqrtt(4)\n")
    said = call("grpo", "--config", job / "run.yaml", code=1)
    assert "rewards[0] (file: rewards.py, fn: short): file" in said and "line 3: AttributeError" in said


class StopAt(Callback):
    """Somebody presses stop after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, run: Any, event: dict[str, Any]) -> Flags | None:
        return Flags(stop=run.step == self.step)


def test_stop_on_ends_at_the_same_step_after_a_resume(job: Path, tmp_path: Path) -> None:
    over = {"steps": 12, "stop_on": {"metric": "reward", "patience": 3, "min_delta": 5.0}, "optimizer": {"lr": 1e-9}}
    config = GRPOConfig.load(job / "run.yaml").replace(**over, output_dir=str(tmp_path / "straight"))
    straight = GRPOTrainer(config).fit()
    assert len(straight) == 4 and "reward has not improved" in str(straight.stopped)
    halves = config.replace(output_dir=str(tmp_path / "halves"))
    assert len(GRPOTrainer(halves, callbacks=[StopAt(2)]).fit()) == 2
    trainer = GRPOTrainer(halves)
    trainer.start(resume=True)
    assert trainer.observers.state_dict()[0]["state"]["waited"] == 1
    (tmp_path / "halves" / "metrics.jsonl").write_text("")  # the checkpoint knows, not the log
    trainer.history = History()
    again = trainer.fit()
    assert trainer.step == 4 and again.stopped == straight.stopped


def test_stop_on_says_when_there_is_nothing_to_look_at(job: Path) -> None:
    with pytest.raises(ConfigError, match="evaluations are made at the end only: set eval_every"):
        GRPOConfig.load(job / "run.yaml", ["stop_on.metric=eval/short"])
    config = GRPOConfig.load(job / "run.yaml", ["stop_on={metric: reward/short, patience: 1}", "steps=2"])
    with pytest.warns(UserWarning, match="no event has the metric 'reward/short'.*Did you mean 'rewards/short'"):
        assert len(GRPOTrainer(config).fit()) == 2


def test_watched_and_judged_by_config(job: Path) -> None:
    rows = [{"prompt": "Visitor: Where do owls live?\nPip:", "chosen": " In forests."}] * 4
    config = GRPOConfig.load(
        job / "run.yaml",
        ["watch=[{fn: 'rlhf_nb.data.toy:gold_reward', name: gold, weight: 3}]", "rewards=[{file: " + str(job / "rewards.py") + ", fn: short}]",
         "eval={metrics: [{file: " + str(job / "rewards.py") + ", fn: ends}], judges: [{model: toy, against: chosen}]}", "steps=1"],
    )  # fmt: skip
    trainer = GRPOTrainer(config, eval_rows=rows)
    event = trainer.fit()[-1]
    assert event["rewards/gold"] < 0 and event["reward"] == pytest.approx(event["rewards/short"], abs=1e-6)
    found = trainer.history.evals[-1]
    assert {"eval/short", "eval/gold", "eval/ends", "eval/judge_wins"} <= found.keys() and 0 < found[
        "eval/judge_wins"
    ] < 1
    assert named_files(config) == [str(job / "rewards.py")]


def test_the_whole_example_of_the_guide(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rlhf_nb.cli.main import app
    from rlhf_nb.data.templates import set_chat_template
    from rlhf_nb.models.load import save_model
    from rlhf_nb.run.log import read_metrics

    text = (Path(__file__).resolve().parent.parent / "docs" / "rewards.md").read_text(encoding="utf-8")
    example = text.split("## A whole run")[1].split("\n## ")[0]
    (tmp_path / "sums.yaml").write_text(re.search(r"```yml\n(.*?)```", example, flags=re.S)[1])  # type: ignore[index]
    (tmp_path / "rewards.py").write_text(re.search(r"```python\n(.*?)```", example, flags=re.S)[1])  # type: ignore[index]
    save_model(toy.build_model(0, "tiny"), set_chat_template(toy.build_tokenizer()), tmp_path / "model", verify=False)
    small = [
        f"model.name_or_path={tmp_path / 'model'}",
        f"output_dir={tmp_path / 'run'}",
        "steps=1",
        "device=cpu",
        "mini_batch_size=16",
        "eval_every=null",
    ]
    result = CliRunner().invoke(app, ["grpo", "--config", str(tmp_path / "sums.yaml"), *small])
    assert result.exit_code == 0, result.output
    step = next(e for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if e["type"] == "step")
    assert {"rewards/right", "rewards/brief"} <= step.keys() and step["reward"] == pytest.approx(
        step["rewards/right"] + 0.2 * step["rewards/brief"], abs=1e-5
    )


def blocks() -> list[str]:
    """The YAML of docs/rewards.md."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "rewards.md").read_text(encoding="utf-8")
    return re.findall(r"```yaml\n(.*?)```", text, flags=re.S)


@pytest.mark.parametrize("block", blocks(), ids=lambda b: b.split("{")[1].split(",")[0].split("}")[0])
def test_the_guides_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SCORE_KEY", "secret")
    if "judge" in yaml.safe_load(block):
        (tmp_path / "label.yaml").write_text(block)
        judge = make_judge(RLAIFConfig.load(tmp_path / "label.yaml"), tokenizer=toy.build_tokenizer())
        assert judge.about({"answer": [5]}).compare(["2 + 3?"], ["It is 5."], ["It is 4."])[0] > 0.7
        return
    (tmp_path / "rewards.py").write_text(REWARDS + "\n\npolite = short\n")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(num_generations=4) | yaml.safe_load(block)))
    config = GRPOConfig.load(tmp_path / "run.yaml")
    model = RewardModel.from_policy(toy.build_model(0, "tiny"), seed=1)
    for entry in config.rewards:
        for folder in [entry.model] if isinstance(entry.model, str) else entry.model or []:
            model.save(folder, toy.build_tokenizer())
        if entry.classifier is not None:
            shape = Qwen2Config(
                vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
                id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1},
            )  # fmt: skip
            Qwen2ForSequenceClassification(shape).save_pretrained(entry.classifier)
            toy.build_tokenizer().save_pretrained(entry.classifier)
    found = load_reward(config)[0]
    assert isinstance(found, RewardModel) or len(found.names) == len(config.rewards)
    rows = [{"prompt": "Visitor: Where do owls live?\nPip:", "chosen": " In forests."}] * 4
    if config.watch:
        trainer = GRPOTrainer(config.replace(eval_every=1), eval_rows=rows)
        trainer.fit()
        keys = {"eval/gold", "eval/repetition", "eval/judge", "eval/labellers_wins"}
        assert keys <= trainer.history.evals[-1].keys()


def test_a_reward_called_length_keeps_its_number(tmp_path: Path) -> None:
    from rlhf_nb.data.shapes import DataNote

    config = settings(num_generations=4, output_dir=str(tmp_path / "run"))
    config |= {"rewards": [{"verify": "length", "unit": "words", "max_length": 1, "name": "length"}]}
    with pytest.warns(DataNote, match="the reward 'length' is eval/length_reward in evaluations"):
        trainer = GRPOTrainer(GRPOConfig(**config), eval_rows=toy.test_prompts(4))
    found = trainer.evaluate()
    assert found["eval/length"] > 1 and -1 <= found["eval/length_reward"] <= 0
