"""What keeps the repository honest: exports, clean notebooks, layers, style, types, README."""

from __future__ import annotations

import ast
import filecmp
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
BIN = Path(sys.executable).parent

# Layer of every module: imports point down only. `loop` and `losses` never import each other.
LAYERS = {
    "core": 0, "config": 0, "types": 0, "workers": 0,
    "decoder": 1, "logprobs": 1, "kl": 1, "advantages": 1, "losses": 1,
    "data": 2, "models": 3,
    "rollout": 4, "rewards": 4, "evaluate": 4,
    "engine": 5, "sharded": 5, "checkpoint": 5, "callbacks": 5, "loop": 5, "telemetry": 5,
    "train": 6, "launch": 7, "topology": 7, "cluster": 7, "widgets": 8, "report": 8,
    "cli": 9, "pipeline": 9, "serve": 9, "export": 9, "doctor": 9, "__main__": 9,
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(p for p in (ROOT / "rlhf_nb").rglob("*.py") if p.name not in ("__init__.py", "_modidx.py"))


def imported_parts(path: Path) -> set[str]:
    """Top-level parts of rlhf_nb which a module imports, wherever in the file the import stands."""
    here = path.relative_to(ROOT).with_suffix("").parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else ()
            names = [(*base, *(node.module or "").split("."))] if node.module else [(*base, a.name) for a in node.names]
            found |= {n[1] for n in names if n[0] == "rlhf_nb" and len(n) > 1 and n[1]}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("rlhf_nb.")}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT / "rlhf_nb")))
def test_layers(path: Path) -> None:
    own = path.relative_to(ROOT / "rlhf_nb").with_suffix("").parts[0]
    assert own in LAYERS, f"{own} has no layer: add it to LAYERS"
    for part in imported_parts(path) - {own}:
        assert LAYERS[part] <= LAYERS[own], f"{own} (layer {LAYERS[own]}) imports {part} (layer {LAYERS[part]})"
        if LAYERS[own] == 5:
            assert LAYERS[part] in (0, 1, 5), f"the loop's layer must not know {part}"
        if LAYERS[own] == 7:
            known = ("engine", "config", "core", "types", "telemetry", *(["train"] if own == "launch" else []))
            assert part in known, f"{own} must not know {part}"
        assert {own, part} != {"loop", "losses"}, "loop and losses meet in train.* only"


def test_layer_rule_can_fail(tmp_path: Path) -> None:
    bad = ROOT / "rlhf_nb" / "kl.py"
    source = bad.read_text(encoding="utf-8") + "\nfrom .train.ppo import PPO\n"
    tree_names = {
        n.module.split(".")[0]
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.ImportFrom) and n.level == 1 and n.module
    }
    assert "train" in tree_names and LAYERS["train"] > LAYERS["kl"]


def test_exports_match_notebooks(tmp_path: Path) -> None:
    copy = tmp_path / "repo"
    copy.mkdir()
    for name in ("nbs", "rlhf_nb", ".ci"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    shutil.copy(ROOT / "settings.ini", copy)
    subprocess.run([sys.executable, ".ci/export.py", "."], cwd=copy, check=True, capture_output=True, timeout=120)
    before = {p.relative_to(ROOT) for p in (ROOT / "rlhf_nb").rglob("*.py")}
    after = {p.relative_to(copy) for p in (copy / "rlhf_nb").rglob("*.py")}
    assert before == after, f"run `make export`: {sorted(map(str, before ^ after))}"
    differing = [str(p) for p in sorted(before) if not filecmp.cmp(ROOT / p, copy / p, shallow=False)]
    assert not differing, f"run `make export`: {differing} differ from what the notebooks export"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_is_clean(path: Path) -> None:
    nb = json.loads(path.read_text(encoding="utf-8"))
    assert (nb["nbformat"], nb["nbformat_minor"]) == (4, 5), "cells need stored ids: nbformat 4.5"
    assert set(nb["metadata"]) <= {"kernelspec"}, f"metadata {set(nb['metadata'])}: run nbdev_clean"
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(work|root|tmp)/|/home/\w+/", text), "holds a path of a machine"
    ids = [c["id"] for c in nb["cells"]]
    assert len(ids) == len(set(ids))
    for cell in nb["cells"]:
        assert not cell["metadata"], "cell metadata: run nbdev_clean"
        for output in cell.get("outputs", []):
            assert output["output_type"] != "error", "a stored output is an error"
            assert output.get("name") != "stderr", f"noise on stderr: {output['text'][:3]}"
        assert not cell.get("execution_count"), "execution counts: run nbdev_clean"
    shown = [
        c
        for c in nb["cells"]
        if c["cell_type"] == "code"
        and not c["source"][:1] == []
        and not re.match(r"\s*#\|\s*(export|hide|default_exp)", "".join(c["source"]))
    ]
    if len(shown) > 5:
        assert any(c["outputs"] for c in shown), "the notebook is the book: keep its outputs"


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "rlhf_nb", "nbs", "tests", "benchmarks", ".ci"], ["ruff", "format", "--check", "nbs", "tests", "benchmarks", ".ci"], ["mypy"]],
    ids=["ruff-check", "ruff-format", "mypy-strict"],
)  # fmt: skip
def test_style_and_types(command: list[str]) -> None:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_readme_is_generated() -> None:
    done = subprocess.run(
        [sys.executable, ".ci/readme.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_import_is_silent_fast_and_light() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import torch; t_torch = time.perf_counter() - t\n"
        "t = time.perf_counter(); import rlhf_nb; dt = time.perf_counter() - t\n"
        "heavy = [m for m in ('deepspeed', 'datasets', 'ipywidgets', 'matplotlib', 'nbdev', 'fastcore') if m in sys.modules]\n"
        "assert dt < 1.0, dt\nassert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


def test_package_needs_no_notebook_tool() -> None:
    """Importing every module pulls in no development tool and none of the lazy packages."""
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in modules() if p.stem != "__main__"]
    code = (
        f"import importlib, sys\nfor n in {names!r}: importlib.import_module(n)\n"
        "heavy = [m for m in ('deepspeed', 'datasets', 'ipywidgets', 'matplotlib', 'nbdev', 'fastcore', 'execnb') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
