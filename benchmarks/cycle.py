"""Does the circle make a model better when a fifth of the feedback is poison? The toy world, where gold is known and the circle never asks it.

For each seed a model is fine-tuned (the toy preset) and answers visitors' questions, two answers each. Sixteen honest, noisy users and
one poisoner (who always prefers the answer of lower gold and makes 20 % of the judgements) choose; each pair is judged once. One turn of
`rlhf-nb cycle` follows. Gold of the current version is measured on questions that nobody asked, before and after: robust aggregation,
counting heads, and without poison.

    python benchmarks/cycle.py --seeds 0 1 2
    python benchmarks/cycle.py --seeds 0 --arms robust --learn ppo
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rlhf_nb.config import SamplingConfig
from rlhf_nb.data import toy
from rlhf_nb.feedback.annotators import aggregate
from rlhf_nb.feedback.people import simulate
from rlhf_nb.feedback.store import FeedbackStore
from rlhf_nb.feedback.versions import Versions
from rlhf_nb.models.load import load_model, save_model
from rlhf_nb.pipeline.cycle import CycleConfig, run_cycle
from rlhf_nb.train.sft import SFTConfig
from rlhf_nb.train.stage import run_stage
from rlhf_nb.widgets.labels import answers_of, make_pairs

SAMPLING = SamplingConfig(max_new_tokens=48)


def gold_of(folder: str | Path, n: int) -> tuple[float, float]:
    """Mean gold of answers to held-out questions, and its standard error."""
    asked = [row["prompt"] for row in toy.test_prompts(n, seed=7)]
    said = answers_of(*load_model(str(folder), device="cpu"), SAMPLING, seed=11, n=2)(asked)
    means = torch.tensor([sum(toy.gold_reward([q] * 2, both)) / 2 for q, both in zip(asked, said)])
    return float(means.mean()), float(means.std() / len(means) ** 0.5)


def right_share(rows: list[dict[str, Any]]) -> float:
    """Share of rows whose chosen answer has the higher gold."""
    gaps = [
        a - b for r in rows for a, b in [toy.gold_reward([r["prompt"]] * 2, [r["chosen"], r["rejected"]])] if a != b
    ]
    return sum(g > 0 for g in gaps) / max(1, len(gaps))


def turn(arm: str, place: Path, start: Path, pairs: list[Any], args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """One turn of the circle on feedback of its own."""
    store = FeedbackStore(place / arm / "feedback.jsonl")
    for who, said in simulate(
        pairs, users=args.users, poison=0.0 if arm == "clean" else args.poison, taste=args.taste, seed=seed
    ):
        store.add(who, said)
    found = aggregate(store.standing(), robust=arm != "heads")
    begin = time.process_time()
    settings: dict[str, Any] = {"reward": {"epochs": 4.0}, "dpo": {"epochs": 2.0}}
    if args.learn == "ppo":
        settings["ppo"] = {"data": {"path": "toy", "eval_size": None}}
    config = CycleConfig(
        feedback=str(store.path), models=str(place / arm / "models"), start=str(start), learn=args.learn, toy=True, device="cpu",
        console=False, seed=seed, robust=arm != "heads", **settings,
    )  # fmt: skip
    done = run_cycle(config, print)
    gold, error = gold_of(Versions(config.models).folder / "current", args.held_out)
    return {
        "arm": arm, "event": done.event, "gold": round(gold, 3), "stderr": round(error, 3), "labels right": round(right_share(found.pairs), 3),
        "outliers": len(found.outliers), "pairs": len(found.pairs), "cpu_s": round(time.process_time() - begin, 1), "reason": done.reason,
    }  # fmt: skip


def main() -> None:
    """Run all seeds and print one JSON line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=["robust", "heads", "clean"])
    parser.add_argument("--learn", choices=["dpo", "ppo"], default="dpo")
    parser.add_argument("--prompts", type=int, default=1200)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--poison", type=float, default=0.2)
    parser.add_argument("--taste", default="contrary")
    parser.add_argument("--held-out", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            save_model(toy.build_model(seed), toy.build_tokenizer(), place / "untrained")
            made = {"output_dir": str(place / "sft"), "model": {"name_or_path": str(place / "untrained")}, "seed": seed}
            start = run_stage(SFTConfig.preset("toy", console=False, device="cpu", **made)).model
            asked = [row["prompt"] for row in toy.train_prompts(args.prompts, seed=100 + seed)]
            model, tokenizer = load_model(str(start), device="cpu")
            pairs = make_pairs(asked, {"v1": answers_of(model, tokenizer, SAMPLING, seed=seed, n=2)}, seed=seed)
            gold, error = gold_of(start, args.held_out)
            print(
                json.dumps(
                    {"seed": seed, "arm": "without feedback", "gold": round(gold, 3), "stderr": round(error, 3)}
                ),
                flush=True,
            )
            for arm in args.arms:
                print(json.dumps({"seed": seed, **turn(arm, place, start, pairs, args, seed)}), flush=True)


if __name__ == "__main__":
    main()
