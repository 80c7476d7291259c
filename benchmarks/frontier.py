"""What does each preference loss buy, and for how much KL? Gold reward against KL on the toy world, PPO beside it.

For each seed: SFT with the toy preset, then every loss at several β on the same noisy pairs (single answers for KTO and BCO), and
PPO at several prices of KL. Gold (the judge that no model sees) and KL to the SFT model are measured on 1,024 held-out prompts, half-way
and at the end of each run.

    python benchmarks/frontier.py --seeds 0 1 2 --json FILE               # about half an hour; --all-betas: three times as long
    python benchmarks/frontier.py --quick --seeds 0                       # DPO, KTO and SimPO at their default β

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

from rlhf_nb.config import ModelConfig
from rlhf_nb.core import decide_precision
from rlhf_nb.data import toy
from rlhf_nb.data.sources import collate_prompts, tokenize_prompts
from rlhf_nb.evaluate.policy import evaluate
from rlhf_nb.losses.kto import UNPAIRED
from rlhf_nb.losses.preference import LOSSES
from rlhf_nb.models.adapters import Reference
from rlhf_nb.models.load import load_causal_lm
from rlhf_nb.train.dpo import DPOConfig, DPOTrainer
from rlhf_nb.train.kto import KTOConfig, KTOTrainer
from rlhf_nb.train.ppo import PPOConfig, PPOTrainer
from rlhf_nb.train.reward import RewardConfig, RewardTrainer
from rlhf_nb.train.sft import SFTConfig, SFTTrainer

SCALES = (0.3, 1.0, 3.0)  # of a loss's default β
SEVERAL = ("sigmoid", "ipo", "simpo", "kto")  # run at all of these; the others at their default
POINTS = 2  # measurements a run, the last one at its end
KL_COEFS = (0.05, 0.2)


def method_names() -> list[str]:
    """Every loss for pairs, then those for single answers."""
    return [*LOSSES, *UNPAIRED]


def default_beta(name: str) -> float:
    """β of a loss in the toy world: its own default."""
    return LOSSES[name].beta if name in LOSSES else float(KTOConfig.model_fields["beta"].default)


class World:
    """One seed's SFT model, and the measure that all runs share."""

    def __init__(self, seed: int, folder: str, prompts: int = 1024) -> None:
        self.seed, self.folder = seed, folder
        sft = SFTTrainer(SFTConfig.preset("toy", output_dir=f"{folder}/sft", seed=seed, console=False))
        sft.fit()
        sft.method.save_model(f"{folder}/model")
        self.tokenizer = sft.method.tokenizer
        self.reference = Reference(self.policy(), copy_model=False)
        rows = tokenize_prompts(toy.test_prompts(prompts, 7), self.tokenizer, 64)
        self.prompts = collate_prompts(rows, self.tokenizer.pad_token_id)
        self.start = self.measure(self.reference.model)

    def policy(self) -> Any:
        """A fresh copy of the SFT model."""
        return load_causal_lm(ModelConfig(name_or_path=f"{self.folder}/model"), decide_precision("cpu"))

    def measure(self, model: Any) -> dict[str, float]:
        """Gold, its standard deviation over answers, and KL to the SFT model."""
        found = evaluate(
            model, self.tokenizer, self.prompts, {"gold": toy.gold_reward}, self.reference,
            PPOConfig.preset("toy").sampling, seed=0,
        ).summary()  # fmt: skip
        return {k: found[k] for k in ("gold", "gold_std", "kl", "length")}

    def run(self, trainer: Any, model: Any, steps: int) -> dict[str, Any]:
        """Train, measuring on the way."""
        curve, spent = [], 0.0
        for i in range(1, steps + 1):
            begin = time.process_time()
            event = trainer.train_step()
            spent += time.process_time() - begin
            if i * POINTS // steps != (i - 1) * POINTS // steps:
                extra = {k: event[k] for k in ("rewards/accuracies", "logps/chosen") if k in event}
                curve.append({"step": i, **self.measure(model), **extra})
        gain = (curve[-1]["gold"] - self.start["gold"]) / self.start["gold_std"]
        return {"curve": curve, "gain": gain, "cpu": spent}

    def preference(self, name: str, beta: float, epochs: float, **over: Any) -> dict[str, Any]:
        """One loss at one β."""
        model = self.policy()
        kind = (KTOConfig, KTOTrainer) if name in UNPAIRED else (DPOConfig, DPOTrainer)
        config: Any = kind[0].preset(
            "toy", output_dir=f"{self.folder}/{name}{beta}", seed=self.seed, console=False, loss=name, beta=beta, epochs=epochs, **over
        )  # fmt: skip
        trainer: Any = kind[1](config, model, self.tokenizer)
        return {"method": name, "beta": beta, **self.run(trainer, model, trainer.total_steps)}

    def ppo(self, rm: Any, kl_coef: float) -> dict[str, Any]:
        """PPO at one price of KL."""
        model = self.policy()
        config = PPOConfig.preset(
            "toy", output_dir=f"{self.folder}/ppo{kl_coef}", seed=self.seed, console=False, kl_coef=kl_coef
        )
        trainer = PPOTrainer(
            config, model, self.tokenizer, reward=rm, rows=toy.train_prompts(4096, self.seed), eval_rows=[]
        )
        assert config.steps is not None
        return {"method": "ppo", "beta": kl_coef, **self.run(trainer, model, config.steps)}


