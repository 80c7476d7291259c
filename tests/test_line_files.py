"""Files of lines that can't be read: every reader says so, none takes such a file for an empty one."""

from __future__ import annotations

import ast
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fuzz
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rlhf_nb.bench.compare import CompareConfig, _judge_sides
from rlhf_nb.bench.suites import Suite, SuiteConfig, run_rows
from rlhf_nb.cli.main import app
from rlhf_nb.core import RlhfError
from rlhf_nb.data.readers import read_rows
from rlhf_nb.feedback.store import FeedbackStore, forget
from rlhf_nb.feedback.traffic import read_traffic
from rlhf_nb.judges.endpoint import AnswerCache
from rlhf_nb.run.log import ControlRequests, EventLog, read_metrics
from rlhf_nb.scale.live import Live
from rlhf_nb.untrusted import MAX_LINE
from rlhf_nb.widgets.labels import LabelStore
from rlhf_nb.widgets.reader import RunReader
from rlhf_nb.widgets.report import report, screen
from rlhf_nb.widgets.runs import Runs
from rlhf_nb.widgets.samples import read_samples

PACKAGE = Path(__file__).resolve().parent.parent / "rlhf_nb"


def endless(path: Path) -> None:
    """A line that begins like one, and goes on for 600 MB of zero bytes."""
    with path.open("wb") as file:
        file.write(b'{"step": 1, "type": "step", "a": "')
        file.truncate(600 << 20)


def long(path: Path) -> None:
    """A line of letters, longer than any may be, and without an end."""
    path.write_bytes(b"a" * (MAX_LINE + (1 << 20)))


def damaged(path: Path) -> None:
    """A whole line that is no JSON."""
    path.write_bytes(b"[1, 2\n")


def watched(folder: Path) -> str:
    """What the terminal shows of a run."""
    reader, out = RunReader(folder), io.StringIO()
    reader.poll()
    Console(file=out, width=300).print(screen([reader]))
    return out.getvalue()


def page(folder: Path) -> str:
    report(folder, folder / "report.html")
    return (folder / "report.html").read_text()


def lived(folder: Path) -> str:
    """What a launch says while its run's log grows."""
    path, said = folder / "metrics.jsonl", list[str]()
    made = path.rename(folder / "made")
    live = Live(folder, said.append)
    made.rename(path)
    live.look(all=True)
    return " ".join(said)


def compared(folder: Path) -> None:
    sides = [SimpleNamespace(folder=folder, name=n) for n in "ab"]
    Suite(SuiteConfig(name="s", rule={"kind": "exact"}), [{"id": "a", "prompt": "1"}]).save(folder / "suite.json")
    _judge_sides(sides, CompareConfig(), folder, None)  # type: ignore[arg-type]


def evaluated(folder: Path) -> None:
    suite = Suite(SuiteConfig(name="s", rule={"kind": "exact"}), [{"id": "a", "prompt": "1"}])
    ask = lambda: run_rows(
        suite, lambda rows: [[{"answers": ["1"], "scores": {"score": 1.0}}] for _ in rows], folder, {}
    )
    bad = (folder / "answers.jsonl").rename(folder / "bad")
    ask()
    bad.rename(folder / "answers.jsonl")
    ask()


def command(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code != 0 or "eft out" in done.output, done.output
    return done.output


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run.log: read_metrics": ("metrics.jsonl", read_metrics),
    "run.log: cut_back": ("metrics.jsonl", lambda f: EventLog(f / "metrics.jsonl").truncate_after(9)),
    "run.log: ControlRequests": ("control.jsonl", lambda f: ControlRequests(f / "control.jsonl").new()),
    "widgets.reader: watch": ("metrics.jsonl", watched),
    "widgets.reader: report": ("metrics.jsonl", page),
    "widgets.reader: the table of runs": ("metrics.jsonl", lambda f: Runs(f.parent).rows()),
    "widgets.reader: samples": ("samples.jsonl", read_samples),
    "widgets.labels: LabelStore": ("labels.jsonl", lambda f: LabelStore(f / "labels.jsonl")),
    "feedback.store: all": ("feedback.jsonl", lambda f: FeedbackStore(f).all()),
    "feedback.store: erase": ("feedback.jsonl", lambda f: forget(FeedbackStore(f), "eve")),
    "feedback.store: the command": ("feedback.jsonl", lambda f: command("feedback", str(f / "feedback.jsonl"))),
    "feedback.traffic: read_traffic": ("traffic.jsonl", lambda f: list(read_traffic(f / "traffic.jsonl"))),
    "data.readers: rows": ("rows.jsonl", lambda f: read_rows(f / "rows.jsonl")),
    "data.readers: a list": ("rows.json", lambda f: read_rows(f / "rows.json")),
    "data.readers: a table": ("rows.csv", lambda f: list(read_rows(f / "rows.csv"))),
    "judges.endpoint: AnswerCache": ("cache.jsonl", lambda f: AnswerCache(f / "cache.jsonl")),
    "bench.compare: answers": ("answers.jsonl", compared),
    "bench.suites: answers": ("answers.jsonl", evaluated),
    "scale.live: Live": ("metrics.jsonl", lived),
}  # fmt: skip
SAYS = ("left out", "damaged", "at most", "passed over", "zero bytes", "without a line's end", "can't be read", "not valid JSON", "longer", "dropped", "shorter",
        "'problem'")  # fmt: skip


NO_FAULT = ("data.readers: a table", damaged)  # it is a header


@pytest.mark.parametrize("make", [endless, long, damaged], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", READERS)
def test_a_file_of_lines_that_cant_be_read_is_told_of(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    """By an error, a warning, or in what is shown or handed back."""
    if (name, make) == NO_FAULT:
        return
    file, read = READERS[name]
    folder = tmp_path / "run"
    folder.mkdir()
    make(folder / file)
    said: Any = ""
    with warnings.catch_warnings(record=True) as told, fuzz.limited(fuzz.SECONDS):
        warnings.simplefilter("always")
        try:
            said = read(folder)
        except RlhfError as error:
            said = error
    text = " ".join([str(said), *(str(w.message) for w in told)])
    assert any(word in text for word in SAYS), f"taken as empty: {text[:300]!r}"


def test_every_reader_of_lines_is_in_the_table() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Call)]
        names = {n.func.id if isinstance(n.func, ast.Name) else getattr(n.func, "attr", "") for n in calls}
        if names & {"json_lines", "parse_lines"} or ("readline" in names and "open_regular" in names):
            found.add(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    known = {name.partition(":")[0] for name in READERS}
    # scale.launch looks at the end of a log only where a run hangs; pipeline.sweep reads a pipe of its own process
    assert found - {"untrusted", "scale.launch", "pipeline.sweep"} <= known, found - known
