"""DPO: pairs per second against TRL's DPOTrainer, on HH-RLHF pairs; and the fixture of a whole run.

    python benchmarks/bench_dpo.py [--quick] [--steps 12] [--threads 2] [--token-budget 1024] [--against random cached ...] [--data FILE]
    python benchmarks/bench_dpo.py --task smollm2 [--precision bf16] --against single grouped    # after `rlhf-nb get smollm2`
    python benchmarks/bench_dpo.py --record     # writes tests/data/dpo_run.json; --check only says whether it still holds

Both sides: the same Qwen2 of 12M parameters (hidden 384, 6 layers, vocabulary 8192) or SmolLM2-135M-Instruct, all weights train, the same
tokens of the same 8 pairs in each step, fp32 (or bf16 products over fp32 weights on both sides), sigmoid loss with β 0.1, AdamW (fused), gradients cut to norm 1, no dropout, no gradient checkpointing, each with its own trainer. TRL runs

    random          8 pairs at random in a forward of 16 sequences, the reference beside it
    grouped         the same with steps grouped by length, which hardly need padding
    single          8 pairs at random, one a forward (8 accumulated): hardly any padding at any order
    cached          `random` with precompute_ref_log_probs; ours with reference="cached"
    cached-grouped  `grouped` with both
    cached-single   `single` with both

What is computed before the first step (the cached reference) isn't timed on either side. Before anything is reported: losses, margins and
log-probs of the chosen answers in all steps, updates included, are the same (in bf16: near each other).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_kto
import harness
import pairs

WAYS = ("random", "grouped", "single", "cached", "cached-grouped", "cached-single")
LR = {"hh": 1e-4, "smollm2": 1e-6}
FIXTURE = harness.ROOT / "tests" / "data" / "dpo_run.json"
READ = {"margin": "rewards/margins", "chosen": "logps/chosen"}  # what is compared besides the loss: its name in a log


def run_ours(job: dict[str, Any]) -> None:
    """Train with rlhf_nb."""
    from rlhf_nb.train.dpo import DPO, DPOConfig

    kind = "cached" if job["cached"] else "frozen"
    config = DPOConfig(
        **harness.settings(job, beta=job["beta"], reference=kind, reference_cache=job["output"] + "-reference")
    )
    tokenizer, model = harness.load(job)
    source, reference = pairs.source_of(job["rows"], config, model, tokenizer, DPO.reference_columns)
    report = lambda run, event: {k: event[v] for k, v in READ.items()} | {"loss": event["loss"], "pairs": job["batch"]}
    harness.fit(DPO(model, tokenizer, config, reference), source, config, report, model, reference and reference.model)


def run_trl(job: dict[str, Any]) -> None:
    """Train with TRL."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    parts: list[dict[str, float]] = []
    accumulate = job["accumulate"]

    def report(state: Any) -> dict[str, Any]:
        last = parts[-accumulate:]
        return {"pairs": job["batch"], **{k: sum(p[k] for p in last) / accumulate for k in last[0]}}

    rows = [{k: r[k] for k in ("prompt_ids", "chosen_ids", "rejected_ids")} for r in job["rows"]]
    more = {
        "per_device_train_batch_size": job["batch"] // accumulate, "gradient_accumulation_steps": accumulate, "beta": job["beta"], "max_length": None,
        "precompute_ref_log_probs": job["cached"], "gradient_checkpointing": job["checkpointing"], "train_sampling_strategy": "sequential",
    }  # fmt: skip
    trainer = harness.recorded(DPOTrainer, parts, READ, lambda dataset: dataset)(  # tokenized already
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32"), train_dataset=Dataset.from_list(rows),
        args=DPOConfig(**harness.trl_settings(job, **more)), processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[harness.turns(report, lambda: harness.touch(trainer.model, trainer.ref_model))],
    )  # fmt: skip
    trainer.train()


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Speeds and memory in each of TRL's ways."""
    orders, total = pairs.prepare(args.data, folder, args.batch, args.task), args.warmup + args.steps + 1
    tolerance = 1e-4 if args.precision == "fp32" else 0.5
    for way in args.against or (("random", "cached") if args.quick else WAYS):
        job = pairs.job_of(
            folder, orders["grouped" if "grouped" in way else "random"][: args.batch * total], batch=args.batch, steps=total,
            token_budget=args.token_budget or 1024, cached="cached" in way, accumulate=args.batch if "single" in way else 1,
            precision=args.precision, lr=LR[args.task], output=str(folder / way),
        )  # fmt: skip
        same = lambda ours, trl: pairs.near(ours, trl, ("loss", *READ), tolerance)
        harness.compare(__file__, f"DPO on {args.task}, {args.precision}, TRL {way}", job, args, "pairs", same)


# --- the fixture: a small run, step for step -----------------------------------------------------------------------------------


