"""The first Ctrl-C ends a rollout, a reward call or an evaluation within two seconds, and nothing of the run is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_nb import GRPOTrainer
from rlhf_nb.core import Stopped, safe_point, stoppable
from rlhf_nb.data import toy
from rlhf_nb.fast import decode, engine
from rlhf_nb.judges.chat import ChatEndpoint
from rlhf_nb.judges.endpoint import EndpointJudge
from rlhf_nb.rewards.code import PythonTests
from rlhf_nb.rollout.tools import Waits
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

    assert "safe_point()" in inspect.getsource(decode.run) and "safe_point()" in inspect.getsource(engine.write_answers)


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


def interrupted(act: Callable[[], Any]) -> float:
    """Seconds on the wall from a Ctrl-C until something that would take a minute has ended."""
    sent = list[float]()

    def send() -> None:
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.5, send)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            act()
        return time.monotonic() - sent[0]
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_programs_that_sleep_are_left() -> None:
    """Five CPU seconds they may take, which a program that sleeps never uses, and 15 by the clock."""
    if not hasattr(os, "fork"):
        pytest.skip("the sandbox needs a POSIX system")
    reward = PythonTests(workers=2, programs_may_escape=True)
    programs = [f"import time\nwhile True: time.sleep({i})" for i in range(1, 5)]
    assert interrupted(lambda: reward(["?"] * 4, programs, tests=["assert True"] * 4)) < SECONDS
    left = [t for t in threading.enumerate() if t.name.startswith("sandbox")]  # one may just have begun: it ends, too
    assert not [t for t in left if t.join(2.0) or t.is_alive()]


def test_a_judge_that_hangs_is_left_and_no_exit_waits_for_it() -> None:
    """Threads of concurrent.futures are joined when Python ends: one that waits for an answer would hold the exit."""
    others = {*threading.enumerate()}  # of earlier tests
    silent = socket.create_server(("127.0.0.1", 0))
    with silent:
        judge = EndpointJudge(f"http://127.0.0.1:{silent.getsockname()[1]}/v1", "mute", timeout=60)
        assert interrupted(lambda: judge.compare(["Who?"], ["Owls."], ["Bats."])) < SECONDS
        before = {*threading.enumerate()}
        there = ChatEndpoint(judge.config.url, "mute", timeout=0.7, backoff=0.1)
        assert interrupted(lambda: there.say_all([[{"role": "user", "content": "Who?"}]] * 9, range(9))) < SECONDS
        assert not [t for t in {*threading.enumerate()} - before if t.join(2.0) or t.is_alive()], (
            "no further try is made"
        )
        assert not [t for t in {*threading.enumerate()} - others if t.is_alive() and not t.daemon]


def test_waiting_for_an_environment_or_a_tool_is_a_safe_point() -> None:
    waits, reason, let = Waits(), [""], threading.Event()
    waits.begin("an episode", lambda: let.wait(60), 60.0)
    timer = threading.Timer(0.3, lambda: reason.__setitem__(0, "interrupted"))
    timer.start()
    begun = time.monotonic()
    with stoppable(lambda: reason[0]), pytest.raises(Stopped, match="interrupted"):
        waits.arrived()
    assert time.monotonic() - begun < SECONDS
    let.set()
    timer.join()


POOLS = {  # who has threads that Python waits for when it ends, and why that is no long wait
    "fast/workers.py": "they compute, and a step is finished", "rewards/code.py": "an interrupt kills their programs",
    "pipeline/sweep.py": "the terminal sends its Ctrl-C to the processes that they wait for",
    "serve/turns.py": "what they read is bounded",
}  # fmt: skip


def test_what_waits_for_others_has_no_thread_that_an_exit_waits_for() -> None:
    package = Path(__file__).resolve().parent.parent / "rlhf_nb"
    files = [p for p in package.rglob("*.py") if "ThreadPoolExecutor(" in p.read_text(encoding="utf-8")]
    assert {p.relative_to(package).as_posix() for p in files} == set(POOLS)


RANK = """
import json, os, signal, sys, threading, time
from pathlib import Path
from rlhf_nb.core import Stopped, safe_point, stoppable
from rlhf_nb.data import toy
from rlhf_nb.fast import engine
from test_stops import grpo, patiently
folder, kind, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
calls, left = 0, 0.0
def slow(act, at, wait):
    def call(*words, **more):
        global calls, left
        calls += 1
        if calls == at:
            (folder / f"waits-{rank}").write_text("")
            try:
                wait()
            finally:
                left = time.time()
        return act(*words, **more)
    return call
