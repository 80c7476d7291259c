"""The server's chat page, used by a person played by a headless Chromium: a talk, thumbs, a choice between two, free text; dark and light."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_browser import FLAGS, browser_path, until

MISSING = [name for name in ("playwright", "fastapi", "openai") if importlib.util.find_spec(name) is None]
MISSING += [] if browser_path() else ["a Chromium (chromium, google-chrome, or `playwright install chromium`)"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING), reason=f"browser tests need {', '.join(MISSING)}: not found in this environment"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        found = p.chromium.launch(executable_path=browser_path(), args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server with the page, and the file of what people say."""
    from test_serve import Running

    from rlhf_nb.data import toy
    from rlhf_nb.data.templates import set_chat_template
    from rlhf_nb.serve.settings import ServeConfig
    from rlhf_nb.serve.start import _routers

    place = tmp_path_factory.mktemp("page")
    tokenizer = set_chat_template(toy.build_tokenizer())
    for seed, name in ((3, "toy"), (4, "twin")):
        toy.build_model(seed, "tiny").save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    settings: dict[str, Any] = {
        "models": {name: str(place / name) for name in ("toy", "twin")}, "page": True, "feedback": str(place / "said.jsonl"), "default_tokens": 24, "max_context": 512,
    }  # fmt: skip
    running = Running(routers=_routers(ServeConfig(**settings)), **settings)
    lane = running.site.batcher.engines["toy"]
    step = lane.step

    def slowly() -> None:  # as a model that is worth talking to
        time.sleep(0.01)
        step()

    lane.step = slowly  # type: ignore[method-assign]
    yield running.address, place / "said.jsonl"
    assert running.free()
    running.stop()


