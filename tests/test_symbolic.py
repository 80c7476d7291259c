"""Answers that are mathematics: the same in another dress is right, another one is wrong, and nothing takes for ever."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest

from rlhf_nb.core import ConfigError
from rlhf_nb.rewards.answers import ExactMatch, Number
from rlhf_nb.rewards.symbolic import SameMathematics, in_latex
from rlhf_nb.train.entries import make_verifier

HERE = importlib.util.find_spec("math_verify") is not None
needs = pytest.mark.skipif(not HERE, reason="math-verify is not installed: pip install math-verify")
SAME = [
    ("x^2+1", "1+x^2"), ("x^2+1", "x² + 1"), ("2\\sqrt{3}", "\\sqrt{12}"), ("2\\sqrt{3}", "2√3"), ("(1,2)", "(1, 2)"), ("\\frac{\\pi}{4}", "π/4"),
    ("\\{1,2\\}", "\\{2,1\\}"), ("[0,1)", "[0, 1)"), ("x^2-1", "(x-1)(x+1)"), ("\\frac12", "0.5"), ("70,000", "70000"), ("\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"),
    ("(0,1)\\cup(2,3)", "(2,3)\\cup(0,1)"), ("2+3i", "3i+2"), ("y=2x+1", "y = 1 + 2x"),
]  # fmt: skip
OTHER = [("x^2+1", "x^2-1"), ("2\\sqrt{3}", "3\\sqrt{2}"), ("(1,2)", "(2,1)"), ("[0,1)", "[0,1]"), ("\\{1,2\\}", "\\{1,3\\}"), ("\\frac{\\pi}{4}", "\\frac{\\pi}{3}"), ("5", "-5")]  # fmt: skip
# as NuminaMath has them: a worked solution that marks its answer, or the answer alone
NUMINA = ["Let $x=2$. Then $x^2+1$ is $5$, and so the sum is $\\boxed{\\frac{3}{4}}$.", "\\frac{3}{4}"]


@needs
@pytest.mark.parametrize(("right", "said"), SAME)
def test_the_same_is_right(right: str, said: str) -> None:
    for dress in ("So it is $\\boxed{{}}$.", "#### {}", "The answer is ${}$."):
        assert SameMathematics()(["?"], [dress.replace("{}", said, 1)], answer=[right]) == [1.0], dress


@needs
@pytest.mark.parametrize(("right", "said"), OTHER)
def test_another_one_is_wrong(right: str, said: str) -> None:
    assert SameMathematics()(["?"] * 2, [f"\\boxed{{{said}}}", f"So {right}, perhaps."], answer=[right] * 2) == [
        0.0,
        0.0,
    ]


@needs
def test_worked_solutions() -> None:
    reward = make_verifier("math", {"answer": "solution"})
    for gold in NUMINA:
        said = ["so \\boxed{0.75}", "so \\boxed{\\frac{6}{8}}", "so \\boxed{\\frac{4}{3}}", "I don't know."]
        assert reward(["?"] * 4, said, solution=[gold] * 4) == [1.0, 1.0, 0.0, 0.0]


@needs
def test_a_comparison_ends() -> None:
    """A term with ten billion digits: the child is ended, and the next answer is compared."""
    reward, begun = SameMathematics(seconds=1.0), time.monotonic()
    assert reward(["?"] * 2, ["\\boxed{10^{10^{10^{10}}}}", "\\boxed{1+x}"], answer=["x+1"] * 2) == [0.0, 1.0]
    assert time.monotonic() - begun < 120


def test_signs_are_written_in_one_way() -> None:
    assert (
        in_latex("2√3") == "2\\sqrt{3}" and in_latex("{1, 2}") == "\\{1, 2\\}" and in_latex("$x ≤ 2$.") == "x \\le  2"
    )


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "math_verify" else found(name, *a)
    )
    with pytest.raises(ConfigError, match=r"pip install math-verify .*Without it, verify: number"):
        make_verifier("math", {})


@pytest.mark.parametrize("heading", ["#### Step {}", "#### **Step {}**", "#### Part {}: count", "#### Case {}"])
def test_headings_are_no_answer(heading: str) -> None:
    """A solution in numbered parts without a final mark has no answer; with one, that is it."""
    text = "".join(f"{heading.replace('{}', str(i))}\nShe buys {n} more.\n" for i, n in ((1, 5), (2, 7)))
    rewards: Any = Number(), Number(strict=True), ExactMatch()
    for gold in ("2", "7", "5", "1"):
        assert [r(["?"], [text], answer=[gold])[0] for r in rewards] == [0.0, 0.0, 0.0]
    assert [r(["?"], [text + "#### 12"], answer=["12"])[0] for r in rewards] == [1.0, 1.0, 1.0]
    assert Number()(["?"], [text + "The answer is 12."], answer=["12"]) == [1.0]
