"""Virtual environments of the libraries we compare with, each in `benchmarks/.venvs/NAME` (ignored by git).

    python benchmarks/peers.py [NAME ...] [--recreate]

Torch is pinned to the version in `constraints.txt`, so that both sides of a comparison run the same kernels; where pip is
pointed at a CPU build of that version, no CUDA package is fetched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
VENVS = HERE / ".venvs"

# TRL 1.12.0 is the last release with PPO; 1.16.0 is the one that its SFT and reward trainers are measured in.
PEERS: dict[str, list[str]] = {
    "trl-1.16": ["trl==1.16.0", "transformers==5.23.0"],
    "trl-1.12": ["trl==1.12.0", "transformers==5.23.0", "peft==0.21.2"],
}


def torch_pin() -> str:
    """The requirement line that fixes torch for this repository."""
    lines = (HERE.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.strip() for line in lines if line.startswith("torch=="))


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment."""
    return VENVS / name / ("Scripts" if os.name == "nt" else "bin") / "python"


def ensure(name: str, recreate: bool = False) -> Path:
    """Create a peer's environment unless it is there, and return its interpreter.

    Args:
        name: a key of PEERS.
        recreate: throw an existing one away first.
    """
    wanted, stamp = "\n".join([torch_pin(), *PEERS[name]]), VENVS / name / "installed.txt"
    if recreate:
        shutil.rmtree(VENVS / name, ignore_errors=True)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        print(f"installing {', '.join(PEERS[name])} into {stamp.parent.relative_to(HERE.parent)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENVS / name)], check=True)
        pip = [str(python_of(name)), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *wanted.split("\n"), "psutil"], check=True)
        stamp.write_text(wanted, encoding="utf-8")
    return python_of(name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(PEERS)} (default: all)")
    parser.add_argument("--recreate", action="store_true", help="install from scratch")
    args = parser.parse_args()
    for peer in args.names or PEERS:
        print(ensure(peer, args.recreate).relative_to(HERE.parent))
