"""Whole runs of DPO and KTO, step for step like TRL's trainers: `tests/data/dpo_run.json`, written by `benchmarks/bench_dpo.py --record`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_nb.data.sources import MemorySource
from rlhf_nb.models.load import disable_dropout
from rlhf_nb.run.loop import Trainer
from rlhf_nb.train.dpo import DPO, DPOConfig
from rlhf_nb.train.kto import KTO, KTOConfig
from rlhf_nb.train.offline import make_reference, with_reference

FIXTURE = json.loads((Path(__file__).parent / "data" / "dpo_run.json").read_text(encoding="utf-8"))
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=1)
READ = {"loss": "loss", "margin": "rewards/margins", "chosen": "logps/chosen"}
READ_KTO = {"loss": "loss", "margin": "rewards/margins", "kl": "kl"}
FLOOR = 0.02  # margins start at 0: from here on differences are relative


def tiny_model() -> Any:
    """The fixture's model: weights from integer arithmetic, the same with every version of every library."""
    model = Qwen2ForCausalLM(Qwen2Config(**FIXTURE["model"]))
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            k = torch.arange(p.numel()) + 1_000_003 * (FIXTURE["seed"] + i)
            k = (k * 2_654_435_761) % 2**32
            k = ((k ^ (k >> 15)) * 2_246_822_519) % 2**32
            u = (k.double() / 2**32 - 0.5) * 0.35
            p.copy_((1 + u if "norm" in name else u).view_as(p))
    return disable_dropout(model)


def train(folder: Path, settings: dict[str, Any], rows: list[dict[str, Any]], **changed: Any) -> list[dict[str, float]]:
    """Our run: what is compared, per step."""
    config = DPOConfig(
        output_dir=str(folder), steps=settings["steps"], epochs=None, mini_batch_size=settings["batch"], beta=settings["beta"],
        optimizer={"lr": settings["lr"], "schedule": "constant", "warmup_steps": 0}, reference="cached" if settings.get("cached") else "frozen",
        reference_cache=str(folder / "reference"), precision="fp32", device="cpu", console=False, **{"token_budget": 128, **changed},
    )  # fmt: skip
    model = tiny_model()
    reference = make_reference(config, model, TOKENIZER)
    if settings.get("cached"):
        assert reference is not None
        rows, reference = with_reference(rows, reference, config, DPO.reference_columns), None
    history = Trainer(
        DPO(model, TOKENIZER, config, reference),
        MemorySource(rows, shuffle=False),
        config,
        run_dir=folder / "run",
    ).fit()
    return [{k: event[name] for k, name in READ.items()} for event in history]


def apart(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, float]:
    """Largest relative difference of each number, over the steps that ours did."""
    return {k: max(abs(a[k] - b[k]) / max(abs(a[k]), abs(b[k]), FLOOR) for a, b in zip(ours, theirs)) for k in ours[0]}


def test_same_model() -> None:
    """The weights and what the model makes of them are those that TRL trained."""
    model = tiny_model()
    total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    assert total == pytest.approx(FIXTURE["weights_sum"], rel=1e-9)
    with torch.no_grad():
        logits = model(torch.arange(2, 12)[None]).logits
    assert float(logits.double().abs().sum()) == pytest.approx(FIXTURE["logits_sum"], rel=1e-5)


@pytest.mark.parametrize("name", ["dpo", "dpo-cached"])
def test_run_like_trl(name: str, tmp_path: Path) -> None:
    """Losses, margins and log-probs of 20 steps, each after the updates before it."""
    run = FIXTURE["runs"][name]
    assert len(run["steps"]) == run["settings"]["steps"] == 20
    ours = train(tmp_path, run["settings"], FIXTURE["rows"])
    assert max(apart(ours, run["steps"]).values()) <= 1e-4, apart(ours, run["steps"])
    assert ours[0]["loss"] - ours[-1]["loss"] > 0.2, "a run in which nothing is learnt compares nothing"


def train_kto(folder: Path, settings: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Our run on labelled answers: what is compared, per step."""
    config = KTOConfig(
        output_dir=str(folder), steps=settings["steps"], epochs=None, mini_batch_size=settings["batch"], beta=settings["beta"],
        optimizer={"lr": settings["lr"], "schedule": "constant", "warmup_steps": 0}, precision="fp32", device="cpu", console=False,
        token_budget=64,
    )  # fmt: skip
    model = tiny_model()
    method = KTO(model, TOKENIZER, config, make_reference(config, model, TOKENIZER))
    history = Trainer(method, MemorySource(rows, shuffle=False), config, run_dir=folder / "run").fit()
    return [{k: event[name] for k, name in READ_KTO.items()} for event in history]


def test_kto_run_like_trl(tmp_path: Path) -> None:
    """Losses, reference points and margins of 20 steps; with other strangers' answers the run is another one."""
    run, rows = FIXTURE["runs"]["kto"], FIXTURE["answers"]
    ours = train_kto(tmp_path / "a", run["settings"], rows)
    assert max(apart(ours, run["steps"]).values()) <= 1e-4, apart(ours, run["steps"])
    assert max(step["kl"] for step in ours) > 0.1, "a reference point that stays at 0 compares nothing"
    turned = [r | {"other_ids": rows[i - 2]["completion_ids"]} for i, r in enumerate(rows)]
    assert max(apart(train_kto(tmp_path / "b", run["settings"], turned), run["steps"]).values()) > 1e-3


@pytest.mark.parametrize("changed", [{"token_budget": 40}, {"micro_batch_size": 1}, {"token_budget": 4096}])
def test_cutting_a_batch_changes_nothing(changed: dict[str, int], tmp_path: Path) -> None:
    """However the pairs of a step are spread over forwards, the run is TRL's."""
    run = FIXTURE["runs"]["dpo"]
    ours = train(tmp_path, run["settings"] | {"steps": 5}, FIXTURE["rows"], **changed)
    assert max(apart(ours, run["steps"]).values()) <= 1e-4


@pytest.mark.parametrize("mutant", ["beta", "lr", "swapped", "prompt", "end"])
def test_comparison_can_fail(mutant: str, tmp_path: Path) -> None:
    """Small changes of the run are far from the fixture."""
    settings, rows = FIXTURE["runs"]["dpo"]["settings"] | {"steps": 4}, [dict(r) for r in FIXTURE["rows"]]
    if mutant in ("beta", "lr"):
        settings[mutant] *= 1.02
    if mutant == "swapped":
        rows[3]["chosen_ids"], rows[3]["rejected_ids"] = rows[3]["rejected_ids"], rows[3]["chosen_ids"]
    if mutant == "prompt":  # one token of context less
        rows = [r | {"prompt_ids": r["prompt_ids"][1:]} for r in rows]
    if mutant == "end":  # the end-of-text token doesn't count
        rows = [r | {k: r[k][:-1] for k in ("chosen_ids", "rejected_ids")} for r in rows]
    ours = train(tmp_path, settings, rows)
    assert max(apart(ours, FIXTURE["runs"]["dpo"]["steps"]).values()) > 1e-3
