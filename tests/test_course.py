"""Lessons have one shape: what a reader meets, in which order, in how many words; terms are defined before they are used. Execution is test_notebooks' affair."""

from __future__ import annotations

import copy
import csv
import inspect
import json
import math
import os
import random
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from patience import run

from rlhf_nb import learn
from rlhf_nb.core import ConfigError, t_share
from rlhf_nb.data import toy
from rlhf_nb.learn import checks
from rlhf_nb.learn.checks import judge, run_again
from rlhf_nb.learn.world import LessonWorld, shipped_log

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted((ROOT / "nbs" / "course").glob("lesson_*.ipynb"))
LABS = sorted((ROOT / "nbs" / "course").glob("lab_*.ipynb"))
SECTIONS = [
    "A figure to touch",
    "By hand, on five words",
    "In 25 lines",
    "On Pip",
    "When it goes wrong",
    "Exercises",
    "Quiz",
    "Two papers",
]
# terms and the lesson that defines them, in bold, italics or a sentence with "is"; lesson 1 comes first
DEFINED = {
    1: [
        "policy",
        "reference",
        "reward model",
        "gold",
        "critic",
        "nat",
        "KL",
        "proxy",
        "log-prob",
        "courtesy",
        "SFT",
        "PPO",
        "token",
        "drift",
    ],
    2: ["chain rule", "entropy", "perplexity", "logits"],
    4: ["sigmoid", "calibration"],
    5: ["t-interval"],
    6: ["log-ratio", "temperature"],
    3: ["bootstrap"],
    7: ["baseline", "log-derivative trick", "advantage", "REINFORCE", "RLOO"],
    8: ["rollout", "λ-return", "tool", "whitened"],
    9: ["checkpoint", "budget"],
    10: ["implicit reward", "margin"],
    11: ["p-value", "Holm's correction"],
    12: ["verifier", "pass@1"],
}


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells that a reader sees."""
    return [
        c | {"source": "".join(c["source"])}
        for c in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if not "".join(c["source"]).startswith("#| hide")
    ]


def prose(path: Path) -> str:
    """The text of a lesson without formulas, tables, links' targets and headings."""
    text = "\n\n".join(c["source"] for c in cells(path) if c["cell_type"] == "markdown")
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.S)
    text = re.sub(r"^(\||#|\[!\[).*$", "", text, flags=re.M)
    return re.sub(r"\]\([^)]*\)", "]", text)


def sentences(path: Path) -> list[int]:
    """How many words each sentence has."""
    parts = re.split(r"(?<=[.!?:])[\s*]+(?=[A-ZÀ-Ž*`\"\d])|\n\n+|\n(?=- |\d\. )", prose(path))
    return [len(re.findall(r"[\w'’-]+", p)) for p in parts if len(re.findall(r"[\w'’-]+", p)) > 1]


def code(path: Path) -> list[str]:
    """Visible lines of code."""
    return [line for c in cells(path) if c["cell_type"] == "code" for line in c["source"].splitlines() if line.strip()]


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_has_the_shape(path: Path) -> None:
    text = "\n".join(c["source"] for c in cells(path) if c["cell_type"] == "markdown")
    assert [h for h in re.findall(r"^## (.*)$", text, re.M)] == SECTIONS
    n = int(path.stem[-2:])
    first = cells(path)[0]["source"]
    assert re.match(rf"# {n} · ", first) and "**" in first and "*You need" in first, (
        "title, question in bold, what you need"
    )
    answer = next(p for p in first.split("\n\n")[1:] if not p.startswith(("**", "[", "*")))
    assert len(answer.split()) <= 70, "the answer comes first, in about 60 words"
    assert any(line == f"world = learn.start({n})" for line in code(path)), "set-up is one line"
    assert f"learn.quiz({n})" in "\n".join(code(path)) and "**Next:**" in text
    assert len(re.findall(r"^learn\.check\(", "\n".join(code(path)), re.M)) == 3, "three exercises with a checker"
    assert re.search(r"^3\. \*\*Find the silent bug\.\*\*", text, re.M)
    papers = text.split("## Two papers")[1].split("**Next:**")[0]
    assert len(re.findall(r"^- ", papers, re.M)) == 2


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_is_short_and_plain(path: Path) -> None:
    words, lengths, lines = len(prose(path).split()), sentences(path), code(path)
    assert words <= 1200, f"{words} words"
    assert statistics.median(lengths) <= 15 and sorted(lengths)[int(0.95 * len(lengths))] <= 28, sorted(lengths)[-6:]
    assert len(lines) <= 120, f"{len(lines)} visible lines of code"
    assert not [line for line in lines if line.lstrip().startswith("class ") or line.startswith("#| export")]


