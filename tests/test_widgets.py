"""Reader, charts, dashboard and report without a browser: damaged logs, other versions, no front end, one that is faked."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rlhf_nb.cli.main import app as cli_app
from rlhf_nb.core import RunError
from rlhf_nb.run.health import health_of
from rlhf_nb.run.log import EventLog, RunDir, read_metrics
from rlhf_nb.widgets import reader as reader_module
from rlhf_nb.widgets import report as report_module
from rlhf_nb.widgets.board import serve_board
from rlhf_nb.widgets.charts import Curve, Panel, line_chart, to_png
from rlhf_nb.widgets.dashboard import Dashboard
from rlhf_nb.widgets.imported import find_runs
from rlhf_nb.widgets.kernel import front_end
from rlhf_nb.widgets.panels import group_panels, still
from rlhf_nb.widgets.reader import RunReader, Series, open_runs
from rlhf_nb.widgets.report import metrics_text, report, serve_metrics, watch

ROOT = Path(__file__).resolve().parent.parent


def write(path: Path, steps: int = 20, begin: int = 1, **over: Any) -> EventLog:
    """A run that goes on."""
    RunDir(path).open({"steps": 100, "kl_budget": 6.0}, resume=True)
    log = EventLog(path / "metrics.jsonl")
    if begin == 1:
        offered = {
            "kl_coef": {"value": 0.05, "low": 0.0, "high": 10.0},
            "lr": {"value": 3e-4, "low": 0.0, "high": 0.03},
        }
        log.append("start", 0, method="ppo", total_steps=100, controls=offered, format=1)
    for s in range(begin, begin + steps):
        values = {
            "objective/scores": s / 50,
            "objective/kl": s / 20,
            "objective/kl_stderr": 0.1,
            "loss": 1 / s,
            "perf/step_s": 0.1,
        }
        log.append("step", s, **(values | over))
    return log


# ---------------------------------------------------------------------------------------------------------------------
# the reader, and what may be wrong with a folder


def test_a_run_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "later" / "run"
    reader = RunReader(path)
    assert not reader.poll() and reader.status.state == "waiting" and "there is no run in" in str(reader.status)
    assert reader.series("loss")[0].size == 0 and reader.config == {} and reader.samples() == [] and reader.events == []
    board = Dashboard(path)
    assert "waiting" in board.refresh()
    board.ask("stop")
    assert "no process would hear" in board.refresh()
    write(path)
    assert reader.poll() and reader.status.state == "running" and "20 of 100" in str(board.refresh())  # type: ignore[index]


def test_torn_last_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 5).close()
    whole = b'{"time": 1.0, "rank": 0, "step": 6, "type": "step", "loss": 0.25, "note": "\xc3\xa9"}\n'
    reader = RunReader(tmp_path)
    for cut in range(1, len(whole) - 1, 7):
        with open(tmp_path / "metrics.jsonl", "ab") as f:
            f.write(whole[:cut])
        reader.poll()
        assert reader.log.step == 5 and reader.log.damaged == 0
        os.truncate(tmp_path / "metrics.jsonl", os.path.getsize(tmp_path / "metrics.jsonl") - cut)
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(whole)
    assert reader.poll() and reader.last("loss") == 0.25 and reader.generation == 0


def test_cut_log_is_read_again(tmp_path: Path) -> None:
    log, reader = write(tmp_path, 30), RunReader(tmp_path)
    reader.poll()
    log.truncate_after(20)
    assert reader.poll() and reader.log.step == 20 and reader.generation == 1
    log.append("resume", 20)
    for s in range(21, 60):  # now it is longer than it was
        log.append("step", s, loss=-1.0)
    assert reader.poll() and reader.series("loss")[1].tolist() == [
        e["loss"] for e in read_metrics(tmp_path) if e["type"] == "step"
    ]
    log.truncate_after(40)
    for s in range(41, 90):
        log.append("step", s, loss=-2.0)
    assert reader.poll() and reader.generation == 2  # cut and grown beyond the old length between two looks
    assert reader.series("loss")[1][-1] == -2.0 and len(reader.series("loss")[0]) == 89


def test_folder_that_is_removed_and_made_anew(tmp_path: Path) -> None:
    import shutil

    path = tmp_path / "run"
    write(path, 30).close()
    reader = RunReader(path)
    reader.poll()
    shutil.rmtree(path)
    assert reader.poll() and reader.status.state == "waiting"
    write(path, 3).close()
    assert reader.poll() and reader.log.step == 3


def test_a_run_of_another_version(tmp_path: Path) -> None:
    log = write(tmp_path, 5)
    log.append("resume", 5, format=7, controls=None)
    log.append("holiday", 5, mood={"nested": [1, None]})  # an event this version does not know
    log.append(
        "step", 6, **{"new/metric": 1.0, "list": [1.0, 2.0], "text": "x", "flag": True, "loss": None, "nothing": None}
    )
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 7, "loss": 0.5}\n{"loss": 1}\n{"step": null, "type": "step", "loss": 2}\n42\n{"type": 3}\n')
    (tmp_path / "config.yaml").write_text("a: [1, 2\nb: }")
    reader = RunReader(tmp_path)
    reader.poll()
    assert "format 7, this reads 1" in reader.note and "3 line(s)" in reader.note
    assert reader.last("new/metric") == 1.0 and reader.last("loss") == 0.5 and "list" not in reader.keys
    assert reader.config == {} and any(e["type"] == "holiday" for e in reader.events)
    assert "format 7" in Dashboard(tmp_path).refresh()
    report(tmp_path, tmp_path / "r.html")


def test_damaged_middle_and_non_finite(tmp_path: Path) -> None:
    log = write(tmp_path, 3)
    log.append("step", 4, loss=float("nan"), **{"objective/kl": float("inf")})
    log.close()
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(b'{"step": 5, "lo\n\xff\xfe\n')
    write(tmp_path, 2, begin=6)
    reader = RunReader(tmp_path)
    reader.poll()
    assert reader.log.damaged == 2 and reader.series("loss")[0].tolist() == [1, 2, 3, 6, 7] and reader.log.step == 7
    ET.fromstring(line_chart(*group_panels([reader], "all")))


def test_written_by_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock is a day ahead or behind; a network file system shows a hole before the data."""
    log = write(tmp_path, 5)
    log.close()
    for shift in (86400, -5):
        os.utime(tmp_path / "metrics.jsonl", (time.time() + shift,) * 2)
        reader = RunReader(tmp_path)
        reader.poll()
        assert reader.status.state == "running" and reader.status.silent_s < 60
    line = b'{"rank": 0, "step": 6, "type": "step", "loss": 0.125}\n'
    size = os.path.getsize(tmp_path / "metrics.jsonl")
    with open(tmp_path / "metrics.jsonl", "ab") as f:
        f.write(b"\0" * len(line) + line.replace(b"6", b"7"))
    reader.poll()
    assert reader.log.step == 5 and reader.log.damaged == 0
    with open(tmp_path / "metrics.jsonl", "r+b") as f:
        f.seek(size)
        f.write(line)
    reader.poll()
    assert reader.log.step == 7 and reader.log.damaged == 0
    clock = time.monotonic
    monkeypatch.setattr(reader_module.time, "monotonic", lambda: clock() + 300)
    assert reader.status.state == "silent" and "5 min" in str(reader.status)


