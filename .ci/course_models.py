"""The small models that the course ships: trained here on the toy world, on one thread, in about three CPU minutes.

    PYTHONPATH=. .venv/bin/python .ci/course_models.py     # writes rlhf_nb/learn/models/*.safetensors, 0.3 MB each, in 16 bits

`base` speaks about the park without listening, `sft` imitates guides, `reward` has read 3,200 pairs, `ppo` pleased it at a price for drift,
`hacked` without one; `adder` imitates a speaker who adds and slips. Lessons load them with `learn.start`; what a lesson says about them is asserted in the lesson.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from rlhf_nb import PPOConfig, PPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from rlhf_nb.data import legs, toy
from rlhf_nb.learn.world import LessonWorld

TARGET = Path(__file__).resolve().parent.parent / "rlhf_nb" / "learn" / "models"
COMMON = {"epochs": None, "console": False}


def ship(name: str, module: torch.nn.Module) -> None:
    """Write a module's weights in half precision, without the output matrix that is tied to the embedding."""
    weights = {
        k: v.detach().half().contiguous() for k, v in module.state_dict().items() if not k.endswith("lm_head.weight")
    }
    TARGET.mkdir(parents=True, exist_ok=True)
    save_file(weights, TARGET / f"{name}.safetensors")
    print(
        f"{name}: {sum(v.numel() for v in weights.values()):,} weights, {(TARGET / f'{name}.safetensors').stat().st_size / 1e6:.2f} MB"
    )


def deaf(n: int) -> list[dict[str, str]]:
    """Questions with answers to other questions: the language of the park, without the listening."""
    rows = toy.sft_rows(n, seed=77)
    answers = [r["completion"] for r in rows]
    random.Random(7).shuffle(answers)
    return [{"prompt": r["prompt"], "completion": a} for r, a in zip(rows, answers)]


def ship_scores(prompts: int = 256, each: int = 128) -> None:
    """Proxy and gold of many answers to questions that no model was trained on: lesson 5 picks the best of them."""
    world = LessonWorld()
    asked = [q for q in world.prompts(prompts) for _ in range(each)]
    parts = []
    for i in range(0, len(asked), 4096):
        texts, rows = world.answers("sft", asked[i : i + 4096], seed=5 + i)
        parts.append(torch.stack([world.proxy(asked[i : i + 4096], rows), world.gold(asked[i : i + 4096], texts)]))
    proxy, gold = torch.cat(parts, 1).half().view(2, prompts, each)
    save_file({"proxy": proxy.contiguous(), "gold": gold.contiguous()}, TARGET.parent / "best_of.safetensors")


def main() -> None:
    torch.set_num_threads(1)
    folder, tokenizer = tempfile.mkdtemp(), toy.build_tokenizer()
    base = SFTTrainer(
        SFTConfig.preset("toy", output_dir=f"{folder}/base", steps=100, **COMMON),
        toy.build_model(0),
        tokenizer,
        deaf(4096),
    )
    base.fit()
    ship("base", base.method.model)
    sft = SFTTrainer(
        SFTConfig.preset("toy", output_dir=f"{folder}/sft", steps=600, **COMMON), base.method.model, tokenizer
    )
    sft.fit()
    ship("sft", sft.method.model)
    sft.method.save_model(f"{folder}/sft/model")
    start = {"name_or_path": f"{folder}/sft/model"}
    reward = RewardTrainer(RewardConfig.preset("toy", output_dir=f"{folder}/reward", steps=300, model=start, **COMMON))
    reward.fit()
    ship("reward", reward.members[0])
    for name, kl_coef, steps in (("ppo", 0.1, 30), ("hacked", 0.0, 90)):
        config = PPOConfig.preset(
            "toy", output_dir=f"{folder}/{name}", kl_coef=kl_coef, steps=steps, model=start, **COMMON
        )
        ppo = PPOTrainer(config, reward=reward.members[0])
        history = ppo.fit()
        print(name, {k: round(history[-1][k], 2) for k in ("objective/scores", "objective/kl")})
        ship(name, ppo.method.model)
    ship_scores()
    adder = SFTTrainer(
        SFTConfig.preset("toy", output_dir=f"{folder}/adder", steps=600, **COMMON),
        legs.build_model(0),
        legs.build_tokenizer(),
        legs.legs_demonstrations(8000),
    )
    adder.fit()
    ship("adder", adder.method.model)


if __name__ == "__main__":
    main()
