"""What the dashboard costs: share of a step, memory after 100,000 steps, time to open a finished run.

    python benchmarks/bench_dashboard.py [--steps 100000] [--train-steps 60]

Bars: <= 2 % of step time at 5 steps/s; <= 50 MB after 100,000 steps; <= 2 s to open a finished run of 100,000 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

KEYS = [
    "objective/scores", "objective/scores_std", "objective/entropy", "completions/mean_length", "completions/min_length", "completions/max_length",
    "completions/clipped_ratio", "objective/kl", "objective/kl_stderr", "objective/kl_k2", "objective/kl_k2_stderr", "objective/kl_k3",
    "objective/kl_k3_stderr", "val/explained_variance", "objective/non_score_reward", "objective/rlhf_reward", "objective/kl_coef", "rewards/reward",
    "loss", "grad_norm", "loss/policy_avg", "loss/value_avg", "policy/approxkl_avg", "policy/clipfrac_avg", "policy/entropy_avg", "val/clipfrac_avg",
    "val/ratio", "updates", "lr", "epoch", "perf/step_s", "perf/tokens_per_s", "perf/rss_mb", "perf/data_s", "perf/collect_s", "perf/update_s",
    "perf/eval_s", "perf/stall_s",
]  # fmt: skip


def write_log(path: Path, steps: int) -> None:
    """A log as a PPO run writes it: 38 metrics a step, 17 digits each, now and then an evaluation, a checkpoint, a change."""
    import numpy as np

    rng = np.random.default_rng(0)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(f"steps: {steps}\nkl_budget: 6.0\n")
    with open(path / "metrics.jsonl", "w") as f:

        def event(step: int, kind: str, **fields: object) -> None:
            f.write(json.dumps({"time": 1.8e9 + step, "rank": 0, "step": step, "type": kind, **fields}) + "\n")

        event(0, "start", method="ppo", total_steps=steps)
        for s in range(1, steps + 1):
            event(s, "step", **dict(zip(KEYS, rng.random(len(KEYS)).tolist())))
            if s % 500 == 0:
                event(s, "eval", **{"eval/gold": s / steps, "eval/kl": 3.0})
                event(s, "save", path=f"step-{s:010d}")
            if s % 5000 == 0:
                event(s, "control", request="set", key="kl_coef", old=0.1, new=0.2, ok=True, why="")
        event(steps, "end", reason=None)


def opening(path: Path) -> None:
    """In a fresh process: open a finished run, draw it, make the still; seconds and megabytes."""
    import rlhf_nb.widgets.charts  # noqa: F401  # imports are not what is measured
    from rlhf_nb.run.log import resident_mb
    from rlhf_nb.widgets.dashboard import Dashboard
    from rlhf_nb.widgets.panels import still

    before, begin, used = resident_mb(), time.perf_counter(), time.process_time()
    board = Dashboard(path)
    board.refresh(force=True)
    opened, memory, cpu = time.perf_counter() - begin, resident_mb() - before, time.process_time() - used
    begin = time.perf_counter()
    still(board.readers)
    print(json.dumps({"open_s": opened, "open_cpu_s": cpu, "open_mb": memory, "still_s": time.perf_counter() - begin}))


def growing(path: Path) -> None:
    """In a fresh process: follow a run from its first step to its last, as a live dashboard does; megabytes."""
    from rlhf_nb.run.log import resident_mb
    from rlhf_nb.widgets.dashboard import Dashboard

    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    target = path.parent / "growing"
    target.mkdir(exist_ok=True)
    board = Dashboard(target)
    write = open(target / "metrics.jsonl", "wb", buffering=0)
    write.writelines(lines[:10])
    board.refresh(force=True)
    before, cost, looks = resident_mb(), 0.0, 0
    for i in range(10, len(lines), 50):
        write.write(b"".join(lines[i : i + 50]))
        begin = time.thread_time()
        if i % 5000 == 10:
            board.refresh()
            looks += 1
            cost += time.thread_time() - begin
        else:
            board.readers[0].poll()
    print(json.dumps({"grow_mb": resident_mb() - before, "refresh_ms": 1000 * cost / max(looks, 1)}))


CELL = """
import json, sys, time, warnings; warnings.filterwarnings("ignore")
sys.path.insert(0, {root!r})
import torch; torch.set_num_threads(1)
from rlhf_nb.data import toy
from rlhf_nb.train.ppo import PPOConfig, PPOTrainer
from rlhf_nb.widgets.dashboard import Dashboard
config = PPOConfig.preset("toy", steps={steps}, rollout_batch_size={rollout}, mini_batch_size={rollout}, console=False)
def make(name):
    return PPOTrainer(config, toy.build_model(0), toy.build_tokenizer(), reward=toy.gold_reward, rows=toy.train_prompts(256), run_dir={folder!r} + name)
