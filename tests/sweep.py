"""Every causal language model that transformers knows, tiny: what scorer and sampler say against `model(...)`.

`python tests/sweep.py --write` makes `docs/families.md`.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import itertools
import logging
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import test_gate as gate
import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rlhf_nb.core import ConfigError, DataError, ModelError
from rlhf_nb.fast.support import use_fast
from rlhf_nb.rollout.sampler import draw
from rlhf_nb.scoring.scores import completion_logps
from rlhf_nb.types import Completions

VOCAB = 60
RIGHT, NARROW = 1e-6, 1e-4  # nats, in float64, and where a model computes a part in float32 whatever its weights are
MOST = 3_000_000  # parameters of a model that is still tiny
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIZES: dict[str, Any] = SHAPE | {
    "head_dim": 8, "d_model": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "ffn_dim": 48,
    "shared_expert_intermediate_size": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "word_embed_proj_dim": 32, "embedding_size": 32, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "time_step_rank": 4,
    "attention_hidden_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "moe_num_experts": 4,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "dim_model": 32, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "d_inner": 48, "d_head": 8, "dim_head": 8, "dim_ff": 48,
    "num_layers": 2, "num_heads": 4, "n_inner": 48, "lru_width": 32, "rotary_dim": 4, "dff": 48, "n_ctx": 128,
    "lightning_head_dim": 8, "num_shared_experts": 1, "n_shared_experts": 1, "index_n_heads": 2, "index_head_dim": 8,
    "index_topk": 128, "global_head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1,
    "mamba_n_groups": 1, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 48, "num_mem_heads": 2, "attention_head_dim": 8,
    "kv_channels": 8, "max_target_positions": 128, "max_source_positions": 128, "tie_encoder_decoder": False, "dropout": 0.0,
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "xlstm": {"num_heads": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "ernie4_5_moe": {"moe_k": 2},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "kimi_linear": {"num_key_value_heads": 4, "num_experts_per_token": 2},
    "zaya": {"num_experts_per_tok": 1},
    **dict.fromkeys(
        (
            "axk1",
            "axk2",
            "bailing_hybrid",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "longcat_flash",
            "minicpm3",
            "youtu",
        ),
        {"num_key_value_heads": 4},
    ),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": None,
        "laurel_rank": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "reformer": {
        "axial_pos_embds": False,
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 16,
    },
}
PRODUCT = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
ROPES: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 16},
}  # fmt: skip
COLUMNS = ("rows", "trees where they pay", "trees always", "LoRA", "greedy", "sampled")


class Verdict(NamedTuple):
    """What came of one comparison."""

    word: str  # right, refused, wrong, crash, or "no" where there is nothing to compare
    why: str = ""
    gap: float = 0.0


class Unbuildable(Exception):
    """A model that can't be built tiny, or whose own forward pass fails."""


def small(config: Any, kind: str) -> Any:
    """The config with small sizes wherever it names a size, in configs within it too."""
    own = type(config)
    names = SIZES.keys() & config.to_dict().keys()
    settings = {name: SIZES[name] for name in names} | SPECIAL.get(kind, {})
    drop = [name for name in settings if getattr(config, name, 0) is None and name not in ("pad_token_id", "bos_token_id", "eos_token_id", "num_key_value_heads", "head_dim", "n_inner")]  # fmt: skip
    inner = {
        name: small(value, kind).to_dict()
        for name in ("text_config", "decoder")
        if hasattr(value := getattr(config, name, None), "to_dict")
    }
    settings = {name: value for name, value in settings.items() if name not in drop} | inner
    if "is_decoder" in vars(config) or hasattr(config, "is_decoder"):
        settings["is_decoder"] = True
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith(("_pdrop", "jitter_noise"))):
            settings[name] = 0.0
        if (
            name in ("layer_types", "layers_block_type", "mlp_layer_types")
            and isinstance(value, list)
            and name not in settings
        ):
            kinds = list(dict.fromkeys(value))
            settings[name] = (kinds * 2)[:2]
    try:
        return own(**settings)
    except Exception:
        settings.pop("head_dim", None)
        return own(**settings)


