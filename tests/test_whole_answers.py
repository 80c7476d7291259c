"""What is promised of a whole answer: its least length in labels by rollouts, and the KL of an exported copy, which the prompt doesn't enter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_nb.config import SamplingConfig
from rlhf_nb.data import toy
from rlhf_nb.export.price import HeldOut, measure_copy
from rlhf_nb.rollout import steps

VOCABULARY, PROMPT, ANSWER = 12, [3, 4, 5, 6], [7, 8, 9]


def forward(noisy: range, by: float) -> Any:
    """A model that continues with the next number; logits at some positions are off by noise."""

    def logits(ids: Sequence[int], past: Any) -> tuple[Tensor, Any]:
        start = past or 0
        out = torch.nn.functional.one_hot(torch.tensor([(i + 1) % VOCABULARY for i in ids]), VOCABULARY).float() * 5
        for row in range(len(ids)):
            if start + row in noisy:
                out[row] += by * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(start + row))
        return out, start + len(ids)

    return logits


@pytest.mark.parametrize(
    ("noisy", "counts"),
    [(range(3), False), (range(3, 4), True), (range(5, 6), True), (range(6, 9), False)],
    ids=["in-the-prompt", "before-the-first-token", "before-the-last-token", "behind-the-answer"],
)
def test_the_price_of_a_copy_is_paid_on_answers_only(noisy: range, counts: bool) -> None:
    held = HeldOut("rows", ["prompt"], [PROMPT], [ANSWER])
    price = measure_copy(
        forward(range(0), 0.0), forward(noisy, 1.0), toy.build_tokenizer(), held, eos={11}, answer_tokens=2
    )
    assert price.tokens == len(ANSWER)
    assert (price.kl > 1e-3) is counts and (price.kl_worst > 1e-3) is counts


def test_the_least_length_belongs_to_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning of k tokens needs min_new_tokens − k more, not min_new_tokens more."""
    asked: list[tuple[int, int]] = []
    real = steps.sample_tokens

    def spied(model: Any, prompts: Any, sampling: SamplingConfig, **more: Any) -> Any:
        out = real(model, prompts, sampling, **more)
        lens = out[2].tolist()
        asked.append((sampling.min_new_tokens, min(lens)))
        return out

    monkeypatch.setattr(steps, "sample_tokens", spied)
    tokenizer, model = toy.build_tokenizer(), toy.build_model(0, "tiny").eval()
    row = {"prompt": toy.test_prompts(1)[0]["prompt"], "completions": ["Owls eat mice.", "They hunt at night.", "Bye."]}
    begun = steps.find_beginnings([row], tokenizer)
    ends = [end + 1 for _, end in begun.places]
    least = max(ends) + 2
    sampling = SamplingConfig(max_new_tokens=least + 4, min_new_tokens=least)
    steps.count_right(model, tokenizer, begun, lambda *a, **k: [1.0] * len(a[1]), n=4, sampling=sampling)
    assert len(set(ends)) > 1 and [wanted for wanted, _ in asked] == [least - end for end in sorted(ends)]
    assert all(drawn >= wanted for wanted, drawn in asked)
