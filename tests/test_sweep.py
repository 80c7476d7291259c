"""No model is computed wrongly in silence: what scorer and sampler don't compute as `model(...)` does, they refuse."""

from __future__ import annotations

import pytest
import sweep
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sweep.quiet()
FEW = ("llama", "gpt2", "bert", "mamba", "jamba", "rwkv", "cpmant", "gemma3n_text")  # a kind each


def bad(found: dict[str, sweep.Verdict]) -> dict[str, sweep.Verdict]:
    return {name: v for name, v in found.items() if v.word in ("wrong", "crash")}


@pytest.mark.parametrize("kind", FEW)
def test_a_family_of_each_kind(kind: str) -> None:
    case = sweep.family(kind)
    assert case.found and not bad(case.found), case
    assert case.found["rows"].word == "right"


def test_a_wrong_number_is_seen() -> None:
    one = torch.ones(3, dtype=torch.float64)
    assert sweep.compared(lambda: (one, one), 1e-6).word == "right"
    assert sweep.compared(lambda: (one + 1e-5, one), 1e-6).word == "wrong"
    assert sweep.compared(lambda: (one * torch.nan, one), 1e-6).word == "wrong"
    assert sweep.compared(lambda: 1 / 0, 1e-6).word == "crash"  # type: ignore[arg-type, return-value]


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - set(FEW)))
def test_every_class_of_the_mapping(kind: str) -> None:
    case = sweep.family(kind)
    assert not bad(case.found), case
    if not case.found:
        pytest.skip(case.note)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sweep.PRODUCT)
def test_known_families_in_all_variants(kind: str) -> None:
    found = dict(sweep.known(kind))
    assert not bad(found) and any(v.word == "right" for v in found.values())


@pytest.mark.slow
def test_changed_models_in_scorer_and_sampler() -> None:
    found = dict(sweep.patched())
    assert not bad(found) and len(found) == 10 * len(sweep.gate.CHANGES)
