"""Every notebook runs, each in a process of its own: modules, lessons and solutions as plain cells, tutorials and the first lesson in a real kernel.

Importing torch, transformers and the rest takes seconds, a hundred and seventy times over. So one process imports them, and each module's notebook runs
in a fork of it; our own package is imported by the notebook. Its objects are frozen: else each fork would look through all of them when it ends,
1.7 CPU seconds each time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT / "nbs"
ALL = sorted(p for p in NBS.rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
TUTORIALS = [
    p for p in ALL if p.parent.name == "tutorials" or p.stem == "lesson_01"
]  # run in a kernel, as a reader's: 5 CPU seconds each


def dotted(path: Path) -> str:
    """A notebook's name as its module's: `losses.kl`."""
    return ".".join(path.relative_to(NBS).with_suffix("").parts)


# Twenty CPU seconds and more, run in the slow suites; what they call is tested by the file beside them.
LONG = {
    "course.lab_a": "test_course.py",
    "course.lab_b": "test_course.py",
    "course.lesson_02": "test_course.py",
    "course.lesson_03": "test_course.py",
    "course.lesson_04": "test_course.py",
    "course.lesson_07": "test_course.py",
    "course.lesson_08": "test_course.py",
    "course.lesson_09": "test_course.py",
    "course.lesson_10": "test_course.py",
    "course.lesson_12": "test_course.py",
    "data.foreign": "test_untrusted.py",
    "feedback.annotators": "test_feedback.py",
    "models.merge": "test_merge.py",
    "pipeline.cycle": "test_cycle.py",
    "pipeline.stages": "test_gates.py",
    "pipeline.sweep": "test_settings_sweep.py",
    "rollout.workers": "test_draw_workers.py",
    "scale.launch": "test_control.py",
    "tutorials.a_policy_learns_to_use_a_calculator": "test_episodes.py",
    "tutorials.ai_feedback": "test_rlaif.py",
    "tutorials.feedback_to_next_version": "test_cycle.py",
    "tutorials.formulas_with_knobs": "test_losses_numbers.py",
    "tutorials.gsm8k_with_a_verifier": "test_verify.py",
    "tutorials.label_train_align": "test_gates.py",
    "tutorials.multi_gpu_from_a_cell": "test_control.py",
    "tutorials.reward_hacking_live": "test_health.py",
    "tutorials.rlhf_in_five_minutes": "test_cli.py",
    "tutorials.waiting_for_others": "test_tickets.py",
}

FORKS = """
import atexit, gc, json, os, signal, sys, threading, time
from pathlib import Path
import accelerate, datasets, matplotlib.pyplot, matplotlib_inline.backend_inline, peft, PIL.Image, pydantic.main, torch, transformers, transformers.models.llama.modeling_llama, typer.rich_utils
from nbdev.test import test_nb
matplotlib_inline.backend_inline.display = lambda figure, **_: figure.canvas.draw()  # once, not three times: each is thrown away
gc.freeze()
imported = time.process_time()
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        told = os.open(job["told"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(told, 1), os.dup2(told, 2)
        os.chdir(job["cwd"])
        signal.alarm(600)
        good = test_nb(Path(job["path"]), do_print=False)[0]
        threading._shutdown(), atexit._run_exitfuncs()  # as at the end of an interpreter, but for half a CPU second in which it takes itself apart
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(not good)
    _, status, used = os.wait4(pid, 0)
    print(os.waitstatus_to_exitcode(status), imported + used.ru_utime + used.ru_stime, flush=True)
"""
KERNEL = """
import sys, nbformat
from nbclient import NotebookClient
nb = nbformat.read(sys.argv[1], 4)
NotebookClient(nb, timeout=240, kernel_name="python3", resources={"metadata": {"path": sys.argv[2]}}).execute()
"""


LIVE = 60  # CPU seconds on one thread that a lesson or a lab may take, starting Python included

SETTINGS = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "OMP_NUM_THREADS": os.environ.get("RLHF_NB_TEST_THREADS", "1"),
    "MPLBACKEND": "Agg",
    "RLHF_NB_LEARN": str(Path(tempfile.mkdtemp()) / "learn.json"),  # what a learner has solved
    "PYTHONWARNINGS": "ignore,error:held-out rows",  # what is held out must not stand in the training rows: TextTrainer compares them
}


def run(code: str, path: Path, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(cwd)], cwd=cwd, env=os.environ | SETTINGS, capture_output=True, text=True, timeout=600
    )  # fmt: skip
    assert done.returncode == 0, f"{path}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="session")
def forks() -> Iterator[subprocess.Popen[str]]:
    """The process that has imported everything."""
    command = [sys.executable, "-c", FORKS]
    with subprocess.Popen(command, env=os.environ | SETTINGS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # fmt: skip
        yield process
        assert process.stdin is not None
        process.stdin.close()


def run_forked(forks: subprocess.Popen[str], path: Path, cwd: Path, told: Path) -> float:
    """Returns the CPU seconds that the notebook took, imports included."""
    assert forks.stdin is not None and forks.stdout is not None
    print(json.dumps({"path": str(path), "cwd": str(cwd), "told": str(told)}), file=forks.stdin, flush=True)
    code, _, used = (forks.stdout.readline().strip() or "the process that forks has died").partition(" ")
    assert code == "0", f"{path.name}: {code}\n{told.read_text(errors='replace')[-6000:] if told.exists() else ''}"
    return float(used)


def marked(paths: list[Path]) -> list[Any]:
    """Notebooks as parameters, the long ones marked."""
    return [pytest.param(p, id=dotted(p), marks=pytest.mark.slow if dotted(p) in LONG else ()) for p in paths]


@pytest.mark.parametrize("path", marked([p for p in ALL if p not in TUTORIALS]))
def test_module_notebook(path: Path, tmp_path: Path, forks: subprocess.Popen[str]) -> None:
    cwd = tmp_path if path.parent.name in ("course", "solutions") else NBS
    used = run_forked(forks, path, cwd, tmp_path / "told.txt")
    if path.parent.name == "course":
        print(f"{path.stem}: {used:.0f} CPU seconds")
        assert used <= LIVE, f"a lesson runs live within {LIVE} CPU seconds on one thread; this one took {used:.0f}"


@pytest.mark.parametrize("path", marked(TUTORIALS))
def test_tutorial(path: Path, tmp_path: Path) -> None:
    for attempt in (1, 2):  # a kernel may fail to start on a loaded machine: one retry
        before = sum(os.times()[2:4])  # of processes that have ended
        try:
            run(KERNEL, path, tmp_path)
            break
        except AssertionError:
            if attempt == 2:
                raise
    if path.parent.name == "course":
        print(f"{path.stem}: {sum(os.times()[2:4]) - before:.0f} CPU seconds, kernel included")
        assert sum(os.times()[2:4]) - before <= LIVE, f"a lesson runs live within {LIVE} CPU seconds on one thread"


LEAK = """
from rlhf_nb.data import toy
from rlhf_nb.train.sft import SFTConfig, SFTTrainer
rows = toy.sft_rows(8)
config = SFTConfig.preset("toy", output_dir="run", console=False, steps=1, epochs=None)
SFTTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), rows[{first}:], rows[:4])
"""


@pytest.mark.parametrize("kernel", [False, True], ids=["cells", "kernel"])
def test_a_notebook_that_leaks_fails(kernel: bool, tmp_path: Path, forks: subprocess.Popen[str]) -> None:
    """The check above can fail: four held-out rows that are trained on, and four that aren't."""
    import nbformat

    def ran(path: Path) -> None:
        run(KERNEL, path, tmp_path) if kernel else run_forked(forks, path, tmp_path, tmp_path / "told.txt")

    for first in (
        (0,) if kernel else (4, 0)
    ):  # a kernel takes 5 CPU seconds, and every tutorial shows that none fails by itself
        path = tmp_path / f"leak{first}.ipynb"
        cells = [nbformat.v4.new_code_cell(LEAK.format(first=first))]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        if first:
            ran(path)
        else:
            with pytest.raises(AssertionError, match="held-out rows: 4 of 4 stand in the training rows"):
                ran(path)


def test_a_long_notebook_has_fast_tests_elsewhere() -> None:
    names = {dotted(path) for path in ALL}
    assert set(LONG) <= names, sorted(set(LONG) - names)
    assert all((ROOT / "tests" / file).exists() for file in LONG.values())
