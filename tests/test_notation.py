"""One symbol, one meaning, in the formulas of `losses`: the page of notation that lessons and losses share."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "nbs" / "losses").glob("*.ipynb"))
WRONG = {  # what a formula must not say: what it says instead
    r"\bw_\{?[a-z]": "tokens are y_t",
    r"y_\{?[wlcr]\b": "a chosen answer is y^+, a rejected one y^-",
    r"\br_\{?(c|d|w|l|\\text\{(chosen|rejected)\})": "rewards of a pair are r^+ and r^-",
    r"(?<![\\A-Za-z{])H\b": "entropy is \\mathcal{H}",
    r"\\beta_": "the price of KL is \\beta",
}


def formulas(text: str) -> list[str]:
    """What stands between dollars."""
    return [a or b for a, b in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", text, re.S)]


def faults(text: str, name: str) -> list[str]:
    """Symbols that mean something else."""
    rules = WRONG if name == "advantages" else WRONG | {r"\\lambda": "λ is GAE's alone"}
    return [f"{f}: {why}" for f in formulas(text) for sign, why in rules.items() if re.search(sign, f)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_symbols_mean_one_thing(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    found = [f for c in cells if c["cell_type"] == "markdown" for f in faults("".join(c["source"]), path.stem)]
    assert not found, "\n".join(found)


def test_other_symbols_are_seen() -> None:
    text = r"$\pi(w_t)$, $y_w$, $r_c - r_d$, $H = 1$ and $$\lambda_D \beta_{KL}$$"
    assert len(faults(text, "kto")) == 6 and not faults(r"$\pi(y_t)$, $\mathcal{H}$, $r^+ - r^-$", "kto")
