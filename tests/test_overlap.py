"""`plan --rollouts`: what it reads from a run, what it predicts of others, and how far measured runs are from that."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import forked
import pytest
from test_tickets import make
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import DataError
from rlhf_nb.data import toy
from rlhf_nb.rollout import workers as rollout_workers
from rlhf_nb.rollout.backends import OurSampler
from rlhf_nb.run.log import read_metrics
from rlhf_nb.scale.overlap import overlap, overlap_table, step_times


class Elsewhere(OurSampler):
    """A sampler whose model computes elsewhere: each answer takes 0.08 s and no core of ours."""

    def answer(self, model: Any, request: Any) -> Any:
        time.sleep(0.08 * len(request.prompts) * request.num_samples)
        return super().answer(model, request)


def late(prompts: Any, completions: Any, **columns: Any) -> Any:
    time.sleep(0.7)
    return toy.gold_reward(prompts, completions, **columns)


def measured(folder: Path, lag: int, workers: int) -> tuple[float, float, float]:
    """Seconds a step, and the shares of time in which the learner and the workers wait."""
    t = make("raft", folder, lag, late, steps=16, save_every=None, rollouts={"lag": lag, "workers": workers})
    t.method.sampler = Elsewhere()
    t.method.finish_step = lambda step: time.sleep(0.5)
    t.fit()
    events = [e for e in read_metrics(folder) if e["type"] == "step"][
        3 : -lag or None
    ]  # nothing is drawn any more at the end
    took = sum(e["perf/step_s"] for e in events)
    idle = (
        sum(e.get(f"perf/{k}", 0.0) * e["perf/step_s"] for e in events) / took
        for k in ("learner_idle", "generator_idle")
    )
    learner, generator = idle
    return took / len(events), learner, generator


@pytest.mark.slow  # three minutes on the clock, most of them asleep
@pytest.mark.filterwarnings("ignore:rollouts.lag is:UserWarning")
def test_six_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one run without a lag: the idle shares of six others, within 10 points."""
    monkeypatch.setattr(rollout_workers, "CONTEXT", forked.context())
    measured(tmp_path / "plain", 0, 0)
    times = step_times(tmp_path / "plain")
    print(times)
    wrong = []
    for lag, workers in ((1, 0), (2, 0), (0, 2), (1, 1), (1, 2), (2, 2)):
        told, found = overlap(times, lag, workers, cores=8), measured(tmp_path / f"{lag}-{workers}", lag, workers)
        print(lag, workers, [f"{x:.2f}" for x in told[2:]], [f"{x:.2f}" for x in found])
        if abs(told.learner_idle - found[1]) > 0.1 or abs(told.generator_idle - found[2]) > 0.1:
            wrong.append((told, found))
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
