"""`launch`: results, errors, restarts after kills, hangs, interrupts, no orphans, bad input."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import patience
import psutil
import pytest
import torch
from process_cases import ROOT, free_port, run_ranks
from safetensors.torch import load_file

from rlhf_nb.core import ConfigError, RunError
from rlhf_nb.scale.launch import check_launch, first_failure, launch

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
TESTS = str(Path(__file__).parent)


def case_on_ranks(case: str, folder: str, **over: Any) -> int:
    """What a rank does: the case, from where it was left."""
    sys.path.insert(0, TESTS)
    from process_cases import rank_main

    rank_main(case, Path(folder), True, **over)
    return int(os.environ["RANK"])


def pids(folder: Path) -> dict[int, int]:
    """Ranks that say they live."""
    found = {}
    for path in (folder / "launch").glob("rank-*.json"):
        with suppress(OSError):  # a new attempt removes those of the last
            found[int(path.stem[5:])] = int(json.loads(path.read_text())["pid"])
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b'"type": "step"') if path.exists() else 0


def when(ready: Any, act: Any, seconds: float = 900) -> threading.Thread:
    """Do something in a thread as soon as something is so."""

    def body() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if ready():
                act()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_processes is 4, but this machine has 2"):
        check_launch(4, "ddp", cpu=False, port=0, here=2)
    with pytest.raises(ConfigError, match="Did you mean 'zero3'"):
        check_launch(2, "zero33", cpu=True, port=0)
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        with pytest.raises(ConfigError, match=r"port \d+ is in use"):
            check_launch(2, "ddp", cpu=True, port=s.getsockname()[1])
    for over, word in [
        ({"num_processes": 3}, "must be a multiple of machines"),
        ({"machine": 2}, "machine must be from 0 to 1"),
        ({"port": 0}, "give every machine the address of the first one"),
        ({"address": ""}, "give every machine the address of the first one"),
    ]:
        two: dict[str, Any] = {"machines": 2, "machine": 0, "address": "127.0.0.1", "port": 29400, "num_processes": 2}
        with pytest.raises(ConfigError, match=word):
            launch(print, **(two | over), device="cpu", run_dir=tmp_path, say=None)
    with pytest.raises(ConfigError, match="can't be sent"):
        launch(lambda: None, (i for i in ()), num_processes=1, device="cpu", run_dir=tmp_path)
    from rlhf_nb.train.rlaif import RLAIFConfig

    with pytest.raises(ConfigError, match="then=dpo makes a pipeline"):
        launch(RLAIFConfig.preset("toy", then="dpo", output_dir=str(tmp_path)), device="cpu")


def test_who_failed_first() -> None:
    echo = {"rank": 0, "time": 1.0, "type": "RuntimeError", "message": "Connection reset by peer", "traceback": "a"}
    cause = {"rank": 1, "time": 2.0, "type": "KeyError", "message": "'x'", "traceback": "b"}
    assert first_failure([echo, cause], [], {}).traceback == "b"
    assert first_failure([echo], [1], {1: 4}).rank == 1
    alone = first_failure([echo], [], {})
    assert alone.rank == 0 and alone.echo and "one on another machine ended" in alone.what
    assert first_failure([], [], {}).rank is None


def processes_of(folder: Path) -> list[int]:
    """Whoever has this folder in its command line: launchers, agents and ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(folder).encode() in path.read_bytes() and alive(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(("strategy", "kills", "length"), [("zero3", 10, 20), ("fsdp2+tp2", 2, 6)])
def test_kills_change_nothing(tmp_path: Path, strategy: str, kills: int, length: int) -> None:
    """`kill -9` of any rank at any moment, PPO: restarted, the same weights, nobody left."""
    straight, folder, rng = tmp_path / "straight", tmp_path / "killed", random.Random(3)
    run_ranks("ppo", straight, 2, strategy, save_every=2, steps=length)
    done: list[tuple[int, int]] = []  # rank, step
    gone: set[int] = set()

    def murder() -> None:
        for i in range(kills):
            at_once = i % 4 == 3  # while it starts; else in or after a step
            goal = 0 if at_once else i * (length - 2) // kills + rng.randint(0, 1)
            while (
                len(now := {r: p for r, p in pids(folder).items() if p not in gone and alive(p)}) < 2
                or lines(folder) < goal
            ):
                time.sleep(0.01)
            time.sleep(rng.random() * (4.0 if at_once else 0.4))
            victim = rng.choice(sorted(now))
            done.append((victim, lines(folder)))
            gone.update(now.values())
            os.kill(now[victim], signal.SIGKILL)

    threading.Thread(target=murder, daemon=True).start()
    said: list[str] = []
    result = launch(
        case_on_ranks,
        "ppo",
        str(folder),
        save_every=2,
        steps=length,
        num_processes=2,
        strategy=strategy,
        device="cpu",
        run_dir=folder,
        restarts=kills + 2,
        zero={"stage3_param_persistence_threshold": 0},
        say=said.append,
    )
    assert len(done) == kills and len(result.failures) == kills, (done, said)
    for (rank, _), failure in zip(done, result.failures):
        assert f"rank {rank} was killed" in failure
    a, b = (load_file(f / "weights.safetensors") for f in (straight, folder))
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert [e["step"] for e in result.history] == list(range(1, length + 1))
    assert not any(alive(p) for p in gone) and not processes_of(folder)


@pytest.mark.slow
def test_killed_before_anything_was_saved(tmp_path: Path) -> None:
    """The next attempt begins anew, says so, and the log of the first one is kept."""
    said: list[str] = []
    when(lambda: lines(tmp_path) >= 2, lambda: os.kill(pids(tmp_path)[1], signal.SIGKILL))
    how: dict[str, Any] = {"num_processes": 2, "device": "cpu", "run_dir": tmp_path, "say": said.append}
    result = launch(case_on_ranks, "sft", str(tmp_path), steps=60, save_every=None, **how)
    assert len(result.failures) == 1 and any("the beginning, since nothing was saved yet" in x for x in said)
    assert [e["step"] for e in result.history] == list(range(1, 61))
    assert lines(tmp_path / "launch" / "attempt-1") >= 2 and not (tmp_path / "lock.json").exists()


@pytest.mark.slow
def test_an_error_on_one_rank_is_told(tmp_path: Path) -> None:
    def one_breaks(limit: int) -> None:
        from rlhf_nb.run.engine import Engine

        engine = Engine()
        if engine.rank == 1:
            raise ValueError(f"row {limit} is not a number")
        engine.gather_object("waiting")

    with pytest.raises(RunError, match="rank 1 failed at step 0: ValueError: row 17") as caught:
        launch(one_breaks, 17, num_processes=2, device="cpu", run_dir=tmp_path, restarts=1, say=None)
    assert "in one_breaks" in str(caught.value)


@pytest.mark.slow
def test_a_setting_that_a_rank_refuses_is_one_sentence(tmp_path: Path) -> None:
    def refuses() -> None:
        from rlhf_nb.core import ConfigError

        raise ConfigError("9 heads don't divide by 2: choose another strategy.")

    with pytest.raises(RunError, match=r"ConfigError: 9 heads don't divide by 2: choose another strategy\.$") as caught:
        launch(refuses, num_processes=2, device="cpu", run_dir=tmp_path, restarts=1, say=None)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_rank_that_hangs(tmp_path: Path) -> None:
    """A rank is stopped (as by a debugger, or a dying disk): it is noticed, named and replaced."""

    def stop_one() -> None:
        os.kill(pids(tmp_path)[1], signal.SIGSTOP)

    when(lambda: lines(tmp_path) >= 3, stop_one)
    result = launch(
        case_on_ranks,
        "sft",
        str(tmp_path),
        save_every=1,
        steps=30,
        num_processes=2,
        device="cpu",
        run_dir=tmp_path,
        hang_timeout=10,
        say=None,
    )
    assert len(result.failures) == 1 and "rank 1" in result.failures[0]
    assert result.history[-1]["step"] == 30


@pytest.mark.slow
def test_no_orphans_when_the_kernel_dies(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {TESTS!r})
        from test_launch import case_on_ranks
        from rlhf_nb.scale.launch import launch
        launch(case_on_ranks, "sft", {str(tmp_path)!r}, steps=100000, num_processes=2, device="cpu", run_dir={str(tmp_path)!r})
        """
    )
    env = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)), "PYTHONWARNINGS": "ignore"}
    kernel = subprocess.Popen([sys.executable, "-c", script], env=env)
    assert patience.until(lambda: lines(tmp_path) >= 3, kernel)
    ranks = pids(tmp_path)
    assert len(ranks) == 2
    kernel.kill()
    kernel.wait()
    until = time.monotonic() + 120
    while any(alive(p) for p in ranks.values()) and time.monotonic() < until:
        time.sleep(0.2)
    assert not any(alive(p) for p in ranks.values())


@pytest.mark.slow
def test_interrupt_stops_and_saves(tmp_path: Path) -> None:
    when(lambda: lines(tmp_path) >= 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    result = launch(
        case_on_ranks, "sft", str(tmp_path), steps=100000, num_processes=2, device="cpu", run_dir=tmp_path, say=None
    )
    assert 3 <= result.history[-1]["step"] < 1000
    assert list((tmp_path / "checkpoints").glob("step-*"))


def machine(number: int, folder: Path, port: int, **over: Any) -> subprocess.Popen[bytes]:
    """One of two machines: its own launcher, agent and rank; the first is reached at an address of its own."""
    script = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {TESTS!r})
        from test_launch import case_on_ranks
        from rlhf_nb.scale.launch import launch
        result = launch(case_on_ranks, "sft", {str(folder)!r}, save_every=1, num_processes=2, strategy="zero2", machines=2, machine={number},
                        address="127.0.0.2", port={port}, device="cpu", run_dir={str(folder)!r}, **{over!r})
        print(result.history[-1]["step"])
        """
    )
    env = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)), "PYTHONWARNINGS": "ignore"}
    with open(folder.with_name(f"machine-{number}.txt"), "ab") as out:
        return subprocess.Popen([sys.executable, "-c", script], env=env, stdout=out, stderr=subprocess.STDOUT)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("lost", [None, 0, 1])
