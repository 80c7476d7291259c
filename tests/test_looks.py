"""Rules that look again and again, and tables that compare many settings: how often they are wrong where nothing happens. Numbers stand in docs/evaluate.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import looks
import null_sweeps
import numpy as np
import pytest

from rlhf_nb.pipeline.candidates import standings
from rlhf_nb.run.callbacks import Callback
from rlhf_nb.run.health import CHECKS, health
from rlhf_nb.run.overopt import StopAtPeak
from rlhf_nb.sequential import ALPHA

ROOT = Path(__file__).resolve().parent.parent


KINDS = [
    kind for kind in looks.NEVER_FALL if "(0.8)" not in kind and "one (0.5)" not in kind
]  # docs/evaluate.md says how often these are taken for a fall


def allowed(runs: int) -> float:
    """5 %, and two standard errors of a share that is counted in so many runs."""
    return float(ALPHA + 2 * (ALPHA * (1 - ALPHA) / runs) ** 0.5)


def stopped(gold: Any) -> bool:
    """Whether the callback itself ends a run."""
    rule: Any = StopAtPeak()
    return any(rule._look({"objective/kl": 0.05 * i, "rewards/gold": float(g)}) for i, g in enumerate(gold))


def test_a_flat_run_is_not_stopped_and_the_callback_is_the_simulated_rule() -> None:
    rng = np.random.default_rng(0)
    curves = np.concatenate([looks.NEVER_FALL["flat"](rng, 12, 60), looks.falls(1.2)(rng, 6, 60)])
    told = [stopped(curve) for curve in curves]
    assert told == list(looks.first_alarms(curves) >= 0)
    assert sum(told[:12]) <= 2 and all(told[12:])


@pytest.mark.parametrize("kind", KINDS)
def test_few_curves_that_never_fall_are_said_to_have_fallen(kind: str) -> None:
    found = looks.first_alarms(looks.NEVER_FALL[kind](np.random.default_rng(1), 200, 60))
    assert (found >= 0).mean() <= allowed(200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_five_in_a_hundred_at_most_over_500_looks(kind: str) -> None:
    found = looks.first_alarms(looks.NEVER_FALL[kind](np.random.default_rng(2), 2000, 500))
    print(f"{kind}: {(found >= 0).mean():.1%}")
    assert (found >= 0).mean() <= allowed(2000)


def test_a_message_says_only_what_happened() -> None:
    rule: Any = StopAtPeak()
    flags = [rule._look({"objective/kl": 0.1 * i, "rewards/gold": 1.0 - max(0, i - 20)}) for i in range(40)]
    reason = next(f for f in flags if f).reason
    high, now = (float(reason.split(word)[1].split()[0].rstrip(",")) for word in (" from ", " to "))
    assert now < high and "rewards/gold fell" in reason


FLAT = {  # a metric that every light of the dashboard looks at, and the noise of a healthy run around it
    "objective/scores": (1.0, 0.1), "rewards/gold": (1.0, 0.1), "objective/kl": (2.0, 0.2), "objective/kl_k3": (2.0, 0.2), "objective/kl_stderr": (0.2, 0.0),
    "objective/kl_k3_stderr": (0.2, 0.0), "policy/entropy_avg": (1.5, 0.1), "val/explained_variance": (0.5, 0.1), "frac_reward_zero_std": (0.3, 0.03),
    "completions/mean_length": (20.0, 2.0),
    "completions/clipped_ratio": (0.01, 0.003), "policy/clipfrac_avg": (0.1, 0.02), "loss": (1.0, 0.1), "perf/stall_s": (0.01, 0.001), "perf/step_s": (0.2, 0.01),
    "eval/loss": (1.0, 0.02), "rewards/chosen": (-0.5, 0.2), "rewards/margins": (1.0, 0.2), "logps/chosen": (-90.0, 3.0),
    "rollout/effective_share": (0.9, 0.05), "rollout/lag": (2.0, 0.0),
    "objective/scores_length_corr": (0.4, 0.1), "completions/ends_lost": (0.01, 0.003), "groups/noise": (0.1, 0.03), "eval/accuracy": (0.7, 0.02), "eval/words_accuracy": (0.68, 0.0), "eval/leaked": (0.0, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("runs", [15, pytest.param(150, marks=pytest.mark.slow)])
def test_no_light_of_a_flat_run_changes_its_colour(runs: int) -> None:
    """Every light there is, looked at again and again."""
    rng, red, seen = np.random.default_rng(3), dict.fromkeys(CHECKS, 0), set()
    for _ in range(runs):
        curves = {k: level + noise * rng.normal(size=100) for k, (level, noise) in FLAT.items()}
        bad: set[str] = set()
        for n in range(5, 101, 5):
            steps = np.arange(2.0, n + 2)
            known = {k: (steps, v[:n]) for k, v in curves.items()}
            given = {k: v for k, v in known.items() if k != "objective/scores"}  # rows that others wrote
            lights = [*health(known, {"kl_budget": 4.0}), *(x for x in health(given) if x.name == "learning")]
            seen |= {light.name for light in lights}
            bad |= {light.name for light in lights if light.state in ("watch", "bad")}
        for name in bad:
            red[name] += 1
    assert seen >= CHECKS.keys() - {"KL left"} and len(seen) >= 8
    assert all(count <= allowed(runs) * runs for count in red.values()), red


def test_every_rule_that_ends_a_run_is_known_here() -> None:
    """A new callback that stops runs needs a line: what it looks at, and whether luck can make it."""

    def below(kind: type) -> set[type]:
        return {kind}.union(*(below(k) for k in kind.__subclasses__()))

    stops = {k.__name__ for k in below(Callback) if k.__module__ == "rlhf_nb.run.overopt"}
    assert stops == {"StopAtPeak"}  # EarlyStop (no progress) and BudgetStop (a limit) claim nothing about a truth
    for path in (ROOT / "rlhf_nb").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "best_of_n_mean" not in text or path.name == "_modidx.py", path
        if path.name in ("overopt.py", "health.py"):
            assert "sequential import" in text, f"{path} looks repeatedly, and not by the one test that may"


def test_decide_names_no_winner_among_equals() -> None:
    rng = np.random.default_rng(4)
    assert looks.decided(rng, 1000, 500) <= allowed(1000) and looks.decided(rng, 200, 500, 0.6) > 0.6


@pytest.mark.parametrize("seeds", [2, 3, 4, 5])
def test_sweeps_of_settings_that_do_nothing(seeds: int) -> None:
    for questions, kept in ((32, True), (128, True), (32, False), (0, False)):
        assert null_sweeps.share_of_sweeps(150, questions, seeds, kept=kept, run_to_run=0.0) <= allowed(150)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 4, 5])
@pytest.mark.parametrize("questions", [0, 32, 64, 128, 256, 512])
def test_2000_sweeps_of_settings_that_do_nothing(questions: int, seeds: int) -> None:
    for kept in (True, False) if questions else (False,):
        for apart in (0.0, 0.3):
            found = null_sweeps.share_of_sweeps(2000, questions, seeds, kept=kept, run_to_run=apart)
            assert found <= ALPHA, (questions, seeds, kept, apart, found)


def test_equal_differences_are_no_certainty() -> None:
    """The same step of 1/128 with every seed: with the questions, and without them."""
    found = [
        ({"x": 0}, dict.fromkeys(range(3), 0.75)),
        ({"x": 1}, dict.fromkeys(range(3), 0.75 - 1 / 128)),
    ]
    right = np.arange(128) < 96
    asked = {(f"x={i}", s): (right & (np.arange(128) != (0 if i else 200))) * 1.0 for i in (0, 1) for s in range(3)}
    for questions in (None, asked):
        told = standings(found, questions=questions)[1]
        assert (
            told.says(0.95) == "not told apart" and told.behind is not None and told.behind.low < 0 < told.behind.high
        )


def test_a_better_setting_is_seen() -> None:
    assert null_sweeps.share_of_sweeps(40, 512, 3, kept=True, run_to_run=0.1, gain=1.2) > 0.7
