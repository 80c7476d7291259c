"""One symbol, one meaning, in the formulas of README, lessons, labs and `losses` (in the other chapters, one sign for each of the main ones); README and `losses` say what their terms mean."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NBS = Path(__file__).resolve().parent.parent / "nbs"
NOTEBOOKS = [
    NBS / "index.ipynb",
    *sorted((NBS / "course").glob("l*_*.ipynb")),
    *sorted((NBS / "losses").glob("*.ipynb")),
]
WRONG = {  # what a formula must not say: what it says instead
    r"\bw_\{?[a-z]": "tokens are y_t",
    r"y_\{?[wlcr]\b": "a chosen answer is y^+, a rejected one y^-",
    r"\br_\{?(c|d|w|l|\\text\{(chosen|rejected)\})": "rewards of a pair are r^+ and r^-",
    r"(?<![\\A-Za-z{])H\b": "entropy is \\mathcal{H}",
    r"\\beta_": "the price of KL is \\beta",
}
MEANS = {  # what a letter of a formula is, everywhere; a new one is added here, and not if it is there for something else
    "A": "advantage", "B": "rows", "C": "an answer's tokens", "D": "the desirable side", "E": "mean", "G": "answers to a question",
    "H": "entropy", "J": "what is maximised", "K": "steps of an answer", "L": "loss", "M": "mask", "N": "how many there are", "P": "probability",
    "R": "return", "U": "the undesirable side", "V": "value", "Z": "makes probabilities add up to 1", "b": "baseline", "c": "a choice",
    "d": "log-ratio, or the other choice after c", "e": "2.718...", "f": "what makes a divergence", "g": "gold", "i": "index", "j": "index",
    "k": "KL's estimators, or an index", "l": "index", "m": "margin wanted", "n": "how many of them", "p": "probability",
    "q": "another probability", "r": "reward", "s": "score of an answer", "t": "place of a token", "u": "ratio to the reference",
    "v": "a token of the vocabulary", "x": "argument of σ", "y": "answer", "z": "reference point",
    r"\Delta": "difference of the rewards of a pair", r"\alpha": "bends a divergence", r"\beta": "price of KL", r"\gamma": "discount",
    r"\delta": "the critic's surprise", r"\ell": "label of a step", r"\epsilon": "width of the clip", r"\eta": "share of wrong labels",
    r"\lambda": "GAE's", r"\mu": "the teacher's share", r"\omega": "weight of a side", r"\phi": "features", r"\pi": "policy",
    r"\rho": "ratio of a token", r"\sigma": "sigmoid", r"\tau": "pressure, 1/β", r"\theta": "parameters",
}  # fmt: skip
HOMES = {  # letters that two fields use for two things: where they may be
    r"\delta": ["advantages", "lesson_08"], r"\epsilon": ["policy", "lesson_08"], "d": ["kl", "kto", "lesson_06", "preference"],
    "m": ["reward"], "V": ["advantages", "policy", "process", "lesson_08"], "x": ["lesson_04", "process"], "b": ["advantages", "kto", "lesson_07"],
    "R": ["policy", "process"], r"\lambda": ["advantages", "lesson_08"], "s": ["advantages"], r"\eta": ["preference", "reward"],
}  # fmt: skip
TERMS = {  # first in README: how it is explained there
    "index": {"policy": "model in training", "rollout": "answers with their log-probabilities", "reference": "frozen copy",
              "critic": "second model that guesses", "nat": "natural logarithm", "Hydra": "one frozen trunk", "KL": "Drift"},
}  # fmt: skip


def formulas(text: str) -> list[str]:
    """What stands between dollars."""
    return [a or b for a, b in re.findall(r"\$\$(.+?)\$\$|\$([^$\n]+)\$", text, re.S)]


def letters(formula: str) -> set[str]:
    """The letters that stand for something."""
    plain = re.sub(r"\\(text|mathrm|operatorname|begin|end)\{[^}]*\}|\\text(bf|it)?\b", " ", formula)
    greek = {m for m in re.findall(r"\\[a-zA-Z]+", plain) if m in MEANS or re.fullmatch(GREEK, m)}
    return greek | set(re.findall(r"(?<![\\a-zA-Z])[A-Za-z](?![a-zA-Z])", plain))


GREEK = r"\\(var)?(alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega|ell|Delta|Gamma|Lambda|Phi|Psi|Omega|Sigma|Theta)"


def faults(text: str, name: str) -> list[str]:
    """Symbols that mean something else, or nothing known."""
    found = [f"{f}: {why}" for f in formulas(text) for sign, why in WRONG.items() if re.search(sign, f)]
    for f in formulas(text):
        for letter in letters(f):
            if letter not in MEANS:
                found.append(f"{f}: {letter} has no meaning in MEANS")
            elif name not in HOMES.get(letter, [name]):
                found.append(f"{f}: {letter} is {MEANS[letter]} elsewhere")
    return found


def told(path: Path) -> str:
    """The Markdown of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_symbols_mean_one_thing(path: Path) -> None:
    found = faults(told(path), path.stem)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", ["rollout", "scoring", "decode", "evaluate"])
