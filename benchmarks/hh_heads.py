"""A reward model from few pairs: heads that `train.fit_head` fits to a chat model's states, in five folds, against a bag of words on the same folds.

The body runs once over all pairs; the states are kept in --out, in pieces, and a run that was stopped goes on. Layers and ridge are chosen by four folds
inside the training folds, the bag of words' ridge likewise. Differences are paired, pair by pair. About 400 CPU seconds for SmolLM2-135M, of which 350 are
the body's.

    python benchmarks/hh_heads.py --model FOLDER --data hh_rlhf_harmless.jsonl.gz
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_nb.config import DataConfig, ModelConfig
from rlhf_nb.core import decide_precision
from rlhf_nb.data.rows import load_rows
from rlhf_nb.data.sources import tokenize_preferences
from rlhf_nb.evaluate.intervals import compare_paired, points_of
from rlhf_nb.models.load import load_causal_lm, load_tokenizer
from rlhf_nb.train.fit_head import PIECE, Pace, difference_states, fit_head, kept_states, side_by_side
from rlhf_nb.train.reward import fit_words, word_bags

FOLDS, INNER, WORD_RIDGES = 5, 4, (100.0, 30.0, 10.0, 3.0, 1.0)
Fitted = Callable[[Tensor], Tensor]  # indices of pairs to their margins


def states_of(args: argparse.Namespace) -> tuple[list[dict[str, Any]], Tensor]:
    """Tokenized pairs, and [depths, pairs, 2 H] differences of their answers' last states and means."""
    model = ModelConfig(name_or_path=args.model)
    tokenizer = load_tokenizer(model)
    rows = load_rows(DataConfig(path=str(args.data)), "preference")[0][: args.most]
    rows = tokenize_preferences(rows, tokenizer, 640, max_prompt_length=384, warn=False)
    pieces = range(-(-len(rows) // PIECE))

    def read(piece: int) -> Tensor:
        if not body:
            body.append(load_causal_lm(model, precision, tokenizer=tokenizer).model.eval())
        with torch.autocast("cpu", precision.compute_dtype, enabled=precision.compute_dtype != torch.float32):
            return difference_states(body[0], rows[piece * PIECE : (piece + 1) * PIECE], "both", True, 4096)

    body: list[Any] = []
    precision = decide_precision("cpu")
    return rows, torch.cat(list(kept_states(pieces, len(rows), read, args.out, Pace(print))), 1)


def words(rows: Sequence[dict[str, Any]], train: Tensor) -> Fitted:
    """A bag of words with its length, fitted to some of the pairs."""
    size = 1 + max(t for r in rows for t in (*r["chosen_ids"], *r["rejected_ids"]))
    bags = {k: word_bags([rows[i] for i in train[torch.arange(len(train)) % INNER != k]]) for k in range(INNER)}
    kept = {k: word_bags([rows[i] for i in train[torch.arange(len(train)) % INNER == k]]) for k in range(INNER)}
    right = {
        r: sum(float((kept[k].margin(fit_words(bags[k], size, r)) > 0).double().sum()) for k in range(INNER))
        for r in WORD_RIDGES
    }
    weights = fit_words(word_bags([rows[i] for i in train]), size, max(right, key=lambda r: right[r]))
    return lambda test: word_bags([rows[i] for i in test]).margin(weights)


def head(states: Tensor, train: Tensor, several: bool, pooled: int) -> Fitted:
    """A fitted head; says what it reads."""
    fit = fit_head(states[:, train], several, pooled)
    print(f"  reads {fit.layers}, ridge {fit.ridge:g}; folds inside: {fit.accuracy:.1%}", flush=True)
    return lambda test: side_by_side(states[:, test], fit.layers, pooled) @ fit.weight


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--data", type=Path, required=True, help="HH-RLHF pairs, gzipped JSON lines")
    parser.add_argument("--out", type=Path, default=Path("runs/hh_heads"), help="where states are kept")
    parser.add_argument("--most", type=int, help="pairs at most")
    args = parser.parse_args()
    rows, states = states_of(args)
    last = states[:, :, : states.shape[2] // 2]
    ways: dict[str, Callable[[Tensor], Fitted]] = {
        "bag of words and length": lambda train: words(rows, train),
        "head_layers=auto pooling=both": lambda train: head(states, train, True, 2),
        "body_layers=auto pooling=both": lambda train: head(states, train, False, 2),
        "body_layers=auto": lambda train: head(last, train, False, 1),
    }
    fold = torch.empty(len(rows), dtype=torch.int64)
    fold[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))] = torch.arange(len(rows)) % FOLDS
    marks = {name: torch.zeros(len(rows), dtype=torch.float64) for name in ways}
    for k in range(FOLDS):
        train, test = torch.where(fold != k)[0], torch.where(fold == k)[0]
        for name, fit in ways.items():
            margins = fit(train)(test)
            marks[name][test] = (margins > 0).double() + 0.5 * (margins == 0).double()
    base = marks["bag of words and length"].numpy()
    for name, right in marks.items():
        low, high = np.quantile(
            np.random.default_rng(0).choice(right.numpy(), (4000, len(rows))).mean(1), [0.025, 0.975]
        )
        print(
            f"{name}: {float(right.mean()):.1%} [{low:.1%}, {high:.1%}]; {compare_paired(points_of(right.numpy(), base))}"
        )


if __name__ == "__main__":
    main()
