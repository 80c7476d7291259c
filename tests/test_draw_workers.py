"""Processes that draw: the bits of one process, whichever was slow or killed; what is refused; and that nothing is left behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from resume_harness import campaign
from test_tickets import make, slowed, weights

from rlhf_nb.core import ConfigError, RewardError
from rlhf_nb.data import toy
from rlhf_nb.rollout import workers as rollout_workers
from rlhf_nb.rollout.backends import OurSampler
from rlhf_nb.rollout.ray import OnRay
from rlhf_nb.run.log import read_metrics
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:rollouts.lag is:UserWarning")
KINDS = ["ppo", "grpo", "raft"]


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of a process that has imported everything (`forked`)."""
    monkeypatch.setattr(rollout_workers, "CONTEXT", forked.context())
    monkeypatch.setattr(rollout_workers, "_PAUSE", 0.01)


class Slow(OurSampler):
    """The sampler, late by a random time that differs from worker to worker and from run to run."""

    def answer(self, *args: Any) -> Any:
        time.sleep(0.05 * random.Random(time.time_ns()).random())
        return super().answer(*args)


class Deadly(OurSampler):
    """A sampler that ends its process, where that is a worker."""

    def answer(self, *args: Any) -> Any:
        return super().answer(*args) if multiprocessing.parent_process() is None else os._exit(3)


class Killed(OurSampler):
    """A sampler whose process is killed while it draws, so many times in a row; as if from outside."""

    def __init__(self, file: Path, times: int) -> None:
        super().__init__()
        self.file, self.times = str(file), times

    def answer(self, *args: Any) -> Any:
        if os.environ.get("RAY_JOB_ID") or multiprocessing.parent_process() is not None:
            with open(self.file, "a+b") as f:
                if f.tell() < self.times:
                    f.write(b".")
                    f.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
        return super().answer(*args)


def drawn_by(kind: str, folder: Path, lag: int, workers: int, sampler: Any = None, **over: Any) -> Any:
    reward = toy.gold_reward if sampler is None else slowed(time.time_ns())
    t = make(kind, folder, lag, reward, rollouts={"lag": lag, "workers": workers}, **over)
    t.method.sampler = sampler or t.method.sampler
    return t


def running() -> list[int]:
    """Workers of this process."""
    return [p.pid for p in multiprocessing.active_children() if p.name == "worker"]


def kill_some(t: Any, times: int, rng: random.Random) -> threading.Thread:
    """kill -9 of a worker of a run, so many times, at most once a step."""

    def work() -> None:
        step = -1
        for _ in range(times):
            until = time.monotonic() + 120
            while not (running() and t.step > step) and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(rng.random() * 0.02)
            step = t.step
            if there := running():
                os.kill(rng.choice(there), signal.SIGKILL)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


SLOW = pytest.mark.slow


@pytest.mark.parametrize("kind", ["ppo", pytest.param("grpo", marks=SLOW), pytest.param("raft", marks=SLOW)])
def test_two_workers_are_one_process(kind: str, tmp_path: Path) -> None:
    one, two = (drawn_by(kind, tmp_path / str(n), 0, n) for n in (0, 2))
    own = two.method.finish_step
    two.method.finish_step = lambda step: (time.sleep(0.2), own(step))  # rewards are a small share of a step
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "rollouts.lag is 0")  # there is none that could be of no use
        one.fit(), two.fit()
    assert weights(one) == weights(two) and not running()
    events = [e for e in read_metrics(tmp_path / "2") if e["type"] == "step"]
    assert all(
        e["rollout/lag"] == 0 and e["perf/workers_cpu_s"] > 0 and 0 <= e["perf/generator_idle"] <= 1 for e in events
    )
    assert all(0 < e["perf/learner_idle"] < 1 and e["perf/worker_deaths"] == 0 for e in events)


@pytest.mark.parametrize(
    ("kind", "lag"),
    [("grpo", 2), *(pytest.param(k, lag, marks=SLOW) for k in KINDS for lag in (1, 2, 4) if (k, lag) != ("grpo", 2))],
)
def test_slow_workers_decide_nothing(kind: str, lag: int, tmp_path: Path) -> None:
    """Twice with workers that are slow at random, and once in one process: the same weights."""
    found = [drawn_by(kind, tmp_path / "0", lag, 0)]
    found += [drawn_by(kind, tmp_path / str(n), lag, n, Slow()) for n in (1, 2)]
    for t in found:
        t.fit()
    assert len({weights(t) for t in found}) == 1 and not running()


