"""`RLHF_NB_TEST_SEED=k` shifts the seed of every training by k, here and in every process that a test starts (`shifted/sitecustomize.py`)."""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub, which reads it once
os.environ["COLUMNS"] = "1000"  # no sentence of a table wraps, whatever a machine's warnings add to it
for name in ("FORCE_COLOR", "PY_COLORS", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "GITHUB_ACTIONS"):
    os.environ.pop(name, None)  # help and tables without colours, on a runner as at home
SHIFTED = str(Path(__file__).resolve().parent / "shifted")

others = [p for p in os.environ.get("PYTHONPATH", str(ROOT)).split(os.pathsep) if p not in ("", SHIFTED)]
os.environ["PYTHONPATH"] = os.pathsep.join([SHIFTED, *others])  # without a shift, too: what tests start ends sooner
if os.environ.get("RLHF_NB_TEST_SEED", "0") not in ("", "0"):
    runpy.run_path(f"{SHIFTED}/sitecustomize.py")
    sys.path.append(SHIFTED)  # some tests hand `sys.path` on


def pytest_collection_finish() -> None:
    """What importing has made stays: a collection of garbage need not look through it again and again."""
    gc.freeze()


@pytest.fixture(autouse=True)
def seed_of_this_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test marked `one_seed("why")` states a number of one seed and isn't shifted."""
    if request.node.get_closest_marker("one_seed"):
        monkeypatch.setenv("RLHF_NB_TEST_SEED", "0")
    yield
