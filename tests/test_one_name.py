"""One name, one thing: a public name of several modules means the same in each, or says here why not."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# names of several things, each with the reason why they share it
SHARED = {
    "build_model": "what a world offers: `data.worlds` calls it of the world at hand",
    "build_tokenizer": "what a world offers",
    "log": "the logger of a module, under the module's own name",
    "report": "the command, and the function that it calls",
    "speak": "what a world offers: an answer by the people of the world at hand",
    "watch": "the command, and the function that it calls",
}
Modules = dict[str, ast.Module]


def trees(package: Path) -> Modules:
    """A package's modules by dotted name, without what nbdev writes for itself."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        if path.name not in ("_modidx.py", "__main__.py"):
            found[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = ast.parse(path.read_text("utf-8"))
    return found


def offered(tree: ast.Module) -> list[str]:
    """The names in `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            return [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return []


def bindings(tree: ast.Module, module: str) -> Iterator[tuple[str, ast.stmt, tuple[str, str] | None]]:
    """What a module's first level binds: the name, the statement, and for an import the module and the name there."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            above = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((a.asname or a.name, node, (source, a.name)) for a in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node, None
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((n.id, node, None) for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))


def thing(modules: Modules, module: str, name: str) -> str:
    """Where a name is made, through imports; for another name of a type, the type."""
    for bound, node, source in bindings(modules[module], module) if module in modules else ():
        if bound == name and source and source != (module, name):
            return thing(modules, *source)
        if bound == name and isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            return ast.unparse(node.value).removeprefix("npt.")
    return f"{module}.{name}"


def shared(package: Path) -> dict[str, list[str]]:
    """Names that mean several things, with the modules that make them."""
    modules, found = trees(package), defaultdict(set)
    for module, tree in modules.items():
        if module != package.name:  # the front door offers names of others
            for name in offered(tree):
                found[name].add(thing(modules, module, name))
    return {name: sorted(things) for name, things in sorted(found.items()) if len(things) > 1}


def test_a_public_name_means_one_thing() -> None:
    found = shared(ROOT / "rlhf_nb")
    new = {name: things for name, things in found.items() if name not in SHARED}
    assert not new, "give each its own name, or a reason in SHARED:\n" + "\n".join(f"{k}: {v}" for k, v in new.items())
    assert set(SHARED) == set(found), f"of one thing only: {sorted(set(SHARED) - set(found))}"


def test_names_of_several_things_are_seen(tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    for name, text in {
        "a": "__all__ = ['plan', 'Row', 'Error', 'own']\ndef plan(): ...\nRow = dict[str, int]\nclass Error: ...\nown = 1\n",
        "b": "__all__ = ['plan', 'Row', 'Error']\nfrom p.a import Error\ndef plan(): ...\nRow = dict[str, int]\n",
        "c": "__all__ = ['Row', 'Error']\nfrom .b import Error\nRow = dict[str, str]\n",
        "d": "def own(): ...\n",
    }.items():
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    assert shared(package) == {"Row": ["dict[str, int]", "dict[str, str]"], "plan": ["p.a.plan", "p.b.plan"]}
