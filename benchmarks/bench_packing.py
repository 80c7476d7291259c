"""Packed log-probs against a padded batch: one training step (forward and backward) on preference pairs.

    python benchmarks/bench_packing.py [--pairs 8] [--steps 6] [--threads 1] [--data FILE] [--tree-cost]

Model: Qwen2 shape of 12M parameters (hidden 384, 6 layers, 6 heads, 2 key/value heads, vocabulary 8192), fp32, random weights.
Data: HH-RLHF pairs when the file is there (an 8k BPE is trained on the spot), else lengths drawn to look like them.
Before anything is timed, losses and gradients of both sides are compared. `--tree-cost` measures instead from where a tree
behind a shared prompt beats separate rows, against the rule that `rlhf_nb.scoring.scores` uses.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from rlhf_nb.scoring.scores import completion_logps
from rlhf_nb.scoring.trees import pack, packing_stats, plan
from rlhf_nb.types import Completions

VOCAB = 8192
HH = Path(__file__).resolve().parents[2] / "shared" / "data" / "hh_rlhf_harmless.jsonl.gz"


def model_of(width: int = 384, layers: int = 6, heads: int = 6, kv_heads: int = 2) -> Qwen2ForCausalLM:
    """A Qwen2 with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def real_pairs(path: Path, most: int) -> list[tuple[list[int], list[int], list[int]]]:
    """(prompt, chosen, rejected) token ids of the first HH-RLHF pairs, split at the last assistant turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    with gzip.open(path, "rt", encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tok.train_from_iterator((r["chosen"] for r in rows), trainer)
    out = []
    for r in rows:
        cut = r["chosen"].rfind("\n\nAssistant:") + len("\n\nAssistant:")
        if r["rejected"][:cut] == r["chosen"][:cut]:
            parts = [tok.encode(x).ids for x in (r["chosen"][:cut], r["chosen"][cut:], r["rejected"][cut:])]
            if all(parts) and sum(map(len, parts)) <= 1024:
                out.append((parts[0], parts[1], parts[2]))
    return out[:most]


def made_up_pairs(most: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Pairs of random tokens whose lengths are spread like HH-RLHF's (means 125, 41 and 52)."""
    g = random.Random(0)

    def some(mean: float) -> list[int]:
        return [g.randrange(VOCAB) for _ in range(min(1 + int(g.expovariate(1 / (mean - 1))), 400))]

    return [(some(125), some(41), some(52)) for _ in range(most)]


def padded_logps(model: Qwen2ForCausalLM, c: Completions) -> Tensor:
    """What a plain trainer does: every sequence a padded row, logits of every position."""
    ids = torch.cat([c.prompt_ids, c.completion_ids], 1)
    mask = torch.cat([c.prompt_mask, c.real], 1)
    position = (mask.long().cumsum(1) - 1).clamp_min(0)
    logits = model(input_ids=ids, attention_mask=mask.long(), position_ids=position, use_cache=False).logits
    logits = logits[:, c.prompt_ids.shape[1] - 1 : -1]
    logps = torch.log_softmax(logits, -1).gather(-1, c.completion_ids[..., None])[..., 0]
    return torch.where(c.completion_mask, logps, 0)


def pair_loss(logps: Tensor) -> Tensor:
    """A preference loss on summed log-probs, rows alternating chosen and rejected."""
    s = logps.sum(1)
    return -F.logsigmoid(0.1 * (s[0::2] - s[1::2])).sum()


def seconds(step: Callable[[], object], threads: int) -> float:
    """Time of one call: CPU seconds on one thread (other load then matters little), wall seconds on several."""
    clock = time.process_time if threads == 1 else time.perf_counter
    t = clock()
    step()
    return clock() - t


def show(name: str, base: list[float], times: list[float], tokens: str) -> None:
    """One line: median time, ratio of medians, and the spread of the step-by-step ratios."""
    ratios = sorted(b / t for b, t in zip(base, times, strict=True))
    ratio = statistics.median(base) / statistics.median(times)
    print(
        f"{name:38s} {statistics.median(times):7.2f} s   {ratio:5.2f}x  ({ratios[0]:.2f} to {ratios[-1]:.2f})   {tokens}"
    )


