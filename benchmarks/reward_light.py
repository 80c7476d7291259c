"""Does the "reward" light cry wolf, and does it see a wolf? False alarms and hits, on simulated runs and on real ones.

Simulated: gold rises (or stays flat) with the noise of 64 to 256 answers and never falls; or it rises and then falls. Real: PPO on the toy world at
a fair price of drift, and at none. The light looks after every step, as a dashboard does; one red step is an alarm. A hit is an alarm before gold has
lost half a standard deviation (of gold over the SFT model's answers) from its best, where the truth of a real run is its curve averaged over nine steps.

    python benchmarks/reward_light.py         # simulated, and the curves of docs/figures/reward_light.json, of 22 November 2026
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_nb.run.health import CHECKS, recent
from rlhf_nb.widgets.charts import Floats

LOSS = 0.5  # standard deviations
FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"


class Run(NamedTuple):
    """Curves as a run logs them, and what gold really did."""

    known: dict[str, tuple[Floats, Floats]]
    truth: Floats  # gold without noise at the gold curve's steps, in standard deviations
    key: str  # the gold curve's


Light = Callable[[Mapping[str, tuple[Floats, Floats]]], bool]


def red(known: Mapping[str, tuple[Floats, Floats]]) -> bool:
    """The package's light."""
    found = CHECKS["reward"](known, {})
    return found is not None and found[0] == "bad"


def newest_against_best(known: Mapping[str, tuple[Floats, Floats]]) -> bool:
    """What comes to mind first: the newest value lies below the best so far by a fifth of the gain, and the reward rose."""
    at, gold = next(known[k] for k in ("eval/gold", "rewards/gold") if k in known)
    steps, proxy = known["objective/scores"]
    if len(proxy) < 5 or len(gold) < 3:
        return False
    peak = int(gold.argmax())
    fell, gain = gold[peak] - gold[-1], max(gold[peak] - gold[0], 1e-9)
    rose = recent(proxy) > np.interp(at[peak], steps, proxy)
    return bool(peak < len(gold) - 1 and fell > 0.2 * gain and rose)


def alarms(run: Run, light: Light = red) -> list[int]:
    """Indices of the gold curve at which the light is red."""
    at = run.known[run.key][0]
    out = []
    for i, now in enumerate(at):
        known = {k: (s[s <= now], v[s <= now]) for k, (s, v) in run.known.items()}
        if light(known):
            out.append(i)
    return out


def simulate(rng: np.random.Generator, falls: bool) -> Run:
    """A run as `rewards/gold` at each step, or as `eval/gold` with its standard error at every second to fifth."""
    n, answers = int(rng.integers(20, 101)), int(rng.choice([64, 128, 256]))
    t = np.arange(1.0, n + 1)
    every = 1 if rng.random() < 0.5 else int(rng.integers(2, 6))
    gain, pace = rng.uniform(0, 1.5), rng.uniform(3, 25)
    truth = gain * (1 - np.exp(-t / pace))
    if falls:
        turn, lost = rng.uniform(0.15, 0.5) * n, rng.uniform(0.8, 2.0)
        truth = truth - lost * np.maximum(t - turn, 0) / (n - turn)
    scale, offset, error = rng.uniform(0.5, 3), rng.normal(), 1 / answers**0.5
    noisy = truth + rng.normal(0, error, n)
    proxy = 2 * (1 - np.exp(-t / pace)) + 0.01 * t + rng.normal(0, 0.06, n)
    picked = slice(every - 1, None, every)
    key = "rewards/gold" if every == 1 else "eval/gold"
    known = {"objective/scores": (t, proxy), key: (t[picked], (scale * noisy + offset)[picked])}
    if every > 1:
        known["eval/gold_stderr"] = (t[picked], np.full(len(t[picked]), scale * error))
    return Run(known, truth[picked], key)


def real(row: dict[str, Any]) -> Run:
    """A stored curve; its truth is the average over nine steps, fewer at the ends."""
    gold, t = np.array(row["gold"]) / row["std"], np.arange(1.0, len(row["gold"]) + 1)
    smooth = np.array([gold[max(0, i - 4) : i + 5].mean() for i in range(len(gold))])
    return Run(
        {"objective/scores": (t, np.array(row["proxy"])), "rewards/gold": (t, np.array(row["gold"]))},
        smooth,
        "rewards/gold",
    )


def lost_at(run: Run, light: Light = red) -> float | None:
    """Standard deviations that gold had lost at the first alarm; None without one."""
    found = alarms(run, light)
    return float(run.truth[: found[0] + 1].max() - run.truth[found[0]]) if found else None


def rates(runs: list[Run], light: Light, falling: bool) -> str:
    """One cell of the table."""
    if not falling:
        return f"{sum(bool(alarms(r, light)) for r in runs)} of {len(runs)}"
    losses = [lost_at(r, light) for r in runs]
    hits = sum(x is not None and x < LOSS for x in losses)
    late = sorted(x for x in losses if x is not None)
    return f"{hits} of {len(runs)}" + (
        f" (at the alarm, {late[len(late) // 2]:.2f} lost in the median)" if late else ""
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300, help="simulated runs of each kind")
    args = parser.parse_args()
    rows = json.loads((FIGURES / "reward_light.json").read_text(encoding="utf-8"))
    rng = np.random.default_rng(0)
    simulated = {f: [simulate(rng, f) for _ in range(args.runs)] for f in (False, True)}
    measured = {f: [real(r) for r in rows if (r["kind"] == "free") == f] for f in (False, True)}
    print("| runs | bar | the light | newest against best |\n|---|---|---|---|")
    for name, runs in (("simulated", simulated), ("PPO, toy world", measured)):
        for falling, bar in ((False, "≤ 2 %"), (True, "≥ 90 %" if runs is measured else "–")):
            what = "hits where gold falls" if falling else "false alarms where it doesn't"
            cells = " | ".join(rates(runs[falling], light, falling) for light in (red, newest_against_best))
            print(f"| {name}: {what} | {bar} | {cells} |")


if __name__ == "__main__":
    main()
