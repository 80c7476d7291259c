"""The examples of CONTRIBUTING.md run as they stand, one after the other."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_nb.losses.preference import LOSSES
from rlhf_nb.run.log import read_metrics
from rlhf_nb.train import registry

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    assert len(BLOCKS) == 5  # loss, method, family, reward, widget
    try:
        for block in BLOCKS:
            exec(block, names)
        assert registry.methods()["focal"].trainer is names["FocalTrainer"]
        pair = names["PairLogps"](*(torch.tensor([x]) for x in (-1.0, -1.0, -1.0, -1.0)), *2 * [torch.tensor([1])])
        assert float(names["squared_hinge"](pair, beta=0.1)) == 1.0
        assert [e["step"] for e in names["history"]] == [1, 2]
        assert names["event"]["reward"] < 0
        assert [e["step"] for e in read_metrics(tmp_path / "run") if e["type"] == "step"] == [1, 2]
    finally:
        LOSSES.pop("squared_hinge", None)
        registry._METHODS.pop("focal", None)


def test_paths_and_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
    for path in re.findall(r"`((?:nbs|docs|tests)/[\w./]+\.\w+)`", TEXT):
        assert (ROOT / path).exists(), path


FILES = dict(re.findall(r"^\| (a [a-z ]+) \| (\d) \|", TEXT, re.M))


def exported(code: str) -> dict[str, Any]:
    """A block of CONTRIBUTING as a cell of a notebook that is exported."""
    lines = f"#| export\n{code}".splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "id": "c0de", "metadata": {}, "outputs": [], "source": lines}


def add_cells(path: Path, *cells: dict[str, Any], like: Path) -> Path:
    """Append cells to a notebook; a new one is named after its module and has a title."""
    if path.exists():
        book = json.loads(path.read_text(encoding="utf-8"))
    else:
        module = f"{path.parent.name}.{path.stem}"
        title = {"cell_type": "markdown", "id": "t1t1e", "metadata": {}, "source": [f"# {path.stem.title()}"]}
        first = exported("") | {"source": [f"#| default_exp {module}"], "id": "f1r57"}
        book = json.loads(like.read_text(encoding="utf-8")) | {"cells": [first, title]}
    book["cells"] += cells
    path.write_text(json.dumps(book), encoding="utf-8")
    return path


def test_what_the_table_promises(tmp_path: Path) -> None:
    """Followed in a copy of the repository: these files are written by hand, and then everything knows what was added."""
    for name in ("nbs", "rlhf_nb", ".ci", "docs"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        )
    for name in ("settings.ini", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    nbs, like = tmp_path / "nbs", ROOT / "nbs" / "data" / "worlds.ipynb"
    loss, method, _, reward, widget = BLOCKS
    by_hand = {
        "a preference loss": [
            add_cells(nbs / "losses" / "preference.ipynb", exported(loss.split("\n\n\n", 1)[1]), like=like)
        ],
        "a method": [add_cells(nbs / "train" / "focal.ipynb", exported(method), like=like)],
        "a reward": list[Path](),
        "a widget": [
            add_cells(
                nbs / "widgets" / "mine.ipynb",
                exported(f"def mine():\n    {widget.strip().splitlines()[0]}"),
                like=like,
            )
        ],
    }
    assert {k: len(v) for k, v in by_hand.items()} == {k: int(FILES[k]) for k in by_hand}
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*command: str) -> str:
        told = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=300
        )
        assert told.returncode == 0, told.stderr[-2000:]
        return told.stdout

    changed = [str(p) for paths in by_hand.values() for p in paths]
    run("-c", f"from nbdev.export import nb_export\nfor p in {changed!r}: nb_export(p)")
    run(".ci/order.py")
    run(".ci/order.py", "--check")
    spec = importlib.util.spec_from_file_location("test_layers", ROOT / "tests" / "test_layers.py")
    assert spec is not None and spec.loader is not None
    layers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(layers)
    graph = layers.imports(tmp_path / "rlhf_nb")
    assert "train.focal" in graph and "widgets.mine" in graph and not layers.upward(graph) and not layers.circles(graph)
    asked = (
        "from rlhf_nb.train import registry; m = registry.methods(); print(list(m)[-1], m['focal'].trainer.__module__)"
    )
    asked += "; from rlhf_nb.losses.preference import LOSSES; print('squared_hinge' in LOSSES)"
    assert run("-c", asked).split() == ["focal", "rlhf_nb.train.focal", "True"]
    assert "`focal`" in (tmp_path / "docs" / "architecture.md").read_text(encoding="utf-8") and ast.parse(reward)