def test_a_killed_worker_changes_nothing(tmp_path: Path) -> None:
    straight, t = drawn_by("raft", tmp_path / "a", 2, 0), drawn_by("raft", tmp_path / "b", 2, 2, Slow())
    straight.fit()
    thread = kill_some(t, 1, random.Random(0))
    t.fit()
    thread.join()
    assert weights(t) == weights(straight) and t.method.actor.rollouts.workers.deaths == 1 and not running()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_killed_workers(kind: str, tmp_path: Path) -> None:
    straight = drawn_by(kind, tmp_path / "a", 2, 0, steps=30)
    t = drawn_by(kind, tmp_path / "b", 2, 2, Slow(), steps=30)
    straight.fit()
    thread = kill_some(t, 10, random.Random(1))
    t.fit()
    thread.join(60)
    assert weights(t) == weights(straight) and t.method.actor.rollouts.workers.deaths >= 5


@pytest.mark.parametrize("prompts", [8, 1])
def test_five_kills_in_a_row(prompts: int, tmp_path: Path) -> None:
    """Over the same prompts, several or one; they are halved, and drawn with the same bits."""
    over = {"steps": 2, "rollout_batch_size": 4 * prompts, "mini_batch_size": 4 * prompts}
    straight = drawn_by("grpo", tmp_path / "a", 0, 0, **over)
    t = drawn_by("grpo", tmp_path / "b", 0, 1, **over)
    t.method.sampler = Killed(tmp_path / "kills", 5)
    straight.fit(), t.fit()
    assert weights(t) == weights(straight) and t.method.actor.rollouts.workers.deaths == 5 and not running()


# --- the learner dies, and both


def killed(run_dir: Path, kind: str) -> Any:
    """A run for `resume_harness`."""
    rollout_workers.CONTEXT = forked.context()
    return drawn_by(kind, run_dir, 2, 2, Slow(), steps=10, save_every=2)


ppo, grpo, raft = (partial(killed, kind=kind) for kind in ("ppo", "grpo", "raft"))  # called in a process of their own


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_killed_learners(kind: str, tmp_path: Path) -> None:
    assert campaign(f"workers-{kind}", tmp_path, kills=10, seed=3, most_steps=4) >= 1


def learner(folder: str, server: str) -> None:
    """A run in a process of its own, whose workers' ids are written down."""
    forked.at(server)
    torch.set_num_threads(1)
    rollout_workers.CONTEXT = forked.context()
    t = drawn_by("raft", Path(folder) / "run", 2, 2, Slow())
    t.start()
    t.train_step()
    (Path(folder) / "pids").write_text(" ".join(map(str, running())))
    t.fit() if (Path(folder) / "go").exists() else time.sleep(300)


