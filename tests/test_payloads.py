"""Forty payloads in every field that a file, a model or a person can fill: none comes to life in a browser or in a terminal."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from rich.console import Console
from test_browser import FLAGS, MISSING, browser_path
from test_imported import record
from typer.testing import CliRunner

from rlhf_nb.cli import main as cli
from rlhf_nb.core import CheckpointError, ConfigError, DataError, ModelError, RewardError, RunError, printable
from rlhf_nb.learn.checks import grade
from rlhf_nb.pipeline import results
from rlhf_nb.pipeline.doctor import Finding, findings_table
from rlhf_nb.rollout import sampler
from rlhf_nb.run.callbacks import step_line, steps_table
from rlhf_nb.run.health import Light
from rlhf_nb.serve import page as chat_page
from rlhf_nb.widgets.collect import LabelQueue, pair_html, summary_rows
from rlhf_nb.widgets.dashboard import Dashboard
from rlhf_nb.widgets.html import svg_page, svg_text, table_html
from rlhf_nb.widgets.labels import LabelStore, Pair, tally
from rlhf_nb.widgets.panels import remedy
from rlhf_nb.widgets.reader import open_runs
from rlhf_nb.widgets.report import metrics_text, report, screen, watch
from rlhf_nb.widgets.runs import Runs
from rlhf_nb.widgets.samples import Samples, tokens_html
from rlhf_nb.widgets.touch import inert_json

RUN = "window.hit=(window.hit||0)+1"
HTML = [
    f"<script>{RUN}</script>", f"</td></table><script>{RUN}</script>", f"<img src=x onerror='{RUN}'>", f'"><img src=x onerror="{RUN}">', f"'><svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>", f"<svg><animate onbegin={RUN} attributeName=x dur=1s>", f"</title><script>{RUN}</script>", f"</style><script>{RUN}</script>",
    f"</pre></details><script>{RUN}</script>", f"<iframe srcdoc='<script>parent.{RUN}</script>'></iframe>", f"<a href='javascript:{RUN}'>x</a>",
    f"<details open ontoggle={RUN}>", f"<body onload={RUN}>", f"<input autofocus onfocus={RUN}>", f"<video><source onerror={RUN}></video>",
    f'" onmouseover="{RUN}" style="position:fixed;inset:0', f"' onmouseover='{RUN}", f"--><script>{RUN}</script><!--", f"]]><script>{RUN}</script>",
    f"<<script>{RUN}//<</script>", f"\\u003cscript\\u003e{RUN}\\u003c/script\\u003e", "<style>body{display:none}</style>", "<meta http-equiv=refresh content='0;url=//x.invalid'>",
]  # fmt: skip
TERMINAL = [
    "\x1b]52;c;cm0gLXJmIH4=\x07", "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://x.invalid\x1b\\click\x1b]8;;\x1b\\", "\x9b2J", "\x9d52;c;aGk=\x9c", "\x1bP+q544e\x1b\\",
    "\x1b[8mhidden\x1b[0m", "\x1bc", "over\rwritten", "back\x08\x08space", "bell\x07", "user\u202etxt.exe", "\u2066iso\u2069late", "[link=http://x.invalid]here[/link]", "[red]markup[/] [bold",
]  # fmt: skip
PAYLOADS = HTML + TERMINAL
HARMLESS = [re.sub(r"[^\w /.:;=?-]", "x", re.sub(r"\s", " ", p)) for p in PAYLOADS]  # as long, and with the same words
assert len(set(PAYLOADS)) == len(set(HARMLESS)) == 40


def filled(folder: Path, words: list[str]) -> Path:
    """A run's folder with one of these words in every field that a file, a model or a person can fill."""
    run = folder / "run"
    run.mkdir(parents=True)
    events: list[dict[str, Any]] = [
        {
            "step": 0,
            "type": "start",
            "total_steps": 9,
            "controls": {w: {"value": 0.1, "low": 0, "high": 1} for w in words},
        }
    ]
    lines: list[dict[str, Any]] = []
    for i, w in enumerate(words):
        events.append(
            {"step": i, "type": "step", "loss": 1.0, w: 0.5, f"loss/{w}": 0.5, f"rewards/{w}": 0.5, f"eval/{w}": 0.5}
        )
        events.append(
            {"step": i, "type": "control", "request": w, "id": w, "key": w, "ok": True, "why": w, "old": w, "new": w}
        )
        events.append(
            {"step": i, "type": "control", "request": "set", "key": w, "ok": i % 2 == 0, "why": w, "old": w, "new": w}
        )
        events.append({"step": w, "type": "warning", "message": w, w: w})
        events += [
            {"step": i, "type": w, "message": w},
            {"step": i, "type": "save", "path": w},
            {"step": i, "type": "resume", "path": w, "changed": [w]},
        ]
        call = {"type": w, "function": {"name": w, "arguments": {w: w}}}
        ask: Any = w if i % 2 else [{"role": w, "content": w, "name": w, "tool_calls": [call]}, {"role": "tool", w: w}]
        common = {
            **({} if i % 3 else {"drawn": [[0, 1]], "ended": w, "turns": w, "tools": [call]}),
            "type": "sample",
            "prompt": ask,
            "completion": w,
            "tokens": [1, 2],
            "texts": [w, w],
            "old_logps": [-1.0, -2.0],
            "ref_logps": [-1.0, -1.5],
        }
        lines.append(common | {"step": w, "score": w, "rewards": {w: 1.0, "x": w}})
        lines.append(common | {"step": i, "score": 1.0, "rewards": {w: 1.0}})
    events.append({"step": 9, "type": "end", "reason": words[0]})
    (run / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    (run / "samples.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    (run / "config.yaml").write_text("".join(f"{json.dumps('k' + w)}: {json.dumps(w)}\n" for w in words) + "steps: 9\n")
    return run


def theirs(folder: Path, words: list[str]) -> list[str]:
    """Runs of other programs, with these words as metrics, settings and names of files; returns their names."""
    rows = [
        {"step": i, **{f"{kind}{w}": 1.0 for w in words for kind in ("", "eval_", "train/rewards/")}} for i in (1, 2)
    ]
    told = json.dumps({"log_history": rows, "max_steps": 2, **dict.fromkeys(words, 1.0)}).encode()
    files = {"trainer_state.json": told}
    if importlib.util.find_spec("tensorboard"):
        tags = {w: 1.0 for w in words} | {f"args/{w}": json.dumps({w: w}) for w in words}
        files[f"events.out.tfevents.1.{words[2][:40].replace('/', '-')}"] = record(1, **tags) + record(2, **tags)
    for i, (name, data) in enumerate(files.items()):
        (folder / f"theirs-{i}").mkdir(parents=True)
        (folder / f"theirs-{i}" / name).write_bytes(data)
    return [f"theirs-{i}" for i in range(len(files))]


def page(folder: Path, words: list[str]) -> str:
    """Everything here that makes HTML, in one page."""
    run, others = filled(folder, words), theirs(folder, words)
    made = [report(folder / other, folder / "r.html").read_text() for other in others]
    made += [(report({f"{words[0]} {words[2]}": run, **{words[1]: run}}, folder / "r.html", samples=100)).read_text()]
    short = folder / "short"
    short.mkdir()
    (short / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, "type": "step", "loss": 1.0}) + "\n" for i in range(3))
    )
    made += [report({w: short}, folder / "r.html").read_text() for w in words]  # each word once as the run's name
    board = Dashboard({words[3]: run}, widgets=False)
    for board.group in ("overview", "losses", "evaluation", "all"):
        made.append(board.refresh(force=True) or "")
    runs, by = Runs(folder), ("step", "time", "kl")
    runs.rows()
    with mock.patch("rlhf_nb.widgets.runs.front_end", lambda: True):
        made += [runs._repr_html_(), *(runs.compare("run", "short", by=x)._repr_html_() for x in by)]
        made += [runs.compare(other, "short")._repr_html_() for other in others]
    made += [runs._repr_html_(), runs.compare("run", "short")._repr_html_().partition(">")[2]]
    shown = Samples(run)
    made += [shown.table(), *(shown.detail(row) + tokens_html(row, buttons=True) for row in shown.rows)]
    store = LabelStore(folder / "labels.jsonl", words[4])
    pairs = [Pair(w if i % 2 else [{"role": w, "content": w}], w, w + "!", (w, w + "?")) for i, w in enumerate(words)]
    for pair, w in zip(pairs[1:], words[1:]):
        LabelStore(store.path, w).add(pair, "first")
        LabelStore(store.path, w).note(pair, w)
    store.refresh()
    queue = LabelQueue(pairs, store, guideline=words[6], reasons=words)
    queue.message = words[5]
    for w in words:
        queue.current = pairs[words.index(w)]
        made += [pair_html(queue), f'<pre data-for="x">{inert_json(queue.told())}</pre>']
        made += [svg_text(0, 0, w), svg_page(9, 9, w, ""), table_html([{w: w, "b": 1.0}])]
    made += [table_html(summary_rows(store.labels())), table_html(tally(store.labels()))]
    return "".join(made)


