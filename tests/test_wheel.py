"""The wheel, and the wheel built from the sdist, work in a fresh environment without any notebook tool."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USE = """
import importlib.util, rlhf_nb, rlhf_nb.cli.main, rlhf_nb.pipeline.stages
from pathlib import Path
assert not any(importlib.util.find_spec(m) for m in ("nbdev", "fastcore", "execnb", "nbformat")), "a notebook tool came along"
assert (Path(rlhf_nb.__file__).parent / "recipes" / "hh_small.yaml").exists()
print(rlhf_nb.__version__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    own = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=own, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_every_file_beside_the_modules_is_packed() -> None:
    packed = re.search(r"package_data=\{lib: (\[.*?\])\}", (ROOT / "setup.py").read_text(encoding="utf-8"))
    assert packed
    package = ROOT / "rlhf_nb"
    known = {p for pattern in ast.literal_eval(packed[1]) for p in package.glob(pattern)}
    there = {p for p in package.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc")}
    assert there == known, f"setup.py forgets {sorted(map(str, there - known))}"


@pytest.mark.slow
def test_wheel_and_sdist(tmp_path: Path) -> None:
    run(
        sys.executable, "-m", "build", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path
    )  # the wheel is built from the sdist
    wheel, sdist = next((tmp_path / "dist").glob("*.whl")), next((tmp_path / "dist").glob("*.tar.gz"))
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    version = run(python, "-c", USE, cwd=tmp_path).strip()
    assert version in wheel.name
    assert "sft" in run(python.with_name("rlhf-nb"), "--help", cwd=tmp_path)
    run(python, "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps", sdist, cwd=tmp_path)
    assert run(python, "-c", USE, cwd=tmp_path).strip() == version
