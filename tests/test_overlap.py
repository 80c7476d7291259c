"""`plan --rollouts`: what it reads from a run, what it predicts of others, and how far measured runs are from that."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import DataError
from rlhf_nb.data import toy
from rlhf_nb.rollout import workers as rollout_workers
from rlhf_nb.rollout.episodes import Step
from rlhf_nb.run.log import read_metrics
from rlhf_nb.scale.overlap import StepTimes, overlap, overlap_table, step_times
from rlhf_nb.train.raft import RAFTConfig, RAFTTrainer


class Asks:
    """An environment that thinks about each of two turns, in one episode of eight much longer."""

    def __init__(self, usual: float, rare: float) -> None:
        self.usual, self.rare = usual, rare

    def reset(self, row: Any, seed: int) -> None:
        self.late = seed % 8 == 0

    async def step(self, turn: Any) -> Step:
        await asyncio.sleep(self.rare if self.late and turn.number == 1 else self.usual)
        return Step("And then?", done=turn.number == 2)

    def close(self) -> None:
        pass


def measured(folder: Path, lag: int, workers: int, judge: list[float], rest: float, tool: Any) -> tuple[float, float]:
    """The shares of time in which the learner and the workers wait.

    Args:
        folder, lag, workers: of the run.
        judge: seconds of its reward, by turns; rest: of the learner, beside what it computes.
        tool: seconds of an environment, usually and rarely; None: there is none.
    """
    asked = itertools.count()

    def late(prompts: Any, completions: Any, **columns: Any) -> Any:
        time.sleep(judge[next(asked) % len(judge)])
        return toy.gold_reward(prompts, completions, **columns)

    settings: dict[str, Any] = {
        "steps": STEPS, "epochs": None, "rollout_batch_size": 16, "mini_batch_size": 16, "num_generations": 4,
        "console": False, "sampling": {"max_new_tokens": 16}, "device": "cpu", "rollouts": {"lag": lag, "workers": workers},
    }  # fmt: skip
    config = RAFTConfig.preset("toy", output_dir=str(folder), save_every=None, **settings)
    model, parts = toy.build_model(0, "tiny"), {"environment": partial(Asks, *tool)} if tool else {}
    model.generation_config.eos_token_id = list(range(2, 400, 6))  # an untrained model ends its turns
    t = RAFTTrainer(config, model, toy.build_tokenizer(), reward=late, rows=toy.train_prompts(16), **parts)
    t.method.finish_step = lambda step: time.sleep(rest)
    t.fit()
    events = [e for e in read_metrics(folder) if e["type"] == "step"][2 : -lag or None]  # nothing is drawn at the end
    took = sum(e["perf/step_s"] for e in events)
    learner, generator = (
        sum(e.get(f"perf/{k}", 0.0) * e["perf/step_s"] for e in events) / took
        for k in ("learner_idle", "generator_idle")
    )
    return learner, generator


STEPS = 14
RUNS = [  # lag, workers, seconds of the reward and of the rest, and of an environment
    (1, 0, [0.8], 0.5, None), (2, 1, [1.2], 0.5, (0.3, 0.3)), (0, 2, [0.5], 0.6, (0.3, 0.3)),
    (1, 2, [0.3], 0.8, (0.2, 1.6)), (2, 1, [0.3], 0.6, (0.2, 1.6)), (2, 2, [0.3, 0.3, 0.3, 2.4], 0.5, None),
]  # fmt: skip


@pytest.mark.slow  # four minutes on the clock, most of them asleep
@pytest.mark.filterwarnings("ignore:rollouts.lag is:UserWarning")
def test_six_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six runs (a judge or a tool that waits, a long tail of either) the idle shares, within 10 points: as told by a
    run of the same kind without lag and workers, and by the run itself."""
    monkeypatch.setattr(rollout_workers, "CONTEXT", forked.context())
    wrong = list[Any]()
    for i, (lag, workers, *how) in enumerate(RUNS):
        measured(tmp_path / f"plain-{i}", 0, 0, *how)
        found = measured(tmp_path / f"{i}", lag, workers, *how)
        for name in (f"plain-{i}", f"{i}"):
            told = overlap(step_times(tmp_path / name), lag, workers, cores=8, steps=STEPS * 4)[3:]
            print(lag, workers, *how, name, [f"{x:.2f}" for x in told], [f"{x:.2f}" for x in found], flush=True)
            wrong += [(name, told, found)] if any(abs(a - b) > 0.1 for a, b in zip(told, found)) else []
    assert not wrong


def test_long_tails_by_hand() -> None:
    """Only one of two workers has the slow episode; and one slow judgement in four steps is waited for, though four
    steps on average would hide it."""
    found = overlap([StepTimes(0.0, 2.0, 0.5, 0.0, 1.0)], 0, 2, cores=8)
    assert found[2:] == pytest.approx((3.0, 2 / 3, 1 - 2.5 / 6))
    times = [StepTimes(0.0, 0.0, 0.0, 3.0 * (step == 3), 1.0) for step in range(4)]
    assert overlap(times, 2, 0, cores=8)[2:4] == pytest.approx((1.25, 0.2))


def test_the_command(tmp_path: Path) -> None:
    step = {"type": "step", "perf/step_s": 3.0, "perf/generate_s": 1.0, "perf/wait_rewards_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step | {"step": i}) + "\n" for i in range(1, 6)))
    done = CliRunner().invoke(app, ["plan", "--rollouts", str(tmp_path)])
    assert done.exit_code == 0 and "times as fast as without" in done.output, done.output
    empty = CliRunner().invoke(app, ["plan", "--rollouts", str(tmp_path / "none")])
    assert empty.exit_code == 1 and "has no step after the first 2" in " ".join(empty.output.split())


def test_odd_steps_are_left_out(tmp_path: Path) -> None:
    """A step that did nothing but wait, and an old one that drew for longer than it took."""
    fine = {"type": "step", "perf/step_s": 3.0, "perf/generate_s": 1.0, "perf/wait_rewards_s": 1.0}
    waits = {"type": "step", "perf/step_s": 2.0, "perf/workers_s": 2.0, "perf/wait_answers_s": 2.0}
    old = {"type": "step", "perf/step_s": 3.0, "perf/generate_s": 4.0, "perf/collect_s": 9.0}
    each = [fine, fine, fine, waits, old, fine]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e | {"step": i}) + "\n" for i, e in enumerate(each, 1)))
    assert step_times(tmp_path) == [StepTimes(1.0, 0.0, 0.0, 1.0, 1.0)] * 2 and overlap_table(tmp_path, 2)


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