def test_reading_while_somebody_writes(tmp_path: Path) -> None:
    done = threading.Event()

    def work() -> None:
        log = write(tmp_path, 1)
        for s in range(2, 1500):
            log.append("step", s, loss=float(s), **{f"m/{i}": 0.1 * s for i in range(20)})
        done.set()

    threading.Thread(target=work).start()
    reader = RunReader(tmp_path)
    while not done.is_set():
        reader.poll()
    reader.poll()
    s, v = reader.series("loss")
    assert (
        reader.log.damaged == 0
        and reader.generation == 0
        and s[-1] == 1499
        and reader.log.numbers["loss"].count == 1499
    )
    assert np.all(np.diff(s) >= 0)


def test_fast_and_slow_parsing_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, rng = write(tmp_path, 2), np.random.default_rng(0)
    for s in range(3, 9000):
        extra = {"skipped": 1} if s % 97 == 0 else {}
        log.append(
            "step",
            s,
            count=s,
            **{f"m/{i}": float(x) for i, x in enumerate(rng.normal(size=25) * 10.0 ** rng.integers(-9, 9))},
            **extra,
        )
        if s % 500 == 0:
            log.append("eval", s, **{"eval/gold": float(s)})
    log.append("end", 8999, reason=None)
    assert os.path.getsize(tmp_path / "metrics.jsonl") > 4 << 20
    fast = RunReader(tmp_path)
    fast.poll()
    monkeypatch.setattr(reader_module, "columns_at_once", lambda block: None)
    slow = RunReader(tmp_path)
    slow.poll()
    assert set(fast.keys) == set(slow.keys) and fast.status.state == "ended" and len(fast.events) == len(slow.events)
    for key in fast.keys:
        np.testing.assert_array_equal(fast.series(key)[1], slow.series(key)[1], err_msg=key)
    assert (
        fast.last("m/3") == slow.last("m/3") and fast.log.numbers["skipped"].count == slow.log.numbers["skipped"].count
    )


