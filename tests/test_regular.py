"""Names in a run folder that are no files: every kind of them, in place of every file that a run leaves, for every reader and writer."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuzz
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rlhf_nb.bench.capability import CapabilityTester
from rlhf_nb.bench.results import Results
from rlhf_nb.bench.suites import Suite, SuiteConfig, run_rows
from rlhf_nb.cli.main import app
from rlhf_nb.config import read_config_file
from rlhf_nb.core import RlhfError
from rlhf_nb.data.hub import files_digest
from rlhf_nb.data.readers import read_rows
from rlhf_nb.data.rows import DataConfig, data_read
from rlhf_nb.data.templates import template_of
from rlhf_nb.decode.constrained import read_form
from rlhf_nb.feedback.store import Feedback, FeedbackStore, forget
from rlhf_nb.feedback.traffic import Served, TrafficLog, erase_traffic, read_traffic
from rlhf_nb.files import FileRefused, sha256_of, write_whole
from rlhf_nb.judges.constitution import load_constitution
from rlhf_nb.judges.endpoint import AnswerCache
from rlhf_nb.learn.checks import grade
from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
from rlhf_nb.pipeline.sweep import _open
from rlhf_nb.run.checkpoint import checkpoints_in, latest_complete, load_checkpoint, problem_of
from rlhf_nb.run.lock import RunLock, holder_of
from rlhf_nb.run.log import EventLog, RunDir, read_metrics
from rlhf_nb.run.state import roll_back
from rlhf_nb.scale.launch import Attempt, _note, _tail
from rlhf_nb.scale.live import Live
from rlhf_nb.serve.site import version_of
from rlhf_nb.train.sft import SFTConfig
from rlhf_nb.train.stage import read_json
from rlhf_nb.untrusted import Unreadable
from rlhf_nb.widgets.dashboard import Dashboard
from rlhf_nb.widgets.labels import LabelStore
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
        ):
            folder = strange(name, kind)
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


# --- folders that are no run's: of evaluations, launches, judges, feedback, labels, submissions --------------------------------------


def of_an_evaluation(folder: Path) -> tuple[list[str], list[Callable[[], object]]]:
    suite = Suite(SuiteConfig(name="s", rule={"kind": "exact"}), [{"id": "a", "prompt": "1"}])
    ask = lambda: run_rows(
        suite, lambda rows: [[{"answers": ["1"], "scores": {"score": 1.0}}] for _ in rows], folder, {}
    )
    suite.save(folder / "suite.json"), ask()
    names = ["answers.jsonl", "asked.json", "suite.json", "results.json", "frozen.json"]
    return names, [ask, lambda: suite.save(folder / "suite.json"), lambda: Suite.read(folder / "suite.json"),
                   lambda: Results.read(folder), lambda: CapabilityTester.read(folder / "frozen.json")]  # fmt: skip


def of_a_launch(folder: Path) -> tuple[list[str], list[Callable[[], object]]]:
    def attempt() -> None:
        Attempt(folder, ["true"], dict(os.environ)).agent.wait()

    names = ["log.jsonl", "out.txt", "stack-0.txt", "rank-0.json", "metrics.jsonl"]
    return names, [lambda: _note(folder, "x"), attempt, lambda: _tail(folder / "out.txt"), lambda: Live(folder, print).look(),
                   lambda: _tail(folder / "stack-0.txt")]  # fmt: skip


def of_a_judge(folder: Path) -> tuple[list[str], list[Callable[[], object]]]:
    return ["cache.jsonl"], [lambda: AnswerCache(folder / "cache.jsonl").put("k", [0.5])]


def of_users(folder: Path) -> tuple[list[str], list[Callable[[], object]]]:
    store, traffic = FeedbackStore(folder / "feedback.jsonl"), TrafficLog(folder / "traffic.jsonl", True)
    said, told = (
        Feedback("rating", "up", "q", ("a",), ("v",), consent=True),
        Served(0.0, "1", "m", "v", "", 1, 1, None, 0.1, "stop"),
    )
    store.add("eve", said, "k"), traffic.add(told, "eve", "k")
    names = [
        "feedback.jsonl",
        "feedback.jsonl.key",
        "traffic.jsonl",
        "traffic.jsonl.key",
        "feedback.exports.jsonl",
        "labels.jsonl",
    ]
    return names, [store.all, lambda: store.add("eve", said, "k"), lambda: traffic.add(told, "eve", "k"), lambda: list(read_traffic(traffic.path)),
                   lambda: erase_traffic(traffic.path, "eve"), lambda: forget(store, "eve"), lambda: LabelStore(folder / "labels.jsonl")]  # fmt: skip


def of_a_course(folder: Path) -> tuple[list[str], list[Callable[[], object]]]:
    (folder / "a.json").write_text("{}")
    return ["a.json", "b.json", "grades.csv"], [lambda: grade(folder)]


def of_pictures(folder: Path) -> tuple[list[str], list[Callable[[], object]]]:
    EventLog(folder / "metrics.jsonl").append("step", 1, loss=1.0)
    return ["report.html", "figures/dashboard.png", "figures/overopt.png"], [
        lambda: report(folder),
        lambda: Dashboard(folder).show_still(),
    ]


def of_settings(folder: Path) -> tuple[list[str], list[Callable[[], object]]]:
    names = [
        "t.jinja",
        "schema.json",
        "rows.jsonl",
        "rows.csv",
        "rows.parquet",
        "rows.arrow",
        "rows.jsonl.zst",
        "c.yaml",
    ]
    return names, [lambda: template_of(f"{folder}/t.jinja"), lambda: read_form(json_schema=f"{folder}/schema.json"),
                   lambda: read_form(grammar=f"{folder}/schema.json"), *(lambda n=n: read_rows(folder / n) for n in names[2:7]),  # type: ignore[misc]
                   lambda: read_config_file(folder / "c.yaml"), lambda: load_constitution(folder / "c.yaml")]  # fmt: skip


def of_a_sweep(folder: Path) -> tuple[list[str], list[Callable[[], object]]]:
    base = SFTConfig.preset("toy")
    _open(folder, base, False)
    return ["base.yaml", "kind.json", "best.yaml"], [lambda: _open(folder, base, False), lambda: _open(folder, base, True),
                                                     lambda: base.save(folder / "best.yaml")]  # fmt: skip


def of_a_pipeline(folder: Path) -> tuple[list[str], list[Callable[[], object]]]:
    whole = RLHFPipeline(PipelineConfig.preset("toy", output_dir=str(folder)))
    whole.open_folder(resume=True)
    (folder / "sft").mkdir()
    return ["config.yaml", "sft/stage.json", "sft/config.yaml"], [lambda: whole.open_folder(resume=True), lambda: whole.open_folder(overwrite=True),
                                                                  lambda: read_config_file(folder / "sft")]  # fmt: skip


FOLDERS = (of_an_evaluation, of_a_launch, of_a_judge, of_users, of_a_course, of_pictures, of_settings, of_a_sweep, of_a_pipeline)  # fmt: skip


@pytest.mark.parametrize(
    "kinds", [("link", "pipe"), pytest.param((), marks=pytest.mark.slow)], ids=["two kinds", "all kinds"]
)
@pytest.mark.parametrize("make", FOLDERS, ids=lambda f: f.__name__[3:])
def test_no_folder_of_the_package_is_read_or_written_through_what_is_no_file(
    make: Callable[..., Any], kinds: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every file that evaluations, launches, judges, stores, courses and views keep, and every file that settings name."""
    victim, made = tmp_path / "mine" / "diary.txt", tmp_path / "mine" / "made.txt"
    victim.parent.mkdir()
    os.mkfifo(victim.with_name("pipe"))
    names, wrong, held = [], [], resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(fuzz.memory("VmSize") + 2000) << 20, held[1]))
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_AS, held))
    every = {**fuzz.kinds_of_names(victim), "terabyte": fuzz.sparse}
    for kind, put in ((k, every[k]) for k in kinds or every):
        for number in range(99):
            victim.write_text(SECRET)
            folder = tmp_path / f"{kind} {number}"
            (folder / "figures").mkdir(parents=True)
            names, acts = make(folder)
            if number == len(names):
                break
            name = names[number]
            if name in ("feedback.jsonl", "traffic.jsonl", "labels.jsonl") and kind.startswith("link"):
                continue  # whoever names these files may name a link: that is documented
            (folder / name).unlink(missing_ok=True)
            put(folder / name)
            for n, act in enumerate(acts):
                try:
                    refused_or(act, f"{name}: {kind}")
                except OSError:  # a sentence on the command line, too
                    pass
                except (Exception, fuzz.TooLong) as e:
                    wrong.append(f"{name} as a {kind}, act {n}: {type(e).__name__} {e}"[:200])
            if victim.read_text() != SECRET or made.exists():
                wrong.append(f"{name} as a {kind}: something outside was written")
                made.unlink(missing_ok=True)
    assert names and not wrong, "\n".join(wrong)


