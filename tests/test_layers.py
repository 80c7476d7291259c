"""The rooms of the package: imports point down only, and there are no circles between files."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def floors() -> tuple[dict[str, float], dict[str, set[str]]]:
    """From nbs/order.yml: the floor of each room, and of rooms that see less than their floor would let them, what they see."""
    spec = importlib.util.spec_from_file_location("ci_order", ROOT / ".ci" / "order.py")
    assert spec is not None and spec.loader is not None
    order = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(order)
    return order.floors(), {r.name: set(r.sees) for r in order.rooms() if r.sees}


FLOORS, ONLY = floors()
FLOORS["__main__"] = 10.0


@cache
def imports(package: Path) -> dict[str, set[str]]:
    """For each module, by dotted name below the package, the modules of the package that it imports anywhere in its text."""
    names = {}
    for path in package.rglob("*.py"):
        if path.name != "_modidx.py" and path != package / "__init__.py":
            parts = path.relative_to(package).with_suffix("").parts
            names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found = {}
    for name, path in names.items():
        inside = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                above = [package.name, *inside][: len(inside) + 2 - node.level] if node.level else []
                module = [*above, *(node.module or "").split(".")] if node.module else above
                if module[:1] == [package.name]:
                    within = module[1:]
                    targets |= {".".join([*within, a.name]) for a in node.names} & set(names)
                    targets |= {".".join(within)} & set(names)
            elif isinstance(node, ast.Import):
                targets |= {a.name.removeprefix(f"{package.name}.") for a in node.names} & set(names)
        found[name] = targets - {name}
    return found


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Each import that does not point down, in words."""
    wrong = []
    for module, targets in sorted(graph.items()):
        room = module.split(".")[0]
        if room not in FLOORS:
            wrong.append(f"{room} has no floor: add it to FLOORS")
            continue
        for target in sorted(targets):
            other = target.split(".")[0]
            if other != room and other in FLOORS:
                if FLOORS[other] >= FLOORS[room]:
                    wrong.append(f"{module} (floor {FLOORS[room]}) imports {target} (floor {FLOORS[other]})")
                elif room in ONLY and other not in ONLY[room]:
                    wrong.append(f"{module} must not know {target}")
    return wrong


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, directly or through others."""
    reach = {m: set(t) for m, t in graph.items()}
    changed = True
    while changed:
        changed = False
        for _, seen in reach.items():
            more = set().union(*(reach[t] for t in seen)) - seen if seen else set()
            changed |= bool(more)
            seen |= more
    rings = {frozenset(m for m in graph if m in reach[a] and a in reach[m]) for a in graph if a in reach[a]}
    return [set(r) for r in rings]


def test_imports_point_down() -> None:
    assert not upward(imports(ROOT / "rlhf_nb"))


def test_no_circles_between_files() -> None:
    assert not circles(imports(ROOT / "rlhf_nb"))


def test_benchmarks_have_no_circles() -> None:
    names = {p.stem: p for p in (ROOT / "benchmarks").glob("*.py")}
    graph = {}
    for name, path in names.items():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        used = {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        used |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        graph[name] = {u for u in used if u in names} - {name}
    assert not circles(graph)


def typed(package: Path) -> list[str]:
    """Modules outside `cli` that import what reads command lines."""
    out = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path.parent.name == "cli" or not re.search(r"\b(typer|click)\b", text):
            continue
        nodes = [*ast.walk(ast.parse(text))]
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
        if {name.partition(".")[0] for name in names} & {"typer", "click"}:
            out.append(path.relative_to(package).as_posix())
    return out


def test_commands_are_in_one_room_and_not_long() -> None:
    assert not typed(ROOT / "rlhf_nb"), (
        "what a command does is a function in its feature's room; the command is in cli/"
    )
    lines = [x for p in (ROOT / "rlhf_nb" / "cli").glob("*.py") for x in p.read_text(encoding="utf-8").splitlines()]
    assert len(lines) <= 1600


def test_a_command_elsewhere_is_seen(tmp_path: Path) -> None:
    files = {
        "cli/main.py": "import typer",
        "hub/push.py": "def f():\n    from typer import Option",
        "hub/card.py": "import os",
    }
    assert typed(write(tmp_path, files)) == ["hub/push.py"]


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "rlhf_nb" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "rlhf_nb"


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"losses/kl.py": "from ..train.ppo import PPO", "train/ppo.py": ""}, ["losses.kl (floor 1.0) imports train.ppo (floor 6.0)"]),
        ({"losses/kl.py": "def f():\n    from rlhf_nb.data import toy", "data/toy.py": ""}, ["losses.kl (floor 1.0) imports data.toy (floor 2.0)"]),
        ({"fast/a.py": "import rlhf_nb.losses.kl as kl", "losses/kl.py": ""}, ["fast.a (floor 1.0) imports losses.kl (floor 1.0)"]),
        ({"run/loop.py": "from ..models.load import x", "models/load.py": ""}, ["run.loop must not know models.load"]),
        ({"attic/a.py": ""}, ["attic has no floor: add it to FLOORS"]),
        ({"train/ppo.py": "from ..losses.kl import x\nfrom . import setup", "losses/kl.py": "", "train/setup.py": ""}, []),
    ],
    ids=["up", "up-inside-a-function", "sideways", "not-for-run", "unknown-room", "down"],
)  # fmt: skip
def test_the_rule_of_floors_can_fail(tmp_path: Path, files: dict[str, str], said: list[str]) -> None:
    assert upward(imports(write(tmp_path, files))) == said


def test_circles_are_seen(tmp_path: Path) -> None:
    files = {
        "train/a.py": "from .b import x",
        "train/b.py": "def f():\n    from . import c",
        "train/c.py": "import rlhf_nb.train.a",
    }
    assert circles(imports(write(tmp_path, files))) == [{"train.a", "train.b", "train.c"}]
    assert not circles(imports(write(tmp_path / "clean", {**files, "train/c.py": ""})))


def test_the_graph_is_read_at_all() -> None:
    graph = imports(ROOT / "rlhf_nb")
    assert len(graph) > 60 and sum(map(len, graph.values())) > 200
    assert {"losses.policy", "losses.kl"} <= graph["train.ppo"] and "errors" in graph["config"]
