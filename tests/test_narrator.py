"""Plain English names who acts: "nobody", "somebody", "whoever" and a thing that "stands" somewhere are a narrator's words.

Neither notebooks (and with them the package) nor pages have them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NARRATED = re.compile(
    r"\b(?:nobody|somebody|whoever|stands(?! (?:for|still|idle)\b))\b(?!/)", re.I
)  # nobody/model is a name
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "docs/*.md"]


def lines(text: str) -> list[str]:
    """The lines that have such a word."""
    return [line.strip() for line in text.splitlines() if NARRATED.search(line)]


def test_the_narrator_is_not_in_the_notebooks() -> None:
    found = []
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found += [f"{path.relative_to(ROOT)}: {x}" for c in cells for x in lines("".join(c["source"]))]
    assert not found, "say who acts:\n" + "\n".join(found)


@pytest.mark.parametrize("pages", PAGES)
def test_pages_have_no_narrator(pages: str) -> None:
    found = [f"{p.name}: {x}" for p in sorted(ROOT.glob(pages)) for x in lines(p.read_text(encoding="utf-8"))]
    assert not found, "say who acts:\n" + "\n".join(found)


def test_a_narrator_is_heard() -> None:
    text = "Nobody waits.\nA mask stands before it.\nB stands for the batch.\nThe bystander understands.\n"
    assert len(lines(text + "From nobody/model and somebody/rows.\n")) == 2
