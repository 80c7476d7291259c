"""Plain English names who acts: "nobody", "somebody", "whoever" and a thing that "stands" somewhere are a narrator's words.

They leave the notebooks, and with them the package, room by room: `LEFT` says how often each room may still have them, and may only fall.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NARRATED = re.compile(r"\b(?:nobody|somebody|whoever|stands(?! (?:for|still|idle)\b))\b", re.I)
LEFT = {
    ".": 23,
    "data": 19,
    "fast": 13,
    "losses": 3,
    "models": 8,
    "pipeline": 20,
    "rollout": 7,
    "run": 27,
    "scale": 14,
    "scoring": 4,
    "train": 17,
    "tutorials": 5,
}
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "docs/*.md"]


def lines(text: str) -> list[str]:
    """The lines that have such a word."""
    return [line.strip() for line in text.splitlines() if NARRATED.search(line)]


def by_room(notebooks: Path) -> dict[str, list[str]]:
    """The lines of each room's notebooks, prose and code, with the notebook's name before them."""
    found: dict[str, list[str]] = {}
    for path in sorted(notebooks.rglob("*.ipynb")):
        inside = path.relative_to(notebooks)
        room = inside.parts[0] if len(inside.parts) > 1 else "."
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found.setdefault(room, []).extend(f"{inside}: {x}" for c in cells for x in lines("".join(c["source"])))
    return found


def test_the_narrator_leaves_the_notebooks() -> None:
    found = by_room(ROOT / "nbs")
    more = {room: said for room, said in found.items() if len(said) > LEFT.get(room, 0)}
    told = "\n".join(f"{room}: {len(said)} lines, {LEFT.get(room, 0)} allowed\n" + "\n".join(said) for room, said in more.items())  # fmt: skip
    assert not more, f"say who acts:\n{told}"


@pytest.mark.parametrize("pages", PAGES)
def test_pages_have_no_narrator(pages: str) -> None:
    found = [f"{p.name}: {x}" for p in sorted(ROOT.glob(pages)) for x in lines(p.read_text(encoding="utf-8"))]
    assert not found, "say who acts:\n" + "\n".join(found)


def test_a_narrator_is_heard(tmp_path: Path) -> None:
    text = "Nobody waits.\nA mask stands before it.\nB stands for the batch.\nThe bystander understands.\n"
    cells = [{"cell_type": "markdown", "source": text}]
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert Counter(len(x) for x in by_room(tmp_path).values()) == {2: 1}
