"""The toy half of `plane.py`: reward models of three sizes and three data sizes, best-of-n, PPO and DPO, all from one SFT policy a seed."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from rlhf_nb.data import toy
from rlhf_nb.decode.choose import best_of_curve, best_of_kl

SIZES, DATA = ("tiny", "small", "medium"), (60, 250, 1000)  # reward models, and the pairs that they learn from
STEPS = {60: 20, 250: 30, 1000: 64}  # of a reward model, 32 pairs each
SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # n of best-of-n
PROMPTS, DRAWS, SAME = 96, 64, {"console": False, "token_budget": 4096}


def best_of(scores: Any, gold: Any) -> dict[str, list[float]]:
    """Best-of-n from one draw, for several n: KL, gold and proxy, with the proxy's mean and standard deviation.

    Args:
        scores: [prompts, draws], of the proxy.
        gold: likewise.
    """
    draws = scores.shape[1]
    sizes = [n for n in SHOWN if n <= draws]
    value, chosen = (best_of_curve(scores, x).mean(0).tolist() for x in (gold, scores))
    kl = [float(best_of_kl(scores[:, : draws // n * n].reshape(-1, n)).mean()) for n in sizes]
    return {
        "n": sizes, "kl": kl, "gold": [value[n - 1] for n in sizes], "proxy": [chosen[n - 1] for n in sizes],
        "proxy_mean": float(scores.mean()), "proxy_std": float(scores.std()),
    }  # fmt: skip


def _drawn(lab: Any, model: Any, tokenizer: Any, prompts: Any, n: int, name: str) -> Any:
    """A rollout of n answers to each prompt, those of one prompt next to each other."""
    from rlhf_nb.core import derive_seed
    from rlhf_nb.data.sources import prompt_batch
    from rlhf_nb.rollout.backends import make_sampler
    from rlhf_nb.train.ppo import PPOConfig

    sampling, asked = PPOConfig.preset("toy").sampling, prompt_batch(tokenizer, [p["prompt"] for p in prompts])
    return make_sampler(sampling).generate(
        model, asked, sampling, tokenizer=tokenizer, seed=derive_seed(lab.seed, name), num_samples=n
    )


def _pairs(lab: Any, model: Any, tokenizer: Any, n: int, test: bool) -> list[dict[str, Any]]:
    """Pairs of the policy's own answers in gold's order, in the order of their drawing."""
    ask = toy.test_prompts if test else toy.train_prompts
    prompts = ask(n + n // 2, lab.seed)
    texts = _drawn(lab, model, tokenizer, prompts, 2, f"pairs {test}").texts
    made = toy.preferences_from_samples([p["prompt"] for p in prompts], texts[0::2], texts[1::2], lab.seed, "gold")
    random.Random(lab.seed).shuffle(made)
    return made[:n]


def world(lab: Any) -> dict[str, Any]:
    """The policy, the nine reward models, and best-of-n by each of them from one draw."""
    from rlhf_nb.train.reward import RewardConfig, RewardTrainer
    from rlhf_nb.train.sft import SFTConfig, SFTTrainer

    began, home, few = (
        time.process_time(),
        Path(fresh(folder(lab))),
        {"steps": 4, "epochs": None} if lab.tiny else {"epochs": 1.5},
    )
    bodies, tokenizer = {}, toy.build_tokenizer()
    for size in SIZES:
        config = SFTConfig.preset("toy", output_dir=f"{home}/sft-{size}", seed=lab.seed, console=False, **few)
        trainer = SFTTrainer(config, toy.build_model(lab.seed, size), tokenizer)
        trainer.fit()
        bodies[size] = trainer.method.model
        trainer.method.save_model(f"{home}/sft-{size}/model")
    policy = bodies["small"]
    pairs, held = (_pairs(lab, policy, tokenizer, n, test) for n, test in ((max(DATA), False), (256, True)))
    prompts = toy.test_prompts(8 if lab.tiny else PROMPTS, 7)
    n = 8 if lab.tiny else DRAWS
    answers = _drawn(lab, policy, tokenizer, prompts, n, "best of n")
    gold = torch.tensor(toy.gold_reward(answers.prompts, answers.texts)).view(-1, n)
    out: dict[str, Any] = {"gold_mean": float(gold.mean()), "gold_std": float(gold.std()), "proxies": {}}
    for size in SIZES:
        for data in DATA:
            config = RewardConfig.preset(
                "toy", output_dir=f"{home}/rm-{size}-{data}", seed=lab.seed, **SAME, baseline_pairs=0, epochs=None,
                steps=2 if lab.tiny else STEPS[data],
            )  # fmt: skip
            reward = RewardTrainer(config, bodies[size], tokenizer, rows=pairs[:data], eval_rows=held)
            accuracy = reward.fit().evals[-1]["eval/accuracy"]
            reward.method.save_model(f"{home}/rm-{size}-{data}/model")
            scores = reward.members[0].eval().score(answers, 4096).detach().view(-1, n)
            scores = (1e4 * scores).round() / 1e4  # equal answers have one score, whatever their batch
            out["proxies"][f"{size}_{data}"] = {"accuracy": accuracy} | best_of(scores, gold)
            print(f"  {size}, {data} pairs: {accuracy:.3f}, {time.process_time() - began:.0f} CPU s", flush=True)
    (home / "pairs.json").write_text(json.dumps(pairs), encoding="utf-8")
    return out | {"pairs": len(pairs), "held_pairs": len(held), "cpu": time.process_time() - began}


def folder(lab: Any) -> Path:
    """Of a seed's models."""
    return Path(lab.out) / f"toy-{lab.seed}"


