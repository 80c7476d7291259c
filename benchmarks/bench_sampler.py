"""Sampling: completions per second against transformers' `generate` (dynamic cache), toy model, one process.

    python benchmarks/bench_sampler.py [--quick] [--size small] [--prompts 64 256] [--new-tokens 48] [--repeats 9] [--threads 2] [--extras]

Same model, prompts (left-padded questions of the toy world), dtype, threads and lengths; the two take turns call by call, so
both meet the same load of the machine. Ours returns ids, lengths and the log-prob of every token; `generate` returns ids. What is
checked before anything is timed: greedy, both write the same tokens. Cases:

- fixed: no EOS, every row has all new tokens;
- varying: a bias on EOS makes answers as long as a toy policy's (mean about 15 of 48), both stop at EOS.

`--extras` also times: a quarter as many slots as rows, in chunks and with waiting rows entering (and how full the slots are); moving rows when some
finish (against selecting the survivors); bf16; and decoded texts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

from rlhf_nb.config import SamplingConfig
from rlhf_nb.data.toy import build_model, build_tokenizer, test_prompts
from rlhf_nb.rollout.sampler import sample, sample_tokens
from rlhf_nb.types import PromptBatch


class Case(NamedTuple):
    """One line of the table."""

    name: str
    greedy: bool
    varying: bool


CASES = [
    Case("greedy, fixed", True, False),
    Case("sampled, fixed", False, False),
    Case("sampled, varying", False, True),
]


def make_model(size: str) -> Any:
    """An untrained toy model whose head has a bias, for EOS."""
    model = build_model(seed=0, size=size).eval()
    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
    model.lm_head = head
    return model


def let_it_end(
    model: Any, prompts: PromptBatch, settings: SamplingConfig, eos: int, pad: int, mean_length: float
) -> None:
    """Raise EOS until answers are about `mean_length` tokens long."""
    for round_ in range(8):
        lengths = sample_tokens(model, prompts, settings, eos=[eos], pad=pad, seed=round_)[2].float()
        with torch.no_grad():
            model.lm_head.bias[eos] += math.log(lengths.mean() / mean_length)


def make_prompts(n: int, tokenizer: Any) -> PromptBatch:
    """n different questions."""
    texts = list(dict.fromkeys(r["prompt"] for r in test_prompts(8 * n, seed=0)))
    return PromptBatch.from_lists([tokenizer(t)["input_ids"] for t in (texts * n)[:n]], prompts=(texts * n)[:n])


def alternate(calls: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each call, taken in turns after one warm-up each."""
    times: list[list[float]] = [[] for _ in calls]
    for k in range(repeats + 1):
        for j, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            if k:
                times[j].append(time.perf_counter() - begin)
    return times


def spread(x: list[float]) -> tuple[float, float]:
    """Lower and upper quartile."""
    q = statistics.quantiles(x, n=4) if len(x) > 1 else [x[0]] * 3
    return q[0], q[2]


