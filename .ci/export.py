"""Export every notebook into the package, from scratch, so that a renamed module leaves nothing behind; first the links in them."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

KEEP = {"__init__.py", "__main__.py", "_modidx.py"}


def narrow(text: str) -> str:
    """A module's text with `__all__` on lines of 120 characters at most; nbdev counts without the name."""
    match = re.search(r"^__all__ = \[(.*?)\]$", text, re.M | re.S)
    if match is None:
        return text
    indent = " " * len("__all__ = [")
    lines = textwrap.wrap(" ".join(match[1].split()), 119, initial_indent=indent, subsequent_indent=indent)
    return text[: match.start()] + "__all__ = [" + "\n".join(lines).strip() + "]" + text[match.end() :]


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
    for path in (root / "rlhf_nb").rglob("*.py"):
        before = path.read_text(encoding="utf-8")
        if (after := narrow(before)) != before:
            path.write_text(after, encoding="utf-8")
    facts = subprocess.run(  # in a process of its own: this one may have imported what was there before
        [sys.executable, str(root / ".ci" / "facts.py")], env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True
    )  # fmt: skip
    if facts.returncode:
        print("rlhf_nb/cli/facts.json is as it was: " + facts.stderr.strip().splitlines()[-1])


if __name__ == "__main__":
    export(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())