@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_lesson_shows_what_it_says(path: Path) -> None:
    """Outputs are stored; a figure to touch is among them, small, and the same each time; code asserts."""
    html = ["".join(o.get("data", {}).get("text/html", "")) for c in cells(path) for o in c.get("outputs", [])]
    figures = [h for h in html if h.startswith("<figure")]
    assert figures and all(len(h) < 120_000 and "http" not in h.replace("http://www.w3.org", "") for h in figures)
    assert "assert " in "\n".join(code(path))
    assert not [
        o for c in cells(path) for o in c.get("outputs", []) if o["output_type"] == "error" or o.get("name") == "stderr"
    ]


def test_terms_are_defined_before_they_are_used() -> None:
    """A lesson that uses a term comes with or after the lesson that defines it, or links that lesson."""
    late = []
    for path in LESSONS:
        n, text = int(path.stem[-2:]), prose(path)
        for term, home in ((term, home) for home, terms in DEFINED.items() for term in terms):
            used = re.search(rf"\b{re.escape(term)}s?\b", text)
            if used and home > n:
                late.append(f"lesson {n} uses {term!r}, which lesson {home} defines")
            known = re.search(rf"\*{{1,2}}{re.escape(term)}s?\*{{1,2}}|{re.escape(term)}\W+(is|are)\b", text)
            if home == n and (known is None or used is None or used.start() < known.start() - 2):
                late.append(f"lesson {n} should define {term!r} where it uses it first")
    assert not late, "\n".join(late)


EVERYDAY = {"GPU", "NaN", "AI", "PyTorch", "Pip", "SmolLM2", "PAD"}  # known to a reader who knows PyTorch


def unexplained(pages: dict[str, str]) -> list[str]:
    """Words with two capitals, tables included, that aren't explained where they come first: "*X*", "X is", "is X, ...", "X (...", or a link to a lesson."""
    known, found = set(EVERYDAY), []
    for name, text in pages.items():
        plain = re.sub(r"^#? ?\[!\[.*$|\$[^$\n]*\$|`[^`]*`|\]\([^)]*\)|(?s:^(## )?Two papers.*)", " ", text, flags=re.M)
        for word in dict.fromkeys(re.findall(r"\b[A-Za-z]*[A-Z][A-Za-z]*[A-Z][A-Za-z0-9]*\b", plain)):
            told = rf"\*{{1,2}}{word}\*{{1,2}}|\b{word}\W+(is|are|means)\b|\bis {word}, |\*, {word}\.|\b{word} \(|\b{word}, which\b|^# .*{word}"
            if word not in known and not re.search(told, plain, re.M):
                found.append(f"{name}: {word}")
            known.add(word)
    return found


def test_abbreviations_are_explained_where_they_come_first() -> None:
    """No list of terms is needed for them, so a new one is seen, too."""
    texts = {p.stem: "\n\n".join(c["source"] for c in cells(p) if c["cell_type"] == "markdown") for p in LESSONS + LABS}
    assert not (found := unexplained(texts)), found
    seen = {"a": "We use RLOO.", "b": "| DPO with QLoRA | |", "c": "*KTO* learns from thumbs.", "d": "KTO again"}
    assert unexplained(seen) == ["a: RLOO", "b: DPO", "b: QLoRA"]


RUN = shipped_log()["held_out"]
HELD: dict[str, Callable[[], bool]] = {  # numbers of the prose that no cell of their lesson holds
    "0.14": lambda: round(sum(p.numel() for p in toy.build_model(0).parameters()) / 1e6, 2) == 0.14,
    "200": lambda: 150 < len(toy.build_tokenizer()) < 250,
    "2.5": lambda: toy.gold_reward([OWLS] * 2, [" You can find owls in the forest. Enjoy the park!", ""]) == [2.5, -0.5],
    "2.7": lambda: round(math.e, 1) == 2.7,
    "0.67": lambda: round(-sum(p * math.log(p) for p in (0.6, 0.4)), 2) == 0.67 and round(math.exp(0.67)) == 2,
    "0.88": lambda: [round(1 / (1 + math.exp(-x)), 2) for x in (2, -2)] == [0.88, 0.12],
    "3.182": lambda: abs(t_share(3.182, 3) - 0.95) < 1e-4,
    "2.201": lambda: abs(t_share(2.201, 11) - 0.95) < 1e-4,
    "95": lambda: abs(math.erf(1.96 / math.sqrt(2)) - 0.95) < 1e-3,
    "77": lambda: [round(100 * RUN[k] / RUN["asked"]) for k in ("old", "new")] == [3, 77],
    "135": lambda: "135M" in shipped_log.__doc__,
    "1024": lambda: "1,024 held-out prompts" in (ROOT / "docs" / "results.md").read_text(encoding="utf-8"),
}  # fmt: skip
OWLS = "Visitor: Where do owls live?\nPip:"


