"""A notebook's run in a folder: several processes do its first two steps again, or refuse to start."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import forked
import pytest
from command import call

from rlhf_nb.core import RunError
from rlhf_nb.run.log import read_metrics
from rlhf_nb.scale.launch import launch
from rlhf_nb.train.grpo import GRPOConfig

NOTEBOOK = """\
import re

from rlhf_nb.scale.promote import promote
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer

GOAL = 6
END = re.compile(r"[.!?]\\\\s*$")


def words(text):
    return len(text.split())


def near_goal(prompts, completions):
    return [-abs(words(t) - GOAL) / 10 for t in completions]


def ends(completions, **kwargs):
    return [float(bool(END.search(t))) for t in completions]


if __name__ == "__main__":
    config = GRPOConfig.preset(
        "toy", output_dir="run", steps=2, epochs=None, mini_batch_size=16, num_generations=4, console=False, sampling={"max_new_tokens": 10}
    )
    GRPOTrainer(config, reward=[near_goal, ends]).fit()
    print(promote(config, [near_goal, ends], "job"))
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a script, as a notebook would, has promoted its run to."""
    place = tmp_path_factory.mktemp("promoted")
    (place / "notebook.py").write_text(NOTEBOOK)
    command = [sys.executable, "notebook.py"]
    done = forked.run(command, cwd=place)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "the run in run began the same way" in done.stdout and "launch grpo --config job" in done.stdout
    return place / "job"


def replayed(job: Path, place: Path, strategy: str) -> None:
    """Two processes begin as the notebook did."""
    config = GRPOConfig.load(job, [f"output_dir={place / 'good'}", "console=true"])
    done = launch(config, num_processes=2, strategy=strategy, device="cpu", say=None)
    assert len(done.history) == 2
    said = (done.run_dir / "launch" / "out.txt").read_text()
    assert "replay: 2 steps as in the notebook" in said
    first = [json.loads(x) for x in (job.parent / "run" / "samples.jsonl").read_text().splitlines()][0]
    there = [json.loads(x) for x in (done.run_dir / "samples.jsonl").read_text().splitlines()][0]
    assert first["tokens"] == there["tokens"] and first["rewards"].items() <= there["rewards"].items()
    one, two = ([e for e in read_metrics(f) if e["type"] == "step"] for f in (job.parent / "run", done.run_dir))
    for a, b in zip(one, two, strict=True):
        mine = {k: v for k, v in a.items() if k.startswith("rewards/") or k in ("loss", "reward", "grad_norm")}
        assert {k: b[k] for k in mine} == pytest.approx(mine, abs=1e-5)


def refused(job: Path, place: Path, strategy: str) -> None:
    """With another constant in the module, two processes don't begin."""
    config = GRPOConfig.load(job, ["console=false"])
    text = (job / "rewards.py").read_text()
    (job / "rewards.py").write_text(text.replace("GOAL = 6", "GOAL = 5"))
    try:
        with pytest.raises(
            RunError, match="replay: reward 'near_goal' gave -0.* in the notebook, and gives -0.* here, at step 1"
        ):
            launch(
                config.replace(output_dir=str(place / "bad")),
                num_processes=2,
                strategy=strategy,
                device="cpu",
                say=None,
            )
    finally:
        (job / "rewards.py").write_text(text)
    assert not list((place / "bad" / "checkpoints").glob("step-*"))


def test_two_processes_begin_as_the_notebook_did(job: Path, tmp_path: Path) -> None:
    replayed(job, tmp_path, "ddp")


@pytest.mark.slow
def test_two_processes_refuse(job: Path, tmp_path: Path) -> None:
    refused(job, tmp_path, "ddp")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_sharded_processes_replay_or_refuse(job: Path, tmp_path: Path, strategy: str) -> None:
    if strategy == "zero3":
        pytest.importorskip("deepspeed")
    replayed(job, tmp_path, strategy)
    refused(job, tmp_path, strategy)


def test_the_cluster_gets_the_folder(job: Path) -> None:
    assert f"grpo --config {job}" in call("launch", "grpo", "--config", job, "--slurm")
    outside = call("launch", "grpo", "--config", job, "--k8s", "image", "output_dir=/shared/run", code=1)
    assert "no pod would see it" in outside
