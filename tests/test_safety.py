"""What a run must never lose or share: checkpoints by time, a locked folder, failed runs aside, rolling back, a bounded memory."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from resume_harness import Numbers, Points, Regression, outcome, regression_config, run_to_end, spawn
from torch import nn

from rlhf_nb.config import TrainConfig
from rlhf_nb.core import CheckpointError, ConfigError, RunError, read_interval
from rlhf_nb.run import lock
from rlhf_nb.run.callbacks import Callback
from rlhf_nb.run.checkpoint import AsyncWriter, checkpoints_in, latest_complete, problem_of
from rlhf_nb.run.lock import RunLock, holder_of
from rlhf_nb.run.log import EventLog, History, RunDir, read_metrics
from rlhf_nb.run.loop import Trainer
from rlhf_nb.run.state import roll_back
from rlhf_nb.train.registry import methods
from rlhf_nb.types import LossSum


def trainer(run_dir: Path, method: Any = None, callbacks: Any = (), **over: Any) -> Trainer:
    return Trainer(method or Regression(), Numbers(), regression_config(**over), run_dir=run_dir, callbacks=callbacks)


def weights(t: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in t.method.module.state_dict().values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def steps(run_dir: Path) -> list[int]:
    return [e["step"] for e in read_metrics(run_dir) if e["type"] == "step"]


class Dies(Regression):
    """Ends as a process does that is killed: without a word, without a checkpoint."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def finish_step(self, step: int) -> None:
        super().finish_step(step)
        if step == self.at:
            raise OSError("the machine is gone")


class Ticking:
    """A clock that moves by a random time whenever it is looked at."""

    def __init__(self, seed: int) -> None:
        self.rng, self.now = random.Random(seed), 0.0

    def __call__(self) -> float:
        self.now += self.rng.random()
        return self.now


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints by time


def test_every_method_saves_every_ten_minutes() -> None:
    trained = [m.config for m in methods().values() if m.leaves != "pairs"]
    assert len(trained) > 7 and {c().save_every for c in trained} == {"10min"}
    assert {c.preset("toy").save_every for c in trained} == {"10min"}
    assert read_interval("10min").seconds == 600


@pytest.mark.parametrize("value", ["10 minutes please", "5m", 0, -1, "0s", 2.5, True, [3]])
def test_an_interval_that_is_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="save_every: got .* expected a number of steps") as error:
        TrainConfig(save_every=value)
    assert ("Did you mean 10min?" in str(error.value)) == (value == "10 minutes please")


@pytest.mark.parametrize(
    "text", ["save_every=7", "save_every=30s", "save_every=10min", "save_every=2h", "save_every=null"]
)
def test_intervals_survive_a_file(text: str, tmp_path: Path) -> None:
    config = TrainConfig.load(None, [text])
    for suffix in ("yaml", "json"):
        assert TrainConfig.load(config.save(tmp_path / f"a.{suffix}")) == config
    assert str(config.save_every).replace("None", "null") == text.split("=")[1]


@pytest.mark.parametrize("seed", range(3))
def test_when_it_is_saved_changes_nothing(tmp_path: Path, seed: int) -> None:
    """Saved at moments that a clock decides, killed, resumed: the bits of a run that never saved."""
    straight = trainer(tmp_path / "straight", save_every=None)
    expected = straight.fit()
    first = trainer(tmp_path / "timed", Dies(23), save_every="4s")
    first.saves.clock = Ticking(seed)
    with pytest.raises(OSError):
        first.fit()
    found = [int(name[5:]) for name in names(tmp_path / "timed")]
    assert found and max(found) < 23, "the clock has moved by more than one interval before the run dies"
    second = trainer(tmp_path / "timed", save_every="4s")
    second.saves.clock = Ticking(seed + 10)
    history = second.fit(resume=True)
    assert same(weights(second), weights(straight))
    assert history.series("loss") == expected.series("loss") and steps(tmp_path / "timed") == list(range(1, 31))