def tiny_model(seed: int, **config: Any) -> Any:
    """A Qwen2 whose weights come from integer arithmetic, so that they are the same everywhere; `tests/test_dpo_like_trl.py` has a copy."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model = Qwen2ForCausalLM(Qwen2Config(**config))
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            k = torch.arange(p.numel()) + 1_000_003 * (seed + i)
            k = (k * 2_654_435_761) % 2**32
            k = ((k ^ (k >> 15)) * 2_246_822_519) % 2**32
            u = (k.double() / 2**32 - 0.5) * 0.35
            p.copy_((1 + u if "norm" in name else u).view_as(p))
    return model


def tiny_pairs(n: int, vocabulary: int, seed: int) -> list[dict[str, Any]]:
    """Pairs of token ids in which the chosen side prefers even ids, so that there is something to learn."""
    import random

    r = random.Random(seed)
    end, rows = 1, []

    def answer(parity: int) -> list[int]:
        ids = [r.randrange(2, vocabulary) for _ in range(r.randint(2, 12))]
        return [x - (x + parity) % 2 if r.random() < 0.8 and x > 3 else x for x in ids] + [end]

    for _ in range(n):
        prompt = [r.randrange(2, vocabulary) for _ in range(r.randint(3, 14))]
        rows.append({"prompt_ids": prompt, "chosen_ids": answer(0), "rejected_ids": answer(1), "margin": None})
    return rows


TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "dpo": {"steps": 20, "batch": 4, "lr": 1e-3, "beta": 0.1},
    "dpo-cached": {"steps": 20, "batch": 4, "lr": 1e-3, "beta": 0.1, "cached": True},
    "kto": {"steps": 20, "batch": 4, "lr": 1e-3, "beta": 0.3},
}


def tiny_setup(folder: Path) -> dict[str, Any]:
    """Write the small model and a tokenizer for it; return what the fixture says of them."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = tiny_model(7, **TINY)
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, TINY["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    model.save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder / "model"
    )
    total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
    with torch.no_grad():
        logit = float(model(torch.arange(2, 12)[None]).logits.double().abs().sum())
    return {
        "model": TINY,
        "seed": 7,
        "weights_sum": total,
        "logits_sum": logit,
        "rows": tiny_pairs(40, TINY["vocab_size"], 3),
    }


def record(args: argparse.Namespace) -> None:
    """Run TRL and ours on the small data; write what TRL says (or, with `--check`, compare it with what is stored)."""
    args.threads, args.warmup = 1, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stored = tiny_setup(folder)
        stored["runs"] = {}
        answers = pairs.labelled(stored["rows"], RUNS["kto"]["batch"])
        stored["answers"] = pairs.strangers(answers, RUNS["kto"]["batch"])
        for run, settings in RUNS.items():
            module, read = (bench_kto, bench_kto.READ) if run == "kto" else (sys.modules[__name__], READ)
            args.steps = settings["steps"]
            rows = answers if run == "kto" else stored["rows"]
            job = pairs.job_of(folder, rows, **settings | {"steps": args.steps + 1, "output": str(folder / run)})
            same = lambda ours, trl, read=read: pairs.near(ours, trl, ("loss", *read), 1e-4)
            unit = "answers" if run == "kto" else "pairs"
            _, trl = harness.compare(str(module.__file__), run, job, args, unit, same)
            steps = [{k: s[k] for k in ("loss", *read)} for s in trl.steps]
            stored["runs"][run] = {"settings": settings, "steps": steps}
    if not args.check:
        FIXTURE.write_text(to_text(stored), encoding="utf-8")
        print(f"wrote {FIXTURE.relative_to(harness.ROOT)}, {FIXTURE.stat().st_size} bytes")
        return
    old = json.loads(FIXTURE.read_text(encoding="utf-8"))
    worst = max(
        abs(a[k] - b[k])
        for name, run in stored["runs"].items()
        for a, b in zip(run["steps"], old["runs"][name]["steps"], strict=True)
        for k in a
    )
    print(f"largest difference from the stored run: {worst:.1e}")
    if old["rows"] != stored["rows"] or worst >= 1e-5:
        raise SystemExit(f"{FIXTURE.relative_to(harness.ROOT)} isn't what TRL computes now")


def to_text(stored: dict[str, Any]) -> str:
    """JSON with one row, or one step, a line."""
    tables = {k: stored[k] for k in ("rows", "answers")}
    lines = {f"@{k}{i}": json.dumps(x) for k, table in tables.items() for i, x in enumerate(table)}
    runs = {}
    for name, run in stored["runs"].items():
        keys = [f"@{name}{i}" for i in range(len(run["steps"]))]
        lines |= dict(zip(keys, map(json.dumps, run["steps"])))
        runs[name] = run | {"steps": keys}
    short = {k: [f"@{k}{i}" for i in range(len(table))] for k, table in tables.items()}
    text = json.dumps(stored | short | {"runs": runs}, indent=1)
    for key, line in lines.items():
        text = text.replace(f'"{key}"', line, 1)
    return text + "\n"


def main() -> None:
    parser = harness.arguments(__doc__, steps=12, ways=WAYS)
    parser.add_argument("--task", choices=tuple(LR), default="hh", help="the model")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of matrix products, both sides")
    parser.add_argument("--batch", type=int, default=8, help="pairs a step")
    parser.add_argument("--record", action="store_true", help="write tests/data/dpo_run.json")
    parser.add_argument("--check", action="store_true", help="compare TRL with tests/data/dpo_run.json")
    args = parser.parse_args()
    if harness.worked(args, run_ours, run_trl):
        return
    if args.record or args.check:
        record(args)
    else:
        with tempfile.TemporaryDirectory() as name:
            compare(args, Path(name))


if __name__ == "__main__":
    main()