def show(run: dict[str, Any]) -> str:
    """A run in a line."""
    last = run["curve"][-1]
    return f"{run['method']:18s} β {run['beta']:<7.3g} gold {last['gold']:5.2f} ({run['gain']:+.2f} std)  KL {last['kl']:5.2f}  {last['length']:4.1f} tokens  {run['cpu']:4.0f} CPU s"


def one_seed(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """All runs of a seed."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        world = World(seed, folder)
        print(f"seed {seed}: SFT gold {world.start['gold']:.2f} ± {world.start['gold_std']:.2f}", flush=True)
        for name in args.methods:
            for scale in args.scales if name in SEVERAL or args.all_betas else (1.0,):
                runs.append(world.preference(name, scale * default_beta(name), args.epochs, **args.over))
                print("  " + show(runs[-1]), flush=True)
        if args.ppo:
            config = RewardConfig.preset("toy", output_dir=f"{folder}/rm", seed=seed, console=False)
            reward = RewardTrainer(config, world.policy(), world.tokenizer)
            reward.fit()
            for coef in KL_COEFS:
                runs.append(world.ppo(reward.members[0], coef))
                print("  " + show(runs[-1]), flush=True)
    return {"seed": seed, "start": world.start, "runs": runs}


def gains(results: list[dict[str, Any]], method: str, beta: float) -> list[float]:
    """Final gain in SFT standard deviations of a method at a β, a number for each seed."""
    return [x["gain"] for r in results for x in r["runs"] if x["method"] == method and abs(x["beta"] / beta - 1) < 1e-6]


def table(results: list[dict[str, Any]]) -> str:
    """Method, β, gain, KL: means over seeds, with the worst seed."""
    lines = ["| method | β (PPO: kl_coef) | gold, SFT std | worst seed | KL, nats |", "|---|---|---|---|---|"]
    for x in results[0]["runs"]:
        found = gains(results, x["method"], x["beta"])
        kls = [
            y["curve"][-1]["kl"]
            for r in results
            for y in r["runs"]
            if (y["method"], y["beta"]) == (x["method"], x["beta"])
        ]
        lines.append(
            f"| {x['method']} | {x['beta']:.3g} | {statistics.mean(found):+.2f} | {min(found):+.2f} | {statistics.mean(kls):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=method_names(), choices=method_names(), metavar="LOSS")
    parser.add_argument("--scales", type=float, nargs="+", default=list(SCALES), help="of each loss's default β")
    parser.add_argument("--all-betas", action="store_true", help="every loss at all scales, not only the common ones")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=None, help="instead of the preset's")
    parser.add_argument("--no-ppo", dest="ppo", action="store_false")
    parser.add_argument("--quick", action="store_true", help="DPO, KTO and SimPO at their default β, no PPO")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    args.over = {} if args.lr is None else {"optimizer": {"lr": args.lr}}
    if args.quick:
        args.methods, args.scales, args.ppo = ["sigmoid", "kto", "simpo"], [1.0], False
    torch.set_num_threads(1)
    results = [one_seed(seed, args) for seed in args.seeds]
    print(table(results))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
