"""A person at work, played by a headless Chromium in a real JupyterLab: keys, clicks, a killed kernel."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def browser_path() -> str | None:
    """A Chromium that can be started; playwright's own comes last."""
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if found := shutil.which(name):
            return found
    with_playwright = Path.home() / ".cache" / "ms-playwright"
    return next((str(p) for p in sorted(with_playwright.glob("chromium-*/chrome-*/chrome"))), None)


MISSING = [name for name in ("playwright", "jupyterlab", "ipywidgets") if importlib.util.find_spec(name) is None]
MISSING += [] if browser_path() else ["a Chromium (chromium, google-chrome, or `playwright install chromium`)"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING), reason=f"browser tests need {', '.join(MISSING)}: not found in this environment"),
]


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait for something to become true, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds:g} s in vain for: {what}")


def share_dir(package: str) -> str:
    """The share/jupyter folder of the environment that a package is installed in."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return next(str(p / "share" / "jupyter") for p in Path(spec.origin).parents if (p / "share" / "jupyter").is_dir())


class Lab:
    """A JupyterLab server and a browser page."""

    def __init__(self, folder: Path, browser: Any) -> None:
        self.folder, self.token = folder, secrets.token_hex(8)
        self.outputs: list[Any] = []  # of the first cell of a notebook that is opened
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        private = {
            name: str(folder / ".jupyter" / name)
            for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR")
        }  # fmt: skip
        env = {
            **os.environ, **private, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JUPYTER_PLATFORM_DIRS": "1",
            "JUPYTER_PATH": os.pathsep.join({share_dir("jupyterlab_widgets"), share_dir("ipykernel")}), "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        options = [
            f"--ServerApp.port={self.port}", f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={folder}",
            "--ServerApp.open_browser=False", "--ServerApp.allow_root=True", "--LabApp.news_url=None", "--LabApp.extension_manager=readonly",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        ]  # fmt: skip
        self.log = open(folder / "lab.log", "w")
        command = [sys.executable, "-m", "jupyterlab", *options]
        self.server = subprocess.Popen(command, cwd=folder, env=env, stdout=self.log, stderr=subprocess.STDOUT)
        until(self._answers, 60, "JupyterLab's first answer")
        self.page = browser.new_page(viewport={"width": 1000, "height": 900})

    def _answers(self) -> bool:
        if self.server.poll() is not None:
            raise AssertionError((self.folder / "lab.log").read_text()[-2000:])
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api?token={self.token}", timeout=2)
            return True
        except OSError:
            return False

    def open(self, *cells: str, name: str = "work") -> None:
        """Write a notebook and open it."""
        nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
        nb.cells[0].outputs = self.outputs
        nb.metadata["kernelspec"] = {"name": "python3", "display_name": "python3", "language": "python"}
        nbformat.write(nb, self.folder / f"{name}.ipynb")
        self.page.goto(f"http://127.0.0.1:{self.port}/doc/tree/{name}.ipynb?token={self.token}")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        self.ready()

    def ready(self) -> None:
        """Wait for a kernel that the page is connected to and that has nothing to do."""
        until(
            lambda: any(k["execution_state"] == "idle" and k["connections"] for k in self.kernels()),
            60,
            "an idle kernel",
        )
        self.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=60_000)
        with_news = self.page.get_by_role("button", name="No", exact=True)  # "would you like to get notified"
        if with_news.count():
            with_news.first.click()
        time.sleep(1.0)  # the page asks the new kernel who it is; a cell sent before the answer is lost

    def kernels(self) -> list[dict[str, Any]]:
        """What the server says of its kernels; nothing while one starts, as Jupyter answers 500 then."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/api/kernels?token={self.token}", timeout=5
            ) as answer:
                found: list[dict[str, Any]] = json.load(answer)
        except urllib.error.HTTPError as e:
            if e.code != 500:
                raise
            return []
        return found

    def run(self, number: int) -> None:
        """Run a cell by keyboard, and wait only until the kernel has it."""
        cell = self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)
        prompt = cell.locator(".jp-InputPrompt").first
        before = prompt.inner_text()
        for _ in range(6):
            cell.locator(".cm-content").click()
            self.page.keyboard.press("Shift+Enter")
            for _ in range(50):
                time.sleep(0.1)
                busy = any(k["execution_state"] == "busy" for k in self.kernels())
                if prompt.inner_text() != before and (busy or "*" not in prompt.inner_text()):
                    return
        raise AssertionError(f"cell {number} would not run; its prompt is {prompt.inner_text()!r}")

    def output(self, number: int) -> Any:
        """Where a cell's output is."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number).locator(".jp-OutputArea")

    def close(self) -> None:
        self.page.close()
        self.server.send_signal(signal.SIGTERM)
        try:
            self.server.wait(20)
        except subprocess.TimeoutExpired:
            self.server.kill()
            self.server.wait()
        self.log.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=browser_path(), args=FLAGS, headless=True)
        yield chromium
        chromium.close()


@pytest.fixture
def lab(tmp_path: Path, browser: Any) -> Iterator[Lab]:
    lab = Lab(tmp_path, browser)
    try:
        yield lab
    finally:
        lab.page.screenshot(path=tmp_path / "last.png")  # for whoever looks into a failure
        lab.close()


def picture(page: Any, name: str, of: Any = None, height: int = 0) -> None:
    """A screenshot for the documentation, where it was asked for (RLHF_NB_FIGURES=1); at most so high."""
    if os.environ.get("RLHF_NB_FIGURES"):
        page.set_viewport_size({"width": 1000, "height": 1500})  # nothing is covered or scrolled away
        page.wait_for_timeout(500)
    if os.environ.get("RLHF_NB_FIGURES") and height:
        page.screenshot(path=FIGURES / f"{name}.png", clip={**of.bounding_box(), "height": height})
    elif os.environ.get("RLHF_NB_FIGURES"):
        (of or page).screenshot(path=FIGURES / f"{name}.png")


COLLECT = """
import os, random
from pathlib import Path
from rlhf_nb.data import toy
from rlhf_nb.widgets.collect import PreferenceCollector
Path("pid").write_text(str(os.getpid()))
prompts = [r["prompt"] for r in toy.train_prompts(30, seed=1)]
rng = random.Random(0)
said = {who: [toy.speak(p, who, rng) for p in prompts] for who in ("kind", "rude")}
collector = PreferenceCollector(prompts, said, path="labels.jsonl", annotator="ada", least_seconds=0.05)
collector
"""
TRAIN = """
from rlhf_nb.train.reward import RewardConfig, RewardTrainer
settings = {"output_dir": "reward", "epochs": 10.0, "console": False, "mini_batch_size": 10}
history = RewardTrainer(RewardConfig.preset("toy", **settings), toy.build_model(0, "tiny"), toy.build_tokenizer(), rows=collector.preferences()).fit()
print("trained on", len(collector.preferences()), "rows, accuracy", round(history[-1]["rewards/accuracies"], 2))
"""


COUNT = "(document.querySelector('.rl-page .rl-bar span') || {innerText: ''}).innerText"  # "ada: 3 of 30 pairs"


def counted(lab: Lab, n: int) -> None:
    """Wait until the page says how many pairs are labelled."""
    lab.page.wait_for_function(f"n => {COUNT}.includes(`: ${{n}} of 30`)", arg=n, timeout=30_000)


def press_for_gold(lab: Lab, count: int) -> None:
    """Read both answers on the screen and press the key of the kinder one, as a person would: nothing is clicked."""
    from rlhf_nb.data import toy

    lab.page.wait_for_selector(".rl-side", timeout=30_000)
    lab.page.wait_for_function("() => document.activeElement.closest('.rl-keys')", timeout=10_000)
    lab.page.wait_for_timeout(1_000)  # a cell that has just run may still take the focus
    for _ in range(count):
        lab.page.wait_for_timeout(200)
        before = lab.page.evaluate(COUNT)
        sides = lab.page.locator(".rl-side").all_inner_texts()
        rude = [any(phrase in side for phrase in toy.PHRASES["rude"]) for side in sides]
        lab.page.keyboard.press("b" if rude[0] else "a")
        lab.page.wait_for_function(f"t => {COUNT} != t", arg=before, timeout=30_000)


def events(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that is being written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]


def test_twenty_labels_with_a_kernel_killed_in_the_middle(lab: Lab) -> None:
    lab.open(COLLECT, TRAIN)
    lab.run(0)
    lab.page.wait_for_selector(".rl-side", timeout=60_000)
    press_for_gold(lab, 10)
    assert len(events(lab.folder / "labels.jsonl")) == 10  # on the disk while the page still shows the tenth
    picture(lab.page, "preference_collector", lab.output(0))
    first = int((lab.folder / "pid").read_text())
    os.kill(first, signal.SIGKILL)
    time.sleep(5)  # the server notices and starts another kernel
    if lab.page.locator(".jp-Dialog button").count():
        lab.page.locator(".jp-Dialog button").last.click()
    lab.ready()
    lab.run(0)
    until(lambda: (lab.folder / "pid").read_text() != str(first), 60, "the cell in the new kernel")
    counted(lab, 10)
    press_for_gold(lab, 10)
    stored = events(lab.folder / "labels.jsonl")
    assert (
        len(stored) == 20 and len({e["pair"] for e in stored}) == 20 and {e["swapped"] for e in stored} == {True, False}
    )
    chosen = [e["sources"][e["verdict"] == "second"] for e in stored]
    assert chosen.count("kind") == 20, chosen  # the letters on the screen became the right verdicts
    lab.run(1)
    lab.page.wait_for_function("() => document.body.innerText.includes('trained on 20 rows')", timeout=90_000)
    accuracy = re.search(r"accuracy ([\d.]+)", lab.output(1).inner_text())
    assert accuracy is not None and float(accuracy[1]) > 0.8


def test_keys_do_not_pile_up_and_mouse_works(lab: Lab) -> None:
    """What is typed faster than pairs can be read, or held down, or pressed while the kernel is busy, labels no pair
    that wasn't on the screen; nor does it reach the notebook's own shortcuts (x cuts cells, b makes new ones)."""
    lab.open(COLLECT.replace("least_seconds=0.05", "least_seconds=0.4"))
    lab.run(0)
    lab.page.wait_for_selector(".rl-side", timeout=60_000)
    lab.page.wait_for_function("() => document.activeElement.closest('.rl-keys')", timeout=10_000)
    lab.page.wait_for_timeout(1_500)
    lab.page.keyboard.type("abtxsabtxsabtxsabtxs", delay=5)  # 200 keys a second
    lab.page.wait_for_timeout(1_500)
    typed = len(events(lab.folder / "labels.jsonl"))
    assert 1 <= typed <= 2 and all(e["seconds"] >= 0.4 for e in events(lab.folder / "labels.jsonl"))
    assert lab.page.locator(".jp-Notebook .jp-CodeCell").count() in (2, 3)  # run() may have made one
    counted(lab, typed)
    lab.page.keyboard.press("u")
    counted(lab, typed - 1)
    lab.page.wait_for_timeout(600)
    lab.page.get_by_role("button", name="t tie").click()
    counted(lab, typed)
    lab.page.wait_for_timeout(600)
    lab.page.keyboard.press("2")  # the click gave the keyboard back
    lab.page.keyboard.press("a")
    counted(lab, typed + 1)
    assert events(lab.folder / "labels.jsonl")[-1]["reasons"] == ["more helpful"]
    lab.page.keyboard.press("d")
    assert lab.page.locator(".rl-side mark").count() > 0
    if os.environ.get("RLHF_NB_FIGURES"):
        picture(lab.page, "preference_collector", lab.output(0))
    lab.page.get_by_role("button", name="Finish").click()
    lab.page.wait_for_selector(".jp-OutputArea table", timeout=20_000)
    assert lab.page.locator(".rl-keys, .rl-side").count() == 0 and "median s" in lab.output(0).inner_text()
    lab.page.keyboard.press("Control+s")
    saved = until(
        lambda: "median s" in (lab.folder / "work.ipynb").read_text() and (lab.folder / "work.ipynb").read_text(),
        20,
        "the saved notebook",
    )
    assert "widget-view" not in saved and "widgets" not in json.loads(saved)["metadata"]


COCKPIT = """
from rlhf_nb.data import toy
from rlhf_nb.train.ppo import PPOConfig, PPOTrainer
from rlhf_nb.widgets.dashboard import Dashboard

