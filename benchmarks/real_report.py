"""Tables and the figure of `real_science.py`, from the files that its runs left; what wasn't run isn't in them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

NAMES = {
    "before": "as it came", "sft": "SFT on right numbers", "dpo": "DPO, own right against own wrong", "kto": "KTO, own answers with thumbs",
    "grpo": "GRPO", "rloo": "RLOO", "ppo": "PPO", "sft_ppo": "SFT, then PPO",
}  # fmt: skip
Run = dict[str, Any]


def runs(out: Path, name: str) -> dict[int, Run]:
    """What was found, by seed."""
    found = {
        int(p.stem.rsplit("-", 1)[1]): json.loads(p.read_text(encoding="utf-8")) for p in out.glob(f"{name}-[0-9].json")
    }
    return dict(sorted(found.items()))


def share(right: float, asked: int, digits: int = 0) -> str:
    """A share with its 95 % interval."""
    from rlhf_nb.evaluate.policy import wilson_interval

    low, high = wilson_interval(right / asked, asked)
    return f"{100 * right / asked:.{digits}f} % [{100 * low:.{digits}f}, {100 * high:.{digits}f}]"


def each(values: Sequence[Any], form: str = "{}") -> str:
    """Values of the seeds, in order."""
    return ", ".join(form.format(v) for v in values)


def table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def hh_table(out: Path) -> str:
    """Reward models in five folds."""
    found = runs(out, "hh").get(0)
    if not found or "accuracy" not in found:
        return ""
    n, against, rows = found["pairs"], found["against_words"], []
    for side, a in sorted(found["accuracy"].items(), key=lambda item: -item[1]):
        gap = against.get(side)
        read = statistics.multimode(t["reads"] for t in found["folds"] if t["side"] == side) or [""]
        more = (
            "" if gap is None else f"{100 * gap['difference']:+.1f} [{100 * gap['low']:+.1f}, {100 * gap['high']:+.1f}]"
        )
        rows.append([side, read[0], share(a * n, n, 1), more])
    heads = ("reads", "most often chosen", f"right, {n} pairs", "points more than the bag of words")
    return table(heads, rows) + f"\nStates of all layers: {found['cpu']:.0f} CPU seconds, once.\n"


def method_table(out: Path) -> str:
    """Methods on word problems, and what was forgotten."""
    rows = []
    for name, title in NAMES.items():
        found = runs(out, name)
        if not found:
            continue
        after = [r if name == "before" else r["after"] for r in found.values()]
        asked, total = after[0]["asked"], sum(a["asked"] for a in after)
        texts = [[a["nats"][k] for a in after] for k in after[0]["nats"]]
        spent = [r.get("cpu", 0.0) + r.get("cpu_own", 0.0) + r.get("cpu_sft", 0.0) for r in found.values()]
        rows.append([
            title, each(found), f"{each([a['right'] for a in after])} of {asked}", share(sum(a["right"] for a in after), total),
            each([a["form"] for a in after]), each([a["kl"] for a in after], "{:.1f}"),
            *[each([math.exp(x) for x in t], "{:.1f}") for t in texts],
            each([a["facts"] for a in after]), each(spent, "{:.0f}") if name != "before" else "",
        ])  # fmt: skip
    if not rows:
        return ""
    texts = [f"perplexity, {k}" for k in after[0]["nats"]]
    heads = [
        "method",
        "seeds",
        "right answers",
        "all seeds [95 %]",
        "number only",
        "KL, nats",
        *texts,
        "facts of 40",
        "CPU seconds",
    ]
    return table(heads, rows) + "\n"


def cost_table(out: Path) -> str:
    """Seconds and memory of steps."""
    rows = []
    for name, title in NAMES.items():
        for seed, r in runs(out, name).items():
            if "cpu_steps" in r:
                cpu, wall = r["cpu_steps"], r["seconds_steps"]
                middle = statistics.median
                rows.append([
                    title, seed, r["steps"], f"{middle(cpu):.1f} ({min(cpu):.1f}–{max(cpu):.1f})", f"{middle(wall):.1f} ({min(wall):.1f}–{max(wall):.1f})",
                    f"{sum(wall) / 60:.1f}", f"{r['peak_gb']:.1f}", r["precision"],
                ])  # fmt: skip
    heads = ["method", "seed", "steps", "CPU seconds a step", "seconds a step", "minutes", "GB", "products in"]
    return table(heads, rows) + "\n" if rows else ""


def smooth(values: Sequence[float], width: int = 4) -> list[float]:
    """Means of neighbouring steps, without overlap."""
    return [statistics.mean(values[i : i + width]) for i in range(0, len(values), width)]


def curves(run: Run) -> dict[str, list[float]]:
    """√KL, gold and proxy over a run, four steps at a time."""
    get: Callable[[str], list[float]] = lambda key: [e[key] for e in run["events"]]
    kl = [math.sqrt(max(0.0, x)) for x in smooth(get("objective/kl"))]
    return {"distance": kl, "gold": smooth(get("rewards/gold")), "proxy": smooth(get("rewards/proxy"))}


def hack_table(out: Path) -> str:
    """Gold and proxy of runs that maximise the proxy."""
    rows = []
    for seed, r in runs(out, "hack").items():
        c, std = curves(r), r["gold_std_before"] or 1.0
        best = max(range(len(c["gold"])), key=lambda i: c["gold"][i])
        rows.append([
            seed, r["pairs"], f"{c['gold'][0]:.2f}", f"{c['gold'][best]:.2f} at √KL {c['distance'][best]:.1f}", f"{c['gold'][-1]:.2f} at √KL {c['distance'][-1]:.1f}",
            f"{(c['gold'][best] - c['gold'][-1]) / std:.2f}", f"{c['proxy'][0]:.2f} → {c['proxy'][best]:.2f} → {c['proxy'][-1]:.2f}", f"{r['cpu'] + r['reward']['cpu']:.0f}",
        ])  # fmt: skip
    heads = [
        "seed",
        "pairs",
        "gold, first steps",
        "best",
        "last",
        "lost, standard deviations",
        "proxy: first → at gold's best → last",
        "CPU seconds",
    ]
    return table(heads, rows) + "\n" if rows else ""


def draw(out: Path, folder: Path) -> None:
    """Gold and proxy against √KL, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = runs(out, "hack")
    fig, axes = plt.subplots(1, 2, figsize=(7, 2.8), dpi=90, sharex=True)
    for axis, key, color in zip(axes, ("proxy", "gold"), ("#ee6677", "#4477aa")):
        for seed, r in found.items():
            c = curves(r)
            axis.plot(c["distance"], c[key], color=color, lw=1.2, alpha=0.5 + 0.5 * (seed == min(found)), marker=".")
        axis.set(xlabel="√KL, √nats", title={"proxy": "what is maximised", "gold": "what was meant"}[key])
    fig.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    fig.savefig(folder / "over_optimisation_real.png")


def report(out: Path, figure: Path | None = None) -> None:
    """Print what there is."""
    titles = {
        "Reward model on HH-RLHF": hh_table,
        "Word problems": method_table,
        "Cost": cost_table,
        "A learnt reward, maximised": hack_table,
    }
    for title, make in titles.items():
        text = make(out)
        print(f"## {title}\n\n{text or 'not run'}\n")
    for name in ("gsm8k", "length"):
        for seed, r in runs(out, name).items():
            if "skipped" in r:
                print(f"{name}: {r['skipped']}")
            else:
                print(
                    f"{name}, seed {seed}: {share(r['before'], r['asked'])} → {share(r['after'], r['asked'])} of {r['asked']}, {r['cpu']:.0f} CPU s"
                )
    if figure is not None and runs(out, "hack"):
        draw(out, figure)
