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
    "grpo": "GRPO", "rloo": "RLOO, price of drift 0.01", "rloo_free": "RLOO, no price", "ppo": "PPO", "sft_ppo": "SFT, then PPO",
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


def facts(after: Run, first: Run | None) -> str:
    """Right ones of the forty, and how many were lost and won against the model as it came."""
    from real_words import FACTS, fact_right

    if first is None:
        return str(after["facts"])
    was, now = ([fact_right(x, w) for x, (_, w) in zip(a["said"], FACTS)] for a in (first, after))
    lost, won = (sum(x and not y for x, y in zip(*sides)) for sides in ((was, now), (now, was)))
    return f"{after['facts']} (−{lost} +{won})"


def method_table(out: Path) -> str:
    """Methods on word problems, and what was forgotten."""
    rows, first = [], runs(out, "before").get(0)
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
            each([a["form"] for a in after]), each([f"{a['kl']:.1f} ± {a['kl_error']:.1f}" for a in after]),
            *[each([math.exp(x) for x in t], "{:.1f}") for t in texts],
            each([facts(a, None if name == "before" else first) for a in after]), each(spent, "{:.0f}") if name != "before" else "",
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
        "facts of 40 (lost, won)",
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


def format_table(out: Path) -> str:
    """GRPO and the toy world in two number formats."""
    rows: list[list[Any]] = []
    for name in ("grpo", "grpo_fp32"):
        if found := runs(out, name):
            after = [r["after"] for r in found.values()]
            thirds = [smooth([e["reward"] for e in r["events"]]) for r in found.values()]
            steps = [statistics.median(r["cpu_steps"]) for r in found.values()]
            form = {r["precision"] for r in found.values()}
            rows.append([
                f"GRPO on the chat model, {', '.join(sorted(form))}", each(found), f"{each([a['right'] for a in after])} of {after[0]['asked']}",
                "; ".join(each(t, "{:.2f}") for t in thirds), each(steps, "{:.1f}"), each([r["peak_gb"] for r in found.values()], "{:.1f}"),
            ])  # fmt: skip
    text = ""
    if rows:
        heads = [
            "run",
            "seeds",
            "right answers",
            "reward, four steps at a time; seed by seed",
            "CPU seconds a step",
            "GB",
        ]
        text += table(heads, rows) + "\n"
    rows = []
    for form in ("fp32", "bf16"):
        if found := runs(out, f"toy_{form}"):
            made = list(found.values())
            rows.append([
                f"toy world, {form}", each(found), each([100 * r["rm_accuracy"] for r in made], "{:.1f}"), each([r["default"]["gain"] for r in made], "{:+.2f}"),
                each([100 * r["default"]["win"] for r in made], "{:.0f}"), each([r["default"]["curve"][-1]["kl"] for r in made], "{:.2f}"), each([r["cpu"] for r in made], "{:.0f}"),
            ])  # fmt: skip
    if rows:
        heads = [
            "run",
            "seeds",
            "reward model, % of held-out pairs",
            "PPO: gold, in SFT standard deviations",
            "wins against SFT, %",
            "KL, nats",
            "CPU seconds",
        ]
        text += "\n" * bool(text) + table(heads, rows) + "\n"
    return text


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
        first, last = r["first"], r["last"]
        ends = {key: f"{first[key]:.2f} → {last[key]:.2f}" for key in ("gold", "proxy")}
        judged = lambda e: f"{e['pairs_right']} of {e['pairs_apart']}"
        rows.append([
            seed, r["pairs"], f"{ends['gold']} ± {last['gold_error']:.2f}", ends['proxy'], f"{judged(first)} → {judged(last)}", f"{last['kl']:.1f} ± {last['kl_error']:.1f}", f"{c['gold'][0]:.2f}", f"{c['gold'][best]:.2f} at √KL {c['distance'][best]:.1f}", f"{c['gold'][-1]:.2f} at √KL {c['distance'][-1]:.1f}",
            f"{(c['gold'][best] - c['gold'][-1]) / std:.2f}", f"{c['proxy'][0]:.2f} → {c['proxy'][best]:.2f} → {c['proxy'][-1]:.2f}", f"{r['cpu'] + r['reward']['cpu']:.0f}",
        ])  # fmt: skip
    heads = [
        "seed",
        "pairs",
        "gold of 128 fresh answers",
        "proxy of them",
        "of two answers, the proxy prefers gold's",
        "KL, nats",
        "in training: gold, first steps",
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


COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#222222", "#999933", "#bbbbbb")


def draw_methods(out: Path, folder: Path) -> None:
    """Right answers and what is left of the forty facts, against drift; a mark for each seed, with 95 % intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from rlhf_nb.evaluate.policy import wilson_interval

    fig, axes = plt.subplots(1, 2, figsize=(8, 4), dpi=90, sharex=True)
    for (name, title), color in zip(NAMES.items(), COLORS):
        for nth, r in enumerate(runs(out, name).values()):
            a = r.get("after", r)
            for axis, right, asked in ((axes[0], a["right"], a["asked"]), (axes[1], a["facts"], a["facts_asked"])):
                share = right / asked
                low, high = wilson_interval(share, asked)
                axis.errorbar(
                    a["kl"], 100 * share, yerr=[[100 * (share - low)], [100 * (high - share)]], xerr=1.96 * a["kl_error"],
                    fmt="o" if nth == 0 else "s" if nth == 1 else "^", ms=4.5, color=color, lw=0.8, label=title if nth == 0 else None,
                )  # fmt: skip
    for axis, title in zip(axes, ("held-out word problems, % right", "forty facts, % right")):
        axis.set(xlabel="KL to the model as it came, nats", title=title, ylim=(0, 100))
    fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=3, frameon=False, fontsize=8)
    fig.tight_layout(rect=(0, 0.2, 1, 1))
    folder.mkdir(parents=True, exist_ok=True)
    fig.savefig(folder / "real_methods.png")


def report(out: Path, figure: Path | None = None) -> None:
    """Print what there is."""
    titles = {
        "Reward model on HH-RLHF": hh_table,
        "Word problems": method_table,
        "Cost": cost_table,
        "A learnt reward, maximised": hack_table,
        "Number formats": format_table,
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
    if figure is not None and runs(out, "before"):
        draw_methods(out, figure)
    if figure is not None and runs(out, "hack"):
        draw(out, figure)
