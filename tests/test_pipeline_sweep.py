"""`sweeps` in a pipeline: settings are compared before a stage runs, the winner's are taken, and nothing is compared twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from rlhf_nb.core import ConfigError, RunError
from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline


def config(folder: Path, rates: list[float]) -> PipelineConfig:
    """SFT alone, three steps, with a learning rate that is looked for."""
    few = {
        "steps": 3,
        "epochs": None,
        "eval_every": 3,
        "optimizer": {"lr": 1e-7, "warmup_steps": 0, "schedule": "constant"},
    }
    return PipelineConfig.preset(
        "toy", output_dir=str(folder), console=False, eval_prompts=4, base={}, sft=few, reward=None, ppo=None,
        sweeps={"sft": {"over": {"optimizer.lr": rates}, "seeds": 1, "metric": "loss"}},
    )  # fmt: skip


def test_a_stage_is_swept_first_and_trains_with_the_winner(tmp_path: Path) -> None:
    pipeline = RLHFPipeline(config(tmp_path / "run", [1e-6, 1e-3]))
    said: list[str] = []
    pipeline.say = said.append  # type: ignore[method-assign,assignment]
    pipeline.run()
    assert (
        pipeline.stage_config("sft").optimizer.lr == 1e-3 and pipeline.stage_config("sft").optimizer.warmup_steps == 0
    )
    assert "lr: 0.001" in (tmp_path / "run" / "sft" / "config.yaml").read_text(encoding="utf-8")
    assert any("optimizer.lr=0.001 is taken" in line for line in said), said
    before = (tmp_path / "run" / "sweeps" / "sft" / "winner.json").read_bytes()
    said.clear()
    pipeline.run(resume=True)
    assert "sft: finished before, skipped." in said and not any("is taken" in line for line in said)
    assert (tmp_path / "run" / "sweeps" / "sft" / "winner.json").read_bytes() == before
    other = RLHFPipeline(config(tmp_path / "run", [1e-6, 1e-2]))
    with pytest.raises(RunError, match=r"sweeps.sft was made with .*over.*0.001"):
        other.run(resume=True)


def test_a_sweep_names_a_stage_and_something_to_try(tmp_path: Path) -> None:
    for wrong, said in (
        ({"dpo": {"over": {"beta": [0.1, 0.2]}}}, "sweeps names 'dpo', which is no stage"),
        ({"sft": {"over": {}}}, "sweeps.sft: nothing is tried"),
        ({"sft": {"overs": {"seed": [1]}}}, "sweeps.sft: .*overs"),
        ({"sft": {"over": {"optimizer.lrr": [1]}}}, "Did you mean 'optimizer.lr'"),
        ({"sft": {"over": {"optimizer.lr": 1}}}, "sweeps.sft: over.optimizer.lr is 1; it is a list of values"),
    ):
        with pytest.raises((ConfigError, ValidationError), match=said):
            PipelineConfig.preset("toy", output_dir=str(tmp_path), sweeps=wrong)
    with pytest.raises((ConfigError, ValidationError), match="processes is 2"):
        PipelineConfig.preset(
            "toy", output_dir=str(tmp_path), processes=2, sweeps={"sft": {"over": {"optimizer.lr": [1, 2]}}}
        )
