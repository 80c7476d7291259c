"""Claims about trainings rest on at least three seeds, or say in ONE why one will do; the list only falls.

A claim is an assertion that compares by size a number that came out of a training (`fit()` is in the expression, in a function of the
notebook that it calls, or in what a name was made of). Where the training stands in a loop over seeds, or over three things and more,
several seeds were asked.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
ONE: dict[str, int] = yaml.safe_load((ROOT / "tests" / "data" / "one_seed.yaml").read_text(encoding="utf-8"))


def cells(path: Path) -> Iterator[ast.Module]:
    """The code of a notebook that Python can read."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        lines = "".join(cell["source"]).splitlines()
        if cell["cell_type"] == "code":
            try:
                yield ast.parse("\n".join(x for x in lines if not x.lstrip().startswith(("%", "!"))))
            except SyntaxError:
                continue


def _trains(called: ast.expr) -> bool:
    """Whether a call trains: `fit` of a trainer, `run` of a pipeline, `run_stage`."""
    words = ast.unparse(called)
    method = words.rpartition(".")[2] if isinstance(called, ast.Attribute) else ""
    return method == "fit" or words == "run_stage" or (method == "run" and "ipeline" in words)


def _several(node: ast.AST) -> bool:
    """Whether a loop goes over seeds, or over three things or more that are counted in the source."""
    loops = [node] if isinstance(node, ast.For) else list(getattr(node, "generators", ()))
    for loop in loops:
        words = ast.unparse(loop.target) + " " + ast.unparse(loop.iter)
        counted = loop.iter
        if isinstance(counted, ast.Call) and ast.unparse(counted.func) == "range" and len(counted.args) == 1:
            size = getattr(counted.args[0], "value", 0)
            if isinstance(size, int) and size >= 3 and "seed" in words:
                return True
        if "seed" in words and not isinstance(counted, ast.Call):
            return True
    return False


def claims(path: Path) -> list[str]:
    """The assertions of a notebook that compare what one training gave."""
    drawn, makers, found = set[str](), set[str](), list[str]()

    def trained(node: ast.AST, several: bool = False) -> bool:
        """Whether an expression holds a training of one seed."""
        several = several or _several(node)
        if isinstance(node, ast.Call) and not several:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if _trains(node.func) or name in makers:
                return True
        if isinstance(node, ast.Name) and node.id in drawn:
            return True
        return any(trained(child, several) for child in ast.iter_child_nodes(node))

    def visit(node: ast.AST, several: bool = False) -> None:
        several = several or _several(node)
        if isinstance(node, ast.FunctionDef):
            if any(isinstance(n, ast.Call) and _trains(n.func) for n in ast.walk(node)):
                makers.add(node.name)
            return
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            drawn.difference_update(names) if isinstance(node, ast.Assign) else None
            if trained(node.value, several) and not several:
                drawn.update(names)
        if isinstance(node, ast.Assert) and not several and trained(node.test):
            sizes = (ast.Lt, ast.Gt, ast.LtE, ast.GtE)
            if any(isinstance(n, ast.Compare) and isinstance(n.ops[0], sizes) for n in ast.walk(node.test)):
                found.append(ast.unparse(node.test)[:120])
        for child in ast.iter_child_nodes(node):
            visit(child, several)

    for cell in cells(path):
        visit(cell)
    return found


def test_no_new_claim_rests_on_one_seed() -> None:
    there = {
        p.relative_to(ROOT / "nbs").with_suffix("").as_posix(): claims(p)
        for p in sorted((ROOT / "nbs").rglob("*.ipynb"))
    }
    new = {name: found for name, found in there.items() if len(found) > ONE.get(name, 0)}
    assert not new, f"compare over at least 3 seeds, build the case by hand, or assert what is exact: {new}"
    less = {name: len(there.get(name, ())) for name, n in ONE.items() if len(there.get(name, ())) < n}
    assert not less, f"tests/data/one_seed.yaml may fall: {less}"


PLANTED = {
    "one": ("history = Trainer(config).fit()\nlast = history[-1]['reward']\nassert last > 1.0", 1),
    "by a function": ("def train(seed):\n    return Trainer(seed).fit()\nassert train(0)[-1] < train(1)[0]", 1),
    "three seeds": ("gains = [Trainer(s).fit()[-1] for seed in range(3)]\nassert min(gains) > 0", 0),
    "a loop": ("for seed in (0, 1, 2):\n    a = Trainer(seed).fit()\n    assert a[-1] > 0", 0),
    "two are few": ("gains = [Trainer(seed).fit()[-1] for seed in range(2)]\nassert min(gains) > 0", 1),
    "exact": ("a = Trainer(0).fit()\nassert a[-1]['step'] == 3", 0),
    "made again": ("a = Trainer(0).fit()\na = 3\nassert a > 2", 0),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_search_finds_what_is_planted(name: str, tmp_path: Path) -> None:
    source, n = PLANTED[name]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": source}]}))
    assert len(claims(tmp_path / "a.ipynb")) == n