def test_numbers_of_the_prose_are_held() -> None:
    """Each decimal, percentage or number of three digits stands in the lesson's code, which asserts, or is held here; that it was printed once is not enough."""
    loose = []
    for path in LESSONS + LABS:
        ran = [c for c in cells(path) if c["cell_type"] == "code"]
        shown = " ".join(c["source"] for c in ran).replace("_", "")  # its asserts, and what it is computed from
        text = re.sub(r"`[^`]*`|\$[^$\n]*\$|arXiv [\d.]+|\(\d{4}\)|## Two papers.*", "", prose(path))
        for number in re.findall(r"(?<![\w.,])\d+\.\d+|(?<![\w.,])\d[\d,]{2,}\b|(?<![\w.,])\d+(?= %)", text):
            number = number.replace(",", "")
            share = f"|0\\.{number}" if len(number) == 2 else ""  # 80 % may be printed as 0.80, and 0.67 as 0.673
            found = re.search(
                rf"(?<![\d.])({re.escape(number)}{share})" + ("" if "." in number or share else r"(?!\d)"), shown
            )
            if not found and number not in HELD:
                loose.append(f"{path.stem}: {number}")
    assert not loose, loose
    assert not (wrong := [number for number, holds in HELD.items() if not holds()]), wrong


def test_every_lesson_has_solutions_and_a_quiz() -> None:
    known = yaml.safe_load((ROOT / "rlhf_nb" / "learn" / "lessons.yaml").read_text(encoding="utf-8"))
    for path in LESSONS + LABS:
        n: int | str = int(path.stem[-2:]) if path in LESSONS else path.stem[-1].upper()
        asked = re.findall(r'learn\.check\("(\w+)"', "\n".join(code(path)))
        answers = ROOT / "nbs" / "solutions" / f"solutions_{path.stem.removeprefix('lesson_')}.ipynb"
        solved = re.findall(r'assert learn\.check\("(\w+)"', "\n".join(code(answers)))
        assert asked == solved and n in known and f"{n} · {known[n]['title']}" in cells(path)[0]["source"]
        assert len({q["right"] for q in known[n]["quiz"]}) >= 3, "a letter that is always right teaches nothing"
    right = [q["right"] for lesson in known.values() for q in lesson["quiz"]]
    assert max(right.count(letter) for letter in "abcd") < 0.35 * len(right)
    asked = [q for lesson in known.values() for q in lesson["quiz"]]
    longest = [max(q["options"], key=lambda o: len(str(o))) == q["options"]["abcd".index(q["right"])] for q in asked]
    assert statistics.fmean(longest) < 0.4, "the longest answer is the right one too often"


@pytest.mark.parametrize("path", LABS, ids=lambda p: p.stem)
def test_a_lab_is_plain_too(path: Path) -> None:
    lengths = sentences(path)
    assert statistics.median(lengths) <= 15 and sorted(lengths)[int(0.95 * len(lengths))] <= 28, sorted(lengths)[-6:]
    assert len(prose(path).split()) <= 1500 and "assert " in "\n".join(code(path))


def test_what_is_shipped_is_small() -> None:
    models = list((ROOT / "rlhf_nb" / "learn").rglob("*.safetensors"))
    assert len(models) == 7 and sum(p.stat().st_size for p in models) < 6e6


