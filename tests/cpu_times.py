"""A pytest plugin that says what tests cost: CPU seconds by file, with those of processes that they start, so that a busy machine changes nothing.

    RLHF_NB_TEST_TIMES=times.txt .venv/bin/python -m pytest -p cpu_times -m "not slow" tests     # PYTHONPATH=tests

The file gets a line a test, also from several workers; the ten dearest files are printed at the end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest

FILE = Path(os.environ.get("RLHF_NB_TEST_TIMES", "test_times.txt")).absolute()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = patience.cpu_seconds([os.getpid()])
    yield
    with FILE.open("a", encoding="utf-8") as file:
        file.write(f"{max(0.0, patience.cpu_seconds([os.getpid()]) - before):.2f} {item.nodeid}\n")


def by_file(lines: list[str]) -> Counter[str]:
    """CPU seconds of each file."""
    total: Counter[str] = Counter()
    for line in lines:
        seconds, _, test = line.partition(" ")
        total[test.partition("::")[0]] += float(seconds)  # type: ignore[assignment]
    return total


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FILE.exists():
        total = by_file(FILE.read_text(encoding="utf-8").splitlines())
        terminalreporter.section(f"{sum(total.values()) / 60:.1f} CPU minutes; the dearest files, CPU seconds")
        for name, seconds in total.most_common(10):
            terminalreporter.write_line(f"{seconds:7.0f}  {name}")