reward = toy.gold_reward
if kind == "reward":
    reward = slow(reward, 3, lambda: time.sleep(60))
elif kind == "rollout":
    engine.RowCache.states = slow(engine.RowCache.states, 120, patiently)  # behind the first, which a run is checked with
made = grpo(folder / "run", reward)
history = made.fit(resume=kind == "again")
(folder / f"told-{rank}.json").write_text(json.dumps([history.stopped, left]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reward", "rollout"])
def test_with_two_ranks(kind: str, tmp_path: Path) -> None:
    """Both ranks are told, as by a terminal or by `launch`; both leave at once, save, and go on as if nothing had been."""
    import json
    import sys

    import patience
    from process_cases import free_port

    (tmp_path / "rank.py").write_text(RANK)

    def start(what: str, folder: Path) -> list[Any]:
        folder.mkdir(exist_ok=True)
        shared = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "ACCELERATE_USE_CPU": "true",
        }
        tests = str(Path(__file__).parent)
        shared |= {
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', str(Path(tests).parent))}:{tests}",
            "OMP_NUM_THREADS": "1",
        }
        ranks = []
        for rank in range(2):
            with open(folder / f"out-{rank}.txt", "a") as out:
                own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, str(tmp_path / "rank.py"), str(folder), what], env=own, stdout=out, stderr=out
                    )
                )
        return ranks

    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    ranks = start(kind, stopped)
    try:
        assert patience.until(lambda: len(list(stopped.glob("waits-*"))) == 2, *ranks), (
            stopped / "out-0.txt"
        ).read_text()
        time.sleep(0.3)
        sent = time.time()
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        assert patience.wait(ranks, cpu=300) == [0, 0], (stopped / "out-0.txt").read_text()[-2000:]
        for file in sorted(stopped.glob("told-*")):
            reason, left = json.loads(file.read_text())
            print(f"{kind}: left {left - sent:.2f} s after the signal")
            assert reason == "interrupted (SIGINT)" and left - sent < SECONDS
        ranks = start("again", stopped)
        assert patience.wait(ranks, cpu=300) == [0, 0], (stopped / "out-0.txt").read_text()[-2000:]
        ranks = start("straight", whole)
        assert patience.wait(ranks, cpu=300) == [0, 0], (whole / "out-0.txt").read_text()[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert told(stopped / "run") == told(whole / "run"), "something was lost"


def test_ranks_stop_together_or_not_at_all() -> None:
    """What each rank decides, with a store in the place of processes."""
    import torch.distributed as dist

    from rlhf_nb.run import engine

    store = dist.HashStore()

    def votes(place: str) -> list[Any]:
        return [engine.StopVote(place, rank, 2) for rank in range(2)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        patch.setattr(engine.StopVote, "SECONDS", 0.2)
        both, said = votes("both"), [False, False]
        threads = [threading.Thread(target=lambda r=r: said.__setitem__(r, both[r].stops())) for r in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert said == [True, True]
        first, second = votes("one has ended")
        second.close()
        assert not first.stops() and not second.stops()
        first, second = votes("one is elsewhere")
        assert not first.stops() and not second.stops(), "the first one waited in vain: none may stop any more"
    assert engine.StopVote("alone", 0, 1).stops()
