"""Tables, fits and figures of `plane.py`, from the files that its runs leave."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from overopt import smooth

from rlhf_nb.run.overopt import Form, GoldFit, fit_gold

Floats = np.ndarray
COLORS = ("#4477aa", "#228833", "#ee6677")
TITLES = {"bon": "best-of-n", "ppo": "PPO", "grpo": "GRPO", "dpo": "DPO"}


@dataclass
class Curve:
    """A method against a reward model over seeds; gold and proxy in standard deviations of the answers at the start."""

    method: str
    size: str
    data: int
    seeds: list[int]
    d: list[Floats]  # √KL, for each seed
    gold: list[Floats]
    proxy: list[Floats]
    accuracy: list[float]  # of the reward model, on held-out pairs

    def fit(self) -> GoldFit | None:
        """Gao's form over all seeds; None: too few points."""
        if len(np.unique(np.concatenate(self.d))) < 4:
            return None
        form: Form = "bon" if self.method == "bon" else "rl"
        return fit_gold(np.concatenate(self.d) ** 2, np.concatenate(self.gold), form)

    def even(self, values: Floats) -> Floats:
        """Averages over five neighbours where points are steps of training, with noise of their own."""
        return smooth(values, 2) if self.method in ("ppo", "grpo") else values


def read(out: Path, world: str) -> list[Curve]:
    """All curves of the toy world ("toy_world") or of the chat model ("heads").

    Args:
        out: folder of the runs.
        world: run that knows the reward models.
    """
    found: dict[tuple[str, str, int], Curve] = {}
    before = "toy_" if world == "toy_world" else ""
    for path in sorted(out.glob(f"{world}-*.json")):
        seed = int(path.stem.rsplit("-", 1)[1])
        told = json.loads(path.read_text(encoding="utf-8"))
        for name, about in told["proxies"].items():
            size, data = name.rsplit("_", 1)
            runs = {"bon": about}
            for method in ("ppo", "grpo", "dpo"):
                for key in (f"{before}{method}_{name}", f"{before}{method}_{data}"):
                    made = out / f"{key}-{seed}.json"
                    if made.exists() and (size == "small" or key.endswith(name)):
                        runs[method] = json.loads(made.read_text(encoding="utf-8"))
            for method, run in runs.items():
                c = found.setdefault((method, size, int(data)), Curve(method, size, int(data), [], [], [], [], []))
                c.seeds.append(seed)
                c.accuracy.append(about["accuracy"])
                c.d.append(np.sqrt(np.maximum(c.even(np.array(run["kl"])), 0.0)))
                c.gold.append((np.array(run["gold"]) - told["gold_mean"]) / told["gold_std"])
                c.proxy.append((np.array(run["proxy"]) - about["proxy_mean"]) / about["proxy_std"])
    return sorted(found.values(), key=lambda c: (list(TITLES).index(c.method), c.data))


def mean_of(values: list[float], form: str = "{:+.2f}") -> str:
    """Mean, and the smallest and largest seed where there are several."""
    text = form.format(float(np.mean(values)))
    return text if len(values) == 1 else f"{text} ({form.format(min(values))} to {form.format(max(values))})"


def peak_of(c: Curve) -> str:
    """What the fit says of gold's peak, in nats."""
    fit = c.fit()
    if fit is None:
        return "too few points"
    low, high = fit.interval
    if not math.isfinite(fit.peak) or not math.isfinite(high):
        return f"none told up to {fit.reached**2:.1f}"
    beyond = ", beyond what was reached" if fit.peak > fit.reached else ""
    return f"{fit.peak**2:.1f} [{low**2:.1f}, {high**2:.1f}]{beyond}"