def test_two_machines(tmp_path: Path, lost: int | None) -> None:
    """Two machines meet over loopback addresses. One loses power: the other notices; started again, it rejoins; the same weights."""
    straight, folder, port = tmp_path / "straight", tmp_path / "run", free_port()
    run_ranks("sft", straight, 2, "zero2", steps=40)
    both = [machine(i, folder, port, steps=40) for i in range(2)]
    try:
        if lost is not None:
            assert patience.until(lambda: lines(folder) >= 3, *both)
            tree = [*psutil.Process(both[lost].pid).children(recursive=True), psutil.Process(both[lost].pid)]
            for process in tree:
                process.kill()
            both[lost].wait()
            log = folder / f"launch-{1 - lost}" / "log.jsonl"
            assert patience.until(lambda: f"rank {1 - lost} failed" in log.read_text(), both[1 - lost]), log.read_text()
            both[lost] = machine(lost, folder, port, steps=40)
        codes = patience.wait(both, cpu=1200)
        assert codes == [0, 0], [folder.with_name(f"machine-{i}.txt").read_text()[-3000:] for i in range(2)]
    finally:
        for p in both:
            for process in [*psutil.Process(p.pid).children(recursive=True), p] if p.poll() is None else []:
                process.kill()
            p.wait()
    a, b = (load_file(f / "weights.safetensors") for f in (straight, folder))
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert not processes_of(folder)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


STARTERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m"],
    "cpu2": [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "cpu2.yaml", "-m"],
    "zero3": [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "zero3.yaml", "-m"],
}


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("method", ["sft", "ppo"])
@pytest.mark.parametrize("how", sorted(STARTERS))
def test_started_by_others(tmp_path: Path, how: str, method: str) -> None:
    """`torchrun` and `accelerate launch` of `-m rlhf_nb METHOD --config run.yaml`: what one process does, told once."""
    from rlhf_nb.scale.cluster import accelerate_config

    over = ["steps=4", "mini_batch_size=8", "epochs=null", "device=cpu"] + (
        ["rollout_batch_size=16", "reward=gold"] if method == "ppo" else []
    )
    env = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)), "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_PORT": str(free_port())}
    for name in ("cpu2", "zero3"):
        (tmp_path / f"{name}.yaml").write_text(accelerate_config(name, 2, 1))

    def run(command: list[str], *more: str) -> str:
        done = patience.run([*command, *more], cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stdout[-3000:]
        return done.stdout

    alone = [sys.executable, "-m"]
    run(alone, "rlhf_nb", method, "--toy", *over, "output_dir=one")
    said = run(STARTERS[how], "rlhf_nb", method, "--config", "one/config.yaml", "output_dir=two")
    assert said.count("Done in") == 1 and said.count("Model: two/model") == 1, said
    a, b = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    assert a.keys() == b.keys()
    assert max(float((a[k] - b[k]).norm() / a[k].norm().clamp_min(1e-12)) for k in a) <= 1e-4


def odd_rank(what: str, folder: str, **over: Any) -> None:
    """A rank with other packages than the first has, or one that can't write its part."""
    if os.environ["RANK"] == "1" and what == "versions":
        import importlib.metadata as metadata

        real = metadata.version
        metadata.version = lambda name: "4.0.1" if name == "transformers" else real(name)
    if os.environ["RANK"] == "1" and what == "disk":
        import errno

        import rlhf_nb.run.checkpoint

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        rlhf_nb.run.checkpoint.save_file = full
    case_on_ranks("sft", folder, **over)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "processes", "message"),
    [
        (
            "versions",
            2,
            r"rank 0 has transformers [\d.]+ but rank 1 has 4.0.1.*install transformers==[\d.]+ on every machine",
        ),
        (
            "disk",
            2,
            r"rank 1.*the disk is full: the checkpoint of step 2 needs about .* MB.*free some space and save or resume",
        ),
        ("size", 3, r"mini_batch_size 8 .* 3 processes can't share them evenly: set it to 6 or 9"),
    ],
    ids=["versions", "disk", "size"],
)
def test_what_is_wrong_on_a_rank_is_told_here(tmp_path: Path, what: str, processes: int, message: str) -> None:
    with pytest.raises(RunError, match=r"^rank \d failed at step \d") as caught:
        launch(
            odd_rank,
            what,
            str(tmp_path),
            save_every=2,
            num_processes=processes,
            device="cpu",
            run_dir=tmp_path,
            restarts=0,
            say=None,
        )
    assert re.search(message, str(caught.value).splitlines()[0]), str(caught.value)
    assert not processes_of(tmp_path)


