"""The doctor names the field's classic mistakes, each planted here, and is silent on a healthy run."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_nb import DPOConfig, GRPOConfig, KTOConfig, PPOConfig, SFTConfig
from rlhf_nb.core import decide_precision
from rlhf_nb.data import toy
from rlhf_nb.models.load import save_model
from rlhf_nb.pipeline.doctor import (
    check_distance,
    check_judgements,
    check_loading,
    check_prices,
    distance,
    doctor,
    examine,
    load_start,
)

CPU = decide_precision("cpu")


def said(findings: list[Any]) -> list[str]:
    return [f"{f.level}: {f.what}" for f in findings]


def test_four_bits_and_kernels() -> None:
    four = {"model": {"name_or_path": "some/model", "lora": {"quantize_4bit": True}}}
    (found,) = check_loading(SFTConfig(**four), CPU)  # type: ignore[arg-type]
    assert found.level == "error" and ("bitsandbytes" in found.what or "needs CUDA" in found.what)
    toy = {
        "model": {"name_or_path": "toy", "lora": {"quantize_4bit": True}, "attn_implementation": "flash_attention_2"}
    }
    assert said(check_loading(SFTConfig(**toy), CPU)) == [  # type: ignore[arg-type]
        "warning: model.lora.quantize_4bit=true and model.attn_implementation=flash_attention_2 has no effect"
    ]
    flash = {"model": {"name_or_path": "some/model", "attn_implementation": "flash_attention_2"}}
    assert said(check_loading(SFTConfig(**flash), CPU))[0].startswith("error: flash_attention_2 needs a GPU")  # type: ignore[arg-type]
    for healthy in ({"name_or_path": "toy"}, {"name_or_path": "some/model", "lora": {"r": 4}}):
        assert check_loading(SFTConfig(model=healthy), CPU) == []  # type: ignore[arg-type]


def test_a_package_that_is_missing_is_said_once(tmp_path: Path) -> None:
    """A model that can't be loaded is no fault of the data."""
    policy, tokenizer = toy.build_model(0, "tiny"), toy.build_tokenizer()
    save_model(policy, tokenizer, tmp_path / "policy")
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(pair(i)) for i in range(8)))
    lora = {"r": 4, "quantize_4bit": True}
    config = DPOConfig(
        model={"name_or_path": str(tmp_path / "policy"), "lora": lora}, data={"path": str(tmp_path / "pairs.jsonl")}
    )  # type: ignore[arg-type]
    (found,) = [f for f in examine(config) if f.level == "error"]
    assert found.why == "training can't start" and "quantize_4bit" in found.what


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PPOConfig(vf_coef=0.0), "vf_coef is 0"),
        (PPOConfig(kl_coef=0.0, reward="runs/reward/model"), "kl_coef is 0 with a learnt reward"),
        (GRPOConfig(rewards=[{"classifier": "some/classifier"}]), "kl_coef is 0 with a learnt reward"),  # type: ignore[list-item]
        (GRPOConfig(reward="proxy"), "kl_coef is 0 with a learnt reward"),  # as the lights say at the run's end
        (PPOConfig(reward="runs/reward/model"), None),
        (GRPOConfig(rewards=[{"verify": "number"}]), None),  # type: ignore[list-item]
        (PPOConfig(kl_coef=0.0, reward="check"), None),
    ],
)  # fmt: skip
def test_prices(config: Any, words: str | None) -> None:
    assert [f.what for f in check_prices(config)] == ([words] if words else [])


def pair(i: int, longer: bool = False, model: str = "", other: str = "") -> dict[str, Any]:
    """A pair with answers of different lengths, and where they come from."""
    a, b = "owls live in the forest " * (1 + longer), "owls live in the den " * (2 - longer)
    return {"prompt": f"where {i}", "chosen": a, "rejected": b} | (
        {"chosen_model": model, "rejected_model": other} if model else {}
    )


