"""Packed log-probs, values and scores against the plain padded forward pass, for many families and many ways to go wrong."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_nb.core import ConfigError, DataError, ModelError
from rlhf_nb.fast.support import use_fast
from rlhf_nb.scoring import head as head_module
from rlhf_nb.scoring import scores as lp
from rlhf_nb.scoring.head import head_logps, split_head
from rlhf_nb.scoring.scores import completion_logps, completion_values, sequence_scores
from rlhf_nb.scoring.trees import pack, plan_trees
from rlhf_nb.types import Completions

VOCAB = 97
TOLERANCE = dict.fromkeys(
    ("cohere", "cohere2", "ernie4_5", "gemma", "gemma3_text"), 1e-6
)  # these rotate or normalise in fp32, whatever the dtype
CORE = ("llama", "qwen2", "gpt2")
Shape = Sequence[tuple[int, Sequence[int]]]  # (prompt length, completion lengths) of each group
SHAPES: tuple[Shape, ...] = (
    ((3, (4, 5)), (7, (2, 6, 3)), (1, (1,)), (5, (0, 3))),
    ((6, (3,)), (2, (5,)), (4, (1,))),
    ((5, (4, 4)), (5, (4, 4))),
    ((9, (2,) * 8),),
    ((4, (6,)),),
)


class Wide:
    """torch, in which single precision is double: transformers' norms compute in fp32 whatever the dtype, and comparisons to 1e-10 need more."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, "float64" if name == "float32" else name)


WIDENED: dict[str, Any] = {}  # modeling modules in which it stands for torch


def exact_norms(model: nn.Module) -> None:
    """Norms compute in fp64, without a changed forward (which the gate would refuse)."""
    for m in model.modules():
        module = sys.modules[type(m).__module__]
        if module.__name__.startswith("transformers.models."):
            WIDENED[module.__name__] = module
            module.torch = Wide()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def narrow_again() -> Iterator[None]:
    yield
    while WIDENED:
        WIDENED.popitem()[1].torch = torch


@pytest.fixture(params=[True, False], ids=["fast", "plain"])
def fast(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fast paths, and none of them."""
    with use_fast(request.param):
        yield


def build(kind: str, attention: str = "sdpa", dtype: torch.dtype = torch.float64, **over: Any) -> Any:
    """A two-layer model of a family with random weights that are large enough to matter."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers has no {kind}")
    settings: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    if kind == "gpt2":
        settings = dict(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        settings |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if kind == "opt":
        settings |= dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)
        settings.pop("num_key_value_heads")
    if kind in ("gpt_neox", "phi"):
        settings.pop("num_key_value_heads")
    if kind in (
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "qwen3",
        "helium",
        "hunyuan_v1_dense",
        "ernie4_5",
        "seed_oss",
    ):
        settings |= dict(head_dim=8)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(settings | over))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    if dtype == torch.float64:
        exact_norms(model)
    return model


def completions(shape: Shape = SHAPES[0], holes: bool = True) -> Completions:
    g = torch.Generator().manual_seed(1)
    prompts, answers, masks = [], [], []
    for p, lens in shape:
        prompt = torch.randint(3, VOCAB, (p,), generator=g).tolist()
        for n in lens:
            prompts.append(prompt)
            answers.append(torch.randint(3, VOCAB, (n,), generator=g).tolist())
            masks.append([int(not holes or j % 3 != 1) for j in range(n)])
    return Completions.from_lists(prompts, answers, masks=masks)


def padded_hidden(model: Any, c: Completions) -> Tensor:
    """[B, P+C, H]: every sequence its own row, the plain way."""
    ids, mask = torch.cat([c.prompt_ids, c.completion_ids], 1), torch.cat([c.prompt_mask, c.real], 1)
    position = (mask.long().cumsum(1) - 1).clamp_min(0)
    return model(
        input_ids=ids, attention_mask=mask.long(), position_ids=position, use_cache=False, output_hidden_states=True
    ).hidden_states[-1]