def test_series_is_bounded_and_keeps_extremes() -> None:
    rng, series = np.random.default_rng(1), Series(200)
    values = rng.normal(size=100_000)
    for part in np.array_split(np.arange(100_000), 313):
        series.extend(part.astype(float), values[part])
    s, v = series.points()
    assert len(s) <= 201 and v.max() == values.max() and v.min() == values.min() and v[-1] == values[-1]
    assert np.all(np.diff(s) >= 0)
    np.testing.assert_allclose(np.average(series.means()[1], weights=series._rows[5]), values.mean())


def test_samples_are_read_as_they_come(tmp_path: Path) -> None:
    log, reader = EventLog(tmp_path / "samples.jsonl"), RunReader(tmp_path)
    assert reader.samples() == [] and reader.sample_steps == []
    for s in (1, 1, 4):
        log.append("sample", s, prompt="p", completion=f"c{s}", score=float("nan"))
    assert reader.sample_steps == [1, 4] and len(reader.samples(step=1)) == 2 and len(reader.samples(last=1)) == 1
    assert np.isnan(reader.samples()[0]["score"])
    log.truncate_after(1)
    log.append("sample", 2, completion="again")
    assert reader.sample_steps == [1, 2]


def test_runs_in_every_form(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b" / "a")
    assert [r.label for r in open_runs([tmp_path / "a", str(tmp_path / "b" / "a")])] == [f"{tmp_path.name}/a", "b/a"]
    assert {p.name for p in find_runs(tmp_path)} == {"a"} and len(find_runs(tmp_path)) == 2
    with pytest.raises(RunError, match="int is no run"):
        open_runs(3)


# ---------------------------------------------------------------------------------------------------------------------
# charts


def test_charts_survive_odd_data() -> None:
    t = np.arange(5.0)
    odd = [
        np.full(5, np.nan),
        np.array([np.inf, 1, -np.inf, 2, np.nan]),
        np.full(5, 1e300),
        np.full(5, -1e-300),
        np.zeros(5),
        t * 1e12,
    ]
    panels = [Panel(f"p{i}{log}", [Curve("x", t, v)], log=log) for i, v in enumerate(odd) for log in (False, True)]
    ET.fromstring(line_chart(*panels))
    assert to_png(*panels)[:4] == b"\x89PNG"
    ET.fromstring(line_chart())


def test_axes_move_rarely() -> None:
    """Limits of a growing curve are round numbers, and so the same for many steps."""
    seen, curve = [], np.cumsum(np.random.default_rng(0).normal(size=400))
    for n in range(2, 400):
        text = line_chart(Panel("x", [Curve("x", np.arange(float(n)), curve[:n])]))
        seen.append(tuple(re.findall(r">([-−\d.,k]+)</text>", text)))
    assert len(set(seen)) < 60


# ---------------------------------------------------------------------------------------------------------------------
# the dashboard without a front end, and with one that is faked


def test_no_front_end_leaves_a_picture_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path)
    assert not front_end()
    with Dashboard(tmp_path).live():
        log.append("end", 20, reason="done")
    assert "ended: done" in capsys.readouterr().out  # in a plain script: one line
    png, table = still(open_runs(tmp_path))
    assert png[:4] == b"\x89PNG" and "objective/kl" in table


