"""Does the fit of gold against √KL know where gold will peak, and what does a stop by it lose?

Simulated: Gao's forms with normal noise; how often the interval of the peak holds the true one. Real: PPO on the toy world without a price of drift. The
fit sees the first half of each run and predicts the peak; the truth is where gold, averaged over nine steps, is highest. The rule `stop_on: overoptimised`
looks on, and its loss is counted against an oracle that stops at that highest place.

    python benchmarks/overopt.py                                   # simulations, and the curves of docs/figures/overopt.json
    python benchmarks/overopt.py --train --out docs/figures        # real runs again: a minute of CPU a seed
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_nb.run.overopt import GoldCurve, StopAtPeak, fit_gold

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
HOW: dict[str, Any] = {"kl_coef": 0.0}


def coverage(form: Any, runs: int, rng: np.random.Generator) -> tuple[int, int]:
    """Intervals that hold the true peak, and intervals that have an upper end, of simulated runs of 15 to 80 points."""
    held = closed = 0
    for _ in range(runs):
        n, alpha, beta, noise = (
            int(rng.integers(15, 81)),
            rng.uniform(0.5, 2),
            rng.uniform(0.2, 0.8),
            rng.uniform(0.05, 0.3),
        )
        peak = math.exp(alpha / beta - 1) if form == "rl" else alpha / (2 * beta)
        d = np.sort(rng.uniform(0.02, 1.0, n)) * peak * rng.uniform(0.5, 2.0)
        bent = np.log(d) if form == "rl" else d
        low, high = fit_gold(d**2, d * (alpha - beta * bent) + rng.normal(0, noise, n), form).interval
        held += low <= peak <= high
        closed += math.isfinite(high)
    return held, closed


def train(seed: int, steps: int) -> dict[str, Any]:
    """One PPO run of the toy world: KL, gold and proxy of each step."""
    import torch

    from rlhf_nb.data import toy
    from rlhf_nb.data.sources import tokenize_prompts
    from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
    from rlhf_nb.train.ppo import PPOTrainer

    torch.set_num_threads(1)
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"sft": {"epochs": 2.0}, "reward": {"epochs": 0.5}}
        pipeline = RLHFPipeline(PipelineConfig.preset("toy", output_dir=folder, console=False, seed=seed, **settings))
        for stage in (pipeline.base, pipeline.sft, pipeline.reward):
            stage()
        config = pipeline.stage_config("ppo").replace(**HOW, steps=steps, seed=seed, output_dir=f"{folder}/run")
        trainer = PPOTrainer(config, eval_rows=[], logged={"gold": toy.gold_reward})
        asked = trainer.method.collate(tokenize_prompts(toy.test_prompts(512, 7), trainer.method.tokenizer, 64))
        first = trainer.method.answers(asked)
        spread = float(np.std(toy.gold_reward(first.prompts, first.texts)))  # of the SFT model's answers
        history = trainer.fit()
    names = {"kl": "objective/kl", "gold": "rewards/gold", "proxy": "objective/scores"}
    row: dict[str, Any] = {k: [round(float(e[key]), 4) for e in history] for k, key in names.items()}
    print(f"seed {seed}: {time.process_time() - begin:.0f} CPU s", flush=True)
    return row | {"seed": seed, "std": round(spread, 4)}


def smooth(values: np.ndarray, half: int = 4) -> np.ndarray:
    """The average over nine steps, fewer at the ends."""
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def look(row: dict[str, Any]) -> dict[str, float]:
    """What the fit predicts of a run, and what really came; distances in √nats, losses in standard deviations of gold."""
    kl, gold = np.array(row["kl"]), np.array(row["gold"])
    truth, d, half = smooth(gold), np.sqrt(np.maximum(smooth(kl), 0)), len(kl) // 2
    best, fit = int(truth.argmax()), fit_gold(kl[:half], gold[:half])
    rule, curve = StopAtPeak(), GoldCurve()
    events = [
        {"step": i + 1, "objective/kl": k, "rewards/gold": g} for i, (k, g) in enumerate(zip(kl, gold, strict=True))
    ]
    end = next((i for i, e in enumerate(events) if rule._look(e)), len(kl) - 1)
    for e in events:
        curve.take(e)
    whole = curve.fit()
    return {
        "seed": row["seed"], "peak_step": best + 1, "peak": d[best], "half_reaches": d[half - 1], "predicted": fit.peak, "low": fit.interval[0], "high": fit.interval[1],
        "from_all": whole.peak if whole else math.nan, "stopped": end + 1, "loss": (truth.max() - truth[end]) / row["std"],
        "loss_without": (truth.max() - truth[-1]) / row["std"],
    }  # fmt: skip


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="real runs again")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=56)
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs of each form")
    parser.add_argument("--out", type=Path, default=FIGURES)
    args = parser.parse_args()
    for form in ("rl", "bon"):
        held, closed = coverage(form, args.runs, np.random.default_rng(0))
        print(
            f"{form}: the interval holds the true peak in {held} of {args.runs} ({held / args.runs:.1%}); {closed} have an upper end"
        )
    place = args.out / "overopt.json"
    if args.train:
        place.write_text(json.dumps([train(s, args.steps) for s in args.seeds]) + "\n", encoding="utf-8")
    rows = [look(r) for r in json.loads(place.read_text(encoding="utf-8"))] if place.exists() else []
    if rows:
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{v:.3g}" for v in row.values()) + " |")
    if rows:
        near = sum(abs(r["predicted"] / r["peak"] - 1) <= 0.25 for r in rows)
        print(
            f"predicted within 25 %: {near} of {len(rows)}; mean loss of the stop {np.mean([r['loss'] for r in rows]):.3f}, without {np.mean([r['loss_without'] for r in rows]):.3f}"
        )


if __name__ == "__main__":
    main()
