"""The "reward" light, counted on the curves of real runs (`benchmarks/reward_light.py`); simulated ones are in test_looks.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_nb.run.health import CHECKS, health_of
from rlhf_nb.widgets.reader import RunReader

ROOT = Path(__file__).resolve().parent.parent
_SPEC = importlib.util.spec_from_file_location("reward_light", ROOT / "benchmarks" / "reward_light.py")
assert _SPEC is not None and _SPEC.loader is not None
bench: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)

CURVES = json.loads((ROOT / "docs" / "figures" / "reward_light.json").read_text(encoding="utf-8"))
FAIR = [bench.real(r) for r in CURVES if r["kind"] == "fair"]
FREE = [bench.real(r) for r in CURVES if r["kind"] == "free"]


def test_no_false_alarm_in_real_runs_that_are_fine() -> None:
    assert len(FAIR) >= 20
    assert sum(bool(bench.alarms(run)) for run in FAIR) <= 0.02 * len(FAIR)


def test_runs_without_a_price_of_drift_are_seen() -> None:
    """14 of 20 before gold has lost half a standard deviation, all in the end: what few false alarms cost (results.md)."""
    lost = [bench.lost_at(run) for run in FREE]
    assert all(x is not None for x in lost)
    assert sum(x is not None and x < bench.LOSS for x in lost) >= 0.6 * len(FREE) > 9


def curves(n: int, falls: bool) -> dict[str, tuple[Any, Any]]:
    t = np.arange(1.0, n + 1)
    gold = np.where(t < n / 2, t, n - t if falls else t) + np.random.default_rng(0).normal(0, 0.5, n)
    return {"objective/scores": (t, t), "rewards/gold": (t, gold)}


def test_only_checkpoints_that_exist_are_named() -> None:
    state, text = CHECKS["reward"](curves(40, True), {})  # type: ignore[misc]
    assert state == "bad" and "go back" not in text and "Raise kl_coef" in text
    text = CHECKS["reward"](curves(40, True), {"checkpoints": [5, 16, 39]})[1]  # type: ignore[index]
    assert "the checkpoint of step 16" in text
    assert CHECKS["reward"](curves(40, False), {})[0] == "ok"  # type: ignore[index]


def test_a_run_directory_says_which_checkpoints_it_has(tmp_path: Path) -> None:
    for name, whole in (
        ("step-0000000016", True),
        ("step-0000000020", False),
        (".tmp-step-0000000018", True),
        ("step-x", True),
    ):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        if whole:
            (folder / "manifest.json").write_text("{}")
    known = curves(40, True)
    rows = [
        {"type": "step", "step": int(t), "objective/scores": float(s), "rewards/gold": float(g)}
        for t, s, g in zip(*known["objective/scores"], known["rewards/gold"][1])
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    reader = RunReader(tmp_path)
    reader.poll()
    light = next(x for x in health_of(reader) if x.name == "reward")
    assert light.state == "bad" and light.text.endswith("go back to the checkpoint of step 16")


STEPS = np.arange(1.0, 201)
SHAPES = {
    "falls": lambda rng: 2 * np.exp(-STEPS / 30) + 1 + rng.normal(0, 0.1, 200),
    "is flat": lambda rng: 0.69 + rng.normal(0, 0.05, 200),
    "heavy tails": lambda rng: 1 + np.exp(-STEPS / 60) + 0.1 * rng.standard_t(4, 200),
    "epochs": lambda rng: 2.5 - 0.4 * (STEPS // 50) + rng.normal(0, 0.1, 200),
    "few rows a step": lambda rng: 1.2 + np.exp(-STEPS / 20) + rng.gamma(2, 0.15, 200),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_healthy_loss_is_no_concern(shape: str) -> None:
    """Forty healthy runs of each shape, looked at five times: at most one false alarm."""
    alarms = 0
    for seed in range(40):
        loss = SHAPES[shape](np.random.default_rng(seed))
        alarms += any(CHECKS["learning"]({"loss": (STEPS[:n], loss[:n])}, {})[0] != "ok" for n in range(40, 201, 40))  # type: ignore[index]
    assert alarms <= 1


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("slope", "state"), [(0.006, "watch"), (0.02, "bad")])
def test_a_loss_that_rises_again_is_seen(slope: float, state: str, seed: int) -> None:
    loss = SHAPES["falls"](np.random.default_rng(seed)) + slope * np.maximum(STEPS - 60, 0)
    assert CHECKS["learning"]({"loss": (STEPS, loss)}, {})[0] == state  # type: ignore[index]
    assert CHECKS["learning"]({"loss": (STEPS, loss), "reward": (STEPS, loss)}, {}) is None  # a policy gradient's


@pytest.mark.parametrize(
    ("kept", "state"),
    [
        ([2, 1.5, 1.2, 1.1, 1.0], "ok"),
        ([2, 1, 1.2, 1.3, 1.4], "watch"),
        ([2, 1, 1.05, 1.3, 1.4], "ok"),
        ([2, 2, 1, 1.2, 1.3], "ok"),
    ],
)
def test_rows_learnt_by_heart(kept: list[float], state: str) -> None:
    """Three evaluations after the best one must all be worse by a tenth."""
    known = {"eval/loss": (np.arange(1.0, 6), np.array(kept))}
    concern = CHECKS["held out"](known, {"checkpoints": [2, 4]})
    assert concern is not None and concern[0] == state and ("step 2" in concern[1]) == (state == "watch")


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_luck_is_not_learning_by_heart(noise: float) -> None:
    """Evaluations that only scatter, a look after each: over 200 such runs 0.5 to 3.5 % had an alarm (92 % before, at a tenth)."""
    alarms, at = 0, np.arange(1.0, 51)
    for seed in range(30):
        kept = 1 + noise * np.random.default_rng(seed).normal(size=50)
        alarms += any(CHECKS["held out"]({"eval/loss": (at[:n], kept[:n])}, {})[0] != "ok" for n in range(4, 51))  # type: ignore[index]
    assert alarms <= 4


@pytest.mark.parametrize("known", [0, 1, 3, 6])
def test_a_fall_is_seen_where_one_evaluation_has_no_spread(known: int) -> None:
    """All answers of an evaluation got the same gold: its standard error is 0, which hid every fall."""
    at, gold = np.arange(1.0, 8), np.array([2.0, 2.1, 1.9, 2.0, 0.1, 0.0, 0.1])
    errors = np.where(np.arange(7) == known, 0.0, 0.1)
    told = {"objective/scores": (at, at), "eval/gold": (at, gold), "eval/gold_stderr": (at, errors)}
    concern = CHECKS["reward"](told, {})
    assert concern is not None and concern[0] == "bad"
    told["eval/gold_stderr"] = at, 0 * errors  # none has: seven values are too few to tell
    assert CHECKS["reward"](told, {})[0] == "ok"  # type: ignore[index]
