"""The shift of all seeds: that it reaches what a training draws, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch

DRAWN = """
import json, torch
from rlhf_nb.core import derive_seed
from rlhf_nb.data import toy
from rlhf_nb.rollout.sampler import uniforms
one = torch.ones(1, dtype=torch.int64)
weights = toy.build_model(0, "tiny").model.layers[0].mlp.up_proj.weight
noise = torch.randn(3, generator=torch.Generator("cpu").manual_seed(0))
torch.manual_seed(0)
drawn = {
    "weights": weights.flatten()[:3].tolist(), "order": noise.tolist(), "noise": torch.randn(3).tolist(),
    "answers": uniforms(0, 0, one, one, 3).tolist(), "rows": toy.train_prompts(2), "seed": derive_seed("a", 1),
    "default": isinstance(torch.default_generator, torch.Generator),
}
"""


def drawn_twice(shift: int) -> list[dict[str, object]]:
    paths = [str(Path(__file__).parent / "shifted"), str(Path(__file__).parent.parent)]
    env = os.environ | {
        "RLHF_NB_TEST_SEED": str(shift),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONWARNINGS": "ignore",
    }
    code = f"for _ in range(2):\n{indent(DRAWN + 'print(json.dumps(drawn))', '    ')}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=120
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.one_seed("what is drawn without a shift")
def test_weights_order_noise_and_answers_move_and_rows_stay() -> None:
    (one, again), here = drawn_twice(1), dict[str, Any]()
    exec(DRAWN, here)
    plain = json.loads(json.dumps(here["drawn"]))
    assert one == again and plain["default"] is True
    assert {key for key in plain if plain[key] != one[key]} == {"weights", "order", "noise", "answers"}


@pytest.mark.one_seed("compares with torch's own numbers")
def test_a_test_of_one_seed_is_not_shifted() -> None:
    given = torch.Generator().manual_seed(0)
    assert given.initial_seed() == 0 and os.environ.get("RLHF_NB_TEST_SEED", "0") == "0"
