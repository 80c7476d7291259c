"""`RLHF_NB_TEST_SEED=k` shifts the seed of every training by k, here and in every process that a test starts (`shifted/sitecustomize.py`)."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub, which reads it once
os.environ.setdefault("COLUMNS", "200")  # tables wrap at the same words on every machine, whatever else they show there
SHIFTED = str(Path(__file__).resolve().parent / "shifted")

if os.environ.get("RLHF_NB_TEST_SEED", "0") not in ("", "0"):
    runpy.run_path(f"{SHIFTED}/sitecustomize.py")
    others = [p for p in os.environ.get("PYTHONPATH", str(ROOT)).split(os.pathsep) if p != SHIFTED]
    os.environ["PYTHONPATH"] = os.pathsep.join([SHIFTED, *others])
    sys.path.append(SHIFTED)  # some tests hand `sys.path` on


@pytest.fixture(autouse=True)
def seed_of_this_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test marked `one_seed("why")` states a number of one seed and isn't shifted."""
    if request.node.get_closest_marker("one_seed"):
        monkeypatch.setenv("RLHF_NB_TEST_SEED", "0")
    yield
