"""Attention of rows without padding (`RLHF_NB_ATTENTION`): the same log-probs and gradients for rows and trees, the rows' way where it
fails, kernels that fit a card and its number formats, and a self-check that sees a wrong rule."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_nb.core import ConfigError
from rlhf_nb.fast import attention
from rlhf_nb.fast.attention import AUTO, KERNELS, AttentionShape, flat_kernel, stretches
from rlhf_nb.fast.support import can_run
from rlhf_nb.scoring.check import BOUNDS, self_check
from rlhf_nb.scoring.scores import completion_logps
from rlhf_nb.types import Completions

CPU = torch.device("cpu")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels computed, call by call; nothing is known of any kernel yet."""
    seen: list[str] = []
    real = attention.Flat.__call__

    def spy(flat: Any, *args: Any) -> Any:
        out = real(flat, *args)
        seen.append(flat.name if out is not None else "rows")
        return out

    monkeypatch.setattr(attention.Flat, "__call__", spy)
    monkeypatch.setattr(attention, "_refused", {})
    return seen


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings, not by way of logging, which other tests and libraries set up as they like."""
    lines: list[str] = []
    monkeypatch.setattr(attention, "log", SimpleNamespace(warning=lambda text, *words: lines.append(text % words)))
    return lines


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
    for n, lens in ((20, (4, 9, 2)), (3, (5,)), (11, (7, 0, 1))):
        prompt = torch.randint(2, 90, (n,), generator=g).tolist()
        for c in lens:
            prompts.append(prompt)
            rows.append(torch.randint(2, 90, (c,), generator=g).tolist())
    return Completions.from_lists(prompts, rows)


def scored(net: Any, share: Any) -> tuple[Tensor, Tensor]:
    """Log-probs, and the gradient of their sum as one vector."""
    net.zero_grad()
    logps = completion_logps(net, answers(), share_prompts=share).logps
    torch.autograd.backward(logps.sum())
    return logps.detach(), torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@pytest.mark.parametrize("share", ["always", False])
def test_numbers_and_gradients_are_the_same(
    family: str, share: Any, used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model(family).double()
    monkeypatch.setenv("RLHF_NB_ATTENTION", "loop")
    monkeypatch.setattr("rlhf_nb.scoring.scores.branches_pay", lambda branches, width: False)
    found = scored(net, share)
    assert used and set(used) == {"loop"}
    monkeypatch.setenv("RLHF_NB_ATTENTION", "rows")
    for one, other in zip(found, scored(net, share), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_as_on_a_gpu(dtype: torch.dtype, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast queries and keys come in fp32 from their rotation, values in half precision; a tree's prompt is read several times."""
    net = model()
    exact, slope = scored(net, False)
    monkeypatch.setenv("RLHF_NB_ATTENTION", "loop")
    monkeypatch.setattr("rlhf_nb.scoring.scores.branches_pay", lambda branches, width: False)
    with torch.autocast("cpu", dtype):
        found, gradient = scored(net, "always")
    assert set(used) == {"loop"} and [s.dtype for name, s in attention._refused if name == "loop"] == [dtype]
    assert float((found - exact).abs().max()) < BOUNDS[dtype] / 5
    assert float((gradient - slope).norm() / slope.norm()) < (0.02 if dtype == torch.bfloat16 else 0.004)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_in_half_precision_as_on_a_gpu(
    dtype: torch.dtype, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, under autocast, states are fp32, projections and keys in half precision; a CPU keeps keys in the states' format."""
    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.fast import decode, engine
    from rlhf_nb.rollout.sampler import sample_tokens
    from rlhf_nb.types import PromptBatch

    class Halved(decode.FastDecoder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.cached = dtype

    net, texts = model("qwen3"), PromptBatch.from_lists([[7, 8, 9], [5] * 9, [3, 4] * 10, [4, 3] * 10])
    how: dict[str, Any] = {"eos": [], "pad": 0, "seed": 0, "greedy": True, "fixed_shapes": fixed}
    want = sample_tokens(net, texts, SamplingConfig(max_new_tokens=10), **how)
    monkeypatch.setattr(decode, "FastDecoder", Halved)
    monkeypatch.setattr(engine, "FastDecoder", Halved)
    with torch.autocast("cpu", dtype):
        got = sample_tokens(net, texts, SamplingConfig(max_new_tokens=10), **how)
    first = (got[0] != want[0]).int().cumsum(
        1
    ) == 0  # after a token that was nearly as likely they read different texts
    assert first.float().mean() > 0.8 and float((got[1] - want[1])[first].abs().max()) < 0.01


@pytest.mark.parametrize("share", ["always", False])
def test_the_compiled_rule_says_the_same(share: Any, used: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    net, c = model(), answers()
    monkeypatch.setattr("rlhf_nb.scoring.scores.branches_pay", lambda branches, width: False)
    with torch.no_grad():
        monkeypatch.setenv("RLHF_NB_ATTENTION", "flex")
        found = completion_logps(net, c, share_prompts=share).logps
        assert used and set(used) == {"flex"}
        monkeypatch.setenv("RLHF_NB_ATTENTION", "rows")
        torch.testing.assert_close(found, completion_logps(net, c, share_prompts=share).logps, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("when", ["at the comparison", "in a forward pass"])
def test_where_it_fails_rows_are_computed_and_it_is_said_once(
    when: str, used: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel for this card\nmore of it")

    monkeypatch.setenv("RLHF_NB_ATTENTION", "loop")
    monkeypatch.setitem(KERNELS, "loop", KERNELS["loop"]._replace(attend=broken))
    if when == "in a forward pass":
        monkeypatch.setattr(attention, "difference", lambda name, shape: "")
    monkeypatch.setattr("rlhf_nb.scoring.scores.branches_pay", lambda branches, width: False)
    net = model()
    found, again = scored(net, "always"), scored(net, "always")
    assert set(used) == ({"rows"} if when == "in a forward pass" else set())
    monkeypatch.setenv("RLHF_NB_ATTENTION", "rows")
    for one, two, want in zip(found, again, scored(net, "always"), strict=True):
        torch.testing.assert_close(one, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(two, want, rtol=1e-5, atol=1e-5)
    assert len(said) == 1 and "attention by loop isn't used here: RuntimeError: no kernel for this card." in said[0]


def test_memory_that_runs_out_is_no_reason_to_give_a_kernel_up(
    used: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setenv("RLHF_NB_ATTENTION", "loop")
    monkeypatch.setattr("rlhf_nb.scoring.scores.branches_pay", lambda branches, width: False)
    scored(model(), True)
    monkeypatch.setitem(KERNELS, "loop", KERNELS["loop"]._replace(attend=full))
    with pytest.raises(torch.OutOfMemoryError):
        scored(model(), True)
    assert not any(attention._refused.values())


def test_a_wrong_kernel_is_seen_before_its_use_and_by_the_self_check(
    used: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def strangers(branches: Any, device: Any) -> Any:  # answers look at their neighbours
        return stretches([[sum(row)] for row in branches], device)

    net, c = model(), answers()
    monkeypatch.setenv("RLHF_NB_ATTENTION", "loop")
    monkeypatch.setattr("rlhf_nb.scoring.scores.branches_pay", lambda branches, width: False)
    with torch.no_grad():
        assert self_check(net, c, rows=6).reason is None
        monkeypatch.setitem(KERNELS, "loop", KERNELS["loop"]._replace(rule=strangers))
        monkeypatch.setattr(attention, "_refused", {})
        assert self_check(net, c, rows=6).reason is None and "numbers are off by" in said[0]
        monkeypatch.setattr(attention, "difference", lambda name, shape: "")
        monkeypatch.setattr(attention, "_refused", {})
        checked = self_check(net, c, rows=6)
    assert checked.scorer > checked.bound and can_run(net) is not None


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_NB_ATTENTION", "flash")
    with pytest.raises(ConfigError, match="use 'auto', 'rows' or one of varlen"), torch.no_grad():
        completion_logps(model(), answers())


def test_a_kernel_that_was_asked_for_and_is_not_there_is_said(
    used: list[str], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_NB_ATTENTION", "flash_attn")
    with torch.no_grad():
        completion_logps(model(), answers())
        completion_logps(model(), answers())
    assert not used and len(said) == 1 and "flash_attn isn't used here: it isn't installed" in said[0]


CARDS = [  # compute capability, number format, size of a head, and what is taken there
    ((8, 0), "bfloat16", 64, "varlen"), ((9, 0), "float16", 128, "varlen"), ((8, 9), "float32", 64, "efficient"), ((8, 0), "bfloat16", 512, "efficient"),
    ((7, 5), "float16", 64, "efficient"), ((7, 5), "float32", 64, "efficient"), ((7, 5), "bfloat16", 64, None), ((6, 1), "float32", 64, None),
    ((8, 0), "bfloat16", 20, None), ((8, 0), "float64", 64, None),
]  # fmt: skip


@pytest.mark.parametrize(("card", "dtype", "size", "taken"), CARDS)
def test_what_is_taken_on_which_card(
    card: tuple[int, int], dtype: str, size: int, taken: str | None, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_refused", {})
    monkeypatch.setattr(attention, "_capability", lambda device: card)
    monkeypatch.setattr(attention, "_varlen_words", lambda: frozenset({"scale", "window_size"}))
    monkeypatch.setattr(attention, "difference", lambda name, shape: "")
    assert flat_kernel(AttentionShape(torch.device("cuda", 0), getattr(torch, dtype), 4, 2, size)) == taken
    if taken == "varlen":  # before torch 2.11 it knows no scale
        monkeypatch.setattr(attention, "_refused", {})
        monkeypatch.setattr(attention, "_varlen_words", lambda: frozenset({"is_causal"}))
        assert flat_kernel(AttentionShape(torch.device("cuda", 0), getattr(torch, dtype), 4, 2, size)) == "efficient"
    assert not said


META = torch.device("meta")


@pytest.mark.parametrize("name", ["varlen", "varlen of torch 2.11", "efficient"])
@pytest.mark.parametrize("branches", [[[3, 2], [4, 1]], [[3, 2, 4], [5, 1, 1, 2]]])
def test_operators_of_pytorch_take_what_they_are_given(
    name: str, branches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their numbers: shapes, formats and arguments, forward and backward."""
    if "scale" not in attention._varlen_words() and "varlen" in name:
        pytest.skip("this PyTorch has no attention for rows of different lengths, or one without a scale")
    if name.endswith("2.11"):
        asked: dict[str, Any] = {}
        from torch.nn.attention import varlen

        real = varlen.varlen_attn
        monkeypatch.setattr(varlen, "varlen_attn", lambda *a, **k: asked.update(k) or real(*a, **k))
        monkeypatch.setattr(attention, "_varlen_words", lambda: frozenset({"scale", "window_size"}))
    s = stretches(branches, CPU)
    s = s._replace(queries=s.queries.to(META), keys=s.keys.to(META), read=None if s.read is None else s.read.to(META))
    q, k, v = (
        torch.empty(sum(map(sum, branches)), n, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
        for n in (4, 2, 2)
    )
    out = KERNELS[name.split()[0]].attend(q, k, v, s, 0.3)
    assert out.shape == q.shape and out.dtype == torch.bfloat16 and out.requires_grad
    if (
        name == "efficient"
    ):  # PyTorch's description of its backward pass for tensors without numbers takes other arguments
        return
    for x, g in zip((q, k, v), torch.autograd.grad(out.float().sum(), (q, k, v)), strict=True):
        assert g.shape == x.shape
    if name.endswith("2.11"):
        assert set(asked) == {"scale", "window_size"}  # heads are repeated instead of grouped


def test_the_package_gets_what_it_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash_attn isn't installed where tests run: its place is taken by what computes stretches one after the other."""

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, deterministic: bool = False,
    ) -> Tensor:  # fmt: skip
        assert causal and dropout_p == 0.0 and softmax_scale is not None
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        lens = (cu_seqlens_q.diff().max(), cu_seqlens_k.diff().max())
        assert (max_seqlen_q, max_seqlen_k) == tuple(int(n) for n in lens)
        rule = attention.Stretches(cu_seqlens_q, cu_seqlens_k, None, (max_seqlen_q, max_seqlen_k))
        return KERNELS["loop"].attend(q, k, v, rule, softmax_scale)

    monkeypatch.setattr(
        attention, "import_module", lambda name: SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    )
    assert attention.difference("flash_attn", AttentionShape(CPU, torch.float32, 6, 2, 8)) == ""


def test_the_names_of_the_documentation() -> None:
    from pathlib import Path

    text = (Path(__file__).resolve().parent.parent / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in KERNELS) and set(AUTO) <= set(KERNELS)
