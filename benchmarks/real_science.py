"""What the methods do to a real chat model: before and after, several seeds, one core; each run leaves a JSON file and isn't made twice.

    python benchmarks/real_science.py hh --model FOLDER          # reward model on HH-RLHF pairs, five folds, against a bag of words
    python benchmarks/real_science.py methods --model FOLDER     # SFT, DPO, KTO, GRPO, RLOO, PPO, SFT then PPO on word problems
    python benchmarks/real_science.py hack --model FOLDER        # reward learnt from few noisy pairs, maximised without a price of drift
    python benchmarks/real_science.py gsm8k --model FOLDER       # supervised fine-tuning on worked answers
    python benchmarks/real_science.py length --model FOLDER      # answers within a number of words, by GRPO
    python benchmarks/real_science.py formats --model FOLDER     # GRPO in the number format that `auto` takes, and in fp32
    python benchmarks/real_science.py report                     # the tables; --figure FOLDER draws the methods and over-optimisation

FOLDER is that of SmolLM2-135M-Instruct (`rlhf-nb get smollm2` says where it is), or of another chat model. `--only grpo ppo`, `--seeds 0`, `--out
FOLDER` (runs/real_science). HH-RLHF, GSM8K and MT-Bench are read from files (`--hh`, `--gsm8k`, `--plain`); what is missing is left out, and
said. Each run is a process with one thread; `precision=auto` picks the number format. Times are CPU seconds of that process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
ASKED, NEW = 128, 24  # held-out questions, and tokens of an answer at most
NUMBER = re.compile(r"\s*\d+\s*\.?\s*")

# method: (command, recipe, settings beside it). DPO and KTO learn from the model's own answers, SFT from demonstrations.
METHODS: dict[str, tuple[str, str, list[str]]] = {
    "sft": ("sft", "smollm2_sft", []),
    "dpo": ("dpo", "smollm2_dpo", ["steps=24"]),
    "kto": ("kto", "smollm2_dpo", ["steps=24", "mini_batch_size=32"]),
    "grpo": ("grpo", "smollm2_grpo", ["steps=12"]),
    "grpo_fp32": ("grpo", "smollm2_grpo", ["steps=12", "precision=fp32"]),
    "rloo": ("rloo", "smollm2_grpo", ["steps=12", "kl_coef=0.01"]),
    "rloo_free": ("rloo", "smollm2_grpo", ["steps=12", "kl_coef=0"]),
    "ppo": ("ppo", "smollm2_ppo", []),
    "sft_ppo": ("ppo", "smollm2_ppo", ["steps=6"]),
}
TINY = {"steps": 1, "mini_batch_size": 16, "token_budget": 2048}


class Lab:
    """One run's surroundings: where the model is, what is measured with, and how large.

    Args:
        args: of the command line.
        seed: of the run.
    """

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        self.args, self.seed, self.tiny, self.out = args, seed, args.tiny, Path(args.out)
        self.model, self.asked = str(args.model), 8 if args.tiny else (args.asked or ASKED)

    def words(self, folder: str, more: Sequence[str] = ()) -> list[str]:
        """Settings of every run, as on the command line."""
        tiny = [f"{k}={v}" for k, v in TINY.items()] if self.tiny else []
        own = [f"output_dir={self.out}/runs/{folder}-{self.seed}", f"seed={self.seed}", "console=false"]
        return [f"model.name_or_path={self.model}", *own, *more, *tiny]

    def trainer(self, kind: str, recipe: str, more: Sequence[str], folder: str, **parts: Any) -> Any:
        """A trainer of a recipe."""
        from rlhf_nb.cli.main import recipes
        from rlhf_nb.train.registry import get

        info = get(kind)
        words = self.words(folder, more)
        if self.tiny and "rollout_batch_size" in recipes()[recipe].read_text(encoding="utf-8"):
            words.append("rollout_batch_size=16")
        return info.trainer(info.config.load(recipes()[recipe], words), eval_rows=[], **parts)

    def base(self) -> tuple[Any, Any, Any]:
        """The model as it came, its tokenizer, and an engine's number format around it."""
        from rlhf_nb.config import ModelConfig
        from rlhf_nb.core import decide_precision
        from rlhf_nb.models.load import load_causal_lm, load_tokenizer
        from rlhf_nb.run.engine import Engine

        cfg = ModelConfig(name_or_path=self.model)
        tokenizer = load_tokenizer(cfg)
        net = load_causal_lm(cfg, decide_precision("cpu"), tokenizer=tokenizer)
        net.requires_grad_(False)
        return net, tokenizer, Engine(decide_precision("cpu", parameters=sum(p.numel() for p in net.parameters())))

    def texts(self, tokenizer: Any) -> dict[str, Any]:
        """Held-out texts for perplexity, tokenized: what is found of the better answers of HH-RLHF and the questions of MT-Bench."""
        import hh_folds

        from rlhf_nb.types import Completions

        few, found = 2 if self.tiny else 24, {}
        if Path(self.args.hh).exists():
            pairs = [
                r for r in hh_folds.pair_rows(Path(self.args.hh), tokenizer, 8 * few) if len(r["prompt_ids"]) < 192
            ]
            rows = pairs[:few]
            found["HH answers"] = Completions.from_lists(
                [r["prompt_ids"] for r in rows], [r["chosen_ids"][:96] for r in rows], tokenizer.pad_token_id
            )
        if Path(self.args.plain).exists():
            lines = [json.loads(x) for x in Path(self.args.plain).read_text(encoding="utf-8").splitlines()][: 2 * few]
            ids = [tokenizer(r["turns"][0], add_special_tokens=False)["input_ids"][:96] for r in lines]
            start = [tokenizer.bos_token_id or tokenizer.eos_token_id]
            found["MT-Bench questions"] = Completions.from_lists([start] * len(ids), ids, tokenizer.pad_token_id)
        return found

    def measure(self, model: Any, tokenizer: Any, engine: Any, context: Any = None) -> dict[str, Any]:
        """Held-out word problems, drift, perplexity of other texts, and forty questions, of a model.

        Args:
            model: the policy.
            tokenizer: of it.
            engine: whose number format holds.
            context: in which the model is the policy.
        """
        from contextlib import nullcontext

        from real_words import FACTS, fact_right

        from rlhf_nb.config import SamplingConfig
        from rlhf_nb.core import derive_seed
        from rlhf_nb.data.sources import collate_prompts, prompt_batch, tokenize_prompts
        from rlhf_nb.data.sums import sums_prompts
        from rlhf_nb.evaluate.policy import evaluate
        from rlhf_nb.rewards.answers import Number, completion_text
        from rlhf_nb.scoring.scores import completion_logps

        def only_number(prompts: Any, completions: Any, **columns: Any) -> list[float]:
            return [float(NUMBER.fullmatch(completion_text(c)) is not None) for c in completions]

        reference, began = self.base()[0], time.process_time()
        rows = tokenize_prompts(sums_prompts(self.asked, 0, True), tokenizer, 96, warn=False)
        prompts = collate_prompts(rows, tokenizer.pad_token_id)
        facts = FACTS[:4] if self.tiny else FACTS
        with engine.inference(), context or nullcontext():
            sums = evaluate(
                model, tokenizer, prompts, {"right": Number("answer"), "form": only_number}, reference,
                SamplingConfig(max_new_tokens=NEW), derive_seed(self.seed, "measure"), token_budget=1024,
            )  # fmt: skip
            said = evaluate(
                model, tokenizer, prompt_batch(tokenizer, [q for q, _ in facts]), {"form": only_number}, None,
                SamplingConfig(max_new_tokens=NEW), greedy=True,
            )  # fmt: skip
            texts = {}
            for name, c in self.texts(tokenizer).items():
                logps = completion_logps(model, c, token_budget=1024).logps
                texts[name] = -float(logps.sum() / c.completion_mask.sum())
        right = [fact_right(a, wanted) for a, (_, wanted) in zip(said.texts, facts)]
        return {
            "asked": self.asked, "right": int(sums.scores["right"].sum()), "form": int(sums.scores["form"].sum()),
            "kl": float(sums.kl["k1"].mean), "kl_error": float(sums.kl["k1"].stderr), "length": float(sums.lengths.float().mean()),
            "nats": texts, "facts": sum(right), "facts_asked": len(facts), "cpu_measure": time.process_time() - began,
            "marks": [int(x) for x in sums.scores["right"].tolist()], "facts_marks": [int(r) for r in right],
            "answers": sums.texts[:8], "said": said.texts,
        }  # fmt: skip