def test_widgets_close_and_leave_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display
    from ipywidgets import Widget

    shown: list[Any] = []
    pages: list[str] = []

    def display(data: Any, **k: Any) -> None:
        shown.append((set(data), k.get("update", False)))
        pages.append(str(data.get("text/html")))

    monkeypatch.setattr(IPython.display, "display", display)
    log, before = write(tmp_path), set(threading.enumerate())
    board = Dashboard(tmp_path, widgets=True)
    with pytest.raises(KeyError), board.live():
        for s in range(21, 60):
            log.append("step", s, loss=1.0)
            time.sleep(0.02)
        assert board.knobs is not None
        place = re.search(r'<pre hidden data-for="([^"]+)">', board.knobs.data.value)
        assert place and f'class="rc-charts" id="{place[1]}"' in pages[1]
        raise KeyError("the cell fails")
    assert 'src="data:image/png;base64,' in pages[2] and '"key":"loss"' in pages[2]
    assert board.failure == "" and board.knobs is None and set(threading.enumerate()) <= before
    assert [u for _, u in shown] == [False, False, True, True]
    assert "application/vnd.jupyter.widget-view+json" in shown[0][0] and "text/html" in shown[2][0] & shown[3][0]
    widgets = getattr(Widget, "widgets", None) or {}
    assert not [w for w in dict(widgets).values() if type(w).__name__ == "Button"]


def test_a_refused_number_is_said_and_the_slider_jumps_back(tmp_path: Path) -> None:
    from rlhf_nb.widgets.dashboard import _Knobs

    log, board = write(tmp_path), Dashboard(tmp_path, widgets=True)
    board.knobs = _Knobs(board)
    board.draw(force=True)
    slider = board.knobs.sliders["kl_coef"]
    slider.value = 3.0
    board.draw()
    (asked,) = [json.loads(x) for x in (tmp_path / "control.jsonl").read_text().splitlines()]
    assert (asked["request"], asked["key"], asked["value"]) == ("set", "kl_coef", 3.0)
    log.append(
        "control",
        21,
        request="set",
        key="kl_coef",
        old=0.05,
        new=0.05,
        ok=False,
        why="kl_coef must be a number from 0 to 1, not 3.0; it stays 0.05",
    )
    board.draw()
    assert "refused: kl_coef must be a number" in board.knobs.words.value and slider.value == 0.05
    log.append("end", 21, reason=None)
    board.draw()
    board.ask("stop")
    board.draw()
    assert "the run is over" in board.knobs.words.value
    assert len((tmp_path / "control.jsonl").read_text().splitlines()) == 1


