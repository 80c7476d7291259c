"""How often is a rule that looks again and again wrong where nothing happens, and how soon is it right where something does?

Every rule of the package that looks repeatedly, on simulated runs: `stop_on: overoptimised` and the lights "reward" and "KL left" (all by `sequential.fall`),
and `decide`. Curves that never fall: flat, rising, saturating, with a jump up, with heavy tails, with few right-or-wrong answers, with
noise that grows, that is lopsided or remembers, short and long. Curves that fall, for the power.

    python tests/looks.py                          # 2,000 runs of each kind, a look after each of 500 points: about four minutes of CPU
    python tests/looks.py --runs 200 --looks 100
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlhf_nb.sequential import ALPHA, LEAST, bets, fall_evidence, log_wealth

Floats = NDArray[np.float64]
NOISE = 0.1  # of a value; a gain of 1 is ten of these
Curves = Callable[[np.random.Generator, int, int], Floats]  # (rng, runs, looks) → [runs, looks]


def around(truth: Callable[[Floats], Floats]) -> Curves:
    """Curves with normal noise around a truth, which is given the share of the run that is over."""
    return lambda rng, runs, looks: truth(np.arange(looks) / looks) + rng.normal(0, NOISE, (runs, looks))


def grows(rng: np.random.Generator, runs: int, looks: int) -> Floats:
    """Flat; the noise doubles in the course of the run."""
    return rng.normal(0, NOISE, (runs, looks)) * np.linspace(1, 2, looks)


def remembers(phi: float) -> Curves:
    """Flat; each point's error is phi times the one before it, and something new."""

    def draw(rng: np.random.Generator, runs: int, looks: int) -> Floats:
        x = rng.normal(0, NOISE, (runs, looks))
        x[:, 0] /= np.sqrt(1 - phi**2)
        for i in range(1, looks):
            x[:, i] += phi * x[:, i - 1]
        return x

    return draw


NEVER_FALL: dict[str, Curves] = {
    "flat": around(lambda t: 0 * t),
    "rising": around(lambda t: t),
    "saturating": around(lambda t: 1 - np.exp(-10 * t)),
    "a jump up": around(lambda t: (t > 0.3) * 1.0),
    "flat, heavy tails (t, 5 degrees of freedom)": lambda rng, runs, looks: rng.standard_t(5, (runs, looks)) * NOISE,
    "flat, means of 64 answers, 90 % right": lambda rng, runs, looks: rng.binomial(64, 0.9, (runs, looks)) / 64,
    "flat, means of 8 answers, 90 % right": lambda rng, runs, looks: rng.binomial(8, 0.9, (runs, looks)) / 8,
    "flat, noise that doubles": grows,
    "flat, errors that resemble the last one (0.3)": remembers(0.3),
    "flat, errors that resemble the last one (0.5)": remembers(0.5),
    "flat, errors that resemble the last one (0.8)": remembers(0.8),
    "flat, lopsided (log-normal, 0.5)": lambda rng, runs, looks: np.exp(rng.normal(0, 0.5, (runs, looks))),
}


def falls(depth: float) -> Curves:
    """Rises for a third of the run, then falls by `depth` to its end."""
    return around(lambda t: 1 - np.exp(-20 * t) - depth * np.maximum(t - 1 / 3, 0) * 1.5)


def first_alarms(curves: Floats, known: bool = False) -> NDArray[np.int64]:
    """Index of the first look at which a curve is said to have fallen; -1: never.

    Args:
        curves: [runs, looks], a look after each point.
        known: whether the standard error of each value is logged (then looks begin at the fourth one).
    """
    if len(curves) > 100:  # what fits a cache is faster
        return np.concatenate([first_alarms(part, known) for part in np.array_split(curves, len(curves) // 50)])
    first = np.full(len(curves), -1)
    for n in range(4 if known else LEAST, curves.shape[1] + 1):
        left = np.flatnonzero(first < 0)
        x = curves[left, :n]
        first[left[fall_evidence(x, NOISE if known else None) >= -np.log(ALPHA)]] = n - 1
    return first


def decided(rng: np.random.Generator, runs: int, looks: int, rate: float = 0.5) -> float:
    """Share of comparisons in which `decide` names a winner, a look after each of so many prompts; a tenth are ties."""
    x = np.where(rng.random((runs, looks)) < 0.1, 0.5, (rng.random((runs, looks)) < rate) * 1.0)
    up, down = log_wealth(x, 0.5, bets(x, ALPHA))
    return float((np.maximum(up, down) >= np.log(2 / ALPHA)).any(1).mean())


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--looks", type=int, default=500)
    args = parser.parse_args()
    rng, runs = np.random.default_rng(0), args.runs
    print(f"| curve that never falls | {args.looks} looks | 30 looks | 30 looks, errors logged |\n|---|---|---|---|")
    for name, draw in NEVER_FALL.items():
        cells = [(first_alarms(draw(rng, runs, looks)) >= 0).mean() for looks in (args.looks, 30)]
        normal = name in ("flat", "rising", "saturating", "a jump up")
        told = f"{(first_alarms(draw(rng, runs, 30), known=True) >= 0).mean():.1%}" if normal else "–"
        print(f"| {name} | {' | '.join(f'{c:.1%}' for c in cells)} | {told} |", flush=True)
    print("\n| looks | falls by (noise = 1) | seen | after a fall by (noise = 1), median |\n|---|---|---|---|")
    for looks in (30, 100, 300):
        for depth in (0.3, 0.6, 1.2):
            curves, truth = falls(depth)(rng, 400, looks), falls(depth)(np.random.default_rng(1), 4000, looks).mean(0)
            first = first_alarms(curves)
            late = (truth.max() - truth[first[first >= 0]]) / NOISE
            print(
                f"| {looks} | {depth / NOISE:.0f} | {(first >= 0).mean():.0%} | {f'{np.median(late):.1f}' if len(late) else '–'} |",
                flush=True,
            )
    print(
        f"\n`decide`, {args.looks} looks: {decided(rng, runs, args.looks):.1%} of equals; true rate 0.55: {decided(rng, runs, args.looks, 0.55):.0%}, 0.6: {decided(rng, runs, args.looks, 0.6):.0%}"
    )


if __name__ == "__main__":
    main()