def test_a_killed_learner_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    process = forked.context().Process(target=learner, args=(str(tmp_path), forked.address()))
    process.start()
    until = time.monotonic() + 300
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert process.is_alive() and time.monotonic() < until
        time.sleep(0.02)
    pids = [int(x) for x in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    process.kill()
    process.join()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "workers outlive their learner"
        time.sleep(0.02)
    straight, again = drawn_by("raft", tmp_path / "straight", 2, 0), drawn_by("raft", tmp_path / "run", 2, 1)
    straight.fit()
    again.fit(resume=True, overwrite=True)
    assert weights(straight) == weights(again)


# --- what goes wrong


def test_a_worker_that_keeps_dying(tmp_path: Path) -> None:
    t = drawn_by("raft", tmp_path, 0, 1, Deadly())
    with pytest.raises(
        RewardError,
        match="ended 3 times over the same prompts, the last time with exit code 3: .* The prompt is 'Visitor: .* "
        "A checkpoint of step 0 was left",
    ):
        t.fit()
    assert not running()


def test_a_prompt_that_is_always_killed(tmp_path: Path) -> None:
    """An end, with a checkpoint, also where each end could have come from outside."""
    t = drawn_by("grpo", tmp_path, 0, 1, rollout_batch_size=4, mini_batch_size=4)
    t.method.sampler = Killed(tmp_path / "kills", 10**9)
    with pytest.raises(RewardError, match="ended 8 times .* with exit code -9: .* A checkpoint of step 0 was left"):
        t.fit()
    assert not running() and t.method.actor.rollouts.workers.deaths == 8


class NoPlace:
    """A context on a machine that has no place for another process: where Python asks for it, an error of its own kind."""

    def __init__(self, where: str, error: OSError) -> None:
        self.where, self.error, self.real = where, error, forked.context()

    def Pipe(self) -> Any:
        return self.fails() if self.where == "pipe" else self.real.Pipe()

    def Process(self, **how: Any) -> Any:
        process = self.real.Process(**how)
        if self.where == "start":
            process.start = self.fails
        return process

    def fails(self) -> Any:
        raise self.error


@pytest.mark.parametrize("where", ["pipe", "start"])
@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_worker_that_cannot_be_started(
    where: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_workers, "CONTEXT", NoPlace(where, OSError(code, os.strerror(code))))
    with pytest.raises(RewardError, match=f"could not be started: .*{os.strerror(code)}"):
        asked(None)


def asked(place: Any) -> Any:
    """What becomes of a job of three prompts."""
    crew = rollout_workers.Workers(2, 2, lambda: (torch.nn.Linear(1, 1), OurSampler(), None, None), place)
    crew.publish(0)
    job = rollout_workers._Job(None, None, 0, torch.arange(3), [])  # type: ignore[arg-type]
    thread = threading.Thread(target=crew._tend, args=(0, crew.crew), daemon=True)
    crew.crew.threads.append(thread)  # type: ignore[union-attr]
    thread.start()
    crew.crew.jobs.put(job)  # type: ignore[union-attr]
    try:
        return job.answer.result(30)
    finally:
        crew.close()
        assert not thread.is_alive()


def fails_in_a_worker(how: str) -> OurSampler:
    """A sampler, or in a worker a fault while it is unpickled."""
    if multiprocessing.parent_process() is not None:
        if how == "exit":
            os._exit(3)
        raise ImportError("only here")
    return OurSampler()


class Unmade(OurSampler):
    """A sampler that can't be made in a worker."""

    how = "import"

    def __reduce__(self) -> Any:
        return fails_in_a_worker, (self.how,)


@pytest.mark.parametrize(
    ("how", "deaths", "sentence"),
    [
        ("import", 0, r"a worker can't be made \(ImportError: only here\)"),
        ("exit", 3, "a worker could not be started: with exit code 3, after 3 tries: "),
    ],
)
def test_a_worker_that_cannot_be_made(how: str, deaths: int, sentence: str, tmp_path: Path) -> None:
    """No prompt is blamed, nothing is halved, and it is said after three starts at most."""
    t = drawn_by("grpo", tmp_path, 0, 1, sampler := Unmade(), rollout_batch_size=32, mini_batch_size=32)
    sampler.how = how
    with pytest.raises(RewardError, match=sentence) as error:
        t.fit()
    assert (
        "The prompt is" not in str(error.value) and t.method.actor.rollouts.workers.deaths == deaths and not running()
    )


class Broken:
    """A worker whose machinery fails with it, and the place where it is."""

    ready = True
    memory = rollout_workers.OnThisMachine.memory

    def __init__(self, *_: Any) -> None:
        pass

    def start(self, *_: Any) -> Any:
        return self

    def close(self) -> None:
        pass

    def ask(self, *_: Any) -> Any:
        raise EOFError

    def end(self) -> Any:
        raise ValueError("no such actor")

    stop = end


def test_the_learner_hears_of_a_worker_that_cannot_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with pytest.raises(ValueError, match="no such actor"):
        asked(Broken())
    crew = rollout_workers.Workers(2, 2, lambda: (torch.nn.Linear(1, 1), OurSampler(), None, None), Broken())
    crew.publish(0)
    crew.crew.workers.update({k: Broken() for k in range(2)})  # type: ignore[union-attr]
    monkeypatch.setattr(Broken, "stop", lambda self: (stopped.append(self), self.end()))
    stopped = list[Broken]()
    crew.close()
    assert len(stopped) == 2


class RayError(Exception):
    """Of `NoRay`."""


class GetTimeoutError(RayError):
    """Of `NoRay`."""


class NoRay:
    """In the place of the package ray: calls fail, and so does the end of an actor."""

    exceptions = types.SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
    fault, where = RayError(), ""
    is_initialized = put = shutdown = lambda *_: None

    def init(self, where: str, **_: Any) -> None:
        self.where = where

    def remote(self, **_: Any) -> Any:
        pid = types.SimpleNamespace(remote=lambda: None)
        return lambda kind: types.SimpleNamespace(remote=lambda *_: types.SimpleNamespace(pid=pid))

    def get(self, *_: Any, timeout: float) -> None:
        raise self.fault

    def kill(self, actor: Any) -> None:
        raise ValueError("no such actor")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (GetTimeoutError(), "^no node of Ray had a free core for an actor in 300 s; .*rollouts.workers"),
        (
            RayError("in its creation task: x: a worker can't be made (Oh: no). So."),
            r"^a worker can't be made \(Oh: no",
        ),
        (
            RayError("Worker exit detail: End of file."),
            r"^a worker could not be started: \(End of file\), after 3 tries",
        ),
    ],
)
def test_an_actor_that_does_not_begin(fault: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray := NoRay())  # type: ignore[arg-type]
    ray.fault = fault
    with pytest.raises(RewardError, match=sentence):
        asked(OnRay("ray://here:1", 1))


