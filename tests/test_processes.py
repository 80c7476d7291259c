"""One process is two processes is ZeRO-2 is ZeRO-3 is FSDP2: losses, weights, rollouts; saving, resuming elsewhere."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from process_cases import CASES, run_ranks
from safetensors.torch import load_file

from rlhf_nb.checkpoint import latest_complete, load_checkpoint, problem_of
from rlhf_nb.core import CheckpointError

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
BAR = 1e-4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a finished run; each is made once."""
    root = tmp_path_factory.mktemp("runs")

    def run(case: str, strategy: str = "single", **over: Any) -> Path:
        folder: Path = root / f"{case}-{strategy}"
        if not (folder / "steps.json").exists():
            run_ranks(
                case,
                folder,
                1 if strategy == "single" else 2,
                "" if strategy in ("single", "ddp") else strategy,
                **over,
            )
        return folder

    return run


def steps(folder: Path) -> list[dict[str, float]]:
    return list(json.loads((folder / "steps.json").read_text()))


def far(a: Path, b: Path) -> float:
    """Largest relative difference of a trained tensor."""
    one, two = load_file(a / "weights.safetensors"), load_file(b / "weights.safetensors")
    assert one.keys() == two.keys()
    return max(float((one[k] - two[k]).norm() / one[k].norm().clamp_min(1e-12)) for k in one)


def compare(one: Path, other: Path) -> None:
    """Losses and weights agree, and so do the rollouts of the first step where there are any."""
    for a, b in zip(steps(one), steps(other), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=BAR, abs=BAR)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=10 * BAR)
        for key in a.keys() & {"objective/kl_coef", "reward", "objective/scores"}:
            assert b[key] == pytest.approx(a[key], rel=BAR, abs=BAR)
    assert far(one, other) <= BAR
    assert first_rollouts(one) == first_rollouts(other)


def first_rollouts(folder: Path) -> list[Any]:
    path = folder / "samples.jsonl"
    rows = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    return [(r["prompt"], r["tokens"]) for r in rows if r["step"] == 1]


@needs_deepspeed
def test_zero3_is_one_process(runs: Any) -> None:
    compare(runs("sft", steps=4), runs("sft", "zero3", steps=4))


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("case", sorted(set(CASES) - {"sft"}))
def test_every_method_every_strategy(runs: Any, case: str, strategy: str) -> None:
    compare(runs(case), runs(case, strategy))


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("case", ["sft", "sft_lora"])
def test_saved_under_zero3_loads_plainly(runs: Any, case: str) -> None:
    from transformers import AutoModelForCausalLM

    one, three = (AutoModelForCausalLM.from_pretrained(runs(case, s) / "model") for s in ("single", "zero3"))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        a, b = one(ids).logits, three(ids).logits
    assert float((a - b).abs().max()) <= 1e-5 * max(1.0, float(a.abs().max()))


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    ("first", "then"),
    [(("zero3", 2), ("", 1)), (("", 1), ("zero3", 2)), (("ddp", 2), ("zero2", 2)), (("zero2", 2), ("", 1))],
)
def test_elastic_resume(runs: Any, tmp_path: Path, first: tuple[str, int], then: tuple[str, int]) -> None:
    """Six steps in one way, the other four in another: the same as ten in a row."""
    straight = runs("ppo")
    run_ranks("ppo", tmp_path, first[1], first[0], steps=6)
    run_ranks("ppo", tmp_path, then[1], then[0], resume=True)
    assert far(straight, tmp_path) <= BAR
    for a, b in zip(steps(straight), steps(tmp_path), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=BAR, abs=BAR)


@pytest.mark.slow
def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    run_ranks("sft", tmp_path, 2, "", steps=4, save_every=2)
    newest = latest_complete(tmp_path / "checkpoints")
    assert newest is not None and newest.name.endswith("4")
    (newest / "model-00001-of-00002.safetensors").unlink()
    assert "rank 1 of 2" in str(problem_of(newest))
    with pytest.raises(CheckpointError, match="rank 1 of 2"):
        load_checkpoint(newest)
    said: list[str] = []
    older = latest_complete(tmp_path / "checkpoints", warn=said.append)
    assert older is not None and older.name.endswith("2") and "rank 1 of 2" in said[0]
