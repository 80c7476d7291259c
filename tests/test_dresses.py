"""Answers in their usual dress: a right one is never punished, a wrong one never paid."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest

from rlhf_nb.rewards.answers import ExactMatch, MultipleChoice, Number, asks_for_percent, extract_number, final_answer

# Each dress holds an answer at {}; it is worn by 12 where 12 is right, and by others where they are wrong.
DRESSES = [
    "#### {}", "####{}", "####\n{}", "#### {}.", "#### ${}", "#### **{}**", "#### {} dollars", "#### The answer is {}",
    "{}", "**{}**", "`{}`", "${}$", "It is {}.", "so 5 + 7 = {}", "5+7={}, and that answer is correct.",
    "5 + 7 = {}. This answer is right.", "Answer: {}", "Answer:\n{}", "Answer:\n\n{}\n", "answer = {}", "ANSWER: {}",
    "Ans: {}", "**Answer:** {}", "**Answer: {}**", "**Answer**: {}", "**Answer**\n\n{}", "## Answer\n{}", "#### Answer\n{}",
    "### Final Answer\n\n**{}**", "**Final Answer:**\n\n{}", "**Final Answer**\n\n{} apples", "Final Answer: {}",
    "Final Answer: The final answer is ${}$. I hope it is correct.", "The final answer is:\n\n$${}$$",
    "The final answer is:\n$$\n{}\n$$", "The answer is:\n\\[{}\\]", "The answer is:\n\\[\n{}\n\\]", "The answer is \\({}\\).",
    "The answer is \\boxed{{{}}}.", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "$$\\boxed{{x = {}}}$$", "\\boxed{{\\text{{{}}}}}",
    "\\boxed{{{}\\text{{ cm}}}}", "\\fbox{{{}}}", "\\boxed{{5 + 7 = {}}}", "\\boxed{{{} = 5 + 7}}", "<answer>{}</answer>",
    "<answer>\n{}\n</answer>", "<answer>It is {}.</answer>", "<think>5? 7? 99</think>{}", "<think>The answer is 5.</think>\nThe answer is {}.",
    "The answer is {}.", "The answer is not 5 but {}.", "The answer is not 5, but {}.", "The answer is not 5; it is {}.",
    "It isn't 5. The answer is {}.", "The answer is {}, not 5.", "First I thought the answer is 5. No: the answer is {}.",
    "The answer isn't 5, it's {}", "The answer is {} rather than 5.", "{} is the answer.", "So {} is the answer to question 3.",
    "The answer (in dollars) is {}.", "The answer to this question is {}.", "My answer is: {}", "The correct answer is {}.",
    "The answer is about {}.", "The answer is approximately {} km.", "The answer is therefore {}.", "The answer is x = {}.",
    "The answer is ${}.", "The answer is {} dollars.", "The answer is €{}", "The answer is USD {}", "The answer is {}€",
    "The answer is {}!", "The answer is: **{}**", "The answer is **{} apples** in 3 bags.", "The answer is {}, since x = 5 and y = 7.",
    "The answer is 5 + 7 = {}.", "The answer is {} = 5 + 7.", "The answer is {} apples for 2 people.",
    "The answer is that in 3 days she earns {} dollars.", "The answer is: she earns ${} in 3 days.", "The area is {} m^2",
    "The area is {} cm²", "\\boxed{{{} \\text{{ m}}^2}}", "The angle is \\boxed{{{}^\\circ}}", '{{"answer": {}}}',
    "Answer: She sells 10 in May and then 2. So 10 + 2 = {}.", "**Answer**\nShe sells 10 in May. In June she sells 2. So {} in all.",
    "She has 5, buys 7 and now has {} apples.", "Therefore, {}", "= {}", "It is {}, not 5.", "Step 1: 5.\nStep 2: 7.\n\nTotal: {}",
    "#### Step 1\n5 apples\n#### Step 2\n7 apples\n#### {}", "\\[ 5 + 7 = {} \\]", "$5 + 7 = {}$ apples on the 2nd day? No: {}",
]  # fmt: skip
# (how 70000, -3, 3/4, ... may be written) ⇒ what it is
WRITTEN = [
    ("70,000", "70000"), ("70 000", "70000"), ("70\u202f000", "70000"), ("70\u2009000", "70000"), ("70\u00a0000", "70000"),
    ("70_000", "70000"), ("70'000", "70000"), ("70{,}000", "70000"), ("70\\,000", "70000"), ("70,000.00", "70000"),
    ("1 234 567", "1234567"), ("1,234,567.5", "1234567.5"), ("12,34,567", "1234567"), ("7 × 10^4", "70000"), ("7 × 10⁴", "70000"),
    ("7 \\times 10^{4}", "70000"), ("7e4", "70000"), ("10^4", "10000"), ("70 thousand", "70000"), ("1.5 million", "1500000"),
    ("-3", "-3"), ("−3", "-3"), ("negative 3", "-3"), ("minus 3", "-3"), ("-$3", "-3"), ("$-3", "-3"), ("+3", "3"),
    ("3/4", "3/4"), ("\\frac{3}{4}", "3/4"), ("\\dfrac{3}{4}", "3/4"), ("-\\frac34", "-3/4"), ("¾", "3/4"), ("2¾", "11/4"),
    ("2 3/4", "11/4"), ("2\\frac{3}{4}", "11/4"), ("0.75", "3/4"), (".75", "3/4"), ("3⁄4", "3/4"), ("1.20", "1.2"), ("$12.50", "12.5"),
    ("1.2e-3", "0.0012"), ("5^2", "25"),
]  # fmt: skip
# Texts that give no single number: they earn nothing, whatever is right.
NO_ANSWER = [
    "The answer is 5 or 12.", "#### 5 or 12", "\\boxed{5 \\text{ or } 12}", "\\boxed{5, 12}", "\\boxed{5,12}", "\\boxed{5; 12}",
    "\\boxed{5 \\text{ and } 12}", "#### 5-12", "#### 5 to 12", "\\boxed{5 + 12}", "\\boxed{5 \\times 12}", "\\boxed{5\\sqrt{12}}",
    "\\boxed{\\sqrt{12}}", "\\boxed{12\\pi}", "\\boxed{\\frac{5}{\\sqrt{12}}}", "\\boxed{\\pm 12}", "#### 12:30", "#### 12.5.2024",
    "\\boxed{12x}", "The answer is not 12.", "\\boxed{}", "\\boxed{\\text{twelve}}", "no idea", "It costs 5,12 euros",
    "So it is 5+12", "5/12/2024", "The answer is 5 apples or 12 apples.", "\\boxed{\\pi/12}",
]  # fmt: skip


def score(text: str, gold: object, prompt: str = "How many?", **kwargs: object) -> float | None:
    """The reward of one text."""
    return Number(**kwargs)([prompt], [text], answer=[gold])[0]  # type: ignore[arg-type]


def test_there_are_enough() -> None:
    assert len(DRESSES) >= 60 and len(set(DRESSES)) == len(DRESSES)


@pytest.mark.parametrize("dress", DRESSES)
def test_right_is_paid_and_wrong_is_not(dress: str) -> None:
    for gold in (12, "12", "5+7 = <<5+7=12>>12\n#### 12"):
        assert score(dress.replace("{}", "12", 9).replace("{{", "{").replace("}}", "}"), gold) == 1.0
        for wrong in ("13", "1", "2", "120", "5", "7", "-12", "1.2"):
            said = dress.replace("{}", wrong, 9).replace("{{", "{").replace("}}", "}")
            if f"{wrong} = 5 + 7" in said or f"5 + 7 = {wrong}" in said:
                continue  # a false equation
            assert score(said, gold) == 0.0, said


@pytest.mark.parametrize(("written", "value"), WRITTEN)
def test_however_it_is_written(written: str, value: str) -> None:
    for dress in ("#### {}", "The answer is {}.", "\\boxed{{}}", "<answer>{}</answer>", "Answer:\n{}", "**Final Answer:**\n\n{} apples", "The final answer is:\n\n$${}$$"):  # fmt: skip
        text = dress.replace("{}", written)
        assert score(text, value) == 1.0, text
        for wrong in ("70", "7", "0", "1", "2", "4", "10", "-70000", "1234", "567", "1.5", "34", "12", "23/4"):
            assert score(text, wrong) == 0.0, (text, wrong)


@pytest.mark.parametrize("text", NO_ANSWER)
def test_what_is_no_single_number_earns_nothing(text: str) -> None:
    for gold in (5, 12, "17", "60", "-7", "5.12", "5/12", "2024", "30"):
        assert score(text, gold) == 0.0, gold


def test_per_cent() -> None:
    """18% is 18 only where a percentage is asked for, or the right answer has the sign itself."""
    how_many, what = "If 30% of the 60 students left, how many left?", "What percentage of the students left?"
    for text in ("18%", "#### 18%", "\\boxed{18\\%}", "The answer is 18 percent.", "18 %", "It is 18%."):
        assert score(text, 18, how_many) == 0.0 and score(text, "#### 18", how_many) == 0.0, text
        assert score(text, 18, what) == score(text, "18%", how_many) == score(text, "#### 18%", what) == 1.0, text
        assert score(text, 17, what) == score(text, "17%", what) == 0.0
        assert score(text, "0.18", how_many, percent="hundredth") == 1.0 == score(text, "18%", percent="hundredth")
        assert score(text, 18, what, percent="hundredth") == 0.0
    assert score("18", "18%") == 1.0 and score("0.18", "18%") == 0.0
    for prompt in ("What percent is it?", "What is the percentage increase?", "Find it as a percentage.", [{"role": "user", "content": "What % of it?"}]):  # fmt: skip
        assert asks_for_percent(prompt)
    for prompt in (
        "What is 30% of 60?",
        "What is 30 percent of 60?",
        "The percentage is 5. How many are left?",
        None,
        3,
    ):
        assert not asks_for_percent(prompt)


def test_strict_counts_marks_only() -> None:
    assert score("It is 12.", 12, strict=True) == 0.0 == score("5+7=12, and that answer is correct.", 12, strict=True)
    assert score("**Final Answer:**\n\n12", 12, strict=True) == 1.0 == score("The final answer is:\n\n$$12$$", 12, strict=True)  # fmt: skip


def test_unfinished_texts() -> None:
    assert score("5 + 7 = 12. The answer is", 12) == 1.0 and score("The answer is", 12) == 0.0
    assert score("#### ", 12) == 0.0 and score("<think>12", 12, strict=True) == 0.0


@pytest.mark.parametrize("dress", ["{}", "{}.", "**{}**", "The answer is {}.", "The answer is:\n\n{}", "Answer:\n**{}**", "\\boxed{{}}", "\\boxed{\\text{{}}}", "The answer is:\n\\[\\text{{}}\\]", "$${}$$", "<answer>{}</answer>", "**Final Answer:**\n\n{}", "The answer is not Rome but {}.", "{} is the answer.", "#### {}", "I checked that answer. The answer is {}."])  # fmt: skip
def test_texts_in_the_same_dresses(dress: str) -> None:
    right = dress.replace("{}", "Paris")
    assert ExactMatch()(["?"] * 2, [right, dress.replace("{}", "Lyon")], answer=["Paris"] * 2) == [1.0, 0.0], right
    assert ExactMatch()(["?"], [right], answer=["Rome"]) == [0.0]


@pytest.mark.parametrize("dress", ["{}", "({})", "{}.", "**{}**", "The answer is {}.", "The answer is ({}).", "The answer is:\n\n{}", "Answer:\n**({})**", "\\boxed{{}}", "\\boxed{\\text{({})}}", "The answer is:\n\\[\\text{{}}\\]", "$${}$$", "$\\boxed{\\textbf{({})}}$", "<answer>{}</answer>", "**Final Answer:**\n\n{}) because", "The answer is not A but {}.", "{} is the answer.", "({}) is the correct answer.", "#### {}", "I would take option {}.", "A is wrong. The answer is {}", "{}) 12 apples"])  # fmt: skip
def test_choices_in_the_same_dresses(dress: str) -> None:
    right = dress.replace("{}", "C")
    assert MultipleChoice()(["?"] * 2, [right, dress.replace("{}", "B")], answer=["C"] * 2) == [1.0, 0.0], right
    assert MultipleChoice()(["?"], [right], answer=["A"]) == [0.0]


def test_several_letters_are_no_choice() -> None:
    for text in ("B or C", "The answer is B or C.", "(B) (C)", "The answer is not C.", "\\boxed{B, C}"):
        assert MultipleChoice()(["?"] * 2, [text] * 2, answer=["C", "B"]) == [0.0, 0.0], text


REAL = Path(__file__).resolve().parents[2] / "shared/data/gsm8k_train.jsonl.gz"


@pytest.mark.skipif(not REAL.exists(), reason="the public GSM8K file ../shared/data/gsm8k_train.jsonl.gz is not here")
def test_the_worked_answers_of_gsm8k() -> None:
    """All 7,473: read as they are, in other dresses, and beside a wrong number."""
    rng = random.Random(0)
    number = Number()
    with gzip.open(REAL, "rt") as f:
        rows = [json.loads(line) for line in f]
    assert len(rows) == 7473
    for row in rows:
        work, _, gold = row["answer"].partition("####")
        gold, work = gold.strip(), re.sub("<<.*?>>", "", work)
        dress = rng.choice(
            [d for d in DRESSES if d.count("{}") == 1 and not re.search(r"x =|5 \+ 7|Step|10 and|10 in|% |m\^2|²", d)]
        )
        right = dress.replace("{}", gold).replace("{{", "{").replace("}}", "}")
        wrong = dress.replace("{}", str(int(gold.replace(",", "")) + 1)).replace("{{", "{").replace("}}", "}")
        texts = [row["answer"], work + right, work + wrong]
        assert number([row["question"]] * 3, texts, answer=[row["answer"]] * 3) == [1.0, 1.0, 0.0], texts


def test_marks() -> None:
    assert final_answer("5+7=12, and that answer is correct.") is None
    assert (
        final_answer("The final answer is:\n\n$$12$$") == "12"
        and final_answer("Answer:\n\\[\\text{Paris}\\]") == "Paris"
    )
    assert extract_number("She has 7. The answer is twelve.") is None
