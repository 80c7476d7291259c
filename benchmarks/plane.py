"""Best-of-n, PPO and DPO on one plane: what is meant (gold) and what is maximised (proxy) over √KL, by reward models of three sizes and three data sizes.

    python benchmarks/plane.py toy                                # three seeds, a quarter of an hour of one core
    python benchmarks/plane.py real --model FOLDER --seeds 0      # SmolLM2 (GRPO in PPO's place)
    python benchmarks/plane.py report --figures docs/figures      # tables, fits of Gao's forms, figures, of what there is

Each run is a process with one thread, leaves a JSON file in `--out` (runs/plane) and isn't made twice; `--only` names runs. Gold and proxy are
shown less their means and over their standard deviations, both over answers of the policy at the start.

The set-up is that of Gao, Schulman and Hilton, arXiv 2210.10760: gold is known, so proxies are learnt from gold's choices.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import plane_real
import plane_toy
import torch
from plane_toy import DATA, SIZES
from real_science import Lab, queue, work

CROSS = [(size, DATA[1]) for size in SIZES] + [("small", n) for n in DATA if n != DATA[1]]  # proxies that PPO maximises


TOY: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "toy_world": plane_toy.world,
    **{f"toy_ppo_{size}_{n}": partial(plane_toy.ppo, size=size, data=n) for size, n in CROSS},
    **{f"toy_dpo_{n}": partial(plane_toy.dpo, data=n) for n in DATA},
}
MIDDLE = plane_real.LAYERS[1]
REAL: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "draw": plane_real.draw,
    "heads": plane_real.heads,
    **{f"grpo_{MIDDLE}_{n}": partial(plane_real.grpo, layers=MIDDLE, pairs=n) for n in plane_real.PAIRS},
    **{f"dpo_{MIDDLE}_{n}": partial(plane_real.dpo, layers=MIDDLE, pairs=n) for n in plane_real.PAIRS},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["toy", "real", "report"])
    parser.add_argument("--model", type=Path, help="folder of a chat model")
    parser.add_argument("--out", type=Path, default=Path("runs/plane"))
    parser.add_argument(
        "--only", nargs="+", choices=[*TOY, *REAL], metavar="RUN", help=f"of {', '.join([*TOY, *REAL])}"
    )
    parser.add_argument("--steps", type=int, help="of GRPO (20)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--figures", type=Path, help="report: folder for the figures")
    parser.add_argument("--tiny", action="store_true", help="a step of each and few answers, to see that all runs")
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.asked = None
    if args.command == "report":
        import plane_report

        return plane_report.report(args.out, args.figures)
    if args.command == "real" and (args.model is None or not (args.model / "config.json").exists()):
        raise SystemExit(
            "skipped: no chat model there; fetch one (rlhf-nb get smollm2) and say where it is: --model FOLDER"
        )
    jobs = TOY | REAL
    if args.worker:
        return work(args, jobs)
    names = TOY if args.command == "toy" else REAL
    queue(args, [n for n in names if not args.only or n in args.only], args.seeds, __file__)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
