"""PPO's `val/explained_variance` where the right value of every state is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_nb import PPOConfig, PPOTrainer
from rlhf_nb.data import toy

torch.set_num_threads(1)
ASKED = [{"prompt": f"Visitor: Where do {a} live?\nPip:"} for a in ("otters", "owls", "bats", "wolves")]


def by_question(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A score that the prompt alone decides: ±1."""
    return [1.0 if "otters" in p or "bats" in p else -1.0 for p in prompts]


def trainer_of(folder: Path, **settings: Any) -> PPOTrainer:
    config = PPOConfig.preset(
        "toy", output_dir=str(folder), console=False, rollout_batch_size=32, mini_batch_size=32, num_inner_epochs=2, missing_eos=None, kl_coef=0.0,
        sampling={"max_new_tokens": 6}, value_clip_eps=None, vf_coef=1.0, **settings,
    )  # fmt: skip
    return PPOTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), by_question, ASKED * 8)


def test_it_is_one_for_a_critic_that_knows_and_nought_for_one_that_says_one_number(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", lam=1.0)
    r = trainer.score(trainer.rollout(trainer.prompts()))
    scores, mask = r.need("scores"), r.completion_mask
    known: dict[float, float] = {}
    for share, constant in ((1.0, False), (0.75, False), (0.0, True)):
        right = scores[:, None].expand_as(mask).float()
        r.values = torch.where(mask, torch.zeros_like(right) if constant else right * (1.0 if share == 1 else 0.5), 0.0)
        known[share] = trainer.method.measure(trainer.method.advantages(r))["val/explained_variance"]
    # with λ = 1 and γ = 1 the return of every token is the score; half of it leaves a quarter of the variance
    assert known == pytest.approx({1.0: 1.0, 0.75: 0.75, 0.0: 0.0}, abs=1e-4)


@pytest.mark.parametrize("critic", ["separate", "shared"])
def test_a_critic_that_is_trained_gets_there(critic: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", critic=critic, critic_lr=5e-3, steps=25, lam=1.0)
    seen = trainer.fit().series("val/explained_variance")
    assert abs(seen[0]) < 0.05 and sum(seen[-3:]) / 3 > 0.8
