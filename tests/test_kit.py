"""What a teacher takes from a clone (`.ci/kit.py`): lessons without answers, and decks of a length that an hour bears."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
_SPEC = importlib.util.spec_from_file_location("kit", ROOT / ".ci" / "kit.py")
assert _SPEC is not None and _SPEC.loader is not None
kit: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kit)


def test_students_get_lessons_and_labs_without_answers(tmp_path: Path) -> None:
    made = kit.students(tmp_path)
    assert [p.name for p in made] == sorted(p.name for p in kit.COURSE.glob("*.ipynb")) and len(made) == 14
    for path in made:
        nb = json.loads(path.read_text(encoding="utf-8"))
        outputs = [o for c in nb["cells"] for o in c.get("outputs", [])]
        assert outputs and all(map(kit.is_figure, outputs)) or path.name == "lab_a.ipynb"
        text = "".join(c["source"] for c in nb["cells"])
        assert "](../" not in text and "learn.check(" in text and "assert learn.check(" not in text


@pytest.mark.parametrize("path", sorted(kit.COURSE.glob("lesson_*.ipynb")), ids=lambda p: p.stem)
def test_a_deck_has_about_ten_slides(path: Path) -> None:
    kinds = [c["metadata"]["slideshow"]["slide_type"] for c in kit.deck(path)["cells"]]
    assert 8 <= kinds.count("slide") <= 11 and kinds[0] == "slide" and kinds[1] == "skip"
    figures = [c for c in kit.deck(path)["cells"] if c["metadata"].get("tags") == ["figure"]]
    assert figures and all(c["metadata"]["slideshow"]["slide_type"] != "skip" for c in figures)


@pytest.mark.slow
def test_decks_are_made(tmp_path: Path) -> None:
    made = kit.slides(tmp_path)
    assert len(made) == 12
    for text in (p.read_text(encoding="utf-8") for p in made):
        assert "<section>" in text and "<figure" in text and "['<figure" not in text and "Out[&nbsp;" not in text


def test_a_paper_asks_about_each_lesson_and_has_a_key(tmp_path: Path) -> None:
    """Sixty questions, five a lesson; none is on the site, and none is a question of a quiz."""
    questions = yaml.safe_load((ROOT / ".ci" / "exam.yaml").read_text(encoding="utf-8"))
    assert list(questions) == [*range(1, 13)] and all(len(asked) == 5 for asked in questions.values())
    every = [q for asked in questions.values() for q in asked]
    quizzes = (ROOT / "rlhf_nb" / "learn" / "lessons.yaml").read_text(encoding="utf-8")
    assert len({q["ask"] for q in every}) == 60 and all(len(q["key"]) > 20 and q["ask"] not in quizzes for q in every)
    paper, key = kit.exam(tmp_path, 3)
    assert [p.read_text(encoding="utf-8").count("\n\n") for p in (paper, key)] == [12, 12]
    other, _ = kit.exam(tmp_path / "other", 4)
    assert paper.read_text(encoding="utf-8") != other.read_text(encoding="utf-8")
