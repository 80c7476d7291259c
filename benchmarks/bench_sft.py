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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

WAYS = ("padded", "grouped", "padding-free", "bfd", "wrapped")


class Steps:
    """A source of ready-made steps with different numbers of dialogues."""

    def __init__(self, batches: list[list[list[int]]]) -> None:
        self.batches, self.epoch, self.position = batches, 0, 0

    def next_batch(self, n: int) -> list[dict[str, Any]]:
        """The next step, whatever its size."""
        ids = self.batches[self.position]
        self.position += 1
        return [{"prompt_ids": x[:1], "completion_ids": x[1:], "completion_mask": [True] * (len(x) - 1)} for x in ids]

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        self.position = state["position"]


def run_ours(job: dict[str, Any]) -> None:
    """Train with rlhf_nb."""
    from rlhf_nb.train.sft import SFT, SFTConfig

    batches = json.loads(Path(job["batches"]).read_text(encoding="utf-8"))

    class Whole(SFT):
        def mini_batches(self, data: Any, seed: int) -> Iterator[Any]:
            yield data

    config = SFTConfig(**harness.settings(job))
    tokenizer, model = harness.load(job)
    report = lambda run, event: {"loss": event["loss"], "tokens": sum(map(len, batches[run.step - 1]))}
    harness.fit(Whole(model, tokenizer, config), Steps(batches), config, report)


def run_trl(job: dict[str, Any]) -> None:
    """Train with TRL; the dialogues of each step are written to `job["batches"]` for the other side."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    parts: list[dict[str, float]] = []
    way = job["way"]
    packing = way in ("bfd", "wrapped")
    size = job["rows_per_step"] if packing else job["batch"]
    more = {
        "per_device_train_batch_size": size, "train_sampling_strategy": "sequential", "shuffle_dataset": False, "packing": packing,
        "max_length": job["length"] if packing else None, "packing_strategy": way if packing else "bfd", "padding_free": way == "padding-free",
    }  # fmt: skip
    report = lambda state: {**parts[-1], "tokens": sum(map(len, batches[state.global_step - 1]))}
    trainer = harness.recorded(SFTTrainer, parts, {})(
        model=AutoModelForCausalLM.from_pretrained(job["model"]), args=SFTConfig(**harness.trl_settings(job, **more)),
        train_dataset=Dataset.from_list([{"input_ids": x, "labels": x} for x in job["rows"]]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]), callbacks=[harness.turns(report)],
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
    parser = harness.arguments(__doc__, steps=12, ways=WAYS)
    parser.add_argument("--batch", type=int, default=8, help="dialogues a step when TRL doesn't pack")
    parser.add_argument("--length", type=int, default=1024, help="of TRL's packed rows")
    parser.add_argument("--rows-per-step", type=int, default=1, help="packed rows a step; 1 is TRL's best on a CPU")
    args = parser.parse_args()
    if harness.worked(args, run_ours, run_trl):
        return
    total = args.warmup + args.steps + 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        orders = prepare(args.data, folder, args.batch, args.length)
        for way in args.against or (("padded", "bfd") if args.quick else WAYS):
            rows, written = orders["grouped" if way == "grouped" else "random"], folder / f"{way}.json"
            theirs = {"batches": str(folder / "wrapped-theirs.json")} if way == "wrapped" else {}
            if theirs:  # another division of the same dialogues: ours gets whole ones
                steps = [rows[i : i + args.batch] for i in range(0, total * args.batch, args.batch)]
                written.write_text(json.dumps(steps), encoding="utf-8")
            job = {
                "way": way, "model": str(folder / "model"), "batch": args.batch, "rows_per_step": args.rows_per_step, "length": args.length,
                "steps": total, "lr": 1e-4, "token_budget": args.token_budget or 1024, "batches": str(written), "output": str(folder / way),
                "rows": rows if way in ("bfd", "wrapped") else rows[: total * args.batch],
            }  # fmt: skip
            same = None if theirs else lambda ours, trl: harness.same_losses(ours, trl, total - 1, 1e-3)
            harness.compare(__file__, f"SFT, fp32, TRL {way}", job, args, "tokens", same, theirs=theirs)


if __name__ == "__main__":
    main()
