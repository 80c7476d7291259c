"""`plan --rollouts`: what it reads from a run, what it predicts of others, and how far measured runs are from that."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import forked
import pytest
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import DataError
from rlhf_nb.data import toy
from rlhf_nb.rollout import workers as rollout_workers
from rlhf_nb.rollout.backends import OurSampler
from rlhf_nb.rollout.episodes import Step
from rlhf_nb.run.log import read_metrics
from rlhf_nb.scale.overlap import StepTimes, overlap, overlap_table, step_times
from rlhf_nb.train.raft import RAFTConfig, RAFTTrainer


class Elsewhere(OurSampler):
    """A sampler whose model computes elsewhere: each answer takes 0.08 s and no core of ours."""

    def answer(self, model: Any, request: Any) -> Any:
        time.sleep(0.08 * len(request.prompts) * request.num_samples)
        return super().answer(model, request)


class Asks:
    """An environment that thinks for 0.3 s about each of two turns."""

    def reset(self, row: Any, seed: int) -> None:
        return None

    async def step(self, turn: Any) -> Step:
        await asyncio.sleep(0.3)
        return Step("And then?", done=turn.number == 2)


def measured(folder: Path, lag: int, workers: int, sleep: float, rest: float, plays: bool) -> tuple[float, float]:
    """The shares of time in which the learner and the workers wait.

    Args:
        folder, lag, workers: of the run.
        sleep: seconds of its reward; rest: of the learner, beside what it computes.
        plays: answers are episodes; otherwise a model elsewhere draws.
    """

    def late(prompts: Any, completions: Any, **columns: Any) -> Any:
        time.sleep(sleep)
        return toy.gold_reward(prompts, completions, **columns)

    settings: dict[str, Any] = {
        "steps": 14, "epochs": None, "rollout_batch_size": 8, "mini_batch_size": 4, "num_generations": 4, "console": False,
        "sampling": {"max_new_tokens": 16 if plays else 6}, "device": "cpu", "rollouts": {"lag": lag, "workers": workers},
    }  # fmt: skip
    config = RAFTConfig.preset("toy", output_dir=str(folder), save_every=None, **settings)
    model, parts = toy.build_model(0, "tiny"), {"environment": Asks} if plays else {}
    model.generation_config.eos_token_id = list(range(2, 400, 6))  # an untrained model ends its turns
    t = RAFTTrainer(config, model, toy.build_tokenizer(), reward=late, rows=toy.train_prompts(16), **parts)
    t.method.sampler = t.method.sampler if plays else Elsewhere()
    t.method.finish_step = lambda step: time.sleep(rest)
    t.fit()
    events = [e for e in read_metrics(folder) if e["type"] == "step"][3 : -lag or None]  # nothing is drawn at the end
    took = sum(e["perf/step_s"] for e in events)
    learner, generator = (
        sum(e.get(f"perf/{k}", 0.0) * e["perf/step_s"] for e in events) / took
        for k in ("learner_idle", "generator_idle")
    )
    return learner, generator


RUNS = [  # lag, workers, seconds of the reward and of the rest, whether answers are episodes
    (2, 0, 0.7, 0.5, False), (1, 2, 0.7, 0.5, False), (2, 2, 0.7, 0.5, False),
    (1, 0, 0.3, 0.9, True), (0, 2, 0.3, 0.9, True), (2, 1, 1.2, 0.5, True),
]  # fmt: skip


@pytest.mark.slow  # three minutes on the clock, most of them asleep
@pytest.mark.filterwarnings("ignore:rollouts.lag is:UserWarning")
def test_six_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six runs with other lags, workers, rewards and lengths the idle shares, within 10 points: from a run without a
    lag, and where answers are episodes from the run itself, too."""
    monkeypatch.setattr(rollout_workers, "CONTEXT", forked.context())
    plain, wrong = dict[Any, StepTimes](), list[Any]()
    for i, (lag, workers, *how) in enumerate(RUNS):
        key = tuple(how)
        if key not in plain:
            measured(tmp_path / f"plain-{i}", 0, 0, *how)
            plain[key] = step_times(tmp_path / f"plain-{i}")
        found = measured(tmp_path / f"{i}", lag, workers, *how)
        for times in (plain[key], *([step_times(tmp_path / f"{i}")] if how[-1] else [])):
            told = overlap(times, lag, workers, cores=8)[3:]
            print(lag, workers, *how, [f"{x:.2f}" for x in told], [f"{x:.2f}" for x in found])
            wrong += [(i, told, found)] if any(abs(a - b) > 0.1 for a, b in zip(told, found)) else []
    assert not wrong


def test_the_command(tmp_path: Path) -> None:
    step = {"type": "step", "perf/step_s": 3.0, "perf/generate_s": 1.0, "perf/collect_s": 2.0, "perf/update_s": 0.9}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step | {"step": i}) + "\n" for i in range(1, 6)))
    done = CliRunner().invoke(app, ["plan", "--rollouts", str(tmp_path)])
    assert done.exit_code == 0 and "times as fast as without" in done.output, done.output
    empty = CliRunner().invoke(app, ["plan", "--rollouts", str(tmp_path / "none")])
    assert empty.exit_code == 1 and "has no step after the first 2" in " ".join(empty.output.split())


ODD = [
    {k: x for k in ("perf/generate_s", "perf/step_s", "perf/collect_s")}
    for x in (0.0, 1e-12, -1.0, 1e300, 10**400, "x", None, [1])
]
ODD += [
    {"perf/generate_s": 1.0, "perf/collect_s": 1.2, "perf/step_s": x}
    for x in ("NaN", "Infinity", "-Infinity", None, {})
]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: str(odd["perf/step_s"])[:20])
def test_times_that_are_none(odd: dict[str, Any], tmp_path: Path) -> None:
    """A damaged log: one sentence. A step that lasts for ever was simulated for ever."""
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"type": "step", "step": i} | odd) + "\n" for i in range(1, 6))
    )
    with pytest.raises(DataError, match="which can't be|in which answers were drawn"):
        overlap_table(tmp_path, 2)