def test_other_chapters_write_it_the_same_way(room: str) -> None:
    """Entropy, tokens, sides of a pair and the price of KL; widths and shapes have letters of their own there."""
    found = [
        f"{path.stem}: {f}: {why}"
        for path in sorted((NBS / room).glob("*.ipynb"))
        for f in formulas(told(path))
        for sign, why in WRONG.items()
        if re.search(sign, f)
    ]
    assert not found, "\n".join(found)


def test_other_symbols_are_seen() -> None:
    text = r"$\pi(w_t)$, $y_w$, $r_c - r_d$, $H = 1$ and $$\lambda \beta_{KL}$$ and $\delta + m$, $\kappa$"
    assert {f.split(": ")[1].split()[0] for f in faults(text, "kto")} >= {"tokens", "a", "rewards", "entropy", r"\lambda", r"\delta", "m", r"\kappa"}  # fmt: skip
    assert not faults(r"$\pi(y_t)$, $\mathcal{H}$, $r^+ - r^-$", "kto")


def first_sentence(text: str, term: str) -> str:
    """The sentences around the first time that a term is used, without code and links' targets."""
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)|^(#|\[!|!\[).*$", " ", text, flags=re.M)
    found = re.search(rf"\b{re.escape(term)}s?\b", plain)
    return plain[max(0, found.start() - 160) : found.end() + 160].replace("\n", " ") if found else ""


@pytest.mark.parametrize("term", TERMS["index"])
def test_the_readme_defines_its_terms(term: str) -> None:
    near = first_sentence(told(NBS / "index.ipynb"), term)
    assert re.search(TERMS["index"][term], near), near


def test_terms_of_losses_are_in_the_glossary() -> None:
    """Each notebook begins with a link to it, so no term comes before its definition."""
    glossary = (NBS.parent / "docs" / "glossary.md").read_text(encoding="utf-8").lower()
    heads = " ".join(re.findall(r"^\| (.*?) \|", glossary, re.M))
    for path in sorted((NBS / "losses").glob("*.ipynb")):
        text = told(path)
        assert "../../docs/glossary.md" in text.split("\n## ")[0], path.stem
        used = [w for w in JARGON if re.search(rf"\b{w}", text, re.I)]
        assert used and not [w for w in used if w.split("s?")[0] not in heads], path.stem


JARGON = ["policy", "reference", "critic", "rollout", "advantage", "baseline", "log-ratio", "log-prob", "nat", "entropy", "logits", "margin",
          "implicit reward", "reward model", "adapter", "EOS", "GAE", "surrogate", "estimator", "whiten", "return", "value", "proxy", "group", "ratio"]  # fmt: skip
JARGON = [w.lower() for w in JARGON]
