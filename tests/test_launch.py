"""`launch`: results, errors, restarts after kills, hangs, interrupts, no orphans, bad input."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from process_cases import ROOT, free_port, run_ranks
from safetensors.torch import load_file

from rlhf_nb.core import ConfigError, RunError
from rlhf_nb.launch import check_request, first_failure, launch

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
TESTS = str(Path(__file__).parent)


def case_on_ranks(case: str, folder: str, **over: Any) -> int:
    """What a rank does: the case, from where it was left."""
    sys.path.insert(0, TESTS)
    from process_cases import rank_main

    rank_main(case, Path(folder), True, **over)
    return int(os.environ["RANK"])


def pids(folder: Path) -> dict[int, int]:
    """Ranks that say they live."""
    found = {}
    for path in (folder / "launch").glob("rank-*.json"):
        found[int(path.stem[5:])] = int(json.loads(path.read_text())["pid"])
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b'"type": "step"') if path.exists() else 0


def when(ready: Any, act: Any, patience: float = 90) -> threading.Thread:
    """Do something in a thread as soon as something is so."""

    def body() -> None:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if ready():
                act()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_processes is 4, but this machine has 2"):
        check_request(4, "ddp", cpu=False, port=0, here=2)
    with pytest.raises(ConfigError, match="Did you mean 'zero3'"):
        check_request(2, "zero33", cpu=True, port=0)
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        with pytest.raises(ConfigError, match=r"port \d+ is in use"):
            check_request(2, "ddp", cpu=True, port=s.getsockname()[1])
    with pytest.raises(ConfigError, match="can't be sent"):
        launch(lambda: None, (i for i in ()), num_processes=1, device="cpu", run_dir=tmp_path)


def test_who_failed_first() -> None:
    echo = {"rank": 0, "time": 1.0, "type": "RuntimeError", "message": "Connection reset by peer", "traceback": "a"}
    cause = {"rank": 1, "time": 2.0, "type": "KeyError", "message": "'x'", "traceback": "b"}
    assert first_failure([echo, cause], [], {}).traceback == "b"
    assert first_failure([echo], [1], {1: 4}).rank == 1
    assert first_failure([echo], [], {}).rank == 0
    assert first_failure([], [], {}).rank is None


@pytest.mark.slow
@needs_deepspeed
def test_kills_change_nothing(tmp_path: Path, kills: int = 3) -> None:
    """`kill -9` of any rank at any moment, PPO under ZeRO-3: restarted, the same weights, nobody left."""
    straight, folder, rng = tmp_path / "straight", tmp_path / "killed", random.Random(0)
    run_ranks("ppo", straight, 2, "zero3", save_every=2)
    done: list[int] = []

    def murder() -> None:
        victims = pids(folder)
        victim = rng.choice(sorted(victims.values()))
        done.extend(victims.values())
        time.sleep(rng.random() * 0.5)
        os.kill(victim, signal.SIGKILL)

    for i in range(kills):
        goal = 2 * i + rng.randint(1, 2)
        when(lambda g=goal: lines(folder) >= g and len([p for p in pids(folder).values() if alive(p)]) == 2, murder)
        if i == kills - 1:
            break
    said: list[str] = []
    result = launch(
        case_on_ranks,
        "ppo",
        str(folder),
        save_every=2,
        num_processes=2,
        strategy="zero3",
        device="cpu",
        run_dir=folder,
        restarts=kills + 2,
        zero={"stage3_param_persistence_threshold": 0},
        say=said.append,
    )
    assert result.failures and "was killed" in result.failures[0], said
    a, b = (load_file(f / "weights.safetensors") for f in (straight, folder))
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not any(alive(p) for p in done)


@pytest.mark.slow
def test_an_error_on_one_rank_is_told(tmp_path: Path) -> None:
    def one_breaks(limit: int) -> None:
        from rlhf_nb.engine import Engine

        engine = Engine()
        if engine.rank == 1:
            raise ValueError(f"row {limit} is not a number")
        engine.gather_object("waiting")

    with pytest.raises(RunError, match="rank 1 failed at step 0: ValueError: row 17") as caught:
        launch(one_breaks, 17, num_processes=2, device="cpu", run_dir=tmp_path, restarts=1, say=None)
    assert "in one_breaks" in str(caught.value)


@pytest.mark.slow
def test_a_rank_that_hangs(tmp_path: Path) -> None:
    """A rank is stopped (as by a debugger, or a dying disk): it is noticed, named and replaced."""

    def stop_one() -> None:
        os.kill(pids(tmp_path)[1], signal.SIGSTOP)

    when(lambda: lines(tmp_path) >= 3, stop_one)
    result = launch(
        case_on_ranks,
        "sft",
        str(tmp_path),
        save_every=1,
        steps=30,
        num_processes=2,
        device="cpu",
        run_dir=tmp_path,
        hang_timeout=10,
        say=None,
    )
    assert len(result.failures) == 1 and "rank 1" in result.failures[0]
    assert result.history[-1]["step"] == 30


@pytest.mark.slow
def test_no_orphans_when_the_kernel_dies(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {TESTS!r})
        from test_launch import case_on_ranks
        from rlhf_nb.launch import launch
        launch(case_on_ranks, "sft", {str(tmp_path)!r}, steps=100000, num_processes=2, device="cpu", run_dir={str(tmp_path)!r})
        """
    )
    env = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)), "PYTHONWARNINGS": "ignore"}
    kernel = subprocess.Popen([sys.executable, "-c", script], env=env)
    until = time.monotonic() + 90
    while lines(tmp_path) < 3 and time.monotonic() < until:
        time.sleep(0.1)
    ranks = pids(tmp_path)
    assert len(ranks) == 2
    kernel.kill()
    kernel.wait()
    until = time.monotonic() + 40
    while any(alive(p) for p in ranks.values()) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(alive(p) for p in ranks.values())


@pytest.mark.slow
def test_interrupt_stops_and_saves(tmp_path: Path) -> None:
    when(lambda: lines(tmp_path) >= 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = launch(
        case_on_ranks, "sft", str(tmp_path), steps=100000, num_processes=2, device="cpu", run_dir=tmp_path, say=None
    )
    assert 3 <= result.history[-1]["step"] < 1000
    assert list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    """Two agents that meet over loopback addresses; the death of one machine is survived by starting both again."""
    port = free_port()
    results: list[Any] = [None, None]

    def machine(i: int) -> None:
        try:
            results[i] = launch(
                case_on_ranks,
                "sft",
                str(tmp_path),
                save_every=1,
                steps=40,
                num_processes=2,
                machines=2,
                machine=i,
                address="127.0.0.1",
                port=port,
                device="cpu",
                run_dir=tmp_path,
                say=None,
            )
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=machine, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(200)
    assert all(not isinstance(r, Exception) for r in results), results
    assert results[0].history[-1]["step"] == 40
