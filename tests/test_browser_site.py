"""The site as it is read: built without a warning, then opened from a disk by a headless Chromium. Dark and light, on a phone and on a desk; axe-core finds nothing serious."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import patience
import pytest
from test_browser import FLAGS, browser_path

ROOT = Path(__file__).resolve().parent.parent
AXE = importlib.util.find_spec("axe_playwright_python")  # axe.min.js lies in it
MISSING = [] if importlib.util.find_spec("playwright") else ["playwright"]
MISSING += [] if browser_path() else ["a Chromium (chromium, google-chrome, or `playwright install chromium`)"]
looks = pytest.mark.skipif(bool(MISSING), reason=f"browser tests need {', '.join(MISSING)}: not found in this environment")  # fmt: skip
pytestmark = [pytest.mark.slow, pytest.mark.browser]

PAGES = [  # one of each kind: home by role, course, how-tos, a lesson, guides, a chapter, API, and what is looked up
    "index", "course", "howto", "guides", "reference", "project", "hood", "nbs/course/lesson_01", "nbs/course/lesson_05", "nbs/course/lab_b",
    "nbs/losses/kl", "nbs/tutorials/formulas_with_knobs", "docs/data", "docs/trl", "docs/gpu", "docs/teaching", "docs/dojo", "docs/faq",
    "docs/glossary", "docs/results", "api/scoring", "metrics", "bibliography", "troubleshooting", "search",
]  # fmt: skip
HEAVY = {
    "docs/results",
    "metrics",
    "bibliography",
    "troubleshooting",
    "docs/trl",
}  # axe takes a minute for each look: one is enough

OUT = """() => {
  const scrolls = (e) => { for (; e; e = e.parentElement) if (/auto|scroll/.test(getComputedStyle(e).overflowX)) return true; return false; };
  const found = [], page = document.documentElement;
  if (page.scrollWidth > innerWidth) found.push(`the page is ${page.scrollWidth} wide, its window ${innerWidth}`);
  for (const e of document.querySelectorAll("article *:not(mjx-assistive-mml, mjx-assistive-mml *)")) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (box.width < 2 || box.height < 2 || style.visibility === "hidden" || style.display === "inline") continue;
    const what = `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`;
    if (box.right > innerWidth + 2 && !scrolls(e)) found.push(`runs out: ${what}`);
    if (/hidden|clip/.test(style.overflowX) && e.scrollWidth > e.clientWidth + 2) found.push(`cut off: ${what}`);
  }
  for (const e of document.querySelectorAll(".nb-html td, .nb-html th"))
    if (e.textContent.trim() && parseFloat(getComputedStyle(e).paddingLeft) < 3) found.push(`no room around: ${e.textContent.slice(0, 40)}`);
  return found.slice(0, 5);
}"""
SERIOUS = """async () => (await axe.run(document, {preload: false, resultTypes: ["violations"]})).violations
  .filter((v) => ["serious", "critical"].includes(v.impact)).map((v) => `${v.id} ×${v.nodes.length}: ${v.nodes[0].html.slice(0, 150)}`)"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built by the environment of `make docs`, or by this one where it has Sphinx."""
    own = ROOT / ".venv-docs" / "bin" / "python"
    if not own.exists() and not importlib.util.find_spec("furo"):
        pytest.skip("`make docs` makes the environment that builds the site")
    folder = tmp_path_factory.mktemp("site")
    builder = str(own if own.exists() else sys.executable)
    done = patience.run([builder, str(ROOT / ".ci" / "book.py"), str(folder)], cpu=300, cwd=ROOT)
    assert done.returncode == 0 and "0 warnings, 0 dead links" in done.stdout, done.stdout
    return folder / "html"


