"""AI feedback from prompts to a trained model: the command line, servers that fail, jobs that are killed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from test_judge import Server, said
from typer.testing import CliRunner

from rlhf_nb.cli.main import app, find_config
from rlhf_nb.data import toy
from rlhf_nb.models.load import save_model
from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
from rlhf_nb.run.log import read_metrics
from rlhf_nb.train.rlaif import Labelling, RLAIFConfig
from rlhf_nb.train.stage import read_json

torch.set_num_threads(1)
runner = CliRunner()
SMALL = ["prompts=24", "chunk=8", "check_pairs=16", "sampling.max_new_tokens=10", "console=false"]


def call(*args: str, code: int = 0) -> str:
    """Run a command; returns what it printed after checking its exit code."""
    result = runner.invoke(app, list(args))
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved untrained model."""
    return str(save_model(toy.build_model(0, "tiny"), toy.build_tokenizer(), tmp_path_factory.mktemp("model")))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A judge behind an address that prefers what it is shown first; `down` answers 503 from then on."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = Server(lambda number, body, headers: said("A", [("A", 0.8), ("B", 0.2)]))
    yield made
    made.shutdown()
    made.server_close()


def test_recipe_from_prompts_to_a_better_policy(tmp_path: Path) -> None:
    """The whole of `toy_rlaif`, smaller: SFT, labels by a judge, DPO on them, and gold says that it helped."""
    config = PipelineConfig.load(find_config("toy_rlaif"))
    small = {
        "output_dir": str(tmp_path), "console": False, "eval_prompts": 192, "sft": {"epochs": 1.0}, "rlaif": {"prompts": 960},
        "dpo": {"epochs": 2.0},
    }  # fmt: skip
    results = RLHFPipeline(config.replace(**small)).run()
    labels, before, after = results["stages"]["rlaif"], results["policies"]["sft"], results["policies"]["dpo"]
    assert labels["judge/accuracy"] > 0.75 and labels["gold/agreement"] > 0.65 and labels["judge/position_bias"] > 0.02
    # six trainings, five seeds on two kinds of CPU: gold 0.15 to 0.51 higher
    assert after["gold"] > before["gold"] + 0.05 and after["win_rate_gold"] > 0.5
    made = rows(tmp_path / "rlaif" / "preferences.jsonl")
    assert len(made) == labels["labelled"] and all(r["probability"] > 0.5 for r in made)
    assert sum(r["row"] == 0 for r in made) <= 1


@pytest.mark.parametrize("then", ["dpo", "reward"])
def test_then(then: str, model: str, tmp_path: Path) -> None:
    options = [f"model.name_or_path={model}", f"output_dir={tmp_path / 'run'}", f"then={then}", *SMALL]
    config = RLAIFConfig.load(None, options, "toy")
    from rlhf_nb.pipeline.stages import train_on_labels

    plan = train_on_labels(config)
    quick = {"steps": 2, "mini_batch_size": 4}
    sizes = (
        {"reward": quick, "ppo": {"steps": 1, "rollout_batch_size": 8, "mini_batch_size": 8}}
        if then == "reward"
        else {"dpo": quick}
    )
    results = RLHFPipeline(plan.replace(eval_prompts=8, **sizes)).run()
    assert set(results["stages"]) == {"rlaif", then} | ({"ppo"} if then == "reward" else set())
    assert set(results["policies"]) == {"ppo" if then == "reward" else "dpo"}
    used = RLHFPipeline(plan).stage_config(then)
    assert used.data.path == str(tmp_path / "run/rlaif/preferences.jsonl") and used.model.name_or_path == model