def steps(history):
    return [e["perf/step_s"] for e in history[5:]]
make("warm").fit()
out = {{"plain": [], "watched": [], "share": []}}
for i in range(2):
    out["plain"] += steps(make(f"plain{{i}}").fit())
    trainer = make(f"watched{{i}}")
    board = Dashboard(trainer, widgets=True)
    begin = time.perf_counter()
    with board.live():
        out["watched"] += steps(trainer.fit())
        out["share"].append(board.spent / (time.perf_counter() - begin))
print("RESULT", json.dumps(out))
"""


def training(folder: Path, steps: int, rollout: int) -> dict[str, float]:
    """PPO on the toy world in a real kernel, with and without a dashboard."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    text: list[str] = []
    try:
        cell = CELL.format(root=str(ROOT), steps=steps, rollout=rollout, folder=str(folder) + "/")
        client.execute_interactive(
            cell,
            timeout=280,
            output_hook=lambda m: text.append(
                m["content"].get("text", "") or "\n".join(m["content"].get("traceback", []))
            ),
        )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    found = "".join(text)
    if "RESULT" not in found:
        raise SystemExit(found)
    out = json.loads(found.split("RESULT", 1)[1])
    plain, watched = statistics.median(out["plain"]), statistics.median(out["watched"])
    return {
        "steps_per_s": 1 / plain,
        "plain_s": plain,
        "watched_s": watched,
        "slower": watched / plain - 1,
        "cpu_share": max(out["share"]),
    }


def fresh(name: str, path: Path) -> dict[str, float]:
    """A measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--part", name, "--path", str(path)], capture_output=True, text=True, timeout=280
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--train-steps", type=int, default=60)
    parser.add_argument("--rollout", type=int, default=32)
    parser.add_argument("--part")
    parser.add_argument("--path", type=Path)
    args = parser.parse_args()
    if args.part:
        return {"opening": opening, "growing": growing}[args.part](args.path)
    with tempfile.TemporaryDirectory() as tmp:
        log = Path(tmp) / "finished"
        write_log(log, args.steps)
        print(f"log of {args.steps:,} steps, {(log / 'metrics.jsonl').stat().st_size / 1e6:.0f} MB")
        found = [fresh("opening", log) for _ in range(3)]
        best = min(found, key=lambda x: x["open_s"])
        print(
            f"open and draw a finished run: {best['open_s']:.2f} s, {best['open_cpu_s']:.2f} s of CPU (bar 2 s), {best['open_mb']:.0f} MB (bar 50 MB); then picture and table {best['still_s']:.2f} s"
        )
        grow = fresh("growing", log)
        print(
            f"follow it from its first step: {grow['grow_mb']:.0f} MB (bar 50 MB); reading what is new and drawing: {grow['refresh_ms']:.1f} ms of CPU"
        )
        if args.train_steps:
            run = training(Path(tmp), args.train_steps, args.rollout)
            print(
                f"PPO at {run['steps_per_s']:.1f} steps/s: {run['cpu_share']:.2%} of the time is spent on drawing (bar 2 %); median step {run['plain_s'] * 1000:.1f} ms "
                f"without, {run['watched_s'] * 1000:.1f} ms with a dashboard ({run['slower']:+.1%})"
            )


if __name__ == "__main__":
    main()