@pytest.mark.slow
def test_a_lost_shard_is_told_here(tmp_path: Path) -> None:
    """The newest checkpoint lacks its last rank's part: said, and the one before is taken; when that lacks it too, an error."""
    run_ranks("sft", tmp_path, 2, "", steps=4, save_every=2)
    said: list[str] = []

    def again(steps: int) -> Any:
        return launch(
            case_on_ranks,
            "sft",
            str(tmp_path),
            steps=steps,
            num_processes=2,
            device="cpu",
            run_dir=tmp_path,
            restarts=0,
            say=said.append,
        )

    (tmp_path / "checkpoints/step-0000000004/model-00001-of-00002.safetensors").unlink()
    assert again(6).history[-1]["step"] == 6
    assert any("step-0000000004 was passed over" in line and "rank 1 of 2 wrote it" in line for line in said), said
    for shard in (tmp_path / "checkpoints").glob("step-*/model-00001-of-00002.safetensors"):
        shard.unlink()
    with pytest.raises(
        RunError, match=r"no checkpoint can be used.*rank 1 of 2 wrote it.*Put the file back, or begin anew"
    ):
        again(8)


@pytest.mark.slow
def test_labelling_on_two_processes(tmp_path: Path) -> None:
    """AI feedback: the same pairs, in the same order, as one process labels."""
    from rlhf_nb.train.rlaif import Labelling, RLAIFConfig

    config = RLAIFConfig.preset(
        "toy", prompts=23, chunk=10, check_pairs=16, console=False, sampling={"max_new_tokens": 10}
    )
    alone = Labelling(config.replace(output_dir=str(tmp_path / "one"))).run()
    done = launch(config.replace(output_dir=str(tmp_path / "two")), num_processes=2, device="cpu", restarts=0, say=None)
    one, two = ((tmp_path / name / "preferences.jsonl").read_text() for name in ("one", "two"))
    assert one == two and len(one.splitlines()) > 10
    assert done.model == tmp_path / "two" / "preferences.jsonl"
    for key, value in done.value["metrics"].items():
        assert value == pytest.approx(alone[key]), key


@pytest.mark.slow
@needs_deepspeed
def test_a_pipeline_on_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage in fresh processes; a stage's model is that of one process, and what is finished is skipped."""
    from rlhf_nb.config import merge
    from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
    from rlhf_nb.train.dpo import DPOConfig
    from rlhf_nb.train.stage import lasting

    short = {"steps": 3, "data": {"path": None}, "mini_batch_size": 8}
    values = {
        "console": False, "eval_prompts": 16, "questions": 0, "base": {"size": "tiny"}, "sft": {"steps": 5, "mini_batch_size": 16},
        "reward": None, "ppo": None, "dpo": merge(DPOConfig.preset_values("toy"), short),
    }  # fmt: skip
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    said: list[str] = []
    one, two = (
        PipelineConfig.preset("toy", output_dir=str(tmp_path / str(n)), processes=n, strategy="zero3", **values)
        for n in (1, 2)
    )
    alone, both = RLHFPipeline(one).run(), RLHFPipeline(two, said.append).run()
    assert not (tmp_path / "compiled").exists()  # training needs none of what DeepSpeed compiles
    for stage in ("sft", "dpo"):
        assert json.loads((tmp_path / "2" / stage / "launch" / "accelerate.yaml").read_text())["num_processes"] == 2
        a, b = (load_file(tmp_path / n / stage / "model" / "model.safetensors") for n in ("1", "2"))
        assert all(torch.allclose(a[k], b[k], rtol=1e-3, atol=1e-4) for k in a)
    assert list(alone["stages"]) == list(both["stages"]) and list(alone["policies"]) == list(both["policies"])
    again = RLHFPipeline(two, said.append)
    marker = tmp_path / "2/dpo/stage.json"  # as the ranks left it, had this process died just then
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"config": lasting(again.stage_config("dpo"))}))
    again.run(resume=True)
    assert sum("skipped" in line for line in said) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"started 2 times by a launcher.*processes=2"):
        RLHFPipeline(one)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="strategy 'zero4' doesn't exist"):
        RLHFPipeline(two.replace(strategy="zero4"))
