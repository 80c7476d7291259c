"""`benchmarks/real_science.py` runs from end to end: every run of it, one step each, on a model of some ten thousand parameters."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    """The benchmarks import each other by name."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def science(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The script as a module, and the folder of a tiny chat model with small files to read."""
    import harness
    import real_science
    from real_words import FACTS
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("science")
    pairs = [(f"Tell me about number {i}.", f"Number {i} is fine.", f"Go away {i}, you fool.") for i in range(40)]
    rows = [{k: f"\n\nHuman: {q}\n\nAssistant: {a}" for k, a in (("chosen", a), ("rejected", b))} for q, a, b in pairs]
    texts = [text for row in rows for text in row.values()] + [q for q, _ in FACTS]
    tokenizer = harness.hh_tokenizer(texts, 400)
    tokenizer.chat_template = TEMPLATE
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), eos_token_id=1, pad_token_id=0, bos_token_id=None, **shape)
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    problems = [
        {"question": f"What is {i} + 1?", "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        for i in range(40)
    ]
    for name, lines in (("hh.jsonl.gz", rows), ("gsm8k.jsonl.gz", problems)):
        with gzip.open(folder / name, "wt", encoding="utf-8") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
    (folder / "plain.jsonl").write_text(json.dumps({"turns": ["Write about the sea."]}) + "\n", encoding="utf-8")
    return real_science, folder


def lab_of(science: Any) -> Any:
    """Surroundings of tiny runs."""
    module, folder = science
    args = argparse.Namespace(
        model=folder / "model", out=folder / "out", hh=folder / "hh.jsonl.gz", gsm8k=folder / "gsm8k.jsonl.gz",
        plain=folder / "plain.jsonl", tiny=True, save=folder / "reward", steps=None, asked=None,
    )  # fmt: skip
    args.out.mkdir(exist_ok=True)
    return module.Lab(args, 0)


def test_all_runs_leave_numbers_and_the_report_shows_them(science: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module, folder = science
    lab = lab_of(science)
    for part in module.PARTS.values():
        for name in part:
            found = module.JOBS[name](lab)
            (lab.out / f"{name}-0.json").write_text(json.dumps(found), encoding="utf-8")
    trained = [json.loads((lab.out / f"{name}-0.json").read_text(encoding="utf-8")) for name in module.METHODS]
    for run in trained:
        after = run["after"]
        assert run["steps"] == 1 and 0 <= after["right"] <= after["asked"] == 8 and math.isfinite(after["kl"])
        assert set(after["nats"]) == {"HH answers", "MT-Bench questions"}
    capsys.readouterr()
    import real_report

    real_report.report(lab.out, folder)
    said = capsys.readouterr().out
    assert (
        "not run" not in said
        and "points more than the bag of words" in said
        and "SFT, then PPO" in said
        and "gsm8k" in said
    )
    assert "toy world, bf16" in said and "GRPO on the chat model" in said
    assert all((folder / f"{name}.png").stat().st_size > 1000 for name in ("over_optimisation_real", "real_methods"))


def test_the_saved_reward_model_is_read_by_plain_transformers_and_says_what_the_head_said(science: Any) -> None:
    import hh_folds
    from transformers import AutoModelForSequenceClassification

    from rlhf_nb.models.heads import RewardModel

    _, folder = science
    lab = lab_of(science)
    if not (lab.out / "states" / "rows.json").exists():
        hh_folds.features(str(lab.model), folder / "hh.jsonl.gz", lab.out / "states", 40, 20)
    told = hh_folds.save_head(str(lab.model), lab.out / "states", folder / "again")
    rows, states = hh_folds.load_states(lab.out / "states")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "again").eval()
    assert model.config.num_hidden_layers == told["layer"]
    ends = (states[:, 0, 0] - states[:, 0, 1]).float()[:, told["layer"]]
    every = torch.arange(len(rows))
    k = hh_folds.kernel(ends, every)
    expected = k @ hh_folds.logistic_dual(k, told["ridge"])
    with torch.no_grad():
        score = lambda r, side: model(input_ids=torch.tensor([r["prompt_ids"] + r[side]])).logits[0, 0]
        margins = torch.stack([score(r, "chosen_ids") - score(r, "rejected_ids") for r in rows]).double()
    size = float(expected.abs().mean())
    assert float((margins - expected).abs().max()) < 0.05 * size, (margins, expected)  # states are kept in bf16
    assert RewardModel.load(folder / "again").pooling == "last"


def test_heads_find_what_pairs_differ_in(science: Any) -> None:
    """A direction that all pairs share is learnt; labels that were thrown are not."""
    import hh_folds

    g = torch.Generator().manual_seed(0)
    x = torch.randn(300, 20, generator=g, dtype=torch.float64)
    train, test = torch.arange(200), torch.arange(200, 300)
    told = {"told": x.clone(), "thrown": x}
    told["told"][:, 3] = told["told"][:, 3].abs()
    shares = {}
    for name, features in told.items():
        k = hh_folds.kernel(features, train)
        _, ridge, _ = hh_folds.choose({name: k}, train)
        a = hh_folds.logistic_dual(k[train][:, train], ridge)
        shares[name] = float(hh_folds.right(k[test][:, train] @ a).mean())
    assert shares["told"] > 0.75 and 0.35 < shares["thrown"] < 0.65


def test_the_regression_is_that_of_the_package(science: Any) -> None:
    """The bag of words in kernel form gives the margins of `rlhf_nb.train.reward`."""
    import hh_folds

    from rlhf_nb.train.reward import fit_words, word_bags

    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, 30, (n,), generator=g).tolist()
    rows = [{"chosen_ids": draw(5 + i % 3), "rejected_ids": draw(4 + i % 5)} for i in range(60)]
    words = word_bags(rows)
    expected = words.margin(fit_words(words, 30, 10.0))
    k = hh_folds.word_kernel(rows)
    found = k @ hh_folds.logistic_dual(k, 10.0 / len(rows))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def test_the_forty_questions_and_the_lexicon() -> None:
    import real_words

    assert len(real_words.FACTS) == 40 == len({q for q, _ in real_words.FACTS}) and not real_words.GOOD & real_words.BAD
    assert real_words.fact_right("The capital is Paris.", "paris") and not real_words.fact_right("comparison", "paris")
    assert real_words.feeling("A lovely, bright day, a lovely day.") == 2
    assert real_words.feeling("sad sad sad sad") == -3 and real_words.feeling("What I saw.") == 0


def test_without_a_model_it_says_so(science: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, _ = science
    monkeypatch.setattr(sys, "argv", ["real_science.py", "methods", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="skipped: no chat model"):
        module.main()
