"""`recompute`: the same training with less memory, for every method and every way of sharing a model; plans that a config can carry out."""

from __future__ import annotations

import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from process_cases import make, run_ranks
from test_processes import compare
from torch import Tensor

from rlhf_nb.core import ConfigError, Precision, RunError
from rlhf_nb.fast.support import use_fast
from rlhf_nb.pipeline.stages import PipelineConfig
from rlhf_nb.scale.launch import accelerate_settings
from rlhf_nb.scale.plan import plan
from rlhf_nb.scale.topology import DecoderShape, Job, job_of
from rlhf_nb.scoring import recompute, scores
from rlhf_nb.train.dpo import DPOConfig
from rlhf_nb.train.registry import get
from rlhf_nb.train.sft import SFTConfig


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kind of each module that was told to forget its activations, call by call."""
    seen: list[str] = []
    real = recompute.recomputed

    def spy(block: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(type(block).__name__)
        return real(block, f, *args, **kwargs)

    monkeypatch.setattr(recompute, "recomputed", spy)
    monkeypatch.setattr(scores, "recomputed", spy)
    return seen


def trained(case: str, folder: Path, again: bool, fast: bool, **over: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    settings = {"steps": 2, "recompute": again, "output_dir": str(folder / f"{again}{fast}"), **over}
    with use_fast(fast):
        trainer = make(case, **settings)
        history = trainer.fit()
    weights = trainer.method.module.named_parameters()
    return [e["loss"] for e in history], {n: p.detach().clone() for n, p in weights if p.requires_grad}


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("case", ["sft", "reward_lora", "dpo", "kto", "ppo", "grpo"])
def test_training_is_the_same(case: str, fast: bool, tmp_path: Path, forgotten: list[str]) -> None:
    before = trained(case, tmp_path, False, fast)
    assert not forgotten
    after = trained(case, tmp_path, True, fast)
    assert forgotten
    assert after[0] == pytest.approx(before[0], rel=1e-6)
    for name, p in before[1].items():
        torch.testing.assert_close(after[1][name], p, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def test_one_backbone_for_all_roles(tmp_path: Path, forgotten: list[str]) -> None:
    """The policy's and the critic's adapters speak in turn, and the backward pass comes after both."""
    settings: dict[str, Any] = {"critic": "hydra", "model": {"lora": {"r": 4}}}
    from rlhf_nb.config import LoraSettings
    from rlhf_nb.data import toy
    from rlhf_nb.models.adapters import add_lora
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.train.ppo import PPOConfig, PPOTrainer

    def run(again: bool) -> tuple[list[float], dict[str, Tensor]]:
        rm = RewardModel.from_policy(add_lora(toy.build_model(0), LoraSettings(r=4), "reward"), seed=5)
        config = PPOConfig.preset(
            "toy", output_dir=str(tmp_path / str(again)), console=False, steps=3, epochs=None, mini_batch_size=8, rollout_batch_size=8,
            recompute=again, sampling={"max_new_tokens": 10}, **settings,
        )  # fmt: skip
        rows = toy.train_prompts(32)
        trainer = PPOTrainer(config, toy.build_model(0), toy.build_tokenizer(), reward=rm, rows=rows)
        history = trainer.fit()
        kept = {n: p.detach().clone() for n, p in trainer.method.module.named_parameters() if p.requires_grad}
        return [e["loss"] for e in history], kept

    (losses, weights), (same, others) = run(False), run(True)
    assert forgotten and same == pytest.approx(losses, rel=1e-6)
    assert {"policy", "value"} <= {n.split(".")[-2] for n in weights if ".lora_" in n}
    for name, p in weights.items():
        torch.testing.assert_close(others[name], p, rtol=1e-6, atol=1e-7)


def test_on_two_cores_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: list[str]) -> None:
    from rlhf_nb.fast import workers

    monkeypatch.setattr(workers, "SMALL", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        one, two = (trained("sft", tmp_path, again, True) for again in (False, True))
    finally:
        torch.set_num_threads(before)
    assert forgotten and two[0] == pytest.approx(one[0], rel=1e-6)
    assert all(torch.allclose(two[1][n], p, rtol=1e-6, atol=1e-7) for n, p in one[1].items())


needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
SHARED = [("zero3", "sft"), *((s, c) for s in ("ddp", "zero2", "zero3", "fsdp2") for c in ("dpo", "ppo", "ppo_lora"))]


@needs_deepspeed
@pytest.mark.parametrize(
    ("strategy", "case"), [SHARED[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in SHARED[1:])]
)
def test_every_strategy(strategy: str, case: str, tmp_path: Path) -> None:
    """Recomputed on two ranks, against one process that keeps everything."""
    run_ranks(case, tmp_path / "one", steps=3)
    run_ranks(case, tmp_path / "two", 2, strategy, steps=3, recompute=True)
    compare(tmp_path / "one", tmp_path / "two")


def test_a_loss_that_calls_its_model_itself_is_told(tmp_path: Path) -> None:
    """Nothing would be recomputed, and the memory that was counted on would not be free."""

    def loss(micro: Any) -> Any:
        from rlhf_nb.types import LossSum

        logits = trainer.method.model(micro.prompt_ids).logits
        return {"sft": (LossSum(logits.sum(), torch.tensor(1.0)), 1.0)}

    trainer = make("sft", recompute=True, output_dir=str(tmp_path), steps=1)
    trainer.method.loss = loss
    with pytest.raises(RunError, match=r"recomputed_layers\(model\)"):
        trainer.fit()


def test_one_word_under_every_name(tmp_path: Path) -> None:
    assert SFTConfig(gradient_checkpointing=True).recompute and not SFTConfig().recompute
    old = tmp_path / "config.yaml"
    old.write_text("model:\n  name_or_path: toy\n  gradient_checkpointing: true\n")
    found = DPOConfig.load(old)
    assert found.recompute and "gradient_checkpointing" not in found.to_yaml()
    old.write_text("model:\n  name_or_path: toy\n  gradient_checkpointing: false\n")
    assert DPOConfig.load(old) == DPOConfig(model={"name_or_path": "toy"})
    assert SFTConfig.load(None, ["model.gradient_checkpointing=true"]).recompute
    pipeline = {
        "sft": {"model": {"name_or_path": "toy", "gradient_checkpointing": True}},
        "ppo": {"model": {"gradient_checkpointing": False}},
    }
    found = PipelineConfig.model_validate(pipeline | {"data": "toy"})
    assert found.sft.recompute and not found.ppo.recompute


BIG = DecoderShape(layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, head_dim=128, vocab=128_256, tied=False)
LARGER = DecoderShape(
    layers=80, hidden=8192, inner=28672, heads=64, kv_heads=8, head_dim=128, vocab=128_256, tied=False
)


@pytest.mark.parametrize("shape", [BIG, LARGER], ids=["8B", "70B"])
@pytest.mark.parametrize("method", ["sft", "dpo", "ppo", "grpo"])
@pytest.mark.parametrize("gpus", [1, 4, 8, 64, 512])
@pytest.mark.parametrize("memory", [24, 80])
def test_a_plan_can_be_carried_out(shape: DecoderShape, method: str, gpus: int, memory: float) -> None:
    """The command that a plan prints asks for exactly what was planned: sizes, recomputation, stage, what is on the host."""
    half = torch.bfloat16
    precision = Precision(torch.device("cuda"), half, torch.float32, half, False, "a GPU")
    given = ["rollout_batch_size=512", "mini_batch_size=512"]
    asked = job_of(get(method).config.load(None, given), precision)
    try:
        found = plan(shape, asked, gpus, memory)
    except ConfigError:
        return
    words = shlex.split(found.command(asked, shlex.join(given)))
    carried = job_of(get(method).config.load(None, [w for w in words if "=" in w]), precision)
    assert carried == found.job
    if gpus == 1 and found.split.stage == 0:
        assert words[:2] == ["rlhf-nb", method]
        return
    option = {key: words[words.index(key) + 1] for key in ("-n", "--strategy", "--nodes") if key in words}
    assert int(option["-n"]) * int(option.get("--nodes", 1)) == gpus and ("--nodes" in option) == ("--slurm" in words)
    settings = accelerate_settings(gpus, option["--strategy"], cpu=False)
    zero = settings.get("deepspeed_config", {"zero_stage": 0})
    kept = {"none": ("none", "none"), "optimizer": ("cpu", "none"), "all": ("cpu", "cpu")}[found.split.offload]
    if found.split.context > 1:  # FSDP2 shares the weights out, and no DeepSpeed is asked for
        assert option["--strategy"] == f"fsdp2+cp{found.split.context}" and found.split.stage == 3
        return
    assert zero["zero_stage"] == found.split.stage
    assert (zero.get("offload_optimizer_device", "none"), zero.get("offload_param_device", "none")) == kept


def test_recomputation_is_planned_where_it_is_needed() -> None:
    job = Job("sft", token_budget=4096, lora=16)
    tight = plan(BIG, job, 1, 24)
    assert tight.job.recompute and tight.command(job, "model.lora.r=16") == "rlhf-nb sft model.lora.r=16 recompute=true"
    assert plan(BIG, job, 1, 80).command(job) == "rlhf-nb sft ..."


def test_hooks_on_saved_tensors_lose_no_gradient(tmp_path: Path) -> None:
    """The head adds its gradient to the weight itself; what such hooks hand it is a copy, whose gradient nobody would find."""

    def gradients(kept_elsewhere: bool) -> dict[str, Tensor]:
        trainer = make("sft", steps=1, output_dir=str(tmp_path / str(kept_elsewhere)))
        trainer.start()
        found: dict[str, Tensor] = {}
        step = trainer.engine.strategy.step

        def look(*args: Any) -> Any:
            named = trainer.method.module.named_parameters()
            found.update({n: p.grad.to_dense().clone() for n, p in named if p.grad is not None})
            return step(*args)

        trainer.engine.strategy.step = look
        with torch.autograd.graph.save_on_cpu() if kept_elsewhere else torch.enable_grad():
            trainer.train_step()
        trainer.lock.release()
        return found

    want, got = gradients(False), gradients(True)
    assert want.keys() == got.keys()
    for name, g in want.items():
        torch.testing.assert_close(got[name], g, rtol=1e-5, atol=1e-8)