@pytest.mark.parametrize(
    ("given", "tried"), [("ray://host:10001", []), ("", []), ("[::1]:6379", [("::1", 6379)]), ("a:1", [("a", 1)])]
)
def test_addresses_that_ray_takes(given: str, tried: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Any]()
    monkeypatch.setattr("socket.create_connection", lambda at, _: found.append(at) or open(os.devnull))
    monkeypatch.setitem(sys.modules, "ray", ray := NoRay())  # type: ignore[arg-type]
    monkeypatch.setenv("RAY_ADDRESS", given)
    OnRay("auto", 1).memory({}, 2, {})
    assert ray.where == (given or "auto") and found == tried


def test_no_more_workers_than_prompts(tmp_path: Path) -> None:
    t = drawn_by("raft", tmp_path, 0, 1000, steps=2)
    seen = list[int]()
    t.method.finish_step = lambda step: seen.append(len(running()))
    t.fit()
    crew = t.method.actor.rollouts.workers
    assert len(seen) == 2 and max(seen) <= t.config.rollout_batch_size and crew.count == 1000 and not running()


class Refusing(OurSampler):
    """A sampler that fails in workers."""

    def answer(self, *args: Any) -> Any:
        if multiprocessing.parent_process() is None:
            return super().answer(*args)
        raise ZeroDivisionError("no")


def test_nothing_is_left_after_an_exception(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"ZeroDivisionError: no .in a worker, .*test_draw_workers.py:\d+"):
        drawn_by("raft", tmp_path / "a", 1, 2, Refusing()).fit()
    assert not running()
    t = drawn_by("raft", tmp_path / "b", 2, 2, Slow())
    t.method.finish_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 2 else None  # Ctrl-C
    t.fit()
    assert t.history.stopped == "interrupted (SIGINT)"
    assert not running() and t.step == 2
    del t.method.finish_step
    straight = drawn_by("raft", tmp_path / "c", 2, 0)
    straight.fit(), t.fit()
    assert weights(t) == weights(straight)


def test_half_a_version_does_not_count() -> None:
    slots = rollout_workers.WeightSlots({"w": torch.ones(7)}, 2)
    slots.put({"w": torch.ones(7)}, 4)
    found = slots.get(4)
    assert found is not None and torch.equal(found[0]["w"], torch.ones(7))
    slots.memory[0, 3] ^= 1
    assert slots.get(4) is None and slots.get(3) is None


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rollouts": {"workers": -1}}, "rollouts.workers"),
    ({"rollouts": {"workers": 2}, "decoder": {"kind": "best_of_n", "n": 2}}, "rollouts.workers is 2, but decoder"),
]


@pytest.mark.parametrize(("over", "sentence"), REFUSED)
def test_refused_before_the_first_step(over: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make("raft", tmp_path, 0, **over)


def test_what_cannot_be_sent_is_refused(tmp_path: Path) -> None:
    class Asks:
        """An environment that was given a generator before it was made."""

        rows = (x for x in "abc")

        def reset(self, row: Any, seed: int) -> str:
            return "go"

        def step(self, turn: Any) -> Any:
            return None

    plain = {
        "num_generations": 4,
        "rollout_batch_size": 8,
        "mini_batch_size": 8,
        "steps": 1,
        "epochs": None,
        "console": False,
    }
    config = GRPOConfig.preset("toy", output_dir=str(tmp_path), rollouts={"workers": 1}, **plain)
    parts: dict[str, Any] = {"rows": toy.train_prompts(8), "environment": Asks}
    with pytest.raises(ConfigError, match="can't be sent .TypeError: cannot pickle 'generator' object"):
        GRPOTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), **parts)


SCRIPT = """
import hashlib, sys, torch
torch.set_num_threads(1)
from rlhf_nb import GRPOConfig, GRPOTrainer
from rlhf_nb.data import toy
print("run")

class Echo:
    "An environment of this script, with a global of it."
    def reset(self, row, seed):
        return None
    def step(self, turn):
        return (WORDS, len(turn.text) / 10, turn.number == 2, {})

WORDS = "go on"
found = []
for workers in (0, 1):
    config = GRPOConfig.preset("toy", output_dir=f"run-{workers}", rollouts={"workers": workers}, num_generations=4, rollout_batch_size=8,
        mini_batch_size=8, steps=2, epochs=None, console=False, episodes={"max_turns": 2}, sampling={"max_new_tokens": 12})
    trainer = GRPOTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), rows=toy.train_prompts(8), environment=Echo)
    trainer.fit()
    found.append(hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in trainer.method.model.parameters())).hexdigest())
print("same" if found[0] == found[1] else found)
"""


@pytest.mark.slow  # two starts of Python, as in the notebook rollout.workers; the fast tests fork
@pytest.mark.parametrize("how", ["file", "stdin"])
def test_a_script_without_a_guard(how: str, tmp_path: Path) -> None:
    """Workers are spawned, don't run the script again, and get its environment; a script without a file (as in a notebook), too."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"] if how == "file" else [sys.executable, "-"]
    given = None if how == "file" else SCRIPT
    env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, input=given, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["run", "same"]