def padded_logps(model: Any, c: Completions, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """log-probs and entropies from the model's own logits, the plain way."""
    ids, mask = torch.cat([c.prompt_ids, c.completion_ids], 1), torch.cat([c.prompt_mask, c.real], 1)
    position = (mask.long().cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=position, use_cache=False).logits
    table = torch.log_softmax(logits[:, c.prompt_ids.shape[1] - 1 : -1] / temperature, -1)
    logps = table.gather(-1, c.completion_ids[..., None])[..., 0]
    return torch.where(c.completion_mask, logps, 0), torch.where(c.completion_mask, -(table.exp() * table).sum(-1), 0)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(model: Any, c: Completions, tol: float = 1e-10, **how: Any) -> None:
    """Log-probs, entropies and every parameter's gradient agree with the padded forward pass."""
    want, want_entropy = padded_logps(model, c, 0.7)
    g = torch.Generator().manual_seed(3)
    w, v = (torch.randn(want.shape, generator=g, dtype=want.dtype) for _ in range(2))
    base = gradients(model, (want * w + want_entropy * v).sum())
    got = completion_logps(model, c, temperature=0.7, entropy=True, **how)
    assert got.entropy is not None
    torch.testing.assert_close(got.logps, want, rtol=0, atol=tol)
    torch.testing.assert_close(got.entropy, want_entropy, rtol=0, atol=tol)
    mine = gradients(model, (got.logps * w + got.entropy * v).sum())
    assert mine.keys() == base.keys()
    for name in base:
        torch.testing.assert_close(
            mine[name],
            base[name],
            rtol=0,
            atol=tol * max(1.0, float(base[name].abs().max())),
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("kind", CORE)
@pytest.mark.parametrize("share", [False, True, "always"])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_exact_in_float64(kind: str, share: Any, shape: int) -> None:
    same(build(kind), completions(SHAPES[shape]), share_prompts=share)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("kind", CORE)
@pytest.mark.parametrize("budget", [1, 16, 40])
def test_exact_over_several_forwards(kind: str, budget: int) -> None:
    same(build(kind), completions(), share_prompts="always", token_budget=budget)


@pytest.mark.fast_path
@pytest.mark.parametrize("kind", CORE)
@pytest.mark.parametrize("along", [False, True])
def test_exact_along_branches_and_with_masks(kind: str, along: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention a branch at a time, whatever it would cost, and never."""
    asked: list[list[list[int]]] = []
    monkeypatch.setattr(lp, "branches_pay", lambda branches, width: asked.append(branches) or along)
    for shape in SHAPES:
        same(build(kind), completions(shape), share_prompts="always")
    assert any(len(row) > 2 for branches in asked for row in branches)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(lp.TREE_FAMILIES - {"gemma2"}))
def test_every_family_with_trees(kind: str) -> None:
    same(build(kind), completions(), share_prompts="always", tol=TOLERANCE.get(kind, 1e-10))


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere", "hyperclovax"])
def test_logits_that_are_scaled_or_capped(kind: str) -> None:
    over: dict[str, Any] = {
        "granite": dict(logits_scaling=3.0),
        "hyperclovax": dict(logits_scaling=0.5),
        "cohere": dict(logit_scale=0.25),
    }.get(kind, {})
    if kind == "gemma2":  # no sdpa in this family; eager attention can't be exact in float64
        same(build(kind, "eager", torch.float32, final_logit_softcapping=2.0), completions(SHAPES[1]), tol=2e-5)
    else:
        same(build(kind, **over), completions(), tol=TOLERANCE.get(kind, 1e-10))


@pytest.mark.parametrize("kind", [*CORE, "gemma2"])
@pytest.mark.parametrize("share", [False, "always"])
def test_eager_attention(kind: str, share: Any) -> None:
    same(build(kind, "eager", torch.float32), completions(), tol=2e-5, share_prompts=share)


@pytest.mark.usefixtures("fast")
def test_sliding_window() -> None:
    c = completions()
    for kind, over in (
        ("mistral", dict(sliding_window=6)),
        ("qwen2", dict(use_sliding_window=True, sliding_window=6, max_window_layers=0)),
    ):
        model = build(kind, **over)
        same(model, c)  # plain rows keep the model's own window
        with pytest.raises(ModelError, match="sliding window of 6"):
            completion_logps(model, c, share_prompts="always")
    same(build("mistral", sliding_window=20), c, share_prompts="always")  # reaches over the longest sequence


def test_families_without_tree_masks_use_plain_rows() -> None:
    model = build("bloom", "eager", torch.float32, n_head=4, n_layer=2, hidden_dropout=0.0, attention_dropout=0.0)
    c = completions(SHAPES[0], holes=False)
    got = completion_logps(model, c).logps
    for i in range(len(c)):  # padding on the left shifts this family's fp32 rounding: one row at a time instead
        torch.testing.assert_close(
            got[i : i + 1, : int(c.completion_lens[i])], padded_logps(model, c[i].trim())[0], rtol=0, atol=1e-5
        )
    with pytest.raises(ModelError, match="bloom"):
        completion_logps(model, c, share_prompts="always")
    other = build("llama")
    other.config._attn_implementation = "some_kernel"
    assert "some_kernel" in str(lp.why_no_trees(other.model, 10))


class Adapted:
    """Makes LoRA models whose adapters are not zero."""

    @staticmethod
    def lora(kind: str, targets: list[str], **more: Any) -> Any:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            build(kind), LoraConfig(r=2, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **more)
        )
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "lora_" in n:
                    p.normal_(0, 0.2)
        return model.double().eval()


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_lora(targets: list[str]) -> None:
    model = Adapted.lora("llama", targets)
    c = completions()
    same(model, c, share_prompts="always")
    with model.disable_adapter():
        without = completion_logps(model, c).logps
    assert (without - completion_logps(model, c).logps).abs().max() > 0.1
    torch.testing.assert_close(without, padded_logps(build("llama"), c)[0], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("fast")
def test_head_trained_beside_lora() -> None:
    same(Adapted.lora("llama", ["q_proj"], modules_to_save=["lm_head"]), completions(), share_prompts="always")


def test_virtual_tokens_are_refused() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(build("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ModelError, match="virtual tokens"):
        completion_logps(model, completions())


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("share", [False, "always"])
@pytest.mark.parametrize("budget", [18, 4096])
def test_values_and_scores(share: Any, budget: int) -> None:
    model, c = build("qwen2"), completions(SHAPES[0], holes=False)
    torch.manual_seed(5)
    head = nn.Sequential(nn.Linear(32, 7), nn.GELU(), nn.Linear(7, 1)).double()
    decoder, p = split_head(model)[0], c.prompt_ids.shape[1]
    h = padded_hidden(model, c)
    values = torch.where(c.real, head(h[:, p - 1 : -1])[..., 0], 0)
    how: dict[str, Any] = dict(token_budget=budget, share_prompts=share)
    torch.testing.assert_close(completion_values(decoder, head, c, **how), values, rtol=0, atol=1e-10)
    torch.testing.assert_close(completion_logps(model, c, value_head=head, **how).values, values, rtol=0, atol=1e-10)
    last = head(h[torch.arange(len(c)), p + c.completion_lens - 1])[:, 0]
    torch.testing.assert_close(sequence_scores(decoder, head, c, **how), last, rtol=0, atol=1e-10)
    real = torch.cat([c.prompt_mask, c.real], 1)[..., None]
    mean = head(torch.where(real, h, 0).sum(1) / real.sum(1))[:, 0]
    got = sequence_scores(decoder, head, c, pooling="mean", **how)
    torch.testing.assert_close(got, mean, rtol=0, atol=1e-10)
    base, mine = gradients(model, mean.sin().sum()), gradients(model, got.sin().sum())
    for name in base:
        torch.testing.assert_close(mine[name], base[name], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("fast")
def test_all_tokens_or_those_that_count() -> None:
    model, c = build("llama"), completions()
    some, every = (completion_logps(model, c, targets=t).logps for t in ("mask", "all"))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.where(c.completion_mask, every, 0), some, rtol=0, atol=1e-12)
    assert bool((every[c.real] < 0).all()) and not every[~c.real].any()


def random_head(n: int = 7, v: int = 11, bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    g = torch.Generator().manual_seed(0)
    h, w, b = (torch.randn(*s, generator=g, dtype=torch.float64, requires_grad=True) for s in ((n, 5), (v, 5), (v,)))
    return h, w, b if bias else None, torch.randint(0, v, (n,), generator=g)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize(
    "how", [{}, dict(temperature=0.6), dict(scale=0.3, temperature=1.7), dict(softcap=1.5, scale=0.8, temperature=0.9)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_the_head(chunk: int | None, how: dict[str, float], bias: bool) -> None:
    h, w, b, t = random_head(bias=bias)
    z = h @ w.T + (b if b is not None else 0)
    cap, scale = how.get("softcap"), how.get("scale", 1.0)
    z = (z * scale if cap is None else cap * torch.tanh(z * scale / cap)) / how.get("temperature", 1.0)
    table = torch.log_softmax(z, -1)
    got, entropy = head_logps(h, w, b, t, entropy=True, chunk=chunk, **how)  # type: ignore[arg-type]
    torch.testing.assert_close(got, table.gather(1, t[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1))
    leaves = [x for x in (h, w, b) if x is not None]
    f: Callable[..., Any] = lambda *x: head_logps(
        x[0], x[1], x[2] if bias else None, t, entropy=True, chunk=chunk, **how
    )  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(f, leaves)
    only = lambda *x: head_logps(x[0], x[1], x[2] if bias else None, t, chunk=chunk, **how)[0]  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(only, leaves)


def test_frozen_parts_get_no_gradient() -> None:
    h, w, b, t = random_head()
    head_logps(h, w.detach(), None, t)[0].sum().backward()
    assert h.grad is not None and w.grad is None
    got, _ = head_logps(h.detach(), w.detach(), None, t)
    assert not got.requires_grad
    got, entropy = head_logps(h[:0], w, b, t[:0], entropy=True)
    assert got.shape == (0,) and entropy is not None
    (got.sum() + entropy.sum()).backward()
    assert w.grad is not None and not w.grad.any()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


def test_large_logits_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "KEEP_LOGITS", 1000)
    monkeypatch.setattr(head_module, "CHUNK_LOGITS", {"cpu": 4000})
    monkeypatch.setattr(head_module, "CHUNK_ROWS", 4)
    n, v, width = 600, 500, 8
    h, w = torch.randn(n, width, requires_grad=True), torch.randn(v, width, requires_grad=True)
    t = torch.randint(0, v, (n,))
    with Largest() as seen:
        got, entropy = head_logps(h, w, None, t, entropy=True)
        assert entropy is not None
        (got.sum() + entropy.sum()).backward()
    assert seen.numel <= max(16 * v, n * width) < n * v / 10
    grads = h.grad.clone(), w.grad.clone()  # type: ignore[union-attr]
    h.grad = w.grad = None
    table = torch.log_softmax(h @ w.T, -1)
    (table.gather(1, t[:, None]).sum() - (table.exp() * table).sum()).backward()
    torch.testing.assert_close((h.grad, w.grad), grads, rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [None, 5])
def test_autocast_normalises_in_fp32(chunk: int | None) -> None:
    h, w = torch.randn(12, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    t = torch.randint(0, 50, (12,))
    with torch.autocast("cpu", torch.bfloat16):
        got, entropy = head_logps(h, w, None, t, entropy=True, chunk=chunk)
    assert got.dtype == torch.float32 and entropy is not None and entropy.dtype == torch.float32
    logits = (h.bfloat16() @ w.bfloat16().T).float()  # what the head gives under autocast; everything after in fp32
    torch.testing.assert_close(got, torch.log_softmax(logits, -1).gather(1, t[:, None])[:, 0], rtol=0, atol=1e-5)
    (got.sum() + entropy.sum()).backward()
    assert h.grad is not None and w.grad is not None and h.grad.dtype == w.grad.dtype == torch.float32
    mine = h.grad.clone()
    h.grad = None
    table = torch.log_softmax(h @ w.T, -1)
    (table.gather(1, t[:, None]).sum() - (table.exp() * table).sum()).backward()
    torch.testing.assert_close(mine, h.grad, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("share", [False, "always"])
def test_whole_models_in_low_precision(share: Any) -> None:
    c, model = completions(), build("llama", dtype=torch.float32)
    want = completion_logps(model, c).logps
    with torch.autocast("cpu", torch.bfloat16):
        got = completion_logps(model, c, share_prompts=share).logps
    assert got.dtype == torch.float32 and (got - want).abs().max() < 0.15
    half = completion_logps(model.to(torch.bfloat16), c, share_prompts=share).logps
    assert half.dtype == torch.float32 and (half - want).abs().max() < 0.2


def test_pad_embedding_never_matters() -> None:
    model, c = build("llama"), completions()
    want = completion_logps(model, c).logps
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = float("nan")  # the pad id
    for share in (False, "always"):
        assert torch.equal(
            completion_logps(model, c, share_prompts=share).logps.isnan(), torch.zeros_like(want, dtype=torch.bool)
        )  # type: ignore[arg-type]
    assert padded_logps(model, c)[0].isnan().any()


def test_no_warning_about_padding(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        completion_logps(build("gpt2"), completions())
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_order_and_splitting_change_nothing() -> None:
    model, c = build("qwen2"), completions()
    want = completion_logps(model, c).logps
    order = torch.randperm(len(c), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(completion_logps(model, c[order]).logps, want[order], rtol=0, atol=1e-12)
    parts = torch.cat([completion_logps(model, c[i]).logps for i in range(len(c))])
    torch.testing.assert_close(parts, want, rtol=0, atol=1e-12)
    once = sum(completion_logps(model, c[rows], token_budget=1 << 30).logps.sum() for rows in plan_trees(c, 20, unit=1))
    torch.testing.assert_close(once, want.sum(), rtol=0, atol=1e-10)


def random_batch(g: random.Random) -> Completions:
    prompts, answers = [], []
    for _ in range(g.randint(1, 9)):
        prompt = [g.randrange(3, VOCAB) for _ in range(g.randint(1, 30))]
        for _ in range(2 * g.randint(1, 4)):
            prompts.append(prompt)
            answers.append([g.randrange(3, VOCAB) for _ in range(g.randint(0, 30))])
    return Completions.from_lists(prompts, answers)


@pytest.mark.parametrize("seed", range(20))
def test_plan_covers_everything_within_its_budget(seed: int) -> None:
    g = random.Random(seed)
    c, kept = random_batch(g), 0.0
    for share in (False, True, "always"):
        for unit in (1, 2):
            budget, most = g.choice([1, 64, 200, 1000, 10**6]), g.choice([None, 4, 16])
            entries = plan_trees(c, budget, most, unit, share_prompts=share, width=64)  # type: ignore[arg-type]
            assert sorted(i for rows in entries for i in rows) == list(range(len(c)))
            for rows in entries:
                assert all(
                    rows[i : i + unit] == list(range(rows[i], rows[i] + unit)) and rows[i] % unit == 0
                    for i in range(0, len(rows), unit)
                )
                cells = pack(c[rows], share, "all", width=64, limit=budget).input_ids.numel()  # type: ignore[arg-type]
                few = len(rows) <= unit or len(set(map(tuple, c[rows].prompt_ids.tolist()))) == 1
                assert cells <= budget or few
                assert most is None or len(rows) <= most or len(rows) <= unit or few
            again = [plan_trees(c[rows], budget, None, unit, share_prompts=share, width=64) for rows in entries]  # type: ignore[arg-type]
            assert share or all(len(x) == 1 for x in again)  # what was planned as one forward pass stays one
            kept += sum(len(x) == 1 for x in again) / len(again)
    assert len(plan_trees(c, 10**9, share_prompts="always")) == 1
    assert kept / 6 > 0.9  # with trees, too, but for groups that were cut


def test_pack_reads_back_what_went_in() -> None:
    for seed in range(10):
        c = random_batch(random.Random(seed))
        for share in (False, "always"):
            p = pack(c, share, "all")  # type: ignore[arg-type]
            flat = p.input_ids.flatten()
            assert torch.equal(p.targets, c.completion_ids[p.rows, p.cols]) and torch.equal(
                flat[p.places[p.rows, p.cols]], p.targets
            )
            before = torch.where(
                p.cols > 0, c.completion_ids[p.rows, (p.cols - 1).clamp_min(0)], c.prompt_ids[p.rows, -1]
            )
            assert torch.equal(flat[p.source], before)
            assert torch.equal(p.position_ids.flatten()[p.source], c.prompt_lens[p.rows] + p.cols - 1)
            assert torch.equal(p.position_ids.flatten()[p.last], c.prompt_lens + c.completion_lens - 1)
            if p.attention_mask is not None:  # each token sees exactly as many others as its position says
                assert torch.equal(p.attention_mask[:, 0].sum(-1)[p.token_mask], p.position_ids[p.token_mask] + 1)
            assert int(p.token_mask.sum()) == int(c.completion_lens.sum()) + (p.branch == 0).sum()


def test_trees_only_where_they_pay() -> None:
    long_answers, long_prompt = completions([(4, (40, 40, 40, 40))]), completions([(40, (4, 4, 4, 4))])
    assert len(pack(long_prompt, width=64).input_ids) == 1
    assert len(pack(long_answers, width=8).input_ids) == 4
    assert len(pack(long_answers, "always").input_ids) == 1
    assert pack(long_answers, width=8).attention_mask is None


@pytest.mark.parametrize("bad, kind, word", [
    (lambda m, c: completion_logps(m, c, temperature=0.0), ConfigError, "above 0"),
    (lambda m, c: completion_logps(m, c[:0]), DataError, "no rows"),
    (lambda m, c: completion_logps(m, Completions.from_lists([[5]], [[VOCAB + 3]])), DataError, f"{VOCAB} tokens"),
    (lambda m, c: completion_logps(m, Completions.from_lists([[5] * 60], [[6] * 9])), DataError, "64 positions"),
    (lambda m, c: completion_logps(m.transformer, c), ModelError, "AutoModelForCausalLM"),
    (lambda m, c: completion_values(m, nn.Linear(32, 1).double(), c), ModelError, "split_head"),
    (lambda m, c: sequence_scores(m.transformer, nn.Linear(32, 1).double(), c, pooling="max"), ConfigError, "'mean' or 'both'"),
    (lambda m, c: sequence_scores(m.transformer, nn.Linear(32, 1).double(), c[:0]), DataError, "no rows"),
    (lambda m, c: completion_values(m.transformer, nn.Linear(32, 1).double(), c[:0]), DataError, "no rows"),
    (lambda m, c: plan_trees(c, 100, unit=3), DataError, "units of 3"),
    (lambda m, c: plan_trees(c, 0), ConfigError, "token_budget"),
])  # fmt: skip
def test_bad_input(bad: Callable[[Any, Completions], Any], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        bad(build("gpt2"), completions())


def test_unknown_treatment_of_logits_is_refused() -> None:
    model = build("llama")
    model.config.logit_scale = 2.0
    with pytest.raises(ModelError, match="logit_scale=2.0"):
        completion_logps(model, completions())


def test_empty_answers_and_missing_columns() -> None:
    model = build("llama")
    c = Completions.from_lists([[5, 6], [7]], [[], []])
    assert completion_logps(model, c).logps.shape == (2, 0)
    decoder, head = split_head(model)[0], nn.Linear(32, 1).double()
    for share in (False, "always"):
        same_prompt = Completions.from_lists([[5, 6], [5, 6]], [[], [9]])
        got = sequence_scores(decoder, head, same_prompt, share_prompts=share)  # type: ignore[arg-type]
        want = sequence_scores(decoder, head, Completions.from_lists([[5], [5]], [[6], [6, 9]]), share_prompts=False)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
