"""What each trick of the fast path is worth: whole steps of DPO, GRPO and PPO, and decoding, with all of them and with one left out.

    python benchmarks/ablation.py [--only dpo grpo ppo decode] [--steps 8] [--threads 2] [--data FILE]

A Qwen2 of 12M parameters (hidden 384, 6 layers, vocabulary 8192), fp32, HH-RLHF prompts and pairs. Every variant runs in a process of its
own, all take steps in turn, and the first losses must agree. The table gives, for each trick, how much longer a step takes without it
(ratio of medians; in brackets the smallest and the largest ratio of two steps taken in turn), and the same for peak memory.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import harness
import pairs

TRICKS = {  # name: what is set instead, as "module:name"
    "all": "the switch: use_fast(False)",
    "blocks": "own forward pass of the blocks when scoring",
    "attention": "attention in blocks along prompts and answers",
    "trees": "prompts shared by several answers",
    "cores": "micro-batches and decoded rows on cores of their own",
    "decoder": "own decoder instead of `generate`",
    "packed": "weights laid out once for products of few rows",
    "prompts": "keys of common prompts asked together when decoding",
    "gradients": "the head's gradient added in place",
    "kept": "log-probs kept for the backward pass",
}
USED = {
    "dpo": ("all", "blocks", "attention", "trees", "cores", "gradients", "kept"),
    "grpo": ("all", "blocks", "attention", "trees", "cores", "decoder", "packed", "prompts", "gradients", "kept"),
    "ppo": ("all", "blocks", "attention", "cores", "decoder", "packed", "gradients", "kept"),
    "decode": ("decoder", "cores", "packed", "prompts"),
}


def leave_out(trick: str) -> None:
    """Switch one trick off in this process."""
    import os
    from contextlib import nullcontext

    import rlhf_nb.fast.decode as decode
    import rlhf_nb.fast.linear as linear
    import rlhf_nb.rollout.sampler as sampler
    import rlhf_nb.run.engine as engine
    import rlhf_nb.run.strategy as strategy
    import rlhf_nb.scoring.head as head
    import rlhf_nb.scoring.scores as scores

    def no(*args: Any, **options: Any) -> str:
        return "left out"

    def one(*args: Any, **options: Any) -> int:
        return 1

    def never(*args: Any, **options: Any) -> bool:
        return False

    if trick == "all":
        os.environ["RLHF_NB_FAST"] = "0"
    places: dict[str, list[tuple[Any, str, Any]]] = {
        "blocks": [(scores, "can_run", no)],
        "attention": [(scores, "branches_pay", never)],
        "trees": [(scores, "why_no_trees", no)],
        "cores": [(m, "workers_for", one) for m in (engine, scores, decode)],
        "decoder": [(sampler, "can_run", no)],
        "packed": [(linear, "pays_to_pack", never)],
        "prompts": [(decode, "SHARE_BYTES", float("inf"))],
        "gradients": [(strategy, "gradients_in_place", lambda *_: nullcontext())],
        "kept": [(head, "KEEP_LOGITS", 0)],
    }
    for module, name, value in places.get(trick, []):
        if not hasattr(module, name):
            raise SystemExit(f"{module.__name__} has no {name} any more: nothing would be left out")
        setattr(module, name, value)


def trainer_of(job: dict[str, Any], model: Any, tokenizer: Any, turns: Any) -> Any:
    """The trainer of a method on the job's rows."""
    from rlhf_nb import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer

    common: dict[str, Any] = {
        "output_dir": job["output"], "steps": job["steps"], "epochs": None, "device": "cpu", "precision": "fp32", "console": False,
        "token_budget": 1024, "optimizer": {"lr": 1e-6, "schedule": "constant", "warmup_steps": 0},
    }  # fmt: skip
    rows = job["rows"]
    if job["method"] == "dpo":
        config: Any = DPOConfig(mini_batch_size=8, rollout_batch_size=8, **common)
        return DPOTrainer(config, model, tokenizer, rows=rows, callbacks=[turns])
    prompts = [{"prompt": r["prompt"]} for r in rows]
    if job["method"] == "grpo":
        config = GRPOConfig(
            mini_batch_size=64, rollout_batch_size=64, num_generations=8, sampling={"max_new_tokens": 64}, **common
        )
        return GRPOTrainer(config, model, tokenizer, rows=prompts, reward=letters, callbacks=[turns])
    config = PPOConfig(
        mini_batch_size=32, rollout_batch_size=32, num_inner_epochs=1, sampling={"max_new_tokens": 48}, **common
    )
    return PPOTrainer(config, model, tokenizer, rows=prompts, reward=letters, callbacks=[turns])


