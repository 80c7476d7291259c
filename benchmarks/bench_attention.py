"""Attention over trees of prompts and answers: in blocks (`fast.blocks`) against PyTorch's attention on one masked, padded batch.

    python benchmarks/bench_attention.py [--threads 1] [--repeats 30]

One layer of the 12M Qwen2 shape of the other benchmarks (6 heads of 64, 2 of keys and values) on the CPU, fp32, forward and backward,
calls in turn; the 25th percentile of the times. Before: both give the same output and the same gradients.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_nb.fast.attention import Branches, branch_attention, branches_pay, row_attention

HEADS, SHARED, SIZE = 6, 2, 64
SHAPES: dict[str, Branches] = {
    "four HH pairs": [[125, 60, 70], [130, 50, 55], [110, 80, 60], [120, 60, 60]],
    "one HH pair": [[150, 37, 30]],
    "two long pairs": [[200, 100, 90], [190, 90, 100]],
    "two groups of eight": [[125, 48, 60, 48, 60, 48, 60, 40, 20]] * 2,
    "plain rows": [[125, 60]] * 4,
    "toy groups": [[30] + [15] * 8] * 4,
}


def masked(branches: Branches) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same attention as one batch: rows padded to the longest, a mask that says who may look at whom."""
    lengths, rows = [sum(row) for row in branches], len(branches)
    width = max(lengths)
    places = torch.cat([torch.arange(n) + i * width for i, n in enumerate(lengths)])
    tags = torch.full((rows, width), -1)
    for i, row in enumerate(branches):
        tags[i, : lengths[i]] = torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row))
    look = (tags[:, None, :] == 0) | (tags[:, None, :] == tags[:, :, None])
    look &= torch.ones(width, width, dtype=torch.bool).tril()
    mask = look[:, None] if any(len(row) > 2 for row in branches) else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        padded = (x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, places, x) for x in (q, k, v))
        return row_attention(*padded, rows, mask, SIZE**-0.5).index_select(0, places)

    return attend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name, branches in SHAPES.items():
        total = sum(map(sum, branches))
        qkv = [torch.randn(total, h, SIZE, requires_grad=True) for h in (HEADS, SHARED, SHARED)]
        g = torch.randn(total, HEADS * SIZE)
        ways = {
            "batch": masked(branches),
            "blocks": lambda q, k, v, b=branches: branch_attention(q, k, v, b, SIZE**-0.5),
        }
        found = {way: (f(*qkv), torch.autograd.grad(f(*qkv), qkv, g)) for way, f in ways.items()}
        torch.testing.assert_close(found["batch"], found["blocks"], rtol=1e-4, atol=1e-4)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.repeats):
            for way, f in ways.items():
                start = time.perf_counter()
                torch.autograd.grad(f(*qkv), qkv, g)
                times[way].append(time.perf_counter() - start)
        batch, blocks = (sorted(x)[len(x) // 4] * 1e3 for x in times.values())
        chosen = "blocks" if branches_pay(branches, HEADS * SIZE) else "batch"
        print(f"{name:20} batch {batch:6.2f} ms   blocks {blocks:6.2f} ms   {batch / blocks:4.2f}x   chosen: {chosen}")


if __name__ == "__main__":
    main()
