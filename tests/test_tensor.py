"""Layers that several processes compute together are one process: losses, gradients, weights, rollouts; saved one way, gone on with another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from process_cases import run_ranks, toy_model
from test_processes import BAR, far, first_rollouts, steps
from torch import nn

from rlhf_nb.core import ConfigError
from rlhf_nb.run.tensor import cuts

CASES = ["sft", "reward", "dpo", "grpo", "ppo", "qwen3", "sft_lora", "grpo_lora", "ppo_lora", "qwen3_lora"]
GRID = {"fsdp2+tp2": 2, "fsdp2+tp2 on four": 4, "fsdp2+tp2+rep2": 4, "fsdp2+rep2": 4}


def same(one: Path, other: Path) -> None:
    """Losses and gradients to 1e-5, weights after all steps, and the first answers."""
    for a, b in zip(steps(one), steps(other), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5, abs=1e-6)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
    assert far(one, other) <= BAR  # Adam makes rounding of the smallest gradients large
    assert first_rollouts(one) == first_rollouts(other)


def test_two_processes_compute_each_layer(tmp_path: Path) -> None:
    run_ranks("qwen3", tmp_path / "one", steps=3)
    run_ranks("qwen3", tmp_path / "two", 2, "fsdp2+tp2", steps=3, save_every=2)
    same(tmp_path / "one", tmp_path / "two")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(",".join(CASES), folder, steps=4)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRID)
def test_every_layout_is_one_process(alone: Path, layout: str, tmp_path: Path) -> None:
    run_ranks(",".join(CASES), tmp_path, GRID[layout], layout.removesuffix(" on four"), cpu=2400, steps=4)
    for case in CASES:
        same(alone / case, tmp_path / case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3", "ppo_lora"])
def test_a_run_goes_on_in_any_layout(alone: Path, case: str, tmp_path: Path) -> None:
    """One step in each layout, and back to one process: the same as four in a row."""
    ways: list[tuple[int, str]] = [(2, "fsdp2+tp2"), (1, ""), (4, "fsdp2+tp2"), (2, "fsdp2"), (4, "fsdp2+tp2+rep2")]
    straight = tmp_path / "straight"
    run_ranks(case, straight, steps=len(ways))
    for done, (world, strategy) in enumerate(ways):
        run_ranks(case, tmp_path / "mixed", world, strategy, steps=done + 1, resume=done > 0)
    assert far(straight, tmp_path / "mixed") <= BAR
    for a, b in zip(steps(straight), steps(tmp_path / "mixed"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_bf16_and_layers_that_are_computed_again(tmp_path: Path) -> None:
    """Forgetting activations changes nothing under tensor parallelism; in bf16 it stays near one process."""
    run_ranks("sft", tmp_path / "plain", 2, "fsdp2+tp2", steps=3)
    run_ranks("sft", tmp_path / "again", 2, "fsdp2+tp2", steps=3, recompute=True)
    same(tmp_path / "plain", tmp_path / "again")
    run_ranks("sft", tmp_path / "half", 2, "fsdp2+tp2", steps=3, precision="bf16")
    for a, b in zip(steps(tmp_path / "plain"), steps(tmp_path / "half"), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-2)


def _odd(**sizes: Any) -> Any:
    model = toy_model()[0]
    for key, value in sizes.items():
        setattr(model.config, key, value)
    return model


def _quantised() -> Any:
    model = toy_model()[0]
    layer = model.model.layers[0].self_attn.q_proj
    model.model.layers[0].self_attn.q_proj = type("Linear4bit", (nn.Linear,), {})(layer.in_features, layer.out_features)
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: _odd(num_key_value_heads=1), "num_key_value_heads is 1"),
        (lambda: _odd(base_model_tp_plan=None), "LlamaModel has none"),
        (lambda: _odd(base_model_tp_plan={"layers.*.mlp": "moe_tp_experts"}), "not built for 'moe_tp_experts'"),
        (_quantised, "q_proj is a Linear4bit"),
        (lambda: nn.Sequential(toy_model()[0], nn.Dropout(0.1)).train(), "with dropout"),
        (lambda: nn.Linear(2, 2), "needs a decoder of transformers"),
    ],
)
def test_what_cannot_be_exact_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cuts(make(), 2)
    assert cuts(toy_model(lora=True)[0], 2)[0]  # and what can is not


def test_gradients_of_whole_weights_are_averaged_or_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm's gradient is the mean over the team; that of a norm of single heads is the sum."""
    from rlhf_nb.run.tensor import Team

    def parameter(value: float, size: int) -> Any:
        grad = torch.full((3,), value)
        mesh = SimpleNamespace(size=lambda: size)
        return SimpleNamespace(grad=SimpleNamespace(to_local=lambda: grad), device_mesh=mesh), grad

    (mean, a), (total, b), (cut, c) = parameter(1.0, 2), parameter(2.0, 2), parameter(3.0, 4)
    team = Team.__new__(Team)
    team.mesh, team.summed = SimpleNamespace(size=lambda: 2, get_group=lambda: None), ["layers.0.q_norm"]
    names = {"norm.weight": mean, "layers.0.q_norm.weight": total, "layers.0.q_proj.weight": cut}
    team.module = SimpleNamespace(named_parameters=lambda: names.items())  # type: ignore[assignment]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group: x.mul_(2))  # the other one has the same
    team.level(4)
    assert (float(a[0]), float(b[0]), float(c[0])) == (1.0, 4.0, 3.0)
