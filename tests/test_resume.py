"""N steps straight equal k steps, `kill -9`, and N - k steps after resuming: bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_harness import campaign, run_to_end


def test_killed_run_equals_straight_run(tmp_path: Path) -> None:
    assert campaign("regression", tmp_path, kills=4, seed=0) >= 1


def test_two_straight_runs_agree_and_differ_from_another_seed(tmp_path: Path) -> None:
    """The comparison can fail: it would see a difference of one metric."""
    a, b = run_to_end("regression", tmp_path / "a"), run_to_end("regression", tmp_path / "b")
    assert a == b and len(a["samples"]) == 30
    a["metrics"][5]["loss"] += 1e-7
    assert a != b


OTHERS = ("reward", "process", "dpo", "kto", "rloo", "online", "episodes")  # 15 CPU seconds each


@pytest.mark.parametrize("case", ["sft", "ppo", "grpo", *(pytest.param(c, marks=pytest.mark.slow) for c in OTHERS)])
def test_methods_survive_two_kills(case: str, tmp_path: Path) -> None:
    assert campaign(case, tmp_path, kills=2, seed=1, most_steps=4) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["grpo", "rloo", "online"])
def test_ten_kills(case: str, tmp_path: Path) -> None:
    """At random moments, every other one while a checkpoint is being written."""
    assert campaign(case, tmp_path, kills=10, seed=3, most_steps=4) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("case", ["regression", "sft", "reward", "process", "ppo", "dpo", "kto", "grpo", "rloo"])
def test_twenty_kills(case: str, tmp_path: Path) -> None:
    assert campaign(case, tmp_path, kills=20, seed=2, most_steps=5) >= 1
