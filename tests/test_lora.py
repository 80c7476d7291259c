"""Every kind of adapter trains through the trainers; scorer, sampler and saved files agree with the model's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resume_harness import leave_off
from transformers import AutoModelForCausalLM

from rlhf_nb import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.scoring.scores import completion_logps

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True}, "rslora": {"use_rslora": True}, "gaussian": {"init_lora_weights": "gaussian"},
    "norms": {"modules_to_save": ["norm"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("lora") / "model"
    toy.build_model(0, "tiny").save_pretrained(where)
    toy.build_tokenizer().save_pretrained(where)
    return str(where)


def settings(folder: str, out: Path, lora: dict[str, Any], **more: Any) -> dict[str, Any]:
    model = {"name_or_path": folder, "lora": {"r": 4, **lora}}
    common = {"output_dir": str(out), "steps": 2, "epochs": None, "mini_batch_size": 8, "console": False}
    return {**common, "model": model, "optimizer": {"lr": 5e-3, "warmup_steps": 0}, **more}


def own_logps(model: Any, c: Any) -> torch.Tensor:
    """Log-probs of completion tokens by the model's own forward, row by row."""
    rows = torch.zeros(c.completion_ids.shape)
    for i in range(len(c)):
        p, n = int(c.prompt_lens[i]), int(c.completion_lens[i])
        ids = torch.cat([c.prompt_ids[i][c.prompt_mask[i].bool()], c.completion_ids[i, :n]])
        logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        rows[i, :n] = logits[p - 1 : p + n - 1].gather(1, ids[p:, None])[:, 0]
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_grpo_samples_scores_and_saves_what_the_model_computes(kind: str, folder: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"num_generations": 4, "kl_coef": 0.05, "sampling": {"max_new_tokens": 6}}
    config = GRPOConfig.preset("toy", **settings(folder, tmp_path / "run", KINDS[kind], **more))
    trainer = GRPOTrainer(
        config, reward=lambda prompts, completions: [len(c) for c in completions], rows=toy.train_prompts(8)
    )
    start = AutoModelForCausalLM.from_pretrained(folder)
    r = trainer.rollout(trainer.prompts())
    with torch.no_grad():
        before = own_logps(start, r)
    for found in (r.rollout_logps, r.old_logps, r.ref_logps):  # sampler, scorer, reference: nothing was learnt yet
        torch.testing.assert_close(found * r.completion_mask, before * r.completion_mask, rtol=1e-3, atol=1e-3)
    history = trainer.fit()
    assert history[-1]["grad_norm"] > 0
    model = trainer.method.model
    with torch.no_grad():
        now, scored = own_logps(model, r), completion_logps(model, r).logps
        assert float((now - before).abs().max()) > 1e-3
        torch.testing.assert_close(scored * r.completion_mask, now * r.completion_mask, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(trainer.method.reference.logps(r), r.ref_logps)  # the reference stays
        trainer.save_model(tmp_path / "saved")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        torch.testing.assert_close(own_logps(plain, r), now, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["dora", "norms"])
def test_supervised_and_preference_training_and_exact_resume(kind: str, folder: str, tmp_path: Path) -> None:
    lora = KINDS[kind]
    full = SFTTrainer(SFTConfig.preset("toy", **settings(folder, tmp_path / "a", lora, steps=4)), rows=toy.sft_rows(32))
    straight = full.fit()
    first = SFTTrainer(
        SFTConfig.preset("toy", **settings(folder, tmp_path / "b", lora, steps=4)), rows=toy.sft_rows(32)
    )
    leave_off(first)
    again = SFTTrainer(
        SFTConfig.preset("toy", **settings(folder, tmp_path / "b", lora, steps=4)), rows=toy.sft_rows(32)
    )
    assert again.fit(resume=True)[-1]["loss"] == straight[-1]["loss"]
    config = DPOConfig.preset("toy", **settings(folder, tmp_path / "dpo", lora))
    event = DPOTrainer(config, rows=toy.preference_rows(16)).fit()[0]
    assert event["loss"] == pytest.approx(0.6931, abs=1e-3)  # policy and reference are the same model at first


def test_starts_that_change_the_frozen_weights_are_refused(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="true or gaussian.*merge_and_unload"):
        SFTConfig.preset("toy", **settings(folder, tmp_path, {"init_lora_weights": "pissa"}))
