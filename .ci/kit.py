"""What a teacher takes from a clone: lessons without answers, slides, and papers for an examination.

    python .ci/kit.py students FOLDER           # lessons and labs without solutions and stored answers
    python .ci/kit.py slides FOLDER             # a deck for each lesson
    python .ci/kit.py exam FOLDER [SEED]        # twelve of the sixty questions of exam.yaml, one of each lesson, and a key

A deck is nbconvert's: one HTML file that loads reveal.js and MathJax from the network when it is opened. Where there is
none, print it to PDF before (`?print-pdf` behind its address).
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / ".ci"))
from links import place  # noqa: E402

COURSE = ROOT / "nbs" / "course"
KEPT = ("<figure",)  # outputs that a student is given: figures move without a kernel
AFTER = ("## Exercises", "## Quiz", "## Two papers", "## To hand in")


def read(path: Path) -> dict[str, Any]:
    """A notebook, each cell's text and each text of its outputs as one string."""
    nb: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    for cell in nb["cells"]:
        cell["source"] = "".join(cell["source"])
        for held in [*cell.get("outputs", []), *(o.get("data", {}) for o in cell.get("outputs", []))]:
            held |= {
                k: "".join(v) for k, v in held.items() if isinstance(v, list) and all(isinstance(x, str) for x in v)
            }
    return nb


def is_figure(output: dict[str, Any]) -> bool:
    """Whether an output is a figure to touch."""
    return "".join(output.get("data", {}).get("text/html", "")).startswith(KEPT)


def students(target: Path) -> list[Path]:
    """Write the lessons and labs as a student begins them; returns the files."""
    target.mkdir(parents=True, exist_ok=True)
    made, where = [], place(ROOT)
    for path in sorted(COURSE.glob("l*_*.ipynb")):
        nb = read(path)
        for cell in nb["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = [o for o in cell["outputs"] if is_figure(o)]
                cell["execution_count"] = None
            cell["source"] = cell["source"].replace("](../", f"]({where.url}/blob/{where.ref}/nbs/")
        made.append(target / path.name)
        made[-1].write_text(json.dumps(nb, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return made


def deck(path: Path) -> dict[str, Any]:
    """A lesson whose cells say which slide they are on: one for the question, one for each section; code that draws a
    figure is left out, and so are exercise cells."""
    nb, inside, first, beside = read(path), "", False, "-"
    parts = [
        (c, re.split(r"\n+(?=## )", c["source"]) if c["cell_type"] == "markdown" else [c["source"]])
        for c in nb["cells"]
    ]
    nb["cells"] = [c | {"source": text, "id": f"{c['id']}-{i}"} for c, texts in parts for i, text in enumerate(texts)]
    for cell in nb["cells"]:
        text, code = cell["source"], cell["cell_type"] == "code"
        new = text.startswith(("# ", "## "))
        inside = next((h for h in AFTER if text.startswith(h)), "" if new else inside)
        figure = code and any(map(is_figure, cell["outputs"]))
        if text.startswith("## A figure"):  # a short text and its figure share a slide
            first, beside = True, "-" if len(text.split()) < 55 and "$$" not in text else "subslide"
        left_out = text.startswith("#| hide") or (
            code and (inside or (first and not figure)) and "learn.quiz" not in text
        )
        kind = (
            "skip"
            if left_out
            else "slide"
            if new
            else beside
            if first and figure
            else "subslide"
            if code or len(text.split()) > 60
            else "fragment"
        )
        first = first and not figure
        cell["metadata"] = {"slideshow": {"slide_type": kind}}
        if figure:
            cell["metadata"]["tags"] = ["figure"]
        if new and text.startswith("# "):
            cell["source"] = "\n".join(line for line in text.splitlines() if not line.startswith("[![Open"))
    return nb


def slides(target: Path) -> list[Path]:
    """Write a deck for each lesson; returns the files."""
    import nbformat
    from nbconvert import SlidesExporter
    from traitlets.config import Config

    remove = {"enabled": True, "remove_input_tags": {"figure"}}
    exporter, made = (
        SlidesExporter(
            exclude_output_prompt=True, exclude_input_prompt=True, config=Config({"TagRemovePreprocessor": remove})
        ),
        list[Path](),
    )
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(COURSE.glob("lesson_*.ipynb")):
        html, _ = exporter.from_notebook_node(nbformat.from_dict(deck(path)))
        made.append(target / f"{path.stem}.slides.html")
        made[-1].write_text(html, encoding="utf-8")
    return made


def exam(target: Path, seed: int = 0) -> list[Path]:
    """Write a paper with a question about each lesson, and its key; another seed, another paper."""
    import random

    import yaml

    questions = yaml.safe_load((ROOT / ".ci" / "exam.yaml").read_text(encoding="utf-8"))
    drawn = [random.Random(f"{seed} {n}").choice(asked) for n, asked in questions.items()]
    target.mkdir(parents=True, exist_ok=True)
    made = [target / "exam.md", target / "key.md"]
    for path, part in zip(made, ("ask", "key"), strict=True):
        body = "\n\n".join(f"{i}. {q[part]}" for i, q in enumerate(drawn, 1))
        path.write_text(f"# Examination, paper {seed}{': key' if part == 'key' else ''}\n\n{body}\n", encoding="utf-8")
    return made


def main() -> int:
    verbs = {"students": students, "slides": slides}
    verb, place, seed = [*sys.argv[1:], "", "", ""][:3]
    if verb == "exam" and place:
        print(*exam(Path(place), int(seed or 0)))
    elif verb in verbs and place:
        made = verbs[verb](Path(place))
        print(f"{len(made)} files in {place}")
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
