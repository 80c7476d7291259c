"""What a stranger sees first: README is short, defines its words, leads on; documents name only scripts that are there."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import zipfile
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
    assert len((ROOT / "docs" / "results.md").read_bytes()) <= 50 * 1024
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


def test_readme_says_how_fast_it_is_as_the_newest_rows_do() -> None:
    """`make bench` measures anew; what has no row there stands among the comparisons of docs/results.md."""
    sentence = README.split("**Fast, on a CPU.**")[1].split("\n")[0]
    said = re.findall(r"([A-Z]+) ([\d.]+) times", sentence)
    newest = {row["name"]: row for row in map(json.loads, (ROOT / "docs" / "performance.jsonl").open(encoding="utf-8"))}
    table = (ROOT / "docs" / "results.md").read_text(encoding="utf-8").split("### Against TRL")[1].split("\n#")[0]
    assert {name for name, _ in said} == {"GRPO", "DPO"}
    for name, times in said:
        row = newest.get({"GRPO": "grpo-24", "DPO": "dpo"}[name])
        if row is not None:
            assert float(times) == round(row["ratio"], 1), f"{name}: docs/performance.md has {row['ratio']:.2f} now"
        else:
            (first,) = [r for r in table.splitlines() if r.startswith(f"| {name}, SmolLM2, all weights, bf16")]
            assert f"| {times}×" in first


def code_lines(path: Path) -> int:
    """Lines of a file that are no blank, comment or docstring."""
    text = path.read_text(encoding="utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            and ast.get_docstring(node, clean=False) is not None
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def test_benchmarks_are_what_documents_cite() -> None:
    """Scripts that pages name are there, those that are there stand in benchmarks/README.md, and together they stay small."""
    scripts = {p.name: code_lines(p) for p in (ROOT / "benchmarks").glob("*.py")}
    missing = {name: sorted(pages) for name, pages in named().items() if name not in scripts}
    assert not missing, missing
    listed = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").split("## What went")[0]
    assert not [name for name in scripts if name not in listed]
    assert sum(scripts.values()) <= 4500, sum(scripts.values())


def slug(heading: str) -> str:
    """The anchor that a heading gets where the repository is shown."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def test_anchors_lead_to_headings() -> None:
    """Links into a part of a document, from pages and notebooks."""
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "nbs").rglob("*.ipynb"),
    ]
    wrong, seen = [], 0
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)\s#:]*\.md)#([\w-]+)\)", page.read_text(encoding="utf-8")):
            text = re.sub(r"```.*?```", "", (page.parent / target).read_text(encoding="utf-8"), flags=re.S)
            seen += 1
            if anchor not in {slug(h) for h in re.findall(r"(?m)^#+ (.*)$", text)}:
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert seen >= 10 and not wrong, wrong


def test_public_names_are_known_in_a_zipped_package(tmp_path: Path) -> None:
    """They are read through the loader, wherever it has the package from."""
    place = tmp_path / "packed.zip"
    with zipfile.ZipFile(place, "w") as packed:
        for name in ("__init__.py", "__init__.pyi"):
            packed.write(ROOT / "rlhf_nb" / name, f"rlhf_nb/{name}")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import rlhf_nb; print(rlhf_nb.__file__, len(rlhf_nb.__all__))"
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, cwd=tmp_path)
    assert "packed.zip" in done.stdout and int(done.stdout.split()[-1]) > 40, done.stderr
