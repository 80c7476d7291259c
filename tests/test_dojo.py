"""The dojo's bugs are deliberate errors that tests notice, its page says what the runs said, and the runs say it still (slow)."""

from __future__ import annotations

import re

import dojo_runs
import mutants
import pytest

from rlhf_nb.learn.dojo import bugs


def test_the_page_is_about_this_table() -> None:
    text = dojo_runs.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", text, re.M)
    assert [int(n) for n, *_ in rows] == list(range(1, len(bugs()) + 1))
    for (_, about, who), bug in zip(rows, bugs(), strict=True):
        assert about == bug.about.removeprefix("rlhf_nb.")
        assert who == bug.entry["who"] if bug.entry["who"] else who.startswith(("silent", "not named"))
    named = sum(bool(bug.entry["who"]) for bug in bugs())
    assert f"**{named} of {len(rows)} ({named / len(rows):.0%}) are named**" in text and named >= 0.7 * len(rows)


def test_bugs_in_functions_are_deliberate_errors_that_tests_notice() -> None:
    known = {(m.symbol.rpartition(":")[2], m.old, m.new) for m in mutants.read_table() if not m.survives}
    for bug in (b for b in bugs() if "where" in b.entry):
        place, old, new = (bug.entry[k] for k in ("where", "old", "new"))
        assert any(
            place.endswith(f".{symbol}") and (old, new) == texts
            for symbol, *texts_ in known
            for texts in [tuple(texts_)]
        ), place


@pytest.mark.slow
def test_each_bug_is_named_as_the_page_says() -> None:
    """And no instrument complains of the same runs without a bug."""
    for run in dict.fromkeys(bug.entry["run"] for bug in bugs()):
        assert dojo_runs.heard(run, {}) == [], run
    wrong = []
    for n, bug in enumerate(bugs(), 1):
        said = dojo_runs.heard(bug.entry["run"], bug.entry)
        wrong += [(n, bug.about, said)] if dojo_runs.is_named(bug, said) != bool(bug.entry["who"]) else []
    assert not wrong, wrong
