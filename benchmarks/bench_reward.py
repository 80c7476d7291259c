"""Reward model: pairs per second against TRL's RewardTrainer, on HH-RLHF pairs.

    python benchmarks/bench_reward.py [--quick] [--steps 12] [--threads 2] [--against random grouped] [--data FILE] [--json FILE]

Both sides: the same Qwen2 of 12M parameters (hidden 384, 6 layers, vocabulary 8192) with a linear head, the same tokens of the same 8 pairs in each
step, fp32, AdamW (fused), gradients cut to norm 1, no gradient checkpointing, each with its own trainer. Before anything is reported, the losses of all
steps, updates included, must be the same. Pairs come at random, or grouped by length (TRL's best case: hardly any padding).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness
import pairs


def run_ours(job: dict[str, Any]) -> None:
    """Train with rlhf_nb."""
    from rlhf_nb.config import ModelConfig
    from rlhf_nb.data.sources import MemorySource
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.models.load import load_tokenizer
    from rlhf_nb.train.reward import Reward, RewardConfig

    config = RewardConfig(**harness.settings(job, center_coef=0.0, calibrate_rows=0))
    method = Reward([RewardModel.load(job["model"])], load_tokenizer(ModelConfig(name_or_path=job["model"])), config)
    report = lambda run, event: {"loss": event["loss"], "pairs": job["batch"]}
    harness.fit(method, MemorySource(job["rows"], shuffle=False), config, report)


def run_trl(job: dict[str, Any]) -> None:
    """Train with TRL."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    parts: list[dict[str, float]] = []
    rows = [{k: r["prompt_ids"] + r[k] for k in ("chosen_ids", "rejected_ids")} for r in job["rows"]]
    args = RewardConfig(**harness.trl_settings(job, train_sampling_strategy="sequential", max_length=None))
    harness.recorded(RewardTrainer, parts, {})(
        model=AutoModelForSequenceClassification.from_pretrained(job["model"], num_labels=1), args=args,
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[harness.turns(lambda state: {**parts[-1], "pairs": job["batch"]})],
    ).train()  # fmt: skip


def main() -> None:
    parser = harness.arguments(__doc__, steps=12, ways=("random", "grouped"))
    parser.add_argument("--batch", type=int, default=8, help="pairs a step")
    args = parser.parse_args()
    if harness.worked(args, run_ours, run_trl):
        return
    from rlhf_nb.models.heads import RewardModel

    total = args.warmup + args.steps + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = harness.hh_pairs(args.data)
        tokenizer = harness.hh_tokenizer([r["prompt"] + r["chosen"] for r in rows])
        model = harness.qwen2(tokenizer)
        RewardModel.from_policy(model, seed=0).save(folder / "model", tokenizer)
        orders = pairs.in_both_orders(rows, tokenizer, model, args.batch)
        for way in args.against or orders:
            job = {
                "model": str(folder / "model"), "batch": args.batch, "steps": total, "lr": 1e-4, "token_budget": args.token_budget or 1024,
                "rows": orders[way][: args.batch * total], "output": str(folder / way),
            }  # fmt: skip
            same = lambda ours, trl: harness.same_losses(ours, trl, total - 1, 1e-3)
            harness.compare(__file__, f"reward model, fp32, order {way}", job, args, "pairs", same)


if __name__ == "__main__":
    main()