class Skeleton(HTMLParser):
    """The elements of a page with the names of their attributes, and every address in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(sorted(k for k, _ in attrs))))
        self.addresses += [
            v or "" for k, v in attrs if k in ("href", "src", "srcdoc", "action", "xlink:href", "formaction", "data")
        ]
        self.addresses += [v for k, v in attrs if k == "style" and v and "url(" in v]

    handle_startendtag = handle_starttag


def test_no_payload_becomes_an_element_an_attribute_or_an_address(tmp_path: Path) -> None:
    hostile, tame = Skeleton(page(tmp_path / "a", PAYLOADS)), Skeleton(page(tmp_path / "b", HARMLESS))
    assert len(tame.elements) > 5000 and not hostile.addresses and not tame.addresses
    assert hostile.elements == tame.elements, "the words changed the page"


def test_every_payload_stands_in_the_page(tmp_path: Path) -> None:
    """The test above could not fail if words were left out."""
    text = page(tmp_path, PAYLOADS)
    words = " ".join(t for t in _text_of(text))
    for payload in PAYLOADS:
        assert printable(payload)[:20] in words, payload
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def _text_of(page: str) -> list[str]:
    """The text between tags."""
    found: list[str] = []
    parser = HTMLParser()
    parser.handle_data = found.append  # type: ignore[method-assign]
    parser.feed(page)
    parser.close()
    return found


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_no_payload_runs_in_chromium(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    file = tmp_path / "all.html"
    text = page(tmp_path / "a", PAYLOADS).replace("Content-Security-Policy", "no-policy")  # escaping must do without
    file.write_text(f"<!doctype html><meta charset=utf-8>{text}", encoding="utf-8")
    alive = tmp_path / "alive.html"
    alive.write_text(f"<!doctype html><meta charset=utf-8>{HTML[0]}{HTML[2]}", encoding="utf-8")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path(), args=FLAGS)
        try:
            view = browser.new_page()
            asked: list[str] = []
            view.on("request", lambda r: asked.append(r.url))
            view.on("dialog", lambda d: d.dismiss())
            view.goto(alive.as_uri())
            assert view.evaluate("window.hit || 0") > 0, (
                "a payload that isn't escaped must run, or this test can't fail"
            )
            asked.clear()
            view.goto(file.as_uri(), timeout=150_000)  # a page of all views is long
            for name in ("mouseover", "focus", "toggle", "click"):
                view.evaluate(f"document.querySelectorAll('*').forEach(e => e.dispatchEvent(new Event('{name}')))")
            assert view.evaluate("window.hit || 0") == 0
            assert asked == [file.as_uri()], asked
        finally:
            browser.close()


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_no_payload_runs_on_the_chat_page() -> None:
    """Each word as a model's name, an error, an answer, a token, a version and a person's own message; without the page's policy."""
    from playwright.sync_api import sync_playwright

    said = {"word": ""}

    def reply(route: Any) -> None:
        w, where = said["word"], route.request.url.partition("http://served/")[2]
        if where == "v1/models":
            route.fulfill(json={"data": [{"id": p} for p in PAYLOADS]})
        elif where == "v1/chat/completions" and "fail" not in w:
            logprob = {"token": w, "logprob": -1.0, "top_logprobs": [{"token": w, "logprob": -1.0}]}
            choice = {
                "index": 0,
                "delta": {"content": w, "role": w, "tool_calls": [{"function": {"name": w}}]},
                "logprobs": {"content": [logprob]},
            }
            event = json.dumps({"choices": [choice], "system_fingerprint": w, "model": w})
            route.fulfill(content_type="text/event-stream", body=f"data: {event}\n\ndata: [DONE]\n\n")
        elif where.startswith("v1/"):
            route.fulfill(status=400, json={"error": {"message": w}})
        else:
            route.fulfill(content_type="text/html", body=chat_page.page(True, False))

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=browser_path(), args=FLAGS)
        try:
            view = browser.new_page()
            asked: list[str] = []
            view.route("**/*", reply)
            view.on("request", lambda r: asked.append(r.url))
            view.goto("http://served/")
            view.wait_for_selector("#model option", state="attached")
            for i, w in enumerate([*PAYLOADS, *(f"fail {w}" for w in HTML)]):
                said["word"] = w
                view.evaluate("on => { by('chances').checked = on; }", i % 2 == 0)
                view.evaluate("async w => { await ask(w); }", w)
                if "fail" not in w:
                    view.evaluate("document.querySelectorAll('.marks button').forEach(b => b.click())")
                    view.evaluate(
                        "w => { const b = make('div'); document.body.append(b); finished(b, w + ' `' + w + '` [x](' + w + ')', []); }",
                        w,
                    )
            view.wait_for_timeout(300)
            for name in ("mouseover", "focus", "toggle"):
                view.evaluate(f"document.querySelectorAll('*').forEach(e => e.dispatchEvent(new Event('{name}')))")
            assert view.locator(".turn").count() == len(PAYLOADS) + len(HTML) and view.locator(
                ".failed"
            ).count() == len(HTML)
            assert view.locator(".token").count() > 10 and view.locator("#model option").count() == len(PAYLOADS)
            assert view.evaluate("window.hit || 0") == 0
            assert (
                view.locator(
                    "main img, main a, main script, main iframe, main video, main svg:not(.up):not(.down)"
                ).count()
                == 0
            )
            assert {u.partition("http://served/")[2] for u in asked} <= {
                "",
                "v1/models",
                "v1/chat/completions",
                "v1/feedback",
                "favicon.ico",
            }
        finally:
            browser.close()


