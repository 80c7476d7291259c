"""Does PPO learn, and can it overdo it? The toy world over several seeds.

For each seed: SFT and a reward model with the toy presets, then PPO for 100 rollouts of 128 with the default price of KL and with
none. Gold (the judge that no model sees) and proxy (the reward model) are measured on 512 held-out prompts along the way.

    python benchmarks/toy_science.py --seeds 0 1 2 --out docs/figures

CPU seconds are those of this process, with one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rlhf_nb.data import toy
from rlhf_nb.data.sources import tokenize_prompts
from rlhf_nb.evaluate.policy import win_rate
from rlhf_nb.models.load import load_causal_lm
from rlhf_nb.train.ppo import PPOConfig, PPOTrainer
from rlhf_nb.train.reward import RewardConfig, RewardTrainer
from rlhf_nb.train.sft import SFTConfig, SFTTrainer

ROLLOUTS, EVERY = 100, 5


def measure(ppo: PPOTrainer, prompts: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """Gold of each answer to the held-out prompts, and the means of gold, proxy and KL."""
    r = ppo.method.score(ppo.method.rollout(prompts, 10**6))
    gold = torch.tensor(toy.gold_reward(r.prompts, r.texts))
    kl = float(((r.old_logps - r.ref_logps) * r.completion_mask).sum() / len(r))
    return gold, {"gold": float(gold.mean()), "proxy": float(r.scores.mean()), "kl": kl}


def run_ppo(config: PPOConfig, model: str, tokenizer: Any, rm: Any, asked: int = 512) -> dict[str, Any]:
    """One PPO run with measurements along the way; `early` is after the preset's own number of rollouts (or the last one)."""
    from rlhf_nb.config import ModelConfig
    from rlhf_nb.core import decide_precision

    policy = load_causal_lm(ModelConfig(name_or_path=model), decide_precision("cpu"))
    rollouts = config.steps or ROLLOUTS
    early = min(rollouts, PPOConfig.preset("toy").steps or rollouts)
    ppo = PPOTrainer(config, policy, tokenizer, reward=rm, rows=toy.train_prompts(4096, config.seed), eval_rows=[])
    prompts = ppo.method.collate(tokenize_prompts(toy.test_prompts(asked, 7), tokenizer, 64))
    start, first = measure(ppo, prompts)
    curve, spent, out = [{"rollout": 0, **first}], 0.0, {"std": float(start.std())}
    for i in range(1, rollouts + 1):
        begin = time.process_time()
        ppo.train_step()
        spent += time.process_time() - begin
        if i % EVERY == 0 or i == early:
            gold, now = measure(ppo, prompts)
            curve.append({"rollout": i, **now})
            if i == early:
                out |= {
                    "win": win_rate(gold, start).rate,
                    "gain": (now["gold"] - first["gold"]) / out["std"],
                    "cpu_early": spent,
                }
    peak = max(c["gold"] for c in curve)
    return out | {"curve": curve, "cpu": spent, "fall": (peak - curve[-1]["gold"]) / out["std"]}


PRICES: dict[str, dict[str, float]] = {"default": {}, "kl_coef=0": {"kl_coef": 0.0}}


def one_seed(seed: int, folder: str, rollouts: int = ROLLOUTS) -> dict[str, Any]:
    """Everything for one seed.

    Args:
        seed: of all stages.
        folder: for what they write.
        rollouts: of PPO.
    """
    more: dict[str, Any] = {"seed": seed, "console": False}
    sft = SFTTrainer(SFTConfig.preset("toy", output_dir=f"{folder}/sft{seed}", **more))
    sft.fit()
    sft.method.save_model(f"{folder}/model{seed}")
    tokenizer = sft.method.tokenizer
    judged = RewardConfig.preset("toy", output_dir=f"{folder}/rm{seed}", **more)
    reward = RewardTrainer(judged, sft.method.model, tokenizer)
    accuracy = reward.fit().evals[-1]["eval/accuracy"]
    out: dict[str, Any] = {"seed": seed, "rm_accuracy": accuracy}
    for name in PRICES:
        config = PPOConfig.preset("toy", output_dir=f"{folder}/ppo{seed}{name}", steps=rollouts, **more, **PRICES[name])
        out[name] = run_ppo(config, f"{folder}/model{seed}", tokenizer, reward.members[0])
    return out


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Gold and proxy over rollouts, averaged over seeds, with and without a price of KL."""
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(8, 3), dpi=90, sharey=True)
    for axis, name in zip(axes, ("default", "kl_coef=0")):
        steps = sorted(set.intersection(*({c["rollout"] for c in r[name]["curve"]} for r in results)))
        for key, color in (("gold", "#4477aa"), ("proxy", "#ee6677")):
            lines = [[next(c[key] for c in r[name]["curve"] if c["rollout"] == s) for s in steps] for r in results]
            for line in lines:
                axis.plot(steps, line, color=color, lw=0.6, alpha=0.5)
            axis.plot(steps, [statistics.mean(x) for x in zip(*lines)], color=color, lw=2, label=key)
        axis.set(
            xlabel="rollouts of 128", title=f"kl_coef = {PPOConfig.preset('toy').kl_coef if name == 'default' else 0}"
        )
        axis.axhline(0, color="grey", lw=0.5)
    axes[0].legend(frameon=False)
    fig.tight_layout()
    path.mkdir(parents=True, exist_ok=True)
    fig.savefig(path / "over_optimisation.png")


def say(r: dict[str, Any], rollouts: int) -> None:
    """One seed in one line."""
    d = r["default"]
    line = f"seed {r['seed']}: RM accuracy {100 * r['rm_accuracy']:.0f} % | default: gold {d['gain']:+.2f} std, wins {100 * d['win']:.0f} %, "
    line += f"{d['cpu_early']:.0f} CPU s; after {rollouts} rollouts {d['fall']:.2f} std below its peak, {d['cpu']:.0f} CPU s"
    z = r["kl_coef=0"]
    late = [c["proxy"] for c in z["curve"][-6:]]
    line += f" | kl_coef 0: {z['fall']:.2f} std below its peak, proxy {late[0]:.2f} → {late[-1]:.2f} in the last {5 * EVERY} rollouts, {z['cpu']:.0f} CPU s"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=None, help="folder for the figure and the numbers")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            results.append(one_seed(seed, folder, args.rollouts))
        say(results[-1], args.rollouts)
    for name in results[0].keys() & PRICES.keys():
        mean = {key: statistics.mean(r[name][key] for r in results) for key in ("gain", "fall")}
        print(f"mean, {name}: {mean['gain']:+.2f} std, {mean['fall']:.2f} below its peak")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "toy_science.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        draw(results, args.out)


if __name__ == "__main__":
    main()