def test_checkers_refuse_what_isn_t_an_answer_and_take_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants, objects that equal everything, and functions that ignore an argument fail; numpy's numbers and arrays are numbers."""

    class Yes:
        def __eq__(self, other: object) -> bool:
            return True

    def in_numpy(x: Any) -> Any:
        if isinstance(x, list) and x and isinstance(x[0], (float, bool)):
            return np.array(x)
        return np.float32(x) if isinstance(x, float) else x.numpy() if isinstance(x, torch.Tensor) else x

    def says(value: Any) -> Callable[..., Any]:
        return lambda *_: value

    for name, e in learn.EXERCISES.items():
        first, parameters = next(iter(e.cases(random.Random(0)))), len(inspect.signature(e.truth).parameters)
        wrong = {
            "yes": says(Yes()),
            "nan": says(math.nan),
            "none": says(None),
            "a number": says(0.0),
            "true": says(True),
        }
        if parameters:
            wrong["the first answer"] = says(e.truth(*copy.deepcopy(first)))
            for i in range(parameters):
                wrong[f"argument {i} as at first"] = lambda *args, e=e, first=first, i=i: e.truth(
                    *args[:i], copy.deepcopy(first[i]), *args[i + 1 :]
                )
            for seed in range(3):
                verdict = judge(e, lambda *args, e=e: in_numpy(e.truth(*args)), seed)
                assert verdict, f"{name}: in numpy: {verdict}"
        for what, answer in wrong.items():
            taken = sum(bool(judge(e, answer, seed)) for seed in range(8))
            assert taken <= (what == "the first answer" and name == "lazy_rater"), f"{name} takes {what}"
    monkeypatch.setenv("RLHF_NB_LEARN", str(tmp_path / "a file" / "learn.json"))
    (tmp_path / "a file").write_text("where a folder should be")
    with pytest.warns(UserWarning, match="progress isn't kept"):
        assert learn.check("leash", lambda score, logp, ref_logp, kl_coef: score - kl_coef * (logp - ref_logp))


def test_what_means_the_same_is_right() -> None:
    """Words in capitals, a mask of 0 and 1, a tensor for a list; and an interval that is a little too short is seen with every seed."""
    capitals = {what: f" {who.title()}" for what, who in learn.EXERCISES["parts"].truth().items()}
    assert judge(learn.EXERCISES["parts"], capitals, 0) and not judge(learn.EXERCISES["parts"], capitals | {list(capitals)[0]: "critic"}, 0)  # fmt: skip
    mask = learn.EXERCISES["learns_the_end"]
    assert judge(mask, lambda *a: [int(x) for x in mask.truth(*a)], 0) and judge(mask, lambda *a: torch.tensor(mask.truth(*a)), 0)  # fmt: skip
    assert not judge(mask, lambda *a: [2 * int(x) for x in mask.truth(*a)], 0)
    said = judge(learn.EXERCISES["chain_rule"], lambda *a: torch.tensor(-2.1269280910491943), 0).says
    assert "yours gave -2.127." in said


FAKES = {  # what a submission may try to be called right, or to leave behind
    "replies": "import json, os, sys\njson.dump = lambda x, out: out.write('right')\n[setattr(m, n, lambda *a, **k: True) for m in "
    "[*sys.modules.values()] for n in ('same', '_compared', 'judge') if hasattr(m, n)]\ndef f(s): return 0",
    "prints": "import os\nfor fd in range(30):\n    try: os.write(fd, b'right')\n    except OSError: pass\nos._exit(0)",
    "truth": "import sys\nof = sys._getframe(1).f_globals['EXERCISES']\ndef f(s): return of['rloo'].truth(s)",
    "import": "from rlhf_nb.learn.checks import EXERCISES\ndef f(s): return EXERCISES['rloo'].truth(s)",
    "writes": "open({path!r}, 'w').write('x')\ndef f(s): return [x - (sum(s) - x) / (len(s) - 1) for x in s]",
    "forks": "import os\nos.fork()\ndef f(s): return [x - (sum(s) - x) / (len(s) - 1) for x in s]",
    "parent": "import os\nopen(f'/proc/{{os.getppid()}}/mem', 'rb')\ndef f(s): return [x - (sum(s) - x) / (len(s) - 1) for x in s]",
    "again": "import sys\nfor m in [m for m in sys.modules if m.startswith('rlhf_nb')]: del sys.modules[m]\n"
    "from rlhf_nb.learn.exercises import EXERCISES\ndef f(s): return EXERCISES['rloo'].truth(s)",
    "package": "import rlhf_nb\ndef f(s): return rlhf_nb.learn.exercises.EXERCISES['rloo'].truth(s)",
    "source": "import os, sys\nfound = [p + '/rlhf_nb/learn/exercises.py' for p in [*sys.path, {clone!r}]]\nspace = {{}}\n"
    "[exec(open(p).read(), space) for p in found if os.path.exists(p)]\ndef f(s): return space['EXERCISES']['rloo'].truth(s)",
    "solutions": "open({clone!r} + '/nbs/order.yml').read()\ndef f(s): return [x - (sum(s) - x) / (len(s) - 1) for x in s]",
    "floods": "def f(s): return [0.0] * 10**6",
}