def plain(text: str, marks: dict[str, str]) -> str:
    """A text with other marks of turns."""
    for old, new in marks.items():
        text = text.replace(old, new)
    return text


def letters(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Different letters of an answer: cheap, and different within a group."""
    return [len(set(text)) / 10 for text in completions]


def run_worker(job: dict[str, Any]) -> None:
    """One variant, a step at each turn."""
    leave_out(job["trick"])
    from rlhf_nb import load_model
    from rlhf_nb.run.callbacks import Callback

    gate = harness.Gate()
    harness.set_threads(job)
    model, tokenizer = load_model(job["model"])
    if job["method"] == "decode":
        decode_in_turns(gate, model, job)
        return

    class Turns(Callback):
        def on_start(self, run: Any) -> None:
            gate.ready()

        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            gate.step_done(loss=event["loss"])

    trainer_of(job, model, tokenizer, Turns()).fit()


def decode_in_turns(gate: harness.Gate, model: Any, job: dict[str, Any]) -> None:
    """64 answers to 8 prompts, 64 tokens each, at each turn."""
    from rlhf_nb import draw

    prompts = [ids for ids in job["prompts"][:8] for _ in range(8)]
    gate.ready()
    for step in range(job["steps"]):
        _, logps = draw(model, prompts, max_new_tokens=64, seed=step)
        gate.step_done(loss=float(sum(x.sum() for x in logps)))


def compare(method: str, folder: Path, rows: list[dict[str, Any]], prompts: list[list[int]], a: Any) -> None:
    """Print a line for each trick of one method."""
    job = {"side": "ours", "method": method, "model": str(folder / "model"), "rows": rows, "prompts": prompts}
    job |= {"steps": a.warmup + a.steps, "threads": a.threads}
    import sys

    jobs: dict[str, tuple[Path | str, dict[str, Any]]] = {
        trick: (sys.executable, job | {"trick": trick, "output": str(folder / f"{method}-{trick}")})
        for trick in ("", *USED[method])
    }
    jobs = {name or "full": x for name, x in jobs.items()}
    with harness.workers(__file__, jobs, a.threads) as sides:
        harness.alternate(sides, a.warmup, a.steps)
    full, *others = sides
    base = [s["seconds"] for s in full.steps[a.warmup :]]
    print(
        f"\n{method}: {statistics.median(base):.2f} s a step ({min(base):.2f} to {max(base):.2f}), peak {full.steps[-1]['peak']:.0f} MiB"
    )
    for other in others:
        seconds, cpu = ([s[k] for s in other.steps[a.warmup :]] for k in ("seconds", "cpu"))
        ratios = sorted(x / y for x, y in zip(seconds, base, strict=True))
        by_cpu = statistics.median(cpu) / statistics.median(s["cpu"] for s in full.steps[a.warmup :])
        memory = other.steps[-1]["peak"] / full.steps[-1]["peak"]
        off = abs(other.steps[0]["loss"] - full.steps[0]["loss"]) / max(abs(full.steps[0]["loss"]), 1e-3)
        print(
            f"  without {other.name:10s} {statistics.median(seconds) / statistics.median(base):5.2f}x "
            f"[{ratios[0]:.2f} to {ratios[-1]:.2f}], by CPU time {by_cpu:.2f}x, memory {memory:.2f}x; first loss off by {off:.0e}",
            flush=True,
        )


def main() -> None:
    parser = harness.arguments(__doc__, steps=8, threads=2)
    parser.add_argument("--only", nargs="+", choices=USED, default=list(USED))
    parser.add_argument("--data", type=Path, default=harness.HH)
    a = parser.parse_args()
    if a.worker:
        run_worker(json.loads(Path(a.worker[1]).read_text(encoding="utf-8")))
        return
    texts = harness.hh_pairs(a.data)
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        pairs.prepare(a.data, folder, 8)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        short = [p for p in texts if len(tokenizer(p["prompt"] + p["chosen"] + p["rejected"])["input_ids"]) < 400]
        marks = {
            "\n\nHuman:": "\nVisitor:",
            "\n\nAssistant:": "\nGuide:",
        }  # plain texts: this model has no chat template
        rows = [{k: plain(x, marks) for k, x in row.items()} for row in short[:512]]
        prompts = tokenizer([p["prompt"] for p in rows])["input_ids"]
        print("left out: " + "; ".join(f"{k}: {v}" for k, v in TRICKS.items()))
        for method in a.only:
            compare(method, folder, rows, prompts, a)


if __name__ == "__main__":
    main()
