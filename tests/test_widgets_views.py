"""Samples and tokens: what they show of bad and of hostile files, in both generations of ipywidgets' API, and saved."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch

from rlhf_nb.core import ConfigError, DataError, RunError
from rlhf_nb.data import toy
from rlhf_nb.decode.choose import best_of_bound, best_of_curve
from rlhf_nb.widgets.html import table_html
from rlhf_nb.widgets.samples import (
    TOKEN_MEASURES,
    Samples,
    Tokens,
    read_samples,
    select_samples,
    token_measures,
    token_texts,
    tokens_html,
    tokens_png,
)

ROOT = Path(__file__).resolve().parent.parent


class Balance(HTMLParser):
    """Counts tags, to see that nothing a policy wrote became markup."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        assert not [k for k, _ in attrs if k.startswith("on")], f"a handler in <{tag}>"
        if tag != "br":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def write_run(folder: Path, steps: int = 5, each: int = 4, **columns: Any) -> Path:
    rng = random.Random(0)
    (folder / "checkpoints").mkdir(parents=True)
    with open(folder / "samples.jsonl", "w") as f:
        for step in range(1, steps + 1):
            for i in range(each):
                n = rng.randrange(2, 9)
                numbers = {k: [round(rng.gauss(-1, 1), 4) for _ in range(n)] for k in ("old_logps", "ref_logps", "values", "advantages")}  # fmt: skip
                row = {"time": 1.0, "rank": 0, "step": step, "type": "sample", "prompt": f"question {i}", "completion": f" answer {step}", "score": rng.random(), "rewards": {"proxy": 1.0}}  # fmt: skip
                f.write(json.dumps({**row, "tokens": list(range(5, 5 + n)), **numbers, **columns}) + "\n")
    return folder


def test_sorting_filtering_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    book = Samples(run)
    assert len(book.rows) == 20 and list(book.prompts().values()) == [5] * 4
    assert [r["step"] for r in book.through_time("question 2")] == [1, 2, 3, 4, 5]
    kl = [r["kl"] for r in select_samples(book.rows, "kl")]
    assert kl == sorted(kl, reverse=True)
    row = book.rows[0]
    assert row["kl"] == pytest.approx(sum(a - b for a, b in zip(row["old_logps"], row["ref_logps"])))


def test_it_grows_while_it_is_watched(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    book = Samples(run)
    with open(run / "samples.jsonl", "a") as f:
        f.write(json.dumps({"step": 6, "type": "sample", "prompt": "new", "completion": "x", "score": 1.0}) + "\n")
        f.write('{"step": 7, "type": "sam')
    book.refresh()
    assert len(book.rows) == 21 and book.rows[-1]["prompt"] == "new" and math.isnan(book.rows[-1]["kl"])
    assert "no per-token" not in book.detail(book.rows[-1])


def test_many_samples_stay_bounded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=500, each=20)
    assert len(read_samples(run)) == 5000 and len(Samples(run, last=100).rows) == 100


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    nasty = '<img src=x onerror=alert(1)></td></table><script>alert("1")</script>&amp;'
    run = write_run(tmp_path / "run", prompt=nasty, completion=nasty, rewards={nasty: 1.0})
    book = Samples(run)
    for page in (book.table(), book.detail(book.rows[0]), tokens_html(book.rows[0], None, [nasty] * 9)):
        assert Balance(page).seen <= {"table", "thead", "tbody", "tr", "td", "th", "div", "span", "p"}
    widget = book.widget  # options of a list are text, not markup
    assert widget is not None


@pytest.mark.parametrize("missing", ["ref_logps", "values", "advantages", "old_logps"])
def test_columns_that_a_method_does_not_have(tmp_path: Path, missing: str) -> None:
    row = read_samples(write_run(tmp_path / "run", **{missing: None}))[0]
    there = token_measures(row)
    assert there and ("kl" in there) == (missing not in ("ref_logps", "old_logps"))
    tokens = Tokens(row)
    assert tokens.widget is not None and "⟨5⟩" in tokens.html()
    bare = {k: v for k, v in row.items() if k in ("step", "prompt", "completion")}
    with pytest.raises(DataError, match="no per-token numbers"):
        Tokens(bare)
    with pytest.raises(DataError, match="rescore"):
        tokens_html(row, "entropy")


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    row = read_samples(write_run(tmp_path / "run"))[0]
    row["advantages"][0], row["values"][0] = math.nan, math.inf
    assert "rgba(0,114,178,0.00)" in tokens_html(row, "advantage") and tokens_png(row, "value")[:4] == b"\x89PNG"
    assert table_html([{"x": math.nan}]).count("–") == 1
    flat = {**row, "advantages": [0.0] * len(row["tokens"])}
    assert "nan" not in tokens_html(flat, "advantage").split("</div>")[0].replace("nan</span>", "")


def test_texts_of_tokens_with_broken_characters() -> None:
    class Bytes:
        def decode(self, ids: list[int]) -> str:
            return bytes(ids).decode("utf-8", errors="replace")

    text = "é – 猫!"
    parts = token_texts({"tokens": list(text.encode())}, Bytes())
    assert "".join(parts) == text and len(parts) == len(text.encode()) and parts[0] == ""


