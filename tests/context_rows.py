"""What one long row leaves for the backward pass on each rank, alone and shared: `python tests/context_rows.py --tokens 16384`.

A small model in fp32 on CPU processes (gloo). MiB of saved tensors, peak memory of the process above that before the step, CPU
seconds; and how far the shared gradients are from those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def peak_mib() -> float:
    """Most memory that this process had since the mark was cleared."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure(rank: int, ranks: int, tokens: int, recompute: bool, folder: str) -> None:
    """One rank: a row's log-probs and gradients."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_nb.scoring.context import SharedRows
    from rlhf_nb.scoring.recompute import recomputing
    from rlhf_nb.scoring.scores import completion_logps, sharing_rows
    from rlhf_nb.types import Completions

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{ranks}", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "vocab_size": 512}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=tokens)
    net = LlamaForCausalLM(config).eval()
    weights, kept = {p.untyped_storage().data_ptr() for p in net.parameters()}, dict[int, int]()
    row = torch.randint(3, 512, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    c = Completions.from_lists([row[: tokens // 16]], [row[tokens // 16 :]])

    def keep(t: Any) -> Any:
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    Path("/proc/self/clear_refs").write_text("5")
    before, begun = peak_mib(), time.process_time()
    with sharing_rows(SharedRows(None)) if ranks > 1 else nullcontext(), recomputing(recompute):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = -completion_logps(net, c).logps.mean()
    loss.backward()
    loss = loss.detach()
    spent, peak = time.process_time() - begun, peak_mib() - before
    grads = torch.cat([p.grad.to_dense().flatten() for p in net.parameters() if p.grad is not None])
    dist.all_reduce(grads)  # the mean over ranks, as DDP makes it
    grads, file = grads / ranks, Path(folder) / "gradients.pt"
    if ranks == 1:
        torch.save(grads, file)
    alone = torch.load(file)
    told = {
        "ranks": ranks,
        "rank": rank,
        "loss": round(float(loss), 6),
        "kept_mib": round(sum(kept.values()) / 2**20, 1),
    }
    told |= {"peak_mib": round(peak, 1), "cpu_s": round(spent, 1), "off": float((grads - alone).norm() / alone.norm())}
    (Path(folder) / f"{ranks}-{rank}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def compare(tokens: int, ranks: list[int], recompute: bool = False) -> list[dict[str, float]]:
    """A line for each rank, of one process first."""
    with TemporaryDirectory() as folder:
        for n in [1, *ranks]:
            mp.spawn(measure, (n, tokens, recompute, folder), n)
        return [json.loads((Path(folder) / f"{n}-{r}.json").read_text()) for n in [1, *ranks] for r in range(n)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2])
    parser.add_argument("--recompute", action="store_true")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for line in compare(asked.tokens, asked.ranks, asked.recompute):
        print(json.dumps(line))