# --- every place that opens a run's files ------------------------------------------------------------------------------------------

OPENS = (
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "copy2",
    "copyfile",
    "touch",
    "savefig",
    "ParquetFile",
)
MAY = {  # all that is opened past `files`, and why nobody else can have put something else there
    "a file of the package or of a library": ["__init__", "fast.support", "train.registry", "aliases", "learn.exercises", "scale.cluster"],
    "no file, or this process's own": ["bench.compare", "cli.options", "judges.endpoint", "sandbox.runner", "widgets.charts", "learn.checks"],
    "in this package's own cache": ["data.hub", "models.get", "models.places"],
    "in a folder that was just made, and takes its place when it is whole": ["export.formats", "hub.push", "models.load", "models.merge", "models.shards",
                                                                            "models.heads", "rollout.vllm", "feedback.store", "feedback.versions"],
    "in a folder that check_model_folder has looked at": ["models.files", "data.foreign", "hub.card", "models.merge", "models.load", "models.shards"],
    "rows: only what is_file() calls one": ["data.readers"],
    "named on the command line, by who types it": ["serve.gate"],
    "with O_NOFOLLOW, or as a new file": ["run.lock", "run.checkpoint", "scale.launch"],
}  # fmt: skip
FEW = {"__init__": 1, "run.lock": 3, "run.checkpoint": 5, "scale.launch": 2, "feedback.store": 2, "feedback.versions": 1, "hub.card": 1, "learn.checks": 1,
       "bench.compare": 1, "judges.endpoint": 1, "sandbox.runner": 3, "export.formats": 2, "learn.exercises": 1}  # fmt: skip


