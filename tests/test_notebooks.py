"""Every notebook runs, each in a process of its own: modules as plain cells, tutorials in a real kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
ALL = sorted(p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
TUTORIALS = [p for p in ALL if p.parent.name == "tutorials"]

CELLS = "import sys; from pathlib import Path; from nbdev.test import test_nb; ok, seconds = test_nb(Path(sys.argv[1]), do_print=False); sys.exit(not ok)"
KERNEL = """
import sys, nbformat
from nbclient import NotebookClient
nb = nbformat.read(sys.argv[1], 4)
NotebookClient(nb, timeout=240, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
"""


def run(code: str, path: Path, cwd: Path) -> None:
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
        "PYTHONWARNINGS": "ignore,error:held-out rows",  # what is held out must not stand in the training rows: TextTrainer compares them
    }
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(cwd)], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{path.name}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("path", [p for p in ALL if p not in TUTORIALS], ids=lambda p: p.stem)
def test_module_notebook(path: Path, tmp_path: Path) -> None:
    run(CELLS, path, NBS)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_tutorial(path: Path, tmp_path: Path) -> None:
    for attempt in (1, 2):  # a kernel may fail to start on a loaded machine: one retry
        try:
            return run(KERNEL, path, tmp_path)
        except AssertionError:
            if attempt == 2:
                raise


LEAK = """
from rlhf_nb.data import toy
from rlhf_nb.train.sft import SFTConfig, SFTTrainer
rows = toy.sft_rows(8)
config = SFTConfig.preset("toy", output_dir="run", console=False, steps=1, epochs=None)
SFTTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), rows[{first}:], rows[:4])
"""


@pytest.mark.parametrize("code", [CELLS, KERNEL], ids=["cells", "kernel"])
def test_a_notebook_that_leaks_fails(code: str, tmp_path: Path) -> None:
    """The check above can fail: four held-out rows that are trained on, and four that aren't."""
    import nbformat

    for first in (4, 0):
        path = tmp_path / f"leak{first}.ipynb"
        cells = [nbformat.v4.new_code_cell(LEAK.format(first=first))]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        if first:
            run(code, path, tmp_path)
        else:
            with pytest.raises(AssertionError, match="held-out rows: 4 of 4 stand in the training rows"):
                run(code, path, tmp_path)
