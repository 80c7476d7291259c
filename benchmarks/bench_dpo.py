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
import tempfile
from pathlib import Path
from typing import Any

import bench_kto
import harness
import pairs

WAYS = ("random", "grouped", "single", "cached", "cached-grouped", "cached-single")
LR = {"hh": 1e-4, "smollm2": 1e-6}
FIXTURE = harness.ROOT / "tests" / "data" / "dpo_run.json"
READ = {
    "margin": "rewards/margins",
    "chosen": "logps/chosen",
}  # what is compared besides the loss, and its name in a log


def touch(*models: Any) -> None:
    """Read all weights once, so that those mapped from a file are in memory before memory is measured."""
    for model in filter(None, models):
        for p in model.parameters():
            float(p.detach().sum())


def run_ours(job: dict[str, Any]) -> None:
    """Train with rlhf_nb, a step at each turn."""
    from rlhf_nb.config import ModelConfig
    from rlhf_nb.core import decide_precision
    from rlhf_nb.data.sources import MemorySource
    from rlhf_nb.models.load import disable_dropout, load_causal_lm, load_tokenizer
    from rlhf_nb.run.callbacks import Callback
    from rlhf_nb.run.loop import Trainer
    from rlhf_nb.train.dpo import DPO, DPOConfig
    from rlhf_nb.train.offline import make_reference, with_reference

    gate = harness.Gate()

    class Turns(Callback):
        def on_start(self, run: Any) -> None:
            touch(model, reference and reference.model)
            gate.ready()

        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            gate.step_done(loss=event["loss"], pairs=job["batch"], **{k: event[v] for k, v in READ.items()})

    config = DPOConfig(
        output_dir=job["output"], steps=job["steps"], epochs=None, mini_batch_size=job["batch"], token_budget=job["token_budget"],
        optimizer={"lr": job["lr"], "schedule": "constant", "warmup_steps": 0}, beta=job["beta"], reference="cached" if job["cached"] else "frozen",
        reference_cache=job["output"] + "-reference", precision=job["precision"], device="cpu", console=False,
    )  # fmt: skip
    where = ModelConfig(name_or_path=job["model"])
    tokenizer = load_tokenizer(where)
    model = disable_dropout(load_causal_lm(where, decide_precision("cpu", "fp32")))
    reference, rows = make_reference(config, model, tokenizer), job["rows"]
    if job["cached"]:
        assert reference is not None
        rows, reference = with_reference(rows, reference, config, DPO.reference_columns), None
    source = MemorySource(rows, shuffle=False)
    Trainer(DPO(model, tokenizer, config, reference), source, config, callbacks=[Turns()]).fit()


def run_trl(job: dict[str, Any]) -> None:
    """Train with TRL, a step at each turn."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    gate, parts, accumulate = harness.Gate(), [], job["accumulate"]

    class Turns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            touch(trainer.model, trainer.ref_model)
            gate.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            last = parts[-accumulate:]
            gate.step_done(pairs=job["batch"], **{k: sum(p[k] for p in last) / accumulate for k in last[0]})

    class Recorded(DPOTrainer):
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset  # tokenized already

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            logged = self._metrics["train"]
            parts.append({"loss": float(loss), **{k: logged[v][-1] for k, v in READ.items()}})
            return loss

    rows = [{k: r[k] for k in ("prompt_ids", "chosen_ids", "rejected_ids")} for r in job["rows"]]
    args = DPOConfig(
        output_dir=job["output"], max_steps=job["steps"], per_device_train_batch_size=job["batch"] // accumulate,
        gradient_accumulation_steps=accumulate, learning_rate=job["lr"], lr_scheduler_type="constant", beta=job["beta"], max_length=None,
        precompute_ref_log_probs=job["cached"], bf16=job["precision"] == "bf16", use_cpu=True, gradient_checkpointing=job["checkpointing"], report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential", dataloader_num_workers=0,
    )  # fmt: skip
    trainer = Recorded(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32"), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(job["model"]), callbacks=[Turns()],
    )  # fmt: skip
    trainer.train()


def compare(args: argparse.Namespace, folder: Path) -> None:
    """Speeds and memory in each of TRL's ways."""
    steps = min(args.steps, 5) if args.quick else args.steps
    orders, total = pairs.prepare(args.data, folder, args.batch, args.task), args.warmup + steps + 1
    for way in args.against or (("random", "cached") if args.quick else WAYS):
        rows = orders["grouped" if "grouped" in way else "random"][: args.batch * total]
        job = pairs.job_of(
            folder, rows, batch=args.batch, steps=total, threads=args.threads, token_budget=args.token_budget,
            cached="cached" in way, accumulate=args.batch if "single" in way else 1, precision=args.precision, lr=LR[args.task],
        )  # fmt: skip
        print(
            f"TRL {way}, {args.threads} threads, {args.precision}, {steps} steps each, in turn, our token budget {args.token_budget}"
        )
        with harness.workers(__file__, pairs.both(job, way, folder), args.threads) as (ours, trl):
            harness.alternate([ours, trl], args.warmup, steps)
        pairs.near(ours, trl, ("loss", *READ), 1e-4 if args.precision == "fp32" else 0.5)
        harness.show(ours, trl, args.warmup, "pairs", "pairs")


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


def record(check: bool, threads: int) -> None:
    """Run TRL and ours on the small data; write what TRL says (or, with `check`, compare it with what is stored)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stored = tiny_setup(folder)
        stored["runs"] = {}
        answers = pairs.labelled(stored["rows"], RUNS["kto"]["batch"])
        stored["answers"] = pairs.strangers(answers, RUNS["kto"]["batch"])
        for name, settings in RUNS.items():
            other = name == "kto"
            job = pairs.job_of(
                folder,
                answers if other else stored["rows"],
                threads=threads,
                **settings | {"steps": settings["steps"] + 1},
            )
            script, read = (bench_kto.__file__, bench_kto.READ) if other else (__file__, READ)
            with harness.workers(script, pairs.both(job, name, folder), threads) as (ours, trl):
                harness.alternate([ours, trl], 0, settings["steps"])
            print(name)
            pairs.near(ours, trl, ("loss", *read), 1e-4)
            steps = [{k: s[k] for k in ("loss", *read)} for s in trl.steps]
            stored["runs"][name] = {"settings": settings, "steps": steps}
    if not check:
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
    same = old["rows"] == stored["rows"] and worst < 1e-5
    print(f"largest difference from the stored run: {worst:.1e}")
    if not same:
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
    parser = harness.arguments(__doc__, steps=12)
    parser.add_argument("--task", choices=tuple(LR), default="hh", help="the model")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of matrix products, both sides")
    parser.add_argument("--batch", type=int, default=8, help="pairs a step")
    parser.add_argument("--token-budget", type=int, default=1024, help="ours: tokens in a forward")
    parser.add_argument(
        "--against",
        nargs="+",
        choices=WAYS,
        default=None,
        help="ways of TRL (default: all; random and cached when quick)",
    )
    parser.add_argument("--record", action="store_true", help="write tests/data/dpo_run.json")
    parser.add_argument("--check", action="store_true", help="compare TRL with tests/data/dpo_run.json")
    parser.add_argument("--data", type=Path, default=harness.HH)
    args = parser.parse_args()
    if harness.worked(args, run_ours, run_trl):
        return
    if args.record or args.check:
        record(args.check, 1)
    else:
        with tempfile.TemporaryDirectory() as name:
            compare(args, Path(name))


if __name__ == "__main__":
    main()
