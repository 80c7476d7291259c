"""What a stranger sees first: README is short, defines its words, leads on; documents name only scripts that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT = re.compile(r"benchmarks/(\w+\.py)")


def prose(text: str) -> str:
    """A page without its blocks and spans of code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"```.*?```", "", text, flags=re.S))


def named() -> dict[str, set[str]]:
    """The benchmarks that pages, notebooks and modules name, and where."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "nbs").rglob("*.ipynb")]
    pages += [*(ROOT / "rlhf_nb").rglob("*.py"), ROOT / "benchmarks" / "README.md", ROOT / "Makefile"]
    where: dict[str, set[str]] = {}
    for page in pages:
        for name in SCRIPT.findall(page.read_text(encoding="utf-8")):
            where.setdefault(name, set()).add(page.relative_to(ROOT).as_posix())
    return where


def test_readme_is_short_and_the_changelog_too() -> None:
    assert len(README.encode()) <= 9 * 1024
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_readme_leads_to_notebooks_and_documents() -> None:
    table = README.split("## Where to go")[1].split("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    targets = [re.findall(r"\]\(([^)]+)\)", row)[0] for row in rows]
    assert len(targets) == 6 and sum(t.startswith("nbs/") for t in targets) >= 2
    assert sum(t.startswith("docs/") for t in targets) >= 2
    assert "docs/figures/cockpit.png" in README and "Apache-2.0" in README


@pytest.mark.parametrize("word", ["policy", "rollout", "reference", "nats", "Hydra"])
def test_readme_defines_its_words_where_they_first_stand(word: str) -> None:
    """A definition sets its word in italics; in prose no plain use stands before it."""
    text = prose(README)
    defined = re.search(rf"\*{word}\*", text)
    first = re.search(rf"\b{word}\b", text, re.I)
    assert defined and first and first.start() == defined.start() + 1, word


def test_readme_says_which_cpu_a_time_belongs_to() -> None:
    """Every sentence about minutes of the real model names instructions and number format."""
    part = README.split("## A real model, before and after")[1].split("## ")[0]
    timed = [s for s in re.split(r"(?<=\.) ", part) if "minutes" in s]
    assert len(timed) == 2
    assert "AVX-512" in timed[0] and "bf16" in timed[0] and "AVX2" in timed[1] and "fp32" in timed[1]


def test_documents_name_benchmarks_that_are_there() -> None:
    here = {p.name for p in (ROOT / "benchmarks").glob("*.py")}
    missing = {name: sorted(pages) for name, pages in named().items() if name not in here}
    assert not missing, missing
