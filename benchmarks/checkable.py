"""Answers that can be checked: does GRPO learn them, does RLOO? The toy world over several seeds.

For each seed: SFT with the toy preset, then each method on sums of legs ("How many legs do three owls and two wolves have?") and
on questions for one fact only, rewarded with 1 for a right answer. Accuracy is measured on 512 held-out questions.

    python benchmarks/checkable.py --seeds 0 1 2

CPU seconds are those of this process, with one thread.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from typing import Any

import torch

from rlhf_nb.data import toy
from rlhf_nb.data.sources import collate_prompts, tokenize_prompts
from rlhf_nb.evaluate.policy import evaluate
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer
from rlhf_nb.train.rloo import RLOOConfig, RLOOTrainer
from rlhf_nb.train.sft import SFTConfig, SFTTrainer

TASKS = {"sum": "sums of legs", "one": "one fact only"}
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (GRPOConfig, GRPOTrainer, {"num_generations": 8}),
    "rloo": (RLOOConfig, RLOOTrainer, {"num_generations": 8, "kl_coef": 0.01}),
}


def accuracy(model: Any, tokenizer: Any, kind: str, sampling: Any) -> float:
    """Share of right answers to 512 questions that training never asks."""
    rows = tokenize_prompts(toy.test_prompts(512, 7, [kind]), tokenizer, 64)
    prompts = collate_prompts(rows, tokenizer.pad_token_id)
    return evaluate(model, tokenizer, prompts, {"right": toy.check_answer}, None, sampling).means["right"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, nargs=2, default=[60, 40], metavar=("SUM", "ONE"))
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            sft = SFTTrainer(SFTConfig.preset("toy", output_dir=f"{folder}/sft", seed=seed, console=False))
            sft.fit()
            base, tokenizer = sft.method.model, sft.method.tokenizer
            for name, (config_class, trainer_class, settings) in METHODS.items():
                for kind, steps in zip(TASKS, args.steps):
                    config = config_class.preset(
                        "toy", output_dir=f"{folder}/{name}{kind}", seed=seed, console=False, steps=steps,
                        optimizer={"lr": args.lr}, **settings,
                    )  # fmt: skip
                    model = copy.deepcopy(base)
                    before = accuracy(model, tokenizer, kind, config.sampling)
                    trainer = trainer_class(
                        config, model, tokenizer, toy.check_answer, toy.train_prompts(2048, seed, [kind]), []
                    )
                    begin = time.process_time()
                    for _ in range(steps):
                        trainer.train_step()
                    spent = time.process_time() - begin
                    after = accuracy(model, tokenizer, kind, config.sampling)
                    found.setdefault((name, kind), []).append((before, after, spent))
                    print(
                        f"seed {seed} {name:5s} {TASKS[kind]:13s}: {before:4.0%} → {after:4.0%} in {spent:.0f} CPU s",
                        flush=True,
                    )
    for (name, kind), runs in found.items():
        gains = [100 * (after - before) for before, after, _ in runs]
        print(
            f"{name:5s} {TASKS[kind]:13s}: {statistics.mean(gains):+.0f} points (worst {min(gains):+.0f}), "
            f"at the end {min(after for _, after, _ in runs):.0%} or more, at most {max(s for *_, s in runs):.0f} CPU s"
        )


if __name__ == "__main__":
    main()
