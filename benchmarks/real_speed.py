"""The speed bars of SmolLM2-135M-Instruct in one call, for a quiet machine: part after part, each in a process of its own.

    python benchmarks/real_speed.py [--minutes 10] [--parts recipe grpo grpo-64 dpo dpo-fp32 grpo-bf16 ppo] [--threads 2]

    recipe     three steps of the recipe `smollm2_ppo`: seconds a step, CPU seconds, memory
    grpo       a GRPO step of at most 24 new tokens against TRL 1.16, fp32
    grpo-64    the same with at most 64
    dpo        a DPO step on HH pairs, grouped by length, reference cached on both sides, bf16: TRL's fastest way
    dpo-fp32   the same in fp32
    grpo-bf16  GRPO in bf16 on both sides
    ppo        a PPO step with adapters against TRL 1.12, bf16

It needs `rlhf-nb get smollm2` and the environments of `benchmarks/peers.py`. A part starts only while the minutes that it is expected to take
(below; two quiet cores) are left of --minutes; which parts were left out is said at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

GRPO, DPO = ["bench_grpo.py", "--task", "smollm2", "--against", "full"], ["bench_dpo.py", "--task", "smollm2"]
PARTS: dict[str, tuple[float, list[str]]] = {  # expected minutes, and the command
    "recipe": (1.0, []),
    "grpo": (3.5, [*GRPO, "--steps", "2", "--warmup", "1"]),
    "dpo": (2.0, [*DPO, "--precision", "bf16", "--against", "cached-grouped", "--steps", "2", "--warmup", "1"]),
    "grpo-64": (5.5, [*GRPO, "--new-tokens", "64", "--steps", "1", "--warmup", "1"]),
    "dpo-fp32": (3.0, [*DPO, "--against", "cached-grouped", "--steps", "2", "--warmup", "1"]),
    "grpo-bf16": (3.0, [*GRPO, "--precision", "bf16", "--steps", "2", "--warmup", "1"]),
    "ppo": (
        6.0,
        "bench_ppo.py --task smollm2 --precision bf16 --train adapters --steps 1 --warmup 0".split(),
    ),
}


def recipe(threads: int) -> None:
    """Three steps of the recipe as a user starts it; the first one is left out of the median."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable, "-m", "rlhf_nb", "ppo", "--config", "smollm2_ppo", "steps=3", f"output_dir={run}", "console=false",
        ]  # fmt: skip
        env = dict(os.environ, OMP_NUM_THREADS=str(threads))
        done = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(done.pid, 0)
        if status:
            raise SystemExit(f"the recipe ended with {os.waitstatus_to_exitcode(status)}")
        events = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        at = [e["time"] for e in events if e["type"] == "step"]
        steps = [b - a for a, b in zip(at, at[1:])]
        print(
            f"  recipe smollm2_ppo: {statistics.median(steps):.1f} s a step ({', '.join(f'{x:.1f}' for x in steps)}), "
            f"{used.ru_utime + used.ru_stime:.0f} CPU seconds in all, peak memory {used.ru_maxrss / 1024:.0f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="no part starts that would not end within them")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="in this order")
    parser.add_argument("--threads", type=int, default=2, help="of both sides")
    args = parser.parse_args()
    started, left_out = time.monotonic(), []
    for name in args.parts:
        expected, command = PARTS[name]
        if (time.monotonic() - started) / 60 + expected > args.minutes:
            left_out.append(name)
            continue
        print(f"{name}, load {os.getloadavg()[0]:.1f}", flush=True)
        before = time.monotonic()
        if command:
            line = [sys.executable, str(harness.HERE / command[0]), *command[1:], "--threads", str(args.threads)]
            subprocess.run(line, check=False)
        else:
            recipe(args.threads)
        print(f"  {name} took {(time.monotonic() - before) / 60:.1f} minutes", flush=True)
    if left_out:
        print(f"left out for want of time: {', '.join(left_out)}")


if __name__ == "__main__":
    main()