@pytest.mark.parametrize(
    "name", ["replies", *(pytest.param(n, marks=pytest.mark.slow) for n in FAKES if n != "replies")]
)
def test_a_submission_cannot_fake_its_verdict(name: str, tmp_path: Path) -> None:
    """Its process gives values; truth and verdict are elsewhere, and the fences hold."""
    target = tmp_path / "owned"
    code = FAKES[name].replace("{path!r}", repr(str(target))).replace("{clone!r}", repr(str(ROOT)))
    assert run_again("rloo", code.replace("{{", "{").replace("}}", "}"), 3) in ("wrong", "crashed")
    assert not target.exists()


@pytest.mark.slow
def test_submissions_may_use_torch_and_numpy() -> None:
    torch_way = "def f(s):\n    x = torch.tensor(s, requires_grad=True)\n    ((x.sum() ** 2 - x.square().sum()) / 2).backward()\n"
    torch_way += "    return x.detach() - x.grad / (len(s) - 1)"
    assert run_again("rloo", torch_way, 3) == "right"
    assert (
        run_again("rloo", "def f(s):\n    s = np.array(s)\n    return s - (s.sum() - s) / (len(s) - 1)", 3) == "right"
    )
    assert run_again("rloo", "def f(s): return [x - sum(s) / len(s) for x in s]", 3) == "nearly"


POSES = {  # what asks a reader for an answer that something marks
    "markdown": r"^#+ .*[Ee]xercise|\*\*(\d+\. )?Exercise|^Exercise\b|Find the silent bug|Complete `|The checker\b|^## To try(?!\n\n\*Suggestions, not)",
    "code": r"(?i)your (turn|code|line)|replace this|[\"']solved|not yet[\"']|# the exercise",
}


def posed(path: Path) -> list[str]:
    """What in a notebook poses as an exercise."""
    asks = ((c, re.search(POSES.get(c["cell_type"], r"(?!)"), c["source"], re.M)) for c in cells(path))
    return [f"{path.stem}: {c['source'][found.start() :].splitlines()[0]}" for c, found in asks if found]


def test_what_poses_as_an_exercise_has_a_checker_and_a_solution() -> None:
    """Lessons' and labs' exercises have both (above); what other notebooks suggest says that it is none, and shows its code."""
    notebooks = sorted((ROOT / "nbs").rglob("*.ipynb"))
    others = [p for p in notebooks if p.parent.name not in ("course", "solutions", "learn")]
    assert len(others) > 200 and not (found := [f for p in others for f in posed(p)]), "\n".join(found)
    assert all(posed(p) for p in LESSONS + LABS), "the rule sees those that are some"
    suggested = [p for p in others if any("*Suggestions, not exercises: nothing here is marked." in c["source"] for c in cells(p))]  # fmt: skip
    assert len(suggested) > 100


def test_one_wrong_file_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What can't be read and what is no exercise are rows of the table; the others are judged."""
    handed = {"a": "not json", "b": "[1]", "c": '{"student": "c"}', "d": '{"student": "d", "answers": {"nope": "1"}}', "e": '{"student": "e", "answers": {}}'}  # fmt: skip
    for name, text in handed.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "f.json").write_bytes(b"\xff\xfe\x00")
    rows = learn.grade(tmp_path, seed=0).read_text().splitlines()[1:]
    assert "1 of 6: a.json" in capsys.readouterr().err  # a class takes minutes
    assert len(rows) == 5 and sum("no submission" in r for r in rows) == 4 and "d,nope,no such exercise" in rows


def test_what_was_graded_stays_when_grading_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the second student: the first one's rows are in the table."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"student": name, "answers": {"rloo": name}}))

    def run(name: str, code: str, seed: int) -> str:
        if code == "b":
            raise KeyboardInterrupt
        return "right"

    monkeypatch.setattr(checks, "run_again", run)
    with pytest.raises(KeyboardInterrupt):
        learn.grade(tmp_path, seed=0)
    assert (tmp_path / "grades.csv").read_text().splitlines() == ["student,exercise,verdict", "a,rloo,right"]


