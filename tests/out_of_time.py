"""A pytest plugin for runs that end by the clock.

Tests that have not begun at the moment in RLHF_NB_TESTS_UNTIL (seconds since 1970) are skipped, and say so. What fails is written to the file
RLHF_NB_TESTS_FAILED at once, so that it is known even where the run is cut off before its report.
"""

from __future__ import annotations

import os
import time

import pytest

UNTIL = float(os.environ.get("RLHF_NB_TESTS_UNTIL", "inf"))
FAILED = os.environ.get("RLHF_NB_TESTS_FAILED")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > UNTIL:
        pytest.skip("no time left on this machine: it runs with another landing, or with `make test-all`")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and FAILED:
        with open(FAILED, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")
