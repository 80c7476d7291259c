"""What do common random numbers save? The difference that a setting makes, by forks and by independent runs.

Several PPO runs of the toy world, which differ in their seed alone, are each forked at a step with one changed setting. A fork and its parent share all random
numbers; a fork and another seed's parent share none. Counted is the variance of the difference of a metric, mean of the last steps.

    python benchmarks/forks.py                  # about four minutes of CPU
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from rlhf_nb.pipeline.fork import prepare_fork, run_fork
from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
from rlhf_nb.run.log import read_metrics
from rlhf_nb.train.stage import run_stage


def late(folder: Path, key: str, last: int) -> float:
    """Mean of a metric over the last steps of a run."""
    return statistics.fmean(float(e[key]) for e in [e for e in read_metrics(folder) if e["type"] == "step"][-last:])


def main() -> None:
    """Print the variances and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--at", type=int, default=20)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--last", type=int, default=5, help="steps that are averaged")
    parser.add_argument("--change", default="kl_coef=0.05")
    parser.add_argument("--key", default="objective/scores")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        pipeline = RLHFPipeline(
            PipelineConfig.preset("toy", output_dir=name, console=False, sft={"epochs": 2.0}, reward={"epochs": 0.5})
        )
        for stage in (pipeline.base, pipeline.sft, pipeline.reward):
            stage()
        plain, changed = list[float](), list[float]()
        for seed in range(args.seeds):
            own = {"steps": args.steps, "save_every": args.at, "keep_checkpoints": 9, "seed": seed, "console": False}
            run_stage(pipeline.stage_config("ppo").replace(**own, output_dir=f"{name}/run{seed}"))
            made = prepare_fork(f"{name}/run{seed}", args.at, [args.change])
            run_fork(made)
            plain.append(late(Path(f"{name}/run{seed}"), args.key, args.last))
            changed.append(late(made.folder, args.key, args.last))
            print(f"seed {seed}: {plain[-1]:.4f}, forked {changed[-1]:.4f}", flush=True)
    shared = [b - a for a, b in zip(plain, changed, strict=True)]
    apart = [b - a for i, a in enumerate(plain) for j, b in enumerate(changed) if i != j]
    ratio = statistics.pvariance(shared, statistics.fmean(shared)) / statistics.pvariance(
        apart, statistics.fmean(apart)
    )
    print(
        f"{args.change} at step {args.at} of {args.steps}, {args.key}, mean of the last {args.last} steps, {args.seeds} seeds"
    )
    print(
        f"difference: {statistics.fmean(shared):+.4f}; standard deviation {statistics.stdev(shared):.4f} with common random numbers, {statistics.pstdev(apart):.4f} without"
    )
    print(f"variance with common random numbers / without: {ratio:.2f}")


if __name__ == "__main__":
    main()
