"""Optimizers and schedules by name: runs continue bit for bit, groups have their own rates, prices warm up."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_harness import leave_off
from torch import nn

from rlhf_nb import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from rlhf_nb.config import OptimizerConfig
from rlhf_nb.core import CheckpointError, ConfigError
from rlhf_nb.data import toy
from rlhf_nb.run.engine import engine_state
from rlhf_nb.run.strategies import Sharded, Zero

needs_bnb = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
NAMES = ["adafactor", "sgd", "muon", pytest.param("adamw_8bit", marks=needs_bnb)]


def sft(out: Path, **optimizer: Any) -> SFTTrainer:
    config = SFTConfig.preset(
        "toy", output_dir=str(out), steps=4, epochs=None, mini_batch_size=8, console=False,
        optimizer={"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 1, "schedule": "wsd", **optimizer},
    )  # fmt: skip
    return SFTTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), rows=toy.sft_rows(64))


@pytest.mark.parametrize("name", NAMES)
def test_learns_and_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    straight = sft(tmp_path / "a", name=name, betas=[0.9, 0.95])
    history = straight.fit()
    assert history[-1]["loss"] < history[0]["loss"]
    leave_off(sft(tmp_path / "b", name=name, betas=[0.9, 0.95]))
    again = sft(tmp_path / "b", name=name, betas=[0.9, 0.95])
    assert again.fit(resume=True)[-1]["loss"] == history[-1]["loss"]
    ours, theirs = (t.method.model.state_dict() for t in (again, straight))
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    leave_off(sft(tmp_path, name="sgd"))
    with pytest.raises(CheckpointError, match="set optimizer.name=sgd"):
        sft(tmp_path, name="adamw").fit(resume=True)


@pytest.mark.parametrize("kind", [Zero, Sharded])
def test_what_cuts_matrices_takes_adamw_only(kind: Any) -> None:
    strategy = kind.__new__(kind)
    strategy.name = "zero3"
    with pytest.raises(ConfigError, match="Use optimizer.name=adamw, or strategy ddp"):
        strategy.optimize(nn.Linear(2, 2), OptimizerConfig(name="adafactor"))


def test_ranks_write_rows_of_averages_once(tmp_path: Path) -> None:
    """What two ranks of DDP write of Adafactor's state, put together, is what one process has."""
    trainer = sft(tmp_path, name="adafactor")
    trainer.train_step()
    engine = trainer.engine
    whole = engine_state(engine)[0]["optimizer"]
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    shapes: dict[str, list[int]] = {}
    for rank in range(2):
        engine.world_size, engine.rank, engine.is_main = 2, rank, rank == 0
        engine.strategy.world, engine.strategy.rank, engine.strategy.name = 2, rank, "ddp"
        engine.strategy.processes, engine.strategy.process = engine.ranks.processes, engine.ranks.process = 2, rank
        tensors, meta = engine_state(engine)
        for key, value in tensors["optimizer"].items():
            shape, start = meta["slices"]["optimizer"][key]
            shapes[key] = shape
            found.setdefault(key, []).append((start, value))
    assert found.keys() == whole.keys() and any("row_var" in k for k in whole)
    for key, parts in found.items():
        joined = parts[0][1] if not shapes[key] else torch.cat([p for _, p in sorted(parts, key=lambda x: x[0])])
        assert torch.equal(joined.reshape(whole[key].shape), whole[key]), key


def test_the_critic_has_its_own_rate(tmp_path: Path) -> None:
    for critic in ("separate", "shared", "hydra"):
        config = PPOConfig.preset(
            "toy", output_dir=str(tmp_path / critic), steps=1, epochs=None, rollout_batch_size=8, mini_batch_size=8, console=False, critic=critic,
            critic_lr=3e-3, optimizer={"lr": 1e-3, "warmup_steps": 2}, model={"lora": {"r": 4}} if critic == "hydra" else {}, sampling={"max_new_tokens": 4},
        )  # fmt: skip
        trainer = PPOTrainer(
            config, toy.build_model(0, "tiny"), toy.build_tokenizer(), reward=toy.gold_reward, rows=toy.train_prompts(8)
        )
        names = {id(p): n for n, p in trainer.method.module.named_parameters()}
        groups = trainer.engine.optimizer.param_groups
        fast = {names[id(p)] for g in groups if g["lr"] == pytest.approx(1.5e-3) for p in g["params"]}
        slow = {names[id(p)] for g in groups if g["lr"] == pytest.approx(5e-4) for p in g["params"]}
        assert fast and slow and all("value" in n for n in fast) and not any("value" in n for n in slow)
        assert torch.isfinite(torch.tensor(trainer.fit()[-1]["loss"]))


def test_the_price_of_a_nat_warms_up(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "num_generations": 4,
        "kl_coef": 0.4,
        "kl_warmup_steps": 4,
        "sampling": {"max_new_tokens": 4},
    }
    config = GRPOConfig.preset(
        "toy", output_dir=str(tmp_path), steps=3, epochs=None, mini_batch_size=8, console=False, **more
    )
    history = GRPOTrainer(
        config, toy.build_model(0, "tiny"), toy.build_tokenizer(), reward=toy.gold_reward, rows=toy.train_prompts(8)
    ).fit()
    assert [e["objective/kl_coef"] for e in history] == pytest.approx([0.1, 0.2, 0.3])
    for wrong in ({"kl_warmup_steps": 3, "kl_coef": 0.0}, {"kl_warmup_steps": 3, "kl_target": 5.0}):
        with pytest.raises(ConfigError, match="kl_warmup_steps"):
            PPOConfig(**wrong)
