"""One slice of the slow suites, chosen by the commit, within a limit of time.

    python .ci/slow_slice.py --minutes 25 --report FILE     # what .ci/run does after `make test`
    python .ci/slow_slice.py --slice 3 --list               # what belongs to a slice

The slow tests are dealt into ten slices; each holds some of every file. Which one runs is the number of commits on the first-parent line, modulo ten,
so landings that add one commit there see every slice within ten. A test that has not begun when the time is over is skipped, and said.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import zlib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SLICES = 10
TOGETHER = 20  # cases of one test function that stay together: they share a fixture


def collected() -> list[str]:
    """Ids of all slow tests, in pytest's order."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not ids:
        raise SystemExit(f"the slow tests can't be collected:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return ids


def units(ids: list[str]) -> list[list[str]]:
    """Tests that run together: a function's cases; of a function with many cases, those whose ids begin alike, or twenty."""
    functions = defaultdict(list)
    for test in ids:
        functions[test.split("[")[0]].append(test)
    made = []
    for cases in functions.values():
        families = defaultdict(list)
        for case in cases:
            families[re.split(r"[-\]]", case.partition("[")[2])[0]].append(case)
        if len(cases) <= TOGETHER:
            made.append(cases)
        elif len(families) <= TOGETHER:
            made += families.values()
        else:
            made += [cases[i : i + TOGETHER] for i in range(0, len(cases), TOGETHER)]
    return made


def deal(ids: list[str], number: int, slices: int = SLICES) -> list[str]:
    """The tests of one slice: units are dealt like cards, in an order that scatters the units of one file."""
    order = sorted(units(ids), key=lambda unit: zlib.crc32(unit[0].encode()))
    mine = {test for unit in order[number % slices :: slices] for test in unit}
    return [test for test in ids if test in mine]


def number_of_commit() -> int:
    """How many commits lead to this one along first parents; 0 outside a repository."""
    command = ["git", "rev-list", "--count", "--first-parent", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 0


def run(tests: list[str], minutes: float, report: str | None) -> int:
    """pytest on these tests; those that have not begun after so many minutes are skipped."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "out_of_time",
        "-n",
        "2",
        "--dist",
        "loadfile",
        "-o",
        "addopts=-ra",
    ]
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env = os.environ | {"RLHF_NB_TESTS_UNTIL": str(time.time() + 60 * minutes), "PYTHONPATH": paths}
    return subprocess.run(
        [*command, *([f"--junitxml={report}"] if report else []), *tests], cwd=ROOT, env=env
    ).returncode


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="One slice of the slow suites.")
    parser.add_argument("--slice", type=int, default=None, help="default: by the commit")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--report", default=None, help="a JUnit file")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    number = (number_of_commit() if args.slice is None else args.slice) % SLICES
    ids = collected()
    tests = deal(ids, number)
    if args.list:
        print(*tests, sep="\n")
        return 0
    print(
        f"slow slice {number} of {SLICES}: {len(tests)} of {len(ids)} slow tests, at most {args.minutes:.0f} minutes",
        flush=True,
    )
    return run(tests, args.minutes, args.report)


if __name__ == "__main__":
    raise SystemExit(main())