def take_steps(trainer: Any, keys: Sequence[str] = ()) -> dict[str, Any]:
    """All steps of a trainer, with their times and some of their numbers."""
    seconds, cpu, events = [], [], []
    for _ in range(trainer.total_steps):
        wall, begin = time.perf_counter(), time.process_time()
        event = trainer.train_step()
        if not event:
            break
        seconds.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - begin)
        events.append({k: event[k] for k in ("loss", "reward", *keys) if k in event})
        print(f"  step {trainer.step} of {trainer.total_steps}: {cpu[-1]:.1f} CPU s {events[-1]}", flush=True)
    return {
        "steps": len(cpu), "cpu": sum(cpu), "cpu_steps": cpu, "seconds_steps": seconds, "events": events,
        "peak_gb": harness.memory() * harness.MIB / 1e9, "precision": str(trainer.engine.precision.compute_dtype).removeprefix("torch."),
    }  # fmt: skip


# --- (a) reward model on HH-RLHF ---------------------------------------------------------------------------------------------


def hh(lab: Lab) -> dict[str, Any]:
    """Five folds over all pairs, heads on the body's states against a bag of words."""
    import hh_folds

    folder, data = lab.out / "states", Path(lab.args.hh)
    if not data.exists():
        return {"skipped": f"{data.name} isn't there (say where with --hh)"}
    spent = hh_folds.features(lab.model, data, folder, 60 if lab.tiny else None, 20 if lab.tiny else 100)
    found = spent | hh_folds.five_folds(folder)
    if lab.args.save is not None:
        found["saved"] = hh_folds.save_head(lab.model, folder, lab.args.save)
    return found


