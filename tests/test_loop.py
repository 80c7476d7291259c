"""The loop when things go wrong: full disk, damaged checkpoints, another run's folder, Ctrl-C, several ranks."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from process_cases import run_ranks
from resume_harness import Numbers, Points, Regression, outcome, regression_config, run_to_end, spawn
from torch import nn

import rlhf_nb.run.checkpoint as checkpoint
import rlhf_nb.run.engine as engine
import rlhf_nb.run.state as state
import rlhf_nb.run.strategy as strategy
from rlhf_nb.config import TrainConfig
from rlhf_nb.core import CheckpointError, ConfigError, RunError
from rlhf_nb.run.callbacks import Callback, EarlyStop, Flags
from rlhf_nb.run.checkpoint import AsyncWriter, latest_complete, load_checkpoint, problem_of, save_checkpoint
from rlhf_nb.run.log import EventLog, read_metrics
from rlhf_nb.run.loop import BaseMethod, Trainer, _check_shares
from rlhf_nb.types import LossSum

ROOT = Path(__file__).resolve().parent.parent


def trainer(run_dir: Path, callbacks: Any = (), method: Any = None, **over: Any) -> Trainer:
    return Trainer(method or Regression(), Numbers(), regression_config(**over), run_dir=run_dir, callbacks=callbacks)


def weights(t: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in t.method.module.state_dict().values()]


def without(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in named.items() if "running" not in k}


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# a full disk


def test_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = trainer(tmp_path / "straight")
    straight.fit()
    real, calls = checkpoint.save_file, []

    def full(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) > 9:  # the first checkpoint fits, the second breaks off
            Path(path).write_bytes(b"the first half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    t = trainer(tmp_path / "full")
    with pytest.raises(CheckpointError, match=r"the disk is full.*the checkpoint of step 3 is intact.*still in memory"):
        t.fit()
    folder = tmp_path / "full" / "checkpoints"
    assert [p.name for p in folder.iterdir()] == ["step-0000000003"], "half a checkpoint was left behind"
    assert problem_of(folder / "step-0000000003") is None
    assert read_metrics(tmp_path / "full")[-1]["type"] == "end"

    monkeypatch.setattr(checkpoint, "save_file", real)  # somebody frees some space: the same trainer goes on
    t.fit()
    assert same(weights(t), weights(straight))

    resumed = trainer(tmp_path / "full")  # and a new process could have gone on as well
    resumed.fit(resume=True)
    assert same(weights(resumed), weights(straight))


def test_really_full_disk(tmp_path: Path) -> None:
    """A tmpfs of 300 kB, where mounting is allowed."""
    small = tmp_path / "small"
    small.mkdir()
    if (
        os.getuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small], capture_output=True).returncode
    ):
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        save_checkpoint(small, 1, {"model": {"w": torch.ones(1000)}}, {})
        with pytest.raises(CheckpointError, match="the disk is full"):
            save_checkpoint(small, 2, {"model": {"w": torch.ones(200_000)}}, {})
        assert latest_complete(small) == small / "step-0000000001"
        assert [p.name for p in small.iterdir()] == ["step-0000000001"]
    finally:
        subprocess.run(["umount", small], check=True)


def test_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write to the run directory"):
        trainer(tmp_path / "file" / "below").fit()
    with pytest.raises(RunError, match="/dev/full is a device"):
        EventLog("/dev/full").append("step", 1)
    if Path("/dev/full").exists():
        log = EventLog(tmp_path / "log.jsonl")
        log._file = open("/dev/full", "a")
        with pytest.raises(RunError, match="log.jsonl cannot be written: .*No space left.*free some space"):
            log.append("step", 1)


# ---------------------------------------------------------------------------------------------------------------------
# damaged checkpoints


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest", "no manifest"])
def test_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    straight = trainer(tmp_path / "a")
    straight.fit()
    t = trainer(tmp_path / "b", steps=30, callbacks=[StopAt(17)])
    t.fit()
    newest = latest_complete(tmp_path / "b" / "checkpoints")
    assert newest is not None and newest.name == "step-0000000017"
    victim = newest / "model.safetensors"
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 0x10
        victim.write_bytes(data)
    elif damage == "truncate":
        victim.write_bytes(data[:-7])
    elif damage == "delete":
        victim.unlink()
    elif damage == "manifest":
        (newest / "manifest.json").write_text("{")
    else:
        (newest / "manifest.json").unlink()
    resumed = trainer(tmp_path / "b")
    with pytest.warns(UserWarning, match="step-0000000017 was passed over"):
        resumed.fit(resume=True)
    events = read_metrics(tmp_path / "b")
    assert [e["step"] for e in events if e["type"] == "step"] == list(range(1, 31))
    assert next(e for e in events if e["type"] == "resume")["path"] == "step-0000000015"
    assert same(weights(resumed), weights(straight))


def test_no_checkpoint_left_is_an_error(tmp_path: Path) -> None:
    """Going on from the start would cut the logs of all steps, so that is only done when asked for."""
    straight = trainer(tmp_path / "a")
    straight.fit()
    t = trainer(tmp_path / "b", callbacks=[StopAt(5)], save_every=None)
    t.fit()
    for folder in (tmp_path / "b" / "checkpoints").iterdir():
        (folder / "state.json").write_text("{}")
    log = (tmp_path / "b" / "metrics.jsonl").read_bytes()
    with pytest.raises(
        CheckpointError, match="no checkpoint can be used.*state.json has.*begin anew with overwrite=True"
    ):
        trainer(tmp_path / "b").fit(resume=True)
    assert (tmp_path / "b" / "metrics.jsonl").read_bytes() == log
    again = trainer(tmp_path / "b")
    history = again.fit(overwrite=True)
    assert history.series("step") == list(range(1, 31)) and same(weights(again), weights(straight))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    trainer(tmp_path, keep_checkpoints=3).fit()
    assert sorted(p.name[-2:] for p in (tmp_path / "checkpoints").iterdir()) == ["24", "27", "30"]


def test_nothing_is_pickled(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    newest = latest_complete(tmp_path / "checkpoints")
    assert newest is not None
    assert {p.suffix for p in newest.iterdir()} == {".json", ".safetensors"}
    tensors, meta = load_checkpoint(newest)
    assert "0.weight" not in tensors["model"] and "1.running_mean" in tensors["model"], "only what trains, and buffers"
    assert "4.weight/exp_avg" in tensors["optimizer"] and not any(
        k.startswith("0.weight") for k in tensors["optimizer"]
    )
    json.dumps(meta)


@pytest.mark.parametrize("forgotten", ["nothing", "rng", "optimizer", "buffers", "method", "source", "log"])
def test_forgetting_any_part_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    """Mutation check: the comparison of runs sees every part of the state that a resume could leave out."""
    straight = trainer(tmp_path / "a")
    expected = straight.fit()

    trainer(tmp_path / "b", callbacks=[StopAt(20)]).fit()
    checkpoint._remove(tmp_path / "b" / "checkpoints" / "step-0000000020")  # so that it goes on from step 18

    resumed = trainer(tmp_path / "b")
    if forgotten == "rng":
        monkeypatch.setattr(state, "set_rng_state", lambda state: None)
    elif forgotten == "optimizer":
        monkeypatch.setattr(strategy, "states_by_name", lambda averages: {})
    elif forgotten == "buffers":
        real = engine.load_tensors
        monkeypatch.setattr(engine, "load_tensors", lambda into, saved: real(without(into), without(saved)))
    elif forgotten == "method":
        resumed.method.load_state_dict = lambda state: None  # type: ignore[method-assign]
    elif forgotten == "source":
        resumed.source.load_state_dict = lambda state: None  # type: ignore[method-assign]
    elif forgotten == "log":
        monkeypatch.setattr(EventLog, "truncate_after", lambda self, step: 0)
    history = resumed.fit(resume=True)
    logged = [e["step"] for e in read_metrics(tmp_path / "b") if e["type"] == "step"]
    equal = same(weights(resumed), weights(straight)) and logged == history.series("step") == expected.series("step")
    assert equal == (forgotten == "nothing")


# ---------------------------------------------------------------------------------------------------------------------
# the writer


def test_writer_has_one_job_at_a_time_and_brings_errors_home() -> None:
    running, most, lock = [0], [0], threading.Lock()

    def job() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1

    writer = AsyncWriter()
    for _ in range(4):
        writer.submit(job)
    writer.close()
    assert most == [1]

    def broken() -> None:
        raise ValueError("a surprise")

    writer.submit(broken)
    writer.wait()
    with pytest.raises(CheckpointError, match="a surprise"):
        writer.check()
    writer.check()  # once


@pytest.mark.parametrize("in_background", [True, False])
def test_background_writing_changes_nothing(tmp_path: Path, in_background: bool) -> None:
    """The weights go on changing while the thread writes: what it writes must be those of its step."""
    seen: dict[int, list[torch.Tensor]] = {}

    class Watch(Callback):
        def on_save(self, run: Any, path: Path) -> None:
            seen[run.step] = [p.detach().clone() for n, p in run.method.module.named_parameters() if p.requires_grad]

    t = trainer(tmp_path, callbacks=[Watch()], save_every=1, keep_checkpoints=30, async_save=in_background)
    t.fit()
    assert len(seen) == 30
    names = [n for n, p in t.method.module.named_parameters() if p.requires_grad]
    for step, values in seen.items():
        tensors, _ = load_checkpoint(tmp_path / "checkpoints" / f"step-{step:010d}")
        assert same([tensors["model"][n] for n in names], values)


# ---------------------------------------------------------------------------------------------------------------------
# folders, signals, observers


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.at = step

    def on_step(self, run: Any, event: dict[str, Any]) -> Flags | None:
        return Flags(stop=True, reason="that was enough") if run.step == self.at else None


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(RunError, match=r"already holds a run with the same configuration.*resume"):
        trainer(tmp_path).fit()
    with pytest.raises(RunError, match=r"another configuration \(seed: 3 -> 4\)"):
        trainer(tmp_path, seed=4).fit()
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_resume_under_a_changed_config_says_so(tmp_path: Path) -> None:
    trainer(tmp_path, steps=10).fit()
    trainer(tmp_path, steps=12).fit(resume=True)
    resumed = [e for e in read_metrics(tmp_path) if e["type"] == "resume"]
    assert resumed[0]["changed"] == ["steps: 10 -> 12"]


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, steps=4).fit()
    other = Regression()
    other.module[4] = nn.Linear(16, 1, bias=False)
    with pytest.raises(CheckpointError, match="which this model does not train"):
        trainer(tmp_path, method=other, steps=8).fit(resume=True)
    base = Regression()
    base.module[0].weight.data += 1
    with pytest.raises(CheckpointError, match="frozen weights differ"):
        trainer(tmp_path, method=base, steps=8).fit(resume=True)


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_after_the_step_with_a_checkpoint(tmp_path: Path, which: signal.Signals) -> None:
    straight = run_to_end("regression", tmp_path / "straight")
    process = spawn("regression", tmp_path / "run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_bytes().count(b'"type": "step"') < 4:
        time.sleep(0.001)
    os.kill(process.pid, which)
    process.join(60)
    assert process.exitcode == 0
    last = read_metrics(tmp_path / "run")[-1]
    assert last["type"] == "end" and last["reason"] == f"interrupted ({which.name})" and 4 <= last["step"] < 30
    newest = latest_complete(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.name == f"step-{last['step']:010d}"
    (tmp_path / "run" / "done.json").unlink()
    assert run_to_end("regression", tmp_path / "run") == straight
    assert outcome(tmp_path / "run") == straight


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    class Twice(Regression):
        def collect(self, batch: Points, step: int) -> Points:
            if step == 7:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return super().collect(batch, step)

    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "b", method=Twice()).fit()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handlers were not put back"
    straight, resumed = trainer(tmp_path / "a"), trainer(tmp_path / "b")
    straight.fit()
    resumed.fit(resume=True)
    assert same(weights(straight), weights(resumed))


def test_observers_cannot_kill_and_may_ask(tmp_path: Path) -> None:
    class Broken(Callback):
        calls = 0

        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            Broken.calls += 1
            raise ValueError("a bug in a plot")

    class Asks(Callback):
        def on_step(self, run: Any, event: dict[str, Any]) -> Flags:
            return Flags(save=run.step == 2, evaluate=run.step == 4)

    history = trainer(tmp_path, callbacks=[Broken(), Asks(), StopAt(5)], save_every=None, eval_every=None).fit()
    events = read_metrics(tmp_path)
    assert Broken.calls == 1 and history.stopped == "that was enough"
    assert [e["message"] for e in events if e["type"] == "warning"] == [
        "Broken.on_step raised ValueError: a bug in a plot; it is switched off, the run goes on"
    ]
    assert [(e["type"], e["step"]) for e in events if e["type"] in ("save", "eval")] == [
        ("save", 2),
        ("eval", 4),
        ("eval", 5),
        ("save", 5),
    ]


def test_early_stop_remembers_over_a_resume(tmp_path: Path) -> None:
    def early() -> EarlyStop:
        return EarlyStop("eval/loss", patience=2, min_delta=10.0)  # nothing is that good: stops at the third evaluation

    straight = trainer(tmp_path / "a", callbacks=[early()], eval_every=4).fit()
    trainer(tmp_path / "b", callbacks=[early(), StopAt(9)], eval_every=4).fit()
    resumed = trainer(tmp_path / "b", callbacks=[early()], eval_every=4).fit(resume=True)
    assert len(straight) == 12 and straight.stopped is not None and "has not improved" in straight.stopped
    assert len(resumed) <= 12  # the extra evaluation at the stop counts as a look


def test_tensorboard_through_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trainer(tmp_path, trackers=["tensorboard"], steps=4).fit()
    assert list(tmp_path.rglob("events.out.tfevents*"))
    assert not [e for e in read_metrics(tmp_path) if e["type"] == "warning"]


def test_one_process_has_no_messages_to_time(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", comm_every=1)
    run.fit()
    rows = read_metrics(tmp_path / "run")
    assert any("loss" in row for row in rows) and not any("perf/collective_s" in row for row in rows)


def test_steps_must_be_known(tmp_path: Path) -> None:
    class Endless:
        epoch = 0

        def next_batch(self, n: int) -> list[int]:
            return list(range(n))

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(ConfigError, match="set steps"):
        Trainer(Regression(), Endless(), regression_config(steps=None, epochs=1.0), run_dir=tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# one rank with 8 rows is two ranks with 4


class Uneven(BaseMethod):
    """Rows of different weight, as tokens are: averaging per rank would be wrong."""

    name = "uneven"

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = nn.Linear(6, 1).double()

    def collate(self, rows: list[int]) -> Points:
        x = torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(r)) for r in rows]).double()
        return Points(x, torch.tensor([float(1 + r % 5) for r in rows]).double())

    def denominators(self, mini: Points) -> dict[str, torch.Tensor]:
        return {"loss": mini.y.sum()}

    def loss(self, micro: Points) -> dict[str, tuple[LossSum, float]]:
        each = (self.module(micro.x).squeeze(-1) - 1).square() * micro.y
        return {
            "loss": (
                LossSum(each.sum(), micro.y.sum(), {"weight": (micro.y.sum(), torch.tensor(float(len(micro))))}),
                1.0,
            )
        }


def two_ranks(run_dir: str) -> None:
    """Body of each rank (and of the single process)."""
    config = TrainConfig(
        steps=6,
        mini_batch_size=8,
        micro_batch_size=3,
        save_every=2,
        console=False,
        device="cpu",
        optimizer={"lr": 0.05, "schedule": "constant"},
    )
    t = Trainer(Uneven(), Numbers(24), config, run_dir=run_dir)
    t.fit(resume=True)
    if t.engine.is_main:
        torch.save([p.detach() for p in t.engine.unwrap(t.method.module).parameters()], Path(run_dir) / "weights.pt")


def test_two_ranks_are_one(tmp_path: Path) -> None:
    run_ranks("test_loop:two_ranks", tmp_path / "one")
    run_ranks("test_loop:two_ranks", tmp_path / "two", 2)
    one, two = (torch.load(tmp_path / f / "weights.pt", weights_only=True) for f in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)
    logs = [[e for e in read_metrics(tmp_path / f) if e["type"] == "step"] for f in ("one", "two")]
    for a, b in zip(*logs, strict=True):
        for key in ("loss", "grad_norm", "weight"):
            assert a[key] == pytest.approx(b[key], rel=1e-10)
    tensors, _ = load_checkpoint(tmp_path / "two" / "checkpoints" / "step-0000000006")
    assert {"rng-0", "rng-1"} <= set(tensors)


@pytest.mark.parametrize(
    ("sizes", "ranks", "group", "says"),
    [
        ({"mini_batch_size": 8, "rollout_batch_size": 8}, 4, 1, None),
        ({"mini_batch_size": 8, "rollout_batch_size": 8}, 3, 1, r"mini_batch_size 8 .* set it to 6 or 9"),
        ({"mini_batch_size": 2, "rollout_batch_size": 2, "micro_batch_size": None}, 4, 1, r"set it to 4$"),
        ({"mini_batch_size": 8, "rollout_batch_size": 16}, 4, 4, None),
        ({"mini_batch_size": 12, "rollout_batch_size": 24}, 4, 4, r"4 to each of 6 prompts.* set it to 16 or 32"),
    ],
)
def test_batches_that_processes_cannot_share(sizes: dict[str, Any], ranks: int, group: int, says: str | None) -> None:
    """Six prompts on four processes: two of them were left out of every step, without a word."""
    config = regression_config(**sizes)
    if says is None:
        _check_shares(config, ranks, group)
        return
    with pytest.raises(ConfigError, match=says):
        _check_shares(config, ranks, group)