@pytest.mark.parametrize("word", PAYLOADS)
def test_a_payload_is_no_remedy(word: str) -> None:
    """What the cockpit's buttons of a light do and say comes from settings that the run names, and from numbers."""
    control = {"value": 0.1, "low": 0.0, "high": 1.0}
    reader: Any = SimpleNamespace(
        status=SimpleNamespace(state="running"),
        others=[],
        log=SimpleNamespace(controls={"kl_coef": control, word: control}),
    )
    for text in (f"raise {word}", f"set {word} to 0.5", f"{word} raise kl_coef {word}", f"lower {word} kl_coef"):
        found = remedy(Light("KL", "bad", text), reader)
        assert found is None or (found["key"] == "kl_coef" and found["text"] == "KL: kl_coef 0.1 → 0.2"), found


COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def tame(text: str) -> None:
    """A terminal would only show this text."""
    found = COMMANDS.search(text)
    assert found is None, f"{found[0]!r} in {text[max(0, found.start() - 60) : found.end() + 20]!r}"


def drawn(*things: Any, colours: bool = False, **options: Any) -> str:
    """What rich writes to a terminal."""
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, color_system="truecolor" if colours else None, width=200, legacy_windows=False
    )
    for thing in things:
        console.print(thing, **options)
    return out.getvalue()


