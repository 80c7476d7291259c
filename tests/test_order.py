"""nbs/order.yml is the order: every notebook stands in it once, uses only what stands above it, and every relative link leads somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from test_layers import imports

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    """A script of .ci as a module."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ORDER = load("order")
LISTED = [path for room in ORDER.rooms() for path in room.notebooks]
PAGES = [
    *(p for p in (ROOT / "nbs").rglob("*") if p.suffix in (".ipynb", ".md") and ".ipynb_checkpoints" not in p.parts),
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
]


def exported(path: Path) -> str:
    """The module that a notebook exports, as its first cell says."""
    first = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    match = re.match(r"#\| default_exp ([a-z_.0-9]+)\n?$", first)
    return match[1] if match else ""


def texts(path: Path) -> list[str]:
    """The prose of a page: a Markdown file, or a notebook's text cells."""
    raw = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [re.sub(r"```.*?```", "", raw, flags=re.S)]
    return ["".join(c["source"]) for c in json.loads(raw)["cells"] if c["cell_type"] == "markdown"]


def broken(path: Path, root: Path = ROOT) -> list[str]:
    """The relative links of a page that lead nowhere, or out of the repository."""
    wrong = []
    for text in texts(path):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`(?!\])", "", text)):
            if re.match(r"[a-z]+:|#|attachment", target):
                continue
            place = (path.parent / target.split("#")[0]).resolve()
            if not place.exists() or not place.is_relative_to(root.resolve()):
                wrong.append(f"{path.relative_to(root)}: {target}")
    return wrong


def test_every_notebook_stands_in_the_order_once() -> None:
    lying = {p.relative_to(ROOT / "nbs").with_suffix("").as_posix() for p in PAGES if p.suffix == ".ipynb"}
    assert len(LISTED) == len(set(LISTED))
    assert set(LISTED) == lying - {"index"}


def test_a_notebook_lies_where_its_module_lies() -> None:
    for path in LISTED:
        if path.partition("/")[0] not in ("course", "solutions", "tutorials"):  # these export nothing
            assert exported(ROOT / "nbs" / f"{path}.ipynb") == path.replace("/", "."), path
        assert not re.search(r"\d{3}", path), f"{path}: a name, not a number"


def test_the_line_of_a_notebook_is_its_title() -> None:
    for room in ORDER.rooms():
        for path, line in room.notebooks.items():
            assert ORDER.title(ROOT / "nbs" / f"{path}.ipynb") == line, path


def test_a_notebook_uses_only_what_stands_above_it() -> None:
    place = {path.replace("/", "."): i for i, path in enumerate(LISTED)}
    graph = imports(ROOT / "rlhf_nb")
    late = [f"{m} uses {t}" for m in graph if m in place for t in graph[m] if t in place and place[t] > place[m]]
    assert not late, "\n".join(late)


def test_what_is_written_from_the_order_is_up_to_date() -> None:
    for path, text in ORDER.written().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)}: run `make export`"


def test_every_relative_link_leads_somewhere() -> None:
    wrong = [line for page in PAGES for line in broken(page)]
    assert not wrong, "\n".join(wrong)


def test_no_notebook_is_cited_by_a_number() -> None:
    cited = [
        f"{p.name}: {m}"
        for p in PAGES
        for t in texts(p)
        for m in re.findall(r"(?i)\bnotebooks? \d{3}\b|\b\d{3}_[a-z_]+\.ipynb", t)
    ]
    assert not cited, "\n".join(cited)


@pytest.mark.parametrize(
    ("link", "leads"),
    [
        ("../a.md", True),
        ("b.md", False),
        ("../../outside.md", False),
        ("https://x.org/y", True),
        ("../a.md#part", True),
    ],
)
def test_links_that_lead_nowhere_are_seen(tmp_path: Path, link: str, leads: bool) -> None:
    (tmp_path / "repo" / "docs").mkdir(parents=True)
    for path in (tmp_path / "repo" / "a.md", tmp_path / "outside.md"):
        path.write_text("text", encoding="utf-8")
    page = tmp_path / "repo" / "docs" / "page.md"
    page.write_text(f"see [it]({link})", encoding="utf-8")
    assert (broken(page, tmp_path / "repo") == []) is leads
