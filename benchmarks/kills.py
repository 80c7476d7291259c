"""`kill -9` at random moments: how much work is lost, for trainers, a pipeline, and several processes under ZeRO-3.

`python benchmarks/kills.py` kills 50 times and prints a table. Settings are those of the toy preset, except that `save_every` is
seconds instead of ten minutes and batches are small (so that a test takes minutes), and that runs are longer than the test. Lost is the time from the
snapshot of the newest whole checkpoint (or from the start or resumption of the run, if that came later) to the kill. The run is then
resumed; its log must hold each step up to the checkpoint once, in order, and nothing of what was killed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_nb.core import read_interval
from rlhf_nb.run.checkpoint import latest_complete
from rlhf_nb.run.lock import holder_of
from rlhf_nb.run.log import read_metrics

ALONE = ("sft", "reward", "ppo", "dpo", "grpo")
LONG = 100_000  # steps: no run ends before it is killed


OUT: list[Path] = []  # of --out


class Kill(NamedTuple):
    """One kill and what came of it."""

    case: str
    lost: float  # seconds of work
    logged: int  # steps in the log when the process was killed
    kept: int  # step of the newest whole checkpoint; 0: none
    sound: str  # what is wrong with the log or the lock; "": nothing


def train(method: str, folder: str, save_every: str) -> None:
    """Body of a process that trains until it is killed; as unattended jobs do, it goes on where something was saved."""
    import torch

    from rlhf_nb.train.registry import get
    from rlhf_nb.train.stage import run_stage

    torch.set_num_threads(1)
    over: dict[str, Any] = {
        "output_dir": folder,
        "save_every": save_every,
        "steps": LONG,
        "epochs": None,
        "console": False,
    }
    config = get(method).config.preset("toy", **over, **({"reward": "gold"} if get(method).online else {}))
    run_stage(config, resume=True, overwrite=True)


def pipeline(_: str, folder: str, save_every: str) -> None:
    """The same with three stages in a row, short enough for kills to meet all of them."""
    import torch

    from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline

    torch.set_num_threads(1)
    own = {"save_every": save_every, "epochs": None, "mini_batch_size": 8}
    stages = {
        "sft": own | {"steps": 300},
        "reward": own | {"steps": 200},
        "ppo": own | {"steps": LONG, "rollout_batch_size": 16},
    }
    config = PipelineConfig.preset("toy", output_dir=folder, console=False, base={"size": "tiny"}, **stages)
    there = (Path(folder) / "config.yaml").exists()
    RLHFPipeline(config).run(resume=there, overwrite=there)


def steps_of(run: Path) -> list[int]:
    """Steps in a run's log."""
    return [int(e["step"]) for e in read_metrics(run) if e["type"] == "step"]


def begun(run: Path) -> float:
    """When the newest session of a run began to work; 0: none did."""
    return max((float(e["time"]) for e in read_metrics(run) if e["type"] in ("start", "resume")), default=0.0)


def after_kill(case: str, run: Path, killed: float) -> Kill:
    """What a kill cost."""
    if (run / "stage.json").exists():
        return Kill(case, 0.0, 0, 0, "")  # a finished stage of a pipeline: nothing of it is lost
    events = read_metrics(run)
    newest = latest_complete(run / "checkpoints")
    saved = max((e["time"] for e in events if e["type"] == "save" and newest and e["path"] == newest.name), default=0.0)
    logged, kept = steps_of(run), int(newest.name[5:]) if newest else 0
    wrong = "" if logged[:kept] == list(range(1, kept + 1)) else f"the log lacks steps below the checkpoint's {kept}"
    return Kill(case, killed - max(saved, begun(run)), len(logged), kept, wrong)


def after_resume(kill: Kill, run: Path) -> Kill:
    """The same kill, once the run is resumed: its log has been cut back to the checkpoint, and no further."""
    events = read_metrics(run)
    where = max((i for i, e in enumerate(events) if e["type"] in ("start", "resume")), default=0)
    before = [int(e["step"]) for e in events[:where] if e["type"] == "step"]
    if kill.kept and before != list(range(1, kill.kept + 1)):
        kill = kill._replace(
            sound=f"after the resumption the log has {len(before)} steps before the checkpoint's {kill.kept}"
        )
    holder = holder_of(run)
    return noted(kill if holder is not None and holder.lives else kill._replace(sound="the resumed run has no lock"))


def noted(kill: Kill) -> Kill:
    """Write a kill down as soon as it is known."""
    for path in OUT:
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(kill._asdict()) + "\n")
    return kill


def current(root: Path, case: str) -> Path | None:
    """The folder of the run that is going on; of a pipeline its stage."""
    if case != "pipeline":
        return root if begun(root) else None
    stages = [root / s for s in ("sft", "reward", "ppo") if begun(root / s) and not (root / s / "stage.json").exists()]
    return stages[-1] if stages else None


