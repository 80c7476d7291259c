"""Export every notebook into the package, from scratch, so that a renamed module leaves nothing behind; first the links in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

KEEP = {"__init__.py", "__main__.py", "_modidx.py"}


def export(root: Path) -> None:
    """Delete the exported modules below root/rlhf_nb and write them again from root/nbs."""
    import os

    os.chdir(root)
    from links import relink
    from nbdev.doclinks import nbdev_export

    relink(root)
    for path in (root / "rlhf_nb").rglob("*.py"):
        if path.name not in KEEP:
            path.unlink()
    nbdev_export()
    facts = subprocess.run(  # in a process of its own: this one may have imported what was there before
        [sys.executable, str(root / ".ci" / "facts.py")], env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True
    )  # fmt: skip
    if facts.returncode:
        print("rlhf_nb/cli/facts.json is as it was: " + facts.stderr.strip().splitlines()[-1])


if __name__ == "__main__":
    export(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
