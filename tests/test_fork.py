"""A fork shares bits and random numbers with its parent; a setting that was changed counts, whatever the checkpoint remembers."""

from __future__ import annotations

import inspect
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_nb.core import RunError
from rlhf_nb.pipeline.fork import prepare_fork, run_fork, settings_of
from rlhf_nb.run.control import start_fork
from rlhf_nb.run.log import RunDir, read_metrics
from rlhf_nb.sandbox.runner import Sandbox
from rlhf_nb.train.dpo import DPOConfig
from rlhf_nb.train.grpo import GRPOConfig
from rlhf_nb.train.ppo import PPOConfig
from rlhf_nb.train.registry import methods
from rlhf_nb.train.sft import SFTConfig
from rlhf_nb.train.stage import run_stage
from rlhf_nb.widgets.runs import Runs

SMALL: dict[str, Any] = {"epochs": None, "console": False, "mini_batch_size": 8}
DRAWN = {"sampling": {"max_new_tokens": 8}, "rollout_batch_size": 16, "reward": "gold"}
KINDS: dict[str, Any] = {
    "ppo": (PPOConfig, DRAWN | {"kl_target": 1.0, "kl_horizon": 400}),
    "grpo": (GRPOConfig, {**DRAWN, "num_generations": 4, "kl_coef": 0.1}),
    "dpo": (DPOConfig, {}),
}


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Numbers of each step but those of the clock and the machine."""
    found = [e for e in read_metrics(folder) if e["type"] == "step"]
    return {e["step"]: {k: v for k, v in e.items() if not k.startswith(("perf/", "time"))} for e in found}


def weights(folder: Path) -> bytes:
    return (folder / "model" / "model.safetensors").read_bytes()


def parent(folder: Path, kind: str = "ppo", **over: Any) -> Path:
    config, how = KINDS[kind]
    run_stage(
        config.preset(
            "toy",
            output_dir=str(folder),
            **{**SMALL, "steps": 6, "save_every": 2, "keep_checkpoints": 9, **how, **over},
        )
    )
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parent(tmp_path_factory.mktemp("fork") / "run", kl_target=None, kl_coef=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changed_is_the_same_future(kind: str, tmp_path: Path) -> None:
    """From a checkpoint, and from a step between two; with a controller, a reference and a position in the data."""
    run = parent(tmp_path / "run", kind)
    for at in (4, 3) if kind == "ppo" else (3,):
        made = prepare_fork(run, at)
        assert made.replayed == at % 2 and not made.differs and not made.changes
        run_fork(made)
        assert steps(made.folder) == steps(run) and weights(made.folder) == weights(run)
        assert (
            [r["completion"] for r in read_metrics(made.folder / "samples.jsonl")]
            == [r["completion"] for r in read_metrics(run / "samples.jsonl")]
            if (run / "samples.jsonl").exists()
            else True
        )


@pytest.mark.parametrize(
    ("change", "metric", "value"), [("kl_coef=0.05", "objective/kl_coef", 0.05), ("optimizer.lr=1e-5", "lr", 1e-5)]
)
def test_a_changed_setting_counts(run: Path, tmp_path: Path, change: str, metric: str, value: float) -> None:
    made = prepare_fork(run, 4, [change], tmp_path / "fork")
    run_fork(made)
    ours, theirs = steps(made.folder), steps(run)
    assert (
        ours[4] == theirs[4] and ours[5][metric] == pytest.approx(value) and theirs[5][metric] != pytest.approx(value)
    )
    assert ours[5]["objective/scores"] == theirs[5]["objective/scores"], "the first answers after the fork are the same"
    assert weights(made.folder) != weights(run) and RunDir(made.folder).config() | {"output_dir": 0} != RunDir(
        run
    ).config() | {"output_dir": 0}


def test_a_setting_changed_on_resume_counts_too(run: Path, tmp_path: Path) -> None:
    """The checkpoint remembers the price of drift of its run; the config of the resumed one wins, also in a second try."""
    folder = tmp_path / "again"
    shutil.copytree(run, folder)
    for left in ("stage.json",):
        (folder / left).unlink()
    for later in (folder / "checkpoints").glob("step-*6"):
        shutil.rmtree(later)
    config = settings_of(folder)[1].replace(output_dir=str(folder), kl_coef=0.5)
    config.save(folder / "config.yaml")  # as if a first try had been killed before it saved anything
    run_stage(config, resume=True)
    assert [steps(folder)[s]["objective/kl_coef"] for s in (4, 5, 6)] == [0.2, 0.5, 0.5]


def test_refusals(run: Path, tmp_path: Path) -> None:
    before = sorted(p.name for p in run.parent.iterdir())
    for at, changes, words in (
        (9, [], "choose a step from 1 to 6"), (0, [], "choose a step from 1 to 6"), (4, ["model.lora.r=8"], "Begin a new run"), (4, ["seed=9"], "Begin a new run"), (4, ["kl_coeff=1"], "kl_coef"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=words):
            prepare_fork(run, at, changes)
    with pytest.raises(RunError, match="--to"):
        prepare_fork(run, 4, [], run)
    assert sorted(p.name for p in run.parent.iterdir()) == before, "a refused fork leaves nothing"


@pytest.mark.parametrize("absolute", [True, False])
def test_files_are_found_from_another_folder(absolute: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are named from where the run was started; the fork is asked for elsewhere, wherever the run's own folder was named from."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Who?", "completion": "Owls."}\n' * 8)
    where = tmp_path / "runs" / "a" if absolute else Path("runs") / "a"
    more = {"steps": 2, "save_every": 1, "data": {"path": "rows.jsonl"}}
    run_stage(SFTConfig.preset("toy", output_dir=str(where), **{**SMALL, **more}))
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    made = prepare_fork(tmp_path / "runs" / "a", 1, ["optimizer.lr=0.001"])
    assert settings_of(made.folder)[1].data.path == str(tmp_path / "rows.jsonl") and not made.differs
    assert [c.partition(":")[0] for c in made.changes] == ["optimizer.lr"]


def test_a_fork_takes_no_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the folder in which the run was started, whatever lies above the run or here; without a record of it the
    only ones above, with a note."""
    for name in ("proj", "store", "else"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text(f'{{"prompt": "Who?", "completion": "{name}."}}\n' * 8)
    monkeypatch.chdir(tmp_path / "proj")
    run, more = tmp_path / "store" / "runs" / "a", {"steps": 2, "save_every": 1, "data": {"path": "rows.jsonl"}}
    run_stage(SFTConfig.preset("toy", output_dir=str(run), **{**SMALL, **more}))
    monkeypatch.chdir(tmp_path / "else")

    def taken(to: str) -> str:
        return str(settings_of(prepare_fork(run, 1, [], tmp_path / to).folder)[1].data.path)

    assert taken("1") == str(tmp_path / "proj" / "rows.jsonl")
    (tmp_path / "proj" / "rows.jsonl").unlink()
    assert taken("2") == str(tmp_path / "proj" / "rows.jsonl"), "not those that happen to be here"
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace('"begun_in"', '"of_old"'))
    (tmp_path / "else" / "rows.jsonl").unlink()
    with pytest.warns(UserWarning, match="path rows.jsonl is taken to be .*store/rows.jsonl, the only one above"):
        assert taken("3") == str(tmp_path / "store" / "rows.jsonl")
    shutil.copy(tmp_path / "store" / "rows.jsonl", tmp_path)
    with pytest.raises(RunError, match="path rows.jsonl may be .*store/rows.jsonl or .*/rows.jsonl, since its log"):
        taken("4")


