"""Labels that a reward model needs when pairs are chosen by its doubts, against pairs drawn by lot (toy world).

    python benchmarks/labels.py --seeds 5

Of one pool of pairs, labelled by the toy world's noisy crowd, each arm buys labels round by round; after each round an
ensemble of three is trained anew on all that was bought and judged on other prompts against gold.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import warnings
from typing import Any

import torch

from rlhf_nb.core import derive_seed
from rlhf_nb.data import toy
from rlhf_nb.train.reward import RewardConfig, RewardTrainer
from rlhf_nb.widgets.collect import least_sure, pair_margins
from rlhf_nb.widgets.labels import Pair

BOUGHT = (60, 120, 200, 300, 450, 600)  # labels after each round


def asked(rows: list[dict[str, Any]]) -> list[Pair]:
    """Rows as pairs."""
    return [Pair(r["prompt"], r["chosen"], r["rejected"]) for r in rows]


def members(rows: list[dict[str, Any]], seed: int) -> Any:
    """An ensemble trained on some labels, with about as many steps whatever their number."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"output_dir": folder, "seed": seed, "steps": 100, "ensemble_size": 3, "console": False}
        config = RewardConfig.preset("toy", mini_batch_size=16, **settings)
        trainer = RewardTrainer(config, toy.build_model(seed, "tiny"), toy.build_tokenizer(), rows=rows)
        trainer.fit()
        return trainer.members


def curve(how: str, seed: int, pool: int = 1500, held: int = 600) -> list[float]:
    """Accuracy against gold after each round."""
    rows = toy.preference_rows(pool, seed=seed)
    test, tokenizer = asked(toy.preference_rows(held, seed=seed + 100, labels="gold", test=True)), toy.build_tokenizer()
    waiting, bought, found = list(range(len(rows))), list[int](), list[float]()
    random.Random(derive_seed("pool", seed)).shuffle(waiting)
    models: Any = None
    for n in BOUGHT:
        more = n - len(bought)
        if models is not None and how != "lot":
            order = least_sure(pair_margins(asked([rows[i] for i in waiting]), models, tokenizer), how=how)
            waiting = [waiting[i] for i in order]
        bought, waiting = bought + waiting[:more], waiting[more:]
        models = list(members([rows[i] for i in bought], seed))
        found.append((pair_margins(test, models, tokenizer).mean(0) > 0).double().mean().item())
    return found


def reached(accuracies: list[float], bar: float) -> float:
    """Labels at which a curve first reaches a bar, between rounds by a straight line; infinite: it doesn't."""
    for i, right in enumerate(accuracies):
        if right >= bar:
            before = accuracies[i - 1] if i else right
            share = (bar - before) / (right - before) if right > before else 1.0
            return BOUGHT[i] - (1 - share) * (BOUGHT[i] - BOUGHT[i - 1]) if i else float(BOUGHT[0])
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", default=["lot", "bald", "margin"])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for seed in range(given.seeds):
        curves = {how: curve(how, seed) for how in given.arms}
        bar = curves["lot"][-1]  # what the lot's last label buys
        for how, c in curves.items():
            need = reached(c, bar)
            told = f"{need:.0f} ({need / reached(curves['lot'], bar):.0%})" if need < float("inf") else "not reached"
            print(f"seed {seed} {how:>6}: {' '.join(f'{x:.3f}' for x in c)}  labels to {bar:.3f}: {told}", flush=True)


if __name__ == "__main__":
    main()
