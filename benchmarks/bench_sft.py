"""Supervised fine-tuning: tokens per second against TRL's SFTTrainer, on HH-RLHF dialogues.

    python benchmarks/bench_sft.py [--quick] [--steps 12] [--threads 2] [--against padded bfd ...] [--data FILE]

Both sides: the same Qwen2 of 12M parameters, whole dialogues as text in which every token counts, fp32, AdamW (fused), gradients cut to
norm 1, no gradient checkpointing. Tokens are those of dialogues; padding isn't counted. TRL runs

    padded        packing off, 8 dialogues a step, padded to the longest
    grouped       the same with batches grouped by length, which hardly need padding
    padding-free  packing off, 8 dialogues flattened into one row
    bfd           packing on (its default way): rows of --length tokens filled with whole dialogues that don't see each other
    wrapped       packing on, the other way: rows of --length tokens, dialogues cut anywhere and seeing each other

In all but the last, ours gets in each step exactly the dialogues that TRL has in that step, and the losses of all steps, updates
included, must agree. `wrapped` computes something else (so no losses are compared); ours gets the `padded` steps beside it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import harness
import peers

WAYS = ("padded", "grouped", "padding-free", "bfd", "wrapped")


def run_ours(job: dict[str, Any]) -> None:
    """Train with rlhf_nb, a step at each turn."""
    from collections.abc import Iterator

    from rlhf_nb.config import ModelConfig
    from rlhf_nb.core import decide_precision
    from rlhf_nb.models.load import load_causal_lm, load_tokenizer
    from rlhf_nb.run.callbacks import Callback
    from rlhf_nb.run.loop import Trainer
    from rlhf_nb.train.sft import SFT, SFTConfig

    gate = harness.Gate()
    batches: list[list[list[int]]] = json.loads(Path(job["batches"]).read_text(encoding="utf-8"))

    class Steps:
        """A source of ready-made steps with different numbers of dialogues."""

        epoch, position = 0, 0

        def next_batch(self, n: int) -> list[dict[str, Any]]:
            ids = batches[self.position]
            self.position += 1
            return [
                {"prompt_ids": x[:1], "completion_ids": x[1:], "completion_mask": [True] * (len(x) - 1)} for x in ids
            ]

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.position = state["position"]

    class Whole(SFT):
        def mini_batches(self, data: Any, seed: int) -> Iterator[Any]:
            yield data

    class Turns(Callback):
        def on_start(self, run: Any) -> None:
            gate.ready()

        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            gate.step_done(loss=event["loss"], tokens=sum(map(len, batches[run.step - 1])))

    config = SFTConfig(
        output_dir=job["output"], steps=job["steps"], epochs=None, mini_batch_size=job["batch"], token_budget=job["token_budget"],
        optimizer={"lr": job["lr"], "schedule": "constant"}, precision="fp32", device="cpu", console=False,
    )  # fmt: skip
    where = ModelConfig(name_or_path=job["model"])
    tokenizer = load_tokenizer(where)
    model = load_causal_lm(where, decide_precision("cpu", "fp32"))
    Trainer(Whole(model, tokenizer, config), Steps(), config, callbacks=[Turns()]).fit()


def run_trl(job: dict[str, Any]) -> None:
    """Train with TRL, a step at each turn; the dialogues of each step are written to `job["batches"]` for the other side."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    gate, losses, way = harness.Gate(), [], job["way"]
    packing = way in ("bfd", "wrapped")
    size = job["rows_per_step"] if packing else job["batch"]

    class Turns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.step_done(loss=losses[-1], tokens=sum(map(len, batches[state.global_step - 1])))

    class Recorded(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss))
            return loss

    args = SFTConfig(
        output_dir=job["output"], max_steps=job["steps"], per_device_train_batch_size=size, learning_rate=job["lr"],
        lr_scheduler_type="constant", bf16=False, use_cpu=True, gradient_checkpointing=False, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential", dataloader_num_workers=0, shuffle_dataset=False,
        max_length=job["length"] if packing else None, packing=packing, packing_strategy=way if packing else "bfd",
        padding_free=way == "padding-free",
    )  # fmt: skip
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(job["model"]), args=args, callbacks=[Turns()],
        train_dataset=Dataset.from_list([{"input_ids": x, "labels": x} for x in job["rows"]]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
    )  # fmt: skip
    packed = trainer.train_dataset[:]
    rows: list[list[list[int]]] = []
    for i, ids in enumerate(packed["input_ids"]):
        lengths = packed["seq_lengths"][i] if way == "bfd" else [len(ids)]
        ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
        rows.append([list(ids[e - n : e]) for e, n in zip(ends, lengths)])
    batches = [[x for row in rows[i : i + size] for x in row] for i in range(0, size * job["steps"], size)]
    Path(job["batches"]).write_text(json.dumps(batches), encoding="utf-8")
    trainer.train()