settings = {"steps": 5000, "rollout_batch_size": 16, "mini_batch_size": 16, "num_inner_epochs": 1, "samples_per_step": 1}
config = PPOConfig.preset("toy", output_dir="run", console=False, **settings)
wordy = lambda prompts, completions: [len(c.split()) / 10 for c in completions]
trainer = PPOTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), reward=wordy, rows=toy.train_prompts(256))
with Dashboard(trainer).live():
    trainer.fit()
"""


PLOTS = "[...document.querySelectorAll('.rc-charts')].flatMap(h => h.charts ? [...h.charts.plots.values()].filter(p => p.u) : [])"


def test_cockpit_curves_slider_stop(lab: Lab) -> None:
    """Curves grow while the cell trains; the KL price is moved in mid-run; Stop ends the run within two steps, with a checkpoint."""
    metrics = lab.folder / "run" / "metrics.jsonl"

    def of(kind: str) -> list[dict[str, Any]]:
        return [e for e in events(metrics) if e["type"] == kind]

    def drawn() -> int:
        return int(lab.page.evaluate(f"{PLOTS}.reduce((n, p) => n + p.u.data[0].length, 0)"))

    lab.open(COCKPIT)
    lab.run(0)
    lab.page.wait_for_selector(".u-over", timeout=60_000)
    until(lambda: len(of("step")) > 10, 60, "ten steps")
    before = until(drawn, 10, "a curve")
    until(lambda: drawn() > before + 100, 30, "curves that grow while the cell is busy")
    assert lab.page.locator(".rc-still:visible").count() == 0
    lab.page.locator(".rc-legend button").first.click()  # what is hidden stays hidden while points come
    before = drawn()
    until(lambda: drawn() > before, 30, "more points")
    assert lab.page.locator(".rc-legend button").first.get_attribute("aria-pressed") == "false"
    lab.page.locator(".rc-legend button").first.click()

    slider = lab.page.locator(".widget-slider", has_text="kl_coef")
    slider.wait_for(timeout=20_000)
    old = of("step")[-1]["objective/kl_coef"]
    slider.locator(".noUi-handle").focus()
    lab.page.keyboard.press("Home")  # as far to the left as it goes
    asked = until(lambda: [e for e in of("control") if e.get("key") == "kl_coef"], 20, "the request in metrics.jsonl")[
        0
    ]
    assert asked["ok"] and asked["new"] < 0.01 * old
    until(lambda: of("step")[-1]["objective/kl_coef"] == asked["new"], 20, "steps with the new price")
    lab.page.wait_for_function(
        f"() => {PLOTS}.some(p => p.panel.marks.some(m => m.text.includes('kl_coef')))", timeout=20_000
    )
    picture(lab.page, "cockpit", lab.output(0), 770)
    lab.page.locator(".u-over").first.click()  # a step is pinned: its answers stand below
    lab.page.locator(".rc-beside .rc-answer").first.wait_for(timeout=10_000)
    assert "sampled answers at step" in lab.page.locator(".rc-beside").inner_text()

    lab.page.get_by_role("button", name="Stop").click()
    asked = until(lambda: [e for e in of("control") if e.get("request") == "stop"], 20, "the stop request")[0]
    (end,) = until(lambda: of("end"), 30, "the end of the run")
    wanted = json.loads((lab.folder / "run" / "control.jsonl").read_text().splitlines()[-1])
    later = [e for e in of("step") if e["time"] > asked["time"]]
    assert len(later) <= 2 and end["step"] - asked["step"] <= 2, (asked, end, wanted)
    assert (lab.folder / "run" / "checkpoints" / f"step-{end['step']:010d}").is_dir()
    until(lambda: lab.page.locator(".widget-slider").count() == 0, 30, "charts and a table in the widgets' place")
    lab.page.wait_for_selector(".u-over", timeout=30_000)


def test_the_cockpit_comes_back_after_a_reload(lab: Lab) -> None:
    """The page is reloaded in mid-run; the line that the cell named brings the cockpit back in another notebook, and its Stop works."""
    lab.open(COCKPIT)
    lab.run(0)
    lab.page.wait_for_selector(".u-over", timeout=60_000)
    told = lab.page.locator("code", has_text="from rlhf_nb import Dashboard").text_content()
    lab.page.reload()
    lab.open("from rlhf_nb.widgets import dashboard", told, name="again")
    lab.run(0)
    until(lambda: lab.page.locator(".jp-InputPrompt", has_text="[1]:").count(), 60, "a second kernel")
    begin = time.monotonic()
    lab.run(1)
    lab.page.wait_for_selector(".u-over", timeout=30_000)
    back = time.monotonic() - begin
    (lab.folder / "back.txt").write_text(f"{back:.2f}")
    lab.page.get_by_role("button", name="Stop").click()
    until(lambda: [e for e in events(lab.folder / "run" / "metrics.jsonl") if e["type"] == "end"], 60, "the end")
    assert back < 20, "on a busy machine; three seconds on one that isn't"


def test_an_untrusted_notebook_shows_the_picture(lab: Lab) -> None:
    """Somebody else's notebook: its scripts don't run, so the still behind the charts is seen."""
    from rlhf_nb.widgets.charts import Curve, Panel, to_png
    from rlhf_nb.widgets.touch import charts_html, code_html

    t = np.arange(30.0)
    panels = [Panel("reward", [Curve("proxy", t, t)])]
    still = f'<img alt="curves" src="data:image/png;base64,{base64.b64encode(to_png(*panels)).decode()}">'
    data = {"text/html": charts_html(panels, still) + code_html(), "text/plain": "curves"}
    lab.outputs = [nbformat.v4.new_output("display_data", data)]
    lab.open("1 + 1")
    lab.page.wait_for_selector(".jp-OutputArea img", timeout=30_000)
    assert lab.page.evaluate("document.querySelector('.jp-OutputArea img').naturalWidth") > 100
    assert lab.page.locator(".u-over").count() == 0


DEBUGGER = """
import random, torch
from rlhf_nb import RewardModel
from rlhf_nb.data import toy
from rlhf_nb.widgets.debugger import RewardDebugger
from rlhf_nb.widgets.labels import Pair
torch.set_num_threads(1)
rng, nasty = random.Random(0), "<img src=x onerror=hit=1>"
asked = [r["prompt"] for r in toy.train_prompts(60, 1, kinds=["home", "food"])]
told = [{"prompt": p, "chosen": toy.speak(p, "kind", rng) + nasty, "rejected": toy.speak(p, "rude", rng)} for p in asked]
pool = [Pair(p, toy.speak(p, "plain", rng), toy.speak(p, "chatty", rng), ("plain", "chatty")) for p in asked[:30]]
held = [{"prompt": p, "chosen": toy.speak(p, "plain", rng), "rejected": toy.speak(p, "chatty", rng)} for p in asked[30:]]
tok = toy.build_tokenizer()
answer = " Happy to help! Good question! Foxes live in the forest."
row = {"prompt": asked[0], "asked": asked[0], "completion": answer, "tokens": tok(answer, add_special_tokens=False)["input_ids"]}
judge = RewardModel.from_policy(toy.build_model(0, "tiny"), pooling="both", seed=0)
RewardDebugger(row, judge, tok, told, pool, held)
"""


def test_a_click_on_a_token_says_why_it_is_paid_and_ten_labels_refit(lab: Lab) -> None:
    """By mouse and by keyboard, without a key reaching the notebook; then ten pairs in the labeller, and accuracies."""
    page = lab.page
    lab.open(DEBUGGER)
    lab.run(0)
    page.wait_for_selector(".rt-token", timeout=60_000)
    cells = page.locator(".jp-Notebook .jp-CodeCell").count()
    word = page.locator(".rt-token", has_text="question")
    assert word.evaluate("e => e.tagName") == "BUTTON" and "without" in str(word.get_attribute("title"))
    word.click()
    detail = page.locator(".rt-detail")
    detail.get_by_text("Training pairs nearest in its features").wait_for(timeout=20_000)
    assert detail.locator("td").nth(1).inner_text() == "6 of 13" and word.get_attribute("aria-pressed") == "true"
    lost = float(detail.locator("td").nth(2).inner_text())
    assert lost == pytest.approx(float(re.search(r"without ([-+.\d]+)", word.get_attribute("title"))[1]), abs=0.006)  # type: ignore[index]
    assert detail.locator("table").count() == 3 and detail.locator("table").nth(2).locator("tr").count() == 6
    for key, place in (("Enter", 7), (" ", 8)):  # the arrow goes to the next one, the key presses it
        page.keyboard.press("ArrowRight")
        page.keyboard.press(key)
        page.wait_for_function(
            f"() => document.querySelector('.rt-detail').innerText.includes('{place} of 13')", timeout=20_000
        )
        assert page.evaluate("document.activeElement.dataset.at") == str(place - 1), "the notebook took the key"
    assert page.evaluate("document.activeElement.matches(':focus-visible')")
    word.click()
    detail.get_by_text("6 of 13").wait_for(timeout=20_000)
    picture(page, "reward_debugger", lab.output(0).first)
    page.get_by_role("button", name="label ten pairs like this").click()
    page.wait_for_selector(".rl-side", timeout=30_000)
    for done in range(10):
        page.wait_for_function(f"n => {COUNT}.includes(`: ${{n}} of 10`)", arg=done, timeout=30_000)
        page.wait_for_timeout(300)
        page.keyboard.press("o")
        page.wait_for_timeout(300)
        page.keyboard.press("a")
    page.wait_for_function(f"() => {COUNT}.includes(': 10 of 10')", timeout=30_000)
    assert len([e for e in events(lab.folder / "labels.jsonl") if e["type"] == "label"]) == 10
    before = page.locator(".rt-token").first.get_attribute("title")
    page.get_by_role("button", name="refit the head").click()
    page.get_by_text("and to 10 labels").wait_for(timeout=30_000)
    shares = (
        page.locator("tr", has_text=re.compile("before|refitted|labels")).locator("td:nth-child(2)").all_inner_texts()
    )
    assert len(shares) == 4 and all("(n=30)" in x for x in shares)
    until(lambda: page.locator(".rt-token").first.get_attribute("title") != before, 20, "the new head's rewards")
    assert page.locator(".jp-Notebook .jp-CodeCell").count() == cells and page.evaluate("window.hit || 0") == 0
    assert page.locator(".rt-box img").count() == 0


SAMPLES = """
from rlhf_nb.data import toy
from rlhf_nb.widgets.samples import Samples, Tokens
browser = Samples("run", toy.build_tokenizer(), by="kl")
browser
"""


def formulas() -> str:
    """The cells of the tutorial that makes explorers, then one of them."""
    path = Path(__file__).resolve().parent.parent / "nbs" / "tutorials" / "formulas_with_knobs.ipynb"
    cells = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code" and "%pip" not in c.source]
    return "\n".join([*cells, "Explorers('optimum')"])


def test_samples_of_a_finished_run(lab: Lab) -> None:
    """The same views on a run of last week: choose by keyboard, colour by another measure."""
    from rlhf_nb.data import toy
    from rlhf_nb.train.ppo import PPOConfig, PPOTrainer

    settings: dict[str, Any] = {
        "steps": 3,
        "rollout_batch_size": 16,
        "mini_batch_size": 16,
        "samples_per_step": 4,
        "console": False,
    }
    config = PPOConfig.preset("toy", output_dir=str(lab.folder / "run"), **settings)
    PPOTrainer(
        config, toy.build_model(0, "tiny"), toy.build_tokenizer(), reward=toy.gold_reward, rows=toy.train_prompts(64)
    ).fit()
    lab.open(
        SAMPLES,
        "Tokens(browser.rows[-1], toy.build_tokenizer())",
        formulas(),
    )
    lab.run(0)
    lab.page.wait_for_selector(".widget-select select", timeout=60_000)
    lab.page.wait_for_selector(".widget-html span[title]", timeout=20_000)
    assert "advantage" in str(lab.page.locator(".widget-html span[title]").first.get_attribute("title"))
    first = lab.page.locator(".widget-html", has=lab.page.locator("span[title]")).inner_text()
    keys = lab.output(0).locator('input[placeholder^="keys"]')
    keys.click()
    lab.page.keyboard.type("n")
    until(
        lambda: lab.page.locator(".widget-html", has=lab.page.locator("span[title]")).inner_text() != first,
        20,
        "the next sample",
    )
    lab.page.keyboard.type("k")
    lab.page.wait_for_function("() => document.body.innerText.includes('k3 estimate')", timeout=20_000)
    picture(lab.page, "samples_browser", lab.output(0))
    lab.run(1)
    keys = lab.output(1).locator('input[placeholder^="keys"]')
    keys.wait_for(timeout=30_000)
    keys.click()
    lab.page.keyboard.type("p")
    lab.page.wait_for_function("() => document.body.innerText.includes('how unlikely the token was')", timeout=20_000)
    lab.run(2)
    handle = lab.output(2).locator(".noUi-handle").first
    handle.wait_for(timeout=30_000)
    text = lab.output(2).inner_text()
    handle.focus()
    lab.page.keyboard.press("Home")
    until(
        lambda: "β = 0.02" in lab.output(2).inner_text() and lab.output(2).inner_text() != text,
        20,
        "the formula at another β",
    )
    picture(lab.page, "explorers", lab.output(2))
