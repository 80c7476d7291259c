"""KTO: answers per second against TRL's KTOTrainer, on HH-RLHF answers.

    python benchmarks/bench_kto.py [--quick] [--steps 12] [--threads 2] [--token-budget 1024] [--against random cached ...] [--data FILE]

Both sides: the same Qwen2 of 12M parameters as in `bench_dpo.py`, the same tokens of the same 8 labelled answers in each step (one of each
pair, half of them good), fp32, β 0.1, AdamW (fused), gradients cut to norm 1, no dropout, no gradient checkpointing, each with its own
trainer. The reference point is measured on the same mismatched answers: TRL's, each the answer of the row before it in its batch. TRL runs

    random          8 answers at random
    grouped         the same with steps grouped by length of prompt and answer
    cached          `random` with precompute_ref_log_probs; ours with reference="cached"
    cached-grouped  `grouped` with both

TRL can't cut a step into several forwards here without another reference point: it rotates answers within a forward. What is computed
before the first step (the cached reference) isn't timed on either side. Before anything is reported: losses, reference points and
margins in all steps, updates included, are the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness
import pairs

WAYS = ("random", "grouped", "cached", "cached-grouped")
READ = {"kl": "kl", "margin": "rewards/margins"}  # what is compared besides the loss, and its name in a log


def run_ours(job: dict[str, Any]) -> None:
    """Train with rlhf_nb, a step at each turn."""
    from rlhf_nb.config import ModelConfig
    from rlhf_nb.core import decide_precision
    from rlhf_nb.data.sources import MemorySource
    from rlhf_nb.models.load import disable_dropout, load_causal_lm, load_tokenizer
    from rlhf_nb.run.callbacks import Callback
    from rlhf_nb.run.loop import Trainer
    from rlhf_nb.train.kto import KTO, KTOConfig
    from rlhf_nb.train.offline import make_reference, with_reference

    gate = harness.Gate()

    class Turns(Callback):
        def on_start(self, run: Any) -> None:
            gate.ready()

        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            gate.step_done(loss=event["loss"], answers=job["batch"], **{k: event[v] for k, v in READ.items()})

    config = KTOConfig(
        output_dir=job["output"], steps=job["steps"], epochs=None, mini_batch_size=job["batch"], token_budget=job["token_budget"],
        optimizer={"lr": job["lr"], "schedule": "constant", "warmup_steps": 0}, beta=job["beta"],
        reference="cached" if job["cached"] else "frozen", reference_cache=job["output"] + "-reference", precision="fp32", device="cpu",
        console=False,
    )  # fmt: skip
    where = ModelConfig(name_or_path=job["model"])
    tokenizer = load_tokenizer(where)
    model = disable_dropout(load_causal_lm(where, decide_precision("cpu", "fp32")))
    reference, rows = make_reference(config, model, tokenizer), pairs.strangers(job["rows"], job["batch"])
    if job["cached"]:
        assert reference is not None
        rows, reference = with_reference(rows, reference, config, KTO.reference_columns), None
    Trainer(
        KTO(model, tokenizer, config, reference), MemorySource(rows, shuffle=False), config, callbacks=[Turns()]
    ).fit()


def run_trl(job: dict[str, Any]) -> None:
    """Train with TRL, a step at each turn."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import KTOConfig, KTOTrainer

    gate, steps = harness.Gate(), []

    class Turns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.step_done(answers=job["batch"], **steps[-1])

    class Recorded(KTOTrainer):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            def rotate(part: dict[str, Any]) -> dict[str, Any]:  # as its own preparation does, which starts from text
                ids = part["completion_ids"]
                return {"KL_completion_ids": [ids[-1], *ids[:-1]]}

            return dataset.map(rotate, batched=True, batch_size=job["batch"])

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            logged = self._metrics["train"]
            steps.append({"loss": float(loss), **{k: logged[v][-1] for k, v in READ.items()}})
            return loss

    rows = [{k: r[k] for k in ("prompt_ids", "completion_ids", "label")} for r in job["rows"]]
    args = KTOConfig(
        output_dir=job["output"], max_steps=job["steps"], per_device_train_batch_size=job["batch"], learning_rate=job["lr"],
        lr_scheduler_type="constant", beta=job["beta"], max_length=None, precompute_ref_log_probs=job["cached"], bf16=False, use_cpu=True,
        gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
        train_sampling_strategy="sequential", dataloader_num_workers=0,
    )  # fmt: skip
    Recorded(
        model=AutoModelForCausalLM.from_pretrained(job["model"]), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"]), callbacks=[Turns()],
    ).train()  # fmt: skip


def main() -> None:
    parser = harness.arguments(__doc__, steps=12)
    parser.add_argument("--batch", type=int, default=8, help="answers a step")
    parser.add_argument("--token-budget", type=int, default=1024, help="ours: tokens in a forward")
    parser.add_argument(
        "--against",
        nargs="+",
        choices=WAYS,
        default=None,
        help="ways of TRL (default: all; random and cached when quick)",
    )
    parser.add_argument("--data", type=Path, default=harness.HH)
    args = parser.parse_args()
    if harness.worked(args, run_ours, run_trl):
        return
    steps = min(args.steps, 5) if args.quick else args.steps
    total = args.warmup + steps + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        orders = pairs.prepare(args.data, folder, args.batch)
        for way in args.against or (("random", "cached") if args.quick else WAYS):
            rows = pairs.labelled(orders["grouped" if "grouped" in way else "random"][: args.batch * total], args.batch)
            job = pairs.job_of(
                folder,
                rows,
                batch=args.batch,
                steps=total,
                threads=args.threads,
                token_budget=args.token_budget,
                cached="cached" in way,
            )
            print(
                f"TRL {way}, {args.threads} threads, {steps} steps each, in turn, our token budget {args.token_budget}"
            )
            with harness.workers(__file__, pairs.both(job, way, folder), args.threads) as (ours, trl):
                harness.alternate([ours, trl], args.warmup, steps)
            pairs.near(ours, trl, ("loss", *READ), 1e-4)
            harness.show(ours, trl, args.warmup, "answers", "answers")


if __name__ == "__main__":
    main()