def test_work_lost_is_at_most_the_interval(tmp_path: Path) -> None:
    """Whenever the run dies, the newest checkpoint on the disk is younger than the interval, its writing included."""

    class Watch(Callback):
        worst = 0.0

        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            run.writer.wait()
            now.append(run.saves.clock())
            done = checkpoints_in(run.run_dir.checkpoints)
            since = now[int(done[-1].name[5:])] if done else now[0]
            Watch.worst = max(Watch.worst, now[-1] - since)

    t = trainer(tmp_path, callbacks=[Watch()], save_every="10s", steps=60)
    clock = [0.0]
    t.saves.clock = lambda: clock[0]
    now = [0.0]
    move = t.next_batch

    def next_batch() -> Any:
        clock[0] += 1.9  # seconds a step
        return move()

    t.next_batch = next_batch  # type: ignore[method-assign]
    t.fit()
    assert 5 < Watch.worst <= 10


def test_the_demo_can_be_resumed_from_the_middle(tmp_path: Path) -> None:
    """With default settings, on a clock that runs a hundred times faster."""
    t = trainer(tmp_path, Dies(25), save_every=TrainConfig().save_every)
    ticking = Ticking(0)
    t.saves.clock = lambda: 100 * ticking()
    with pytest.raises(OSError):
        t.fit()
    assert latest_complete(tmp_path / "checkpoints") is not None


# ---------------------------------------------------------------------------------------------------------------------
# resuming where there is nothing


