"""Methods of rounds (iterative DPO, rejection sampling, distillation) continue bit for bit, and the reference follows."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_harness import leave_off

from rlhf_nb import OnlineDPOConfig, OnlineDPOTrainer
from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.train.distill import DistillConfig, DistillTrainer
from rlhf_nb.train.raft import RAFTConfig, RAFTTrainer


def by_letters(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    """Any two different answers get different rewards: an untrained model's are all equally bad to a judge, and ties teach nothing."""
    return [zlib.crc32(text.encode()) / 2**32 for text in completions]


def trainer(kind: str, out: Path) -> Any:
    common: dict[str, Any] = {
        "output_dir": str(out), "steps": 4, "epochs": None, "mini_batch_size": 8, "console": False, "sampling": {"max_new_tokens": 6},
    }  # fmt: skip
    given = (toy.build_model(0, "tiny"), toy.build_tokenizer())
    if kind == "distill":
        config = DistillConfig.preset("toy", **common)
        return DistillTrainer(config, *given, rows=toy.train_prompts(32), teacher=toy.build_model(1, "tiny"))
    if kind == "raft":
        raft = RAFTConfig.preset("toy", num_generations=4, **common)
        return RAFTTrainer(raft, *given, reward=toy.gold_reward, rows=toy.train_prompts(32))
    dpo = OnlineDPOConfig.preset("toy", sync_every=2, rollout_batch_size=16, num_inner_epochs=2, **common)
    return OnlineDPOTrainer(dpo, *given, reward=by_letters, rows=toy.train_prompts(32))


@pytest.mark.parametrize("kind", ["distill", "raft", "iterative_dpo"])
def test_continues_bit_for_bit(kind: str, tmp_path: Path) -> None:
    straight = trainer(kind, tmp_path / "a")
    history = straight.fit()
    first = trainer(kind, tmp_path / "b")
    leave_off(first, 3)
    again = trainer(kind, tmp_path / "b")
    assert again.fit(resume=True)[-1]["loss"] == history[-1]["loss"]
    ours, theirs = (t.method.model.state_dict() for t in (again, straight))
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


def test_the_reference_becomes_the_policy_after_each_round(tmp_path: Path) -> None:
    run = trainer("iterative_dpo", tmp_path)
    run.start()
    same = lambda: all(
        torch.equal(a, b)
        for a, b in zip(run.method.model.parameters(), run.method.reference.model.parameters(), strict=True)
    )
    assert same()
    run.train_step()
    assert not same()
    run.train_step()
    assert same()
    run.lock.release()
    with pytest.raises(ConfigError, match="with LoRA it is the base model"):
        OnlineDPOConfig(sync_every=1, model={"lora": {"r": 4}})
