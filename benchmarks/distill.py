"""Distillation on the toy world over three seeds: does the student get closer to its teacher?

    python benchmarks/distill.py            # about four minutes on two cores

The teacher is a toy model after 400 steps of supervised fine-tuning, the student one of another seed after 40. Each way of distilling makes
60 steps of 32 answers. Every student, however it was taught, is measured in the same way: it answers 64 held-out questions, and reverse KL (nats a
token, all tokens of the teacher) and agreement on the likeliest token are taken at the places its own answers lead to.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from typing import Any

from rlhf_nb import SFTConfig, SFTTrainer
from rlhf_nb.data import toy
from rlhf_nb.train.distill import DistillConfig, DistillTrainer

WAYS: dict[str, dict[str, Any]] = {
    "on-policy, reverse KL": {},
    "on-policy, forward KL": {"divergence": "forward_kl"},
    "on-policy, JS": {"divergence": "js"},
    "on-policy, reverse KL, top_k=8": {"top_k": 8},
    "off-policy, forward KL": {"on_policy": False, "divergence": "forward_kl"},
}


def tuned(folder: str, seed: int, steps: int) -> Any:
    """A toy model after supervised fine-tuning."""
    config = SFTConfig.preset(
        "toy", output_dir=f"{folder}/sft-{seed}", steps=steps, epochs=None, console=False, save_every=None, seed=seed
    )
    model = toy.build_model(seed)
    SFTTrainer(config, model, toy.build_tokenizer(), rows=toy.sft_rows(4000, seed=seed), eval_rows=[]).fit()
    return model


def main() -> None:
    tok, found = toy.build_tokenizer(), dict[str, list[dict[str, float]]]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(3):
            teacher, start = tuned(folder, 10 + seed, 400), tuned(folder, 20 + seed, 40)

            def trainer(
                name: str, student: Any, seed: int = seed, teacher: Any = teacher, **settings: Any
            ) -> DistillTrainer:
                more = {"top_k": None, "steps": 60, "console": False, "save_every": None, "seed": seed, **settings}
                config = DistillConfig.preset("toy", output_dir=f"{folder}/{seed}-{name}", **more)
                rows = toy.train_prompts(2048, seed) if config.on_policy else toy.sft_rows(2048, seed + 5)
                held = toy.test_prompts(64, 99) if config.on_policy else []
                return DistillTrainer(config, student, tok, rows, held, teacher=teacher)

            found.setdefault("before", []).append(trainer("judge", start).evaluate())
            for name, settings in WAYS.items():
                student = copy.deepcopy(start)
                trainer(name, student, **settings).fit()
                found.setdefault(name, []).append(trainer(f"{name}-judge", student).evaluate())
            print(seed, {k: {m: round(x, 3) for m, x in v[-1].items()} for k, v in found.items()}, flush=True)
    print("| taught | reverse KL, nats a token | agreement |\n|---|---|---|")
    for name, runs in found.items():
        cells = []
        for key in ("eval/divergence", "eval/agreement"):
            values = [r[key] for r in runs]
            cells.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
