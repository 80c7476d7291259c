"""How often does a sweep of settings that do nothing call one of them worse, and how often does it see one that is?

Eight settings, two to five seeds, and a metric that is a share of 32 to 512 held-out questions, or a continuous number. Runs of all settings are drawn alike:
each question has a difficulty of its own, which all runs share, and a run is a little better or worse as a whole. With the score of each question kept (as
evaluations of answers, reward models and SFT keep it), and with the shares alone.

    python tests/null_sweeps.py                # 2,000 sweeps of each kind: about five minutes of CPU
    python tests/null_sweeps.py --sweeps 200
"""

from __future__ import annotations

import argparse

import numpy as np
from numpy.typing import NDArray

from rlhf_nb.pipeline.candidates import compare_all

SETTINGS = 8
PAIRS = SETTINGS * (SETTINGS - 1) // 2
Floats = NDArray[np.float64]


def answered(rng: np.random.Generator, questions: int, seeds: int, run_to_run: float, gain: float = 0.0) -> Floats:
    """Right or wrong, [settings, seeds, questions]; the first setting is better by `gain`, in log-odds."""
    odds = rng.logistic(size=questions) + run_to_run * rng.normal(size=(SETTINGS, seeds, 1))
    odds[0] += gain
    return (rng.random((SETTINGS, seeds, questions)) < 1 / (1 + np.exp(-odds))) * 1.0


def finds(values: Floats, questions: Floats | None) -> NDArray[np.bool_]:
    """Which pairs are called different by Holm's first step, [settings, settings]."""
    return compare_all(values, questions).p * PAIRS < 0.05


def share_of_sweeps(
    sweeps: int, questions: int, seeds: int, *, kept: bool, run_to_run: float = 0.3, gain: float = 0.0
) -> float:
    """Share of sweeps in which any pair is called different; with a gain, in which the better setting is told from a majority of the others.

    Args:
        questions: of an evaluation; 0: the metric is continuous.
        kept: whether each question's score is.
    """
    rng, count = np.random.default_rng([questions, seeds, kept, round(10 * gain), round(10 * run_to_run)]), 0
    for _ in range(sweeps):
        rows = answered(rng, questions, seeds, run_to_run, gain) if questions else None
        values = rng.normal(size=(SETTINGS, seeds)) if rows is None else rows.mean(2)
        found = finds(values, rows if kept else None)
        count += bool(found.any()) if gain == 0 else bool(found[0].sum() > SETTINGS // 2)
    return count / sweeps


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=2000)
    args = parser.parse_args()
    seeds, sizes = (2, 3, 4, 5), (32, 64, 128, 256, 512)
    print(
        f"| {args.sweeps} sweeps of settings that do nothing | "
        + " | ".join(f"{s} seeds" for s in seeds)
        + " |\n"
        + "|---" * 5
        + "|"
    )
    for words, kept, apart in (
        ("each kept", True, 0.0), ("each kept, runs differ by themselves", True, 0.3), ("shares alone", False, 0.0)
    ):  # fmt: skip
        for n in sizes:
            cells = [f"{share_of_sweeps(args.sweeps, n, s, kept=kept, run_to_run=apart):.1%}" for s in seeds]
            print(f"| {n} questions, {words} | {' | '.join(cells)} |", flush=True)
    cells = [f"{share_of_sweeps(args.sweeps, 0, s, kept=False):.1%}" for s in seeds]
    print(f"| a continuous metric | {' | '.join(cells)} |\n", flush=True)
    print(
        "| one setting is better by 0.1 to 0.2 of all questions (seen against most others) | "
        + " | ".join(f"{s} seeds" for s in seeds)
        + " |\n"
        + "|---" * 5
        + "|"
    )
    for n in (128, 512):
        for gain, words in ((0.6, "0.1"), (1.2, "0.2")):
            cells = [f"{share_of_sweeps(200, n, s, kept=True, run_to_run=0.1, gain=gain):.0%}" for s in seeds]
            print(f"| {n} questions, each kept, better by {words} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