def plain_opens(tree: ast.AST) -> list[str]:
    """Calls that open a file past `files`."""
    found = []
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        text = ast.unparse(call)
        own = (
            re.match(r"(run_dir|folder|run|runs|desk|self|self\.page)\.open\(", text)
            or "/proc/" in text
            or "resources.files" in text
        )
        if name in OPENS and not own:
            found.append(text[:100])
    return found


def test_files_are_opened_in_one_way() -> None:
    """Whatever opens a file past `files` stands in the table, so that a new place is a decision."""
    package, known, wrong = ROOT / "rlhf_nb", {m for modules in MAY.values() for m in modules}, []
    for path in package.rglob("*.py"):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        found = plain_opens(ast.parse(path.read_text(encoding="utf-8"))) if module not in ("files", "_modidx") else []
        if len(found) > (FEW.get(module, 99) if module in known else 0):
            wrong.append(f"{module}: {found}")
    assert not wrong, "\n".join(wrong)
    assert plain_opens(ast.parse("open(p)")) and plain_opens(ast.parse("(f / 'config.yaml').read_text()"))


def test_no_hash_is_made_of_a_hole(tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever hashes a file refuses a terabyte that takes no room, and says how far it is with a file that takes long."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    newest = checkpoints_in(copy / "checkpoints")[-1]
    huge = copy / "model" / "model.safetensors"
    for path in (tmp_path / "rows.jsonl", newest / "state.json", huge):
        path.unlink(missing_ok=True)
        fuzz.sparse(path)
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"]["state.json"]["bytes"] = 1 << 40
    (newest / "manifest.json").write_text(json.dumps(manifest))
    rows = DataConfig(path=str(tmp_path / "rows.jsonl"))
    with fuzz.limited(fuzz.SECONDS):
        assert "is a hole" in str(problem_of(newest))
        for act in (
            lambda: data_read(rows),
            lambda: files_digest(tmp_path / "rows.jsonl"),
            lambda: files_digest(tmp_path),
            lambda: sha256_of(huge),
            lambda: version_of(str(copy / "model")),
        ):
            with pytest.raises(FileRefused, match="is a hole"):
                act()
    clock = iter(range(0, 10**6, 11))
    monkeypatch.setattr("rlhf_nb.files.time.monotonic", lambda: next(clock))
    with pytest.warns(UserWarning, match="of 0 MB are hashed"):
        sha256_of(run / "metrics.jsonl")
    hashing = {
        "files": 1,
        "data.hub": 1,
        "widgets.runs": 1,
    }  # where bytes of files are hashed; the last one, the first 64 kB of settings
    for path in (ROOT / "rlhf_nb").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT / "rlhf_nb").with_suffix("").parts)
        functions = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
        reads = [
            f
            for f in functions
            if re.search(r"(sha256|blake2b)\(", t := ast.unparse(f)) and re.search(r"\.read\(|read_pieces\(", t)
        ]
        assert len(reads) == hashing.get(module, 0), f"{module}: {[f.name for f in reads]}"


def test_refusals_are_of_the_family_and_oserrors(tmp_path: Path) -> None:
    assert issubclass(FileRefused, RlhfError) and issubclass(FileRefused, OSError)
    with pytest.raises(FileRefused, match="is a directory, expected a file. Delete it"):
        write_whole(tmp_path, "x")
