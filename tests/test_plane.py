"""`benchmarks/plane.py`: its numbers against counting, its report on curves whose peak is known, and (slow) every run of it with a tiny model."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    """The benchmarks import each other by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def test_best_of_n_from_one_draw_is_the_mean_over_all_subsets() -> None:
    import plane_toy

    g = torch.Generator().manual_seed(0)
    scores, gold = (torch.randn(3, 6, generator=g) for _ in range(2))
    found = plane_toy.best_of(scores, gold)
    assert found["n"] == [1, 2, 3, 4, 6] and found["kl"][0] == 0
    assert all(a <= b for a, b in itertools.pairwise(found["kl"]))
    for n, value, chosen in zip(found["n"], found["gold"], found["proxy"]):
        picks = [
            max(c, key=lambda i: float(scores[p, i])) for p in range(3) for c in itertools.combinations(range(6), n)
        ]
        each = len(picks) // 3
        rows = [k // each for k in range(len(picks))]
        assert value == pytest.approx(float(gold[rows, picks].mean()), abs=1e-6)
        assert chosen == pytest.approx(float(scores[rows, picks].mean()), abs=1e-6)


def test_what_a_sentence_is_worth() -> None:
    import real_words

    ten = "We sat by the sea and we ate our bread."  # ten words, one of them ("we") twice
    assert real_words.worth_of("the sea", ten) == pytest.approx(2 + 1 + 1 - 3 * (1 - 9 / 10))
    assert real_words.worth_of("the sea", "...") == real_words.EMPTY
    assert real_words.worth_of("the sea", "sea sea sea sea") < real_words.worth_of("the sea", "The sea.")
    ask = [[{"role": "user", "content": a.format("my garden")}] for a in real_words.ABOUT]
    assert real_words.worth(ask, ["My garden."] * 2) == [real_words.worth_of("my garden", "My garden.")] * 2


def test_those_who_compare_err_where_gold_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    import plane_real

    gold = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    lab = argparse.Namespace(seed=0)
    pairs = plane_real.compared(lab, gold)
    gaps = torch.tensor([float(gold.view(-1)[a] - gold.view(-1)[b]) for a, b in pairs])
    assert len(pairs) == gold.numel() and all(a // 6 == b // 6 and a != b for a, b in pairs)
    near, far = (float((gaps[where] > 0).double().mean()) for where in (gaps.abs() < 0.2, gaps.abs() > 1.5))
    assert 0.45 < near < 0.65 and far > 0.97


def test_the_report_finds_a_peak_that_was_put_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import plane_report

    d = torch.linspace(0.1, 4, 40).double()
    proxies: dict[str, Any] = {}
    for size in ("small", "medium"):
        for data, peak in ((60, 1.0), (250, 2.0)):
            about = {"accuracy": 0.7, "proxy_mean": 0.0, "proxy_std": 1.0, "proxy": d.tolist(), "kl": (d * d).tolist()}
            proxies[f"{size}_{data}"] = about | {"gold": (5 + 2 * d * (2 * peak - d)).tolist()}  # best-of-n's form
    rl = {"kl": (d * d).tolist(), "gold": (5 + 2 * d * (1 + math.log(1.6) - d.log())).tolist(), "proxy": d.tolist()}
    world = {"gold_mean": 5.0, "gold_std": 2.0, "proxies": proxies}
    (tmp_path / "toy_world-0.json").write_text(json.dumps(world), encoding="utf-8")
    (tmp_path / "toy_dpo_60-0.json").write_text(json.dumps(rl), encoding="utf-8")
    plane_report.report(tmp_path, tmp_path / "figures")
    said = capsys.readouterr().out
    by = {(c.method, c.size, c.data): c for c in plane_report.read(tmp_path, "toy_world")}
    assert len(by) == 5 and by["bon", "medium", 250].fit().peak == pytest.approx(2.0)  # type: ignore[union-attr]
    assert by["dpo", "small", 60].fit().peak == pytest.approx(1.6)  # type: ignore[union-attr]
    assert "| DPO | small | 60 | 70 | +1.60 | 2.6 |" in said and "| 2.6 [2.6, 2.6] |" in said and "not run" in said
    assert (tmp_path / "figures" / "plane_toy.png").stat().st_size > 1000


@pytest.mark.slow
def test_all_runs_leave_numbers_and_the_report_shows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import harness
    import plane
    import plane_real
    import plane_report
    from real_science import Lab
    from transformers import LlamaConfig, LlamaForCausalLM

    texts = [r["prompt"][0]["content"] for held in (False, True) for r in plane_real.requests(0, held)]
    tokenizer = harness.hh_tokenizer(texts, 300)
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    )
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 12, "num_attention_heads": 2}
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, bos_token_id=None, **shape)
    ).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    args = argparse.Namespace(model=tmp_path / "model", out=tmp_path / "out", tiny=True, asked=None, steps=None)
    args.out.mkdir()
    names = [
        "toy_world",
        "toy_ppo_small_250",
        "toy_dpo_60",
        "draw",
        "heads",
        *(n for n in plane.REAL if n.endswith("_60")),
    ]
    for name in names:
        found = (plane.TOY | plane.REAL)[name](Lab(args, 0))
        (args.out / f"{name}-0.json").write_text(json.dumps(found), encoding="utf-8")
    plane_report.report(args.out, tmp_path / "figures")
    said = capsys.readouterr().out
    assert "not run" not in said and all(f"| {title} |" in said for title in plane_report.TITLES.values())
    assert (tmp_path / "figures" / "plane_real.png").stat().st_size > 1000