def test_a_fork_that_was_killed_while_it_was_made_is_no_run(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rlhf_nb.pipeline.fork as module

    def dies(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_first_difference", dies)
    with pytest.raises(KeyboardInterrupt):
        prepare_fork(run, 3, [], tmp_path / "fork")
    assert not RunDir(tmp_path / "fork").holds_run()
    monkeypatch.undo()
    made = prepare_fork(run, 3, [], tmp_path / "fork")
    run_fork(made)
    assert weights(made.folder) == weights(run)
    assert json.loads((made.folder / "fork.json").read_text())["at"] == 3


def test_no_click_lets_foreign_code_run(tmp_path: Path) -> None:
    """Whatever setting of any method, or of the sandbox, says that code is trusted or may leave."""
    keys = {k for method in methods().values() for k in method.config().flat()}
    keys |= set(inspect.signature(Sandbox).parameters)
    rights = {k for k in keys if any(word in k for word in ("trust", "escape", "unsafe", "allow"))}
    assert {k.rpartition(".")[2] for k in rights} == {"trust_remote_code", "programs_may_escape"}
    for key in rights:
        with pytest.raises(RunError, match="lets foreign code run"):
            start_fork(tmp_path, 3, {key: True})
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_click_begins_a_future_in_a_process_of_its_own(run: Path) -> None:
    """What the board and the cockpit call: the command runs to its end, and its first step draws the parent's answers."""
    log = start_fork(run, 4, {"kl_coef": 0.9, "optimizer.lr": 1e-4})
    child, begin = run.with_name("run-fork4-1"), time.monotonic()
    while not (child / "model").exists() and time.monotonic() - begin < 240:
        time.sleep(0.5)
    assert (child / "model").exists(), log.read_text()
    assert settings_of(child)[1].kl_coef == 0.9 and settings_of(child)[1].optimizer.lr == 1e-4
    mine, theirs = steps(child), steps(run)
    assert mine[4] == theirs[4] and mine[5]["objective/scores"] == theirs[5]["objective/scores"]
    (told,) = (f for f in Runs(run.parent).futures("run") if f["name"] == "run-fork4-1")
    assert told["at"] == 4 and told["depth"] == 1 and "kl_coef: 0.2 -> 0.9" in told["changed"]
