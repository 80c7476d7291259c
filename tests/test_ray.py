"""Answers that actors of Ray draw; where it is installed: `pip install ray`, then `pytest -m "" tests/test_ray.py`."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_draw_workers import Killed, Slow
from test_tickets import make, weights
from test_vllm import children, read_if_there

from rlhf_nb.core import ConfigError, RewardError
from rlhf_nb.run.log import read_metrics

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)
HERE = Path(__file__).resolve().parent
pytestmark = [pytest.mark.filterwarnings("ignore:rollouts.lag is:UserWarning"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Actors import this folder's modules; and however a test ends, none of the processes that it began stays."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent), str(HERE)]))
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    before = {*family(os.getpid())}
    yield
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()
    left = {*family(os.getpid())} - before
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert gone([*left])


def family(of: int) -> list[int]:
    """All processes that came of one."""
    return [pid for child in children(of) for pid in (child, *family(child))]


def listening(pids: list[int]) -> set[str]:
    """The addresses at which processes listen, as the kernel writes them."""
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(fd)[8:-1])
            except OSError:
                continue
    lines = [x.split() for name in ("tcp", "tcp6") for x in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {x[1].partition(":")[0] for x in lines if x[3] == "0A" and x[9] in sockets}


def gone(pids: list[int], seconds: float = 300) -> bool:
    """Whether processes have ended, or do so in this time."""
    until = time.monotonic() + seconds
    while any(b"(zombie)" not in (s := read_if_there(Path(f"/proc/{pid}/status"))) and s for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def on_ray(folder: Path, lag: int, workers: int, sampler: Any, **over: Any) -> Any:
    t = make("grpo", folder, lag, rollouts={"lag": lag, "workers": workers, "ray": "local"}, **over)
    t.method.sampler = sampler or t.method.sampler
    return t


def test_actors_draw_the_bits_of_one_process(tmp_path: Path) -> None:
    """Twice in turn; one is killed from outside now and then. It listens on the loopback only and leaves nothing."""
    straight = make("grpo", tmp_path / "a", 2, rollouts={"lag": 2}, steps=8)
    straight.fit()
    t, seen, heard = on_ray(tmp_path / "b", 2, 2, Slow(), steps=8), set[int](), set[str]()
    rng, handler = random.Random(0), signal.getsignal(signal.SIGTERM)

    def kill(step: int) -> None:
        pids = family(os.getpid())
        seen.update(pids)
        heard.update(listening([*pids, os.getpid()]))
        actors = [w.pid for w in t.method.actor.rollouts.workers.crew.workers.values() if w.pid]
        if step < 5 and actors:
            os.kill(rng.choice(actors), signal.SIGKILL)

    t.method.finish_step = kill
    t.fit()
    assert weights(t) == weights(straight) and 3 <= t.method.actor.rollouts.workers.deaths <= 5
    assert len(seen) > 5 and heard <= {
        "0100007F",
        "0000000000000000FFFF00000100007F",
        "00000000000000000000000001000000",
    }
    assert gone([*seen]) and not sys.modules["ray"].is_initialized() and signal.getsignal(signal.SIGTERM) is handler
    place = t.method.actor.rollouts.workers.place
    assert place.folder and not Path(place.folder).exists() and os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_clusters_node_is_killed(tmp_path: Path) -> None:
    """Three nodes of one core each; one of those that draw is lost with all its processes, and the free one takes over."""
    from ray.cluster_utils import Cluster

    straight = make("grpo", tmp_path / "a", 2, rollouts={"lag": 2}, steps=8)
    straight.fit()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    how = {"lag": 2, "workers": 2, "ray": cluster.address}
    t = make("grpo", tmp_path / "b", 2, rollouts=how, steps=8)
    t.method.sampler, killed = Slow(), list[Any]()

    def kill(step: int) -> None:
        pids = {w.pid for w in t.method.actor.rollouts.workers.crew.workers.values()}
        for node in nodes if step >= 2 and not killed else ():
            if not killed and pids & {*family(node.all_processes["raylet"][0].process.pid)}:
                killed.append(node)
                cluster.remove_node(node, allow_graceful=False)

    t.method.finish_step = kill
    try:
        t.fit()
    finally:
        cluster.shutdown()
    assert weights(t) == weights(straight) and killed and 1 <= t.method.actor.rollouts.workers.deaths <= 2


@pytest.mark.parametrize("prompts", [8, 1])
def test_five_kills_in_a_row(prompts: int, tmp_path: Path) -> None:
    over = {"steps": 2, "rollout_batch_size": 4 * prompts, "mini_batch_size": 4 * prompts}
    straight = make("grpo", tmp_path / "a", 0, **over)
    t = on_ray(tmp_path / "b", 0, 1, Killed(tmp_path / "kills", 5), **over)
    straight.fit(), t.fit()
    assert weights(t) == weights(straight) and t.method.actor.rollouts.workers.deaths == 5


def test_a_prompt_that_is_always_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_nb.rollout import workers as rollout_workers

    monkeypatch.setattr(rollout_workers, "_ENDS", 3)
    t = on_ray(tmp_path, 0, 1, Killed(tmp_path / "kills", 10**9), rollout_batch_size=4, mini_batch_size=4)
    with pytest.raises(RewardError, match=r"ended 3 times .* the last time \(.*: .* A checkpoint of step 0 was left"):
        t.fit()
    assert not sys.modules["ray"].is_initialized()


@pytest.mark.parametrize("first", [True, False])
def test_resumed_with_another_place(first: bool, tmp_path: Path) -> None:
    """From actors to this process, and from this process to actors: allowed, and the same bits."""
    straight, *parts = (
        on_ray(tmp_path / name, 2, 1, None) if on else make("grpo", tmp_path / name, 2)
        for name, on in (("a", False), ("b", first), ("b", not first))
    )
    straight.fit(), parts[0].fit()
    for folder in (tmp_path / "b" / "checkpoints").glob("step-*[34]"):  # as if it had been killed after two steps
        shutil.rmtree(folder)
    parts[1].fit(resume=True)
    assert weights(parts[1]) == weights(straight)
    said = next(e for e in read_metrics(tmp_path / "b") if e["type"] == "resume")
    assert any("rollouts.ray" in x for x in said["changed"])


LEARNER = """
import sys, time
from pathlib import Path
from test_ray import family, on_ray
from rlhf_nb.rollout.backends import OurSampler
import os
t = on_ray(Path(sys.argv[1]) / "run", 0, 1, OurSampler())
t.start()
t.train_step()
(Path(sys.argv[1]) / "pids").write_text(" ".join(map(str, family(os.getpid()))))
time.sleep(300)
"""


def test_a_killed_learner_leaves_no_ray(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", LEARNER, str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 300
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        pids = [int(x) for x in (tmp_path / "pids").read_text().split()]
        assert len(pids) > 4
    finally:
        process.kill()
        process.wait()
    assert gone(pids)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ({"ray": "local", "vllm": sys.executable}, "rollouts.vllm is .*"),
        ({"ray": "127.0.0.1:1"}, "rollouts.ray=127.0.0.1:1: there is no Ray .*refused.*ray start --head"),
        ({"ray": "cluster"}, "rollouts.ray=cluster: there is no Ray .*ray start --head"),
        ({"ray": "auto"}, "rollouts.ray=auto: there is no Ray .*ray start --head"),
    ],
)
def test_refused(how: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make("raft", tmp_path, 0, rollouts=how).fit()
