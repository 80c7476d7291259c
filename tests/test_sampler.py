"""Continuous batching: few slots for many rows give the same samples, and the slots are in use."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers

from rlhf_nb.config import SamplingConfig
from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.fast import decode
from rlhf_nb.fast.prompts import SharedPrompts
from rlhf_nb.fast.slots import Slots
from rlhf_nb.rollout.sampler import sample_tokens
from rlhf_nb.types import PromptBatch

torch.set_num_threads(1)
tok = toy.build_tokenizer()
EOS, PAD = tok.eos_token_id, tok.pad_token_id
ENDS = [EOS, 7, 11, 13, 17]  # an untrained model doesn't say EOS by itself: a few more words end an answer


def family(name: str) -> Any:
    """A small model with lively random weights, in float64: there, equality of tokens is exact."""
    ids: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": tok.bos_token_id, "eos_token_id": EOS}
    shape: dict[str, Any] = {
        "vocab_size": len(tok), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.2,
    }  # fmt: skip
    t = transformers
    config = {
        "llama": lambda: t.LlamaConfig(**shape, **ids),
        "qwen3": lambda: t.Qwen3Config(**shape, **ids, head_dim=16),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=len(tok), n_embd=32, n_layer=2, n_head=4, n_positions=160, initializer_range=0.2, **ids
        ),
    }[name]()
    torch.manual_seed(1)
    return t.AutoModelForCausalLM.from_config(config).double().eval()


def chatty(mean_length: int) -> Any:
    """A toy model whose answers end by chance after about `mean_length` tokens."""
    model = toy.build_model(0, "tiny")
    head = torch.nn.Linear(model.config.hidden_size, len(tok))
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[EOS] = math.log(len(tok) / mean_length)
    model.lm_head = head
    return model.eval()


def prompts(n: int) -> PromptBatch:
    """Different questions of different lengths."""
    texts = list(dict.fromkeys(r["prompt"] for r in toy.test_prompts(8 * n, seed=0)))[:n]
    return PromptBatch.from_lists([tok(t)["input_ids"] for t in texts], prompts=texts)


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> None:
    """Tokens, lengths and ends equal; log-probs up to rounding."""
    for i in (0, 2, 3):
        assert torch.equal(a[i], b[i])
    torch.testing.assert_close(a[1], b[1], atol=1e-6, rtol=1e-6)


@pytest.fixture(params=[False, True], ids=["a row has all", "prompts apart"], autouse=True)
def apart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether keys and values of prompts are kept once for their rows, or with each row."""
    monkeypatch.setattr(decode, "SHARE_BYTES", 0 if request.param else 1 << 60)
    return bool(request.param)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize(
    ("eos", "num_samples", "settings"),
    [
        (ENDS, 1, {"max_new_tokens": 24}),
        (ENDS, 8, {"max_new_tokens": 24}),
        ([], 3, {"max_new_tokens": 9}),
        (ENDS, 3, {"max_new_tokens": 20, "min_new_tokens": 6, "top_p": 0.9}),
        (ENDS, 3, {"max_new_tokens": 1}),
    ],
    ids=["different prompts", "groups of 8", "no end", "minimum length", "one token"],
)
def test_few_slots_give_the_same_samples(name: str, eos: list[int], num_samples: int, settings: dict[str, Any]) -> None:
    model, batch, how = family(name), prompts(24 // num_samples + 4), SamplingConfig(**settings)
    go = {"eos": eos, "pad": PAD, "seed": 3, "step": 5, "num_samples": num_samples}
    wanted = sample_tokens(model, batch, how, **go)
    for size in (3, 10, 16):
        for fixed in (False, True):
            same(wanted, sample_tokens(model, batch, how, **go, batch_size=size, fixed_shapes=fixed))
    same(wanted, sample_tokens(model, batch, how, **go, cache_bytes=1))
    greedy = sample_tokens(model, batch, how, **go, greedy=True)
    same(greedy, sample_tokens(model, batch, how, **go, greedy=True, batch_size=5))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch_size", [None, 3, 20])
def test_prompts_kept_apart_give_the_same_samples(
    name: str, dtype: torch.dtype, batch_size: int | None, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = family(name).to(dtype), prompts(9)
    lens = batch.prompt_mask.sum(1)
    assert lens.min() < lens.max()
    go = {"eos": ENDS, "pad": PAD, "seed": 3, "num_samples": 5, "batch_size": batch_size}
    joined: list[int] = []
    add = SharedPrompts.add

    def counting(self: Any, past: Any, lens: torch.Tensor, *args: Any) -> None:
        joined.extend(lens.tolist())
        add(self, past, lens, *args)

    monkeypatch.setattr(SharedPrompts, "add", counting)
    found = sample_tokens(model, batch, SamplingConfig(max_new_tokens=20), **go)
    assert bool(joined) is apart and (not apart or set(joined) == set(lens.tolist()))
    monkeypatch.setattr(decode, "SHARE_BYTES", 1 << 60 if apart else 0)
    other = sample_tokens(model, batch, SamplingConfig(max_new_tokens=20), **go)
    assert torch.equal(found[0], other[0]) and torch.equal(found[2], other[2])
    torch.testing.assert_close(found[1], other[1], rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("cores", [2, 3, 50])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_rows_shared_among_cores_are_the_same_samples(
    cores: int, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = family("llama"), prompts(7)
    ask = {"eos": ENDS, "pad": PAD, "seed": 3, "num_samples": 3, "batch_size": batch_size}
    alone = sample_tokens(model, batch, SamplingConfig(max_new_tokens=12), **ask)
    monkeypatch.setattr(decode, "workers_for", lambda model: cores)
    used: list[int] = []
    shared = sample_tokens(model, batch, SamplingConfig(max_new_tokens=12), **ask, used=used)
    for a, b in zip(alone, shared, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert sum(used) >= int(shared[2].sum())


@pytest.mark.parametrize("early", [0.25, 0.8])
def test_slots_are_in_use(early: float) -> None:
    """A share of the rows ends early; slots whose token is kept ÷ slots that were computed."""
    model, batch, new = chatty(8), prompts(60), 64
    with torch.no_grad():
        model.lm_head.bias[EOS] = math.log(len(tok) * (1 - (1 - early) ** (1 / new)))
    used: list[int] = []
    lens = sample_tokens(
        model, batch, SamplingConfig(max_new_tokens=new), eos=[EOS], pad=PAD, seed=0, num_samples=4, batch_size=32, used=used
    )[2]  # fmt: skip
    assert abs(float((lens < new).float().mean()) - early) < 0.15
    assert int(lens.sum()) / sum(used) >= 0.9
    assert max(used) <= 32


def test_fewer_steps_than_chunks() -> None:
    """With a queue, no chunk waits for its longest answer."""
    model, batch, how = chatty(8), prompts(64), SamplingConfig(max_new_tokens=48)
    go = {"eos": [EOS], "pad": PAD, "seed": 0}
    queue: list[int] = []
    chunks: list[int] = []
    together = sample_tokens(model, batch, how, **go, batch_size=16, used=queue)
    parts = [sample_tokens(model, batch[i : i + 16], how, **go, used=chunks) for i in range(0, 64, 16)]
    assert len(queue) < 0.8 * len(chunks)
    lens = torch.cat([p[2] for p in parts])
    assert torch.equal(together[2], lens)


def test_every_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a group enters in several parts; and a mistake there would be seen."""
    read: list[int] = []
    real = decode.prefill

    def counting(decoder: Any, chosen: list[torch.Tensor], *args: Any) -> Any:
        read.extend(map(len, chosen))
        return real(decoder, chosen, *args)

    monkeypatch.setattr(decode, "prefill", counting)
    batch = prompts(9)
    go = {"eos": [EOS], "pad": PAD, "seed": 0, "num_samples": 7}
    model = chatty(8)
    a = sample_tokens(model, batch, SamplingConfig(max_new_tokens=30), **go, batch_size=10)
    assert sorted(read) == sorted(batch.prompt_mask.sum(1).tolist())
    read.clear()  # and that is what keeping a divided group's keys and values is for
    monkeypatch.setattr(decode.Queue, "kept", property(lambda self: None, lambda self, value: None), raising=False)
    b = sample_tokens(model, batch, SamplingConfig(max_new_tokens=30), **go, batch_size=10)
    assert torch.equal(a[0], b[0]) and len(read) > len(batch)


def test_rows_slide_when_the_cache_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    real = Slots.slide
    monkeypatch.setattr(Slots, "slide", lambda slots, room: (times.append(slots.column), real(slots, room)))
    model, batch, how = family("llama"), prompts(40), SamplingConfig(max_new_tokens=12)
    go = {"eos": ENDS, "pad": PAD, "seed": 1}
    for fixed in (False, True):
        times.clear()
        few = sample_tokens(model, batch, how, **go, batch_size=4, fixed_shapes=fixed)
        assert len(times) >= 3
        same(few, sample_tokens(model, batch, how, **go))


def test_one_bad_row_is_still_found() -> None:
    """NaN in the logits of a model is an error, with few slots as with many."""
    model = family("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(Exception, match="not finite"):
        sample_tokens(model, prompts(12), SamplingConfig(max_new_tokens=8), eos=[EOS], pad=PAD, seed=0, batch_size=5)


def test_ours_or_generate_by_name() -> None:
    model, batch = family("llama"), prompts(10)
    go = {"eos": ENDS, "pad": PAD, "seed": 2, "batch_size": 4}
    ours, theirs = (
        sample_tokens(model, batch, SamplingConfig(max_new_tokens=9, sampler=s), **go) for s in ("ours", "generate")
    )
    same(ours, theirs)

    class Own(transformers.LlamaForCausalLM):
        """A subclass may change anything."""

    with pytest.raises(ConfigError, match=r"sampler=ours.*Own is not one of"):
        sample_tokens(Own(model.config).double(), batch, SamplingConfig(max_new_tokens=9, sampler="ours"), **go)
