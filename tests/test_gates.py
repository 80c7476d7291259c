"""A pipeline that refuses to get worse: a bad reward model never reaches the end, and what was refused is kept aside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_nb.core import ConfigError, RunError
from rlhf_nb.data import toy
from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline

QUICK: dict[str, Any] = {
    "console": False, "eval_prompts": 96, "questions": 1, "base": {"size": "tiny"}, "sft": {"steps": 60}, "reward": {"steps": 60}, "ppo": {"steps": 3},
}  # fmt: skip


def pairs(folder: Path, seed: int, flipped: bool) -> dict[str, str]:
    """Training pairs, whose labels may be exchanged, and held-out pairs that somebody has looked at."""
    for name, rows in (
        ("train", toy.preference_rows(600, seed=seed)),
        ("test", toy.preference_rows(128, seed=seed + 100)),
    ):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as f:
            for row in rows:
                exchanged = row | {"chosen": row["rejected"], "rejected": row["chosen"]}
                f.write(json.dumps(exchanged if flipped and name == "train" else row) + "\n")
    return {"path": str(folder), "split": "train", "eval_split": "test"}


def config(folder: Path, seed: int = 0, flipped: bool = False, **over: Any) -> PipelineConfig:
    folder.mkdir(exist_ok=True)
    own = {**QUICK, "seed": seed, "gates": "strict", **over}
    (folder / "pairs").mkdir(exist_ok=True)
    own["reward"] = {**own["reward"], "data": pairs(folder / "pairs", seed, flipped)}
    return PipelineConfig.preset("toy", output_dir=str(folder / "run"), **own)


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_a_bad_reward_model_never_reaches_the_end(tmp_path: Path, seed: int) -> None:
    """Three stages; the second learnt from exchanged labels. It is stopped there, and the first one's model stays."""
    with pytest.raises(
        RunError, match=r"reward didn't pass its gate \(it orders .* of held-out pairs rightly"
    ) as error:
        RLHFPipeline(config(tmp_path / "a", seed, flipped=True)).run()
    run = tmp_path / "a" / "run"
    assert "sft/model" in str(error.value) and not (run / "ppo").exists() and not (run / "reward").exists()
    assert (run / "rejected" / "reward-1" / "model").is_dir() and (run / "sft" / "model" / "config.json").exists()
    said = json.loads((run / "gates.json").read_text())
    assert [(v["stage"], v["passed"]) for v in said["verdicts"]] == [("sft", True), ("reward", False)]
    assert said["final"].endswith("sft/model") and "FAILED" in (run / "gates.html").read_text()
    with pytest.raises(RunError, match="reward didn't pass"):  # nothing has changed, so nothing is tried again
        RLHFPipeline(config(tmp_path / "a", seed, flipped=True)).run(resume=True)
    if seed == 0:  # other settings are another attempt
        with pytest.raises(RunError, match="reward didn't pass"):
            RLHFPipeline(config(tmp_path / "a", seed, flipped=True, reward={"steps": 2})).run(resume=True)
        assert (run / "rejected" / "reward-2").is_dir()


def test_a_good_pipeline_passes_and_is_not_judged_twice(tmp_path: Path) -> None:
    good = config(tmp_path / "a", ppo={"steps": 3, "optimizer": {"lr": 1e-5}}, gates={"margin": 0.2})
    results = RLHFPipeline(good).run()
    assert [(v["stage"], v["passed"]) for v in results["gates"]] == [("sft", True), ("reward", True), ("ppo", True)], (
        results["gates"]
    )
    assert results["final"].endswith("ppo/model")
    assert len(RLHFPipeline(good).run(resume=True)["gates"]) == 3


@pytest.mark.slow  # 13 CPU seconds; the notebook of gates is fast
def test_the_next_candidate_is_tried_and_the_end_may_be_the_model_before(tmp_path: Path) -> None:
    gates = {
        "on_failure": "go_back", "rules": {"ppo": [{"metric": "kl", "at_most": -100.0}]},  # an estimate of KL may be below zero, never so far
        "candidates": {"ppo": [{"optimizer": {"lr": 2e-4}}, {"steps": 2}]}, "margin": 0.5,
    }  # fmt: skip
    said: list[str] = []
    results = RLHFPipeline(config(tmp_path / "a", gates=gates), said.append).run()
    tries = [v for v in results["gates"] if v["stage"] == "ppo"]
    assert [(v["attempt"], v["passed"]) for v in tries] == [(0, False), (1, False), (2, False)] and tries[2][
        "settings"
    ] == {"steps": 2}
    assert results["final"].endswith("sft/model") and "ppo" not in results["policies"]
    kept = sorted((tmp_path / "a" / "run" / "rejected").iterdir())
    steps = [json.loads((p / "stage.json").read_text())["metrics"] for p in kept]
    assert [p.name for p in kept] == ["ppo-1", "ppo-2", "ppo-3"] and len(steps) == 3
    assert any("trying optimizer.lr=0.0002" in s for s in said) and any("The model before it stays" in s for s in said)


def test_what_makes_no_sense_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for gates, words in (
        ({"rules": {"dpo": [{"metric": "kl", "at_most": 1}]}}, "no stage of this pipeline"),
        ("loose", "strict"),
        ({"rules": {"ppo": [{"metric": "kl"}]}}, "no bound"),
        ({"choose": "halving"}, "here rlhf-nb sweep compares them"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(tmp_path / "a", gates=gates)
    assert PipelineConfig.load(None, ["gates=strict"], "toy").gates is not None