SOLVED = {"kind": "right", "code": "def f(s): return 1", "when": "2026-11-26"}
DAMAGED = [
    "",
    "[]",
    "3",
    "null",
    '"ab"',
    "{",
    '[["a", 1]]',
    '{"rloo": 3}',
    '{"rloo": null}',
    '{"rloo": {"kind": 5, "code": "x"}}',
    '{"rloo": {"kind": "right"}}',
]


@pytest.mark.parametrize("text", [*DAMAGED, "\xff", "a pipe", "a folder"])
def test_progress_that_is_damaged(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stops; whole entries count, and the file is moved aside before another takes its place."""
    kept = tmp_path / "learn.json"
    monkeypatch.setenv("RLHF_NB_LEARN", str(kept))
    match text:
        case "a pipe":
            os.mkfifo(kept)
        case "a folder":
            kept.mkdir()
        case _:
            kept.write_bytes(text.encode("latin-1"))
    assert "0 of 3" in learn.course_command([])
    learn.submit("ada", tmp_path / "ada.json")
    assert json.loads((tmp_path / "ada.json").read_text())["answers"] == {}
    assert not learn.check("rloo", lambda s: 1.0) and list(json.loads(kept.read_text())) == ["rloo"]
    assert (tmp_path / "learn.damaged").exists()
    kept.write_text(json.dumps({"rloo": SOLVED, "wins": 3}))
    assert "rloo right" in learn.course_command([])


@pytest.mark.parametrize(
    "student", ["", ".", "..", "../ada", "/tmp/ada", "a/b", "a\\b", "-rf", "a\nb", "a\0b", "x" * 300]
)
def test_a_student_is_no_path(student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="submit: a file is named after"):
        learn.submit(student)
    assert not list(tmp_path.iterdir()) and learn.submit("Zoë O'Neil-2").name == "Zoë O'Neil-2.json"


@pytest.mark.parametrize(
    "words",
    ["quiz ²", "quiz -1", "quiz 99", "quiz 1 a", "quiz 1 z z z z z", "quiz 1 ab a a a a", "submit", "grade", "mark 3"],
)
def test_words_that_are_none(words: str) -> None:
    with pytest.raises(ConfigError):
        learn.course_command(words.split())


@pytest.mark.parametrize("student", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\t=1", "\x1b[31mred"])
def test_a_table_holds_no_formula_and_no_command(student: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"student": student, "answers": {"nope": "1", "=1": "1"}}))
    for row in list(csv.reader(learn.grade(tmp_path, seed=0).read_text().splitlines()))[1:]:
        assert not any(cell[:1] in "=+-@\t" or "\x1b" in cell for cell in row)


ENDS = {  # how an answer may end, and what its row says
    "right": "x = sum(i * i for i in range(2 * 10**7))\ndef f(s): return [x - (sum(s) - x) / (len(s) - 1) for x in s]",  # slow, and ends
    "wrong": "def f(s): return [x - sum(s) for x in s]",
    "too long": "def f(s):\n    while True: pass",
    "crashed": "import ctypes\ndef f(s): return ctypes.string_at(0)",
}


@pytest.mark.slow
@pytest.mark.parametrize("verdict", ENDS)
def test_a_limit_of_computing_names_each_end(verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is taken away: a slow answer, an endless one and a broken one are told apart by what they compute and how they end."""
    real = checks.subprocess.run
    monkeypatch.setattr(checks.subprocess, "run", lambda *a, timeout, **k: real(*a, timeout=600, **k))
    assert run_again("rloo", ENDS[verdict], 3, seconds=15) == verdict


@pytest.mark.slow
def test_a_folder_is_graded_from_the_command_line(tmp_path: Path) -> None:
    """Three students, three verdicts, by the command that a teacher types."""
    for verdict in ("right", "wrong", "too long"):
        handed = {"student": verdict, "answers": {"rloo": ENDS[verdict]}}
        (tmp_path / f"{verdict}.json").write_text(json.dumps(handed))
    done = run([sys.executable, "-m", "rlhf_nb", "learn", "grade", str(tmp_path)])
    assert done.returncode == 0, done.stdout
    rows = list(csv.reader((tmp_path / "grades.csv").read_text(encoding="utf-8").splitlines()))[1:]
    assert sorted(rows) == [[v, "rloo", v] for v in ("right", "too long", "wrong")]


START = """
import time
from rlhf_nb import learn
imported = time.process_time()
for n in [*range(1, 13), "A", "B"]:
    begun = time.process_time()
    learn.start(n)
    print(n, imported + time.process_time() - begun)
"""


def test_a_lesson_starts_within_six_cpu_seconds(tmp_path: Path) -> None:
    """Starting Python and importing included; measured by one process for all."""
    settings = os.environ | {"RLHF_NB_LEARN": str(tmp_path / "learn.json"), "OMP_NUM_THREADS": "1"}
    done = run([sys.executable, "-c", START], cpu=60, env=settings)
    took = [float(line.split()[-1]) for line in done.stdout.splitlines() if re.fullmatch(r"(\d+|A|B) [\d.]+", line)]
    assert len(took) == 14 and max(took) <= 6, done.stdout


@pytest.mark.slow
def test_a_submission_has_a_limit_of_memory() -> None:
    assert run_again("rloo", "x = [bytearray(10**9) for _ in range(20)]\ndef f(s): return 1", 3) == "crashed"


@pytest.mark.parametrize("role", ["reward", "ppo", "base"])
def test_a_model_of_ones_own_has_no_other_role(role: str, tmp_path: Path) -> None:
    """The toy world's models have other tokens: they would score rubbish without a word."""
    toy.build_model(0, "tiny").save_pretrained(tmp_path)
    toy.build_tokenizer().save_pretrained(tmp_path)
    world = LessonWorld(str(tmp_path))
    assert world.answers("sft", ["Where do owls live?"], words=2)[1]
    with pytest.raises(ConfigError, match="there is `sft` alone"):
        world.model(role)


@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, ids=lambda p: p.stem)
def test_a_stored_figure_is_what_its_code_draws(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of each lesson, which no training comes before: a change of charts shows on stored pages, too. Numbers and texts may differ by CPU."""
    monkeypatch.setenv("RLHF_NB_LEARN", str(tmp_path / "learn.json"))

    def markup(html: str) -> str:
        return re.sub(
            r"[-+−]?\d+\.?\d*", "0", re.sub(r">[^<]*<|data-labels=\"[^\"]*\"|aria-valuetext=\"[^\"]*\"", "><", html)
        )

    space: dict[str, Any] = {}
    for cell in (c for c in cells(path) if c["cell_type"] == "code"):
        html = ["".join(o.get("data", {}).get("text/html", "")) for o in cell["outputs"]]
        stored = next((h for h in html if h.startswith("<figure")), "")
        lines = cell["source"].rstrip().splitlines()
        last = max((i for i, line in enumerate(lines) if line.startswith("learn.Figure")), default=len(lines))
        exec("\n".join(lines[:last]), space)
        if stored:
            drawn = eval("\n".join(lines[last:]), space)._repr_html_()
            assert markup(drawn) == markup(stored), "execute the lesson again"
            return
    raise AssertionError("no figure")


@pytest.mark.parametrize("room", ["serve", "export", "feedback", "cli"])
def test_plumbing_says_what_it_is_for_and_where_its_tests_are(room: str) -> None:
    """In its first cell: a promise in bold, and files of tests that exist."""
    for path in sorted((ROOT / "nbs" / room).glob("*.ipynb")):
        head = next(c["source"] for c in cells(path) if c["source"].startswith("# "))
        named = re.findall(r"`(tests/test_\w+\.py)`", head.partition("*Tests beyond this notebook:")[2])
        assert re.search(r"^\*\*.*\*\*$", head, re.M) and named and all((ROOT / n).exists() for n in named), path.stem


@pytest.mark.parametrize("room", ["losses", "rollout", "scoring", "decode", "evaluate"])
def test_each_chapter_shows_its_point(room: str) -> None:
    """A picture, or a table that was executed: printed lines that belong together."""
    for path in sorted((ROOT / "nbs" / room).glob("*.ipynb")):
        outputs = [o for c in cells(path) for o in c.get("outputs", [])]
        rich = [o for o in outputs if {"image/png", "image/svg+xml", "text/html"} & {*o.get("data", {})}]
        tables = [o for o in outputs if "".join(o.get("text", "")).rstrip().count("\n") >= 2]
        assert rich or tables, f"{path.stem}: no figure, and no table of three lines"
