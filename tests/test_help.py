"""Help comes at once: no torch, little CPU, everything in its group, and what is written down of methods is up to date."""

from __future__ import annotations

import inspect
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_nb.cli import ask, models
from rlhf_nb.cli.settings import EXAMPLES, GROUPS, facts

ROOT = Path(__file__).resolve().parent.parent
SEEN = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
sys.argv[0] = "rlhf-nb"
from rlhf_nb.app.cli import app
app()
"""
HERE = sorted({name for names in GROUPS.values() for name in names} - {"config", "runs"})
LINES = [
    *(f"{name} --help" for name in HERE), "--help", "--version", "config --help", "runs --help", "config init --help", "runs rollback --help",
    "config init ppo", "config init online-dpo --toy", "config init run", "pppo", "ppo --bta 3", "watch --evry 3",
]  # fmt: skip
LIMIT = 1.0  # CPU seconds on a slow and busy machine; 0.3 to 0.4 on a quiet one


def typed(line: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """A command line in a fresh process, and the CPU seconds it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", SEEN, *line.split()], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("line", LINES)
def test_help_comes_at_once(line: str) -> None:
    done, seconds = typed(line)
    if seconds > LIMIT:  # once more: pages had to be read, or the machine was busy
        done, seconds = typed(line)
    assert done.stderr.strip().endswith("False"), f"torch was imported for rlhf-nb {line}"
    assert done.returncode == (2 if line in ("pppo", "ppo --bta 3", "watch --evry 3") else 0), done.stderr[-500:]
    assert seconds <= LIMIT


def test_help_without_torch_names_every_decoder_and_the_bound_of_exports() -> None:
    from rlhf_nb.decode.named import KINDS
    from rlhf_nb.export import formats

    assert ask.DECODERS.split(", ") == list(KINDS)
    said = inspect.signature(models.export_command).parameters["force"].default.help
    assert f"above {formats.EXPORT_BOUND} nats" in said


def test_the_watch_on_torch_can_see_it() -> None:
    done, _ = typed("config show sft --toy")
    assert done.returncode == 0 and done.stderr.strip().endswith("True")


def test_typing_errors_are_answered_with_the_nearest_command() -> None:
    done, _ = typed("pppo")
    assert "Did you mean 'ppo'?" in done.stderr


def test_groups_come_in_order_and_every_command_stands_in_one() -> None:
    shown = typed("--help")[0].stdout
    places = [shown.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places) and "─ Commands ─" not in shown
    names = [name for group in GROUPS.values() for name in group]
    assert len(names) == len(set(names)) and len(GROUPS["Start"]) == 6
    known = {fact["command"] for fact in facts()["methods"].values()}
    assert known <= set(names)
    assert set(names) - known - {"config", "runs"} == set(EXAMPLES)
    assert all(line.split()[0] == name for name, line in EXAMPLES.items())


def test_what_is_written_down_of_methods_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ".ci/facts.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert json.loads((ROOT / "rlhf_nb" / "cli" / "facts.json").read_text(encoding="utf-8")) == facts()
