"""Shortened dialogues on a real model: what it notices when sentences are chosen by what was learnt, by recency (truncation) or by luck.

Dialogues of HH-RLHF up to the last question. The model answers each with the whole dialogue before it; then random selections of its sentences are
read before the same answer (what the compressor learns from, on two thirds of the dialogues), and so are shortened dialogues (on the others, three splits).
With `--facts` each dialogue begins with a sentence about the user's own life, and its last question asks for it.

    OMP_NUM_THREADS=1 python benchmarks/compress.py MODEL          # a folder or a name, such as smollm2
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rlhf_nb.config import ModelConfig
from rlhf_nb.core import decide_precision
from rlhf_nb.data.formats import parse_hh
from rlhf_nb.decode.compress import (
    FEATURES,
    ContextCompressor,
    Missed,
    Noticed,
    Witness,
    count_tokens,
    fit_compressor,
    missed,
    random_choice,
    truncate,
    units_of,
)  # fmt: skip
from rlhf_nb.models.load import load_causal_lm, load_tokenizer

DATA = Path(__file__).resolve().parents[2] / "shared/data/hh_rlhf_harmless.jsonl.gz"


def dialogues(tokenizer: Any, count: int) -> list[list[dict[str, Any]]]:
    """Dialogues of three messages or more, 7 to 13 sentences and 80 to 180 tokens, the last answer left out; always the same ones."""
    out = []
    with gzip.open(DATA, "rt", encoding="utf-8") as f:
        for line in f:
            talk = parse_hh(json.loads(line)["chosen"])[:-1]
            if len(talk) < 3 or not all(m["content"].strip() for m in talk):
                continue
            units = units_of(talk)
            if 7 <= len(units) <= 13 and 80 <= sum(count_tokens(tokenizer, units)) <= 180:
                out.append(talk)
    random.Random(0).shuffle(out)
    return out[:count]


FACTS = (
    ("My dog is called {}.", "What is my dog called?", ("Rex", "Bruno", "Luna", "Milo")),
    ("My sister lives in {}.", "Where does my sister live?", ("Oslo", "Lima", "Cairo", "Dublin")),
    ("I was born in {}.", "In which month was I born?", ("March", "July", "October", "December")),
    ("My car is {}.", "What colour is my car?", ("red", "green", "yellow", "black")),
    ("I work as a {}.", "What do I work as?", ("baker", "nurse", "pilot", "farmer")),
    ("My favourite fruit is the {}.", "Which fruit is my favourite?", ("mango", "peach", "plum", "cherry")),
)


def asked_later(talks: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """The same dialogues with a fact at their beginning that the last question asks for."""
    out = []
    for i, talk in enumerate(talks):
        fact, question, words = FACTS[i % len(FACTS)]
        first, *rest, last = talk
        told = {**first, "content": f"{fact.format(words[i // len(FACTS) % len(words)])} {first['content']}"}
        out.append([told, *rest, {**last, "content": question}])
    return out


def shown(name: str, found: list[Noticed], whole: list[int]) -> str:
    """A line of the table."""
    kl, agree = (sum(getattr(n, k) for n in found) / len(found) for k in ("kl", "agree"))
    saved = 1 - sum(n.tokens for n in found) / sum(whole)
    return f"| {name} | {kl:.3f} | {agree:.1%} | {saved:.0%} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=60, help="dialogues")
    parser.add_argument("--facts", action="store_true", help="something told first is asked for last")
    parser.add_argument("--new", type=int, default=16, help="longest answer, in tokens")
    args = parser.parse_args()
    if not DATA.exists():
        sys.exit(f"skipped: there is no {DATA}")
    torch.set_num_threads(1)
    place = ModelConfig(name_or_path=args.model)
    tokenizer = load_tokenizer(place)
    model = load_causal_lm(place, decide_precision("cpu", "fp32"), tokenizer=tokenizer, trainable=False)
    begin, talks = time.process_time(), dialogues(tokenizer, args.count)
    talks = asked_later(talks) if args.facts else talks
    witnesses = [Witness(model, tokenizer, t, args.new, seed=i) for i, t in enumerate(talks)]
    found: list[Missed] = []
    for w, t in zip(witnesses, talks):
        found.append(missed(w, t, seed=len(found)))
        print(f"{len(found)} of {len(talks)}, {time.process_time() - begin:.0f} s", file=sys.stderr, flush=True)
    totals = [sum(count_tokens(tokenizer, units_of(t))) for t in talks]
    print(f"{len(talks)} dialogues, {sum(totals) / len(talks):.0f} tokens each")
    for share in (0.5, 0.25):
        print(
            f"\nTo {share:.0%} of the tokens\n\n| chosen by | KL per token, nats | same likeliest token | tokens saved |\n|---|---|---|---|",
            flush=True,
        )
        for seed in range(3):
            test = sorted(random.Random(seed).sample(range(len(talks)), len(talks) // 3))
            fitted = fit_compressor([found[i] for i in range(len(talks)) if i not in test])
            rows: dict[str, list[Noticed]] = {"what was learnt": [], "recency (truncation)": [], "luck": []}
            for i in test:
                budget = round(share * totals[i])
                rows["what was learnt"].append(
                    witnesses[i].notices(fitted.compress(talks[i], tokenizer, budget).messages)
                )
                rows["recency (truncation)"].append(witnesses[i].notices(truncate(talks[i], tokenizer, budget)))
                rows["luck"].append(witnesses[i].notices(random_choice(talks[i], tokenizer, budget, 100 * seed + i)))
            for name, seen in rows.items():
                print(shown(f"{name}, split {seed}", seen, [witnesses[i].tokens for i in test]), flush=True)
    every: ContextCompressor = fit_compressor(found)
    print("\nFitted on all of them:", {k: round(w, 3) for k, w in zip(FEATURES, every.weights)})
    print(f"{time.process_time() - begin:.0f} CPU seconds")


if __name__ == "__main__":
    main()
