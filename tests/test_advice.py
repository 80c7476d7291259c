"""Advice about data is tried before it is given."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlhf_nb.core import DataError
from rlhf_nb.data.formats import renamed, to_rows


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