def run_case(case: Case, n: int, args: argparse.Namespace, tokenizer: Any) -> list[str]:
    """Check, time, and one line of numbers."""
    eos, pad, new = tokenizer.eos_token_id, tokenizer.pad_token_id, args.new_tokens
    model = make_model(args.size)
    stop = [eos] if case.varying else []
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=pad, eos_token_id=eos if case.varying else None
    )
    prompts = make_prompts(n, tokenizer)
    settings = SamplingConfig(max_new_tokens=new)
    if case.varying:
        let_it_end(model, prompts, settings, eos, pad, args.mean_length)
    mask, width = prompts.prompt_mask.long(), prompts.prompt_ids.shape[1]

    def theirs(greedy: bool = case.greedy) -> torch.Tensor:
        options = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
        return model.generate(prompts.prompt_ids, attention_mask=mask, max_new_tokens=new, **options)[:, width:]

    def ours(greedy: bool = case.greedy) -> tuple[torch.Tensor, ...]:
        return sample_tokens(model, prompts, settings, eos=stop, pad=pad, seed=0, greedy=greedy)

    if not torch.equal(theirs(greedy=True), ours(greedy=True)[0]):
        raise SystemExit(
            f"{case.name}, {n} prompts: greedy answers differ from generate's, so the times would mean nothing."
        )
    lengths = ours()[2].float()
    times = alternate([theirs, ours], args.repeats)
    a, b = (statistics.median(t) for t in times)
    low, high = spread([x / y for x, y in zip(*times)])
    return [
        case.name,
        str(n),
        f"{lengths.mean():.1f}",
        f"{a * 1e3:.0f} ms",
        f"{b * 1e3:.0f} ms",
        f"{a / b:.2f}×",
        f"{low:.2f}–{high:.2f}",
    ]


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Aligned columns."""
    widths = [max(len(r[i]) for r in [heads, *rows]) for i in range(len(heads))]
    for r in [heads, ["-" * w for w in widths], *rows]:
        print("  ".join(x.ljust(w) for x, w in zip(r, widths)), flush=True)


def extras(args: argparse.Namespace, tokenizer: Any) -> None:
    """What single choices cost: letting rows leave, number format, texts."""
    n, model, low = max(args.prompts), make_model(args.size), make_model(args.size).to(torch.bfloat16)
    c = model.config
    cache = torch.zeros(c.num_hidden_layers, 2, n, c.num_key_value_heads, 64, c.hidden_size // c.num_attention_heads)
    half = cache[..., :32, :]
    gone = n // 16
    holes, movers, stay = torch.arange(0, 2 * gone, 2), torch.arange(n - gone, n), torch.arange(gone, n)

    def move() -> None:
        half[:, :, holes] = half[:, :, movers]

    prompts, settings = make_prompts(n, tokenizer), SamplingConfig(max_new_tokens=args.new_tokens)
    go = {"eos": [], "pad": tokenizer.pad_token_id, "seed": 0}
    pairs: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        (f"{gone} of {n} rows leave: select survivors / move rows", lambda: cache.index_select(2, stay), move),
        (
            "fixed: fp32 / bf16",
            lambda: sample_tokens(model, prompts, settings, **go),
            lambda: sample_tokens(low, prompts, settings, **go),
        ),
        (
            "fixed: with texts / ids only",
            lambda: sample(model, prompts, settings, tokenizer=tokenizer, seed=0, eos=[]),
            lambda: sample_tokens(model, prompts, settings, **go),
        ),
    ]
    eos, varying = tokenizer.eos_token_id, make_model(args.size)
    let_it_end(varying, prompts, settings, eos, go["pad"], args.mean_length)
    used: tuple[list[int], list[int]] = ([], [])
    kept = [0, 0]

    def few_slots(parts: list[PromptBatch], side: int) -> None:
        used[side].clear()
        done = [
            sample_tokens(varying, p, settings, **go | {"eos": [eos]}, batch_size=n // 4, used=used[side])
            for p in parts
        ]
        kept[side] = sum(int(d[2].sum()) for d in done)

    chunks = [prompts[i : i + n // 4] for i in range(0, n, n // 4)]
    pairs.insert(
        0,
        (
            f"{n} rows, {n // 4} slots: in chunks / waiting rows enter",
            lambda: few_slots(chunks, 0),
            lambda: few_slots([prompts], 1),
        ),
    )
    rows = []
    for name, first, second in pairs:
        times = alternate([first, second], args.repeats)
        a, b = (statistics.median(t) for t in times)
        rows.append([name, f"{a * 1e3:.2f} ms", f"{b * 1e3:.2f} ms", f"{a / b:.2f}×"])
    print()
    print_table(["choice", "first", "second", "first / second"], rows)
    for name, u, k in zip(("in chunks", "waiting rows enter"), used, kept):
        print(f"{name}: {len(u)} steps, {k / sum(u):.1%} of the slots in use")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", help="size of the toy model")
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--mean-length", type=int, default=15, help="of the varying case")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--extras", action="store_true", help="also time single choices")
    parser.add_argument("--quick", action="store_true", help="three repeats")
    args = parser.parse_args()
    args.repeats = 3 if args.quick else args.repeats
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    size = sum(p.numel() for p in build_model(0, args.size).parameters())
    print(
        f"toy model {args.size!r}, {size / 1e6:.2f}M parameters, fp32, {args.threads} threads, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    rows = [run_case(case, n, args, tokenizer) for case in CASES for n in args.prompts]
    print_table(["case", "prompts", "mean length", "generate", "ours", "ratio of medians", "quartiles of ratios"], rows)
    if args.extras:
        extras(args, tokenizer)


if __name__ == "__main__":
    main()
