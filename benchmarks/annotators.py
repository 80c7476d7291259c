"""Whom to believe: does `aggregate` find the poisoner, accuse anybody else, and get the labels right?

In each of the worlds of a row, sixteen honest, noisy users and one more (who makes 20 % of the judgements, to a taste of their own) choose
between answers of the park's guides; each pair is judged once. Gold knows who was right; neither users nor `aggregate` ask it.

    python benchmarks/annotators.py
    python benchmarks/annotators.py --tastes rude --worlds 100 --prompts 400
"""

from __future__ import annotations

import argparse
import random

import torch

from rlhf_nb.data import toy
from rlhf_nb.feedback.annotators import Aggregate, aggregate
from rlhf_nb.feedback.people import TASTES, simulate
from rlhf_nb.feedback.store import Feedback
from rlhf_nb.widgets.labels import Pair, make_pairs


def world(prompts: int, seed: int) -> list[Pair]:
    """Pairs of answers by the park's guides."""
    asked = [row["prompt"] for row in toy.train_prompts(prompts, seed=seed)]
    said = {
        name: [toy.speak(p, name, random.Random(f"{seed} {name} {i}")) for i, p in enumerate(asked)]
        for name in toy.PERSONAS
    }
    return make_pairs(asked, said, seed=seed)


def right(found: Aggregate) -> list[bool]:
    """For each row, whether the chosen answer has the higher gold; rows whose answers are equally good are left out."""
    gold = [toy.gold_reward([r["prompt"]] * 2, [r["chosen"], r["rejected"]]) for r in found.pairs]
    return [a > b for a, b in gold if a != b]


def stored(said: list[tuple[str, Feedback]]) -> list[Feedback]:
    """As a store gives it, names instead of hashes."""
    return [Feedback(**{**x.__dict__, "user": who, "id": f"{k:016x}"}) for k, (who, x) in enumerate(said)]


def main() -> None:
    """Print one line for each taste."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tastes", nargs="+", default=[*TASTES, "nobody"], choices=[*TASTES, "nobody"])
    parser.add_argument("--worlds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=380)
    parser.add_argument("--users", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for taste in args.tastes:
        caught = accused = 0
        pairs, robust, heads = list[int](), list[bool](), list[bool]()
        for seed in range(args.worlds):
            crowd = {"poison": 0.0} if taste == "nobody" else {"poison": 0.2, "taste": taste}
            said = stored(simulate(world(args.prompts, seed), users=args.users, seed=seed, **crowd))
            found = aggregate(said)
            names = {u.name for u in found.outliers}
            caught, accused = caught + ("mallory" in names), accused + len(names - {"mallory"})
            robust, heads = robust + right(found), heads + right(aggregate(said, robust=False))
            pairs.append(len({x.item for x in said}))
        print(
            f"{taste}: {args.worlds} worlds of {sum(pairs) / len(pairs):.0f} pairs; the poisoner found in {caught}, "
            f"{accused} of {args.worlds * args.users} honest users accused; labels right: {sum(robust) / len(robust):.1%}, "
            f"counting heads {sum(heads) / len(heads):.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
