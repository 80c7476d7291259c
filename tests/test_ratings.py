"""Ratings of several models from a file of blind votes, on the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.evaluate import ratings
from rlhf_nb.evaluate.ratings import BlindVote, rate


def test_votes_of_a_file_become_ratings(tmp_path: Path) -> None:
    rows = [
        {"model_a": a, "model_b": b, "winner": w}
        for a, b in (("new", "old"), ("old", "base"))
        for w in ("model_a", "model_a", "tie", "model_b")
    ]
    (tmp_path / "votes.jsonl").write_text("\n".join(map(json.dumps, rows * 20)))
    said = CliRunner().invoke(app, ["compare", "--votes", str(tmp_path / "votes.jsonl")])
    assert said.exit_code == 0 and said.output.index("new") < said.output.index("old") < said.output.index("base"), (
        said.output
    )
    assert "1000" in said.output and " to " in said.output
    (tmp_path / "odd.jsonl").write_text(json.dumps({"model_a": "a", "model_b": "b", "winner": "z"}))
    said = CliRunner().invoke(app, ["compare", "--votes", str(tmp_path / "odd.jsonl")])
    assert said.exit_code == 1 and "vote 0: the winner is 'z'; known are model_a" in " ".join(said.output.split())


def test_names_stay_names(tmp_path: Path) -> None:
    rows = [{"model_a": "[red]x[/red]", "model_b": "[bold]x", "winner": "model_a"}]
    (tmp_path / "votes.jsonl").write_text(json.dumps(rows[0]))
    said = CliRunner().invoke(app, ["compare", "--votes", str(tmp_path / "votes.jsonl")])
    assert said.exit_code == 0 and "[red]x[/red]" in said.output and "[bold]x" in said.output, said.output


@pytest.mark.parametrize("draws", [0.0, 0.3, 1.0])
def test_many_votes_take_a_few_steps(draws: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, steps, real = random.Random(0), list[int](), ratings.functional.hessian
    monkeypatch.setattr(ratings.functional, "hessian", lambda *a: steps.append(1) or real(*a))
    votes = list[BlindVote]()
    for _ in range(5000):
        a, b = rng.sample("abcdefgh", 2)
        votes.append(BlindVote(a, b, None if rng.random() < draws else min(a, b) if rng.random() < 0.7 else max(a, b)))
    assert len(rate(votes)) == 8 and len(steps) <= 15, len(steps)
