"""Writes docs/figures/first_minutes.svg: real commands and what they print, as a recording that any browser plays.

Each command runs in an empty folder, in the toy world. Lines appear in their order; waits longer than a second are cut to one.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SESSION = [
    "rlhf-nb sft --toy steps=150 log_every=50",
    "rlhf-nb grpo --toy model.name_or_path=runs/sft/model reward=gold steps=20 kl_coef=0.05 log_every=5",
    r"rlhf-nb sample runs/grpo/model 'Visitor: Where do owls live?\nPip:' --greedy",
    "rlhf-nb runs list",
]
COLUMNS, ROWS, HEIGHT, WIDTH = 104, 26, 17, 7.8  # of the screen in characters, of a character in pixels
LONGEST = 1.0  # seconds that nothing happens


def play(folder: Path) -> list[tuple[float, str, bool]]:
    """Seconds at which each line appears, the line, and whether it was typed."""
    now, shown = 0.5, list[tuple[float, str, bool]]()
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": str(COLUMNS)}
    for command in SESSION:
        shown.append((now, f"$ {command}", True))
        words = [sys.executable, "-m", "rlhf_nb", *shlex.split(command)[1:]]
        done = subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        before = time.monotonic()
        for line in done.stdout or ():
            after = time.monotonic()
            now, before = now + min(LONGEST, after - before), after
            for part in textwrap.wrap(line.rstrip(), COLUMNS, subsequent_indent="    ") or [""]:
                shown.append((now, part, False))
        if done.wait():
            raise SystemExit(f"{command} failed:\n" + "\n".join(text for _, text, _ in shown[-20:]))
        now += 2 * LONGEST
    return shown


def drawn(shown: list[tuple[float, str, bool]]) -> str:
    """The recording as an SVG: each line appears at its time, and the screen scrolls when it is full."""
    end, lines = shown[-1][0] + 3, []
    for i, (at, text, typed) in enumerate(shown):
        kind = ' class="t"' if typed else ""
        said = escape(re.sub(r"[^\x20-\uffff]", "", text), quote=False)
        begin = f'<animate attributeName="opacity" from="0" to="1" begin="{at:.2f}s" dur="0.01s" fill="freeze"/>'
        lines.append(f'<text x="8" y="{HEIGHT * (i + 1)}"{kind} opacity="0">{said}{begin}</text>')
    moves = [(at, -HEIGHT * (i + 1 - ROWS)) for i, (at, _, _) in enumerate(shown) if i >= ROWS]
    scroll = "".join(
        f'<animateTransform attributeName="transform" type="translate" to="0 {y}" begin="{at:.2f}s" dur="0.01s" fill="freeze"/>'
        for at, y in moves
    )
    wide, high = round(COLUMNS * WIDTH + 16), HEIGHT * ROWS + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">'
        f"<title>The first minutes, {end:.0f} seconds</title>"
        "<style>text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#ddd;white-space:pre}.t{fill:#8fd18f}</style>"
        f'<rect width="100%" height="100%" rx="6" fill="#1b1e24"/><svg y="4" width="{wide}" height="{HEIGHT * ROWS + 6}">'
        f"<g>{scroll}{''.join(lines)}</g></svg></svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "first_minutes.svg")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        picture = drawn(play(Path(folder)))
    assert len(picture) < 150_000 and tempfile.gettempdir() not in picture
    out.write_text(picture, encoding="utf-8")
    print(f"{out}: {len(picture) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
