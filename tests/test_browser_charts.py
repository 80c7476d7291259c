"""Charts that a person touches, and the board, in a headless Chromium: hover, zoom, hide, widths, themes, long runs, a reload, hostile names."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from test_browser import FLAGS, browser_path, until
from test_imported import state
from test_payloads import HTML, PAYLOADS, filled

from rlhf_nb.run.log import RunDir
from rlhf_nb.widgets.board import serve_board
from rlhf_nb.widgets.report import report
from rlhf_nb.widgets.runs import Runs, remarks_of

ROOT = Path(__file__).resolve().parent.parent
MISSING = [] if importlib.util.find_spec("playwright") else ["playwright"]
MISSING += [] if browser_path() else ["a Chromium (chromium, google-chrome, or `playwright install chromium`)"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING), reason=f"browser tests need {', '.join(MISSING)}: not found in this environment"),
]


def write_run(path: Path, steps: int = 200, seed: int = 0, coef: float = 0.05, ends: bool = True) -> Path:
    """A run as a PPO trainer would write it, made up; of the last steps every tenth has an answer."""
    path.mkdir(parents=True)
    rng, n = np.random.default_rng(seed), np.arange(1, steps + 1)
    kl = 12 * (1 - np.exp(-n / steps)) + 0.2 * rng.normal(size=steps)
    score, noise = np.sqrt(np.abs(kl)) + 0.1 * rng.normal(size=steps), rng.normal(size=(steps, 12))
    able = {"controls": {"kl_coef": {"value": coef, "low": 0.0, "high": 10.0}}}
    lines = [json.dumps({"time": 1e9, "step": 0, "type": "start", "method": "ppo", "total_steps": steps} | able)]
    for i in range(steps):
        e = {
            "time": 1e9 + i / 5,
            "step": i + 1,
            "type": "step",
            "objective/scores": round(score[i], 5),
            "objective/kl": round(kl[i], 5),
        }
        e |= {
            "loss": round(1 / (i + 1), 6),
            "policy/entropy_avg": round(1 + 0.1 * noise[i, 0], 5),
            "completions/mean_length": 14.0,
        }
        lines.append(json.dumps(e | {f"loss/part_{k}": round(noise[i, k], 5) for k in range(12)}))
        if i % 50 == 20:
            lines.append(
                json.dumps(
                    {"time": 1e9, "step": i + 1, "type": "eval", "eval/gold": round(score[i] - 0.01 * kl[i] ** 2, 5)}
                )
            )
    lines += [json.dumps({"step": steps, "type": "end", "reason": None})] if ends else []
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    said = ({"step": s, "type": "sample", "prompt": "Where do owls live?", "completion": f"In woods ({seed}, {s}).", "score": 1.0}
            for s in range(10, min(steps, 300) + 1, 10))  # fmt: skip
    (path / "samples.jsonl").write_text("".join(json.dumps(e) + "\n" for e in said))
    (path / "config.yaml").write_text(
        f"seed: {seed}\nkl_coef: {coef}\nkl_budget: 6.0\nsteps: {steps}\noutput_dir: {path}\n"
    )
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        found = p.chromium.launch(executable_path=browser_path(), args=[*FLAGS, "--enable-precise-memory-info"])
        yield found
        found.close()


@pytest.fixture
def steered(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a board that changes things, its word in it, and the folder."""
    folder, said = tmp_path / "runs", list[str]()
    folder.mkdir()
    server = serve_board(folder, port=0, block=False, say=said.append, steer=True)
    yield said[0].split()[0], folder
    server.shutdown()
    server.server_close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a board, and the folder whose runs it shows."""
    folder = tmp_path / "runs"
    folder.mkdir()
    server = serve_board(folder, port=0, block=False, say=None)
    yield f"http://127.0.0.1:{server.server_address[1]}/", folder
    server.shutdown()
    server.server_close()


class Visit:
    """A page on which anything wrong is noted: errors, warnings, requests elsewhere, text beyond the page's width."""

    def __init__(self, browser: Any, address: str, width: int = 1000, scheme: str = "light") -> None:
        self.wrong: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page.on("pageerror", lambda e: self.wrong.append(str(e)))
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        here = re.split("[?#]", address)[0]
        self.page.on("request", lambda r: None if r.url.startswith(here) else self.wrong.append(f"asked {r.url}"))
        self.page.goto(address)

    def wide(self) -> int:
        """How many pixels the page is too wide."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def over(self, n: int, x: float = 0.5) -> tuple[float, float]:
        """A place in the n-th panel's plot, some part of its width from the left."""
        self.page.locator(".u-over").nth(n).scroll_into_view_if_needed()
        box = self.page.locator(".u-over").nth(n).bounding_box()
        return box["x"] + x * box["width"], box["y"] + 0.5 * box["height"]

    def ends(self, n: int) -> list[float]:
        """First and last step that the n-th panel shows."""
        found: list[float] = self.page.evaluate(
            "n => { const p = [...document.querySelector('.rc-charts').charts.plots.values()][n]; return [p.u.scales.x.min, p.u.scales.x.max]; }",
            n,
        )
        return found


