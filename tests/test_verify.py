"""Verifiers on many generated texts, on chat messages, on bad data, and inside Rewards."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch

from rlhf_nb.core import ConfigError, RewardError
from rlhf_nb.rewards.answers import (
    ExactMatch,
    MultipleChoice,
    Number,
    extract_choice,
    extract_number,
    final_answer,
    normalize_text,
    pass_at_k,
)
from rlhf_nb.rewards.base import Rewards
from rlhf_nb.rewards.code import PythonTests, extract_code, parse_tests
from rlhf_nb.rewards.formats import (
    JsonMatches,
    Length,
    Matches,
    Repetition,
    ThinkFormat,
    near_target,
    parse_json,
    repetition,
    soft_overlong,
)
from rlhf_nb.types import Completions, Rollout

MARKS = ["#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.", "**Final answer:** {}", "Answer: ${}$", "so {}", "\\boxed{{x = {}}}", "#### ${}"]  # fmt: skip


def writings(value: Fraction) -> list[str]:
    """A number in the ways people write it."""
    found = [f"{value.numerator}/{value.denominator}"]
    sign, size = ("-" if value < 0 else ""), abs(value)
    found += [
        f"{sign}\\frac{{{size.numerator}}}{{{size.denominator}}}",
        f"{sign}\\dfrac{{{size.numerator}}}{{{size.denominator}}}",
    ]
    if value.denominator == 1:
        found += [
            str(value.numerator),
            f"{value.numerator:,}",
            f"{value.numerator:,}.00",
            str(value.numerator).replace("-", "−"),
        ]
        found += [f"{value.numerator} apples", f"{value.numerator}%", f"{sign}${size.numerator:,}"]
    elif size > 1:
        whole, rest = divmod(size, 1)
        found.append(f"{sign}{whole} {rest.numerator}/{rest.denominator}")
    if 1000 % value.denominator == 0:
        found.append(f"{float(value):.3f}")
    return found


def test_numbers_survive_every_way_of_writing() -> None:
    rng = random.Random(0)
    values = [
        Fraction(rng.randint(-(10**k), 10**k), rng.choice([1, 1, 2, 4, 7, 8, 125]))
        for k in range(1, 12)
        for _ in range(12)
    ]
    count = 0
    for value in values:
        for written, mark in itertools.product(writings(value), MARKS):
            if mark in ("#### ${}", "Answer: ${}$") and "$" in written:
                continue
            text = f"Take 3 and 4, then 12 × 5 = 60.\n{mark.format(written)}"
            assert extract_number(text) == value, text
            assert extract_number(text, strict=True) == (None if mark == "so {}" else value), text
            count += 1
    assert count > 5000


EVIL = ["1", "1,", " ", "-", "/", "$", ".", "{", "}", "\\boxed{", "\\frac", "\\frac{", "<answer>", "</answer>", "#### ", "answer is ", "=", "x", "A", "(A)", "(", "[", '{"a":', "```\n", "<think>", "</think>", "\n", "é", "\ud800", "\0", "9e9", "10^", "*", "option "]  # fmt: skip


def readers() -> list[Callable[[str], Any]]:
    return [
        extract_number,
        extract_choice,
        final_answer,
        normalize_text,
        extract_code,
        ThinkFormat(graded=True).score,
        JsonMatches().score,
        Repetition().score,
        lambda text: ExactMatch().score(text, frozenset({"x"})),
    ]


def test_no_text_breaks_or_stalls_a_reader() -> None:
    """A policy may write anything; what reads it must neither raise nor take quadratic time."""
    rng = random.Random(1)
    texts = ["".join(rng.choice(EVIL) for _ in range(rng.randint(0, 40))) for _ in range(1500)]
    for read, text in itertools.product(readers(), texts):
        read(text)
    for read, piece in itertools.product(readers(), [*EVIL, "1 ", "1/", "- ", "\\boxed{1", "A. ", "[1,", "answer: 1 "]):
        start = time.process_time()
        read(piece * (40_000 // len(piece)))
        assert time.process_time() - start < 2, (read, piece)


def test_messages_and_strings_are_the_same() -> None:
    said = ["<think>2 + 2</think><answer>4</answer>", "5"]
    chats = [[{"role": "user", "content": "2 + 2 = 5, no?"}, {"role": "assistant", "content": s}] for s in said]
    parts = [[{"role": "assistant", "content": [{"type": "text", "text": s}]}] for s in said]
    for reward in (Number(), ExactMatch(), ThinkFormat(), Matches(r".*4.*")):
        want = reward(["?"] * 2, said, answer=["4", "4"])
        assert want == [1.0, 0.0]
        assert reward(["?"] * 2, chats, answer=["4", "4"]) == reward(["?"] * 2, parts, answer=["4", "4"]) == want
    for bad in (None, 4, [], [{"role": "assistant"}], [{"content": None}]):
        with pytest.raises(RewardError, match="expected a string, or messages"):
            Number()(["?"], [bad], answer=[4])


@pytest.mark.parametrize("make", [Number, ExactMatch, MultipleChoice, PythonTests])
def test_missing_column_names_the_nearest(make: Callable[..., Any]) -> None:
    column = "tests" if make is PythonTests else "answer"
    for given, hint in (({column + "s": ["1"]}, f"Did you mean '{column}s'"), ({"ground_truth": ["1"]}, "Did you mean 'ground_truth'"), ({"level": ["1"]}, "Columns are: level"), ({}, "Columns are: none")):  # fmt: skip
        with pytest.raises(RewardError) as e:
            make()(["?"], ["1"], **given)
        assert repr(column) in str(e.value) and hint in str(e.value)
    assert make("gold")(["?"], ["1"], gold=[None]) == [None]
    with pytest.raises(RewardError, match="2 entries"):
        make()(["?"], ["1"], **{column: ["1", "2"]})


@pytest.mark.parametrize(
    ("reward", "bad"),
    [(Number(), "many"), (ExactMatch(), {}), (MultipleChoice(), "F"), (PythonTests(), "assert (")],
    ids=lambda x: getattr(x, "name", ""),
)
def test_unreadable_answers_are_counted_and_warned_of_once(reward: Any, bad: Any) -> None:
    column = reward.answer_column
    with pytest.warns(UserWarning, match=r"2 of 3 right answers in column .* row 0"):
        assert reward(["?"] * 3, ["1"] * 3, **{column: [bad, None, bad]}) == [None] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reward(["?"], ["1"], **{column: [bad]}) == [None]
    assert reward.unreadable == 3


def rollout(texts: list[str], lengths: list[int], **columns: list[Any]) -> Rollout:
    n = len(texts)
    c = Completions.from_lists([[1]] * n, [[2] * k for k in lengths])
    return Rollout(**c.columns_dict(), uid=torch.arange(n), finished=torch.ones(n, dtype=torch.bool), prompts=["?"] * n, texts=texts, columns=columns).check()  # fmt: skip


def test_inside_rewards() -> None:
    """Mixed data: each verifier judges its own rows, parts are logged by name."""
    ro = rollout(
        ["#### 4", "(B)", "def f(): return 1", "anything"],
        [3, 9, 12, 4],
        answer=[4, None, None, None],
        choice=[None, "B", None, None],
        tests=[None, None, ["assert f() == 1", "assert f() == 2"], None],
    )
    length = Length(partial(soft_overlong, max_length=10, cache=4))
    rewards = Rewards([Number(), MultipleChoice("choice"), PythonTests(), length], weights=[1, 1, 1, 0.5])
    scores, parts = rewards(ro)
    assert rewards.names == ["number", "choice", "python_tests", "length"]
    assert scores.tolist() == [1.0, 1 - 0.375, 0.5 - 0.5, 0.0]
    assert rewards.stats["rewards/number/no_opinion"] == 3 and parts["number"][1].isnan()
    with pytest.raises(RewardError, match="'anwser'"):
        Rewards(Number())(rollout(["4"], [1], anwser=[4]))
    with pytest.raises(RewardError, match="no reward function has an opinion"):
        Rewards(Number())(rollout(["4"], [1], answer=[None]))


def test_called_as_trl_calls_it() -> None:
    """Keywords only, further columns, token ids, and a name."""
    keywords = dict(
        prompts=["?"],
        completions=["4"],
        completion_ids=[[1, 2]],
        answer=["4"],
        tests=["assert True"],
        trainer_state=None,
    )
    for reward in (Number(), ExactMatch(), MultipleChoice(), ThinkFormat(), Matches("4"), JsonMatches(), Repetition(), PythonTests(), Length(float)):  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (score,) = reward(**keywords)  # type: ignore[arg-type]
        assert score is None or isinstance(score, float)
        assert reward.__name__ == reward.name
    assert Length(float)(**keywords) == [2.0]


def test_json_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match="pip install jsonschema"):
        JsonMatches({"type": "object"})
    assert JsonMatches()(["?"], ["[1]"]) == [1.0]
    code = "import sys, rlhf_nb.rewards.formats; assert 'jsonschema' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_json_values() -> None:
    assert parse_json('so {"a": [1, {"b": null}]} and {"c": 1}') == {"a": [1, {"b": None}]}
    assert parse_json("3", whole=True) == 3 and parse_json("{bad} [1]") == [1]
    for bad in ("", "3", "{", '{"a": Infinity}', "{'a': 1}"):
        with pytest.raises(ValueError, match="no JSON"):
            parse_json(bad)
    nested = JsonMatches(
        {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "number", "maximum": 3}}}
    )
    assert nested(["?"] * 3, ["[1, 2]", "[1, 4]", "{}"]) == [1.0, 0.0, 0.0]


def test_code_blocks() -> None:
    assert extract_code("<think>\n```python\nx = 0\n```\n</think>\n```py\nx = 1\n```") == "x = 1\n"
    assert extract_code("```\na\n```\ntext\n```python\nb\n```\n```text\nc\n```") == "b\n"
    assert extract_code("```text\nc\n```") == "c\n" and extract_code("  ```python\n  x\n  ```") == "  x\n"
    assert extract_code("```python\ns = '```'\nx = 1\n```\n") == "s = '```'\nx = 1\n"
    assert parse_tests([["1", "2"], '{"input": "3", "output": "4"}']).pairs == (("1", "2"), ("3", "4"))


def test_shapes() -> None:
    for y, top, cache in itertools.product(range(0, 40), (10, 20), (1, 5, 10)):
        want = 0.0 if y <= top - cache else ((top - cache) - y) / cache if y <= top else -1.0
        assert soft_overlong(y, top, cache) == want
    assert [near_target(y, 4, 2) for y in range(2, 8)] == [0, 0.5, 1, 0.5, 0, 0]
    assert repetition("a b c d", 2) == 0 and repetition("a b a b a b", 2) == pytest.approx(0.6)


def test_pass_at_k_counts_subsets() -> None:
    for n in range(1, 8):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01)
