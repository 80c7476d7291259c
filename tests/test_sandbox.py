"""Programs that a policy wrote: whatever they try ends within its limits, earns nothing, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rlhf_nb.rewards.base import Rewards
from rlhf_nb.rewards.code import PythonTests
from rlhf_nb.sandbox import runner
from rlhf_nb.sandbox.runner import Sandbox, SandboxResult
from rlhf_nb.types import Completions, Rollout

LEAVES = """
import glob, tempfile, threading, time
from rlhf_nb.sandbox.runner import Sandbox
box = Sandbox(timeout_s=60, programs_may_escape=True)
threading.Thread(target=box.run, args=("import time; time.sleep(60)",), daemon=True).start()
while not glob.glob(tempfile.gettempdir() + "/sandbox-*"):
    time.sleep(0.01)
"""


def test_an_exit_that_waits_for_no_program_leaves_no_folder(tmp_path: Path) -> None:
    """As after a Ctrl-C: the thread that would remove it is gone."""
    env = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LEAVES], env=env, check=True, timeout=120)
    assert not list(tmp_path.glob("sandbox-*"))


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the sandbox needs POSIX limits")
TESTS = ("assert add(2, 3) == 5", "assert add(-1, 1) == 0")
RIGHT = "def add(a, b): return a + b\n"
LINUX = sys.platform == "linux"


def sandboxed() -> set[int]:
    """Processes of any sandbox on this machine."""
    found = set()
    for p in psutil.process_iter(["cmdline", "status"]):
        if p.info["status"] != psutil.STATUS_ZOMBIE and any(
            "_child(job, int(sys.argv[2])" in a for a in p.info["cmdline"] or ()
        ):
            found.add(p.pid)
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process of ours remains, no zombie, no folder."""
    mine = {p.pid for p in psutil.Process().children(recursive=True)}
    before = sandboxed()
    yield
    deadline = time.monotonic() + 2
    while (left := sandboxed() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    left &= {p.pid for p in psutil.Process().children(recursive=True)} | {p for p in left if _orphan(p)}
    assert not left
    assert {p.pid for p in psutil.Process().children(recursive=True)} <= mine, "a zombie or a child is left"


def _orphan(pid: int) -> bool:
    try:
        return psutil.Process(pid).ppid() == 1
    except psutil.Error:
        return False


def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the audit hook out of the child, so that only the kernel stands in the way."""
    source, call = runner._child_source(), '    _audit(folder, job["readable"])\n'
    assert source.count(call) == 1
    monkeypatch.setattr(runner, "_child_source", lambda: source.replace(call, ""))


MODES = ["all", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("hook", "kernel"))]


@pytest.fixture(params=MODES)
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """The sandbox with everything, with the audit hook alone, and with the kernel's fences alone."""
    if request.param == "hook":
        return Sandbox(timeout_s=1, wall_s=2.5, fences=(), programs_may_escape=True)
    box = Sandbox(timeout_s=1, wall_s=2.5)
    if request.param == "kernel":
        if missing := set(runner.FENCES) - set(box.fences_here()):
            pytest.skip(f"this machine has no {', '.join(sorted(missing))}")
        without_hook(monkeypatch)
    return box


HOSTILE = {
    "infinite loop": "while True: pass",
    "sleeps": "import time\ntime.sleep(1e6)",
    "ignores signals": "import signal\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, ValueError): pass\nwhile True: pass",
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb that catches": "import os\nwhile True:\n  try: os.fork()\n  except BaseException: pass",
    "daemon": "import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nimport time; time.sleep(60)",
    "thread bomb": "import threading\nwhile True: threading.Thread(target=lambda: __import__('time').sleep(60)).start()",
    "10 GB at once": "x = bytearray(10 * 2**30)",
    "10 GB in pieces": "x = []\nwhile True: x.append(bytearray(2**20))",
    "a huge number": "x = 9 ** 9 ** 9 ** 9",
    "deep recursion": "def f(n): return f(n + 1)\nf(0)",
    "deep recursion in C": "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)",
    "deep source": "(" * 100000,
    "_exit": "import os\nos._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "exit in a function": "def add(a, b): raise SystemExit(0)",
    "_exit in a function": "import os\ndef add(a, b): os._exit(0)",
    "kills itself": "import os\nos.kill(os.getpid(), 9)",
    "aborts": "import os\nos.abort()",
    "endless output": "while True: print('passed')",
    "endless stderr": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "prints the verdict": "print('passed'); print((True, True))",
    "writes to every file": "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'passed' * 1000)\n  except OSError: pass\ndef add(a, b): return None",
    "closes every file": "import os\nos.closerange(0, 64)\nwhile True: pass",
    "patches builtins": "import builtins, os, sys\nbuiltins.AssertionError = Warning\nbuiltins.exec = builtins.compile = lambda *a, **k: None\nos.read = os.write = lambda *a: b''\ndef add(a, b): return None",
    "steps over the tests": "import sys\ndef trace(frame, event, arg):\n  if frame.f_code.co_filename.startswith('<test'): frame.f_trace_lines = True; raise StopIteration\n  return trace\nsys.settrace(trace)\ndef add(a, b): return None",
    "fills the disk": "i = 0\nwhile True:\n  open(str(i), 'wb').write(b'x' * 200000); i += 1",
    "an exception that lies": "class E(BaseException):\n  def __str__(self): raise self\nraise E",
    "not Python": "I would add the two numbers.",
    "a lone surrogate": "x = '\udc80'",
    "a zero byte": "x = 1\0",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, box: Sandbox) -> None:
    start = time.monotonic()
    result = box.run(HOSTILE[name], TESTS)
    assert result.passed == (False, False) and result.outcome != "passed", result
    assert time.monotonic() - start < 2.5 + 5  # the wall limit, and a busy machine
    assert len(result.stdout) <= 256 << 10 and len(result.stderr) <= 2000
    assert Sandbox().run(RIGHT, TESTS).outcome == "passed", "the next program suffers"


def test_limits_name_the_reason() -> None:
    box = Sandbox(timeout_s=1, wall_s=2)
    assert [box.run(HOSTILE[n], TESTS).outcome for n in ("infinite loop", "sleeps", "_exit", "sys.exit")] == ["timeout", "timeout", "left", "failed"]  # fmt: skip
    assert "MemoryError" in box.run(HOSTILE["10 GB at once"], TESTS).stderr
    assert "RecursionError" in box.run(HOSTILE["deep recursion"], TESTS).stderr
    assert Sandbox(timeout_s=20).run(HOSTILE["deep recursion in C"], TESTS).outcome in ("crashed", "failed")


REACHES = {
    "reads": "print(open({path!r}).read())",
    "reads by descriptor": "import os\nprint(os.read(os.open({path!r}, os.O_RDONLY), 99))",
    "reads through a link": "import os\nos.symlink({path!r}, 'x')\nprint(open('x').read())",
    "reads through the root": "import os\nd = os.open('/', os.O_RDONLY)\nprint(open(os.open({path!r}[1:], os.O_RDONLY, dir_fd=d)).read())",
    "reads from the parent's folder": "print(open('../' * 30 + {path!r}).read())",
    "lists": "import os\nprint(os.listdir({folder!r}))",
    "writes": "open({path!r}, 'w').write('gone')",
    "appends": "open({path!r}, 'a').write('gone')",
    "creates": "open({folder!r} + '/new', 'w').write('secret')",
    "removes": "import os\nos.remove({path!r})",
    "renames": "import os\nos.rename({path!r}, 'here')",
    "changes rights": "import os\nos.chmod({path!r}, 0)",
    "truncates": "import os\nos.truncate({path!r}, 0)",
    "links": "import os\nos.link({path!r}, 'here')\nprint(open('here').read())",
    "opens a database": "import sqlite3\nsqlite3.connect({folder!r} + '/new').execute('create table t (x)')",
    "reads memory": "print(open('/proc/' + str(__import__('os').getppid()) + '/environ').read(), 'secret')",
    "reads the environment": "import os\nprint(os.environ['SECRET'])",
}


@pytest.mark.parametrize("name", REACHES)
def test_files_outside(name: str, box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "secret")
    path = tmp_path / "secret.txt"
    path.write_text("secret")
    mode = path.stat().st_mode
    result = box.run(REACHES[name].format(path=str(path), folder=str(tmp_path)))
    assert result.outcome == "failed" and "secret" not in result.stdout, result
    assert path.read_text() == "secret" and path.stat().st_mode == mode and os.listdir(tmp_path) == ["secret.txt"]


def test_network(box: Sandbox) -> None:
    """A server of this machine hears nothing, on TCP, UDP or a Unix socket."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.3)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    udp.settimeout(0.3)
    port, udp_port = server.getsockname()[1], udp.getsockname()[1]
    for code in (
        f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1).send(b'hi')",
        f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)",
        f"import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hi', ('127.0.0.1', {udp_port}))",
        "import socket\nsocket.socket().bind(('0.0.0.0', 0))\n",
        f"import asyncio\nasyncio.run(asyncio.open_connection('127.0.0.1', {port}))",
    ):
        assert box.run(code).outcome == "failed", code
    for heard in (server.accept, lambda: udp.recv(9)):
        with pytest.raises(TimeoutError):
            heard()
    server.close()
    udp.close()


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.kill({pid}, 9)",
        "import os\nos.killpg(os.getpgid({pid}), 9)",
        "import os\nos.kill(os.getppid(), 9)",
        "import os, signal\nos.kill(-1, 9)",
        "import os\nos.setpriority(os.PRIO_PROCESS, {pid}, 19)\nprint(os.getpriority(os.PRIO_PROCESS, {pid}))",
        "import resource\nresource.prlimit({pid}, resource.RLIMIT_NOFILE, (3, 3))",
        "import subprocess\nsubprocess.run(['id'])",
        "import os\nassert os.system('id') == 0",
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo hi'])",
        "import os\nos.posix_spawn('/bin/sh', ['sh'], {{}})",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    ],
)  # fmt: skip
def test_other_processes(code: str, box: Sandbox) -> None:
    bystander = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        limits, nice = psutil.Process(bystander.pid).rlimit(psutil.RLIMIT_NOFILE), psutil.Process(bystander.pid).nice()
        only_hook = not box.fences and "setpriority" in code  # which Python doesn't report to hooks
        result = box.run(code.format(pid=bystander.pid))
        if not only_hook:
            assert result.outcome != "passed" and bystander.poll() is None, result
            assert psutil.Process(bystander.pid).rlimit(psutil.RLIMIT_NOFILE) == limits
            assert psutil.Process(bystander.pid).nice() == nice
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.skipif(not LINUX, reason="namespaces are Linux's")
def test_kernel_fences_hold_against_machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the hook gone and ctypes at hand, the kernel alone refuses."""
    box = Sandbox(timeout_s=1, wall_s=2.5)
    if missing := set(runner.FENCES) - set(box.fences_here()):
        pytest.skip(f"this machine has no {', '.join(sorted(missing))}")
    without_hook(monkeypatch)
    head = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    calls = {
        "socket": "libc.socket(2, 1, 0)",
        "fork": "libc.fork()",
        "vfork by number": "libc.syscall(58)" if runner.platform.machine() == "x86_64" else "-1",
        "x32 socket": "libc.syscall(0x40000000 + 41, 2, 1, 0)" if runner.platform.machine() == "x86_64" else "-1",
        "ptrace": f"libc.ptrace(16, {os.getpid()}, 0, 0)",
        "unshare": "libc.unshare(0x10000000)",
        "mount": "libc.mount(b'/', b'.', None, 4096, None)",
        "shared memory": "libc.shmget(1234, 4096, 0o1600)",
        "raise limits": "libc.setrlimit(0, ctypes.create_string_buffer(b'\\xff' * 16))",
        "remove": f"libc.unlink({str(tmp_path).encode()!r} + b'/secret.txt')",
    }
    (tmp_path / "secret.txt").write_text("secret")
    for name, call in calls.items():
        result = box.run(f"{head}assert {call} == -1\nprint('refused')")
        assert result.stdout == "refused\n", (name, result)
    assert (tmp_path / "secret.txt").exists()
    assert box.run(head + "import sys\nprint(os.listdir('.'))").stdout == "[]\n"


def test_seccomp_table() -> None:
    """Both columns are there, no number twice, and jumps fit into a byte."""
    for machine in ("x86_64", "aarch64"):
        arch, refused = runner._refused_calls(machine)
        if LINUX:
            assert arch and len(set(refused)) == len(refused) and 50 < len(refused) < 250
    assert runner._refused_calls("riscv64") == (0, [])


@pytest.mark.parametrize("fences", [(), ("namespaces",), ("landlock",), ("seccomp",), runner.FENCES], ids=str)
def test_decent_programs_run(fences: tuple[str, ...]) -> None:
    code = """
import asyncio, collections, dataclasses, datetime, decimal, enum, functools, hashlib, heapq, itertools, json, math
import random, re, statistics, string, subprocess, sys, tempfile, threading, typing, unittest, zlib
@dataclasses.dataclass
class P:
    x: "int"
class C(enum.Enum):
    A = 1
T = collections.namedtuple("T", "a b")
async def main():
    await asyncio.sleep(0)
    return sum(await asyncio.gather(*(asyncio.sleep(0, i) for i in range(4))))
def add(a, b):
    with open("note.txt", "w") as f:
        f.write(str(a + b))
    with tempfile.NamedTemporaryFile() as f:
        f.write(b"x")
    import lzma, sqlite3, uuid, csv
    return int(open("note.txt").read()) + P(0).x + asyncio.run(main()) - 6
"""
    result = Sandbox(timeout_s=5, fences=fences, programs_may_escape=True).run(code, TESTS)
    assert result.outcome == "passed" and result.passed == (True, True), result
    assert set(result.fences) <= {*fences, "audit hook"} and "audit hook" in result.fences


def test_programs_read_and_print() -> None:
    box = Sandbox()
    for code in ("print(int(input()) + int(input()))", "print(sum(map(int, open(0))))", "import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.read().split()))))\nexit()", "if __name__ == '__main__': print(3)"):  # fmt: skip
        result = box.run(code, stdin="1\n2\n")
        assert result.outcome == "passed" and result.stdout.strip() == "3", (code, result)
    assert box.run("print('ü', ascii(input()))", stdin="ß").stdout == "ü '\\xdf'\n"
    assert box.run("import sys; sys.exit(1)").outcome == box.run("print(1); 1 / 0").outcome == "failed"
    assert len({box.run("print({'owl', 'fox', 'bee', 'wolf'}, hash('x'))").stdout for _ in range(4)}) == 1


def test_partial_credit_survives_a_crash() -> None:
    code = "import os\ndef f(x):\n  if x == 2: os._exit(0)\n  return x"
    assert Sandbox().run(code, [f"assert f({i}) == {i}" for i in range(4)]).passed == (True, True, False, False)
    assert Sandbox().run("x = 1", ["assert x == 1", "assert x == 2", "x.y", "assert x"]).passed == (True, False, False, True)  # fmt: skip


def rollout(texts: list[str], **columns: list[object]) -> Rollout:
    """A rollout of texts; the ids don't matter here."""
    n = len(texts)
    c = Completions.from_lists([[1]] * n, [[2, 3]] * n)
    return Rollout(**c.columns_dict(), uid=torch.arange(n), finished=torch.ones(n, dtype=torch.bool), prompts=["?"] * n, texts=texts, columns=columns).check()  # fmt: skip


def test_training_goes_on() -> None:
    """A batch of hostile and decent programs: scores in order, the same every time."""
    names = ["infinite loop", "fork bomb", "10 GB at once", "_exit", "endless output", "prints the verdict"]
    texts = [t for n in names for t in (RIGHT, HOSTILE[n], "def add(a, b): return 5")]
    reward = PythonTests(timeout_s=1, wall_s=10, workers=3)
    scored = [Rewards(reward)(rollout(texts, tests=[list(TESTS)] * len(texts)))[0].tolist() for _ in range(2)]
    assert scored[0] == scored[1] == [1.0, 0.0, 0.5] * len(names)
    assert sum(reward.outcomes.values()) == len(texts) and reward.outcomes["passed"] == len(names)


def test_programs_run_side_by_side() -> None:
    reward = PythonTests(timeout_s=1, wall_s=1.5, workers=4)
    start = time.monotonic()
    texts = [f"import time; time.sleep({60 + i})" for i in range(4)]
    assert reward(["?"] * 4, texts, tests=["assert True"] * 4) == [0.0] * 4
    assert time.monotonic() - start < 4.5  # 6 s one after the other
    calls: list[str] = []
    reward = PythonTests()
    reward.sandbox = type("Counting", (), {"run": lambda self, code, *a: calls.append(code) or SandboxResult((True,), "passed", "", "", ("audit hook", "seccomp"))})()  # type: ignore[assignment]  # fmt: skip
    assert reward(["?"] * 3, ["x = 1", "x = 1", "x = 2"], tests=["assert x"] * 3) == [1.0] * 3
    assert sorted(calls) == ["x = 1", "x = 2"]


def test_a_slow_pair_ends_the_row() -> None:
    reward = PythonTests(timeout_s=1, wall_s=1.5)
    start = time.monotonic()
    loop = "n = int(input())\nwhile n == 1: pass\nprint(n)"
    pairs = {"inputs": ["0", *["1"] * 30], "outputs": ["0", *["1"] * 30]}
    assert reward(["?"], [loop], tests=[pairs]) == [pytest.approx(1 / 31)]
    assert time.monotonic() - start < 6 and reward.results[0].outcome == "timeout"


@pytest.mark.skipif(not LINUX, reason="the death signal is Linux's")
def test_nothing_outlives_a_killed_training(tmp_path: Path) -> None:
    code = "from rlhf_nb.sandbox.runner import Sandbox; Sandbox(timeout_s=100, wall_s=100).run('import time; print(1, flush=True); time.sleep(100)')"  # fmt: skip
    training = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})

    def children() -> set[int]:
        return {p.pid for p in psutil.Process(training.pid).children(recursive=True)}

    deadline = time.monotonic() + 60
    while not children() & sandboxed() and time.monotonic() < deadline:  # others may be running sandboxes of their own
        time.sleep(0.05)
    time.sleep(0.3)
    mine = children()
    assert mine
    training.send_signal(signal.SIGKILL)
    training.wait()
    deadline = time.monotonic() + 5
    while (left := [p for p in mine if psutil.pid_exists(p)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_an_interrupt_does_not_wait_for_programs_that_have_not_begun() -> None:
    code = (
        "import signal, threading, os\nfrom rlhf_nb.rewards.code import PythonTests\n"
        "reward = PythonTests(timeout_s=1, wall_s=1.5, workers=1, programs_may_escape=True)\n"
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try: reward(['?'] * 40, [f'import time; time.sleep(9{i})' for i in range(40)], tests=['assert True'] * 40)\n"
        "except KeyboardInterrupt: print('interrupted', len([t for t in threading.enumerate() if 'sandbox' in t.name]))"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "interrupted 0\n", done
    assert time.monotonic() - start < 40  # sixty seconds for all forty, and a busy machine that has to import


def test_files_are_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd")) if LINUX else 0
    for fences in ((), runner.FENCES):
        box = Sandbox(timeout_s=1, fences=fences, programs_may_escape=True)
        assert box.run("import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('x')\nos.mkdir('locked', 0)").outcome == "passed"  # fmt: skip
    assert os.listdir(tmp_path) == []
    if LINUX:
        assert len(os.listdir("/proc/self/fd")) == descriptors
    threads = set(threading.enumerate())
    PythonTests()(["?"], ["x = 1"], tests=["assert x"])
    assert set(threading.enumerate()) <= threads