def thumb(i: int, source: str) -> dict[str, Any]:
    liked = source == "good" if source in ("good", "bad") else i % 2 == 0
    return {"prompt": f"where {i}", "completion": "owls " * (1 + i // 2 % 7), "label": liked, "source": source}


Make = Callable[[int], dict[str, Any]]
JUDGED: dict[str, tuple[str, int, Make, str | None]] = {
    "few": ("preference", 200, lambda i: pair(i, i % 2 == 0), "200 pairs are few"),
    "length": ("preference", 600, lambda i: pair(i, i % 20 > 0), "the length decides"),
    "shorter": ("preference", 600, lambda i: pair(i, i % 20 == 0), "the length decides"),
    "source": ("preference", 600, lambda i: pair(i, i % 2 == 0, "large", "small"), "chosen or rejected_model = 'large' decides"),
    "thumbs by source": ("unpaired", 600, lambda i: thumb(i, ("good", "bad")[i % 2]), "the column source decides"),
    "healthy pairs": ("preference", 600, lambda i: pair(i, i % 2 == 0, *(("a", "b") if i % 3 else ("b", "a"))), None),
    "healthy thumbs": ("unpaired", 600, lambda i: thumb(i, ("x", "y")[i // 2 % 2]), None),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_judgements(name: str) -> None:
    kind, n, make, words = JUDGED[name]
    found = check_judgements([make(i) for i in range(n)], kind)  # type: ignore[arg-type]
    assert [f.what for f in found][:1] == ([words] if words else []), found
    assert all(f.level == "warning" and f.fix for f in found)


def test_the_doctor_asks_all_of_them(tmp_path: Path) -> None:
    """On the way that the command takes; the worlds made here are healthy."""
    rows = [pair(i, i % 20 > 0) for i in range(600)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ill = {"name_or_path": "toy", "attn_implementation": "eager"}
    found = doctor(
        DPOConfig.preset("toy", model=ill, data={"path": str(tmp_path / "pairs.jsonl")}, output_dir=str(tmp_path / "r"))
    )
    assert {"the length decides", "model.attn_implementation=eager has no effect"} <= {f.what for f in found}
    for healthy in (DPOConfig.preset("toy"), KTOConfig.preset("toy"), PPOConfig.preset("toy", reward="proxy")):
        assert not [
            f for f in doctor(healthy.replace(output_dir=str(tmp_path / "h"))) if f.level in ("error", "warning")
        ]


def chain(next_of: list[int]) -> LlamaForCausalLM:
    """A policy made by hand: behind a word comes `next_of` of it, nine times in ten."""
    n = len(next_of)
    config = LlamaConfig(
        vocab_size=n, hidden_size=n, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.model.layers[0].parameters():
            weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(n))
        model.lm_head.weight.zero_()
        model.lm_head.weight[torch.tensor(next_of), torch.arange(n)] = math.log(9 * (n - 1)) / math.sqrt(n)
    return model.eval()


@pytest.mark.parametrize("seed", range(5))
def test_answers_of_another_model(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy's own draws are at distance 0 and nothing is said; those of a policy with other habits are far."""
    tok, rng = toy.build_tokenizer(), random.Random(seed)
    words = range(5, 25)
    habits = [[*range(len(tok))] for _ in "ab"]
    for habit in habits:
        for a, b in zip(words, rng.sample(words, len(words))):
            habit[a] = b

    def drawn(habit: list[int], n: int) -> list[dict[str, Any]]:
        out = []
        for _ in range(n):
            ids = [rng.choice(words)]
            while len(ids) < 12:
                ids.append(habit[ids[-1]] if rng.random() < 0.9 else rng.randrange(len(tok)))
            out.append({"prompt_ids": ids[:1], "chosen_ids": ids[1:]})
        return out

    policy = chain(habits[0])
    own, other = (distance(policy, drawn(habit, 200)) for habit in habits)
    assert abs(own) < 0.35 and other > 2, (own, other)
    save_model(policy, tok, tmp_path / "policy")
    config = DPOConfig(model={"name_or_path": str(tmp_path / "policy")}, device="cpu", data={"path": "x"})  # type: ignore[arg-type]
    start = load_start(config.model)
    for habit, hit in zip(habits, (False, True)):
        rows = drawn(habit, 32)
        monkeypatch.setattr("rlhf_nb.pipeline.doctor._as_in_training", lambda *_, r=rows: (r, None, 0))
        found = check_distance(config, start, [])
        assert [f.level for f in found] == ["warning"] * hit, found
        assert not hit or re.search(r"another model's: \d\.\d nats a token", found[0].what)
    assert check_distance(SFTConfig(model={"name_or_path": str(tmp_path / "policy")}), start, []) == []  # type: ignore[arg-type]