def kill_alone(case: str, root: Path, kills: int, save_every: str, rng: random.Random) -> list[Kill]:
    """Start, kill, start again, as often as asked, and once more to see that it goes on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["rlhf_nb.train.ppo", "rlhf_nb.train.grpo", "rlhf_nb.train.dpo", "rlhf_nb.pipeline.stages"]
    )
    seconds, found = read_interval(save_every).seconds or 1.0, list[Kill]()
    pending: tuple[Kill, Path] | None = None
    while len(found) < kills:
        started = time.time()
        work = pipeline if case == "pipeline" else train
        process = context.Process(target=work, args=(case, str(root), save_every), daemon=True)
        process.start()
        run: Path | None = None
        while process.is_alive() and (run is None or begun(run) < started):
            time.sleep(0.02)
            run = current(root, case)
        assert run is not None and process.is_alive(), f"{case}: the run ended by itself ({process.exitcode})"
        if pending is not None and pending[1] == run:
            found.append(after_resume(pending[0], run))
        elif pending is not None:  # a stage was finished in the meantime, so nothing of it is resumed
            found.append(noted(pending[0]))
        if len(found) < kills:
            time.sleep(rng.uniform(0.0, 1.5 * seconds))
        run = current(root, case) or run
        process.kill()
        killed = time.time()
        process.join()
        pending = (after_kill(case, run, killed), run)
    return found


def kill_launched(case: str, root: Path, kills: int, save_every: str, rng: random.Random) -> list[Kill]:
    """Kill a rank of two under ZeRO-3, any of them, at any moment; the launcher starts all of them again."""
    seconds, found = read_interval(save_every).seconds or 1.0, list[Kill]()
    words = [
        "sft",
        "--toy",
        f"output_dir={root}",
        f"save_every={save_every}",
        f"steps={LONG}",
        "epochs=null",
        "console=false",
        "device=cpu",
    ]
    command = [
        sys.executable,
        "-m",
        "rlhf_nb",
        "launch",
        *words,
        "-n",
        "2",
        "--strategy",
        "zero3",
        "--restarts",
        str(kills + 1),
    ]
    with open(root.parent / "launch.txt", "wb") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            last, pending = 0.0, None
            while len(found) < kills:
                while begun(root) <= last:
                    assert launcher.poll() is None, (root.parent / "launch.txt").read_text()[-2000:]
                    time.sleep(0.05)
                last = begun(root)
                if pending is not None:
                    found.append(after_resume(pending, root))
                if len(found) < kills:
                    time.sleep(rng.uniform(0.0, 1.5 * seconds))
                    victim = json.loads((root / "launch" / f"rank-{rng.randrange(2)}.json").read_text())["pid"]
                    os.kill(int(victim), signal.SIGKILL)
                    killed = time.time()
                    time.sleep(0.3)
                    pending = after_kill(case, root, killed)
        finally:
            launcher.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(60)
            launcher.kill()
            launcher.wait()
    return found


def table(kills: list[Kill], seconds: float) -> str:
    """One line a case, in Markdown."""
    lines = [
        "| killed | times | work lost, median | at most | within the interval | log whole |",
        "|---|---|---|---|---|---|",
    ]
    for case in [*dict.fromkeys(k.case for k in kills), "all"]:
        own = [k for k in kills if case in (k.case, "all")]
        lost = [k.lost for k in own]
        within, whole = sum(x <= seconds for x in lost), sum(not k.sound for k in own)
        n = len(own)
        lines.append(
            f"| {case} | {n} | {statistics.median(lost):.1f} s | {max(lost):.1f} s | {within} of {n} | {whole} of {n} |"
        )
    return "\n".join(lines)


def main(words: list[str] | None = None) -> list[Kill]:
    """Kill, print the table, return what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    every = {**dict.fromkeys(ALONE, 8), "pipeline": 7, "launch": 3}
    parser.add_argument("--cases", default=",".join(every), help="which, with commas between them")
    parser.add_argument("--kills", type=int, help="of each case; default: 50 in all")
    parser.add_argument("--save-every", default="8s")
    parser.add_argument("--out", type=Path, help="a file that gets a line for each kill (several calls may share one)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(words)
    rng, found = random.Random(asked.seed), list[Kill]()
    os.environ["OMP_NUM_THREADS"] = "1"
    OUT.extend([asked.out] if asked.out is not None else [])
    root = Path(tempfile.mkdtemp())
    try:
        for case in asked.cases.split(","):
            kill = kill_launched if case == "launch" else kill_alone
            found += kill(case, root / case, asked.kills or every[case], asked.save_every, rng)
            print(f"{case}: {len(found)} kills so far", file=sys.stderr, flush=True)
        print(table(found, read_interval(asked.save_every).seconds or 0.0))
        for kill in found:
            if kill.sound or kill.lost > (read_interval(asked.save_every).seconds or 0.0):
                print(kill)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return found


if __name__ == "__main__":
    main()
