"""README.md from nbs/index.ipynb: visible cells and their outputs as Markdown. `--check` only compares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent


def readme() -> str:
    """The Markdown a reader of the repository sees."""
    nb = nbformat.read(ROOT / "nbs" / "index.ipynb", 4)
    nb.cells = [c for c in nb.cells if not re.search(r"^#\|\s*(hide|default_exp)\s*$", c.source, re.M)]
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.source = "\n".join(line for line in cell.source.split("\n") if not line.startswith("#|"))
    text, resources = MarkdownExporter().from_notebook_node(nb)
    if resources.get("outputs"):
        raise SystemExit("index.ipynb holds pictures: keep them in docs/ and link them, README.md must stand alone")
    text = text.replace("](../", "](")  # the notebook lies one folder deeper than README.md
    return "<!-- generated from nbs/index.ipynb: edit the notebook -->\n\n" + text.strip() + "\n"


if __name__ == "__main__":
    target = ROOT / "README.md"
    if "--check" in sys.argv:
        if not target.exists() or target.read_text(encoding="utf-8") != readme():
            raise SystemExit("README.md differs from nbs/index.ipynb: run `make export`")
    else:
        target.write_text(readme(), encoding="utf-8")