def sinks() -> dict[str, Callable[[Path, list[str], pytest.MonkeyPatch], str]]:
    """Everything that writes into a terminal what others have written, by name."""

    def seen(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        readers = open_runs({w: filled(folder / str(i), words) for i, w in enumerate(words[-16:])})
        for reader in readers:
            reader.poll()
        picture = screen(readers)
        links = drawn(picture, colours=True)
        assert "\x1b]8" not in links and not COMMANDS.search(re.sub(r"\x1b\[[0-9;]*m", "", links))
        out = io.StringIO()
        watch({words[-2]: readers[0].path}, every=0.01, console=Console(file=out, width=200))
        return drawn(picture) + out.getvalue()

    def answers(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        asked = [w for w in words if "\x00" not in w]
        monkeypatch.setattr(
            sampler, "sample", lambda *a, **k: SimpleNamespace(texts=words, finished=[True] * len(words))
        )
        done = CliRunner().invoke(cli.app, ["sample", "toy", "--n", "1", "--", *asked])
        assert done.exit_code == 0, done.output
        return done.output

    def panel(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        texts = [
            {"prompt": w if i % 2 else [{"role": "user", "content": w}], w: w, "sft": w} for i, w in enumerate(words)
        ]
        policies = {w: {"gold": 1.0, "gold_std": 0.1, "length": 3.0} for w in words}
        out = io.StringIO()
        monkeypatch.setattr(
            results, "Console", lambda **k: Console(file=out, force_terminal=True, color_system=None, width=200)
        )
        results.show_results(
            {"samples": texts, "policies": policies, "stages": {"reward": {}}}, folder / words[-3].replace("/", "")
        )
        return out.getvalue()

    def findings(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        table = [Finding("warning", w, w, w) for w in words]
        assert "\x1b]8" not in drawn(findings_table(table), colours=True)
        return drawn(findings_table(table))

    def progress(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        method = SimpleNamespace(columns=tuple(words), name="x")
        run: Any = SimpleNamespace(step=1, total_steps=9, method=method)
        events = [{"step": 1, **{w: w for w in part}} for part in (words[i : i + 6] for i in range(0, 40, 6))]
        lines = []
        for event in events:
            method.columns = tuple(k for k in event if k != "step")
            lines += [step_line(event, 9, method.columns), drawn(steps_table(run, [event]))]
        return "\n".join(lines)

    def errors(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        kinds = (ConfigError, DataError, ModelError, CheckpointError, RewardError, RunError)
        return "\n".join(str(kind(f"{w} is wrong")) for w in words for kind in kinds)

    def command(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        said = ""
        rows = folder / "rows.jsonl"
        for w in words:
            rows.write_text(json.dumps({w: w}) + "\n")
            (folder / "c.yaml").write_text(f"{json.dumps(w)}: {json.dumps(w)}\n")
            for words_of in (
                ["sft", "--config", str(folder / "c.yaml")],
                ["sft", f"data.path={rows}", f"output_dir={folder / 'r'}", "model.name_or_path=toy"],
                ["doctor", "sft", f"data.path={rows}", f"output_dir={folder / 'r'}"],
            ):
                done = CliRunner().invoke(cli.app, words_of)
                assert done.exit_code == 1 and not isinstance(done.exception, ValueError | TypeError), done.output
                said += done.output
        return said

    def notes(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), cli.told():
            warnings.simplefilter("always")
            for w in words:
                warnings.warn(w, stacklevel=1)
        return said.getvalue()

    def board(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        out: list[str] = []
        monkeypatch.setattr("builtins.print", lambda *a, **k: out.append(" ".join(map(str, a))))
        Dashboard({w: filled(folder / str(i), words) for i, w in enumerate(words[24:29])}, widgets=False)._leave()
        return "\n".join(out)

    def scraped(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        return metrics_text({w: filled(folder / str(i), words) for i, w in enumerate(words[24:29])})

    def graded(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        for i, w in enumerate(w for w in words if "/" not in w):
            (folder / f"{i}{w}.json").write_text(json.dumps({"student": w, "answers": {w: w}}) if i % 2 else w)
        done = CliRunner().invoke(cli.app, ["learn", "grade", str(folder)])
        assert done.exit_code == 0, done.output
        return done.output + grade(folder).read_text(encoding="utf-8")

    found = (seen, answers, panel, findings, progress, errors, command, notes, board, scraped, graded)
    return {f.__name__: f for f in found}


@pytest.mark.parametrize("name", sinks())
def test_no_payload_commands_a_terminal(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = sinks()[name](tmp_path, PAYLOADS, monkeypatch)
    tame(text.replace("\r\n", "\n"))
    assert "\u241b" in text, "the payloads didn't arrive"


def test_the_check_of_terminals_can_fail() -> None:
    for payload in TERMINAL[:14]:
        with pytest.raises(AssertionError):
            tame(payload)
