"""fp16 with loss scaling, as on a T4, on a CPU: the scaler steps, an overflow skips an update and nothing else, and a resumed run has the same bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_nb.core import Precision
from rlhf_nb.data import toy
from rlhf_nb.run.engine import Engine
from rlhf_nb.train.registry import get

FP16 = Precision(torch.device("cpu"), torch.float16, torch.float32, torch.float16, True, "fp16 for a test")
SETTINGS: dict[str, Any] = {
    "console": False, "epochs": None, "seed": 1, "steps": 5, "mini_batch_size": 8, "rollout_batch_size": 8, "token_budget": 160, "num_inner_epochs": 1,
    "optimizer": {"lr": 1e-3, "schedule": "constant"}, "save_every": 1, "async_save": False, "max_nonfinite": 0,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "sft": {}, "dpo": {}, "ppo": {"sampling": {"max_new_tokens": 8}, "critic": "hydra", "model": {"name_or_path": "toy", "lora": {"r": 4}}},
    "grpo": {"sampling": {"max_new_tokens": 8}, "num_generations": 4, "kl_coef": 0.05},
}  # fmt: skip


def trainer(method: str, folder: Path, **over: Any) -> Any:
    info = get(method)
    rows = {"sft": toy.sft_rows, "dpo": toy.preference_rows}.get(method, toy.train_prompts)(60)
    given = {"reward": toy.gold_reward} if info.online else {}
    config = info.config.preset("toy", **(SETTINGS | MORE[method] | over), output_dir=str(folder))
    make: Any = info.trainer
    return make(
        config, toy.build_model(0), toy.build_tokenizer(), rows=rows, eval_rows=[], engine=Engine(FP16), **given
    )


def weights(run: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in run.method.module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("method", MORE)
def test_a_run_in_fp16_learns_and_resumes_bit_for_bit(method: str, tmp_path: Path) -> None:
    straight = trainer(method, tmp_path / "straight")
    start = weights(straight)
    events = straight.fit()
    assert all(math.isfinite(e["loss"]) for e in events if e["updates"])
    assert sum(e["updates"] for e in events) >= 3  # the first ones may find the factor too large
    assert all(w.dtype == torch.float32 for w in start.values())  # gradients of fp16 weights can't be unscaled
    assert any(not torch.equal(w, start[n]) for n, w in weights(straight).items())
    first = trainer(method, tmp_path / "stopped", steps=2)
    first.fit()
    rest = trainer(method, tmp_path / "stopped")
    assert (
        rest.engine.scaler.state_dict() != first.engine.scaler.state_dict()
    )  # what must come back from the checkpoint
    rest.fit(resume=True)
    assert rest.engine.scaler.state_dict() == straight.engine.scaler.state_dict()
    for name, w in weights(straight).items():
        assert torch.equal(w, weights(rest)[name]), name


def test_an_overflow_skips_the_update_and_nothing_else(tmp_path: Path) -> None:
    run = trainer("sft", tmp_path / "run", steps=40)
    run.start()
    run.train_step()
    before = weights(run)
    run.engine.scaler.update(2.0**30)  # far too large: gradients of fp16 end at 65,504
    event = run.train_step()
    assert event["skipped"] == 1 and event["updates"] == 0 and run.engine.scaler.get_scale() == 2.0**29
    assert all(torch.equal(w, before[n]) for n, w in weights(run).items())
    events = [run.train_step() for _ in range(30)]  # max_nonfinite is 0: this is no failure
    run.lock.release()
    done = [e["updates"] for e in events]
    assert done[0] == 0 and 1 in done and run.engine.scaler.get_scale() < 2.0**29  # halved until the gradients fit
    assert all(e["updates"] + e.get("skipped", 0) == 1 for e in events)
    assert all(math.isfinite(e["loss"]) for e in events if e["updates"])
    assert any(not torch.equal(w, before[n]) for n, w in weights(run).items())


def test_loss_scaling_makes_nobody_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether gradients are finite is read from their norm, which is wanted on the host anyway; AdamW's fused kernel never asked."""
    run = trainer("sft", tmp_path / "run", optimizer={"name": "sgd", "lr": 1e-3, "schedule": "constant"})
    run.start()
    run.train_step()
    run.engine.scaler.update(1024.0)  # small enough that nothing overflows
    asked: list[Tensor] = []
    own = Tensor.item
    monkeypatch.setattr(Tensor, "item", lambda x: asked.append(x) or own(x))
    event = run.train_step()
    monkeypatch.undo()
    run.lock.release()
    assert event["updates"] == 1 and not asked


def test_a_loss_that_is_not_a_number_is_no_overflow(tmp_path: Path) -> None:
    from rlhf_nb.core import RunError

    run = trainer("sft", tmp_path / "run", max_nonfinite=0)
    run.start()
    with torch.no_grad():
        next(p for p in run.method.module.parameters() if p.requires_grad).fill_(math.nan)
    with pytest.raises(RunError, match="not finite"):
        run.train_step()
    run.lock.release()
