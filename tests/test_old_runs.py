"""Run folders of an earlier version are read, reported, resumed and sampled by today's code.

`data/runs-0.2.0.dev0.tar.gz` was written by commit 9a0cc37, on 6,000-parameter models: six methods, each put back to step 2 of 4 with the whole
log beside it (`METHOD.metrics.jsonl`), a fork, a sweep and a gated pipeline.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import call

HERE = Path(__file__).resolve().parent
METHODS = ("sft", "dpo", "reward", "ppo", "grpo", "kto")  # the reward model is needed by PPO
EXACT = {
    "sft": "loss",
    "dpo": "loss",
    "reward": "loss",
    "kto": "loss",
}  # no answers are drawn: only rounding may differ


def steps(path: Path) -> dict[int, dict[str, Any]]:
    """The steps of a log."""
    events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {e["step"]: e for e in events if e["type"] == "step"}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, before = tmp_path_factory.mktemp("old"), Path.cwd()
    with tarfile.open(HERE / "data" / "runs-0.2.0.dev0.tar.gz") as stored:
        stored.extractall(folder, filter="data")
    os.chdir(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_NB_TEST_SEED", "0")  # the stored numbers are of one seed
        yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def resumed(old: Path) -> Path:
    for method in METHODS:
        assert max(steps(old / method / "metrics.jsonl")) == 2
        call(method, "--config", method, "--resume")
    return old


@pytest.mark.parametrize("method", METHODS)
def test_settings_of_an_old_run_are_read(old: Path, method: str) -> None:
    before = (old / method / "config.yaml").read_text(encoding="utf-8")
    shown = call("config", "show", method, "--config", method)
    assert f"output_dir: {method}" in shown and "save_every: 2" in shown
    assert call("watch", method, "--once")
    assert (old / method / "config.yaml").read_text(encoding="utf-8") == before


@pytest.mark.parametrize("method", METHODS)
def test_an_old_run_goes_on(resumed: Path, method: str) -> None:
    was, now = steps(resumed / f"{method}.metrics.jsonl"), steps(resumed / method / "metrics.jsonl")
    assert set(now) == {1, 2, 3, 4} and (resumed / method / "stage.json").exists()
    assert set(was[4]) - set(now[4]) == set(), "a metric lost its name"
    for step in (3, 4):
        assert math.isfinite(now[step]["loss"])
        if method in EXACT:
            key = EXACT[method]
            assert now[step][key] == pytest.approx(was[step][key], rel=2e-3)
        else:
            assert now[step]["val/ratio"] == pytest.approx(1.0, abs=0.05)


def test_old_and_new_are_reported_and_sampled(resumed: Path) -> None:
    for method in ("sft", "reward", "ppo"):  # 2 CPU seconds each, mostly for drawing
        assert call("report", method, "--out", f"{method}.html").splitlines()[0] == f"{method}.html"
        assert len((resumed / f"{method}.html").read_bytes()) > 2000
    assert "→" in call("sample", "sft/model", "Where do owls live?", "--max-new-tokens", "4")
    assert "→" in call("sample", "start", "Where do owls live?", "--max-new-tokens", "4")


def test_a_copy_put_back_and_resumed_is_another_future(resumed: Path) -> None:
    """The lines of docs/laboratory.md: the steps before are shared; with nothing changed those behind have the same numbers, else not."""
    whole = steps(resumed / "ppo" / "metrics.jsonl")
    for name, words in (("same", []), ("other", ["kl_coef=2.0"])):
        shutil.copytree(resumed / "ppo", resumed / name)
        call("runs", "rollback", name, 2)
        call("ppo", "--config", f"{name}/config.yaml", f"output_dir={name}", *words, "--resume")
        made = steps(resumed / name / "metrics.jsonl")
        assert made.keys() == whole.keys() and made[2] == whole[2]
        assert made[4]["objective/kl_coef"] == (2.0 if words else whole[4]["objective/kl_coef"])
        assert (made[4]["loss"] == whole[4]["loss"]) is (name == "same")


def test_an_old_sweep_is_the_same_sweep(old: Path) -> None:
    was = json.loads((old / "sweep" / "sweep.json").read_text(encoding="utf-8"))
    line = (
        "model.name_or_path=start",
        "save_every=2",
        "keep_checkpoints=2",
        "precision=fp32",
        "mini_batch_size=8",
        "console=false",
    )
    call(
        "sweep",
        "sft",
        "--toy",
        *line,
        "steps=2",
        "epochs=null",
        "data.eval_size=8",
        "optimizer.lr=1e-5,1e-3",
        "--seeds",
        "2",
        "--to",
        "sweep",
    )
    now = json.loads((old / "sweep" / "sweep.json").read_text(encoding="utf-8"))
    assert (now["best"], now["metric"], now["version"]) == (was["best"], was["metric"], was["version"])
    for before, after in zip(was["table"], now["table"], strict=True):
        assert after["candidate"] == before["candidate"]
        assert after["values"] == pytest.approx(before["values"], rel=2e-3)


def test_an_old_pipeline_is_finished_and_its_gates_are_read(old: Path) -> None:
    was = json.loads((old / "pipeline" / "results.json").read_text(encoding="utf-8"))
    shown = call("run", "--config", "pipeline", "--resume", "console=true")
    assert shown.count("finished before, skipped") == 3 and "What the gates say" in shown
    now = json.loads((old / "pipeline" / "results.json").read_text(encoding="utf-8"))
    assert now["stages"] == was["stages"] and now["gates"] == was["gates"]
    assert now["policies"].keys() == was["policies"].keys()
    for name, policy in was["policies"].items():
        assert now["policies"][name].keys() >= policy.keys()
