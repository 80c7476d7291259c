"""Plain English names who acts: "nobody", "somebody", "whoever" and a thing that "stands" somewhere are a narrator's words.

Neither notebooks (and with them the package) nor pages have them.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NARRATED = re.compile(
    r"\b(?:nobody|somebody|whoever|stands(?! (?:for|still|idle)\b))\b(?!/)", re.I
)  # nobody/model is a name
LEFT = {
    "data": 2,
    "decode": 2,
    "pipeline": 25,
    "rewards": 1,
    "rollout": 35,
    "run": 15,
    "scale": 1,
    "serve": 1,
    "top": 7,
    "train": 20,
    "widgets": 31,
}  # locals of a room that are still named so; may only fall
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


def narrated_locals(code: str) -> int:
    """How many assignments of some code bind `found`, `said` or `asked`, which don't say what the value is."""
    names = (n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return sum(n.id in ("found", "said", "asked") for n in names)


def test_locals_are_named_after_what_they_hold() -> None:
    counts: dict[str, int] = {}
    for path in (ROOT / "rlhf_nb").rglob("*.py"):
        room = (
            path.relative_to(ROOT / "rlhf_nb").parts[0].removesuffix(".py") if path.parent.name != "rlhf_nb" else "top"
        )
        counts[room] = counts.get(room, 0) + narrated_locals(path.read_text(encoding="utf-8"))
    assert (worse := {k: n for k, n in counts.items() if n > LEFT.get(k, 0)}) == {}, f"name what they hold: {worse}"


def test_a_narrated_local_is_counted() -> None:
    assert narrated_locals("found, x = f(said=1)\nfor asked in x:\n    kept = [said for said in asked]\n") == 3
