"""Reward model: pairs per second against TRL's RewardTrainer, on HH-RLHF pairs.

    python benchmarks/bench_reward.py [--quick] [--steps 12] [--threads 2] [--token-budget 1024] [--data FILE]

Both sides: the same Qwen2 of 12M parameters (hidden 384, 6 layers, vocabulary 8192) with a linear head, the same tokens of the
same 8 pairs in each step, fp32, AdamW (fused), gradients cut to norm 1, no gradient checkpointing, each with its own trainer. What is
checked before anything is reported: the losses of all steps, updates included, are the same.

Two orders of the pairs, the same on both sides: at random, and grouped by length (TRL's best case: hardly any padding, but a
batch is no longer a random sample; speeds differ much from step to step, so take many).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness
import pairs
import peers


def run_ours(job: dict[str, Any]) -> None:
    """Train with rlhf_nb, a step at each turn."""
    from rlhf_nb.config import ModelConfig
    from rlhf_nb.data.sources import MemorySource
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.models.load import load_tokenizer
    from rlhf_nb.run.callbacks import Callback
    from rlhf_nb.run.loop import Trainer
    from rlhf_nb.train.reward import Reward, RewardConfig

    gate = harness.Gate()

    class Turns(Callback):
        def on_start(self, run: Any) -> None:
            gate.ready()

        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            gate.step_done(loss=event["loss"], pairs=job["batch"])

    config = RewardConfig(
        output_dir=job["output"], steps=job["steps"], epochs=None, mini_batch_size=job["batch"], token_budget=job["token_budget"],
        optimizer={"lr": job["lr"], "schedule": "constant"}, center_coef=0.0, calibrate_rows=0, precision="fp32", device="cpu", console=False,
    )  # fmt: skip
    tokenizer = load_tokenizer(ModelConfig(name_or_path=job["model"]))
    method = Reward([RewardModel.load(job["model"])], tokenizer, config)
    Trainer(method, MemorySource(job["rows"], shuffle=False), config, callbacks=[Turns()]).fit()


def run_trl(job: dict[str, Any]) -> None:
    """Train with TRL, a step at each turn."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl import RewardConfig, RewardTrainer

    gate, losses = harness.Gate(), []

    class Turns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.step_done(loss=losses[-1], pairs=job["batch"])

    class Recorded(RewardTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss))
            return loss

    rows = [{k: r["prompt_ids"] + r[k] for k in ("chosen_ids", "rejected_ids")} for r in job["rows"]]
    args = RewardConfig(
        output_dir=job["output"], max_steps=job["steps"], per_device_train_batch_size=job["batch"], learning_rate=job["lr"],
        lr_scheduler_type="constant", bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential", dataloader_num_workers=0, max_length=None,
    )  # fmt: skip
    Recorded(
        model=AutoModelForSequenceClassification.from_pretrained(job["model"], num_labels=1),
        args=args, train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(job["model"]), callbacks=[Turns()],
    ).train()  # fmt: skip


def prepare(data: Path, folder: Path, batch: int, steps: int) -> dict[str, list[dict[str, Any]]]:
    """Write the model, and return tokenized pairs in both orders."""
    from rlhf_nb.models.heads import RewardModel

    rows = harness.hh_pairs(data)
    tokenizer = harness.hh_tokenizer([r["prompt"] + r["chosen"] for r in rows])
    model = harness.qwen2(tokenizer)
    RewardModel.from_policy(model, seed=0).save(folder / "model", tokenizer)
    orders = pairs.in_both_orders(rows, tokenizer, model, batch)
    return {"random order": orders["random"], "grouped by length": orders["grouped"]}


def main() -> None:
    parser = harness.arguments(__doc__, steps=12)
    parser.add_argument("--batch", type=int, default=8, help="pairs a step")
    parser.add_argument("--token-budget", type=int, default=1024, help="ours: tokens in a forward")
    parser.add_argument("--data", type=Path, default=harness.HH)
    args = parser.parse_args()
    if harness.worked(args, run_ours, run_trl):
        return
    steps = min(args.steps, 5) if args.quick else args.steps
    theirs = peers.ensure("trl-1.16")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        orders = prepare(args.data, folder, args.batch, steps)
        for order, rows in orders.items():
            job = {
                "model": str(folder / "model"), "batch": args.batch, "steps": args.warmup + steps + 1, "lr": 1e-4, "threads": args.threads,
                "token_budget": args.token_budget, "rows": rows[: args.batch * (args.warmup + steps + 1)],
            }  # fmt: skip
            sides = {
                side: (python, job | {"side": side, "output": str(folder / f"{side} {order}")})
                for side, python in (("ours", harness.sys.executable), ("trl", theirs))
            }
            print(f"{order}, {args.threads} threads, {steps} steps each, in turn")
            with harness.workers(__file__, sides, args.threads) as (ours, trl):
                harness.alternate([ours, trl], args.warmup, steps)
            harness.same_losses(ours, trl, len(ours.steps), 1e-3)
            harness.show(ours, trl, args.warmup, "pairs", "pairs")


if __name__ == "__main__":
    main()
