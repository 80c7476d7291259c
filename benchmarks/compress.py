"""Shortened dialogues on a real model: four ways to choose what stays, on two benches.

Dialogues of HH-RLHF up to the last question. The model answers each with the whole dialogue before it; shortened dialogues are read before the same
answer. With `--facts` each dialogue begins with a sentence about the user's own life, and its last question asks for it. Chosen by

- attention: how much the last sentence's tokens look at each token, mean over layers and heads (no training);
- rule: ridge regression on ten features of a sentence, fitted to random selections of two thirds of the dialogues (`SentenceRule`);
- states: the same regression on the model's own hidden states of each token, read twice so that each has seen the whole dialogue, for whole
  sentences and for single words. That is LLMLingua-2's idea (keep or drop each token, learnt, with both sides in view), with what this model
  misses in the place of labels from another model;
- recency (truncation), and luck.

    OMP_NUM_THREADS=1 python benchmarks/compress.py MODEL [--facts]          # a folder or a name, such as smollm2
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from harness import HH
from torch import Tensor

from rlhf_nb.config import ModelConfig
from rlhf_nb.core import decide_precision
from rlhf_nb.data.formats import Message, parse_hh
from rlhf_nb.decode import compress as c
from rlhf_nb.evaluate.intervals import mean_interval
from rlhf_nb.models.load import load_causal_lm, load_tokenizer

Talk = list[Message]
FACTS = (
    ("My dog is called {}.", "What is my dog called?", ("Rex", "Bruno", "Luna", "Milo")),
    ("My sister lives in {}.", "Where does my sister live?", ("Oslo", "Lima", "Cairo", "Dublin")),
    ("I was born in {}.", "In which month was I born?", ("March", "July", "October", "December")),
    ("My car is {}.", "What colour is my car?", ("red", "green", "yellow", "black")),
    ("I work as a {}.", "What do I work as?", ("baker", "nurse", "pilot", "farmer")),
    ("My favourite fruit is the {}.", "Which fruit is my favourite?", ("mango", "peach", "plum", "cherry")),
)


def dialogues(tokenizer: Any, count: int, facts: bool) -> list[Talk]:
    """Dialogues of three messages or more, 7 to 13 sentences and 80 to 180 tokens, the last answer left out; always the same ones."""
    out = []
    with gzip.open(HH, "rt", encoding="utf-8") as f:
        for line in f:
            talk = parse_hh(json.loads(line)["chosen"])[:-1]
            if len(talk) < 3 or not all(m["content"].strip() for m in talk):
                continue
            units = c.units_of(talk)
            if 7 <= len(units) <= 13 and 80 <= sum(c.count_tokens(tokenizer, units)) <= 180:
                out.append(talk)
    random.Random(0).shuffle(out)
    out = out[:count]
    for i, talk in enumerate(out if facts else []):
        fact, question, words = FACTS[i % len(FACTS)]
        told = f"{fact.format(words[i // len(FACTS) % len(words)])} {talk[0]['content']}"
        out[i] = [{**talk[0], "content": told}, *talk[1:-1], {**talk[-1], "content": question}]
    return out


def random_choice(talk: Talk, tokenizer: Any, budget: int, seed: int) -> Talk:
    """Sentences by luck, as many as fit; the system's instructions and the last sentence stay."""
    units = c.units_of(talk)
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed)).tolist()
    return c.keep_units(units, c.fill_up(order, c.count_tokens(tokenizer, units), c.pinned(units), budget))


class Read(NamedTuple):
    """A dialogue's words, and what the model makes of each."""

    units: list[c.Unit]  # words with the blanks behind them
    sentence: list[int]  # which sentence each belongs to
    counts: list[int]  # tokens of each
    states: Tensor  # [words, H], sum over a word's tokens of the hidden states at the second reading
    looked_at: Tensor  # [words], attention that the last sentence pays to a word


