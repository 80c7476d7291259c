"""The printed script on a real SLURM: a controller and two nodes on this machine (Debian: slurmctld, slurmd, slurm-client, munge), processes without GPUs."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf_nb.run.log import read_metrics
from rlhf_nb.scale.cluster import slurm_script

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
missing = [p for p in PROGRAMS if shutil.which(p, path=f"{os.environ['PATH']}:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing) or os.geteuid() != 0, reason=f"needs root and SLURM's programs: {missing}"),
]
CONF = """ClusterName=trial
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=5
MinJobAge=7200
GresTypes=gpu
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{second}] CPUs=4 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
STEPS = 12


def free_ports(count: int) -> list[int]:
    """Ports of the loopback in a row that nothing listens on."""
    for start in range(27_000, 60_000, count):
        holders = [socket.socket() for _ in range(count)]
        try:
            for i, holder in enumerate(holders):
                holder.bind(("127.0.0.1", start + i))
        except OSError:
            continue
        finally:
            for holder in holders:
                holder.close()
        return list(range(start, start + count))
    raise OSError("no free ports")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a SLURM that runs; its jobs and daemons end with the test."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("munge", "state"):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o600)
    port, first, second = free_ports(3)
    (folder / "slurm.conf").write_text(
        CONF.format(folder=folder, host=socket.gethostname().partition(".")[0], port=port, first=first, second=second)
    )
    (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/null\n")  # a GPU to be counted, not used
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin")
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{key}={folder}/munge/{name}" for key, name in files.items()]
        daemons = []
        try:
            for command in (
                ["munged", "-F", "--force", *options],
                ["slurmctld", "-D"],
                *(["slurmd", "-D", "-N", n] for n in ("n1", "n2")),
            ):
                daemons.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
                time.sleep(1)
            until(lambda: said("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", "both nodes are idle")
            yield folder
        finally:
            subprocess.run(["scancel", "--user=root", "--full"], timeout=60, check=False)
            for process in ours("output_dir=" + str(folder)):
                os.kill(process, signal.SIGKILL)
            for daemon in reversed(daemons):
                daemon.terminate()
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()


def said(*command: str) -> str:
    """What a command of SLURM prints."""
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.strip()


def until(holds: Callable[[], object], what: str, seconds: float = 600) -> None:
    """Wait for something; the limit is one for a machine that does much else."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"after {seconds:g} s it still doesn't hold that {what}"
        time.sleep(0.2)


def ours(*words: str) -> list[int]:
    """Processes whose command line holds these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in words) and int(folder.name) != os.getpid():
            found.append(int(folder.name))
    return found


def submit(folder: Path, run: Path) -> str:
    """Send the script as it is printed, for two nodes with a process each; the job's number."""
    script = folder / f"{run.name}.sbatch"
    command = [
        "ppo",
        "--toy",
        f"steps={STEPS}",
        "save_every=1",
        "console=false",
        "rollout_batch_size=8",
        "mini_batch_size=8",
        "eval_every=null",
    ]
    root = str(Path(__file__).resolve().parent.parent)
    surroundings = {  # names of these nodes are known to SLURM alone, and there is no GPU
        "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "PYTHONPATH": root,
    }  # fmt: skip
    script.write_text(
        slurm_script(command, str(run), nodes=2, gpus_per_node=1, strategy="ddp", cpus_per_gpu=1, time="02:00:00", environment=surroundings)
    )  # fmt: skip
    return said("sbatch", "--parsable", f"--chdir={folder}", str(script))


def steps(run: Path) -> list[int]:
    """Steps in the run's log."""
    return [e["step"] for e in read_metrics(run) if e["type"] == "step"]


def state(job: str) -> str:
    """RUNNING, COMPLETED, FAILED, ..."""
    return said("scontrol", "show", "job", job).partition("JobState=")[2].split()[0]


def weights(run: Path) -> str:
    """Digest of the model that a run left."""
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


def go_on(job: str) -> None:
    """What a person types after a failed job; SLURM's pause of two minutes before the next start is cut to five seconds."""
    said("scontrol", "requeue", job)
    until(lambda: state(job) == "PENDING", "the job waits again")
    said("scontrol", "update", f"jobid={job}", "starttime=now+5")


def test_killed_five_times_and_stopped_once_the_job_ends_with_the_same_weights(cluster: Path) -> None:
    whole, cut = cluster / "whole", cluster / "cut"
    job = submit(cluster, whole)
    until(lambda: state(job) == "COMPLETED", "the first job is complete")
    assert steps(whole) == list(range(1, STEPS + 1))

    job = submit(cluster, cut)
    rank = lambda node: ours("-m rlhf_nb ppo", str(cut), "-u")[node]
    launcher = lambda node: ours("torch.distributed.run", f"--node-rank {node}", str(cut))[0]
    kills: list[Callable[[], object]] = [
        lambda: os.kill(rank(0), signal.SIGKILL),
        lambda: os.kill(rank(1), signal.SIGKILL),
        lambda: os.kill(launcher(0), signal.SIGKILL),
        lambda: os.kill(launcher(1), signal.SIGKILL),
        lambda: said("scancel", f"{job}.0"),
    ]
    for number, kill in enumerate(kills, start=1):
        until(
            lambda n=number: len(steps(cut)) >= 2 * n - 1 and len(ours("-m rlhf_nb ppo", str(cut), "-u")) == 2,
            f"step {2 * number - 1} is done",
        )  # type: ignore[misc]
        kill()
        until(lambda: state(job) not in ("RUNNING", "COMPLETING"), "the job has ended")
        until(lambda: not ours("-m rlhf_nb ppo", str(cut)), "no process of it is left", 60)
        assert state(job) in ("FAILED", "CANCELLED"), state(job)  # one that fails by itself isn't begun again unasked
        go_on(job)
    until(lambda: len(steps(cut)) >= STEPS - 1 or state(job) == "COMPLETED", "the last but one step is done")
    until(lambda: state(job) == "COMPLETED", "the second job is complete")
    assert sorted(set(steps(cut))) == list(range(1, STEPS + 1))
    assert weights(cut) == weights(whole)


def test_the_time_limits_signal_saves_and_requeues(cluster: Path) -> None:
    run = cluster / "limit"
    job = submit(cluster, run)
    until(lambda: len(steps(run)) >= 3, "three steps are done")
    said("scancel", "--signal=USR1", "--batch", job)
    until(lambda: "Restarts=1" in said("scontrol", "show", "job", job), "the job has put itself into the queue again")
    reached = len(steps(run))
    assert reached < STEPS and "it goes on when the job starts again" in (cluster / f"rlhf-nb-{job}.log").read_text()
    until(lambda: state(job) == "PENDING", "the job waits again")
    said("scontrol", "update", f"jobid={job}", "starttime=now+5")
    until(lambda: state(job) == "COMPLETED", "the job is complete")
    assert steps(run) == list(range(1, STEPS + 1))