def test_the_site_is_built_without_a_warning(site: Path) -> None:
    assert (site / "searchindex.js").stat().st_size > 100_000
    assert all((site / f"{name}.html").exists() for name in PAGES)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        found = p.chromium.launch(executable_path=browser_path(), args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """How a page is opened: `opened(address, scheme, width)`; what its console says is in `page.said`."""
    contexts = []

    def open_(address: str, scheme: str = "light", width: int = 1440) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page, said = contexts[-1].new_page(), []
        page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: said.append(str(e)))
        page.on("request", lambda r: None if re.match("file:|data:|blob:", r.url) else said.append(f"fetches {r.url}"))
        page.said = said
        page.set_default_timeout(300_000)  # a busy machine fails nothing
        page.goto(address)
        page.wait_for_load_state("load")
        return page

    yield open_
    for context in contexts:
        context.close()


@looks
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole(name: str, site: Path, opened: Any) -> None:
    """Nothing is cut off or runs out of the window, the console is silent, nothing is fetched."""
    faults = {}
    for scheme in ("light", "dark"):
        for width in (400, 1440):
            page = opened((site / f"{name}.html").as_uri(), scheme, width)
            page.wait_for_timeout(300)  # formulas
            faults[scheme, width] = page.evaluate(OUT) + page.said
    assert not any(faults.values()), faults


@looks
@pytest.mark.skipif(AXE is None, reason="axe-core comes with axe-playwright-python")
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious(name: str, site: Path, opened: Any) -> None:
    assert AXE is not None and AXE.origin is not None
    axe = (Path(AXE.origin).parent / "axe.min.js").read_text(encoding="utf-8")
    faults = {}
    for scheme, width in [("light", 400), ("dark", 1440)][: 1 if name in HEAVY else 2]:
        page = opened((site / f"{name}.html").as_uri(), scheme, width)
        page.wait_for_timeout(300)
        page.evaluate(axe)
        faults[scheme, width] = page.evaluate(SERIOUS)
    assert not any(faults.values()), faults


@looks
def test_axe_sees_a_fault(opened: Any, tmp_path: Path) -> None:
    """The looks above can fail: a picture without words, a wide box, a script that throws."""
    (tmp_path / "a.html").write_text('<html lang="en"><title>t</title><article><img src="data:,"><div style="width:9999px">x</div></article><script>throw 1</script>')  # fmt: skip
    page = opened((tmp_path / "a.html").as_uri(), width=400)
    assert any("runs out: DIV" in fault for fault in page.evaluate(OUT)) and page.said
    if AXE is not None and AXE.origin is not None:
        page.evaluate((Path(AXE.origin).parent / "axe.min.js").read_text(encoding="utf-8"))
        assert any(fault.startswith("image-alt") for fault in page.evaluate(SERIOUS))


SOUGHT = {
    "KL": "KL, the leash",
    "GRPO": "GRPO and its descendants",
    "reward hacking": "Reward hacking, live",
    "clipped_surrogate": "API: losses",
}


@looks
@pytest.mark.parametrize("words", SOUGHT)
def test_the_search_finds_it_from_a_disk(words: str, site: Path, opened: Any) -> None:
    page = opened(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
    found = page.locator("#search-results ul.search > li")
    found.first.wait_for()
    page.wait_for_function("document.querySelector('.search-summary').textContent.startsWith('Search finished')")
    assert any(SOUGHT[words] in text for text in found.all_inner_texts()[:8]), found.all_inner_texts()[:8]
    assert not page.said and not page.locator(".did-you-mean").count()


@looks
@pytest.mark.parametrize(("typed", "meant"), [("polcy gradient", "policy gradient"), ("rewrad", "reward"), ("GRPPO", "grpo"), ("clipped_surogate", "clipped_surrogate")])  # fmt: skip
def test_a_typo_is_led_to_its_word(typed: str, meant: str, site: Path, opened: Any) -> None:
    page = opened(f"{(site / 'search.html').as_uri()}?q={typed.replace(' ', '+')}")
    line = page.locator(".did-you-mean")
    line.wait_for()
    assert line.inner_text() == f"Did you mean {meant}?"
    line.locator("a").click()
    page.locator("#search-results ul.search > li").first.wait_for()
