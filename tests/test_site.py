"""The site: every notebook, guide, public name, metric and paper has its place; every link leads somewhere; nothing comes from a network. `test_browser_site.py` builds it and looks at it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def load() -> ModuleType:
    """.ci/book.py."""
    spec = importlib.util.spec_from_file_location("book", ROOT / ".ci" / "book.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


book = load()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    book.sources(folder)
    return folder


def test_every_page_is_there_and_in_one_list(pages: Path) -> None:
    names = [name for room in book.rooms(ROOT) for name in room.notebooks]
    assert len(names) > 250 and all((pages / "nbs" / f"{name}.md").exists() for name in names)
    written = {p.relative_to(pages).as_posix().removesuffix(".md") for p in pages.rglob("*.md")}
    listed: list[str] = []
    for page in pages.rglob("*.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            at = page.parent.relative_to(pages)
            listed += [(at / line).as_posix() for line in block.splitlines() if line and line[0] != ":"]
    assert sorted(listed) == sorted(written - {"index"}), "each page in the side bar once"


def test_every_public_name_is_described(pages: Path) -> None:
    text = "\n".join(p.read_text(encoding="utf-8") for p in (pages / "api").glob("*.md")).replace("\\_", "_")
    heads = set(re.findall(r"^### (\w+)$", text, re.M))
    modules = [ROOT / "rlhf_nb" / f"{name}.py" for room in book.rooms(ROOT) for name in room.notebooks]
    trees = [book.ast.parse(p.read_text(encoding="utf-8")) for p in modules if p.exists()]
    exported = {name for tree in trees for name in book.public(tree)}
    lost = exported - heads - {"Bool", "Float", "Int"}  # shapes of jaxtyping, handed on
    assert len(exported) > 1000 and not lost, sorted(lost)


def test_errors_that_a_public_function_raises_are_named(pages: Path) -> None:
    """By its docstring, or gathered from its code; each module's part links its source."""
    text = "\n".join(p.read_text(encoding="utf-8") for p in (pages / "api").glob("*.md"))
    parts, lost, count = re.split(r"^## ([\w.]+)\n", text, flags=re.M)[1:], [], 0
    for module, part in zip(parts[::2], parts[1::2], strict=True):
        assert part.startswith("\nSource and explanation: ["), module
        tree = book.ast.parse((ROOT / "rlhf_nb" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        entries = re.split(r"^### (\S+)\n", part, flags=re.M)
        named = dict(zip((e.replace("\\_", "_") for e in entries[1::2]), entries[2::2], strict=True))
        for node in (n for n in tree.body if isinstance(n, book.ast.FunctionDef) and n.name in named):
            raises = {r.exc.func.id for r in book.ast.walk(node) if isinstance(r, book.ast.Raise) and hasattr(getattr(r.exc, "func", None), "id")}  # fmt: skip
            kinds = {k for k in raises if k.endswith("Error") and k != "NotImplementedError"}
            count += len(kinds)
            lost += [f"{module}.{node.name}: {k}" for k in kinds if k not in named[node.name]]
    assert count > 300 and not lost, (count, lost)


def test_papers_that_are_cited_have_their_line() -> None:
    known, cited = book.references(), book.cited()
    assert set(known) == set(cited) and len(cited) > 100
    for key, (what, why) in known.items():
        assert re.match(r'.+, "[^"]+"$', what) and why[-1] in ".?", key


def test_metrics_that_code_names_are_explained(pages: Path) -> None:
    text = (pages / "metrics.md").read_text(encoding="utf-8")
    panels = yaml.safe_load((ROOT / "rlhf_nb" / "widgets" / "panels.yaml").read_text(encoding="utf-8"))
    shown = set(re.findall(r"\b(?:objective|policy|val|perf|completions|rewards|rollout)/\w+", str(panels)))
    prefixes = "objective|policy|val|completions|pairs|sampling|logps|distill|steps|groups|perf|rollout"
    code = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "rlhf_nb").rglob("*.py"))
    shown |= set(re.findall(rf'"((?:{prefixes})/[a-z0-9_]+)"', code)) - {"steps/step"}
    spelled = re.sub(
        r"([\w/]*)\{([\w,]+)\}(\w*)", lambda m: " ".join(m[1] + part + m[3] for part in m[2].split(",")), text
    )
    lost = {n for n in shown if n not in spelled and n.removesuffix("_stderr") not in spelled}
    assert len(shown) > 50 and lost <= {"objective/kl_k2", "objective/kl_k3", "objective/kl_k3_stderr"}, (
        lost
    )  # said as _k2, _k3, ± _stderr


