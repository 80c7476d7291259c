"""What is installed is what was tested, file by file; what SECURITY.md promises is held by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_package_is_locked_by_its_hash() -> None:
    lines = [line for line in text("requirements.lock").splitlines() if not line.startswith("#")]
    wrong = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.!+]+( --hash=sha256:[0-9a-f]{64})+", line)]
    assert not wrong and len(lines) > 100
    locked = dict(line.split(" ")[0].split("==") for line in lines)
    assert {"pip", "setuptools", "wheel", "torch"} <= set(locked)
    pinned = dict(line.split("==") for line in text("constraints.txt").splitlines() if "==" in line)
    assert {k: locked[k] for k in pinned} == pinned


def test_setup_installs_by_hash_only() -> None:
    """Of the rule for Python 3.11 on Linux: every file has a hash, and nothing is fetched to build the package itself."""
    rule = text("Makefile").split("ifeq ($(LOCKED),1)\n")[1].split("else\n")[0]
    installs = [line for line in rule.splitlines() if "$(PIP)" in line and "pip check" not in line.lower()]
    assert "--require-hashes" in text("Makefile").split("HASHED :=")[1].splitlines()[0]
    fetched = [x for x in installs if "$(HASHED)" not in x and not x.strip().endswith("--no-build-isolation -e .")]
    assert [x.split("||")[0].strip() for x in fetched] == [
        "$(PIP) check > /dev/null"
    ]  # only where something is missing


def test_actions_are_pinned_by_commit() -> None:
    used = [u for p in (ROOT / ".github").rglob("*.yml") for u in re.findall(r"uses: *(\S+)", p.read_text("utf-8"))]
    assert used and not [u for u in used if not re.search(r"@[0-9a-f]{40}$", u)]


def rows() -> list[str]:
    """The rows of SECURITY.md's threats."""
    table = text("SECURITY.md").split("## Threats")[1].split("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("|")][2:]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[2:40])
def test_a_promise_names_what_holds_it(row: str) -> None:
    holds = row.rstrip("| ").split("|")[-1]
    tests = {
        n for p in (ROOT / "tests").glob("*.py") for n in re.findall(r"^def (test_\w+)", p.read_text("utf-8"), re.M)
    }
    files = re.findall(r"`?(tests/\w+\.py|docs/\w+\.md|nbs/[\w/]+\.ipynb)", holds)
    named = re.findall(r"(?<!/)\b(test_\w+)(?!\w|\.py)", holds)
    assert files or named or "the same" in holds, "a row without a test is no promise"
    assert not [f for f in files if not (ROOT / f).is_file()]
    assert not [n for n in named if n not in tests]
