"""`from rlhf_nb import GRPOTrainer`: few names, found by people and by tools, imported when they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_nb

ROOT = Path(__file__).resolve().parent.parent
STUB = (ROOT / "rlhf_nb" / "__init__.pyi").read_text(encoding="utf-8")


def test_every_name_can_be_imported() -> None:
    for name in rlhf_nb.__all__:
        assert getattr(rlhf_nb, name) is not None
        assert name in dir(rlhf_nb)
    assert 35 <= len(rlhf_nb.__all__) <= 50
    for method in ("SFT", "Reward", "PPO", "DPO", "KTO", "GRPO", "RLOO", "OnlineDPO"):
        assert {f"{method}Trainer", f"{method}Config"} <= set(rlhf_nb.__all__)


def test_the_machine_room_in_four_lines() -> None:
    """Load, draw, score: what the sampler says of its tokens is what the scorer says."""
    model, tokenizer = rlhf_nb.load_model(device="cpu")
    prompts = [tokenizer("Visitor: Where do owls live?\nPip:")["input_ids"]] * 2
    completions, drawn = rlhf_nb.draw(model, prompts, max_new_tokens=5, seed=0)
    scored = rlhf_nb.logps(model, prompts, completions)
    for ids, a, b in zip(completions, drawn, scored):
        assert len(ids) == len(a) == len(b)
        assert (a - b).abs().max() < 1e-4


def test_a_renamed_function_still_comes_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"rlhf_nb\.score is now rlhf_nb\.logps"):
        assert rlhf_nb.score is rlhf_nb.logps


def test_type_checkers_see_the_same_names() -> None:
    """The interpreter reads all imports of the stub, and only those; each is offered under its own name."""
    imports = [n for n in ast.parse(STUB).body if isinstance(n, ast.ImportFrom) and n.level == 1]
    typed = {(n.module, a.name, a.asname) for n in imports for a in n.names}
    assert typed == {(module, name, name) for name, module in rlhf_nb._HOME.items()}


def test_nothing_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, rlhf_nb; dir(rlhf_nb); before = set(sys.modules)\n"
        "assert not [m for m in before if m.startswith('rlhf_nb.')] and 'torch' not in before\n"
        "from rlhf_nb import RlhfError\n"
        "assert RlhfError is rlhf_nb.RlhfError and 'rlhf_nb.core' in sys.modules and 'rlhf_nb.train' not in sys.modules\n"
        "import rlhf_nb.config, rlhf_nb.train.sft\n"
        "assert rlhf_nb.config.__name__ == 'rlhf_nb.config'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_command_lets_waiting_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before torch is read; what the user said stays."""
    for said, holds in ((None, "passive"), ("active", "active")):
        code = (
            "import os, sys; from rlhf_nb.app.cli import app\n"
            "try: app(['runs', '--help'])\n"
            "except SystemExit: pass\n"
            f"assert os.environ['OMP_WAIT_POLICY'] == {holds!r} and 'torch' not in sys.modules\n"
        )
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if said:
            monkeypatch.setenv("OMP_WAIT_POLICY", said)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_a_name_that_does_not_exist_is_answered_with_those_that_do() -> None:
    with pytest.raises(AttributeError, match="GRPOTrainer"):
        _ = rlhf_nb.GRPOTrianer
    with pytest.raises(ImportError, match="GRPOTrianer"):
        exec("from rlhf_nb import GRPOTrianer")