def table(curves: list[Curve]) -> str:
    """A row for each curve: gold at its best and at the end, how far that is, and what the fit says."""
    heads = ["method", "reward model", "pairs", "its held-out pairs in gold's order, %", "gold at its best", "at a KL of", "gold at the end", "proxy there", "KL there", "peak by the fit, nats"]  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for c in curves:
        gold, proxy = [c.even(g) for g in c.gold], [c.even(p) for p in c.proxy]
        best = [int(g.argmax()) for g in gold]
        cells = [
            TITLES[c.method], c.size, str(c.data), mean_of([100 * a for a in c.accuracy], "{:.0f}"),
            mean_of([g[i] for g, i in zip(gold, best)]), mean_of([d[i] ** 2 for d, i in zip(c.d, best)], "{:.1f}"),
            mean_of([g[-1] for g in gold]), mean_of([p[-1] for p in proxy]), mean_of([d[-1] ** 2 for d in c.d], "{:.1f}"), peak_of(c),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def panel(axis: Any, curves: list[Curve], names: list[str], title: str) -> None:
    """Gold's points with their fit where it bends, proxy dashed, over √KL; a triangle where the fit has its peak."""
    for c, name, color in zip(curves, names, COLORS):
        for d, gold, proxy in zip(c.d, c.gold, c.proxy):
            order = np.argsort(d)
            axis.plot(d[order], c.even(proxy)[order], "--", color=color, lw=0.8, alpha=0.5)
            axis.plot(d, gold, ".", color=color, ms=2.5, alpha=0.4)
        fit = c.fit()
        if fit is None:
            continue
        if not math.isfinite(fit.peak):  # the form says nothing of what doesn't bend
            for i, (d, gold) in enumerate(zip(c.d, c.gold)):
                order = np.argsort(d)
                axis.plot(d[order], c.even(gold)[order], color=color, lw=1.2, label=name if i == 0 else None)
            continue
        x = np.linspace(0, fit.reached, 100)
        axis.plot(x, fit.value(x), color=color, lw=1.8, label=name)
        if fit.peak <= fit.reached:
            axis.plot([fit.peak], fit.value(fit.peak), "v", color=color, ms=7)
    axis.axhline(0, color="grey", lw=0.5)
    axis.set_title(title, fontsize=9)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=7)


def figure(curves: list[Curve], place: Path) -> None:
    """By data, by size, and the methods on one plane.

    Args:
        curves: of one world.
        place: of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    sizes, data = list(dict.fromkeys(c.size for c in curves)), sorted({c.data for c in curves})
    middle, trained = sizes[1 if len(sizes) > 1 else 0], [m for m in TITLES if any(c.method == m for c in curves)]
    pick = lambda **want: [c for c in curves if all(getattr(c, k) == v for k, v in want.items())]
    shown: list[tuple[list[Curve], list[str], str]] = []
    for m in trained:
        found = pick(method=m, size=middle)
        shown.append((found, [f"{c.data} pairs" for c in found], f"{TITLES[m]}, reward model {middle}"))
    for m in trained:
        found = sorted(pick(method=m, data=data[1]), key=lambda c: sizes.index(c.size))
        if len(found) > 1:
            shown.append((found, [c.size for c in found], f"{TITLES[m]}, {data[1]} pairs"))
    found = pick(size=middle, data=data[1])
    shown.append((found, [TITLES[c.method] for c in found], f"all, reward model {middle}, {data[1]} pairs"))
    fig, axes = plt.subplots(2, -(-len(shown) // 2), figsize=(2.9 * -(-len(shown) // 2), 5), dpi=85, squeeze=False)
    for axis, what in zip(axes.flat, shown):
        panel(axis, *what)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_visible(False)
    for axis in axes[-1]:
        axis.set_xlabel("√KL, √nats", fontsize=8)
    axes[0][0].set_ylabel("gold (solid), proxy (dashed), std", fontsize=8)
    fig.tight_layout()
    place.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(place)
    plt.close(fig)


def report(out: Path, figures: Path | None = None) -> None:
    """Print what there is, and draw it.

    Args:
        out: folder of the runs.
        figures: folder for the pictures; None: none are drawn.
    """
    for title, world, name in (("Toy world", "toy_world", "plane_toy"), ("Chat model", "heads", "plane_real")):
        curves = read(out, world)
        print(f"## {title}\n\n{table(curves) if curves else 'not run'}\n")
        if curves and figures is not None:
            figure(curves, figures / f"{name}.png")
    spent = [json.loads(p.read_text(encoding="utf-8")).get("cpu", 0.0) for p in sorted(out.glob("*-*.json"))]
    print(f"{len(spent)} runs, {sum(spent):.0f} CPU seconds")
