"""Continuous batching: few slots for many rows give the same samples, and the slots are in use."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rlhf_nb.config import SamplingConfig
from rlhf_nb.core import ConfigError, DataError, ModelError
from rlhf_nb.data import toy
from rlhf_nb.fast import engine
from rlhf_nb.fast.slots import Slots
from rlhf_nb.fast.support import use_fast
from rlhf_nb.models.load import load_model
from rlhf_nb.rollout import sampler
from rlhf_nb.rollout.sampler import as_rollout, draw, eos_ids, sample_tokens
from rlhf_nb.scoring.scores import completion_logps, logps
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


@pytest.fixture(params=[True, False], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fast paths, and none of them."""
    with use_fast(request.param):
        yield


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.slow), "gpt2"])
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
    with use_fast(False):
        same(wanted, sample_tokens(model, batch, how, **go))
        same(wanted, sample_tokens(model, batch, how, **go, batch_size=10))
    greedy = sample_tokens(model, batch, how, **go, greedy=True)
    same(greedy, sample_tokens(model, batch, how, **go, greedy=True, batch_size=5))


@pytest.mark.fast_path
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_an_answer_has_the_same_bits_in_any_company(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders, slots, cores and single rows, in float32; and without the rule about few rows that would be seen."""
    model, batch, how = family(name).float(), prompts(16), SamplingConfig(max_new_tokens=20)
    go: dict[str, Any] = {"eos": ENDS, "pad": PAD, "seed": 3}
    want = sample_tokens(model, batch, how, **go)

    def differs(order: list[int], **more: Any) -> int:
        found = sample_tokens(model, batch[torch.tensor(order)], how, **go, **more)
        pairs = (
            (found[k][i, : int(found[2][i])], want[k][j, : int(found[2][i])])
            for k in (0, 1)
            for i, j in enumerate(order)
        )
        return sum(not torch.equal(a, b) for a, b in pairs)

    orders = [torch.randperm(16, generator=torch.Generator().manual_seed(k)).tolist() for k in range(6)]
    assert all(differs(order, batch_size=size) == 0 for order in orders[:3] for size in (1, 3, 5, 16))
    assert all(differs(order[:n]) == 0 for order in orders[3:] for n in (1, 2, 3, 7))
    for cores in (2, 3):
        monkeypatch.setattr(engine, "workers_for", lambda model, cores=cores: cores)
        assert differs(orders[0]) == 0
    monkeypatch.undo()
    monkeypatch.setattr(engine, "FEWEST_ROWS", 1)
    assert sum(differs([i]) for i in range(16)) > 0


@pytest.mark.fast_path
def test_no_row_begins_with_what_another_one_wrote() -> None:
    """A prompt that continues another one's answer, drawn behind it in the same place, has the bits it has alone."""
    model, go = toy.build_model(0).eval(), {"eos": [], "pad": PAD, "seed": 3, "batch_size": 1}
    how = SamplingConfig(max_new_tokens=20)
    first = prompts(1)
    said = sample_tokens(model, first, how, **go)[0][0, :12].tolist()
    second = PromptBatch.from_lists([first.token_lists()[0] + said])
    both = PromptBatch.from_lists([*first.token_lists(), *second.token_lists()])
    alone, together = sample_tokens(model, second, how, **go), sample_tokens(model, both, how, **go)
    assert torch.equal(alone[0][0], together[0][1]) and torch.equal(alone[1][0], together[1][1])


@pytest.mark.slow
@pytest.mark.fast_path
def test_64_toy_answers_in_any_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six orders, four numbers of slots, one to three cores: tokens and log-probs, all of them."""
    model, batch, how = toy.build_model(0).eval(), prompts(64), SamplingConfig(max_new_tokens=28)
    go: dict[str, Any] = {"eos": ENDS, "pad": PAD, "seed": 5}
    want = sample_tokens(model, batch, how, **go)
    for k in range(6):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(k))
        monkeypatch.setattr(engine, "workers_for", lambda model, k=k: 1 + k % 3)
        for size in (3, 6, 16, 64):
            found = sample_tokens(model, batch[order], how, **go, batch_size=size)
            assert all(torch.equal(a, b[order]) for a, b in zip(found, want, strict=True)), (k, size)


@pytest.mark.parametrize("cores", [2, 3, 50])
@pytest.mark.parametrize("batch_size", [None, 5])
def test_rows_shared_among_cores_are_the_same_samples(
    cores: int, batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = family("llama"), prompts(7)
    ask = {"eos": ENDS, "pad": PAD, "seed": 3, "num_samples": 3, "batch_size": batch_size}
    alone = sample_tokens(model, batch, SamplingConfig(max_new_tokens=12), **ask)
    monkeypatch.setattr(engine, "workers_for", lambda model: cores)
    used: list[int] = []
    shared = sample_tokens(model, batch, SamplingConfig(max_new_tokens=12), **ask, used=used)
    for a, b in zip(alone, shared, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert sum(used) >= int(shared[2].sum())


@pytest.mark.fast_path
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


@pytest.mark.fast_path
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


@pytest.mark.fast_path
def test_every_prompt_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a group enters in several parts: then its further rows read one token each."""
    read: list[int] = []
    real = engine.RowCache.states

    def counting(cache: Any, rows: Any, blocks: Any, *least: int) -> torch.Tensor:
        read.extend(len(b) for b in blocks if len(b) > 1)
        return real(cache, rows, blocks, *least)

    monkeypatch.setattr(engine.RowCache, "states", counting)
    batch, model = prompts(9), chatty(8)
    go = {"eos": [EOS], "pad": PAD, "seed": 0, "num_samples": 7}
    a = sample_tokens(model, batch, SamplingConfig(max_new_tokens=30), **go, batch_size=10)
    assert len(read) == len(batch) and sum(read) <= int(batch.prompt_mask.sum())
    read.clear()  # and that is what looking for beginnings is for
    monkeypatch.setattr(engine._Reading, "source", lambda reading, new: (new.rows[0], 0))
    b = sample_tokens(model, batch, SamplingConfig(max_new_tokens=30), **go, batch_size=10)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and len(read) > len(batch)


@pytest.mark.fast_path
def test_rows_slide_when_the_cache_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []
    real = Slots.slide
    monkeypatch.setattr(Slots, "slide", lambda slots, room: (times.append(slots.column), real(slots, room)))
    model, batch, how = family("llama"), prompts(40), SamplingConfig(max_new_tokens=12)
    go = {"eos": ENDS, "pad": PAD, "seed": 1}
    few = sample_tokens(model, batch, how, **go, batch_size=4, fixed_shapes=True)
    assert len(times) >= 3
    same(few, sample_tokens(model, batch, how, **go))


@pytest.mark.usefixtures("fast")
def test_one_bad_row_is_still_found() -> None:
    """NaN in the logits of a model is an error, with few slots as with many."""
    model = family("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(Exception, match="not finite"):
        sample_tokens(model, prompts(12), SamplingConfig(max_new_tokens=8), eos=[EOS], pad=PAD, seed=0, batch_size=5)


@pytest.mark.fast_path
@pytest.mark.parametrize("how", ["auto", "generate"])
def test_a_run_says_whether_its_answers_are_exact(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_nb import GRPOConfig, GRPOTrainer

    def start(folder: str) -> str:
        config = GRPOConfig.preset(
            "toy", output_dir=tmp_path / folder, steps=1, epochs=None, rollout_batch_size=8, mini_batch_size=8,
            num_generations=4, console=False, sampling={"max_new_tokens": 6, "sampler": how},
        )  # fmt: skip
        run = GRPOTrainer(config, toy.build_model(0, "tiny"), tok, reward=toy.gold_reward, rows=toy.train_prompts(4))
        run.fit()
        event = json.loads((tmp_path / folder / "metrics.jsonl").read_text().splitlines()[0])
        return str(event["checked"]["answers"])

    assert start("run") == ("exact" if how == "auto" else "close: answers are drawn by generate")
    if how == "auto":  # a product of one row has other bits, and the trial sees it
        monkeypatch.setattr(engine, "FEWEST_ROWS", 1)
        assert start("other").startswith("close: on this machine an answer alone")


@pytest.mark.fast_path
def test_ours_or_generate_by_name() -> None:
    model, batch = family("llama"), prompts(10)
    go = {"eos": ENDS, "pad": PAD, "seed": 2, "batch_size": 4}
    ours, theirs = (
        sample_tokens(model, batch, SamplingConfig(max_new_tokens=9, sampler=s), **go) for s in ("ours", "generate")
    )
    same(ours, theirs)

    class Own(transformers.LlamaForCausalLM):
        """A subclass may change anything."""

    with pytest.raises(ConfigError, match=r"sampler=ours.*Own"):
        sample_tokens(Own(model.config).double(), batch, SamplingConfig(max_new_tokens=9, sampler="ours"), **go)


def test_the_switch_turns_our_decoder_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, how = family("llama"), prompts(6), SamplingConfig(max_new_tokens=9)
    go = {"eos": ENDS, "pad": PAD, "seed": 2}
    wanted = sample_tokens(model, batch, how, **go)
    monkeypatch.setattr(sampler, "write", lambda *a, **k: pytest.fail("our decoder ran"))
    monkeypatch.setenv("RLHF_NB_FAST", "0")
    same(wanted, sample_tokens(model, batch, how, **go))
    with pytest.raises(ConfigError, match=r"sampler=ours.*switched off"):
        sample_tokens(model, batch, SamplingConfig(max_new_tokens=9, sampler="ours"), **go)


# --- models that our decoder must leave alone ------------------------------------------------------------------------------


def louder(module: Any) -> None:
    """Another forward on an instance."""
    plain = module.forward
    module.forward = lambda *a, **k: 1.1 * plain(*a, **k)


def hook_on_model(model: Any) -> None:
    def tilt(module: Any, given: Any, out: Any) -> Any:
        out.logits = out.logits * 0.9
        return out

    model.register_forward_hook(tilt)


class Doubled(torch.nn.Module):
    """A layer in a wrapper that does more."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.2 * self.inner(x)


def other_heads(model: Any) -> None:
    """A layer with heads of its own size."""
    c = model.config
    own = transformers.LlamaConfig(**{**c.to_dict(), "head_dim": 16})
    own._attn_implementation = "sdpa"
    torch.manual_seed(4)
    model.model.layers[1].self_attn = type(model.model.layers[1].self_attn)(own, 1).to(model.dtype)
    model.model.layers[1].self_attn.forward = wide_rotary(model.model.layers[1].self_attn, own)


def wide_rotary(attention: Any, config: Any) -> Any:
    """Its forward with rotary angles for its own heads."""
    plain, rotary = attention.forward, transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)

    def forward(
        hidden_states: torch.Tensor, position_embeddings: Any = None, position_ids: Any = None, **how: Any
    ) -> Any:
        return plain(hidden_states, position_embeddings=rotary(hidden_states, position_ids), **how)

    return forward


CHANGES: dict[str, Callable[[Any], object]] = {
    "hook on an mlp": lambda m: m.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 1.3),
    "hook on the model": hook_on_model,
    "hook on the head": lambda m: m.lm_head.register_forward_hook(lambda module, given, out: out * 0.9),
    "forward of an mlp": lambda m: louder(m.model.layers[1].mlp),
    "forward of the head": lambda m: louder(m.lm_head),
    "mlp in a wrapper": lambda m: setattr(m.model.layers[0], "mlp", Doubled(m.model.layers[0].mlp)),
    "other heads in a layer": other_heads,
    "eager attention": lambda m: m.set_attn_implementation("eager"),
}


def agrees(model: Any, name: str, dtype: torch.dtype, scorer: bool = True) -> None:
    """Sampler, model and scorer give the same log-probs; answers don't depend on the batch."""
    g = torch.Generator().manual_seed(0)
    batch = PromptBatch.from_lists([torch.randint(3, 60, (n,), generator=g).tolist() for n in (3, 9, 5, 9)])
    how, go = SamplingConfig(max_new_tokens=8, temperature=0.9), {"eos": [EOS], "pad": PAD, "seed": 1}
    with pytest.raises(ConfigError, match="sampler=ours"):
        sample_tokens(model, batch, how.model_copy(update={"sampler": "ours"}), **go)
    found = ids, logps, lens, finished = sample_tokens(model, batch, how, **go, num_samples=2)
    bound = 1e-4 if dtype == torch.float32 else 1e-6
    for i in range(4):
        one = sample_tokens(model, batch[i : i + 1], how, **go, num_samples=2)
        width = one[0].shape[1]
        assert torch.equal(one[0], ids[2 * i : 2 * i + 2, :width]) and torch.equal(one[2], lens[2 * i : 2 * i + 2]), (
            name
        )
        for row in (2 * i, 2 * i + 1):
            prompt, answer = batch.prompt_ids[i][batch.prompt_mask[i]], ids[row, : lens[row]]
            with torch.no_grad():
                logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
            plain = (logits / 0.9).log_softmax(-1).gather(1, answer[:, None])[:, 0]
            torch.testing.assert_close(
                logps[row, : lens[row]], plain.float(), rtol=0, atol=bound, msg=f"{name}, the model"
            )
    if scorer:
        r = as_rollout(batch, 2, found[0], lens, finished, logps, tok)
        again = completion_logps(model, r, temperature=0.9).logps.detach()
        torch.testing.assert_close(again.float(), logps, rtol=0, atol=bound, msg=lambda m: f"{name}, the scorer: {m}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("change", list(CHANGES))
def test_changed_models_are_sampled_as_they_are(change: str, dtype: torch.dtype) -> None:
    model = family("llama").to(dtype)
    CHANGES[change](model)
    agrees(model, change, dtype)


SHAPE: dict[str, Any] = {
    "vocab_size": len(tok), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 1,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "jamba": {
        "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", list(OTHERS))
def test_other_architectures(kind: str, dtype: torch.dtype) -> None:
    """Those without attention, too; RWKV's states get mixed up in a batch of `generate`, so its rows go alone."""
    if (kind, dtype) == ("jamba", torch.float64):
        pytest.skip("transformers' experts have no float64")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SHAPE, **OTHERS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    agrees(model, kind, dtype)


def test_a_model_whose_generate_says_something_else_is_refused() -> None:
    config = transformers.XLMConfig(
        vocab_size=len(tok),
        emb_dim=32,
        n_layers=2,
        n_heads=4,
        causal=True,
        pad_token_id=PAD,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.XLMWithLMHeadModel(config).eval()
    with pytest.raises(ModelError, match="generate doesn't say what XLMWithLMHeadModel says"):
        sample_tokens(model, prompts(3), SamplingConfig(max_new_tokens=4), eos=[EOS], pad=PAD, seed=0)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_positions_that_change_with_the_length(kind: str) -> None:
    """Rows within the limit are right; rows that would cross it are refused."""
    rope: dict[str, Any] = {
        "rope_type": kind,
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    }
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    config = transformers.LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 96}, rope_parameters=rope, initializer_range=0.2
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).double().eval()
    agrees(model, kind, torch.float64)
    batch = PromptBatch.from_lists([[5] * 4, [6] * 20])
    with pytest.raises(
        DataError, match=rf"rotary positions \({kind}\) change when a row grows beyond 24 tokens.*make 28"
    ):
        sample_tokens(model, batch, SamplingConfig(max_new_tokens=8), eos=[EOS], pad=PAD, seed=0)


def test_a_hook_on_a_wrapper_is_refused() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(family("llama"), LoraConfig(r=2, target_modules="all-linear"))
    model.register_forward_hook(lambda module, given, out: out)
    with pytest.raises(ModelError, match="has hooks, which transformers' generate passes by"):
        sample_tokens(model, prompts(2), SamplingConfig(max_new_tokens=4), eos=[EOS], pad=PAD, seed=0)


def test_other_architectures_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.AutoConfig.for_model("mamba", **SHAPE, **OTHERS["mamba"])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    real, calls = type(model).generate, list[int]()
    monkeypatch.setattr(type(model), "generate", lambda self, *a, **k: calls.append(len(a[0])) or real(self, *a, **k))
    counts = []
    for ask in ([[5, 6, 7]], [[5, 6, 7]], [[7, 6, 5]], [[5, 6, 7] * 5], [[6, 6, 7] * 5]):
        before = len(calls)
        draw(model, ask, 3, 0)
        counts.append(len(calls) - before)
    assert counts == [5, 1, 1, 5, 1]  # prompts of twice the length are another question


@pytest.mark.usefixtures("fast")
def test_draw_takes_and_gives_lists_of_ids() -> None:
    model = family("llama")
    given = [[5, 6, 7], [8, 9], [5, 6, 7]]
    ids, logps = draw(model, given, 6, seed=3, temperature=0.7)
    assert ids[0] != ids[2] and all(1 <= len(a) <= 6 and len(a) == len(x) for a, x in zip(ids, logps))
    for prompt, answer, said in zip(given, ids, logps):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        plain = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        torch.testing.assert_close(said, plain.float(), rtol=0, atol=1e-6)
    assert draw(model, given[:1], 6, seed=3, temperature=0.7)[0] == ids[:1]
    assert draw(model, given, 6, seed=3, greedy=True)[0] == draw(model, given, 6, seed=4, greedy=True)[0]
    with pytest.raises(DataError, match="empty"):
        draw(model, [[5], []], 6, seed=3)


def test_bf16_on_a_cpu_samples_what_it_scores() -> None:
    """Packed bf16 products over float32 states: near the scorer's numbers in bf16, not far from float32's, and the same twice."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=384, intermediate_size=512, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    prompts = torch.randint(3, 400, (6, 9)).tolist()

    def drawn() -> tuple[list[list[int]], list[torch.Tensor]]:
        with torch.autocast("cpu", torch.bfloat16):
            return draw(model, prompts, 12, seed=3)

    (ids, said), (again, _) = drawn(), drawn()
    assert [list(x) for x in ids] == [list(x) for x in again]
    rows = [list(map(int, x)) for x in ids]
    with torch.no_grad():
        exact = torch.cat(logps(model, prompts, rows))
        with torch.autocast("cpu", torch.bfloat16):
            scored = torch.cat(logps(model, prompts, rows))
    flat = torch.cat(list(said))
    assert 0 < float((flat - exact).abs().mean()) < 0.02
    assert float((flat - scored).abs().mean()) < 0.01


def test_several_ends_of_an_answer_survive_loading_and_saving(tmp_path: Path) -> None:
    """Qwen and Llama list more than one token that ends an answer: sampling stops at each, and a saved model still lists them."""
    model = toy.build_model(0, "tiny")
    for there, listed, kept in ((tmp_path / "a", [EOS, 7], [EOS, 7]), (tmp_path / "b", [7, 11], [EOS])):
        model.generation_config.eos_token_id = listed
        model.save_pretrained(there)
        tok.save_pretrained(there)
        loaded, tokenizer = load_model(there)
        assert eos_ids(loaded, tokenizer) == kept  # a list without the tokenizer's own belongs to another tokenizer
        loaded.save_pretrained(there / "again")
        again, _ = load_model(there / "again", tokenizer=str(there))
        assert eos_ids(again, tokenizer) == kept