def prepare(data: Path, folder: Path, batch: int, longest: int) -> dict[str, list[list[int]]]:
    """Write the model; return tokenized dialogues at random and grouped by length."""
    import random

    texts = [p["prompt"] + p["chosen"] for p in harness.hh_pairs(data)]
    tokenizer = harness.hh_tokenizer(texts)
    model = harness.qwen2(tokenizer)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [x + [tokenizer.eos_token_id] for x in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    rows = [x for x in rows if len(x) <= longest]
    random.Random(0).shuffle(rows)
    order = harness.grouped([len(x) for x in rows], batch)
    batches = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
    random.Random(1).shuffle(batches)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{size:.1f}M parameters, {len(rows)} dialogues of {sum(map(len, rows)) / len(rows):.0f} tokens on average")
    return {"random": rows, "grouped": [rows[i] for b in batches for i in b]}


def main() -> None:
    parser = harness.arguments(__doc__, steps=12)
    parser.add_argument("--batch", type=int, default=8, help="dialogues a step when TRL doesn't pack")
    parser.add_argument("--length", type=int, default=1024, help="of TRL's packed rows")
    parser.add_argument(
        "--rows-per-step",
        type=int,
        default=1,
        help="packed rows a step (TRL flattens them into one; 1 is its best on a CPU)",
    )
    parser.add_argument("--token-budget", type=int, default=1024, help="ours: tokens in a forward")
    parser.add_argument(
        "--against", nargs="+", choices=WAYS, default=None, help="ways of TRL (default: all; padded and bfd when quick)"
    )
    parser.add_argument("--data", type=Path, default=harness.HH)
    args = parser.parse_args()
    if harness.worked(args, run_ours, run_trl):
        return
    steps = min(args.steps, 5) if args.quick else args.steps
    theirs = peers.ensure("trl-1.16")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        orders = prepare(args.data, folder, args.batch, args.length)
        for way in args.against or (("padded", "bfd") if args.quick else WAYS):
            total = args.warmup + steps + 1
            rows = orders["grouped" if way == "grouped" else "random"]
            need = total * args.batch if way not in ("bfd", "wrapped") else len(rows)
            job = {
                "way": way, "model": str(folder / "model"), "batch": args.batch, "rows_per_step": args.rows_per_step, "length": args.length,
                "steps": total, "lr": 1e-4, "threads": args.threads, "token_budget": args.token_budget, "rows": rows[:need],
                "batches": str(folder / f"{way}.json"),
            }  # fmt: skip
            ours_job = dict(job)
            if way == "wrapped":
                ours_job["batches"] = str(folder / "ours.json")
                Path(ours_job["batches"]).write_text(
                    json.dumps([rows[i : i + args.batch] for i in range(0, total * args.batch, args.batch)])
                )
            sides = {
                "trl": (theirs, job | {"side": "trl", "output": str(folder / f"trl-{way}")}),
                "ours": (harness.sys.executable, ours_job | {"side": "ours", "output": str(folder / f"ours-{way}")}),
            }
            print(f"TRL {way}, {args.threads} threads, {steps} steps each, in turn")
            with harness.workers(__file__, sides, args.threads) as (trl, ours):
                harness.alternate([ours, trl], args.warmup, steps)
            if way != "wrapped":
                harness.same_losses(ours, trl, len(ours.steps), 1e-3)
            harness.show(ours, trl, args.warmup, "tokens", "tokens")


if __name__ == "__main__":
    main()