class Visit:
    """Somebody looks at the page.

    Args:
        browser: of playwright; address: of the server; said: the file of what people say; scheme: dark or light.
    """

    def __init__(self, browser: Any, address: str, said: Path, scheme: str) -> None:
        self.said, self.asked, self.wrong, self.address = said, list[dict[str, Any]](), list[str](), address
        self.page = browser.new_page(viewport={"width": 900, "height": 700}, color_scheme=scheme)
        self.page.on("pageerror", lambda e: self.wrong.append(str(e)))
        self.page.on("console", lambda m: self.wrong.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("request", self._note)
        self.page.goto(address + "/")
        self.page.wait_for_selector("#model option", state="attached")

    def _note(self, request: Any) -> None:
        if not request.url.startswith(self.address):
            self.wrong.append(f"a request to {request.url}")
        if request.url.endswith("/completions"):
            self.asked.append(json.loads(request.post_data))

    def ask(self, words: str) -> None:
        """Type a message and wait for the whole answer."""
        n = self.page.locator(".marks").count()
        self.page.fill("#words", words)
        self.page.keyboard.press("Enter")
        self.page.wait_for_function(f"() => document.querySelectorAll('.marks').length == {n + 1}", timeout=30_000)

    def lines(self) -> list[dict[str, Any]]:
        """What is stored."""
        return [json.loads(line) for line in self.said.read_text().splitlines()] if self.said.exists() else []

    def says(self, do: Any) -> dict[str, Any]:
        """The line that something leaves behind."""
        n = len(self.lines())
        do()
        found: dict[str, Any] = until(lambda: self.lines()[n:], 10, "a line of feedback")[0]
        return found


WATCH = """() => {
  window.seen = new Set();
  new MutationObserver(() => { const a = document.querySelectorAll('.said'); window.seen.add(a[a.length - 1].textContent.length); })
    .observe(document.getElementById('talk'), {subtree: true, childList: true, characterData: true});
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_person_talks_and_says_what_they_think(browser: Any, served: tuple[str, Path], scheme: str) -> None:
    visit = Visit(browser, *served, scheme)
    page = visit.page
    colours = page.evaluate(
        "() => { const s = getComputedStyle(document.querySelector('.write')); return [s.backgroundColor, s.color] }"
    )
    paper, ink = (sum(map(int, c.removeprefix("rgb(").removesuffix(")").split(",")[:3])) for c in colours)
    assert (paper > 600 > 200 > ink) if scheme == "light" else (paper < 200 < 600 < ink), colours

    page.evaluate(WATCH)
    visit.ask("Where do <b>otters</b> live?")
    assert len(page.evaluate("() => [...window.seen]")) > 2, "the answer came in one piece"
    answer = page.locator(".said").nth(1).inner_text()
    assert answer and page.locator(".said b").count() == 0
    assert page.locator(".said").nth(0).inner_text() == "Where do <b>otters</b> live?"

    # a thumb without consent keeps no text, and words that are lost are said to be
    page.locator(".marks input").fill("too short")
    line = visit.says(lambda: page.get_by_role("button", name="a good answer").click())
    assert (line["kind"], line["value"], line["consent"]) == ("rating", "up", False)
    assert "too short" not in json.dumps(line) and "otters" not in json.dumps(line)
    page.wait_for_function("() => document.querySelector('.marks .note').textContent.includes('were not kept')")
    assert page.get_by_role("button", name="a bad answer").is_disabled(), "one thumb, one vote"

    # with consent the same words are kept, with the talk that they are about
    page.check("#consent")
    line = visit.says(lambda: page.locator(".marks input").press("Enter"))
    assert (line["type"], line["reason"], line["answer"].strip()) == ("comment", "too short", answer)
    assert line["prompt"] == [{"role": "user", "content": "Where do <b>otters</b> live?"}]

    # two answers, a choice, and the talk goes on with the chosen one
    page.check("#two")
    visit.ask("And owls?")
    left, right = page.locator(".pair .said").all_inner_texts()
    assert left != right
    page.locator(".marks input").last.fill("kinder")
    line = visit.says(lambda: page.get_by_role("button", name="the right one is better").click())
    assert (line["type"], line["verdict"], line["reason"]) == ("label", "second", "kinder")
    assert [line[k].strip() for k in ("first", "second")] == [left.strip(), right.strip()]
    assert len(line["sources"]) == 2 and len(set(line["sources"])) == 1
    page.uncheck("#two")
    visit.ask("Why?")
    told = visit.asked[-1]["messages"]
    assert [m["role"] for m in told] == ["user", "assistant", "user", "assistant", "user"]
    assert told[1]["content"].strip() == answer and told[3]["content"].strip() == right.strip()
    assert page.locator("#stop").is_hidden() and not visit.wrong, visit.wrong

    page.get_by_role("button", name="New talk").click()
    assert page.locator(".said").count() == 0
    visit.ask("Hello")
    assert len(visit.asked[-1]["messages"]) == 1
    page.close()


def test_stop_and_a_server_that_refuses_are_said(browser: Any, served: tuple[str, Path]) -> None:
    visit = Visit(browser, *served, "light")
    page = visit.page
    page.route("**/v1/chat/completions", lambda route: None)  # never answered
    page.fill("#words", "Hello")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    page.wait_for_function("() => document.body.innerText.includes('Stopped.')")
    page.unroute("**/v1/chat/completions")
    page.fill("#words", "otters " * 2000)
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.body.innerText.includes('shorten one of them')")
    assert page.locator(".marks").count() == 0
    visit.ask("Hello")  # what failed is not part of the talk
    assert [m["content"] for m in visit.asked[-1]["messages"]] == ["Hello"]
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360, "a phone scrolls sideways"
    page.close()


def test_a_talk_is_taken_back_kept_and_looked_into(browser: Any, served: tuple[str, Path]) -> None:
    """Again, edit, a second talk, how likely each token was, times; Markdown is elements, and markup of a model is text."""
    visit = Visit(browser, *served, "light")
    page = visit.page
    visit.ask("Where do otters live?")
    assert "first after" in page.locator(".tools").inner_text() and "a second" in page.locator(".tools").inner_text()
    page.get_by_role("button", name="again").click()
    until(lambda: len(visit.asked) == 2 and page.locator(".marks").count() == 1, 20, "another answer")
    assert visit.asked[0]["messages"] == visit.asked[1]["messages"] and page.locator(".turn").count() == 1
    page.get_by_role("button", name="edit").click()
    assert page.locator(".turn").count() == 0 and page.input_value("#words") == "Where do otters live?"
    page.get_by_label("how likely").check()
    visit.ask("Where do owls live?")
    assert [m["content"] for m in visit.asked[-1]["messages"]] == ["Where do owls live?"]
    assert page.locator(".token").count() > 2 and "%" in page.locator(".token").first.get_attribute("title")
    page.get_by_role("button", name="New talk").click()
    assert page.locator(".said").count() == 0 and page.locator("#talks option").count() == 2
    page.get_by_label("how likely").uncheck()
    visit.ask("And bears?")
    assert len(visit.asked[-1]["messages"]) == 1, "each talk has its own past"
    page.select_option("#talks", label="Where do owls live?")
    assert page.locator(".user").inner_text() == "Where do owls live?"
    page.evaluate(
        """t => { const b = document.querySelector('.said:not(.user)'); finished(b, t, []); }""",
        "**bold** <img src=x onerror=hit=1> [x](javascript:hit=1)\n\n```\n<script>hit=1</script>\n```\n- a\n- `b`",
    )
    shown = page.locator(".said:not(.user)")
    assert shown.locator("strong, pre code, li").count() == 4 and shown.locator("img, a, script").count() == 0
    assert page.evaluate("window.hit || 0") == 0 and not visit.wrong, visit.wrong


def test_two_models_answer_side_by_side(browser: Any, served: tuple[str, Path]) -> None:
    """Both are asked the same, a line below names them, a choice names both versions, and the talk goes on with the winner."""
    visit = Visit(browser, *served, "light")
    page = visit.page
    assert page.input_value("#model") == "toy"
    page.get_by_label("beside").select_option("twin")
    page.check("#consent")
    visit.ask("Where do otters live?")
    assert [a["model"] for a in visit.asked] == ["toy", "twin"] and visit.asked[0]["messages"] == visit.asked[1][
        "messages"
    ]
    left, right = page.locator(".pair .said").all_inner_texts()
    assert left != right
    assert re.fullmatch(r".*toy: first after .*; twin: first after .*", page.locator(".tools").inner_text(), re.DOTALL)
    line = visit.says(lambda: page.get_by_role("button", name="the right one is better").click())
    assert (line["type"], line["verdict"]) == ("label", "second")
    assert [line[k].strip() for k in ("first", "second")] == [left.strip(), right.strip()]
    assert len(set(line["sources"])) == 2, "one version for two models"
    boxes = [b.bounding_box() for b in page.locator(".pair .said").all()]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    page.get_by_label("beside").select_option("")
    visit.ask("Why?")
    assert visit.asked[-1]["model"] == "toy" and visit.asked[-1]["messages"][1]["content"].strip() == right.strip()
    page.get_by_label("beside").select_option("twin")
    page.get_by_label("how likely").check()
    visit.ask("And owls?")
    assert page.locator(".pair").last.locator(".said:has(.token)").count() == 2
    for width in (400, 560, 1000, 1440, 2560):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not visit.wrong, visit.wrong
    page.close()
