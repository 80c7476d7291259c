"""What keeps the house small: no inheritance as pagination, no module that is too long without a reason, no names of one letter."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONG = 500  # lines of code in a module
WIDE = 120  # characters of a line
MOST = {ast.ClassDef: 200, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}  # lines of a class, of a function
LARGE: dict[str, str] = {}  # classes above, and why


def modules(root: Path) -> dict[str, Path]:
    """Modules of a package by dotted name, without what nbdev writes for itself."""
    package = root / "rlhf_nb"
    return {
        ".".join(p.relative_to(package).with_suffix("").parts): p
        for p in sorted(package.rglob("*.py"))
        if p.name != "_modidx.py"
    }


def cells(path: Path) -> list[dict[str, str]]:
    """A notebook's cells as kind and text."""
    return [
        {"kind": c["cell_type"], "text": "".join(c["source"])}
        for c in json.loads(path.read_text(encoding="utf-8"))["cells"]
    ]


def users_code(root: Path) -> Iterator[ast.Module]:
    """What uses the package from outside: tests, benchmarks, and the cells of notebooks that are not exported."""
    for folder in ("tests", "benchmarks"):
        for path in sorted((root / folder).glob("*.py")):
            yield ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted((root / "nbs").rglob("*.ipynb")):
        for cell in cells(path):
            if cell["kind"] == "code" and not re.match(r"\s*#\|\s*export", cell["text"]):
                try:
                    yield ast.parse(cell["text"])
                except SyntaxError:  # a cell with a shell command
                    continue


def name_of(node: ast.expr) -> str:
    """The last part of a name: `b.Base` and `Base[int]` are Base."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def children_of(tree: ast.Module) -> list[tuple[str, str]]:
    """(base, class) for every class statement."""
    return [(name_of(b), n.name) for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for b in n.bases]


def uses(trees: Iterable[ast.Module]) -> tuple[Counter[str], set[str]]:
    """How many classes derive from each name, and what is called."""
    families, made = Counter[str](), set[str]()
    for tree in trees:
        families.update(base for base, _ in set(children_of(tree)))
        made |= {name_of(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return families, made


def only_children(root: Path) -> list[str]:
    """Bases with one child in all, in their own module, of which nobody ever makes an object: one class on two pages."""
    trees = {name: ast.parse(p.read_text(encoding="utf-8")) for name, p in modules(root).items()}
    families, made = uses(trees.values())
    found = []
    for module, tree in trees.items():
        own = {n.name for n in tree.body if isinstance(n, ast.ClassDef)}
        pairs = [(b, c) for b, c in children_of(tree) if b in own and b not in made and families[b] == 1]
        found += [(module, *pair) for pair in pairs]
    if found:  # reading all that uses the package takes seconds
        more, elsewhere = uses(users_code(root))
        found = [(m, b, c) for m, b, c in found if b not in elsewhere and not more[b]]
    return [f"{m}: {b} has no child but {c}, and nobody makes a {b}: make them one class" for m, b, c in found]


def code_lines(text: str) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    tree, docstrings = ast.parse(text), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and i not in docstrings for i, line in lines)


def too_long(root: Path) -> list[str]:
    """Modules above the limit whose notebook doesn't say `more than 500 lines ... because ...` in its first text."""
    found = []
    for module, path in modules(root).items():
        n = code_lines(path.read_text(encoding="utf-8"))
        source = re.search(r"File to edit: (\S+\.ipynb)", path.read_text(encoding="utf-8"))
        texts = (
            [c["text"] for c in cells((path.parent / source[1]).resolve()) if c["kind"] == "markdown"]
            if source
            else [""]
        )
        if n > LONG and not re.search(rf"more than {LONG} lines.*because", texts[0], re.S | re.I):
            found.append(f"{module} has {n} lines of code, more than {LONG}, and its first text gives no reason")
    return found


def large(root: Path) -> list[str]:
    """Classes and functions with more lines than `MOST`, docstrings and blank lines counted, by dotted name."""
    found = []
    for module, path in modules(root).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            most = MOST.get(type(node))  # type: ignore[call-overload]
            if most is not None and node.end_lineno - node.lineno + 1 > most:  # type: ignore[attr-defined]
                found.append(f"{module}.{node.name}")  # type: ignore[attr-defined]
    return found


