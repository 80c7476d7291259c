"""The first Ctrl-C ends a rollout, a reward call or an evaluation within two seconds, and nothing of the run is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_nb import GRPOTrainer
from rlhf_nb.core import safe_point
from rlhf_nb.data import toy
from rlhf_nb.fast import decode, engine
from rlhf_nb.run.log import read_metrics
from rlhf_nb.train.grpo import GRPOConfig

SECONDS = 2.0


def grpo(folder: Path, reward: Any = toy.gold_reward, **settings: Any) -> GRPOTrainer:
    """A small run; its rows, prompts and random numbers are those of every other call."""
    values: dict[str, Any] = {
        "steps": 4,
        "output_dir": str(folder),
        "console": False,
        "async_save": False,
        "save_every": 1,
    }
    config = GRPOConfig.preset("toy").replace(**values | {"data": {"eval_size": 8}, "eval_every": None} | settings)
    return GRPOTrainer(config=config, reward=reward)


def told(folder: Path) -> list[dict[str, Any]]:
    """Steps without what depends on the clock."""
    keep = ("step", "loss", "reward", "objective/kl", "grad_norm")
    return [{k: e.get(k) for k in keep} for e in read_metrics(folder) if e["type"] == "step"]


class Slow:
    """Does what it stands for, and at one call waits for a minute, after a signal has been sent."""

    def __init__(self, act: Callable[..., Any], at: int, wait: Callable[[], None]) -> None:
        self.act, self.at, self.wait, self.calls, self.sent = act, at, wait, 0, 0.0
        self.left = 0.0

    def __call__(self, *words: Any, **more: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            self.sent = time.monotonic()
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()  # as a terminal sends it
            try:
                self.wait()
            finally:
                self.left = time.monotonic()
        return self.act(*words, **more)


def patiently() -> None:
    """A rollout that takes a minute: tokens, with a safe point between two."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.01)
        safe_point()


def check(folder: Path, made: GRPOTrainer, slow: Slow, straight: Path, steps: int) -> None:
    """It ended soon, says why, and going on gives what a run without a stop gave."""
    history = made.fit()
    assert slow.sent and slow.left - slow.sent < SECONDS, "it waited"
    assert history.stopped == "interrupted (SIGINT)" and len(history) == steps
    grpo(folder).fit(resume=True)
    assert told(folder) == told(straight), "something was lost"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stops."""
    folder = tmp_path_factory.mktemp("stops") / "straight"
    grpo(folder).fit()
    return folder


def test_inside_a_reward_function(tmp_path: Path, straight: Path) -> None:
    slow = Slow(toy.gold_reward, 3, lambda: time.sleep(60))  # knows no safe point
    check(tmp_path / "run", grpo(tmp_path / "run", slow), slow, straight, 2)


def test_inside_a_rollout(tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(engine.RowCache.states, 120, patiently)  # behind the first of them, which a run is checked with
    made = grpo(tmp_path / "run")
    monkeypatch.setattr(engine.RowCache, "states", lambda *a: slow(*a))
    history = made.fit()
    assert slow.sent and slow.left - slow.sent < SECONDS
    assert history.stopped == "interrupted (SIGINT)" and len(history) < 4
    monkeypatch.undo()
    grpo(tmp_path / "run").fit(resume=True)
    assert told(tmp_path / "run") == told(straight)


def test_the_loop_that_draws_tokens_has_a_safe_point() -> None:
    import inspect

    assert "safe_point()" in inspect.getsource(decode.run) and "safe_point()" in inspect.getsource(engine.run_rows)


def test_inside_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = grpo(tmp_path / "run", eval_every=2)
    slow = Slow(made.method.evaluate, 1, patiently)
    monkeypatch.setattr(made.method, "evaluate", slow)
    history = made.fit()
    assert slow.sent and slow.left - slow.sent < SECONDS
    assert history.stopped == "interrupted (SIGINT)" and len(history) == 2
    assert (tmp_path / "run" / "checkpoints" / "step-0000000002" / "manifest.json").exists()


def test_a_training_step_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = grpo(tmp_path / "run")
    slow = Slow(made.method.loss, 2, lambda: time.sleep(0.5))
    monkeypatch.setattr(made.method, "loss", slow)
    history = made.fit()
    assert history.stopped == "interrupted (SIGINT)" and len(history) == 1
    assert (tmp_path / "run" / "checkpoints" / "step-0000000001" / "manifest.json").exists()
