"""Every module of the package is reached by a command, a method or a tutorial, or says here why it stays."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from test_layers import imports

ROOT = Path(__file__).resolve().parent.parent
# doors that a reader opens in Python, each with the guide or notebook that shows it
DOORS = {
    "widgets.debugger": "docs/board.md: a reward model, asked about an answer word by word",
    "rollout.steps": "docs/rewards.md: labels for a process reward model, by rollouts",
}


def named(code: str, modules: Iterable[str]) -> set[str]:
    """Modules of the package that a piece of code imports, by statement or by name."""
    text = re.sub(r"\(\s*\n([^)]*)\)", lambda m: m[1].replace("\n", " "), code)
    pairs = re.findall(r"from rlhf_nb\.?([\w.]*) import ([^\n#]+)", text)
    found = {base for base, _ in pairs}
    found |= {f"{base}.{x.split()[0]}".strip(".") for base, names in pairs for x in names.split(",") if x.strip()}
    by_name = re.findall(r"import rlhf_nb\.([\w.]+)|import_module\(\"rlhf_nb\.([\w.]+)\"\)", text)
    found |= {a or b for a, b in by_name}
    return found & set(modules)


def public(source: str) -> set[str]:
    """The modules that `import rlhf_nb` offers names of."""
    return set(re.findall(r"^from \.([a-z_.]+) import ", source, re.M))


def reached(graph: dict[str, set[str]], roots: Iterable[str]) -> set[str]:
    """Everything that roots import, directly or through others."""
    seen, left = set(roots), list(roots)
    while left:
        new = graph[left.pop()] - seen
        seen |= new
        left += new
    return seen


def graph_of(package: Path) -> dict[str, set[str]]:
    """`imports`, with what is imported by its name in a string, and without empty packages."""
    graph = {name: set(found) for name, found in imports(package).items()}
    for name in graph:
        path = (package / name.replace(".", "/")).with_suffix(".py")
        if path.exists():
            graph[name] |= named(path.read_text(encoding="utf-8"), graph)
    kept = {name for name in graph if not (package / name).is_dir()}
    return {name: graph[name] & kept for name in kept}


def roots() -> set[str]:
    """Commands, methods, helpers of lessons, public names and what tutorials import."""
    graph = graph_of(ROOT / "rlhf_nb")
    out = {
        name
        for name in graph
        if name == "__main__" or name.split(".")[0] in ("cli", "learn", "train") or name == "app.cli"
    }
    out |= public((ROOT / "rlhf_nb" / "__init__.pyi").read_text(encoding="utf-8"))
    for path in (p for room in ("course", "tutorials") for p in (ROOT / "nbs" / room).glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        out |= named("\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code"), graph)
    return out & set(graph)


def test_every_module_is_reached() -> None:
    graph = graph_of(ROOT / "rlhf_nb")
    lost = set(graph) - reached(graph, roots())
    assert lost == set(DOORS), "reach these modules, remove them, or say in DOORS who opens them"


def test_what_nothing_imports_is_lost(tmp_path: Path) -> None:
    package = tmp_path / "rlhf_nb"
    texts = {
        "cli/app.py": "from ..data import toy",
        "data/toy.py": 'import_module("rlhf_nb.data.late")',
        "data/late.py": "",
        "data/old.py": "",
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    graph = graph_of(package)
    assert set(graph) - reached(graph, {"cli.app"}) == {"data.old"}


def test_what_is_opened_in_python_is_shown() -> None:
    """A module that only a reader opens is imported in the guide that is named for it."""
    for name, where in DOORS.items():
        if guide := re.match(r"docs/\S+\.md", where):
            assert name.rpartition(".")[2] in (ROOT / guide[0]).read_text(encoding="utf-8"), (name, guide[0])
