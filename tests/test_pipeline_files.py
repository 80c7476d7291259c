"""Every file of a folder that a pipeline really made, in turn something else: a link, a pipe, a device, a folder, a hole of a terabyte, half a line."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fuzz
import pytest
from typer.testing import CliRunner

from rlhf_nb.cli.main import app

SECRET = '{"step": 1, "type": "warning", "message": "dear-diary"}\n'
SETTINGS = (
    "console=false", "eval_prompts=2", "questions=1", "base.size=tiny", "sft.steps=2", "reward.steps=2", "ppo.steps=2", "ppo.save_every=1",
    "ppo.eval_every=1", "ppo.rollout_batch_size=8", "ppo.mini_batch_size=8", "gates.margin=0.5", "gates.reward_accuracy=0", "gates.finished_drop=null",
    "gates.length_factor=null", "sft.data.eval_size=4", "reward.data.eval_size=4",
)  # fmt: skip
BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda b: b"",
    "bad JSON": lambda b: b'{"a": [1, }\n',
    "another kind of JSON": lambda b: b"[[3]]\n",
    "half a line": lambda b: b[: len(b) // 2],
    "an endless line": lambda b: b"[" * 3_000_000,
    "no text": lambda b: b"\xff\xfe\x00\xd8" * 500,
}
KINDS = [*fuzz.kinds_of_names(Path()), "terabyte", *BYTES]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline's folder: three stages, gates, verdicts, report and results."""
    folder = tmp_path_factory.mktemp("pipeline") / "whole"
    done = CliRunner().invoke(app, ["run", "--toy", f"output_dir={folder}", *SETTINGS])
    assert done.exit_code == 0, done.output
    return folder


def files(folder: Path) -> list[str]:
    """Every file of it; the newest checkpoint of a stage stands for the older ones."""
    found = [p.relative_to(folder) for p in sorted(folder.rglob("*")) if p.is_file()]
    newest = {p.parent.parent: p.parent.name for p in found if p.parent.parent.name == "checkpoints"}
    return [str(p) for p in found if p.parent.name == newest.get(p.parent.parent, p.parent.name)]


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """A file that belongs to somebody else, a pipe beside it, and a bound on memory."""
    victim = tmp_path / "mine" / "diary.txt"
    victim.parent.mkdir()
    victim.write_text(SECRET)
    os.mkfifo(victim.with_name("pipe"))
    held = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(fuzz.memory("VmSize") + 3000) << 20, held[1]))
    yield victim
    resource.setrlimit(resource.RLIMIT_AS, held)


def put(path: Path, kind: str, victim: Path) -> None:
    """Something else in a file's place."""
    was = path.read_bytes()
    path.unlink()
    if kind in BYTES:
        path.write_bytes(BYTES[kind](was))
    else:
        {**fuzz.kinds_of_names(victim), "terabyte": fuzz.sparse}[kind](path)


def commands(folder: Path) -> dict[str, list[str]]:
    """What people type at a pipeline's folder."""
    return {
        "run": ["run", "--toy", "--resume", f"output_dir={folder}", *SETTINGS],
        "watch": ["watch", "--once", str(folder)],
        "list": ["runs", "list", str(folder)],
        "report": ["report", str(folder / "ppo")],
        "sample": ["sample", str(folder / "ppo/model"), "Where do otters live?", "--max-new-tokens", "2"],
    }


def fault(words: list[str], seconds: float) -> tuple[str, str]:
    """What is wrong with what a command does, and what it prints."""
    try:
        with fuzz.limited(seconds, wall=300):
            done = CliRunner().invoke(app, words)
    except fuzz.TooLong as e:
        return f"hangs: {e}", ""
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return f"{type(done.exception).__name__}: {done.exception}"[:300], done.output
    said = [line for line in done.output.splitlines() if line.startswith("Error: ")]
    if "Traceback" in done.output or (done.exit_code and not said):
        return f"code {done.exit_code}: {done.output[-300:]}", done.output
    return "dear-diary is shown" * ("dear-diary" in done.output) or "a long story" * any(
        len(s) > 900 for s in said
    ), done.output


def pairs(folder: Path, how: str) -> list[tuple[str, str]]:
    """The pipeline's and its stages' own files, or every file, the kinds in turn."""
    names = [n for n in files(folder) if how != "own files" or not ("model/" in n or "checkpoints/" in n)]
    return [(n, KINDS[i % len(KINDS)]) for i, n in enumerate(names)]


@pytest.mark.parametrize("how", ["own files", pytest.param("every file", marks=pytest.mark.slow)])
def test_a_pipelines_folder_is_never_followed_waited_for_or_a_traceback(
    how: str, pipeline: Path, tmp_path: Path, outside: Path
) -> None:
    wrong, copy = [], tmp_path / "copy"
    for name, kind in pairs(pipeline, how):
        for what, words in commands(copy).items():
            if what in ("run", "watch"):  # the others leave the folder as it is
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(pipeline, copy)
                put(copy / name, kind, outside)
            problem, shown = fault(words, 30)
            if problem:
                wrong.append(f"{name} as {kind}, {what}: {problem}")
            if outside.read_text() != SECRET or outside.with_name("made.txt").exists():
                wrong.append(f"{name} as {kind}, {what}: something outside was written")
                outside.write_text(SECRET), outside.with_name("made.txt").unlink(missing_ok=True)
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)