@torch.no_grad()
def read(model: Any, tokenizer: Any, talk: Talk) -> Read:
    """Read a dialogue through its template, and once more."""
    sentences, words, of = c.units_of(talk), list[c.Unit](), list[int]()
    for i, u in enumerate(sentences):
        for piece in re.findall(r"\s*\S+\s*", u.text):
            words.append(u._replace(text=piece))
            of.append(i)
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    enc = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, at, owner = enc["input_ids"], 0, [-1] * len(enc["input_ids"])
    for i, w in enumerate(words):
        begin = text.index(w.text.strip(), at)
        at = begin + len(w.text.strip())
        for t, (a, b) in enumerate(enc["offset_mapping"]):
            if a < at and b > begin:
                owner[t] = i
    own = torch.tensor(owner)
    model.set_attn_implementation("eager")
    once = model(torch.tensor([ids]), output_attentions=True)
    model.set_attn_implementation("sdpa")
    asking = torch.tensor([o >= 0 and of[o] == len(sentences) - 1 for o in owner])
    attention = torch.stack([a[0][:, asking].mean((0, 1)) for a in once.attentions]).mean(0)
    twice = model(torch.tensor([[*ids, *ids]]), output_hidden_states=True).hidden_states
    states = twice[2 * len(twice) // 3][0, len(ids) :].float()
    n, real = len(words), own >= 0
    summed = torch.zeros(n, states.shape[1]).index_add_(0, own[real], states[real])
    looked = torch.zeros(n).index_add_(0, own[real], attention[real])
    return Read(words, of, c.count_tokens(tokenizer, words), summed, looked)


def left_out_states(r: Read, keep: set[int], total: int) -> Tensor:
    """[H], the states of what is left out, each token by its share."""
    return r.states[[i for i in range(len(r.units)) if r.sentence[i] not in keep]].sum(0) / total


def fit_states(x: Tensor, y: Tensor, ridge: float, directions: int = 24) -> Tensor:
    """A worth for each hidden state, [H]: ridge regression on the main directions of what was left out."""
    x = x.double()
    spread = torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh[:directions]
    z = torch.cat([x @ spread.T, x.norm(dim=1, keepdim=True) * 0 + 1], 1)
    scale = z.std(0).clamp(min=1e-9).where(torch.arange(z.shape[1]) < directions, torch.ones(()).double())
    z = z / scale
    w = torch.linalg.solve(z.T @ z + ridge * torch.eye(z.shape[1]).double(), z.T @ y) / scale
    return spread.T @ w[:directions]


def by_sentence(r: Read, worth: Tensor) -> list[float]:
    """A sentence's worth: the mean of its tokens'."""
    n = max(r.sentence) + 1
    of = torch.tensor(r.sentence)
    total = torch.zeros(n).double().index_add_(0, of, worth.double())
    size = torch.zeros(n).double().index_add_(0, of, torch.tensor(r.counts).double())
    return (total / size).tolist()


def best(talk: Talk, tokenizer: Any, worth: Sequence[float], budget: int) -> Talk:
    """The sentences that are worth most for a token, as many as fit."""
    units = c.units_of(talk)
    order = sorted(range(len(units)), key=lambda i: -worth[i])
    return c.keep_units(units, c.fill_up(order, c.count_tokens(tokenizer, units), c.pinned(units), budget))


def best_words(r: Read, worth: Tensor, budget: int) -> Talk:
    """The same with single words; the last sentence stays whole."""
    last = max(r.sentence)
    must = {i for i, s in enumerate(r.sentence) if s == last or r.units[i].role == "system"}
    each = (worth.double() / torch.tensor(r.counts).double()).tolist()
    keep = c.fill_up(sorted(range(len(each)), key=lambda i: -each[i]), r.counts, must, budget)
    return c.keep_units(r.units, keep)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=60, help="dialogues")
    parser.add_argument("--facts", action="store_true", help="something told first is asked for last")
    parser.add_argument("--new", type=int, default=16, help="longest answer, in tokens")
    args = parser.parse_args()
    if not HH.exists():
        sys.exit(f"skipped: there is no {HH}")
    torch.set_num_threads(1)
    place = ModelConfig(name_or_path=args.model)
    tokenizer = load_tokenizer(place)
    model = load_causal_lm(place, decide_precision("cpu", "fp32"), tokenizer=tokenizer, trainable=False)
    begin, talks = time.process_time(), dialogues(tokenizer, args.count, args.facts)
    n, witnesses, missed, reads, states = len(talks), [], [], [], []
    for i, talk in enumerate(talks):
        witnesses.append(c.Witness(model, tokenizer, talk, args.new, seed=i))
        missed.append(c.missed(witnesses[i], talk, seed=i))
        reads.append(read(model, tokenizer, talk))
        units, rng = c.units_of(talk), random.Random(i)  # the selections that `missed` drew
        counts = c.count_tokens(tokenizer, units)
        rows = []
        for _ in range(len(missed[i].kl)):
            order = rng.sample(range(len(units)), len(units))
            rows.append(left_out_states(reads[i], c.fill_up(order, counts, c.pinned(units), round(rng.uniform(0.2, 0.8) * sum(counts))), sum(counts)))  # fmt: skip
        states.append(torch.stack(rows))
        print(f"{i + 1} of {n}, {time.process_time() - begin:.0f} s", file=sys.stderr, flush=True)
    totals = [sum(c.count_tokens(tokenizer, c.units_of(t))) for t in talks]
    print(f"{n} dialogues, {sum(totals) / n:.0f} tokens each")
    folds = [sorted(range(n), key=lambda i: random.Random(i).random())[k::3] for k in range(3)]
    for share in (0.5, 0.25):
        seen: dict[str, list[tuple[int, c.Noticed]]] = {}
        for fold in folds:
            train = [i for i in range(n) if i not in fold]
            rule = c.fit_sentence_rule([missed[i] for i in train])
            y = torch.cat([missed[i].kl / (missed[i].kl.mean() + 0.02) for i in train])
            worth = fit_states(torch.cat([states[i] for i in train]), y, 3.0)
            for i in fold:
                budget, r, talk = round(share * totals[i]), reads[i], talks[i]
                learnt = r.states.double() @ worth
                short = {
                    "attention, sentences": best(talk, tokenizer, by_sentence(r, r.looked_at), budget),
                    "attention, words": best_words(r, r.looked_at, budget),
                    "rule of ten features, sentences": rule.compress(talk, tokenizer, budget).messages,
                    "hidden states, learnt, sentences": best(talk, tokenizer, by_sentence(r, learnt), budget),
                    "hidden states, learnt, words (LLMLingua-2's idea)": best_words(r, learnt, budget),
                    "recency (truncation)": c.truncate(talk, tokenizer, budget),
                    "luck, sentences": random_choice(talk, tokenizer, budget, i),
                }
                for name, messages in short.items():
                    seen.setdefault(name, []).append((i, witnesses[i].notices(messages)))
        base = dict(seen["rule of ten features, sentences"])
        print(f"\nTo {share:.0%} of the tokens\n\n| chosen by | KL per token, nats | KL less the rule's | same likeliest token | tokens saved |\n|---|---|---|---|---|")  # fmt: skip
        for name, rows_ in seen.items():
            kl, gap = (mean_interval(x) for x in ([m.kl for _, m in rows_], [m.kl - base[i].kl for i, m in rows_]))
            agree = sum(m.agree for _, m in rows_) / len(rows_)
            saved = 1 - sum(m.tokens for _, m in rows_) / sum(witnesses[i].tokens for i, _ in rows_)
            print(f"| {name} | {kl.value:.3f} | {gap.value:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}] | {agree:.1%} | {saved:.0%} |", flush=True)  # fmt: skip
    print(f"{time.process_time() - begin:.0f} CPU seconds")


if __name__ == "__main__":
    main()
