"""Rows without a gradient are not computed, and the update is the same: gradient, weights and Adam's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_host_syncs import model, rows

from rlhf_nb.data import toy
from rlhf_nb.train.online import OnlineMethod
from rlhf_nb.train.registry import get

SETTINGS: dict[str, Any] = {
    "console": False, "epochs": None, "seed": 3, "steps": 4, "mini_batch_size": 16, "rollout_batch_size": 32, "token_budget": 300, "save_every": None,
    "optimizer": {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.01}, "sampling": {"max_new_tokens": 10, "temperature": 1.3}, "samples_per_step": 0,
}  # fmt: skip
FOUR = {"num_generations": 4}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": FOUR | {"kl_coef": 0.0}, "dr_grpo": FOUR | {"kl_coef": 0.0, "variant": "dr_grpo"},
    "dapo": FOUR | {"kl_coef": 0.0, "variant": "dapo", "mask_truncated": True}, "gspo": FOUR | {"kl_coef": 0.0, "variant": "gspo"},
    "cispo": FOUR | {"kl_coef": 0.0, "variant": "cispo"}, "grpo batch": FOUR | {"kl_coef": 0.0, "scale": "batch", "num_inner_epochs": 2},
    "grpo kl": FOUR | {"kl_coef": 0.05}, "grpo kl cut": FOUR | {"kl_coef": 0.05, "mask_truncated": True},
    "rloo": FOUR | {"kl_coef": 0.0}, "ppo cut": {"mask_truncated": True}, "raft": FOUR, "online": {"num_generations": 2}, "online xpo": {"opponent": "reference", "xpo_alpha": 1e-3},
}  # fmt: skip
SAME = {"grpo kl", "raft", "online xpo"}  # RAFT cuts its batches to the best answers before


def marked(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """1 or 0, and for half of the prompts always 0: their groups are dead."""
    return [float(len(p) % 2 and len(c) % 2) for p, c in zip(map(str, prompts), completions)]


def updates(
    name: str, folder: Path, whole: bool, monkeypatch: pytest.MonkeyPatch, reward: Any = marked
) -> tuple[Any, list[int], dict[str, Any]]:
    """Two steps: the trainer, the rows of each forward with a gradient, the last event."""
    info, computed = (
        get(name.split()[0] if name.split()[0] in ("grpo", "rloo", "ppo", "raft", "online") else "grpo"),
        [],
    )
    config = info.config.preset("toy", **{k: v for k, v in (SETTINGS | METHODS[name]).items() if k in info.config.model_fields}, output_dir=str(folder))  # fmt: skip
    make: Any = info.trainer
    policy, tokenizer = model().train(), toy.build_tokenizer()
    ends = range(5, len(tokenizer), 16)  # half of the answers of ten tokens end
    policy.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]
    run = make(config, policy, tokenizer, rows=rows("grpo"), eval_rows=[], reward=reward)
    with monkeypatch.context() as m:
        if whole:
            m.setattr(OnlineMethod, "computed", lambda self, r, unit=1: r)
        own = run.method.micro_batches
        m.setattr(run.method, "micro_batches", lambda mini: [(computed.append(len(x)), x)[1] for x in own(mini)])
        run.start()
        event = [run.train_step() for _ in range(2)][-1]
    run.lock.release()
    return run, computed, event


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


@pytest.mark.parametrize("name", METHODS)
def test_the_update_is_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, some, event = updates(name, tmp_path / "some", False, monkeypatch)
    plain, every, before = updates(name, tmp_path / "all", True, monkeypatch)
    assert before["grad_norm"] > 1e-4  # it compares something
    assert sum(some) == sum(every) if name in SAME else 0 < sum(some) < sum(every)
    assert event["loss"] == pytest.approx(before["loss"], rel=1e-5, abs=1e-7) and event["grad_norm"] == pytest.approx(
        before["grad_norm"], rel=1e-5
    )
    ours, theirs = run.engine.optimizer.state, plain.engine.optimizer.state
    for (key, p), q in zip(run.method.module.named_parameters(), plain.method.module.parameters(), strict=True):
        assert distance(p.detach(), q.detach()) <= 5e-6, key  # a bias began at 0 and is a sum of Adam's quotients
        for part in ("exp_avg", "exp_avg_sq") if p in ours else ():
            assert distance(ours[p][part], theirs[q][part]) <= 1e-5, (key, part)
    assert event["update/rows_computed"] <= 32


@pytest.mark.parametrize("name", METHODS)
def test_the_number_that_is_logged_is_that_of_the_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the last step, where each mini-batch has a row with a gradient: the rows that went through the model."""
    run, computed, event = updates(name, tmp_path, False, monkeypatch, lambda prompts, completions, **_: [float(len(c)) for c in completions])  # fmt: skip
    passes = run.config.num_inner_epochs
    last = sum(computed[len(computed) // 2 :])
    assert last >= event["update/rows_computed"] * passes > 0
    if not run.config.mask_truncated and len(computed) % 2 == 0:
        assert last == passes * event["update/rows_computed"], (name, computed)


def test_an_update_of_nothing_still_moves_what_adam_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups are dead: one row is computed for its gradient of 0; weights decay and steps count as if all were."""

    def flat(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [1.0] * len(prompts)

    run, some, event = updates("grpo", tmp_path / "some", False, monkeypatch, flat)
    plain, every, _ = updates("grpo", tmp_path / "all", True, monkeypatch, flat)
    assert some == [1] * 4 and sum(every) == 64 and event["update/rows_computed"] == 0 and event["grad_norm"] == 0
    for p, q in zip(run.method.module.parameters(), plain.method.module.parameters(), strict=True):
        assert torch.equal(p, q)
    assert {int(s["step"]) for s in run.engine.optimizer.state.values()} == {4}
