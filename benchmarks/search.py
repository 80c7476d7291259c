"""Search with PPO's own critic against best-of-n at the same number of the policy's tokens, on the toy world.

For each seed: base, SFT, reward model, PPO; then the PPO policy answers held-out prompts plainly, by best-of-n with the reward model (the proxy), block by
block with the critic, and by tree search with the critic. Finished answers are compared by the reward model in all of them. Gold is what nobody saw.

    python benchmarks/search.py --worlds FOLDER            # trains what FOLDER lacks: about two minutes of CPU a seed
    python benchmarks/search.py --demo runs/demo           # the world that `rlhf-nb demo` left
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rlhf_nb.config import SamplingConfig
from rlhf_nb.data import toy
from rlhf_nb.decode.choose import best_of_n
from rlhf_nb.decode.decoder import Plain
from rlhf_nb.decode.search import MCTS, Guided, critic_scorer
from rlhf_nb.rewards.base import RewardModelFn, Rewards
from rlhf_nb.types import PromptBatch


def train(seed: int, place: Path, steps: int) -> None:
    """A world: policy and critic of PPO in `place`, the reward model below it."""
    from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
    from rlhf_nb.train.ppo import PPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        settings = {"sft": {"epochs": 2.0}, "reward": {"epochs": 0.5}}
        pipeline = RLHFPipeline(PipelineConfig.preset("toy", output_dir=folder, console=False, seed=seed, **settings))
        for stage in (pipeline.base, pipeline.sft, pipeline.reward):
            stage()
        config = pipeline.stage_config("ppo").replace(steps=steps, seed=seed, output_dir=f"{folder}/run")
        trainer = PPOTrainer(config)
        trainer.method.held_out = []
        trainer.fit()
        trainer.method.net.save(place, trainer.method.tokenizer)
        shutil.copytree(str(config.reward), place / "reward")


def compare(place: Path, reward: Path, seed: int, prompts: int, budgets: list[int]) -> list[dict[str, Any]]:
    """Rows of the table for one world."""
    from transformers import AutoModelForCausalLM

    from rlhf_nb.models.heads import RewardModel, ValueModel

    tok = toy.build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(place).eval()
    critic = critic_scorer(ValueModel.load(place / "critic"))
    proxy = Rewards(RewardModelFn(RewardModel.load(reward)))
    texts = list(dict.fromkeys(r["prompt"] for r in toy.test_prompts(4 * prompts, 11)))[:prompts]
    batch = PromptBatch.from_lists([tok(t)["input_ids"] for t in texts], prompts=texts)
    made: list[tuple[str, int, Any]] = [("plain", 1, Plain()), ("greedy", 1, Plain())]
    for n in budgets:
        made += [
            ("best-of-n, reward model", n, best_of_n(proxy, n)),
            ("guided by the critic, blocks of 4", n, Guided(critic, branch=n, block=4, reward=proxy)),
            ("MCTS with the critic", n, MCTS(critic, simulations=n, reward=proxy)),
        ]
    rows = []
    for name, n, decoder in made:
        begin = time.process_time()
        r = decoder.generate(
            model, batch, SamplingConfig(max_new_tokens=28), tokenizer=tok, seed=seed, greedy=name == "greedy"
        )
        spent, cost = time.process_time() - begin, decoder.cost
        gold = torch.tensor(toy.gold_reward(r.prompts, r.texts))
        rows.append({
            "seed": seed, "decoder": name, "n": n, "gold": float(gold.mean()), "±": float(gold.std() / len(gold) ** 0.5), "proxy": float(proxy(r)[0].mean()),
            "tokens": cost.tokens / cost.kept, "read": cost.read / cost.kept, "CPU s": spent,
        })  # fmt: skip
        print(f"  {name} {n}: gold {rows[-1]['gold']:.2f}", flush=True)
    return rows


def main() -> None:
    """Print a row for each decoder and seed, and means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--worlds", type=Path, help="folder of a world for each seed; what it lacks is trained")
    where.add_argument("--demo", type=Path, help="folder that `rlhf-nb demo` left: one world")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25, help="of PPO")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 16])
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if args.demo:
        rows += compare(args.demo / "ppo/model", args.demo / "reward/model", 0, args.prompts, args.budgets)
    for seed in [] if args.demo else args.seeds:
        place = args.worlds / str(seed)
        if not (place / "reward").exists():
            train(seed, place, args.steps)
        rows += compare(place, place / "reward", seed, args.prompts, args.budgets)
    names = [k for k in rows[0] if k not in ("seed", "decoder", "n")]
    print("| decoder | n | seeds, gold | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 3))
    for key in dict.fromkeys((r["decoder"], r["n"]) for r in rows):
        own = [r for r in rows if (r["decoder"], r["n"]) == key]
        means = [sum(r[k] for r in own) / len(own) for k in names]
        each = ", ".join(f"{r['gold']:.2f}" for r in own)
        print(f"| {key[0]} | {key[1]} | {each} | " + " | ".join(f"{m:.2f}" for m in means) + " |")


if __name__ == "__main__":
    main()