def short_names(root: Path) -> list[str]:
    """Public names of one capital letter (`T`, `M_`): of use to nobody outside."""
    found = []
    for module, path in modules(root).items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and [name_of(t) for t in node.targets] == ["__all__"]:
                names = [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
                found += [
                    f"{module} offers {n!r}: begin it with an underscore"
                    for n in names
                    if re.fullmatch(r"[A-Z]_*", str(n))
                ]
    return found


def test_no_class_is_spread_over_two() -> None:
    found = only_children(ROOT)
    assert not found, "\n".join(found)


def test_long_modules_say_why() -> None:
    found = too_long(ROOT)
    assert not found, "\n".join(found)


def test_no_line_is_wider_than_a_page() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{number} has {len(line)} characters, more than {WIDE}"
        for path in modules(ROOT).values()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > WIDE and not line.startswith("__all__ = [")  # which nbdev wraps for itself
    ]
    assert not wide, "\n".join(wide)


def test_public_names_say_something() -> None:
    found = short_names(ROOT)
    assert not found, "\n".join(found)


def tree(root: Path, module: str, text: str = "", cell: str = "") -> Path:
    """A package of one module with its notebook."""
    for folder in ("rlhf_nb", "nbs", "tests", "benchmarks"):
        (root / folder).mkdir(parents=True)
    head = "# AUTOGENERATED! DO NOT EDIT! File to edit: ../nbs/a.ipynb.\n"
    (root / "rlhf_nb" / "a.py").write_text(head + module, encoding="utf-8")
    made = [
        {"cell_type": "code", "source": "#| default_exp a"}, {"cell_type": "markdown", "source": text},
        {"cell_type": "code", "source": "#| export\n" + module}, {"cell_type": "code", "source": cell},
    ]  # fmt: skip
    (root / "nbs" / "a.ipynb").write_text(json.dumps({"cells": made}), encoding="utf-8")
    return root


BASE = "class Base:\n    x = 1\n"


@pytest.mark.parametrize(
    ("module", "cell", "wrong"),
    [
        (BASE + "class Child(Base):\n    y = 2\n", "Child()", 1),
        (BASE + "class Child(Base):\n    y = 2\nclass Grandchild(Child):\n    z = 3\n", "Grandchild()", 2),
        (BASE + "class One(Base):\n    y = 2\nclass Two(Base):\n    y = 3\n", "", 0),
        (BASE + "class Child(Base):\n    y = 2\n", "class Mine(Base):\n    y = 3", 0),  # a person subclasses it
        (BASE + "class Child(Base):\n    y = 2\n", "Base()", 0),  # it is of use by itself
        ("class Child(dict):\n    y = 2\n", "", 0),
    ],
    ids=["one-child", "a-chain", "two-children", "for-users", "made-itself", "from-elsewhere"],
)
def test_only_children_are_seen(tmp_path: Path, module: str, cell: str, wrong: int) -> None:
    assert len(only_children(tree(tmp_path, module, cell=cell))) == wrong


def test_no_class_and_no_function_is_large() -> None:
    assert sorted(large(ROOT)) == sorted(LARGE), "one that is no longer large leaves the list"


def test_large_ones_are_seen(tmp_path: Path) -> None:
    for kind, most in (("class A:", 200), ("def f():", 60), ("async def f():", 60)):
        assert not large(tree(tmp_path / f"{kind[:3]}-fits", kind + "\n    x = 1" * (most - 1) + "\n"))
        assert large(tree(tmp_path / f"{kind[:3]}-large", kind + "\n    x = 1" * most + "\n"))


def test_long_modules_are_seen(tmp_path: Path) -> None:
    long = '"""One docstring."""\n\n# one comment\n' + "x = 1\n" * (LONG + 1)
    assert code_lines(long) == LONG + 1
    assert len(too_long(tree(tmp_path / "no", long, "# A title"))) == 1
    assert not too_long(tree(tmp_path / "yes", long, f"# A title\n\nMore than {LONG} lines, because it is one table."))
    assert not too_long(tree(tmp_path / "short", long.replace("x = 1\n", "", 1), "# A title"))


def test_short_names_are_seen(tmp_path: Path) -> None:
    assert len(short_names(tree(tmp_path, "__all__ = ['T', 'M_', 'KL', 'kl_terms', 'Tree']\n"))) == 2