def test_resume_without_a_checkpoint_deletes_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        trainer(tmp_path, Dies(20), save_every=None).fit()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert steps(tmp_path) == list(range(1, 20)) or steps(tmp_path) == list(range(1, 21))
    with pytest.raises(CheckpointError, match=r"the log of 19 steps but no checkpoint.*add --overwrite"):
        trainer(tmp_path, seed=4).fit(resume=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert len(trainer(tmp_path).fit(resume=True, overwrite=True)) == 30


def test_overwrite_with_resume_keeps_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        trainer(tmp_path, Dies(20)).fit()
    t = trainer(tmp_path)
    t.start(resume=True, overwrite=True)
    assert t.step == 18
    t.lock.release()


def test_an_empty_folder_is_begun(tmp_path: Path) -> None:
    RunDir(tmp_path).request("save")
    assert len(trainer(tmp_path).fit(resume=True)) == 30


# ---------------------------------------------------------------------------------------------------------------------
# one run, one folder

ELSEWHERE = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_safety import trainer
try:
    print(len(trainer(Path(sys.argv[1])).fit(**eval(sys.argv[2]))))
except Exception as error:
    print(type(error).__name__, error)
"""


def elsewhere(run_dir: Path, **how: bool) -> str:
    """What another process says that trains there."""
    code = ELSEWHERE.format(tests=str(Path(__file__).parent))
    return forked.run([sys.executable, "-c", code, str(run_dir), repr(how)]).stdout


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
def test_a_second_process_is_refused(tmp_path: Path, how: dict[str, bool]) -> None:
    said: list[str] = []

    class Second(Callback):
        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            if run.step == 10:
                run.writer.wait()
                before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock.json"}
                said.append(elsewhere(tmp_path, **how))
                assert {
                    p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != "lock.json"
                } == before
                said.append("nothing was touched")

    assert len(trainer(tmp_path, callbacks=[Second()]).fit()) == 30
    assert re.search(
        rf"RunError .* is in use by process {os.getpid()} on this machine \(since .*choose another", said[0]
    )
    assert said[1:] == ["nothing was touched"] and steps(tmp_path) == list(range(1, 31))
    assert not (tmp_path / "lock.json").exists()


def test_a_killed_run_leaves_no_obstacle(tmp_path: Path) -> None:
    process = spawn("regression", tmp_path)
    until = time.monotonic() + 60
    while time.monotonic() < until and not (tmp_path / "checkpoints" / "step-0000000003").exists():
        time.sleep(0.005)
    process.kill()
    process.join()
    holder = holder_of(tmp_path)
    assert holder is not None and holder.here and not holder.lives
    assert outcome_of(tmp_path) == run_to_end("regression", tmp_path.parent / "straight")


def outcome_of(run_dir: Path) -> dict[str, Any]:
    run_to_end("regression", run_dir)
    return outcome(run_dir)


@pytest.mark.parametrize("ends", ["well", "badly", "refused"])
def test_the_lock_is_given_back(tmp_path: Path, ends: str) -> None:
    if ends == "badly":
        with pytest.raises(OSError):
            trainer(tmp_path, Dies(5)).fit()
    else:
        trainer(tmp_path).fit()
    if ends == "refused":
        with pytest.raises(RunError, match="already holds a run"):
            trainer(tmp_path).fit()
    assert not (tmp_path / "lock.json").exists()


def test_who_was_taken_over_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slept wakes up and finds its folder in other hands: it writes nothing more there."""
    monkeypatch.setattr(lock, "BEAT", 0.02)
    other = {"machine": "node-7/0/0", "pid": 12, "born": "5", "since": 0.0, "token": "y"}

    class Asleep(Callback):
        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            if run.step == 10:
                (tmp_path / "lock.json").unlink()
                (tmp_path / "lock.json").write_text(json.dumps(other))
                until = time.monotonic() + 30
                while not run.lock.lost and time.monotonic() < until:
                    time.sleep(0.01)
                self.log = (tmp_path / "metrics.jsonl").read_bytes()

    observer = Asleep()
    with pytest.raises(RunError, match=r"was taken over by process 12 on node-7"):
        trainer(tmp_path, callbacks=[observer], save_every=None).fit()
    log = (tmp_path / "metrics.jsonl").read_bytes()
    assert log == observer.log and steps(tmp_path) == list(range(1, 11))
    assert json.loads((tmp_path / "lock.json").read_text()) == other and names(tmp_path) == []


def test_a_sign_of_life_that_meets_the_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A given back folder stays given back, and no other file of this process is closed or written to."""
    monkeypatch.setattr(lock, "BEAT", 0.0)
    usual, over, wrong = sys.getswitchinterval(), threading.Event(), list[str]()

    def work_with_files() -> None:
        while not over.is_set():
            with open(tmp_path / "other", "w+") as f:
                f.write("ours")
                f.seek(0)
                wrong.extend([] if f.read() == "ours" else ["another thread wrote into a file"])

    other = threading.Thread(target=work_with_files)
    sys.setswitchinterval(1e-5)
    try:
        other.start()
        for _ in range(100):
            with lock.RunLock(tmp_path / "run"):
                time.sleep(0.001)
            assert not (tmp_path / "run" / lock.NAME).exists()
    finally:
        over.set()
        other.join()
        sys.setswitchinterval(usual)
    assert not wrong


HOLDS = """
import sys, time
import filelock
import rlhf_nb.run.lock as lock
lock.BEAT = 0.05
if sys.argv[1] == "ours":
    kept = lock.RunLock(sys.argv[2]); kept.acquire()
else:
    kept = filelock.SoftFileLease(sys.argv[2] + "/lease", lease_duration=0.3); kept.acquire()
print("held", flush=True)
time.sleep(60)
"""


def stopped(kind: str, folder: Path) -> forked.Forked:
    """A process that holds a folder and then stands still, as after Ctrl-Z."""
    process = forked.Forked([sys.executable, "-c", HOLDS, kind, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGSTOP)
    return process


def test_why_the_lock_is_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped keeps its folder, another machine's dead one doesn't; filelock offers the one or the other."""
    filelock: Any = pytest.importorskip("filelock")
    if not hasattr(filelock, "SoftFileLease"):
        pytest.skip("this filelock has no leases")
    monkeypatch.setattr(lock, "STALE", 0.5)
    for kind in ("ours", "lease"):
        process = stopped(kind, tmp_path)
        try:
            time.sleep(1.0)
            if kind == "ours":
                with pytest.raises(RunError, match=f"in use by process {process.pid} on this machine"):
                    RunLock(tmp_path).acquire()
            else:
                with filelock.SoftFileLease(str(tmp_path / "lease"), lease_duration=0.3, timeout=10):
                    pass  # taken from a process that lives
        finally:
            process.kill()
            process.wait()
    (tmp_path / "marker").write_text("12\nnode-7\n")
    os.utime(tmp_path / "marker", (0, 0))
    with pytest.raises(filelock.Timeout):
        filelock.SoftFileLock(str(tmp_path / "marker")).acquire(timeout=1.0)
    gone = {"machine": "node-7/0/0", "pid": 12, "born": "5", "since": 0.0, "token": "y"}
    (tmp_path / "lock.json").write_text(json.dumps(gone))
    os.utime(tmp_path / "lock.json", (0, 0))
    with RunLock(tmp_path):
        assert holder_of(tmp_path).told["token"] != "y"  # type: ignore[union-attr]


THIEVES = """
import os, sys, time
from rlhf_nb.run.lock import RunLock

def steal(folder, begin):
    time.sleep(max(0.0, begin - time.time() - 0.02))
    while time.time() < begin: pass
    try:
        lock = RunLock(folder); lock.acquire(); said = "taken"; time.sleep(1.5); lock.check(); lock.release()
    except Exception as error:
        said = str(error)
    os.write(1, f"{folder} {said}\\n".encode())

start = time.time() + 0.3
for i in range(4 * len(sys.argv[1:])):
    if not os.fork():
        steal(sys.argv[1 + i // 4], start + 0.3 * (i // 4))
        os._exit(0)
while True:
    try: os.wait()
    except ChildProcessError: break
"""


def test_two_thieves_of_one_lock(tmp_path: Path) -> None:
    """Four processes find one dead owner at the same moment, in each of five folders; one of them gets it."""
    dead = {"machine": lock.machine(), "pid": 2**22 + 1, "born": "5", "since": 0.0, "token": "dead"}
    folders = [tmp_path / str(i) for i in range(5)]
    for folder in folders:
        folder.mkdir()
        (folder / "lock.json").write_text(json.dumps(dead))
    done = forked.run([sys.executable, "-c", THIEVES, *map(str, folders)])
    for folder in folders:
        said = [line for line in done.stdout.splitlines() if line.startswith(f"{folder} ")]
        assert sorted(s == f"{folder} taken" for s in said) == [False] * 3 + [True], (said, done.stderr)
        assert not any("taken over" in s for s in said) and not list(folder.iterdir()), said


def small(root: Path) -> Any:
    """A pipeline of a tiny untrained model and three steps of SFT."""
    from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline

    sft = {"steps": 3, "epochs": None, "mini_batch_size": 4}
    none = {"reward": None, "ppo": None, "eval_prompts": 4, "questions": 0}
    config = PipelineConfig.preset("toy", output_dir=str(root), base={"size": "tiny"}, sft=sft, console=False, **none)
    return RLHFPipeline(config)


def stage(root: Path) -> Any:
    from rlhf_nb.train.sft import SFTConfig

    return SFTConfig.preset("toy", output_dir=str(root), steps=3, epochs=None, console=False)


def start_stage(root: Path) -> None:
    from rlhf_nb.train.stage import run_stage

    run_stage(stage(root), overwrite=True)


def start_launch(root: Path) -> None:
    from rlhf_nb.scale.launch import launch

    launch(stage(root), num_processes=2, device="cpu", overwrite=True)


def start_labelling(root: Path) -> None:
    from rlhf_nb.data import toy
    from rlhf_nb.train.rlaif import Labelling, RLAIFConfig

    config = RLAIFConfig.preset("toy", output_dir=str(root), prompts=4)
    Labelling(config, toy.build_model(0, "tiny"), toy.build_tokenizer()).run(overwrite=True)


STARTS: dict[str, Callable[[Path], Any]] = {
    "stage": start_stage, "launch": start_launch, "labelling": start_labelling,
    "pipeline": lambda root: small(root).run(overwrite=True), "a stage of a pipeline": lambda root: small(root).stage("base"),
}  # fmt: skip


@pytest.mark.parametrize("what", STARTS)
def test_whatever_starts_there_is_refused(what: str, tmp_path: Path) -> None:
    """Another thread of this process works in the folder."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "type": "step"}\n')
    taken, over = threading.Event(), threading.Event()

    def work() -> None:
        with RunLock(tmp_path):
            taken.set()
            over.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert taken.wait(60)
    before = sorted(tmp_path.rglob("*"))
    try:
        with pytest.raises(RunError, match="is in use by process"):
            STARTS[what](tmp_path)
    finally:
        over.set()
        thread.join()
    assert [p for p in before if p.name != "lock.json"] == [
        p for p in sorted(tmp_path.rglob("*")) if "launch" not in p.parts
    ]
    assert (tmp_path / "metrics.jsonl").read_text().startswith('{"step": 1')


def test_a_pipeline_whose_stage_was_killed_early(tmp_path: Path) -> None:
    """Its first checkpoint had not been made: asked, then done again; the stage before it is not."""
    small(tmp_path).stage("base")
    config = small(tmp_path).stage_config("sft")
    run = RunDir(config.output_dir)
    run.open(config.to_dict())
    log = EventLog(run.metrics_path)
    log.append("start", 0, total_steps=3)
    log.append("step", 1, loss=1.0)
    log.close()
    made = (tmp_path / "base" / "stage.json").stat().st_mtime_ns
    with pytest.raises(CheckpointError, match=r"the log of 1 steps but no checkpoint.*--overwrite"):
        small(tmp_path).run(resume=True)
    small(tmp_path).run(resume=True, overwrite=True)
    assert steps(tmp_path / "sft") == [1, 2, 3] and (tmp_path / "base" / "stage.json").stat().st_mtime_ns == made


@pytest.mark.slow
def test_two_ranks_save_together(tmp_path: Path) -> None:
    """Rank 0's clock decides for both; every checkpoint is whole, and the weights are those of a run that saved at its end."""
    from process_cases import run_ranks
    from safetensors.torch import load_file

    run_ranks("sft", tmp_path / "timed", 2, "", steps=80, save_every="1s", keep_checkpoints=50)
    run_ranks("sft", tmp_path / "end", 2, "", steps=80, save_every=None)
    found = checkpoints_in(tmp_path / "timed" / "checkpoints")
    assert len(found) > 1 and all(problem_of(p) is None and (p / "rank-00001-of-00002.json").exists() for p in found)
    a, b = (load_file(tmp_path / f / "weights.safetensors") for f in ("timed", "end"))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# runs that fail, and runs that go astray


class Explodes(Regression):
    """Learns well, then diverges: its weights become enormous, then its loss is not finite any more."""

    def loss(self, micro: Points) -> dict[str, tuple[LossSum, float]]:
        terms = super().loss(micro)
        factor = float("nan") if self.step >= 20 else 1.0
        return {"loss": (terms["loss"][0]._replace(total=terms["loss"][0].total * factor), self.coef)}

    step = 0

    def finish_step(self, step: int) -> None:
        self.step = step
        super().finish_step(step)
        if step == 15:
            with torch.no_grad():
                layer = self.module[4]
                assert isinstance(layer, nn.Linear)
                layer.weight[0, 0] = 857_722.0


def test_what_a_failed_run_leaves_goes_aside(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        trainer(tmp_path, Explodes(), max_nonfinite=1, keep_checkpoints=2).fit()
    said = str(error.value)
    assert "unharmed" not in said and re.search(r"all weights are finite, the largest is 8\.\d+e\+05", said)
    assert "checkpoints/failed-0000000021" in said and "runs rollback" in said
    assert names(tmp_path) == ["failed-0000000021", "step-0000000015", "step-0000000018"]
    healed = trainer(tmp_path)
    healed.start(resume=True)
    assert healed.step == 18, "what failed is never resumed from by itself"
    healed.lock.release()


def test_failures_again_and_again_push_nothing_out(tmp_path: Path) -> None:
    for steps_ in (22, 24, 26):
        with pytest.raises(RunError):
            trainer(tmp_path, Explodes(), max_nonfinite=1, steps=steps_).fit(resume=True)
    assert names(tmp_path) == ["failed-0000000021", "step-0000000015", "step-0000000018"]


def test_what_failed_can_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        trainer(tmp_path, Explodes(), max_nonfinite=1).fit()
    roll_back(tmp_path, 21, failed=True)
    assert names(tmp_path) == ["step-0000000015", "step-0000000018", "step-0000000021"]
    t = trainer(tmp_path)
    t.start(resume=True)
    assert t.step == 21
    t.lock.release()


class Judged(Regression):
    """Best at step 9, by an evaluation made every three steps."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def finish_step(self, step: int) -> None:
        super().finish_step(step)
        self.at = step

    def evaluate(self, held_out: Any) -> dict[str, float]:
        return {"reward_mean": -abs(self.at - 9.0), "loss": abs(self.at - 9.0)}


@pytest.mark.parametrize("metric", ["eval/reward_mean", "eval/loss", "eval/loss:min", "eval/reward_mean:max"])
def test_the_best_checkpoint_stays(tmp_path: Path, metric: str) -> None:
    t = trainer(tmp_path, Judged(), keep_best=metric, eval_every=3, save_every=None, keep_checkpoints=1)
    t.fit()
    assert names(tmp_path) == ["step-0000000009", "step-0000000030"]
    again = trainer(tmp_path, Judged(), keep_best=metric, eval_every=3, save_every=2, keep_checkpoints=1, steps=36)
    again.fit(resume=True)
    assert names(tmp_path) == ["step-0000000009", "step-0000000036"], "a resumed run remembers which was the best"
    assert again.saves.best is not None and again.saves.best["step"] == 9


def test_a_metric_of_steps_is_averaged(tmp_path: Path) -> None:
    t = trainer(tmp_path, keep_best="loss", keep_checkpoints=1, save_every=5)
    history = t.fit().series("loss")
    means = {n: sum(history[n - 5 : n]) / 5 for n in range(5, 31, 5)}
    best = min(means, key=lambda n: means[n])
    assert f"step-{best:010d}" in names(tmp_path) and t.saves.best["value"] == pytest.approx(means[best])  # type: ignore[index]


def test_keep_best_that_cannot_be_obeyed(tmp_path: Path) -> None:
    for over, word in [
        ({"keep_best": "eval/loss:lowest", "eval_every": 3}, "comes :min or :max"),
        ({"keep_best": "eval/loss", "eval_every": None}, "set eval_every"),
    ]:
        with pytest.raises(ConfigError, match=word):
            trainer(tmp_path, **over)
    with pytest.warns(
        UserWarning, match="keep_best is 'eval/reward', which no evaluation has. Did you mean 'eval/reward_mean'"
    ):
        trainer(tmp_path, Judged(), keep_best="eval/reward", eval_every=3).fit()


def test_rolling_back(tmp_path: Path) -> None:
    """To step 12 and on again: the same bits; and what somebody had set after step 12 is not set again."""

    class Sets(Callback):
        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            if run.step in (6, 20):
                run.run_dir.request("set", "lr", 0.02 if run.step == 6 else 0.5)

    kept: dict[str, Any] = {"keep_checkpoints": 20}
    straight = trainer(tmp_path / "straight", callbacks=[Sets()], steps=30, **kept)
    straight.fit()
    t = trainer(tmp_path / "run", callbacks=[Sets()], **kept)
    first = t.fit().series("loss")
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "stage.json").write_text("{}")
    aside = roll_back(tmp_path / "run", 12)
    assert names(tmp_path / "run")[-1] == "step-0000000012" and steps(tmp_path / "run") == list(range(1, 13))
    told = read_metrics(tmp_path / "run")[-1]
    assert (
        told["step"] == 12
        and told["message"] == "rolled back from step 30 to 12; what came after is in rolled-back/001"
    )
    assert {"metrics.jsonl", "samples.jsonl", "control.jsonl", "step-0000000030", "model", "stage.json"} <= {
        p.name for p in aside.iterdir()
    }
    assert not (tmp_path / "run" / "model").exists() and len(read_metrics(aside / "metrics.jsonl")) > 30

    class SetsAgain(Callback):
        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            if run.step == 20:
                run.run_dir.request("set", "lr", 0.5)

    again = trainer(tmp_path / "run", callbacks=[SetsAgain()], **kept)
    assert again.fit(resume=True).series("loss") == first and same(weights(again), weights(straight))
    roll_back(tmp_path / "run", 12)
    free = trainer(tmp_path / "run", **kept)
    free.fit(resume=True)
    assert max(free.history.series("lr")[20:]) < 0.02 and not same(weights(free), weights(straight))
    assert (tmp_path / "run" / "rolled-back" / "002").is_dir()


def test_rolling_back_in_the_middle_of_a_run_is_refused(tmp_path: Path) -> None:
    said: list[str] = []

    class Rolls(Callback):
        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            if run.step == 10:
                code = f"from rlhf_nb.run.state import roll_back; roll_back({str(tmp_path)!r}, 3)"
                said.append(forked.run([sys.executable, "-c", code]).stderr)

    trainer(tmp_path, callbacks=[Rolls()], keep_checkpoints=9).fit()
    assert "is in use by process" in said[0] and steps(tmp_path) == list(range(1, 31))
    with pytest.raises(RunError, match=r"has no checkpoint step-0000000004: there are checkpoints of step 6, 9"):
        roll_back(tmp_path, 4)
    with pytest.raises(RunError, match="holds no run"):
        roll_back(tmp_path / "nowhere", 4)
    assert not (tmp_path / "nowhere").exists()


# ---------------------------------------------------------------------------------------------------------------------
# signals, leftovers, memory


def test_a_closed_terminal_saves(tmp_path: Path) -> None:
    straight = run_to_end("regression", tmp_path / "straight")
    process = spawn("regression", tmp_path / "run")
    until = time.monotonic() + 60
    while time.monotonic() < until and (
        not (tmp_path / "run" / "metrics.jsonl").exists() or len(steps(tmp_path / "run")) < 4
    ):
        time.sleep(0.001)
    for _ in range(2):  # the kernel and the shell each send one
        os.kill(process.pid, signal.SIGHUP)
    process.join(60)
    last = read_metrics(tmp_path / "run")[-1]
    assert process.exitcode == 0 and last["reason"] == "interrupted (SIGHUP)" and last["step"] < 30
    newest = latest_complete(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.name == f"step-{last['step']:010d}"
    (tmp_path / "run" / "done.json").unlink()
    assert run_to_end("regression", tmp_path / "run") == straight


def test_half_saved_models_are_cleaned(tmp_path: Path) -> None:
    """What a kill left while a model was being saved goes at the next start; what isn't ours, and links, stay."""
    ours, theirs = tmp_path / "model" / ".saving-abc123", tmp_path / "notes" / ".saving-x"
    for folder in (ours, theirs, tmp_path / "target"):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
    (tmp_path / "model" / ".saving-link").symlink_to(tmp_path / "target")
    with RunLock(tmp_path):
        said = elsewhere(tmp_path)
        assert "is in use" in said and ours.exists(), "not while somebody works there"
    trainer(tmp_path).fit()
    assert not ours.exists() and theirs.exists() and (tmp_path / "target" / "model.safetensors").exists()


def event_like_ppos(step: int) -> dict[str, Any]:
    """As many numbers as an event of PPO has, none of them shared."""
    return {"time": step + 0.5, "rank": 0, "type": "step", "step": step} | {
        f"metric/{i}": step + i / 7 for i in range(60)
    }


def test_history_in_memory_is_bounded(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "metrics.jsonl")
    history = History(log=log.path)
    tracemalloc.start()
    sizes = []
    for step in range(1, 4001):
        event = event_like_ppos(step)
        log.append(
            event.pop("type"), event.pop("step"), **{k: v for k, v in event.items() if k not in ("time", "rank")}
        )
        history.append(event | {"type": "step", "step": step})
        if step % 1000 == 0:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[-1] < 1.1 * sizes[0] < 6e6, sizes
    assert len(history) == 4000 and history[0]["step"] == 1 and history[-1]["step"] == history[3999]["step"] == 4000
    assert (
        history.series("step")
        == list(range(1, 4001))
        == [e["step"] for e in history]
        == [e["step"] for e in history[:]]
    )
    assert [e["step"] for e in history[-3:]] == [3998, 3999, 4000] and [e["step"] for e in history[10:14:2]] == [11, 13]
    assert [e["step"] for e in history[3990:3994]] == [3991, 3992, 3993, 3994] and next(reversed(history))[
        "step"
    ] == 4000
    assert history[1234]["metric/7"] == 1235 + 1.0 and [e["step"] for e in history[::-2000]] == [4000, 2000]
    with pytest.raises(IndexError):
        history[4000]
    log.close()
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunError, match="which holds 0 of them now"):
        history.series("step")


def test_a_long_run_keeps_few_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History, "KEPT", 5)
    straight = trainer(tmp_path / "a")
    losses = straight.fit().series("loss")
    assert len(straight.history._recent) < 10 and len(losses) == 30
    with pytest.raises(OSError):
        trainer(tmp_path / "b", Dies(20)).fit()
    again = trainer(tmp_path / "b")
    assert again.fit(resume=True).series("loss") == losses and len(again.history._recent) < 10


def test_the_writer_knows_how_long_it_takes() -> None:
    for background in (True, False):
        writer = AsyncWriter(background)
        writer.submit(lambda: time.sleep(0.05))
        assert writer.busy == background
        writer.close()
        assert 0.04 < writer.seconds < 5 and not writer.busy