def fresh(path: Path) -> str:
    """A folder for a run, without what a run that was killed left there."""
    shutil.rmtree(path, ignore_errors=True)
    return str(path)


def _policy(lab: Any) -> Any:
    """A fresh copy of the SFT policy."""
    from rlhf_nb.config import ModelConfig
    from rlhf_nb.core import decide_precision
    from rlhf_nb.models.load import load_causal_lm

    return load_causal_lm(ModelConfig(name_or_path=f"{folder(lab)}/sft-small/model"), decide_precision("cpu"))


def _proxy(lab: Any, size: str, data: int) -> Any:
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.rewards.base import RewardModelFn

    return RewardModelFn(RewardModel.load(f"{folder(lab)}/rm-{size}-{data}/model").eval(), token_budget=4096)


def ppo(lab: Any, size: str, data: int) -> dict[str, Any]:
    """PPO at no price of drift; each step's answers are measured as they are drawn."""
    from rlhf_nb.rewards.base import Rewards
    from rlhf_nb.train.ppo import PPOConfig, PPOTrainer

    began = time.process_time()
    config = PPOConfig.preset(
        "toy", output_dir=fresh(folder(lab) / f"ppo-{size}-{data}"), seed=lab.seed, **SAME, kl_coef=0.0, steps=2 if lab.tiny else 36,
        optimizer={"lr": 5e-4, "schedule": "constant"},
    )  # fmt: skip
    rewards = Rewards([_proxy(lab, size, data), toy.gold_reward], [1.0, 0.0], ["proxy", "gold"])
    rows = toy.train_prompts(4096, lab.seed)
    trainer = PPOTrainer(config, _policy(lab), toy.build_tokenizer(), reward=rewards, rows=rows, eval_rows=[])
    events = [trainer.train_step() for _ in range(trainer.total_steps)]
    names = {"kl": "objective/kl", "gold": "rewards/gold", "proxy": "rewards/proxy"}
    return {k: [float(e[name]) for e in events] for k, name in names.items()} | {"cpu": time.process_time() - began}


def dpo(lab: Any, data: int) -> dict[str, Any]:
    """DPO at a small β on the pairs of the small reward model, measured on held-out prompts every eighth step."""
    from rlhf_nb.data.sources import prompt_batch
    from rlhf_nb.evaluate.policy import evaluate
    from rlhf_nb.models.adapters import Reference
    from rlhf_nb.train.dpo import DPOConfig, DPOTrainer
    from rlhf_nb.train.ppo import PPOConfig

    began, policy, tokenizer = time.process_time(), _policy(lab), toy.build_tokenizer()
    reference = Reference(_policy(lab), copy_model=False)
    rows = json.loads((folder(lab) / "pairs.json").read_text(encoding="utf-8"))[:data]
    config = DPOConfig.preset(
        "toy", output_dir=fresh(folder(lab) / f"dpo-{data}"), seed=lab.seed, **SAME, beta=0.03, epochs=None, steps=2 if lab.tiny else 72,
        optimizer={"lr": 3e-4, "schedule": "constant"},
    )  # fmt: skip
    trainer = DPOTrainer(config, policy, tokenizer, rows=rows, eval_rows=[])
    asked = prompt_batch(tokenizer, [p["prompt"] for p in toy.test_prompts(8 if lab.tiny else 192, 7)])
    judges = {"gold": toy.gold_reward, "proxy": _proxy(lab, "small", data)}
    found: dict[str, list[float]] = {"kl": [], "gold": [], "proxy": []}
    for step in range(trainer.total_steps + 1):
        if step % (1 if lab.tiny else 8) == 0:
            now = evaluate(
                policy, tokenizer, asked, judges, reference, PPOConfig.preset("toy").sampling, step
            ).summary()
            for k, values in found.items():
                values.append(now[k])
        if step < trainer.total_steps:
            trainer.train_step()
    return found | {"cpu": time.process_time() - began}