def test_every_when_it_goes_wrong_is_gathered(pages: Path) -> None:
    text = (pages / "troubleshooting.md").read_text(encoding="utf-8")
    headed = [n for room in book.rooms(ROOT) for n in room.notebooks
              if re.search(r"^#+ When it goes wrong$", book.prose(book.notebook(n)), re.M)]  # fmt: skip
    assert len(headed) > 70 and all(f"(nbs/{name}.md)" in text for name in headed)


def test_pages_hold_stored_outputs_and_no_directives(pages: Path) -> None:
    lesson = (pages / "nbs" / "course" / "lesson_05.md").read_text(encoding="utf-8")
    assert "from 16 to 128: -0.26" in lesson and "<figure" in lesson and "google.colab" not in lesson
    for page in (pages / "nbs").rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"^#\|", text, re.M) and "colab-badge.svg" not in text, page


def test_a_links_way_is_kept_or_refused(pages: Path) -> None:
    site = book.Site(pages)
    text = site.relinked(
        "[a](../losses/kl.ipynb#x) [b](../../LICENSE) [c](https://x.org)", "nbs/train/ppo.ipynb", "troubleshooting.md"
    )
    assert text == f"[a](nbs/losses/kl.md#x) [b]({site.web}/LICENSE) [c](https://x.org)"
    with pytest.raises(SystemExit, match="doesn't exist"):
        site.relinked("[a](../nothing.ipynb)", "nbs/train/ppo.ipynb", "x.md")


def test_dead_links_and_fetches_are_seen(tmp_path: Path) -> None:
    (tmp_path / "b.html").write_text('<p id="here">')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here"><a href="b.html#gone"><a href="c.html"><a href="https://x.org"><img src="https://x.org/p.png">'
        '<a href="#none"><script src="//cdn/x.js"></script>'
    )
    found = "\n".join(book.dead(tmp_path))
    assert found.count("\n") == 4 and all(w in found for w in ("#gone", "c.html", "#none", "x.org/p.png", "cdn/x.js"))


def test_code_that_scrolls_is_reached_by_keys(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<pre><span>x</span></pre> <pre class="b"> <pre tabindex="0"> <preface>')
    assert book.reachable(tmp_path) == 3 == book.reachable(tmp_path)
    assert (tmp_path / "a.html").read_text().count('tabindex="0"') == 3


def test_docstrings_become_lists() -> None:
    text = book.docstring("One *line*.\n\nArgs:\n    x: [B, C], *in* nats\n        or more.\nRaises:\n    DataError: `a_b` is empty.\n\nSource: a paper.")  # fmt: skip
    assert "One \\*line\\*." in text and "- `x`: \\[B, C\\], \\*in\\* nats" in text and "**Parameters**" in text
    assert "- `DataError`: `a_b` is empty." in text and text.endswith("Source: a paper.")


def test_sections_end_where_the_next_begins() -> None:
    text = "# a\n## When it goes wrong\nx\n```\n# no heading\n```\n### y\nz\n## b\nno"
    assert list(book.sections(text, book.WRONG)) == ["x\n```\n# no heading\n```\n**y**\nz"]


def test_how_tos_name_commands_that_exist() -> None:
    from rlhf_nb.cli import main

    rows = re.findall(
        r"^\| (?!you have|-)(.*) \| .* \| (.*) \|$", (ROOT / ".ci" / "book" / "howto.md").read_text(), re.M
    )
    assert len(rows) >= 11
    known = {c.name or c.callback.__name__ for c in main.app.registered_commands}
    for _, commands in rows:
        for verb in re.findall(r"`rlhf-nb ([\w-]+)", commands):
            assert verb in known or verb in re.findall(r"[\w-]+", (ROOT / "rlhf_nb" / "cli" / "facts.json").read_text())