@pytest.mark.parametrize("frame", ["", "allow-scripts"], ids=["a page", "a frame of its own"])
def test_a_figure_of_a_lesson_moves_by_mouse_and_keys(browser: Any, frame: str) -> None:
    """Its output alone, as on the site; and in a sandboxed frame without an origin, as Colab and VS Code show outputs."""
    for lesson, kind in (("lesson_01", "radio"), ("lesson_05", "range")):
        cells = json.loads((ROOT / "nbs" / "course" / f"{lesson}.ipynb").read_text(encoding="utf-8"))["cells"]
        outputs = ["".join(o.get("data", {}).get("text/html", "")) for c in cells for o in c.get("outputs", [])]
        figure = next(h for h in outputs if h.startswith("<figure"))
        page = browser.new_page()
        page.set_content(
            f'<iframe sandbox="{frame}" srcdoc="{escape(figure)}" width=900 height=600></iframe>' if frame else figure
        )
        at = page.frame_locator("iframe") if frame else page
        seen = lambda at=at: at.locator("[data-frame]").evaluate_all("all => all.map(d => d.style.display !== 'none').indexOf(true)")  # fmt: skip
        first, box = seen(), at.locator("input").last.bounding_box()
        page.mouse.click(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
        last = at.locator("[data-frame]").count() - 1
        assert (first, seen()) == (0, last), (lesson, kind)
        page.keyboard.press("ArrowLeft")
        assert seen() == last - 1 and at.locator("output").text_content(), (lesson, kind)
        page.close()


def test_a_person_touches_the_charts_of_a_report(browser: Any, tmp_path: Path) -> None:
    file = report(write_run(tmp_path / "ppo"), tmp_path / "r.html")
    visit = Visit(browser, file.as_uri())
    page = visit.page
    page.wait_for_selector(".u-over")
    assert page.locator(".rc-panel").first.locator(".rc-title").text_content() == "reward"
    assert "objective/scores" in page.locator(".rc-panel").first.locator(".rc-title").get_attribute("title")
    assert page.locator(".rc-still:visible").count() == 0, "the still gives way"

    page.mouse.move(*visit.over(0))
    tip = page.locator(".rc-tip:visible")
    tip.wait_for()
    rows = json.loads((tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()[101])  # nothing is smoothed below
    assert "proxy" in tip.text_content() and "gold" in tip.text_content() and "step 1" in tip.text_content()
    page.locator(".rc-panel").first.locator("input[type=range]").evaluate(
        "e => { e.value = 0; e.dispatchEvent(new Event('input')); }"
    )
    page.evaluate(
        "s => [...document.querySelector('.rc-charts').charts.plots.values()][0].u.setCursor({left: 1e9, top: 9}) || s",
        0,
    )
    for x in np.linspace(0.3, 0.7, 9):
        page.mouse.move(*visit.over(0, x))
    step = int(tip.locator("b").first.text_content().split()[1].replace(",", ""))
    rows = next(
        e for e in map(json.loads, (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()) if e["step"] == step
    )
    assert float(tip.locator("div b").first.text_content()) == pytest.approx(rows["objective/scores"], abs=1e-3), (
        "the exact value"
    )

    whole = visit.ends(0)
    page.mouse.move(*visit.over(0, 0.25))
    page.mouse.down()
    page.mouse.move(*visit.over(0, 0.5), steps=5)
    page.mouse.up()
    near = visit.ends(0)
    assert whole[0] + 30 < near[0] < near[1] < whole[1] - 80 and visit.ends(1) == near, "all panels zoom together"
    page.locator(".u-over").first.dblclick()
    assert visit.ends(0) == visit.ends(1) == whole

    entry = page.locator(".rc-legend button").first
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    page.locator(".rc-tools button", has_text="log").first.click()
    assert page.evaluate("[...document.querySelector('.rc-charts').charts.plots.values()][0].u.scales.y.distr") == 3
    assert entry.get_attribute("aria-pressed") == "false", "what is hidden stays hidden"

    entry.click()
    first = "const p = [...document.querySelector('.rc-charts').charts.plots.values()][0];"
    page.evaluate(f"{first} p.charts.whole(); p.logs.click()")  # the old plot draws once more
    assert page.evaluate(f"{first} p.u.scales.y.distr") == 1

    means = page.locator(".rc-means").first
    assert means.is_hidden()
    page.get_by_role("button", name="what reward means").click()
    assert "gold is the judge" in means.text_content() and "objective/scores" in means.text_content()
    assert page.locator(".rc-tools button:visible", has_text="?").count() == page.locator(".rc-panel:visible").count()
    page.context.set_offline(True)  # what stood in the file is enough
    page.mouse.click(*visit.over(0, 0.52))
    page.locator("summary", has_text="answers at step 1").wait_for()
    assert page.locator(".rb-said", has_text=re.compile(r"In woods .0, (90|1[01]0)")).count()
    assert not visit.wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_width_and_both_themes(browser: Any, tmp_path: Path, scheme: str) -> None:
    visit = Visit(browser, report(write_run(tmp_path / "ppo"), tmp_path / "r.html").as_uri(), scheme=scheme)
    page, columns = visit.page, []
    for width in (400, 560, 1000, 1440, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)
        assert visit.wide() <= 0, width
        boxes = [b.bounding_box() for b in page.locator("details[open] .rc-panel").all()][:4]
        columns.append(len({round(b["x"]) for b in boxes}))
        canvas = page.locator(".u-over canvas, .rc-box canvas").first.bounding_box()
        assert abs(canvas["width"] - page.locator(".rc-box").first.bounding_box()["width"]) < 3
        assert not page.evaluate(
            "[...document.querySelectorAll('.rc-legend span, .rc-title')].some(e => e.scrollWidth > e.clientWidth + 1)"
        )
    assert columns == [1, 1, 3, 4, 4]
    ink = [
        int(x) for x in page.evaluate("getComputedStyle(document.querySelector('.rc-panel')).color.match(/\\d+/g)")[:3]
    ]
    assert min(ink) > 200 if scheme == "dark" else max(ink) < 60
    assert not visit.wrong


def test_the_board_lists_compares_and_comes_back(browser: Any, served: tuple[str, Path]) -> None:
    address, folder = served
    for i in range(2):
        write_run(folder / f"seed-{i}", seed=i)
    write_run(folder / "dear", coef=0.1, ends=False)
    write_run(folder / "demo" / "sft")
    write_run(folder / "demo" / "ppo")
    (folder / "demo" / "config.yaml").write_text("seed: 0\n")
    visit = Visit(browser, address)
    page = visit.page
    page.wait_for_selector(".rb-runs tbody tr")
    assert page.locator(".rb-runs tbody tr").count() == 4
    page.get_by_label("stages of demo").click()
    assert page.locator(".rb-inside").count() == 2
    for width in (2560, 1440, 560, 400, 1000):
        page.set_viewport_size({"width": width, "height": 800})
        out = page.evaluate("(e => e.scrollWidth - e.clientWidth)(document.querySelector('.rb-runs').parentElement)")
        assert out <= 0 and visit.wide() <= 0, f"columns out of sight on {width} pixels"
    page.evaluate("""() => { const s = new CSSStyleSheet(); document.body.classList.add('rendered_html');
      s.replaceSync('.rendered_html table { table-layout: fixed; } .rendered_html table td { text-align: right; } summary { display: block; }');
      document.adoptedStyleSheets = [s]; }""")  # as the classic Notebook has it, where numbers lay over each other
    styles = "[['.rb-runs', 'tableLayout'], ['.rb-runs tbody td', 'textAlign'], ['summary', 'display']].map(([e, k]) => getComputedStyle(document.querySelector(e))[k])"
    assert page.evaluate(styles) == ["auto", "left", "list-item"]
    page.get_by_label("filter").fill("seed")
    assert page.locator(".rb-runs tbody tr").count() == 2
    page.get_by_label("filter").fill("")
    page.locator("th button", has_text="run").click()
    names = page.locator(".rb-link").all_text_contents()
    assert names[0] == "dear" and names[-1] == "seed-1"
    for name in ("seed-0", "seed-1", "dear"):
        page.get_by_label(f"choose {name}").check()
    page.get_by_role("button", name="compare 3").click()
    page.wait_for_selector(".u-over")
    assert page.locator(".rc-legend").first.text_content().startswith("seed-0 and 1 other seed")
    assert {"seed", "kl_coef"} <= set(page.locator(".rb-differs td:first-child").all_text_contents())
    assert page.locator(".rb-said", has_text="In woods (1, 200).").count() == 1
    page.get_by_role("button", name="by KL").click()
    until(
        lambda: page.evaluate("document.querySelector('.rc-charts').charts.axis.startsWith('KL')"), 10, "curves over KL"
    )
    assert visit.ends(0)[1] < 13
    page.get_by_role("button", name="by step").click()
    until(lambda: page.evaluate("document.querySelector('.rc-charts').charts.axis === 'step'"), 10, "curves over steps")
    page.wait_for_selector(".u-over")

    page.mouse.click(*visit.over(0, 0.52))  # a step is pinned: its answers stand below
    page.locator("summary", has_text="answers at step 1").wait_for()
    until(
        lambda: page.locator(".rb-said", has_text=re.compile(r"In woods .0, 1[01]0")).count(), 10, "the step's answers"
    )

    begin = time.monotonic()
    page.reload()
    page.wait_for_selector(".u-over")
    assert time.monotonic() - begin < 15 and page.locator(".rc-legend").first.text_content().startswith("seed-0 and")
    assert not visit.wrong


def test_a_person_writes_a_note_and_averages(browser: Any, steered: tuple[str, Path]) -> None:
    address, folder = steered
    for i in range(3):
        write_run(folder / f"ppo-{i}", seed=i)
        write_run(folder / f"dear-{i}", seed=i, coef=0.1)
    write_run(folder / "live", seed=9, ends=False)
    write_run(folder / "other", coef=0.4)
    looking = Visit(browser, address.partition("?")[0] + "#run=live")  # without the word: nothing to press
    looking.page.wait_for_selector(".u-over")
    assert not looking.page.get_by_role("button", name="pause").count()

    visit = Visit(browser, address)
    page = visit.page
    page.get_by_label("tags and note of ppo-0", exact=True).click()
    page.get_by_label("tags, with commas between").fill("baseline, toy, toy")
    page.get_by_label("note", exact=True).fill("the one in the report")
    page.get_by_role("button", name="keep").click()
    until(lambda: page.locator("td", has_text="the one in the report").count(), 10, "the note in the table")
    assert remarks_of(folder / "ppo-0") == {"note": "the one in the report", "tags": ["baseline", "toy"]}
    page.locator(".rb-tag", has_text="toy").click()
    assert page.locator(".rb-runs tbody tr").count() == 1
    page.get_by_label("filter").fill("")
    page.get_by_role("button", name="mean over seeds").click()
    rows = page.locator(".rb-runs tbody tr").all_text_contents()
    assert len(rows) == 4 and sum("and 2 other seeds" in r and "±" in r for r in rows) == 2
    page.locator("summary", has_text="every run").click()
    assert page.locator(".rb-plane circle").count() == 4
    page.get_by_role("button", name="mean over seeds").click()
    assert page.locator(".rb-plane circle").count() == 8 and "gold" in page.locator(".rb-plane > title").text_content()

    page.goto(address + "#" + urlencode([("run", "ppo-0"), ("run", "other")]))
    page.locator("summary", has_text="pairs of one seed").wait_for()
    assert "one pair: no interval" in page.locator("main").text_content()

    page.goto(address + "#run=live")
    page.get_by_role("button", name="KL: kl_coef 0.05 → 0.1").click()  # what the light advises
    page.locator("[role=status]", has_text="set: asked").wait_for()
    (asked,) = map(json.loads, RunDir(folder / "live").control_path.read_text().splitlines())
    assert (asked["request"], asked["key"], asked["value"]) == ("set", "kl_coef", 0.1)
    page.get_by_role("button", name="pause").click()
    page.locator("[role=status]", has_text="pause: asked").wait_for()
    assert '"pause"' in RunDir(folder / "live").control_path.read_text()
    for width in (400, 1000):
        page.set_viewport_size({"width": width, "height": 900})
        assert visit.wide() <= 0
    assert not visit.wrong and not looking.wrong


def test_a_hundred_thousand_steps(browser: Any, served: tuple[str, Path]) -> None:
    """Opened in two seconds (counted without the waiting for a busy machine), answered in 50 ms, in 60 MB; what is zoomed into is exact."""
    address, folder = served
    write_run(folder / "long", steps=100_000)
    Visit(browser, address + "#run=long").page.wait_for_selector(".u-over", timeout=60_000)  # read once by the server
    visit = Visit(browser, address + "#run=long")
    page = visit.page
    page.wait_for_selector(".u-over", timeout=60_000)
    hover = page.evaluate(
        """() => { const times = [], over = document.querySelector('.u-over'), box = over.getBoundingClientRect();
        for (let i = 1; i < 40; i++) {
          const begin = performance.now();
          over.dispatchEvent(new MouseEvent('mousemove', {clientX: box.x + box.width * i / 40, clientY: box.y + 40, bubbles: true}));
          times.push(performance.now() - begin);
        }
        return times.sort((a, b) => a - b)[20]; }"""
    )
    assert hover < 50
    assert page.evaluate("performance.memory.usedJSHeapSize") < 60e6
    page.mouse.move(*visit.over(0, 0.5))
    page.mouse.down()
    page.mouse.move(*visit.over(0, 0.53), steps=8)
    page.mouse.up()
    first, last = visit.ends(0)
    assert last - first < 5000
    plot = "[...document.querySelector('.rc-charts').charts.plots.values()][0]"
    until(
        lambda: page.evaluate(f"{plot}.panel.lines[0].x.length > 300 && {plot}.panel.lines[0].x.at(-1) < 99000"),
        60,
        "the window's points",
    )
    drawn = page.evaluate(f"[{plot}.panel.lines[0].x, {plot}.panel.lines[0].y]")
    logged = map(json.loads, (folder / "long" / "metrics.jsonl").read_text().splitlines())
    known = {e["step"]: e["objective/scores"] for e in logged if e["type"] == "step"}
    assert all(abs(known[int(x)] - y) < 1e-4 for x, y in zip(*drawn))
    page.locator(".u-over").first.dblclick()
    until(lambda: page.evaluate(f"{plot}.u.scales.x.max > 99000"), 30, "the whole run again")
    assert not visit.wrong


def test_no_payload_runs_on_board_or_report(browser: Any, steered: tuple[str, Path], tmp_path: Path) -> None:
    """Names of runs, metrics and settings, answers, events, notes, tags, other programs' metrics: none of the forty becomes more than text."""
    address, folder = steered
    filled(folder, PAYLOADS)
    runs = Runs(folder)
    for i, word in enumerate(HTML):
        name = word.replace("/", "\u2215")[:200]
        write_run(folder / f"{name}{i}", steps=3, seed=i)
        runs.note(f"{name}{i}", word)
        runs.tag(f"{name}{i}", word)
    state(folder / "trl", steps=3, names=tuple(PAYLOADS), **dict.fromkeys(HTML, 1))
    visit = Visit(browser, address)
    visit.page.wait_for_selector(".rb-runs tbody tr")
    assert visit.page.locator(".rb-runs tbody tr").count() == len(HTML) + 2
    visit.page.get_by_label("tags and note of").nth(3).click()
    visit.page.get_by_role("button", name="keep").click()
    visit.page.locator("dialog").wait_for(state="detached")
    visit.page.get_by_role("button", name="mean over seeds").click()
    for name in ("run", "trl", HTML[0].replace("/", "\u2215") + "0"):
        visit.page.evaluate("name => { location.hash = new URLSearchParams([['run', name]]); }", name)
        visit.page.wait_for_selector(".rb-run")
        visit.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        visit.page.wait_for_timeout(300)
        for event in ("mouseover", "focus", "toggle", "click"):
            visit.page.evaluate(
                f"document.querySelectorAll('main *').forEach(e => e.dispatchEvent(new Event('{event}')))"
            )
        assert (
            visit.page.evaluate("window.hit || 0") == 0
            and visit.page.locator("main img, main iframe, main video").count() == 0
        )
    assert not visit.wrong
    still = Visit(browser, report(folder / "run", tmp_path / "r.html").as_uri())
    still.page.wait_for_selector(".u-over")
    still.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    still.page.wait_for_timeout(300)
    assert still.page.evaluate("window.hit || 0") == 0 and still.page.locator("img, iframe, video").count() == 0
    assert not still.wrong


def test_two_people_label_at_the_board(browser: Any, tmp_path: Path) -> None:
    """Keys without a click, reasons, differences, Markdown as elements, five widths, both themes, and whatever a model wrote."""
    wrote = [*HTML, "**bold** `code` and\n\n```\n<script>hit=1</script>\n```\n\n- one\n- two", "# a\n\n| x | y |\n|---|---|\n| 1 | *2* |",
             "[here](javascript:hit=1) ![x](http://127.0.0.1:9/x.png) <http://127.0.0.1:9/>", "*" * 3000, "`" * 3001, "> " * 2000 + "deep",
             "_".join(["a"] * 2000), "1. " * 999, "| " * 999 + "\n|-|\n", "x" * 3000]  # fmt: skip
    rows = [{"prompt": w, "chosen": w, "rejected": f"another {w}"} for w in wrote]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "guideline.md").write_text(wrote[-9] + HTML[0])
    said = list[str]()
    server = serve_board(tmp_path, port=0, block=False, say=said.append, label=tmp_path / "pairs.jsonl")
    try:
        address = said[0].split()[0]
        for who, scheme in (("ada", "light"), (HTML[0][:80], "dark")):
            visit = Visit(browser, address, scheme=scheme)
            visit.page.get_by_role("link", name="label pairs").click()
            visit.page.locator(".rl-said", has_text="Say who you are").wait_for()
            empty = ".rl-page :is(progress, details, input), .rl-bar select, .rl-bar button"
            assert visit.page.locator(empty).locator("visible=true").count() == 0, (
                "nothing to use before there is a name"
            )
            visit.page.get_by_label("your name").fill(who)
            visit.page.keyboard.press("Enter")
            visit.page.wait_for_selector(".rl-side")
            for n in range(2 * len(wrote)):  # some come twice
                visit.page.set_viewport_size({"width": (400, 560, 1000, 1440, 2560)[n % 5], "height": 900})
                before = visit.page.locator(".rl-prompt").inner_text()
                if "pairs are labelled" in before:
                    break
                visit.page.wait_for_timeout(300)
                pressed = list[str | None]()
                for key in "omddm":
                    visit.page.keyboard.press(key)
                    visit.page.wait_for_timeout(20)
                    assert visit.wide() <= 0, (n, key)
                    pressed.append(visit.page.locator("[data-key=d]").get_attribute("aria-pressed"))
                assert pressed[2:] == ["true", "false", "false"], "a key shows what it switched on"
                visit.page.wait_for_timeout(300)
                visit.page.keyboard.press("2")
                visit.page.keyboard.press("abtx"[n % 4])
                until(lambda: visit.page.locator(".rl-prompt").inner_text() != before, 10, "the next pair")  # noqa: B023
            assert f": {len(wrote)} of {len(wrote)}" in visit.page.locator(".rl-page .rl-bar").first.inner_text()
            assert visit.page.evaluate("window.hit || 0") == 0
            assert visit.page.locator(".rl-page :is(img, a, iframe, script, video)").count() == 0
            assert not visit.wrong
        kept = [json.loads(x) for x in (tmp_path / "pairs.labels.jsonl").read_text().splitlines()]
        assert len(kept) >= 2 * len(wrote) and all(0.15 <= x["seconds"] < 60 for x in kept)
        assert {tuple(x["reasons"]) for x in kept} == {("more helpful",)}
    finally:
        server.shutdown()
        server.server_close()