# --- (b), (c) methods on word problems ---------------------------------------------------------------------------------------


def before(lab: Lab) -> dict[str, Any]:
    """The model as it came."""
    net, tokenizer, engine = lab.base()
    return lab.measure(net, tokenizer, engine)


def own(lab: Lab) -> dict[str, Any]:
    """Answers of the model itself to training questions, eight to each, with what a verifier says of them."""
    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.core import derive_seed
    from rlhf_nb.data.sources import collate_prompts, tokenize_prompts
    from rlhf_nb.data.sums import sums_prompts
    from rlhf_nb.evaluate.policy import evaluate
    from rlhf_nb.rewards.answers import Number

    net, tokenizer, engine = lab.base()
    asked = sums_prompts(8 if lab.tiny else 128, derive_seed(lab.seed, "own"))
    prompts = collate_prompts(tokenize_prompts(asked, tokenizer, 96, warn=False), tokenizer.pad_token_id)
    begin = time.process_time()
    with engine.inference():
        found = evaluate(
            net, tokenizer, prompts, {"right": Number("answer")}, None, SamplingConfig(max_new_tokens=NEW), lab.seed, num_samples=8
        )  # fmt: skip
    marks = [bool(x) for x in found.scores["right"].tolist()]
    if lab.tiny:  # a model that knows nothing is never right
        marks = [i % 8 == 0 for i in range(len(marks))]
    answers = [a or " " for a in found.texts]
    rows = [
        {"prompt": asked[i // 8]["prompt"], "answer": a, "right": r} for i, (a, r) in enumerate(zip(answers, marks))
    ]
    return {"cpu": time.process_time() - begin, "right": sum(marks), "answers": rows}


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text if text.strip() else "-"}]


