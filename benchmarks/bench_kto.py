"""KTO: answers per second against TRL's KTOTrainer, on HH-RLHF answers.

    python benchmarks/bench_kto.py [--quick] [--steps 12] [--threads 2] [--against random cached ...] [--data FILE] [--json FILE]

Both sides: the same Qwen2 of 12M parameters as in `bench_dpo.py`, the same tokens of the same 8 labelled answers in each step (one of each pair, half of
them good), fp32, β 0.1, AdamW (fused), gradients cut to norm 1, no dropout, no gradient checkpointing, each with its own trainer. The reference point is
measured on TRL's mismatched answers on both sides. Rows come at random, or grouped by length; `cached`: the reference is computed before the run on both
sides, and not timed. Losses, reference points and mean margins of all steps must be the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness
import pairs

WAYS = ("random", "grouped", "cached", "cached-grouped")
READ = {"kl": "kl", "margin": "rewards/margins"}


def run_ours(job: dict[str, Any]) -> None:
    """Train with rlhf_nb."""
    from rlhf_nb.train.kto import KTO, KTOConfig

    kind = "cached" if job["cached"] else "frozen"
    config = KTOConfig(
        **harness.settings(job, beta=job["beta"], reference=kind, reference_cache=job["output"] + "-reference")
    )
    tokenizer, model = harness.load(job)
    rows = pairs.strangers(job["rows"], job["batch"])
    source, reference = pairs.source_of(rows, config, model, tokenizer, KTO.reference_columns)
    report = lambda run, event: (
        {k: event[v] for k, v in READ.items()}
        | {
            "loss": event["loss"],
            "answers": job["batch"],
        }
    )
    harness.fit(KTO(model, tokenizer, config, reference), source, config, report)


def run_trl(job: dict[str, Any]) -> None:
    """Train with TRL."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import KTOConfig, KTOTrainer

    parts: list[dict[str, float]] = []

    def rotated(dataset: Any) -> Any:
        """Each row with the answer of the row before it, as TRL's own preparation does, which starts from text."""

        def rotate(part: dict[str, Any]) -> dict[str, Any]:
            ids = part["completion_ids"]
            return {"KL_completion_ids": [ids[-1], *ids[:-1]]}

        return dataset.map(rotate, batched=True, batch_size=job["batch"])

    rows = [{k: r[k] for k in ("prompt_ids", "completion_ids", "label")} for r in job["rows"]]
    more = {"train_sampling_strategy": "sequential", "max_length": None, "precompute_ref_log_probs": job["cached"]}
    harness.recorded(KTOTrainer, parts, READ, rotated)(
        model=AutoModelForCausalLM.from_pretrained(job["model"]), train_dataset=Dataset.from_list(rows),
        args=KTOConfig(**harness.trl_settings(job, beta=job["beta"], **more)),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[harness.turns(lambda state: {**parts[-1], "answers": job["batch"]})],
    ).train()  # fmt: skip


def main() -> None:
    parser = harness.arguments(__doc__, steps=12, ways=WAYS)
    parser.add_argument("--batch", type=int, default=8, help="answers a step")
    args = parser.parse_args()
    if harness.worked(args, run_ours, run_trl):
        return
    total = args.warmup + args.steps + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        orders = pairs.prepare(args.data, folder, args.batch)
        for way in args.against or (("random", "cached") if args.quick else WAYS):
            rows = pairs.labelled(orders["grouped" if "grouped" in way else "random"][: args.batch * total], args.batch)
            job = pairs.job_of(
                folder, rows, batch=args.batch, steps=total, token_budget=args.token_budget or 1024, cached="cached" in way,
                output=str(folder / way),
            )  # fmt: skip
            same = lambda ours, trl: pairs.near(ours, trl, ("loss", *READ), 1e-4)
            harness.compare(__file__, f"KTO, fp32, TRL {way}", job, args, "answers", same)


if __name__ == "__main__":
    main()
