"""A sweep over settings: killed and begun again it ends with the same table, in one process or two; what fails is told and left out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_nb.core import ConfigError, RunError
from rlhf_nb.pipeline.sweep import sweep
from rlhf_nb.train.dpo import DPOConfig
from rlhf_nb.train.registry import get
from rlhf_nb.train.sft import SFTConfig

SMALL: dict[str, Any] = {"steps": 3, "epochs": None, "mini_batch_size": 8, "data": {"eval_size": 16}, "console": False}
WORDS = ["optimizer.lr=1e-5,1e-3,2e-3", "steps=3", "epochs=null", "mini_batch_size=8", "data.eval_size=16"]
OVER = {"optimizer.lr": [1e-5, 1e-3, 2e-3]}


@pytest.mark.slow  # 44 CPU seconds; that what is finished is kept is tested below, and by the notebook
def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    """kill -9 in the middle of a sweep with two workers; these end with it, and the same line ends with the same table."""
    line = [sys.executable, "-m", "rlhf_nb", "sweep", "sft", "--toy", *WORDS, "--seeds", "2", "--processes", "2", "--to", str(tmp_path / "killed")]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while (
        not list((tmp_path / "killed").glob("*/*/stage.json")) and time.monotonic() < limit and running.poll() is None
    ):
        time.sleep(0.05)
    assert running.poll() is None, "it ended before it could be killed"
    running.send_signal(signal.SIGKILL)
    running.wait()
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Winner: optimizer.lr=0.002" in done.stdout, done.stdout + done.stderr
    whole = sweep(SFTConfig.preset("toy", **SMALL), OVER, tmp_path / "whole", seeds=2)
    killed = json.loads((tmp_path / "killed" / "sweep.json").read_text())
    assert killed == json.loads((tmp_path / "whole" / "sweep.json").read_text())
    assert whole.model().is_dir() and not list((tmp_path / "whole").glob("*/*/checkpoints"))


def test_what_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One candidate's runs fail; the others are compared. Where all fail, the reason is the error."""
    begin = get("dpo").trainer

    def broken(config: Any) -> Any:
        if config.beta > 0.3:
            raise RunError("no memory is left")
        return begin(config)

    monkeypatch.setattr("rlhf_nb.train.stage.of", lambda config: _with(get("dpo"), broken))
    base = DPOConfig.preset("toy", **{**SMALL, "steps": 2})
    made = sweep(base, {"beta": [0.1, 0.5]}, tmp_path / "a", seeds=1)
    assert (
        made.best == {"beta": 0.1}
        and "seed 0: no memory is left" in made.table[1].failed
        and "One seed" in made.notes[0]
    )
    with pytest.raises(RunError, match="every candidate failed; beta=0.5, seed 0: no memory"):
        sweep(base, {"beta": [0.5, 0.6]}, tmp_path / "b", seeds=1)


def _with(method: Any, trainer: Any) -> Any:
    from dataclasses import replace

    return replace(method, trainer=trainer)


def test_settings_that_no_run_can_begin_with_are_told_once(tmp_path: Path) -> None:
    from rlhf_nb.core import ConfigError
    from rlhf_nb.train.ppo import PPOConfig

    said: list[str] = []
    for processes in (1, 2):
        with pytest.raises(ConfigError, match=r"the first run, kl_coef=0\.\d+, can't begin: reward is not set"):
            base = PPOConfig.preset("toy", steps=2, epochs=None)
            sweep(
                base,
                {"kl_coef": [0.01, 0.05]},
                tmp_path / str(processes),
                seeds=1,
                processes=processes,
                say=said.append,
            )
    assert not any("failed" in line for line in said)


def test_a_metric_that_no_run_has_costs_one_run(tmp_path: Path) -> None:
    said: list[str] = []
    base = SFTConfig.preset("toy", steps=1, epochs=None, mini_batch_size=8, console=False)
    with pytest.raises(ConfigError, match="metric rewards/helpful"):
        over = {"optimizer.lr": [1e-3, 1e-2]}
        sweep(base, over, tmp_path, seeds=2, metric="rewards/helpful", say=said.append)
    assert not [line for line in said if line.startswith("[2/")], said
