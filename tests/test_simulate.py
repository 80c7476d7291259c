"""Simulated hours: shares add up, hazards cost what they must, bad numbers are refused. The exact cases are in the notebook."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import ConfigError
from rlhf_nb.scale.predict import named_gpu
from rlhf_nb.scale.simulate import DrawLayout, Hazards, fastest, simulate_run, simulated_hours
from rlhf_nb.scale.topology import DecoderShape, Job


@pytest.mark.parametrize("drawers", [0, 3])
@pytest.mark.parametrize("seed", range(5))
def test_shares_add_up_and_the_end_is_kept(drawers: int, seed: int) -> None:
    hazards = Hazards(between=20.0, restart=120.0, taken=5.0, spread=0.1, mean_length=0.4, tail=0.8)
    run = simulate_run(
        5.0, 4.0, 8, hours=30.0, drawers=drawers, lag=1, sent=0.5, answers=64, save=3.0, hazards=hazards, seed=seed
    )
    assert math.isclose(run.busy + run.idle + run.saving + run.lost + run.restarting, 1.0)
    assert run.failures > 0 and all(x > 0 for x in run[3:])
    assert 30.0 <= run.hours < 30.2 and run.seconds > 0.4 * 5 * (3 / 8 if drawers else 1)
    other = simulate_run(5.0, 4.0, 8, steps=50, drawers=drawers, lag=1, every=7, hazards=hazards, seed=seed)
    assert other.steps == 50


def test_no_share_is_negative() -> None:
    for drawers in (0, 1, 4, 7):
        for lag in (0, 1, 4):
            for draw, learn, sent, every in ((10.0, 1.0, 0.0, 1), (1.0, 10.0, 3.0, 1), (3.0, 3.0, 1.0, 9)):
                hazards = Hazards(between=100.0, spread=0.05)
                run = simulate_run(
                    draw,
                    learn,
                    8,
                    steps=400,
                    drawers=drawers,
                    lag=lag,
                    sent=sent,
                    save=5.0,
                    every=every,
                    hazards=hazards,
                )
                assert min(run[3:]) > -1e-9, (drawers, lag, draw, run)


def test_short_steps_fill_the_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = DecoderShape(layers=4, hidden=256, inner=512, heads=4, kv_heads=4, head_dim=64, vocab=1000)
    job, gpu = Job("grpo", prompt=64, completion=64, mini_batch=64, rollout_batch=64), named_gpu("h100")
    rows = []
    for most in (20_000, 1000):
        monkeypatch.setattr("rlhf_nb.scale.simulate.MOST_STEPS", most)
        found = (
            simulated_hours(shape, job, [64], gpu, 0.05, hazards=Hazards(between=1.0, restart=1.0))
            .splitlines()[2]
            .split(" | ")
        )
        rows.append((int(found[4].replace(",", "")), int(found[5].replace(",", ""))))
    (fine, failures), (coarse, others) = rows
    assert abs(fine - coarse) < 0.05 * fine and failures > 0 and others > 0


def test_notice_loses_no_step_and_a_failure_does() -> None:
    calm = simulate_run(1.0, 1.0, 8, hours=50.0, save=1.0, hazards=Hazards(between=1e30))
    taken = simulate_run(1.0, 1.0, 8, hours=50.0, save=1.0, every=500, hazards=Hazards(between=1e30, taken=2.0))
    failed = simulate_run(1.0, 1.0, 8, hours=50.0, save=1.0, every=500, hazards=Hazards(between=16.0))
    assert (calm.lost, calm.restarting, taken.lost, taken.failures) == (0.0, 0.0, 0.0, 0)
    assert failed.failures > 0 and failed.lost > 0.02 and calm.busy > taken.busy > failed.busy


@pytest.mark.parametrize(
    "change",
    [
        {"drawers": 8},
        {"drawers": -1},
        {"lag": -1},
        {"hours": math.inf},
        {"hours": 0.0},
        {"draw": -1.0},
        {"learn": 0.0},
        {"sent": math.nan},
        {"answers": 0},
        {"hazards": Hazards(between=0.0)},
        {"hazards": Hazards(spread=-1.0)},
    ],
)
def test_bad_numbers_are_refused(change: dict[str, Any]) -> None:
    given = {"draw": 1.0, "learn": 1.0, "hours": 1.0, "drawers": 0, "lag": 0, "sent": 0.0} | change
    with pytest.raises(ConfigError, match="a run needs an end"):
        simulate_run(gpus=8, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hardly any would ever be reached"):
        simulate_run(1.0, 1.0, 8, steps=1000, every=1000, hazards=Hazards(between=0.01))
    assert simulate_run(1.0, 1.0, 8, steps=3, hazards=Hazards(between=math.inf)).steps == 3


def test_a_plan_searches_split_and_lag_and_says_what_each_part_takes(tmp_path: Path) -> None:
    widths = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    stated = {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 128_256} | widths
    (tmp_path / "config.json").write_text(json.dumps(stated))

    def cells(*more: str) -> list[str]:
        said = CliRunner().invoke(
            app,
            [
                "plan",
                "grpo",
                f"model.name_or_path={tmp_path}",
                "--gpus",
                "8",
                "--on",
                "h100",
                "--price",
                "2",
                *more,
                "steps=500",
            ],
        )
        assert said.exit_code == 0, said.output
        table = said.output.partition("The fastest split and lag")[2]
        assert "hours of 500 steps" in table and "GiB of each rank: policy" in table, said.output
        return [x.strip() for x in next(x for x in table.splitlines() if x.startswith("| 8 |")).split("|")[1:-1]]

    calm, tailed, failing = cells(), cells("--mean-length", "0.3", "--tail", "0.6"), cells("--mtbf", "50")
    seconds = lambda row: [float(x) for x in row[3:11]]
    assert seconds(calm)[2] == 0 < seconds(tailed)[2]  # what the longest answer takes beyond the mean
    assert calm[0] == tailed[0] == "8" and (seconds(tailed)[1] < 0.5 * seconds(calm)[1] or tailed[1] != calm[1])
    assert math.isclose(seconds(calm)[7] / seconds(failing)[7], math.sqrt(50_677 / 50), rel_tol=0.01)  # Young's rule
    assert float(failing[12].replace(",", "")) >= float(calm[12].replace(",", "")) > 0


def test_the_least_stale_of_layouts_that_are_as_fast() -> None:
    def way(drawers: int, lag: int) -> DrawLayout:
        return DrawLayout(drawers, lag, 4.0, 4.0, 0.0, 1.0, 64)

    calm = Hazards()
    assert fastest([way(4, lag) for lag in range(5)], 8, calm)[0].lag == 1  # lag 1 hides all that can be hidden
    slow_wires = [way(4, lag)._replace(sent=4.0) for lag in range(5)]
    assert fastest(slow_wires, 8, calm)[0].lag == 2
    best, seconds = fastest([way(0, 0), way(4, 1)], 8, calm)
    assert best.drawers == 4 and abs(seconds - 4.0) < 0.1


def test_the_command_says_who_waits() -> None:
    said = CliRunner().invoke(
        app, ["simulate", "grpo", "--toy", "--gpus", "8", "--gpus", "1", "--hours", "0.01", "--taken", "1"]
    )
    assert said.exit_code == 0, said.output
    assert (
        "| 8 | all, in turn | 0 |" in said.output
        and "| 1 | all, in turn |" in said.output
        and said.output.count("\n| 1 |") == 1
    )
    sft = CliRunner().invoke(app, ["simulate", "sft", "--toy", "--gpus", "8", "--hours", "0.01"])
    assert sft.exit_code == 0 and sft.output.count("\n| 8 |") == 1, sft.output
    alone = CliRunner().invoke(app, ["simulate", "grpo", "model.name_or_path=toy", "--gpus", "8", "--hours", "0.01"])
    assert alone.exit_code == 0, f"a model is enough, as in `simulate --help` and for `plan`: {alone.output}"
    bad = CliRunner().invoke(app, ["simulate", "grpo", "--toy", "--on", "abacus"])
    assert bad.exit_code == 1 and "no GPU 'abacus' is known" in bad.output
