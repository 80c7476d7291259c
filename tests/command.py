"""The command line as a test types it, without a process of its own."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from rlhf_nb.cli.main import app


def call(*words: Any, code: int = 0, stdin: str | None = None) -> str:
    """What a command prints, standard error included; its exit code must be the one expected, and no traceback may be seen.

    Args:
        words: behind `rlhf-nb`.
        code: its exit code.
        stdin: what is typed while it runs.
    """
    result = CliRunner().invoke(app, [str(w) for w in words], input=stdin)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result.output
