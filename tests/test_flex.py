"""Attention by a rule (`RLHF_NB_ATTENTION=flex`): the same log-probs for rows and trees, the rows' way where it fails, and a self-check that sees a wrong rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_nb.core import ConfigError
from rlhf_nb.fast import attention
from rlhf_nb.fast.support import can_run
from rlhf_nb.scoring import scores
from rlhf_nb.scoring.check import self_check
from rlhf_nb.scoring.scores import completion_logps
from rlhf_nb.types import Completions


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Flex is asked for; whether it computed, call by call."""
    from rlhf_nb.fast import blocks

    seen: list[bool] = []
    real = attention.flat_attention

    def spy(*args: Any) -> Any:
        out = real(*args)
        seen.append(out is not None)
        return out

    monkeypatch.setenv("RLHF_NB_ATTENTION", "flex")
    monkeypatch.setattr(attention._Flex, "failed", "")
    monkeypatch.setattr(blocks, "flat_attention", spy)
    return seen


def model(family: str = "qwen2") -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128} if family == "gpt2" else {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
    config = AutoConfig.for_model(family, vocab_size=90, tie_word_embeddings=False, **shape)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = None
    return AutoModelForCausalLM.from_config(config).eval()


def answers() -> Completions:
    g = torch.Generator().manual_seed(1)
    prompts, rows = [], []
    for n, lens in ((20, (4, 9, 2)), (3, (5,)), (11, (7, 1))):
        prompt = torch.randint(2, 90, (n,), generator=g).tolist()
        for c in lens:
            prompts.append(prompt)
            rows.append(torch.randint(2, 90, (c,), generator=g).tolist())
    return Completions.from_lists(prompts, rows)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("share", ["always", False])
def test_the_numbers_are_the_same(family: str, share: Any, used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    net, c = model(family), answers()
    with torch.no_grad():
        found = completion_logps(net, c, share_prompts=share).logps
        assert used and all(used)
        monkeypatch.setenv("RLHF_NB_ATTENTION", "rows")
        torch.testing.assert_close(found, completion_logps(net, c, share_prompts=share).logps, rtol=1e-4, atol=1e-5)


def test_where_it_fails_rows_are_computed_and_it_is_said_once(
    used: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(kind: str) -> Any:
        raise RuntimeError("no kernel for this card\nmore of it")

    monkeypatch.setattr(attention, "_flex", broken)
    said: list[str] = []  # not by way of logging, which other tests and libraries set up as they like
    monkeypatch.setattr(attention, "log", SimpleNamespace(warning=lambda text, *words: said.append(text % words)))
    net, c = model(), answers()
    with torch.no_grad():
        found = completion_logps(net, c, share_prompts="always").logps
        again = completion_logps(net, c, share_prompts="always").logps
        assert used and not any(used)
        monkeypatch.setenv("RLHF_NB_ATTENTION", "rows")
        want = completion_logps(net, c, share_prompts="always").logps
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(again, want, rtol=1e-5, atol=1e-6)
    assert len(said) == 1 and "flex_attention failed here: RuntimeError: no kernel for this card" in said[0]


def test_a_wrong_rule_is_seen_by_the_self_check(used: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    net, c = model(), answers()
    with torch.no_grad():
        assert self_check(net, c, rows=6).reason is None
        monkeypatch.setattr(scores, "flex_mask", lambda row, branch: attention.flex_mask(row, torch.zeros_like(branch)))
        checked = self_check(net, c, rows=6)
    assert (
        checked.scorer > checked.bound and "differ from model(...)" in str(checked.reason) and can_run(net) is not None
    )


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_NB_ATTENTION", "flash")
    with pytest.raises(ConfigError, match="use 'rows' or 'flex'"), torch.no_grad():
        completion_logps(model(), answers())
