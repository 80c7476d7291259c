"""Ratings of several models from a file of blind votes, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from rlhf_nb.cli.main import app


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
