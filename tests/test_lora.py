"""Every kind of adapter trains through the trainers; scorer, sampler and saved files agree with the model's own forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resume_harness import leave_off
from transformers import AutoModelForCausalLM

from rlhf_nb import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.models.load import save_model
from rlhf_nb.scoring.scores import completion_logps

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True}, "rslora": {"use_rslora": True}, "gaussian": {"init_lora_weights": "gaussian"},
    "pissa": {"init_lora_weights": "pissa"}, "olora": {"init_lora_weights": "olora"},
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


@pytest.mark.parametrize("kind", ["dora", "pissa", "norms"])
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


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_ppo_with_a_moved_base(critic: str, folder: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"critic": critic, "sampling": {"max_new_tokens": 6}, "rollout_batch_size": 8}
    config = PPOConfig.preset("toy", **settings(folder, tmp_path / "run", KINDS["pissa"], **more))
    event = PPOTrainer(config, reward=toy.gold_reward, rows=toy.train_prompts(8)).fit()[0]
    assert abs(event["objective/kl"]) < 1e-3


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_a_moved_base_goes_on_without_a_second_decomposition(
    kind: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight and resumed runs have the same bits, frozen weights included; the adapter by itself fits the model it came from."""
    from peft import PeftModel

    def trainer(name: str) -> SFTTrainer:
        config = SFTConfig.preset("toy", **settings(folder, tmp_path / name, KINDS[kind], steps=4))
        return SFTTrainer(config, rows=toy.sft_rows(32))

    straight, first = trainer("straight"), trainer("killed")
    straight.fit()
    leave_off(first)

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("decomposed again")

    with monkeypatch.context() as m:
        for name in ("svd", "qr"):
            m.setattr(torch.linalg, name, never)
        again = trainer("killed")
        again.fit(resume=True)
        other = {"init_lora_weights": kind, "r": 2}
        with pytest.raises(AssertionError, match="again"):  # what was kept belongs to another rank
            SFTTrainer(SFTConfig.preset("toy", **settings(folder, tmp_path / "killed", other)), rows=toy.sft_rows(8))
    ours, theirs = again.method.model.state_dict(), straight.method.model.state_dict()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    frozen = [k for k in ours if k.endswith("q_proj.base_layer.weight")]
    base = AutoModelForCausalLM.from_pretrained(folder)
    name = frozen[0].removeprefix("base_model.model.").replace(".base_layer", "")
    assert not torch.equal(ours[frozen[0]], base.state_dict()[name])  # what is frozen isn't what was loaded ...
    save_model(again.method.model, None, tmp_path / "adapter")
    plain = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))  # ... and the adapter fits what was loaded
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, again.method.model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
        assert float((plain(ids).logits - AutoModelForCausalLM.from_pretrained(folder)(ids).logits).abs().max()) > 1e-2


def test_start_that_nobody_knows(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'olora'"):
        SFTConfig.preset("toy", **settings(folder, tmp_path, {"init_lora_weights": "olara"}))
