"""Several processes: scaling, and sampling under ZeRO-3.

    python benchmarks/bench_processes.py scaling        # DPO, 1 and 2 processes with one thread each: tokens/s
    python benchmarks/bench_processes.py generation     # 100 steps of sampling under ZeRO-3: gathered once, and once per token

Each line is printed with the bar it is to meet. Ranks are processes of this machine, over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


def model_of(width: int, layers: int) -> tuple[Any, Any]:
    """An untrained Llama of the toy vocabulary, large enough that the exchange is not all there is."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_nb.data import toy

    tokenizer = toy.build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=width // 32,
        max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config), tokenizer


def dpo_rank(folder: str, width: int = 256, steps: int = 12, **over: Any) -> None:
    """One rank of a DPO run."""
    import torch

    from rlhf_nb.data import toy
    from rlhf_nb.train.dpo import DPOConfig, DPOTrainer

    torch.set_num_threads(1)
    settings = {"console": False, "device": "cpu", "epochs": None, "steps": steps, "output_dir": folder}
    settings |= {"mini_batch_size": 64, "token_budget": 2048}
    config = DPOConfig.preset("toy", **(settings | over))
    DPOTrainer(config, *model_of(width, 4), rows=toy.preference_rows(64 * 8)).fit(overwrite=True)


def generation_rank(folder: str, width: int = 256, tokens: int = 100) -> None:
    """Sample under ZeRO-3, gathered once and gathered per layer and token."""
    import torch
    from transformers import GenerationConfig

    from rlhf_nb.config import OptimizerConfig, SamplingConfig
    from rlhf_nb.data import toy
    from rlhf_nb.data.sources import collate_prompts, tokenize_prompts
    from rlhf_nb.rollout.sampler import sample
    from rlhf_nb.run.engine import Engine
    from rlhf_nb.train.method import CausalScorer

    torch.set_num_threads(1)
    model, tokenizer = model_of(width, 4)
    engine = Engine()
    engine.prepare(CausalScorer(model, 4096), OptimizerConfig())
    rows = tokenize_prompts(toy.train_prompts(16), tokenizer, 64, warn=False)
    prompts = collate_prompts(rows[engine.rank :: engine.world_size], tokenizer.pad_token_id)
    times: dict[str, list[float]] = {"gather_once": [], "synced_gpus": []}
    fixed = SamplingConfig(max_new_tokens=tokens, min_new_tokens=tokens)
    for _ in range(3):
        engine.barrier()
        begin = time.perf_counter()
        with torch.no_grad(), engine.generation_mode():
            sample(model, prompts, fixed, tokenizer=tokenizer, seed=0)
        engine.barrier()
        times["gather_once"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        settings = GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, do_sample=True, pad_token_id=tokenizer.pad_token_id
        )
        with torch.no_grad():
            model.generate(
                prompts.prompt_ids,
                attention_mask=prompts.prompt_mask.long(),
                generation_config=settings,
                synced_gpus=True,
            )
        engine.barrier()
        times["synced_gpus"].append(time.perf_counter() - begin)
    if engine.is_main:
        (Path(folder) / "times.json").write_text(json.dumps(times))


RANKS = {"dpo": dpo_rank, "generation": generation_rank}


def ranks(what: str, world: int, strategy: str = "", **options: Any) -> Path:
    """Run all ranks of something; returns its folder."""
    from process_cases import SHARD_ALL, free_port

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    base = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "RLHF_NB_DEEPSPEED": SHARD_ALL}
    if strategy:
        base["RLHF_NB_STRATEGY"] = strategy
    if world > 1:
        base |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        base |= {} if strategy.startswith("zero") else {"ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, __file__, "--rank", what, str(folder), json.dumps(options)]
    started = []
    for rank in range(world):
        own = base | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})
        started.append(subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    for p in started:
        _, err = p.communicate()
        assert p.returncode == 0, err[-2000:]
    return folder


def step_times(folder: Path, key: str = "perf/step_s", skip: int = 3) -> list[float]:
    """Seconds of each step after the first few."""
    from rlhf_nb.run.log import read_metrics

    return [float(e[key]) for e in read_metrics(folder) if e["type"] == "step"][skip:]


def scaling() -> None:
    """The same global batch on one and on two processes."""
    one, two = (statistics.median(step_times(ranks("dpo", n))) for n in (1, 2))
    print(
        f"DPO, global batch 64 pairs, one thread a process: {one:.2f} s a step on one, {two:.2f} s on two: {one / two:.2f} times (bar 1.7)"
    )


def generation() -> None:
    """Gather once against once per token."""
    found = json.loads((ranks("generation", 2, "zero3") / "times.json").read_text())
    once, per = (statistics.median(found[k]) for k in ("gather_once", "synced_gpus"))
    print(
        f"100 tokens under ZeRO-3 on two processes: {once:.2f} s gathered once, {per:.2f} s with synced_gpus: {per / once:.1f} times (bar 5)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="scaling, generation (default: both)")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        RANKS[args.rank[0]](args.rank[1], **json.loads(args.rank[2]))
        return
    for name in args.parts or ("scaling", "generation"):
        {"scaling": scaling, "generation": generation}[name]()


if __name__ == "__main__":
    main()
