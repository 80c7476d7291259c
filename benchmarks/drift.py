"""How often the drift test cries where nothing changed, and how much must change before it cries.

    OMP_NUM_THREADS=1 python benchmarks/drift.py [--streams 1000] [--days 3] [--parts null power]

Prompts and answers are those of a file of preference pairs (Anthropic HH-RLHF), strangers are questions of GSM8K, both from
`../shared/data`; without it, the null streams are of the toy world and the power of real prompts is left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_nb.core import derive_seed
from rlhf_nb.data import toy
from rlhf_nb.data.formats import extract_prompt, prompt_text
from rlhf_nb.feedback.drift import Budget, drift_test, ngram_features

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TESTS = 8  # that share a version's budget, two clocks: prompts, answers and two numbers


def lines(name: str) -> list[dict[str, Any]]:
    """The rows of a packed file."""
    with gzip.open(DATA / name, "rt", encoding="utf-8") as f:
        return [json.loads(line) for line in f]


def people() -> dict[str, list[str]]:
    """Prompts and answers that people wrote or chose."""
    pairs = [extract_prompt(r["chosen"], r["rejected"]) for r in lines("hh_rlhf_harmless.jsonl.gz")]
    texts = {k: [prompt_text(p[i]) for p in pairs] for i, k in enumerate(("prompts", "chosen", "rejected"))}
    return texts | {"sums": [r["question"] for r in lines("gsm8k_train.jsonl.gz")[:1000]]}


def toys() -> dict[str, list[str]]:
    """Answers of the toy world."""
    rng = random.Random(0)
    return {"prompts": [toy.speak(r["prompt"], "kind", rng) for r in toy.train_prompts(1300)]}


def null_streams(corpus: list[str], streams: int, days: int) -> None:
    """Streams in which nothing changes, looked at each hour and each day, by the budget."""
    points = ngram_features(corpus, width=512)
    budget, small = Budget(100, 2), Budget(10, 2)
    found = {100: 0, 10: 0, "5 % each look": 0}
    cried = dict.fromkeys(found, 0)
    for stream in range(streams):
        rng = np.random.default_rng(stream)
        before = dict(found)
        reference = points[rng.integers(len(points), size=160)]
        for hour in range(24 * days):
            looks = [(3600, 40)] + ([(86400, 160)] if hour % 24 == 23 else [])
            for seconds, n in looks:
                alpha = budget.alpha(seconds)
                p = drift_test(points[rng.integers(len(points), size=n)], reference, alpha, 100 * hour + (n > 40)).p
                found[100] += p <= alpha
                found[10] += p <= small.alpha(seconds)
                found["5 % each look"] += p <= 0.05
        for key in found:
            cried[key] += found[key] > before[key]
    total = streams * days
    print(
        f"{streams} streams of {days} days, a look each hour (40 texts) and each day (160) against 160, {total} days in all"
    )
    for key in found:
        promised = f"{total / key:.0f} promised at most" if isinstance(key, int) else "no promise"
        days_told = f"one in {key} days" if isinstance(key, int) else key
        print(
            f"| {days_told} | {found[key]} false alarms ({promised}) | {cried[key]} streams of {streams} |", flush=True
        )


def power(texts: dict[str, list[str]], samples: int) -> None:
    """How often a share of strangers is seen by one look of an hour and by one of a day."""
    points = {k: ngram_features(v) for k, v in texts.items()}
    shifts = {
        "prompts, a share are sums": ("prompts", "sums"),
        "answers, a share are those people rejected": ("chosen", "rejected"),
    }
    for name, (home, strange) in shifts.items():
        for seconds, n in ((3600, 100), (86400, 500)):
            alpha, told = Budget(100, 2 * TESTS).alpha(seconds), []
            for share in (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
                seen = 0
                for sample in range(samples):
                    rng = np.random.default_rng(derive_seed(name, n, str(share), sample))
                    order = rng.permutation(len(points[home]))
                    new, strangers = order[:n], int(round(share * n))
                    rows = np.concatenate(
                        [
                            points[home][new[strangers:]],
                            points[strange][rng.choice(len(points[strange]), strangers, replace=False)],
                        ]
                    )
                    seen += drift_test(rows, points[home][order[n : n + 500]], alpha, sample).p <= alpha
                told.append(f"{share:.0%}: {seen}/{samples}")
                if seen == samples:
                    break
            print(f"| {name} | {n} texts against 500, level {alpha:.2g} | {', '.join(told)} |", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--days", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--parts", nargs="+", default=["null", "power"], choices=["null", "power"])
    given = parser.parse_args()
    real = DATA.is_dir()
    texts = people() if real else toys()
    print(f"texts: {'prompts of HH-RLHF' if real else 'answers of the toy world; ../shared/data is missing'}")
    began = time.process_time()
    if "null" in given.parts:
        null_streams(texts["prompts"], given.streams, given.days)
    if "power" in given.parts and real:
        power(texts, given.samples)
    print(f"{time.process_time() - began:.0f} CPU seconds")


if __name__ == "__main__":
    main()
