"""What keeps the repository honest: exports, clean notebooks, style, types, README."""

from __future__ import annotations

import filecmp
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import call

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
BIN = Path(sys.executable).parent


def modules() -> list[Path]:
    return sorted(p for p in (ROOT / "rlhf_nb").rglob("*.py") if p.name not in ("__init__.py", "_modidx.py"))


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


def links() -> Any:
    """The script that writes the repository's address into notebooks."""
    spec = importlib.util.spec_from_file_location("links", ROOT / ".ci" / "links.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["links"] = module
    spec.loader.exec_module(module)
    return module


def test_links_say_where_the_repository_is() -> None:
    """Badges and install cells come from settings.ini, and nothing is installed by a bare name that a stranger could register."""
    found = links()
    where = found.place(ROOT)
    for path in NOTEBOOKS:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        assert found.relinked(text, name, where) == text, f"{name}: run `make export`"
        if path.stem != "index":
            assert f"{where.slug}/blob/{where.ref}/{name})" in text, f"{name} has no badge"
            assert '%pip install -q \\"rlhf_nb' in text and f"@ git+{where.url}@{where.ref}" in text, (
                f"{name}: no install cell"
            )
    bare = re.compile(r"pip install[^\n]*[ '\"]rlhf[_-]nb(?!.*@ git)")
    for path in [*NOTEBOOKS, *(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "rlhf_nb").rglob("*.py")]:
        assert not bare.search(path.read_text(encoding="utf-8")), f"{path} installs a bare name"


def test_the_repository_moves_by_one_file(tmp_path: Path) -> None:
    found = links()
    settings = (ROOT / "settings.ini").read_text(encoding="utf-8")
    address = found.place(ROOT).url
    names = "models/reference.ipynb", "core.ipynb"
    (tmp_path / "nbs" / "models").mkdir(parents=True)
    for name in names:
        shutil.copy(ROOT / "nbs" / name, tmp_path / "nbs" / name)
    moved = re.sub(r"(?m)^version = .*", "version = 3.1", settings.replace(address, "https://github.com/others/place"))
    (tmp_path / "settings.ini").write_text(moved, encoding="utf-8")
    assert len(found.relink(tmp_path)) == 2 and not found.relink(tmp_path)
    for name in names:
        text = (tmp_path / "nbs" / name).read_text(encoding="utf-8")
        assert f"/others/place/blob/v3.1/nbs/{name}" in text and "git+https://github.com/others/place@v3.1" in text
        assert address not in text and found.place(ROOT).slug not in text
    where = "settings.ini", "_modidx.py", "PKG-INFO", "CHANGELOG.md"
    kept = subprocess.run(
        ["git", "grep", "-l", found.place(ROOT).slug], cwd=ROOT, capture_output=True, text=True
    ).stdout
    assert not [p for p in kept.split() if not p.endswith((".ipynb", *where))], (
        "the address stands in settings.ini only"
    )


def test_versions_agree() -> None:
    """settings.ini, the package and the newest heading of the changelog."""
    version = re.search(r"(?m)^version = (\S+)", (ROOT / "settings.ini").read_text(encoding="utf-8"))
    heading = re.search(r"(?m)^## (\S+)(.*)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert version and heading
    release, _, unreleased = version[1].partition(".dev")
    assert heading[1] == release and ("unreleased" in heading[2]) == bool(unreleased), (version[1], heading[0])
    assert call("--version").split() == ["rlhf_nb", version[1]]


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