def test_command_labels_and_says_where(model: str, tmp_path: Path) -> None:
    options = ["rlaif", "--toy", f"model.name_or_path={model}", f"output_dir={tmp_path / 'run'}", *SMALL]
    shown = call(*options)
    assert str(tmp_path / "run/preferences.jsonl") in shown and "judge/accuracy" in shown and "flips" in shown
    done = read_json(tmp_path / "run/stage.json")
    assert done["metrics"]["labelled"] == len(rows(tmp_path / "run/preferences.jsonl")) > 0
    assert "already holds a run" in call(*options, code=1)
    assert "other settings (seed: 0 -> 1)" in call(*options, "seed=1", "--resume", code=1)
    before = (tmp_path / "run/preferences.jsonl").read_bytes()
    call(*options, "--resume")
    call(*options, "--overwrite", "chunk=5")
    assert (tmp_path / "run/preferences.jsonl").read_bytes() == before
    assert "judge is not set" in call(
        "rlaif", f"model.name_or_path={model}", f"output_dir={tmp_path / 'none'}", "data.path=toy", code=1
    )
    assert "judge is not set" in " ".join(
        call("doctor", "rlaif", f"model.name_or_path={model}", "data.path=toy", code=1).replace("│", " ").split()
    )
    assert "judge is not set" not in call("doctor", "rlaif", "--toy", f"output_dir={tmp_path / 'none'}")
    call("doctor", "run", "--config", "toy_rlaif", f"output_dir={tmp_path / 'none'}")


def test_endpoint_that_goes_down_loses_nothing(model: str, server: Server, tmp_path: Path) -> None:
    """The server answers, then fails for good: retries, one sentence, what is labelled stays; later it all comes out as it would have."""

    def options(name: str) -> list[str]:
        where = [
            f"judge.endpoint.url={server.url}",
            "judge.endpoint.model=some",
            "judge.model=null",
            f"output_dir={tmp_path / name}",
        ]
        patience = [
            f"judge.endpoint.{k}={v}" for k, v in {"backoff": 0.001, "backoff_max": 0.002, "attempts": 3}.items()
        ]
        return ["rlaif", "--toy", f"model.name_or_path={model}", *where, *patience, *SMALL, "check_pairs=0"]

    def by_length(number: int, body: Any, headers: Any) -> Any:
        text = body["messages"][-1]["content"]
        first, second = text.split("Answer A:\n")[1].split("Reply with")[0].split("Answer B:\n")
        return said("A" if len(first) > len(second) else "B")

    def failing(number: int, body: Any, headers: Any) -> Any:
        return by_length(number, body, headers) if number < fine else (503, {"error": "overloaded"})

    server.answer = by_length
    call(*options("straight"))
    straight, asked = (tmp_path / "straight/preferences.jsonl").read_bytes(), len(server.seen)
    assert straight and all(
        len(r["chosen"]) > len(r["rejected"]) for r in rows(tmp_path / "straight/preferences.jsonl")
    )
    fine = asked + 2 * asked // 3
    server.answer = failing
    shown = call(*options("down"), code=1)
    assert shown.startswith("Error: judge") and "3 tries failed" in shown and "continue with resume" in shown
    assert len(shown.strip().splitlines()) == 1
    kept = (tmp_path / "down/preferences.jsonl").read_bytes()
    assert kept and straight.startswith(kept) and len(kept) < len(straight)
    server.answer, before = by_length, len(server.seen)
    call(*options("down"), "--resume")
    assert (tmp_path / "down/preferences.jsonl").read_bytes() == straight
    paid = len(server.seen) - before
    assert paid <= asked - 2 * asked // 3, "answers that were paid for are kept in the run's folder"


def test_endpoint_that_answers_nonsense(model: str, server: Server, tmp_path: Path) -> None:
    where = [f"judge.endpoint.url={server.url}", "judge.endpoint.model=some", "judge.model=null", "check_pairs=0"]
    options = ["rlaif", "--toy", f"model.name_or_path={model}", *SMALL, *where]
    server.answer = lambda number, body, headers: said("As a language model, I like both.")
    shown = call(*options, f"output_dir={tmp_path / 'both'}")
    assert "labelled 0" in shown  # each asked twice, nobody's opinion is made up
    server.answer = lambda number, body, headers: (200, b"<html>hello</html>")
    shown = call(*options, f"output_dir={tmp_path / 'html'}", code=1)
    assert "is not JSON" in shown and "0 of 24 prompts are labelled" in shown


