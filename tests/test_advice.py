"""Advice is tried before it is given."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlhf_nb.aliases import elsewhere
from rlhf_nb.cli.settings import facts
from rlhf_nb.core import ConfigError, DataError
from rlhf_nb.data.formats import renamed, to_rows
from rlhf_nb.train.registry import get


@pytest.mark.parametrize(
    ("row", "reads"),
    [
        ({"question": "Q?", "answer": "A."}, True),
        ({"question": "Q?", "preferred": "A.", "worse": "B."}, True),
        ({"question": {"problem": "2+2?"}, "label": {"steps": [1]}}, False),  # as PRM800K's: nested
        ({"question": "Q?", "answer": {"steps": ["a"]}}, False),
        ({"input": "Q?", "label": "Step 1: 4 +", "task": "math"}, False),  # as Math-Shepherd's: labels in the text
        ({"request": "Q?"}, False),
    ],
)
def test_advice_about_columns_is_tried_before_it_is_given(row: dict[str, Any], reads: bool) -> None:
    """What `data` says "reads them so" of, it reads; what it can't read gets no such promise."""
    for purpose in ("sft", "preference", "unpaired", "stepwise"):
        try:
            list(to_rows([row], purpose))
            continue
        except DataError as error:
            said = str(error)
        promised = re.search(r"data\.columns=\{(.*?)\} reads", said)
        if promised:
            names = dict(pair.split(": ") for pair in promised[1].split(", "))
            assert list(to_rows(renamed([row], names), purpose)) and reads


def test_advice_that_helps_is_given() -> None:
    with pytest.raises(DataError, match=r"data\.columns=\{request: prompt, reply: completion\} reads them so"):
        list(to_rows([{"request": "Q?", "reply": "A."}], "sft"))


def test_a_setting_of_another_method_is_no_mistyped_word() -> None:
    """`sft episodes.max_turns=3` is told which methods have episodes, not that total_episodes was meant; so for every key of every method."""
    keys = {name: {k for k in m["keys"] if "." not in k} for name, m in facts()["methods"].items()}
    tried = 0
    for name, mine in keys.items():
        config = get(name).config
        for key in set().union(*keys.values()) - mine:
            if elsewhere(key):
                continue  # TRL has the word, too, and says more
            with pytest.raises(ConfigError) as error:
                config(**{key: {} if key == "episodes" else 3})
            owners = {facts()["methods"][other]["command"] for other, theirs in keys.items() if key in theirs}
            said = re.search(r"It is a setting of (.*?); this one has none", str(error.value))
            assert said and {*said[1].split(", ")} == owners, str(error.value)
            tried += 1
    assert tried > 900