def tiny(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A two-layer model of a family with random weights that are large enough to matter."""
    if kind in PRODUCT:
        return gate.build(kind, max_position_embeddings=128)
    try:
        config = small(transformers.AutoConfig.for_model(kind), kind)
        config.pad_token_id = 0
        with torch.device("meta"):
            size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
        if size > MOST:
            raise Unbuildable(f"it has {size / 1e6:.0f} million parameters even when its configuration is small")
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    except Unbuildable:
        raise
    except Exception as e:
        raise Unbuildable(f"not built from a small configuration: {short(e)}") from e
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def short(e: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(e).split())
    return f"{type(e).__name__}: {text[:120]}"


def compared(go: Callable[[], tuple[Tensor, Tensor]], bound: float) -> Verdict:
    """The verdict on log-probs and on what they should be."""
    try:
        got, want = go()
    except (ConfigError, ModelError, DataError) as e:
        return (
            Verdict("refused", " ".join(str(e).split())) if len(str(e)) > 40 else Verdict("crash", f"no sentence: {e}")
        )
    except Exception as e:
        return Verdict("crash", short(e))
    gap = float((got.double() - want.double()).abs().max()) if got.numel() else 0.0
    return Verdict("right" if gap <= bound else "wrong", f"{gap:.1g} nats" if gap > bound else "", gap)


def scored(model: Any, c: Completions, want: Tensor, bound: float, share: Any) -> Verdict:
    """The scorer on rows, or with shared prompts."""
    with torch.no_grad():
        return compared(lambda: (completion_logps(model, c, share_prompts=share).logps, want), bound)


PROMPTS = [[5, 9, 11, 4], [7, 3, 20, 31, 8, 6, 12], [5, 9, 11, 4]]


def drawn(model: Any, bound: float, greedy: bool) -> Verdict:
    """The sampler's log-probs of its own tokens, against each row alone."""

    @torch.no_grad()
    def go() -> tuple[Tensor, Tensor]:
        answers, logps = draw(model, PROMPTS, 6, 0, greedy=greedy)
        c = Completions.from_lists(PROMPTS, answers)
        want = gate.plain(model, c)
        return torch.cat(logps), torch.cat([row[: len(x)] for row, x in zip(want, answers, strict=True)])

    return compared(go, max(bound, 2e-6))  # the sampler says its log-probs in float32


def adapted(model: Any) -> Any:
    """A copy with LoRA on its linear layers, whose second factor is not zero."""
    from peft import LoraConfig, get_peft_model

    how = LoraConfig(r=2, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(model), how)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.normal_(0, 0.2)
    return model.double().eval() if next(model.parameters()).dtype == torch.float64 else model.eval()


def noise(model: Any, c: Completions) -> float:
    """How much a model's log-probs change when a row is computed twice in one batch: what it can be held to."""
    row = torch.cat([c.prompt_ids[0][c.prompt_mask[0]], c.completion_ids[0]])[None]
    alone, both = (model(row.expand(n, -1).contiguous()).logits[0].double().log_softmax(-1) for n in (1, 2))
    return float((alone - both).abs().max())


class Case(NamedTuple):
    """A row of the table: a model and what was found."""

    kind: str
    seconds: float
    found: dict[str, Verdict]
    note: str = ""


def family(kind: str) -> Case:
    """All comparisons for one family."""
    start, c = time.perf_counter(), gate.rows()
    model: Any = None
    want = torch.zeros(0)
    note = ""
    for dtype in (torch.float64, torch.float32):
        try:
            model = tiny(kind, dtype)
            with torch.no_grad():
                want = gate.plain(model, c)
            break
        except Unbuildable as e:
            return Case(kind, time.perf_counter() - start, {}, str(e))
        except Exception as e:
            note = f"its own forward pass fails: {short(e)}"
            model = None
    if model is None:
        return Case(kind, time.perf_counter() - start, {}, note)
    if not want.isfinite().all():
        return Case(kind, time.perf_counter() - start, {}, "its own log-probs are not finite")
    wide = dtype == torch.float64
    with torch.no_grad():
        wobble = noise(model, c)
    bound = RIGHT if wide and 10 * wobble < RIGHT and not narrow(model) else NARROW
    found = {
        name: scored(model, c, want, bound, share)
        for name, share in zip(COLUMNS, (False, True, "always"), strict=False)
    }
    try:
        other = adapted(model)
        with torch.no_grad():
            target = gate.plain(other, c)
    except Exception as e:
        found["LoRA"] = Verdict("no", short(e))
    else:
        found["LoRA"] = scored(other, c, target, bound, True)
        greedy = drawn(other, bound, True)
        if greedy.word in ("wrong", "crash"):
            found["LoRA"] = greedy
    found |= {"greedy": drawn(model, bound, True), "sampled": drawn(model, bound, False)}
    return Case(
        kind,
        time.perf_counter() - start,
        found,
        "" if bound == RIGHT else f"to {NARROW:g}: a part is computed in float32",
    )


def narrow(model: Any) -> bool:
    """Whether a part of a float64 model is computed in float32: a change of 1e-9 in the embedding is then lost or made larger."""
    source = inspect.getsource(inspect.getmodule(type(model)))  # type: ignore[arg-type]
    return any(word in source for word in ("torch.float32", ".float()", "torch.float)"))


def known(kind: str) -> Iterator[tuple[str, Verdict]]:
    """The full product for a family that the fast path knows."""
    ropes = ROPES if kind != "gpt2" else {"default": None}
    windows = (None, 6) if kind in ("mistral", "qwen2", "qwen3") else (None,)
    for rope, window, tied, lora in itertools.product(ropes, windows, (True, False), (False, True)):
        over: dict[str, Any] = {"tie_word_embeddings": tied, "max_position_embeddings": 64}
        if kind == "gpt2":
            over |= {"num_key_value_heads": None, "intermediate_size": None}
        if kind == "qwen3":
            over["head_dim"] = 8
        if window:
            over["sliding_window"] = window
            over |= {"use_sliding_window": True, "max_window_layers": 0} if kind != "mistral" else {}
        if rope != "default":
            over["rope_parameters"] = {**(ROPES[rope] or {}), "rope_theta": 1e4}
            if rope == "dynamic":
                over["max_position_embeddings"] = 16
        model = gate.build(kind, **over)
        model = adapted(model) if lora else model
        name = f"{kind}, {rope} positions, {'window of 6' if window else 'no window'}, {'tied' if tied else 'untied'}{', LoRA' if lora else ''}"
        yield from every_way(name, model, gate.rows())
        if rope in ("dynamic", "longrope"):
            yield from every_way(name + ", rows beyond the limit", model, gate.rows((9, (3, 12)), (4, (2, 20))))


def every_way(name: str, model: Any, c: Completions) -> Iterator[tuple[str, Verdict]]:
    """Scorer and sampler, fast and not, with trees and without."""
    with torch.no_grad():
        want = gate.plain(model, c)
    for fast in (True, False):
        with use_fast(fast):
            how = f"{name}, fast {'on' if fast else 'off'}"
            for share in (False, True, "always"):
                yield f"{how}: share_prompts={share}", scored(model, c, want, RIGHT, share)
            for greedy in (True, False):
                yield f"{how}: {'greedy' if greedy else 'sampled'}", drawn(model, 5e-6, greedy)


def patched() -> Iterator[tuple[str, Verdict]]:
    """The changed models of test_gate."""
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    real = mlp.forward
    for name, change in gate.CHANGES.items():
        try:
            model = gate.build()
            change(model)
            yield from every_way(f"llama, {name}", model, gate.rows())
        finally:
            mlp.forward = real


def table(cases: Iterable[Case], product: dict[str, Counter[str]]) -> str:
    """docs/families.md."""
    cases = list(cases)
    ran = [x for x in cases if x.found]
    totals = Counter(v.word for x in ran for v in x.found.values())
    lines = [
        "# Which models are computed right\n",
        f"Made by `python tests/sweep.py --write` with transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]}. "
        "Each class of transformers' causal-LM mapping is built tiny with random weights; scorer and sampler are compared with `model(...)` on "
        "each row alone, without padding and without a cache.\n",
        f"- *right*: log-probs agree within {RIGHT:g} nats in float64 ({NARROW:g} where the model computes a part in float32, marked †; "
        "the sampler says its log-probs in float32, so 2e-6 for it).",
        "- *refused*: an error says in a sentence why not; the sentences are listed below.",
        "- *–*: PEFT finds nothing to adapt, or the adapted model itself doesn't run.\n",
        f"{len(ran)} of {len(cases)} could be built and run. Comparisons: "
        + ", ".join(f"{totals[w]} {w}" for w in ("right", "refused", "wrong", "crash"))
        + ".\n",
        "## Every class\n",
        "| model type | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    reasons: dict[str, int] = {}
    for x in ran:
        cells = []
        for name in COLUMNS:
            v = x.found[name]
            at = f" [{reasons.setdefault(v.why, len(reasons) + 1)}]" if v.word in ("refused", "wrong", "crash") else ""
            cells.append("–" if v.word == "no" else v.word + at)
        lines.append(f"| {x.kind}{'†' if x.note else ''} | " + " | ".join(cells) + " |")
    lines += ["\nReasons:\n", *(f"{i}. {cell(why)}" for why, i in reasons.items())]
    lines += [
        "\n## Known families: rotary positions × window × tied × LoRA × trees × sampler × fast on and off, and the changed models\n"
    ]
    lines += ["| models | right | refused | wrong | crash |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | " + " | ".join(str(n[w]) for w in ("right", "refused", "wrong", "crash")) + " |"
        for name, n in product.items()
    ]
    lines += ["\n## Not run\n", "| model type | why |", "|---|---|"]
    lines += [f"| {x.kind} | {cell(x.note)} |" for x in cases if not x.found]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Text that stays in its cell."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> int:
    """Run all; exit code 1 if something was wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/families.md")
    parser.add_argument("--only", nargs="*", help="these model types")
    parser.add_argument("--product", action="store_true", help="only the known families and the changed models")
    args = parser.parse_args()
    quiet()
    start, bad = time.perf_counter(), 0
    cases = []
    for kind in [] if args.product else args.only or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        case = family(kind)
        cases.append(case)
        words = " ".join(v.word for v in case.found.values())
        print(f"{kind:26s} {case.seconds:5.1f}s {words or case.note}", flush=True)
        for name, v in case.found.items():
            if v.word in ("wrong", "crash"):
                bad += 1
                print(f"    {name}: {v.word}: {v.why}", flush=True)
    product: dict[str, Counter[str]] = {}
    if not args.only:
        for kind in (*PRODUCT, "changed models"):
            for name, v in patched() if kind == "changed models" else known(kind):
                product.setdefault(kind, Counter())[v.word] += 1
                if v.word in ("wrong", "crash"):
                    bad += 1
                    print(f"    {name}: {v.word}: {v.why}", flush=True)
            print(kind, dict(product[kind]), f"{time.perf_counter() - start:.0f}s", flush=True)
    if args.write:
        path = Path(__file__).parent.parent / "docs" / "families.md"
        path.write_text(table(cases, product), encoding="utf-8")
    print(f"{bad} wrong or crashed, {time.perf_counter() - start:.0f}s")
    return int(bad > 0)


def quiet() -> None:
    """One thread, no warnings about models that are not trained."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("rlhf_nb").setLevel(logging.ERROR)


if __name__ == "__main__":
    raise SystemExit(main())