SLOW = """
import sys, time, torch
torch.set_num_threads(1)
from rlhf_nb.train.rlaif import Labelling, RLAIFConfig
work = Labelling(RLAIFConfig.load(None, sys.argv[1:], "toy"))
ask = work.judge.ask_once
work.judge.ask_once = lambda *a: (time.sleep(0.2), ask(*a))[1]
work.run(resume=True)
"""


def test_killed_labelling_equals_the_straight_one(model: str, tmp_path: Path) -> None:
    """kill -9 at three different moments, resumed each time by a new process."""
    options = [f"model.name_or_path={model}", *SMALL, "prompts=64", "chunk=4"]
    straight = Labelling(RLAIFConfig.load(None, [*options, f"output_dir={tmp_path / 'straight'}"], "toy"))
    want = straight.run()
    folder, kills = tmp_path / "killed", 0
    for wait in (3, 7, 12):
        process = forked.Forked(
            [sys.executable, "-c", SLOW, *options, f"output_dir={folder}"], env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if sum(e["type"] == "step" for e in read_metrics(folder)) >= wait:
                break
            time.sleep(0.01)
        time.sleep(0.05 * (wait % 4))
        process.kill()
        kills += process.wait() != 0
    assert kills == 3
    killed = Labelling(RLAIFConfig.load(None, [*options, f"output_dir={folder}"], "toy"))
    got = killed.run(resume=True)
    assert killed.path.read_bytes() == straight.path.read_bytes()
    assert got == pytest.approx(want)


def test_rewards_judge(model: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def short(prompts, completions, limit, **k):\n    return [float(n) - len(c) for c, n in zip(completions, limit)]\n"
    )
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": r["prompt"], "limit": 40}) + "\n" for r in toy.train_prompts(24)))
    config = tmp_path / "label.yaml"
    config.write_text(
        "judge:\n  rewards:\n    - {file: mine.py, fn: short}\n  clarity: 0.5\n"
    )  # found beside the config
    words = [
        f"model.name_or_path={model}",
        f"data.path={prompts}",
        f"output_dir={tmp_path / 'run'}",
        "device=cpu",
        *SMALL,
    ]
    assert "judge is not set" not in call("doctor", "rlaif", "--config", str(config), *words[:3])
    call("rlaif", "--config", str(config), *words)
    labels = rows(tmp_path / "run" / "preferences.jsonl")
    assert labels and all(len(r["chosen"]) < len(r["rejected"]) for r in labels)
    said = call(
        "rlaif",
        "--config",
        str(config),
        *words[:2],
        f"output_dir={tmp_path / 'other'}",
        *SMALL,
        "data.columns={limit: null}",
        code=1,
    )
    assert "'limit', which the data lacks" in said


def test_rewards_compare_with_a_column_at_evaluations(tmp_path: Path) -> None:
    from rlhf_nb import GRPOConfig, GRPOTrainer

    duel = {"name": "shorter", "against": "theirs", "rewards": [{"verify": "length", "unit": "words", "max_length": 3}]}
    config = GRPOConfig.preset(
        "toy", output_dir=str(tmp_path / "run"), eval={"judges": [duel]}, steps=1, mini_batch_size=8, console=False
    )
    held = [r | {"theirs": "far too many words for this"} for r in toy.test_prompts(4)]
    trainer = GRPOTrainer(
        config, toy.build_model(0, "tiny"), toy.build_tokenizer(), toy.gold_reward, toy.train_prompts(8), held
    )
    assert 0 <= trainer.evaluate()["eval/shorter_wins"] <= 1
