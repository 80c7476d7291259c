"""What is promised of a whole answer: its least length in labels by rollouts."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_nb.config import SamplingConfig
from rlhf_nb.data import toy
from rlhf_nb.rollout import steps


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
