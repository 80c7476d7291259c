"""Processes that needn't import torch and transformers once more, which takes 4 of the 5 CPU seconds of most that tests start.

A server imports them once; what a test starts is a fork of it, with its own environment, folder and streams. It is still a process of its own: it has
its own memory, can be killed, and knows nothing of its parent's objects. What a test says about *starting Python* (imports, what a fresh interpreter
prints, variables that torch or the hub read when they are imported, the end of the interpreter) needs `subprocess`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

HERE = str(Path(__file__).resolve().parent)
ENVIRONMENT = dict(os.environ)  # before a test changes it
IMPORTED = (
    "accelerate", "datasets", "deepspeed", "peft", "transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2", "torch.distributed.fsdp",
    "rlhf_nb.train.online_dpo", "rlhf_nb.train.kto", "rlhf_nb.train.ppo", "rlhf_nb.train.process", "rlhf_nb.train.reward", "rlhf_nb.train.rlaif",
    "rlhf_nb.train.rloo", "rlhf_nb.train.sft", "resume_harness", "process_cases", "forked",
)  # fmt: skip
gc.freeze()  # a fork needn't look through what was imported
_CONTEXT = multiprocessing.get_context("forkserver")


def context() -> Any:
    """Where processes come from; the server starts with the first call."""
    own = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=os.environ.get("RLHF_NB_TEST_THREADS", "1"))
        os.environ["PYTHONPATH"] = os.pathsep.join([HERE, *filter(None, [own.get("PYTHONPATH")])])
        _CONTEXT.set_forkserver_preload(list(IMPORTED))
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(own)
    return _CONTEXT


def address() -> str:
    """Where the server listens, for `at`."""
    context()
    return str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]


def at(place: str) -> None:
    """In a fork: `context` is the server that this fork comes from, instead of a new one."""
    forkserver._forkserver._forkserver_address = place  # type: ignore[attr-defined]
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    forkserver.ensure_running = lambda: None


def _body(command: Sequence[str], env: Mapping[str, str], cwd: str, streams: Sequence[Connection]) -> None:
    """What a fork does: as `python` would with these words."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = [p for p in reversed(env.get("PYTHONPATH", "").split(os.pathsep)) if p not in sys.path]
    what, *words = command
    try:
        if what == "-c":
            sys.argv = ["-c", *words[1:]]
            sys.path.insert(0, "")
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        elif what == "-m":
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [what, *words]
            sys.path.insert(0, str(Path(what).resolve().parent))
            runpy.run_path(what, run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


class Forked:
    """What tests use of `subprocess.Popen`.

    Args:
        command: `[sys.executable, "-c", code, ...]`, or with `-m` or a file in the place of `-c`.
        stdout, stderr: as `Popen` has them; `PIPE` only for text.
        env, cwd: as `Popen` has them.
    """

    def __init__(
        self,
        command: Sequence[str],
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        cwd: Any = None,
    ) -> None:
        assert command[0] == sys.executable
        self.args, kept, self.stdout = list(map(str, command)), [], None  # type: ignore[var-annotated]
        one, two = self._stream(stdout, 1, kept), -1
        two = os.dup(one) if stderr == subprocess.STDOUT else self._stream(stderr, 2, kept)
        streams = [Connection(fd, readable=False) for fd in (one, two)]
        where = str(cwd or os.getcwd())
        self.process = context().Process(target=_body, args=(self.args[1:], dict(env or os.environ), where, streams))
        self.process.start()
        self.pid = int(self.process.pid)
        for stream in streams:
            stream.close()

    def _stream(self, given: Any, number: int, kept: list[Any]) -> int:
        if given == subprocess.PIPE:
            assert number == 1, "a pipe for stdout only"
            read, write = os.pipe()
            self.stdout: IO[str] | None = os.fdopen(read)
            return write
        if given == subprocess.DEVNULL:
            return os.open(os.devnull, os.O_WRONLY)
        return os.dup(number if given is None else given.fileno())

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        self.process.join(0)
        return self.process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return int(self.process.exitcode)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(command: Sequence[str], timeout: float = 600, **more: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` with both streams captured, each for itself."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Forked(command, stdout=out, stderr=err, **more)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(list(command), code, out.read(), err.read())