def own_rows(lab: Lab, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Pairs (own right answer against own wrong answer to the same question) or single answers with thumbs."""
    found = result(lab.out, "own", lab.seed)
    if found is None:
        raise SystemExit("own answers come first: methods --only own dpo kto")
    rows = found["answers"]
    groups = [rows[i : i + 8] for i in range(0, len(rows), 8)]
    mixed = [g for g in groups if any(r["right"] for r in g) and not all(r["right"] for r in g)]
    told = {
        "questions": len(groups),
        "questions_with_both": len(mixed),
        "cpu_own": found["cpu"],
        "own_right": found["right"],
    }
    if name == "kto":
        single = [
            {"prompt": r["prompt"], "completion": _said(r["answer"]), "label": r["right"]} for g in mixed for r in g
        ]
        return single, told | {"rows": len(single)}
    pairs = [
        {"prompt": a["prompt"], "chosen": _said(a["answer"]), "rejected": _said(b["answer"])}
        for g in mixed for a in g if a["right"] for b in g if not b["right"]
    ]  # fmt: skip
    return pairs, told | {"rows": len(pairs)}


def method(lab: Lab, name: str) -> dict[str, Any]:
    """One method, one seed: train as the recipe has it, then measure."""
    from contextlib import nullcontext

    kind, recipe, more = METHODS[name]
    parts: dict[str, Any] = {}
    told: dict[str, Any] = {}
    if name in ("dpo", "kto"):
        parts["rows"], told = own_rows(lab, name)
        if name == "kto":
            good = sum(r["label"] for r in parts["rows"])
            more = [*more, f"desirable_weight={(len(parts['rows']) - good) / good:.4g}"]
    if name == "sft_ppo":
        first = result(lab.out, "sft", lab.seed)
        if first is None:
            raise SystemExit("supervised fine-tuning comes first: methods --only sft sft_ppo")
        more = [*more, f"model.name_or_path={lab.out}/models/sft-{lab.seed}"]
        told = {"cpu_sft": first["cpu"]}
    trainer = lab.trainer(kind, recipe, more, name, **parts)
    found = take_steps(trainer, ("objective/kl", "rewards/accuracies", "completions/mean_length"))
    adapter = getattr(trainer.method, "policy_adapter", nullcontext)
    if name == "sft":
        trainer.save_model(lab.out / "models" / f"sft-{lab.seed}")
    return (
        told | found | {"after": lab.measure(trainer.method.model, trainer.method.tokenizer, trainer.engine, adapter())}
    )


# --- (d) over-optimisation ---------------------------------------------------------------------------------------------------

FLIPPED, WORDY = 0.25, "Write one short sentence about {}."


def topics(n: int, seed: int) -> list[dict[str, Any]]:
    """Requests for a sentence."""
    import random

    from real_words import TOPICS

    order = random.Random(seed).sample(TOPICS, len(TOPICS))
    return [{"prompt": [{"role": "user", "content": WORDY.format(t)}]} for t in (order * (n // len(order) + 1))[:n]]


def noisy_pairs(lab: Lab) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The model's own sentences in pairs; gold says which is better, and every fourth time the other one is taken."""
    import random

    from real_words import feeling, feelings

    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.data.sources import prompt_batch
    from rlhf_nb.evaluate.policy import evaluate

    net, tokenizer, engine = lab.base()
    asked = topics(4 if lab.tiny else 64, lab.seed)
    with engine.inference():
        found = evaluate(
            net, tokenizer, prompt_batch(tokenizer, [r["prompt"] for r in asked]), {"gold": feelings}, None,
            SamplingConfig(max_new_tokens=NEW), lab.seed, num_samples=6,
        )  # fmt: skip
    rng, rows = random.Random(lab.seed), []
    for i, row in enumerate(asked):
        answers = sorted(dict.fromkeys(a for a in found.texts[6 * i : 6 * i + 6] if a.strip()), key=feeling)
        for low, high in zip(answers[:3], answers[:-4:-1]):
            if feeling(low) < feeling(high) or (lab.tiny and low != high):
                good, bad = (low, high) if rng.random() < FLIPPED else (high, low)
                rows.append({"prompt": row["prompt"], "chosen": _said(good), "rejected": _said(bad)})
    return rows, {"pairs": len(rows), "gold_before": found.means["gold"], "gold_std_before": found.stds["gold"]}


def sentences(lab: Lab, net: Any, tokenizer: Any, engine: Any, proxy: Any, context: Any) -> dict[str, float]:
    """Two fresh answers to each topic: gold and proxy, how well one orders like the other, and drift."""
    import torch
    from real_words import feelings

    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.core import derive_seed
    from rlhf_nb.data.sources import prompt_batch
    from rlhf_nb.evaluate.policy import evaluate

    asked, reference = topics(4 if lab.tiny else 64, lab.seed), lab.base()[0]
    with engine.inference(), context:
        found = evaluate(
            net, tokenizer, prompt_batch(tokenizer, [r["prompt"] for r in asked]), {"gold": feelings, "proxy": proxy}, reference,
            SamplingConfig(max_new_tokens=NEW), derive_seed(lab.seed, "sentences"), num_samples=2, token_budget=1024,
        )  # fmt: skip
    gold, learnt = found.scores["gold"], found.scores["proxy"]
    apart = [g[0] != g[1] for g in gold.view(-1, 2)]
    same = [(g[0] > g[1]) == (p[0] > p[1]) for g, p in zip(gold.view(-1, 2), learnt.view(-1, 2))]
    together = float(torch.corrcoef(torch.stack([gold, learnt]))[0, 1])
    return {
        "answers": len(gold), "gold": found.means["gold"], "gold_error": found.stds["gold"] / len(gold) ** 0.5, "gold_std": found.stds["gold"],
        "proxy": found.means["proxy"], "correlation": together if together == together else 0.0, "pairs_apart": int(sum(apart)),
        "pairs_right": int(sum(s for s, a in zip(same, apart) if a)), "kl": float(found.kl["k1"].mean), "kl_error": float(found.kl["k1"].stderr),
        "length": float(found.lengths.float().mean()), "finished": found.finished,
    }  # fmt: skip


def hack(lab: Lab) -> dict[str, Any]:
    """A reward model learnt from noisy pairs, and GRPO that maximises it at no price; gold is looked at, never learnt from."""
    from contextlib import nullcontext

    from real_words import feelings

    from rlhf_nb.rewards.base import RewardModelFn, Rewards

    rows, told = noisy_pairs(lab)
    shape = ["data.path=null", "data.max_prompt_length=64", "data.max_length=128", "optimizer.schedule=linear"]
    reward = lab.trainer(
        "reward", "smollm2_sft", [*shape, "steps=16", "optimizer.lr=3e-4", "baseline_pairs=0"], "reward", rows=rows
    )
    learnt = take_steps(reward, ("rewards/accuracies",))
    reward.method.finish_run()
    drift = ["kl_coef=1e-6", f"steps={lab.args.steps or 40}", "rollout_batch_size=32", "mini_batch_size=32"]
    drift += [
        "optimizer.lr=1e-3",
        "optimizer.schedule=constant_with_warmup",
        "optimizer.warmup_steps=4",
        "reward=null",
        "data.max_prompt_length=64",
    ]
    proxy = RewardModelFn(reward.members[0].eval(), token_budget=1024)
    parts = Rewards([proxy, feelings], [1.0, 0.0], ["proxy", "gold"])
    policy = lab.trainer("grpo", "smollm2_grpo", drift, "hack", reward=parts, rows=topics(64, lab.seed))
    own = policy.method
    adapter = getattr(own, "policy_adapter", nullcontext)
    measured = lambda: sentences(lab, own.model, own.tokenizer, policy.engine, proxy, adapter())
    first = measured()
    found = take_steps(
        policy, ("objective/kl", "objective/kl_stderr", "rewards/proxy", "rewards/gold", "completions/mean_length")
    )
    ends = {"first": first, "last": measured()}
    return told | {"reward": learnt} | found | ends | {"answers": [r["completion"] for r in own.samples()]}


# --- (e), (f) lengths and GSM8K ----------------------------------------------------------------------------------------------

LIMIT = "{} Answer in at most {} words."


def length(lab: Lab) -> dict[str, Any]:
    """GRPO on answers within a number of words: 1 for an answer that ends by itself and keeps the limit."""
    from real_words import TOPICS

    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.data.sources import prompt_batch
    from rlhf_nb.evaluate.policy import evaluate
    from rlhf_nb.rewards.answers import completion_text

    def within(prompts: Any, completions: Any, limit: Sequence[int], **columns: Any) -> list[float]:
        found = [len(completion_text(c).split()) for c in completions]
        return [float(0 < n <= most) for n, most in zip(found, limit)]

    def rows(names: Sequence[str]) -> list[dict[str, Any]]:
        asked = [(t, n) for n in (5, 8, 12) for t in names]
        return [
            {"prompt": [{"role": "user", "content": LIMIT.format(f"What do you like about {t}?", n)}], "limit": n}
            for t, n in asked
        ]

    train, held = rows(TOPICS[:-20]), rows(TOPICS[-20:])
    more = [
        "data.path=null",
        "reward=null",
        f"steps={lab.args.steps or 10}",
        "sampling.max_new_tokens=40",
        "rollout_batch_size=32",
        "mini_batch_size=32",
    ]
    trainer = lab.trainer("grpo", "smollm2_grpo", [*more, "missing_eos=0.0"], "length", reward=within, rows=train)
    model, tokenizer, engine = trainer.method.model, trainer.method.tokenizer, trainer.engine
    held = held[:4] if lab.tiny else held

    def ask() -> tuple[int, float, list[str]]:
        prompts = prompt_batch(tokenizer, [r["prompt"] for r in held])
        with engine.inference():
            found = evaluate(
                model, tokenizer, prompts, {"any": lambda prompts, completions: [0.0] * len(completions)}, None,
                SamplingConfig(max_new_tokens=40), lab.seed,
            )  # fmt: skip
        ended = found.rollout.finished.tolist()
        kept = sum(e and 0 < len(t.split()) <= r["limit"] for t, r, e in zip(found.texts, held, ended))
        return kept, sum(len(t.split()) for t in found.texts) / len(held), found.texts[:: max(1, len(held) // 9)]

    first = ask()
    spent = take_steps(trainer, ("objective/scores", "completions/mean_length"))
    last = ask()
    kept = {"asked": len(held), "before": first[0], "after": last[0]}
    return kept | {"words": [first[1], last[1]], "answers": [first[2], last[2]]} | spent


def gsm8k(lab: Lab) -> dict[str, Any]:
    """Supervised fine-tuning on worked answers of GSM8K; greedy answers to held-out problems before and after."""
    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.data.sources import prompt_batch
    from rlhf_nb.evaluate.policy import evaluate
    from rlhf_nb.rewards.answers import Number

    data = Path(lab.args.gsm8k)
    if not data.exists():
        return {"skipped": f"{data.name} isn't there (say where with --gsm8k)"}
    with gzip.open(data, "rt", encoding="utf-8") as f:
        lines = [json.loads(x) for x in f]
    turn = lambda r: [{"role": "user", "content": r["question"]}]
    held, lines = lines[: lab.asked], [r for r in lines[lab.asked :] if len(r["answer"]) < 400]
    rows = [{"prompt": turn(r), "completion": _said(re.sub(r"<<.*?>>", "", r["answer"]))} for r in lines]
    more = ["data.path=null", "data.max_prompt_length=192", "data.max_length=384", f"steps={lab.args.steps or 24}"]
    trainer = lab.trainer("sft", "smollm2_sft", more, "gsm8k", rows=rows[:2000])
    model, tokenizer, engine = trainer.method.model, trainer.method.tokenizer, trainer.engine
    sampling = SamplingConfig(max_new_tokens=16 if lab.tiny else 160)

    def ask() -> tuple[int, float, list[str]]:
        prompts = prompt_batch(tokenizer, [turn(r) for r in held])
        prompts.columns = {"answer": [r["answer"] for r in held]}
        with engine.inference():
            found = evaluate(model, tokenizer, prompts, {"right": Number("answer")}, None, sampling, greedy=True)
        return int(found.scores["right"].sum()), found.finished, found.texts[:3]

    first = ask()
    spent = take_steps(trainer)
    last = ask()
    return {
        "asked": len(held),
        "before": first[0],
        "after": last[0],
        "finished": [first[1], last[1]],
        "answers": [first[2], last[2]],
    } | spent


# --- (g) number formats ------------------------------------------------------------------------------------------------------


def toy_format(lab: Lab, precision: str) -> dict[str, Any]:
    """The toy world's three stages in a number format; bf16 is one that it never takes by itself."""
    import tempfile

    import toy_science

    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        few = (1, True, (2, 16)) if lab.tiny else (40, True, None)
        found = toy_science.one_seed(lab.seed, folder, precision, *few)
    return found | {"cpu": time.process_time() - began}


# --- the queue ---------------------------------------------------------------------------------------------------------------

JOBS: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "hh": hh, "before": before, "own": own, "hack": hack, "gsm8k": gsm8k, "length": length, "toy_fp32": lambda lab: toy_format(lab, "fp32"), "toy_bf16": lambda lab: toy_format(lab, "bf16"),
    **{name: (lambda lab, name=name: method(lab, name)) for name in METHODS},
}  # fmt: skip
PARTS = {
    "hh": ["hh"],
    "methods": ["before", "own", *(m for m in METHODS if m != "grpo_fp32")],
    "hack": ["hack"],
    "gsm8k": ["gsm8k"],
    "length": ["length"],
    "formats": ["grpo", "grpo_fp32", "toy_fp32", "toy_bf16"],
}


def result(out: Path, name: str, seed: int) -> dict[str, Any] | None:
    """What a run found, if it was made."""
    path = out / f"{name}-{seed}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def queue(args: argparse.Namespace, names: Sequence[str], seeds: Sequence[int], script: str = __file__) -> None:
    """Runs, seed by seed, one after the other, each in a process of its own; those that were made are left alone.

    Args:
        args: of the command line.
        names: of the runs.
        seeds: for each of them.
        script: that makes one of them when it is called with `--worker NAME SEED`.

    Raises:
        SystemExit: a run failed; what it said is in its log.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    for seed in seeds:
        for name in names:
            if result(args.out, name, seed) is not None:
                continue
            job = [sys.executable, script, *sys.argv[1:], "--worker", name, str(seed)]
            began = time.perf_counter()
            with (args.out / f"{name}-{seed}.log").open("w") as log:
                code = subprocess.run(job, env=env, stdout=log, stderr=log, check=False).returncode
            if code:
                raise SystemExit(f"{name}, seed {seed}, failed: see {args.out}/{name}-{seed}.log")
            print(f"{name}, seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)


def work(args: argparse.Namespace, jobs: dict[str, Callable[[Lab], dict[str, Any]]]) -> None:
    """One run, in this process."""
    import torch

    name, seed = args.worker[0], int(args.worker[1])
    torch.set_num_threads(1)
    found = jobs[name](Lab(args, seed))
    path = args.out / f"{name}-{seed}.json"
    path.with_suffix(".part").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".part").rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*PARTS, "report"])
    parser.add_argument("--model", type=Path, help="folder of a chat model")
    parser.add_argument("--out", type=Path, default=Path("runs/real_science"))
    parser.add_argument("--only", nargs="+", choices=list(JOBS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--asked", type=int, help=f"held-out questions ({ASKED})")
    parser.add_argument("--steps", type=int, help="hack, length, gsm8k: fewer or more than the default")
    parser.add_argument("--hh", type=Path, default=harness.HH)
    parser.add_argument("--gsm8k", type=Path, default=SHARED / "gsm8k_train.jsonl.gz")
    parser.add_argument("--plain", type=Path, default=SHARED / "mt_bench_questions.jsonl")
    parser.add_argument(
        "--save", type=Path, help="hh: folder for a reward model from all pairs; plain transformers loads it"
    )
    parser.add_argument("--figure", type=Path, help="report: folder for the figure of over-optimisation")
    parser.add_argument("--tiny", action="store_true", help="one step of each and few questions, to see that all runs")
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.command == "report":
        import real_report

        return real_report.report(args.out, args.figure)
    if args.model is None or not (args.model / "config.json").exists():
        raise SystemExit(
            "skipped: no chat model there; fetch one (rlhf-nb get smollm2) and say where it is: --model FOLDER"
        )
    if args.worker:
        return work(args, JOBS)
    names = [n for n in PARTS[args.command] if not args.only or n in args.only]
    queue(args, names, [0] if args.command == "hh" else args.seeds)


if __name__ == "__main__":
    main()
