"""Names in a run folder that are no files: every kind of them, in place of every file that a run leaves, for every reader and writer."""

from __future__ import annotations

import ast
import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import fuzz
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import RlhfError
from rlhf_nb.files import FileRefused
from rlhf_nb.pipeline.fork import prepare_fork
from rlhf_nb.run.checkpoint import checkpoints_in, latest_complete, load_checkpoint, problem_of
from rlhf_nb.run.lock import RunLock, holder_of
from rlhf_nb.run.log import EventLog, RunDir, read_metrics
from rlhf_nb.run.state import roll_back
from rlhf_nb.train.stage import read_json
from rlhf_nb.untrusted import Unreadable
from rlhf_nb.widgets.reader import open_runs
from rlhf_nb.widgets.report import metrics_text, report, screen
from rlhf_nb.widgets.samples import read_samples

ROOT = Path(__file__).resolve().parent.parent
SECRET = '{"step": 1, "type": "warning", "message": "dear-diary"}\n'


KINDS = list(fuzz.kinds_of_names(Path()))
SOME = [pytest.param(k, marks=[] if k in ("link", "pipe", "directory") else pytest.mark.slow) for k in KINDS]
NEVER_THERE = (
    "lock.json",
    "control.jsonl",
    "questions.jsonl",
    "metrics.rank1.jsonl",
    "starts.safetensors",
    "fork.json",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints, samples and a model."""
    folder = tmp_path_factory.mktemp("regular") / "run"
    words = ["steps=2", "mini_batch_size=4", "save_every=1", "async_save=false", "eval_every=1", "data.eval_size=4"]
    done = CliRunner().invoke(app, ["sft", "--toy", f"output_dir={folder}", *words])
    assert done.exit_code == 0, done.output
    EventLog(folder / "samples.jsonl").append("sample", 1, prompt="a", completion="b")
    return folder


def names(run: Path) -> list[str]:
    """Every file that a run leaves, and those that it may leave."""
    found = [p.relative_to(run).as_posix() for p in sorted(run.rglob("*")) if p.is_file()]
    newest = checkpoints_in(run / "checkpoints")[-1].name  # the files of one checkpoint stand for those of all
    return [*(n for n in found if not n.startswith("checkpoints") or newest in n), *NEVER_THERE]


@pytest.fixture
def strange(run: Path, tmp_path: Path) -> Iterator[Callable[[str, str], Path]]:
    """Makes copies of the run with one name replaced; at the end nothing outside of them has changed."""
    victim, made = tmp_path / "mine" / "diary.txt", tmp_path / "mine" / "made.txt"
    victim.parent.mkdir()
    victim.write_text(SECRET)
    os.mkfifo(victim.with_name("pipe"))

    def make(name: str, kind: str) -> Path:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        (copy / name).unlink(missing_ok=True)
        fuzz.kinds_of_names(victim)[kind](copy / name)
        return copy

    yield make
    assert victim.read_text() == SECRET and not made.exists(), "something was written outside of the folder"


def looks(folder: Path) -> Iterator[Callable[[], object]]:
    """Everything that reads a run."""
    run = RunDir(folder)
    yield lambda: read_metrics(folder)
    yield lambda: read_metrics(run.samples_path)
    yield lambda: read_samples(folder)
    yield run.config
    yield lambda: holder_of(folder)
    yield lambda: read_json(folder / "stage.json")
    yield lambda: load_checkpoint(latest_complete(run.checkpoints, warn=lambda text: None) or folder)

    def watch() -> str:
        readers = open_runs(folder)
        readers[0].poll()
        out = io.StringIO()
        Console(file=out, width=100).print(screen(readers))
        return out.getvalue() + metrics_text(readers)

    def page() -> str:
        report(open_runs(folder), folder.parent / "report.html")
        return (folder.parent / "report.html").read_text()

    yield watch
    yield page


def refused_or(act: Callable[[], object], what: str) -> object:
    """What comes of it; errors of the package are fine."""
    with warnings.catch_warnings(), fuzz.limited(fuzz.SECONDS, wall=60):
        warnings.simplefilter("ignore")
        try:
            return act()
        except (RlhfError, Unreadable) as error:
            assert len(str(error)) < 2000, what
            return ""


@pytest.mark.parametrize("kind", SOME)
def test_nothing_that_reads_a_run_follows_waits_or_crashes(
    kind: str, run: Path, strange: Callable[[str, str], Path]
) -> None:
    for name in names(run):
        folder = strange(name, kind)
        for look in looks(folder):
            shown = refused_or(look, f"{name}: {kind}")
            assert "dear-diary" not in str(shown), f"{name} as a {kind}: what it leads to was shown"


@pytest.mark.parametrize("kind", SOME)
def test_nothing_that_writes_into_a_run_follows_waits_or_crashes(
    kind: str, run: Path, strange: Callable[[str, str], Path]
) -> None:
    top = [n for n in names(run) if "/" not in n]
    for name in top:
        for act in (
            lambda f: RunDir(f).request("stop"),
            lambda f: EventLog(f / "metrics.jsonl").append("step", 3),
            lambda f: EventLog(f / "metrics.jsonl").truncate_after(1),
            lambda f: EventLog(f / "samples.jsonl", 1).append("step", 3),
            lambda f: RunDir(f).open({"steps": 3}, resume=True),
            lambda f: RunDir(f).open({"steps": 3}, overwrite=True),
            lambda f: roll_back(f, 1),
            lambda f: RunLock(f).__enter__().__exit__(),
            lambda f: prepare_fork(f, 1, to=f.parent / "forked"),
        ):
            folder = strange(name, kind)
            shutil.rmtree(folder.parent / "forked", ignore_errors=True)
            refused_or(lambda: act(folder), f"{name}: {kind}")  # noqa: B023


@pytest.mark.parametrize("kind", ["link", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS if k != "link")])
def test_a_training_goes_on_or_says_what_is_no_file(kind: str, run: Path, strange: Callable[[str, str], Path]) -> None:
    """The whole command, with --resume; what it can do without, it does without."""
    ended = {}
    for name in [n for n in names(run) if "/" not in n or (kind != "link" and not n.startswith("model/"))]:
        folder = strange(name, kind)
        with fuzz.limited(60, wall=300):
            done = CliRunner().invoke(app, ["sft", "--resume", f"output_dir={folder}", "--toy", "mini_batch_size=4", "steps=3",
                                            "save_every=1", "async_save=false", "data.eval_size=4"])  # fmt: skip
        assert done.exit_code == 0 or "Error: " in done.output, f"{name}: {done.output[-500:]} {done.exception!r}"
        ended[name] = done.exit_code
    refused = {n for n, code in ended.items() if code}
    assert {"metrics.jsonl", "samples.jsonl", "control.jsonl", "questions.jsonl"} <= refused
    if kind != "directory":  # which no file can be written over
        assert {"config.yaml", "lock.json", "stage.json", "data.json"}.isdisjoint(refused), "records are in the way"


def test_files_of_a_checkpoint(run: Path, strange: Callable[[str, str], Path]) -> None:
    newest = checkpoints_in(run / "checkpoints")[-1]
    for file in sorted(newest.iterdir()):
        for kind in KINDS:
            folder = strange(file.relative_to(run).as_posix(), kind)
            assert problem_of(folder / "checkpoints" / newest.name), f"{file.name} as a {kind} counts as whole"
    folder = strange("stage.json", "directory")
    sparse_one = folder / "checkpoints" / newest.name / "state.json"
    sparse_one.unlink()
    fuzz.sparse(sparse_one)
    with fuzz.limited(fuzz.SECONDS):
        assert problem_of(sparse_one.parent)


# --- every place that opens a run's files ------------------------------------------------------------------------------------------

OPENS = ("open", "read_text", "read_bytes", "write_text", "write_bytes", "copy2", "copyfile")
MAY = {  # in rooms that read or write run folders: what may be opened plainly, and why
    "run.lock": {"O_NOFOLLOW"},
    "run.checkpoint": {"path, os.O_RDONLY", "meta, indent", "'files': files", "problem, encoding", "failed.read_text"},
}  # fmt: skip
RUN_NAMES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "control.jsonl", "questions.jsonl", "stage.json", "lock.json",
             "config_path", "metrics_path", "samples_path", "control_path", "questions_path")  # fmt: skip


def plain_opens(module: str, tree: ast.AST) -> list[str]:
    """Calls that open a run's file past `files`: all of `run`, elsewhere those that name such a file."""
    found = []
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        text = ast.unparse(call)
        if name not in OPENS or text.startswith(("run_dir.open", "folder.open", "run.open")):
            continue
        of_a_run = any(n in text for n in RUN_NAMES)
        if of_a_run or (module.startswith("run.") and "/proc/" not in text):
            if not any(m in text for m in MAY.get(module, ())):
                found.append(f"{module}: {text[:100]}")
    return found


def test_a_runs_files_are_opened_in_one_way() -> None:
    package, found = ROOT / "rlhf_nb", []
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        if module != "files" and not module.startswith("hub.push"):  # push writes a folder that it has just made
            found += plain_opens(module, ast.parse(path.read_text(encoding="utf-8")))
    assert not found, "\n".join(found)
    assert plain_opens("run.x", ast.parse("open(p)\n")) and plain_opens(
        "hub.x", ast.parse("(f / 'config.yaml').read_text()")
    )


def test_refusals_are_of_the_family_and_oserrors() -> None:
    assert issubclass(FileRefused, RlhfError) and issubclass(FileRefused, OSError)