def test_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="doesn't exist"):
        Samples(tmp_path / "nowhere")
    (tmp_path / "young").mkdir()
    young = Samples(tmp_path / "young")
    assert "no rows" in young.table() and young.widget is not None
    with pytest.raises(ConfigError, match="reward"):
        Samples(write_run(tmp_path / "run"), by="rewrad")


def test_widgets_use_core_classes_only(tmp_path: Path) -> None:
    """Nothing that ipywidgets 7.7 lacks."""
    pytest.importorskip("ipywidgets")
    import ipywidgets

    old = {
        "VBox", "HBox", "HTML", "FloatSlider", "FloatLogSlider", "IntSlider", "IntRangeSlider", "Dropdown", "ToggleButtons",
        "ToggleButton", "Button", "Text", "Select", "Output",
    }  # fmt: skip

    def walk(w: Any) -> set[str]:
        return {type(w).__name__}.union(*(walk(c) for c in getattr(w, "children", ())))

    row = {"completion": "a", "tokens": [5], "old_logps": [-1.0], "ref_logps": [-1.5]}
    used = walk(Tokens(row).widget) | walk(Samples(write_run(tmp_path)).widget)
    assert used <= old and all(hasattr(ipywidgets, name) for name in old)


def test_keys_switch_the_measure() -> None:
    row = {
        "completion": "a b",
        "tokens": [5, 6],
        "old_logps": [-1.0, -2.0],
        "ref_logps": [-1.5, -1.0],
        "values": [0.0, 1.0],
    }
    view = Tokens(row)
    assert view.widget is not None
    for measure in TOKEN_MEASURES:
        view._parts["keys"].value += measure.key
        assert view.by == (measure.name if measure.name in token_measures(row) else view.by)
    assert len({m.key for m in TOKEN_MEASURES}) == len(TOKEN_MEASURES)


def test_best_of_n_by_simulation() -> None:
    g = torch.Generator().manual_seed(0)
    pool = torch.randn(400, generator=g, dtype=torch.float64)
    draws = torch.stack([pool[torch.randperm(400, generator=g)[:8]].max() for _ in range(20_000)])
    assert float(best_of_curve(pool[None], sizes=[8])) == pytest.approx(float(draws.mean()), abs=0.02)
    ranks = torch.arange(1, 401, dtype=torch.float64)  # KL of the best of n, from the distribution of its rank
    p = (ranks / 400) ** 8 - ((ranks - 1) / 400) ** 8
    assert best_of_bound(8) == pytest.approx(float((p * (p * 400).log()).sum()), abs=0.01)


TEXT_ONLY = {
    "imported",
    "health",
    "html",
    "kernel",
    "labels",
    "board",
    "touch",
}  # what these show is text, or one drawing of lines
VIEWS = [*(p for p in sorted((ROOT / "nbs" / "widgets").glob("*.ipynb")) if p.stem not in TEXT_ONLY), *sorted((ROOT / "nbs" / "tutorials").glob("*_li*.ipynb")), *sorted((ROOT / "nbs" / "tutorials").glob("label*.ipynb")), *sorted((ROOT / "nbs" / "tutorials").glob("form*.ipynb"))]  # fmt: skip


@pytest.mark.parametrize("path", VIEWS, ids=lambda p: p.stem)
def test_saved_notebooks_hold_stills_and_no_widget_state(path: Path) -> None:
    nb = nbformat.read(path, 4)
    assert "widgets" not in nb.metadata
    kinds = [kind for c in nb.cells for o in c.get("outputs", []) for kind in o.get("data", {})]
    assert not [k for k in kinds if "widget" in k], "an output is a widget: in a saved notebook it is an empty box"
    assert "image/png" in kinds or "text/html" in kinds


@pytest.mark.parametrize("path", VIEWS, ids=lambda p: p.stem)
def test_static_rendering_holds_everything(path: Path) -> None:
    """What nbconvert (and so GitHub and nbviewer) makes of the notebook: every picture and table is there."""
    nbconvert = pytest.importorskip("nbconvert")
    nb = nbformat.read(path, 4)
    page, _ = nbconvert.HTMLExporter(template_name="basic").from_notebook_node(nb)
    data = [o["data"] for c in nb.cells for o in c.get("outputs", []) if "data" in o]
    picture = re.compile(r"<img[^>]*src=[\"']data:image/png")
    shown = [len(picture.findall("".join(d["text/html"]))) if "text/html" in d else "image/png" in d for d in data]
    assert len(picture.findall(page)) == sum(shown)
    assert page.count("<table") >= sum("<table" in str(d.get("text/html", "")) for d in data)


def test_toy_run_end_to_end(tmp_path: Path) -> None:
    from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer

    config = GRPOConfig.preset(
        "toy", output_dir=str(tmp_path), steps=2, rollout_batch_size=16, mini_batch_size=16, num_generations=4, console=False
    )  # fmt: skip
    tokenizer = toy.build_tokenizer()
    GRPOTrainer(config, toy.build_model(0, "tiny"), tokenizer, reward=toy.gold_reward, rows=toy.train_prompts(32)).fit()
    row = Samples(tmp_path, tokenizer).rows[-1]
    assert "value" not in token_measures(row) and "advantage" in token_measures(row)  # GRPO has no critic
    assert "".join(token_texts(row, tokenizer)).startswith(row["completion"][:5])
