"""Waiting for processes without looking at the wall clock: a busy machine makes nothing fail, a process that hangs does.

A process may use so many seconds of CPU, its children included. And it hangs when all of it together uses no CPU for a while: ranks that wait for
each other in a collective sleep. How long importing takes on a machine with other work counts for neither.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

IDLE = 120.0  # seconds on the wall without CPU
FEW = 0.2  # CPU seconds in that time: a heartbeat, no work


class Stuck(AssertionError):
    """Processes that used all their CPU, or none for too long."""


def tree(pid: int) -> list[psutil.Process]:
    """A process and what it started."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU that processes, their children, and children that have ended have used."""
    total = 0.0
    for process in {p.pid: p for pid in pids for p in tree(pid)}.values():
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class Watch:
    """Raises `Stuck` once processes have used too much CPU, or none for too long.

    Args:
        pids: of the processes.
        cpu: seconds that all of them may use together.
        idle: seconds on the wall without CPU after which they hang.
    """

    def __init__(self, pids: Sequence[int], cpu: float, idle: float = IDLE) -> None:
        self.pids, self.cpu, self.idle = list(pids), cpu, idle
        self.used, self.moved = 0.0, time.monotonic()

    def look(self) -> None:
        """One look; cheap enough for ten in a second."""
        used, now = cpu_seconds(self.pids), time.monotonic()
        if used > self.cpu:
            raise Stuck(f"used {used:.0f} s of CPU, more than {self.cpu:.0f}")
        if abs(used - self.used) > FEW:  # a child that has ended and is not waited for makes it smaller
            self.used, self.moved = used, now
        if now - self.moved > self.idle:
            raise Stuck(f"no CPU used for {self.idle:.0f} s (after {used:.0f} s of it): it hangs")


def wait(processes: Sequence[subprocess.Popen[Any]], cpu: float, idle: float = IDLE) -> list[int]:
    """Wait for processes to end; returns their exit codes.

    Args:
        processes: ranks of one run, for example. One that fails ends the wait: the others wait for it in vain.
        cpu, idle: as `Watch` has them.

    Raises:
        Stuck: with them still alive.
    """
    watch = Watch([p.pid for p in processes], cpu, idle)
    while any(p.poll() is None for p in processes):
        if any(p.poll() not in (None, 0) for p in processes):
            with suppress(subprocess.TimeoutExpired):  # others may be about to say why
                for p in processes:
                    p.wait(5)
            break
        watch.look()
        time.sleep(0.1)
    return [p.poll() if p.poll() is not None else -1 for p in processes]


def until(ready: Callable[[], bool], *processes: subprocess.Popen[Any], cpu: float = 900, idle: float = IDLE) -> bool:
    """Wait until something is so, or all processes have ended; returns whether it is so.

    Raises:
        Stuck: as `wait` raises it.
    """
    watch = Watch([p.pid for p in processes], cpu, idle)
    while not ready():
        if processes and all(p.poll() is not None for p in processes):
            return ready()
        watch.look()
        time.sleep(0.05)
    return True


def run(command: Sequence[str], cpu: float = 300, idle: float = IDLE, **more: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with text captured from both streams into one, and `Watch` in the place of a time limit."""
    with tempfile.TemporaryFile("w+") as out:
        with subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True, **more) as process:
            try:
                wait([process], cpu, idle)
            except Stuck as stuck:
                end(process)
                out.seek(0)
                raise Stuck(f"{' '.join(map(str, command))[:200]}: {stuck}\n{out.read()[-3000:]}") from None
        out.seek(0)
        return subprocess.CompletedProcess(command, process.returncode, out.read(), "")


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and what it started."""
    for one in tree(process.pid):
        with suppress(psutil.Error):
            one.kill()
    process.wait()


def stacks(processes: Sequence[subprocess.Popen[Any]], outs: Sequence[Path]) -> str:
    """What each process is doing: it has registered faulthandler for SIGUSR1 and writes to a file.

    Args:
        processes: alive or not.
        outs: where each writes its standard error.
    """
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(2)
    return "\n".join(f"--- {out.name}\n{out.read_text(errors='replace')[-4000:]}" for out in outs)