def compare_steps(args: argparse.Namespace) -> None:
    """Time padded and packed steps in turn, on the same batches."""
    if args.data.exists():
        pairs = real_pairs(args.data, args.pairs * args.steps)
        print(f"data: {args.data.name}, {len(pairs)} pairs")
    else:
        pairs = made_up_pairs(args.pairs * args.steps)
        print(f"data: {args.data} isn't there, so {len(pairs)} pairs of random tokens with HH-RLHF-like lengths")
    batches = []
    for i in range(0, len(pairs) - args.pairs + 1, args.pairs):
        some = pairs[i : i + args.pairs]
        batches.append(
            Completions.from_lists([p for p, _, _ in some for _ in range(2)], [x for _, a, b in some for x in (a, b)])
        )
    model = model_of()
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters, {args.pairs} pairs a step, {args.threads} thread(s)"
    )

    def padded(c: Completions) -> Tensor:
        loss = pair_loss(padded_logps(model, c))
        loss.backward()
        return loss.detach()

    def packed(c: Completions, budget: int, share: bool) -> Tensor:
        total = torch.zeros(())
        for rows in plan(c, budget, unit=2, share_prompts=share, width=384):
            loss = pair_loss(completion_logps(model, c[rows], token_budget=1 << 30, share_prompts=share).logps)
            loss.backward()
            total += loss.detach()
        return total

    model.zero_grad()
    want = padded(batches[0])
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    torch.testing.assert_close(packed(batches[0], 512, True), want, rtol=1e-4, atol=1e-4)
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[n], rtol=1e-3, atol=1e-4 * float(grads[n].abs().max()) + 1e-7)
    print("losses and gradients agree\n")

    ways: dict[str, Callable[[Completions], Tensor]] = {"padded": padded}
    notes = {"padded": ""}
    for share, name in ((False, "sorted rows"), (True, "trees")):
        for budget in args.budgets:
            key = f"{name}, budget {budget}"
            ways[key] = lambda c, b=budget, s=share: packed(c, b, s)
            stats = [packing_stats(c, budget, share_prompts=share, width=384) for c in batches]
            notes[key] = f"{sum(s.computed for s in stats) / sum(s.padded for s in stats):.2f} of the padded tokens"
    times: dict[str, list[float]] = {k: [] for k in ways}
    for c in batches:
        for key, way in ways.items():
            model.zero_grad(set_to_none=True)
            times[key].append(seconds(lambda way=way, c=c: way(c), args.threads))
    for key in ways:
        show(key, times["padded"], times[key], notes[key])


def compare_trees(args: argparse.Namespace) -> None:
    """Measured tree time / row time for shapes around the break-even, beside what the rule expects and picks."""
    print("width prompt completion branches   measured tree/rows   rule picks")
    for width, heads in ((96, 4), (384, 6)):
        model = model_of(width, 4, heads, heads)
        for prompt, completion, branches in (
            (10, 40, 2),
            (10, 40, 8),
            (60, 40, 2),
            (60, 40, 8),
            (125, 45, 2),
            (250, 250, 4),
            (40, 400, 4),
        ):
            g = torch.Generator().manual_seed(0)
            b = branches * max(1, 1024 // (branches * (prompt + completion)))
            prompts = [torch.randint(0, VOCAB, (prompt,), generator=g).tolist() for _ in range(b // branches)]
            answers = [torch.randint(0, VOCAB, (completion,), generator=g).tolist() for _ in range(b)]
            c = Completions.from_lists([p for p in prompts for _ in range(branches)], answers)
            decoder, head = model.model, torch.ones(width)

            def step(share: object, c: Completions = c, decoder: torch.nn.Module = decoder) -> None:
                p = pack(c, share)  # type: ignore[arg-type]
                extra = (
                    {}
                    if p.attention_mask is None
                    else {"attention_mask": p.attention_mask, "position_ids": p.position_ids}
                )
                h = decoder(input_ids=p.input_ids, use_cache=False, **extra).last_hidden_state.flatten(0, 1)
                h[p.source].sum().backward()

            times: dict[object, list[float]] = {False: [], "always": []}
            for _ in range(args.steps):
                for share in times:
                    times[share].append(seconds(lambda s=share: step(s), args.threads))
            ratio = statistics.median(times["always"]) / statistics.median(times[False])
            kept = pack(c, True, width=width)
            picked = int(torch.bincount(kept.tree).max())
            print(f"{width:5d} {prompt:6d} {completion:10d} {branches:8d} {ratio:12.2f} {'':12s} {picked} to a tree")
            del head


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8, help="pairs in a step")
    parser.add_argument("--steps", type=int, default=6, help="steps (batches) that are timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="token budgets of one forward pass"
    )
    parser.add_argument("--data", type=Path, default=HH, help="hh_rlhf jsonl.gz")
    parser.add_argument("--tree-cost", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    (compare_trees if args.tree_cost else compare_steps)(args)


if __name__ == "__main__":
    main()
