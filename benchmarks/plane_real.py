"""The real half of `plane.py`: a chat model's short answers, a gold that is a rule (`real_words.worth`), and reward models that are heads on the model's own layers.

People (by a formula) compare answers of the model with noise that grows as answers get alike. Topics that are
asked for best-of-n and held-out pairs are in no training pair.
"""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from typing import Any

from plane_toy import best_of, fresh
from real_science import result
from real_words import ABOUT, TOPICS, worth, worth_of

NEW, HELD = 24, 16  # tokens of an answer at most; topics that are held out


def requests(seed: int, held_out: bool, tiny: bool = False) -> list[dict[str, Any]]:
    """Prompts with their topics; those that are held out share no topic with the others."""
    order = random.Random(seed).sample(TOPICS, len(TOPICS))
    topics = order[:HELD] if held_out else order[HELD:]
    topics = topics[: 4 if held_out else 8] if tiny else topics
    return [{"prompt": [{"role": "user", "content": a.format(t)}], "topic": t} for a in ABOUT for t in topics]


def draw(lab: Any) -> dict[str, Any]:
    """Answers of the model as it came: 64 to each held-out prompt, 12 to each training prompt."""
    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.core import derive_seed
    from rlhf_nb.data.sources import prompt_batch
    from rlhf_nb.rollout.backends import make_sampler

    net, tokenizer, engine = lab.base()
    sampling, out, began = SamplingConfig(max_new_tokens=NEW), dict[str, Any](), time.process_time()
    for name, n in (("held", 64), ("train", 12)):
        rows, texts = requests(lab.seed, name == "held", lab.tiny), list[str]()
        each = max(1, 256 // n)
        for i in range(0, len(rows), each):
            asked = prompt_batch(tokenizer, [r["prompt"] for r in rows[i : i + each]])
            with engine.inference():
                found = make_sampler(sampling).generate(
                    net, asked, sampling, tokenizer=tokenizer, seed=derive_seed(lab.seed, name, i), num_samples=n
                )
            texts += found.texts
            print(f"  {name}: {len(texts)} answers, {time.process_time() - began:.0f} CPU s", flush=True)
        out[name] = {"n": n, "topics": [r["topic"] for r in rows], "texts": texts}
    return out | {"cpu": time.process_time() - began}


# --- reward models -----------------------------------------------------------------------------------------------------------

LAYERS, PAIRS = (
    (4, 10, 20),
    (60, 250, 1000),
)  # layers of the body that a reward model keeps, and pairs that its head is fitted to
SHARP = 2.0  # how much a unit of gold matters to those who compare: P(better one chosen) = σ(SHARP · gap)


def written(text: str) -> str:
    """An answer as reward models see it: an empty one has no token to be scored at, and is a dash."""
    return text if text.strip() else "-"


def _tokens(lab: Any, tokenizer: Any, name: str) -> tuple[list[list[int]], Any]:
    """Prompts with answers as tokens, and the answers' gold [prompts, answers to each]."""
    import torch

    from rlhf_nb.data.sources import tokenize_sft

    found = result(lab.out, "draw", lab.seed)
    if found is None:
        raise SystemExit("answers come first: real --only draw heads")
    drawn, rows = found[name], requests(lab.seed, name == "held", lab.tiny)
    n = drawn["n"]
    said = [[{"role": "assistant", "content": written(t)}] for t in drawn["texts"]]
    asked = [{"prompt": rows[i // n]["prompt"], "completion": a} for i, a in enumerate(said)]
    ids = [r["prompt_ids"] + r["completion_ids"] for r in tokenize_sft(asked, tokenizer, warn=False)]
    marks = [worth_of(drawn["topics"][i // n], t) for i, t in enumerate(drawn["texts"])]
    return ids, torch.tensor(marks).view(-1, n)


def compared(lab: Any, gold: Any) -> list[tuple[int, int]]:
    """Pairs of answers to one prompt, each with the next one, by their places: chosen, rejected. Who compares errs where gold is near."""
    rng, pairs = random.Random(lab.seed), list[tuple[int, int]]()
    prompts, n = gold.shape
    for p in range(prompts):
        for k in range(n):
            a, b = p * n + k, p * n + (k + 1) % n
            gap = float(gold.view(-1)[a] - gold.view(-1)[b])
            pairs.append((a, b) if rng.random() < 1 / (1 + math.exp(-SHARP * gap)) else (b, a))
    rng.shuffle(pairs)
    return pairs


def heads(lab: Any) -> dict[str, Any]:
    """Nine reward models, their accuracy on answers about other topics, and best-of-n by each of them."""
    import torch

    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.scoring.head import split_head
    from rlhf_nb.train.fit_head import Fitted, answer_states, cut_body, fit_head, set_heads

    net, tokenizer, engine = lab.base()
    began, body = time.process_time(), split_head(net)[0]
    layers = [n for n in LAYERS if n <= len(body.layers)] or [len(body.layers)]
    cut_body(body, max(layers))
    states, gold = dict[str, Any](), dict[str, Any]()
    for name in ("train", "held"):
        ids, gold[name] = _tokens(lab, tokenizer, name)
        with torch.no_grad(), engine.inference():
            states[name] = answer_states(body, ids, "last", True, 2048)[[n - 1 for n in layers]]
        print(f"  states of {len(ids)} answers: {time.process_time() - began:.0f} CPU s", flush=True)
    pairs, held = compared(lab, gold["train"]), gold["held"]
    chosen, rejected = (torch.tensor([p[i] for p in pairs]) for i in (0, 1))
    apart = gold["train"].view(-1)[chosen] - gold["train"].view(-1)[rejected]
    out: dict[str, Any] = {
        "pairs": len(pairs), "labels_right": float((apart > 0).double().mean()), "gold_mean": float(held.mean()), "gold_std": float(held.std()), "proxies": {},
    }  # fmt: skip
    for i, depth in enumerate(layers):
        for n in PAIRS:
            x = (states["train"][i][chosen] - states["train"][i][rejected])[:n]
            fit = fit_head(x[None])
            scores = (states["held"][i] @ fit.weight).view(held.shape)
            a, b = (scores[:, k::2].reshape(-1) for k in (0, 1))
            better = (held[:, 0::2] - held[:, 1::2]).reshape(-1)
            right = ((a > b) == (better > 0))[better.abs() > 1e-6].double()
            out["proxies"][f"{depth}_{n}"] = {
                "accuracy": float(right.mean()),
                "held_pairs": len(right),
                "ridge": fit.ridge,
            } | best_of(scores, held)
            member = RewardModel.from_policy(net)
            set_heads([member], Fitted(fit.weight[None], {"layers": depth}), cut=True)
            member.save(home(lab) / f"rm-{depth}-{n}", tokenizer)
            print(
                f"  {depth} layers, {n} pairs: {float(right.mean()):.3f}, {time.process_time() - began:.0f} CPU s",
                flush=True,
            )
    _keep_pairs(lab, held)
    return out | {"cpu": time.process_time() - began}


def _keep_pairs(lab: Any, marks: Any) -> None:
    """Held-out answers in gold's order, as pairs that `rlhf-nb attack` reads."""
    drawn, asked = result(lab.out, "draw", lab.seed)["held"], requests(lab.seed, True, lab.tiny)  # type: ignore[index]
    n, flat, lines = drawn["n"], marks.view(-1).tolist(), list[str]()
    for i in range(0, len(flat), 2):
        good, bad = (i, i + 1) if flat[i] >= flat[i + 1] else (i + 1, i)
        said = {
            k: [{"role": "assistant", "content": written(drawn["texts"][j])}]
            for k, j in (("chosen", good), ("rejected", bad))
        }
        lines.append(json.dumps({"prompt": asked[i // n]["prompt"], **said}))
    (home(lab) / "held_pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def home(lab: Any) -> Path:
    """Of a seed's models."""
    return Path(lab.out) / f"real-{lab.seed}"


# --- training against them ---------------------------------------------------------------------------------------------------


def proxy_of(lab: Any, layers: int, pairs: int) -> Any:
    """A saved reward model as a reward function of texts: the same tokens as those that its head was fitted to."""
    from rlhf_nb.bench.attacking import scorer_of

    found = result(lab.out, "heads", lab.seed)
    if found is None:
        raise SystemExit("reward models come first: real --only draw heads")
    score = scorer_of(str(home(lab) / f"rm-{layers}-{pairs}"))[0]
    return lambda prompts, completions, **columns: score(prompts, [written(c) for c in completions])


def grpo(lab: Any, layers: int, pairs: int) -> dict[str, Any]:
    """GRPO that maximises a reward model at next to no price of drift; each step's answers are measured as they are drawn."""
    from real_science import take_steps

    from rlhf_nb.rewards.base import Rewards

    words = [
        "data.path=null", "reward=null", "kl_coef=1e-6", f"steps={lab.args.steps or 20}", "rollout_batch_size=32", "mini_batch_size=32", "data.max_prompt_length=64",
        "optimizer.lr=5e-4", "optimizer.schedule=constant_with_warmup", "optimizer.warmup_steps=2", f"sampling.max_new_tokens={NEW}",
    ]  # fmt: skip
    name = f"grpo-{layers}-{pairs}"
    fresh(Path(lab.out) / "runs" / f"{name}-{lab.seed}")
    parts = Rewards([proxy_of(lab, layers, pairs), worth], [1.0, 0.0], ["proxy", "gold"])
    trainer = lab.trainer("grpo", "smollm2_grpo", words, name, reward=parts, rows=requests(lab.seed, False, lab.tiny))
    keys = {"kl": "objective/kl", "gold": "rewards/gold", "proxy": "rewards/proxy", "length": "completions/mean_length"}
    found = take_steps(trainer, list(keys.values()))
    curve = {k: [float(e[name]) for e in found["events"]] for k, name in keys.items()}
    return curve | {"cpu": found["cpu"], "said": [r["completion"] for r in trainer.method.samples()]}


def dpo(lab: Any, layers: int, pairs: int) -> dict[str, Any]:
    """DPO at a small β on the pairs of a reward model, measured on held-out topics every sixth step."""
    from contextlib import nullcontext

    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.data.sources import prompt_batch
    from rlhf_nb.evaluate.policy import evaluate

    _, marks = _tokens(lab, lab.base()[1], "train")
    drawn, asked = (result(lab.out, "draw", lab.seed) or {})["train"], requests(lab.seed, False, lab.tiny)
    said = lambda i: [{"role": "assistant", "content": written(drawn["texts"][i])}]
    rows = [
        {"prompt": asked[a // drawn["n"]]["prompt"], "chosen": said(a), "rejected": said(b)}
        for a, b in compared(lab, marks)[:pairs]
    ]
    name = f"dpo-{layers}-{pairs}"
    fresh(Path(lab.out) / "runs" / f"{name}-{lab.seed}")
    words = [
        "data.path=null",
        "data.max_prompt_length=64",
        "data.max_length=128",
        "mini_batch_size=8",
        "steps=24",
        "beta=0.03",
    ]
    words += ["optimizer.lr=3e-4", "optimizer.schedule=constant_with_warmup", "optimizer.warmup_steps=2"]
    trainer = lab.trainer("dpo", "smollm2_dpo", words, name, rows=rows)
    began, reference, own = time.process_time(), lab.base()[0], trainer.method
    held = requests(lab.seed, True, lab.tiny)
    prompts = prompt_batch(own.tokenizer, [r["prompt"] for r in held])
    judges, found = {"gold": worth, "proxy": proxy_of(lab, layers, pairs)}, {"kl": [], "gold": [], "proxy": []}
    sampling = SamplingConfig(max_new_tokens=NEW)
    for step in range(trainer.total_steps + 1):
        if step % 6 == 0 or step == trainer.total_steps:
            context = getattr(own, "policy_adapter", nullcontext)
            with trainer.engine.inference(), context():
                now = evaluate(
                    own.model, own.tokenizer, prompts, judges, reference, sampling, step, num_samples=2, token_budget=1024
                )  # fmt: skip
            for k, v in now.summary().items():
                if k in found:
                    found[k].append(v)
            print(f"  step {step}: {now.summary()}, {time.process_time() - began:.0f} CPU s", flush=True)
        if step < trainer.total_steps:
            trainer.train_step()
    return found | {"cpu": time.process_time() - began, "said": now.texts[:6]}
