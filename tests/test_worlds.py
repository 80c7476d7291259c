"""The worlds that are made here stand in one registry: no other module of the package knows their names or their modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_nb.data.worlds import WORLDS

ROOT = Path(__file__).resolve().parent.parent
NAMES = {w.name for w in WORLDS}
# Two of the environments that come with the package are talks in a world.
OWN = {"data/worlds.py", "rollout/environments.py", *(f"data/{name}.py" for name in NAMES)}
PRESET = "toy"  # also the name of presets and of the setting that asks for them: a key, or what `preset`, `preset_values` and `load` are given


def _presets(tree: ast.AST) -> Iterator[ast.AST | None]:
    """The places where a name is that of a preset."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from node.keys
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("preset", "preset_values", "load"):
            yield from (x for a in node.args for x in ast.walk(a))


def known(text: str) -> set[str]:
    """The worlds that a module's text names, in strings or in imports."""
    tree = ast.parse(text)
    presets = {id(node) for node in _presets(tree)}
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and node.value in NAMES
            and not (node.value == PRESET and id(node) in presets)
        ):
            found.add(str(node.value))
        elif isinstance(node, ast.ImportFrom):
            words = {*(node.module or "").split("."), *(a.name for a in node.names)}
            found |= {f"import {n}" for n in NAMES & words if "data" in (node.module or "").split(".")}
        elif isinstance(node, ast.Import):
            found |= {f"import {n}" for n in NAMES for a in node.names if a.name == f"rlhf_nb.data.{n}"}
    return found


def test_a_worlds_name_stands_in_no_other_module() -> None:
    package = ROOT / "rlhf_nb"
    files = [p for p in package.rglob("*.py") if p.name != "_modidx.py" and str(p.relative_to(package)) not in OWN]
    files = [
        p for p in files if p.parent.name not in ("cli", "learn")
    ]  # `--toy` is an option there; its help comes without torch, so without worlds; lessons play in one
    assert len(files) > 150
    wrong = {str(p.relative_to(package)): w for p in files if (w := known(p.read_text(encoding="utf-8")))}
    assert not wrong


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('if name == "sums":\n    pass', {"sums"}),
        ('settings = {"data": {"path": "toy"}}', {"toy"}),
        ("from ..data import legs", {"import legs"}),
        ("from ..data.toy import gold_reward", {"import toy"}),
        ("import rlhf_nb.data.sums", {"import sums"}),
        ('presets: dict = {"default": {}, "toy": {"steps": 4}}', set()),
        ('presets: dict = {"default": {}, "toy": {"path": "toy"}}', {"toy"}),
        ('about = {"toy": "made here", "sums": "made here"}', {"sums"}),
        ('Config.preset("toy")\nload(None, [], "toy" if small else "default")', {"toy"}),
        ('of.load(None, [], "toy" if small else "default")', set()),
    ],
)
def test_the_search_sees_names(text: str, names: set[str]) -> None:
    assert known(text) == names
