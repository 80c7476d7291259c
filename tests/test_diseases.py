"""The doctor names the field's classic mistakes, each planted here, and is silent on a healthy run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_nb import DPOConfig, GRPOConfig, KTOConfig, PPOConfig, SFTConfig
from rlhf_nb.core import decide_precision
from rlhf_nb.pipeline.doctor import check_judgements, check_loading, check_prices, doctor

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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PPOConfig(vf_coef=0.0), "vf_coef is 0"),
        (PPOConfig(kl_coef=0.0, reward="runs/reward/model"), "kl_coef is 0 with a learnt reward"),
        (GRPOConfig(rewards=[{"classifier": "some/classifier"}]), "kl_coef is 0 with a learnt reward"),  # type: ignore[list-item]
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