def test_labels_of_a_run_are_never_html(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    log = write(tmp_path / "x")
    log.append("step", 21, **{evil: 1.0})
    log.append("control", 21, request="set", key=evil, ok=False, why=evil)
    log.append("end", 21, reason=evil)
    EventLog(tmp_path / "x" / "samples.jsonl").append("sample", 1, prompt=evil, completion=evil)
    board = Dashboard(tmp_path / "x", group="all")
    page = "".join(board.refresh() or ()) + report(tmp_path / "x").read_text()
    assert "<img" not in page and "onerror=alert" in page


def test_a_run_in_another_process_is_followed_and_stopped(tmp_path: Path) -> None:
    code = f"""
import sys; sys.path[:0] = [{str(ROOT / "tests")!r}]
from pathlib import Path
from resume_harness import *
Trainer(Regression(pause=0.05), Numbers(), regression_config(steps=400), run_dir=Path({str(tmp_path / "run")!r})).fit()
"""
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        board = Dashboard(tmp_path / "run")
        begin, asked = time.monotonic(), False
        while not board.target.status.over and time.monotonic() - begin < 60:
            board.refresh()
            if board.target.log.step >= 3 and not asked:
                board.ask("stop")
                asked_at, asked = board.target.log.step, True
            time.sleep(0.02)
        assert board.target.status.over and board.target.log.step <= asked_at + 2
        assert (tmp_path / "run" / "checkpoints" / f"step-{board.target.log.step:010d}").is_dir()
    finally:
        child.wait(30)


@pytest.mark.skipif(importlib.util.find_spec("ipykernel") is None, reason="no ipykernel")
def test_clicks_reach_a_busy_kernel() -> None:
    from fake_front_end import click_stop

    found = click_stop()
    assert found["clicked"] and "GOT ['set', 'stop']" in found["out"] and "NEXT 2" in found["out"], found["out"]
    stays = sorted(found["updated"].values())
    assert stays == [["text/html", "text/plain"]] * 2  # charts with a picture in them, and a table


@pytest.mark.skipif(importlib.util.find_spec("ipykernel") is None, reason="no ipykernel")
def test_the_way_back_after_a_reload() -> None:
    """The page was reloaded, the widgets are gone, the kernel is busy: the line under the cell gives a Stop button in another notebook."""
    from fake_front_end import click_stop

    found = click_stop(reload=True)
    assert "GOT ['stop']" in found["out"] and "Traceback" not in found["second"], (found["out"], found.get("second"))
    assert found["picture"]


@pytest.mark.skipif(importlib.util.find_spec("nbclient") is None, reason="no nbclient")
def test_headless_notebook_holds_picture_and_table_and_no_widget_state(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    write(tmp_path / "run").append("end", 20, reason=None)
    cells = [
        f"from rlhf_nb.widgets.dashboard import Dashboard\nDashboard({str(tmp_path / 'run')!r})",
        f"with Dashboard({str(tmp_path / 'run')!r}).live():\n    pass",
    ]
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    NotebookClient(nb, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    assert "widgets" not in nb.metadata
    for cell in nb.cells:
        kinds = {k for o in cell.outputs for k in o.get("data", {})}
        assert "image/png" in kinds and "text/html" in kinds and not any("widget" in k for k in kinds)
    page, _ = HTMLExporter().from_notebook_node(nb)
    assert page.count('src="data:image/png;base64') == 2 and page.count("objective/kl") >= 2


# ---------------------------------------------------------------------------------------------------------------------
# report, terminal, Prometheus


def test_report_stands_alone(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no run in"):
        report(tmp_path / "nothing")
    write(tmp_path / "run")
    path = report([tmp_path / "run"], tmp_path / "out" / "r.html")
    text = path.read_text()
    scripts = text.count("<script") - text.count('<script type="application/json">')
    assert not re.search(r"""(src|href)=["']?(http|//)|<link""", text) and '"kl_budget"' in text and scripts == 1
    (allowed,) = re.findall(r"script-src 'sha256-([^']+)'", text)  # the policy lets that one run, and no other
    run = re.findall(r'<script type="module">(.*?)</script>', text, re.DOTALL)[0]
    assert allowed == base64.b64encode(hashlib.sha256(run.encode()).digest()).decode()
    assert str(tmp_path / "run") not in text and not (tmp_path / "out" / "figures").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        report(tmp_path / "run", tmp_path / "file" / "r.html")


def test_watch_in_a_pipe_ends_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def work() -> None:
        time.sleep(0.3)
        write(path, 50).append("end", 50, reason="asked to stop")

    threading.Thread(target=work).start()
    console = Console(width=100, record=True, force_terminal=False, file=open(os.devnull, "w"))
    watch(path, every=0.05, console=console)
    text = console.export_text()
    assert "waiting" in text and "ended: asked to stop" in text and "objective/kl" in text


def test_watch_shows_a_pipeline_and_knows_that_there_is_none(tmp_path: Path) -> None:
    """A folder's runs, those that go on in full; a pipeline between two stages isn't over; 1 where there is nothing."""

    def seen(path: Path) -> str:
        console = Console(file=io.StringIO(), width=100)
        assert watch(path, console=console, once=True)
        return console.file.getvalue()  # type: ignore[attr-defined]

    for name, ends in (("sft", True), ("ppo", False)):
        with closing(EventLog(RunDir(tmp_path / "demo" / name).metrics_path)) as log:
            log.append("start", 0, method=name, total_steps=4)
            for step in (1, 2, 3):
                log.append("step", step, loss=1 / step)
            if ends:
                log.append("end", 3, reason=None)
    text = seen(tmp_path / "demo")
    assert (
        "demo/sft: step 3 of 4, ended" in text and "demo/ppo: step 3 of 4, running" in text and text.count("loss") == 1
    )
    with closing(EventLog(RunDir(tmp_path / "demo" / "ppo").metrics_path)) as log:
        log.append("end", 3, reason=None)
    (tmp_path / "demo" / "config.yaml").write_text("seed: 0\n")
    assert not report_module._look(open_runs(tmp_path / "demo"), {})[1], "the next stage may begin"
    (tmp_path / "demo" / "results.json").write_text("{}")
    assert report_module._look(open_runs(tmp_path / "demo"), {})[1] and seen(tmp_path / "demo").count("loss") == 2
    runner = CliRunner()
    assert runner.invoke(cli_app, ["watch", "--once", str(tmp_path / "demo")]).exit_code == 0
    assert runner.invoke(cli_app, ["watch", "--once", str(tmp_path / "nothing")]).exit_code == 1


def test_a_board_changes_nothing_without_its_word(tmp_path: Path) -> None:
    """No word, a wrong one, one in the address, another site's name, a GET, a body that is no request: nothing is written."""
    with closing(EventLog(RunDir(tmp_path / "ppo").metrics_path)) as log:
        log.append("start", 0, method="ppo", total_steps=2)
    for steer in (False, True):
        said: list[str] = []
        server = serve_board(tmp_path, port=0, block=False, say=said.append, steer=steer)
        address, word = said[0].split()[0].partition("?")[0], said[0].split()[0].rpartition("=")[2]
        remark = {"run": "ppo", "request": "remark", "note": "x", "tags": "y"}

        def status(
            told: Any = remark, word: str = "", at: str = "api/change", to: str = address, **headers: str
        ) -> int:
            body = told if isinstance(told, bytes) else json.dumps(told).encode()
            request = urllib.request.Request(to + at, body, {"X-Word": word} | headers)
            try:
                return int(urllib.request.urlopen(request).status)
            except urllib.error.HTTPError as error:
                return error.code

        refused = [status(), status(word="a"), status(at=f"api/change?word={word}"), status(word=word, at="api/runs")]
        refused += [
            status(word=word, Host="evil.example"),
            status(b"[" * 9000, word),
            status(b"", word),
            status({"run": "ppo"}, word),
        ]
        refused += [status({"run": ["ppo"], "request": {}}, word), status({"run": "..", "request": "pause"}, word)]
        refused += [status({"run": "ppo", "request": "explode"}, word), status([], word)]
        assert set(refused) == {404}
        assert not list((tmp_path / "ppo").glob("n*.json")) and not (tmp_path / "ppo" / "control.jsonl").exists()
        assert (status(word=word) == 200) == steer
        server.shutdown()
        server.server_close()


def test_prometheus_waits_and_answers(tmp_path: Path) -> None:
    server = serve_metrics(tmp_path / "run", port=0, block=False)
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        assert 'state="waiting"} 1.0' in urlopen(f"{address}/metrics").read().decode()
        write(tmp_path / "run", 7, loss=float("nan"))
        text = urlopen(f"{address}/metrics").read().decode()
        assert 'rlhf_nb_step{run="run"} 7.0' in text and 'rlhf_nb_loss{run="run"} NaN' in text
        with pytest.raises(RunError, match="choose another port"):
            serve_metrics(tmp_path / "run", port=server.server_address[1], block=False)
    finally:
        server.shutdown()
        server.server_close()
    assert metrics_text([tmp_path / "run"]).endswith("\n") and health_of(open_runs(tmp_path / "run")[0]) == []
