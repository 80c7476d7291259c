"""The slow suites in slices, and waiting that a busy machine doesn't break."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import patience
import pytest
from test_order import load

ROOT = Path(__file__).resolve().parent.parent
SLOW = load("slow_slice")
IDS = [
    *(f"tests/test_a.py::test_many[{x}]" for x in range(50)),
    *(f"tests/test_b.py::test_strategies[{s}-{m}]" for s in ("ddp", "zero3") for m in range(30)),
    *(f"tests/test_c.py::test_{i}" for i in range(40)),
]


def test_ten_slices_hold_every_slow_test_once() -> None:
    dealt = [SLOW.deal(IDS, i) for i in range(10)]
    assert sorted(t for part in dealt for t in part) == sorted(IDS)
    assert SLOW.deal(IDS, 13) == dealt[3]


def test_cases_that_share_a_fixture_stay_together() -> None:
    sizes = {unit[0]: len(unit) for unit in SLOW.units(IDS)}
    assert sizes["tests/test_b.py::test_strategies[ddp-0]"] == sizes["tests/test_b.py::test_strategies[zero3-0]"] == 30
    assert [n for name, n in sizes.items() if "test_many" in name] == [20, 20, 10]


def test_what_has_not_begun_in_time_is_skipped_and_a_failure_fails(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("def test_right(): pass\ndef test_wrong(): assert 0\n")
    here = [sys.executable, "-m", "pytest", "-q", "-p", "out_of_time", "-p", "no:cacheprovider", str(tmp_path)]
    env = {"PYTHONPATH": str(Path(__file__).parent), "PATH": "", "RLHF_NB_TESTS_FAILED": str(tmp_path / "failed.txt")}
    for end, code, words in ((time.time() + 600, 1, "1 failed, 1 passed"), (time.time() - 1, 0, "2 skipped")):
        done = subprocess.run(here, env=env | {"RLHF_NB_TESTS_UNTIL": str(end)}, capture_output=True, text=True)
        assert done.returncode == code and words in done.stdout, done.stdout
    assert (tmp_path / "failed.txt").read_text().strip().endswith("test_x.py::test_wrong")


def python(code: str, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], text=True, **more)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(
    ("code", "words"),
    [("import time; time.sleep(600)", "it hangs"), ("while True: pass", "s of CPU, more than 1")],
    ids=["sleeps", "spins"],
)
def test_a_process_that_hangs_is_seen(code: str, words: str) -> None:
    process = python(code)
    try:
        with pytest.raises(patience.Stuck, match=words):
            patience.wait([process], cpu=1, idle=3)
    finally:
        patience.end(process)
    assert process.poll() is not None


def test_a_process_that_gets_little_of_a_busy_machine_is_no_hanging_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(patience, "cpu_seconds", lambda pids: clock["cpu"])
    monkeypatch.setattr(patience.time, "monotonic", lambda: clock["wall"])
    watch = patience.Watch([1], cpu=300, idle=120)
    for _ in range(500):  # a hundredth of a core, for hours
        clock["wall"] += 30
        clock["cpu"] += 0.3
        watch.look()
    clock["wall"] += 119
    watch.look()
    clock["wall"] += 31
    with pytest.raises(patience.Stuck, match="it hangs"):
        watch.look()


def test_a_process_that_fails_ends_the_wait_for_the_others() -> None:
    both = [python("raise SystemExit(3)"), python("import time; time.sleep(600)")]
    try:
        assert patience.wait(both, cpu=60, idle=60) == [3, -1]
    finally:
        patience.end(both[1])


def test_the_stacks_of_what_hangs_are_shown(tmp_path: Path) -> None:
    code = "import faulthandler, signal, time\nfaulthandler.register(signal.SIGUSR1)\ndef in_a_collective():\n    print(1, flush=True); time.sleep(600)\nin_a_collective()"
    out = tmp_path / "out-0.txt"
    with out.open("w") as file:
        process = python(code, stdout=file, stderr=subprocess.STDOUT)
    try:
        assert patience.until(lambda: bool(out.read_text()), process)
        assert "in in_a_collective" in patience.stacks([process], [out])
    finally:
        patience.end(process)
    assert process.returncode == -signal.SIGKILL


REPORT = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="1"/></testsuites>'
FINE, BROKEN = REPORT.format(11, 0), REPORT.format(11, 2)
STUBS = {
    "all-passes": (f"echo '{FINE}' > $XML", f"echo '{FINE}' > $XML", 3600, 0, "20 passed, 0 failed, 2 skipped"),
    "fast-fails": (f"echo '{BROKEN}' > $XML; exit 2", f"echo '{FINE}' > $XML", 3600, 2, "18 passed, 2 failed, 2 skipped"),
    "slow-fails": (f"echo '{FINE}' > $XML", f"echo '{BROKEN}' > $XML; exit 1", 3600, 1, "18 passed, 2 failed, 2 skipped"),
    "slow-breaks": (f"echo '{FINE}' > $XML", "exit 1", 3600, 1, "10 passed, 0 failed, 1 skipped"),
    "no-fast-report": ("exit 2", f"echo '{FINE}' > $XML", 3600, 2, "10 passed, 1 failed, 1 skipped"),
    "nothing-in-the-slice": (f"echo '{FINE}' > $XML", "exit 5", 3600, 0, "10 passed, 0 failed, 1 skipped"),
    "no-time-for-a-slice": (f"echo '{FINE}' > $XML", "exit 1", 600, 0, "10 passed, 0 failed, 1 skipped"),
    "fast-hangs": ("sleep 60", "exit 1", 2, 124, "0 passed, 1 failed, 0 skipped"),
}  # fmt: skip


def ci(tmp_path: Path, fast: str, slow: str, seconds: int) -> subprocess.CompletedProcess[str]:
    """`.ci/run` with a `make` and a Python that only write reports."""
    for path, text in {
        ".ci/run": (ROOT / ".ci" / "run").read_text(encoding="utf-8"),
        "bin/make": f"#!/bin/bash\nXML=${{PYTEST_ADDOPTS#*=}}\n{fast}\n",
        ".venv/bin/python": f"#!/bin/bash\nXML=${{@: -1}}\n{slow}\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
        (tmp_path / path).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "RLHF_NB_CI_SECONDS": str(seconds)}
    return subprocess.run([str(tmp_path / ".ci" / "run")], env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("fast", "slow", "seconds", "code", "last"), STUBS.values(), ids=[*STUBS])
def test_ci_ends_with_one_line_that_is_true(
    tmp_path: Path, fast: str, slow: str, seconds: int, code: int, last: str
) -> None:
    done = ci(tmp_path, fast, slow, seconds)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last), done.stdout + done.stderr
    assert ("no slow slice" in done.stdout) == (seconds < 3600)


def test_what_failed_before_a_slice_was_cut_off_fails(tmp_path: Path) -> None:
    cut = "echo tests/test_a.py::test_b >> $RLHF_NB_TESTS_FAILED; exit 124"
    done = ci(tmp_path, f"echo '{FINE}' > $XML", cut, 3600)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and lines[-1] == "10 passed, 1 failed, 1 skipped", done.stdout + done.stderr
    assert "FAILED tests/test_a.py::test_b" in lines and "was cut off" in done.stdout
    done = ci(tmp_path, f"echo '{FINE}' > $XML", "exit 124", 3600)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "10 passed, 0 failed, 1 skipped", done.stdout


def test_what_tests_cost_is_counted_with_the_processes_they_start(tmp_path: Path) -> None:
    work = "sum(range(5 * 10**7))"
    (tmp_path / "test_x.py").write_text(
        "import subprocess, sys\n"
        f"def test_here(): {work}\n"
        f"def test_there(): subprocess.run([sys.executable, '-c', '{work}'], check=True)\n"
        "def test_nothing(): pass\n"
    )
    times = tmp_path / "times.txt"
    here = [sys.executable, "-m", "pytest", "-q", "-p", "cpu_times", "-p", "no:cacheprovider", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "RLHF_NB_TEST_TIMES": str(times)}
    env.pop("PYTEST_ADDOPTS", None)  # of the run that this test belongs to
    done = subprocess.run(here, env=env, cwd=tmp_path, capture_output=True, text=True)
    seconds = {x.split("::")[1]: float(x.split(" ")[0]) for x in times.read_text().splitlines()}
    assert min(seconds["test_here"], seconds["test_there"]) > 5 * seconds["test_nothing"] + 0.05, seconds
    assert "the dearest files" in done.stdout and "test_x.py" in done.stdout
