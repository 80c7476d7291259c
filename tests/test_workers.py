"""Processes that draw: the same bits as in one, whoever was slow or killed; what is refused, and that nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from test_tickets import make, slowed, weights

from rlhf_nb.core import ConfigError, RewardError
from rlhf_nb.data import toy
from rlhf_nb.rollout import workers as rollout_workers
from rlhf_nb.rollout.backends import OurSampler

pytestmark = pytest.mark.filterwarnings("ignore:rollouts.lag is:UserWarning")


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of a process that has imported everything (`forked`)."""
    monkeypatch.setattr(rollout_workers, "CONTEXT", forked.context())


class Slow(OurSampler):
    """The sampler, late by a random time that differs from worker to worker, and from run to run."""

    def answer(self, *args: Any) -> Any:
        time.sleep(0.05 * random.Random(time.time_ns()).random())
        return super().answer(*args)


def drawn_by(kind: str, folder: Path, lag: int, workers: int, slow: bool = False, **over: Any) -> Any:
    t = make(kind, folder, lag, slowed(time.time_ns()) if slow else toy.gold_reward, rollouts={"lag": lag, "workers": workers}, **over)
    if slow:
        t.method.sampler = Slow()
    return t


def left() -> list[int]:
    """Children of this process that are workers."""
    return [p.pid for p in rollout_workers.multiprocessing.active_children() if p.name == "worker"]


@pytest.mark.parametrize("kind", ["ppo", "grpo", "raft"])
def test_two_workers_are_one_process(kind: str, tmp_path: Path) -> None:
    found = []
    for n in (0, 2):
        t = drawn_by(kind, tmp_path / str(n), 0, n)
        t.fit()
        found.append(weights(t))
    assert found[0] == found[1] and not left()
