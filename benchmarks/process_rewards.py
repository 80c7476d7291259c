"""Best of 16 by a process reward against by an outcome reward, on sums written out leg by leg (notebook 237).

`python benchmarks/process_rewards.py --seeds 0 1 2` trains, for each seed, a policy on a speaker who slips, draws answers to training sums, labels
their steps by rollouts, and trains a process and an outcome reward model on the same answers: the same start (untrained: from the policy both learn more slowly in this world), optimizer, number of
updates and tokens, only the labels differ (one for each step, or one for the end). The number of passes is chosen for each of the two by the loss on
validation answers, which nobody trains on. Then 16 answers to each held-out sum are drawn, and each model keeps one.

Two further outcome models are there for fairness: one trained on pairs with the Bradley-Terry loss on the same answers, and one that is given as many
more answers as the rollouts for the steps' labels cost (`--equal-tokens`).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlhf_nb.config import SamplingConfig
from rlhf_nb.data import legs
from rlhf_nb.data.sources import prompt_batch
from rlhf_nb.data.steps import StepRule
from rlhf_nb.evaluate.policy import vote_accuracy
from rlhf_nb.losses.process import AGGREGATES, aggregate_steps
from rlhf_nb.rewards.process import ProcessReward
from rlhf_nb.rollout.sampler import sample
from rlhf_nb.rollout.steps import label_steps
from rlhf_nb.train.process import ProcessConfig, ProcessTrainer
from rlhf_nb.train.reward import RewardConfig, RewardTrainer
from rlhf_nb.train.sft import SFTConfig, SFTTrainer
from rlhf_nb.types import Rollout

SAMPLING = SamplingConfig(max_new_tokens=40)
RULE = StepRule(";")
TOK = legs.build_tokenizer()
Rows = list[dict[str, Any]]


def policy(seed: int, folder: Path, rows: int) -> Any:
    """A model that was fine-tuned on the speaker's answers."""
    model = legs.build_model(seed)
    config = SFTConfig.preset(
        "toy", output_dir=str(folder / "sft"), console=False, epochs=1.5, mini_batch_size=64, token_budget=4096, seed=seed,
        optimizer={"lr": 5e-3, "schedule": "cosine", "warmup_steps": 20},
    )  # fmt: skip
    SFTTrainer(config, model, TOK, legs.legs_demonstrations(rows, seed)).fit(overwrite=True)
    return model


def draw(model: Any, prompts: list[str], n: int, seed: int) -> Rollout:
    """n answers to each prompt."""
    return sample(model, prompt_batch(TOK, prompts), SAMPLING, tokenizer=TOK, seed=seed, num_samples=n)


def outcome_rows(answers: Rows) -> Rows:
    """Each answer as one step, whose label is whether the result is right."""
    texts, prompts = [r["completion"] for r in answers], [r["prompt"] for r in answers]
    marks = legs.right_result(prompts, texts)
    return [{"prompt": p, "completions": [t], "labels": [m > 0.5]} for p, t, m in zip(prompts, texts, marks)]


def judge(
    name: str, model: Any, rows: Rows, held: Rows, passes: list[float], folder: Path, seed: int, rule: StepRule
) -> tuple[ProcessReward, dict[str, Any]]:
    """A model trained on labelled steps for each number of passes; the one with the least validation loss."""
    best: tuple[float, ProcessReward, dict[str, Any]] | None = None
    for epochs in passes:
        config = ProcessConfig.preset(
            "toy", output_dir=str(folder / f"{name}-{epochs:g}"), console=False, epochs=epochs, mini_batch_size=32, seed=seed,
            boundary={"separator": rule.separator}, optimizer={"lr": 2e-3, "schedule": "linear", "warmup_steps": 10},
        )  # fmt: skip
        trainer = ProcessTrainer(config, copy.deepcopy(model), TOK, rows, held)
        history = trainer.fit(overwrite=True)
        found = {k.removeprefix("eval/"): v for k, v in history.evals[-1].items() if k.startswith("eval/")}
        if best is None or found["loss"] < best[0]:
            best = (
                found["loss"],
                ProcessReward(trainer.net, TOK, name=name),
                found | {"passes": epochs, "updates": len(history)},
            )
    assert best is not None
    return best[1], best[2]


def pairs_of(answers: Rows) -> Rows:
    """Every right answer against a wrong one to the same prompt, each used once."""
    by_prompt: dict[str, tuple[list[str], list[str]]] = {}
    for r, mark in zip(answers, legs.right_result([r["prompt"] for r in answers], [r["completion"] for r in answers])):
        by_prompt.setdefault(r["prompt"], ([], []))[mark < 0.5].append(r["completion"])
    return [
        {"prompt": p, "chosen": a, "rejected": b}
        for p, (right, wrong) in by_prompt.items()
        for a, b in zip(right, wrong)
    ]


def one_seed(seed: int, args: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """All numbers of one seed."""
    start = time.process_time()
    model = policy(seed, folder, args.demonstrations)
    asked = [s.text for s in legs.sums(args.prompts + args.validation, 1000 + seed)]
    drawn = draw(model, asked, args.answers, seed)
    answers = [
        {"prompt": p, "completion": t or "="} for p, t in zip(drawn.prompts, drawn.texts)
    ]  # an empty answer has no step
    cut = args.prompts * args.answers
    labelled = label_steps(
        model, TOK, answers, legs.right_result, n=args.rollouts, sampling=SAMPLING, rule=RULE, seed=seed
    )
    wrote = int(drawn.completion_lens[:cut].sum())
    share = cut / len(answers)
    say(
        f"seed {seed}: {cut} answers ({wrote:,} tokens), rollouts for their labels {int(labelled.tokens * share):,} tokens; CPU {time.process_time() - start:.0f} s"
    )
    judges, reports, fresh = {}, {}, legs.build_model(seed + 100)
    passes = [float(x) for x in args.passes]
    whole = StepRule("\n")
    steps = labelled.rows
    judges["process"], reports["process"] = judge(
        "process", fresh, steps[:cut], steps[cut:], passes, folder, seed, RULE
    )
    ends = outcome_rows(answers)
    judges["outcome"], reports["outcome"] = judge("outcome", fresh, ends[:cut], ends[cut:], passes, folder, seed, whole)
    hard = [legs.step_row(r["prompt"], r["completion"], soft=False) for r in answers]
    judges["process, told"], reports["process, told"] = judge(
        "told", fresh, hard[:cut], hard[cut:], passes, folder, seed, RULE
    )
    if args.equal_tokens:
        many = math.ceil(args.prompts * (1 + labelled.tokens * share / wrote))
        more = draw(model, [s.text for s in legs.sums(many, 5000 + seed)], args.answers, seed + 77)
        rows = outcome_rows([{"prompt": p, "completion": t or "="} for p, t in zip(more.prompts, more.texts)])
        say(f"seed {seed}: an outcome model on {len(rows)} answers")
        judges["outcome, equal tokens"], reports["outcome, equal tokens"] = judge(
            "more", fresh, rows, ends[cut:], [1.0], folder, seed, whole
        )
    config = RewardConfig.preset("toy", output_dir=str(folder / "pairs"), console=False, epochs=max(passes), seed=seed, model={"name_or_path": "legs"},
                                 data={"path": "legs", "max_length": 96, "max_prompt_length": 48}, optimizer={"lr": 2e-3, "schedule": "linear", "warmup_steps": 10})  # fmt: skip
    trainer = RewardTrainer(config, copy.deepcopy(fresh), TOK, pairs_of(answers[:cut]), pairs_of(answers[cut:]))
    reports["outcome, pairs"] = {
        k.removeprefix("eval/"): v for k, v in trainer.fit(overwrite=True).evals[-1].items() if k.startswith("eval/")
    }
    tests = [s.text for s in legs.sums(args.tests, 9000, True)]
    final = draw(model, tests, args.n, seed + 1)
    right = torch.tensor(legs.right_result(final.prompts, final.texts)).view(-1, args.n)
    way = torch.tensor(legs.right_way(final.prompts, final.texts)).view(-1, args.n)
    pick = torch.arange(len(tests))

    def kept(scores: torch.Tensor) -> dict[str, float]:
        best = scores.view(-1, args.n).argmax(1)
        return {"right": float(right[pick, best].mean()), "right way": float(way[pick, best].mean())}

    out: dict[str, Any] = {"one answer": {"right": float(right.mean()), "right way": float(way.mean())}, "any of them": {"right": float(right.max(1).values.mean()), "right way": float(way.max(1).values.mean())}}  # fmt: skip
    ended = [t.rpartition("=")[2] for t in final.texts]
    out["majority"] = {"right": vote_accuracy(ended, [str(legs.read_sum(p).answer) for p in tests], args.n)}
    for name, reward in judges.items():
        values, marks = reward.steps(final)
        for how in AGGREGATES if name.startswith("process") else ("last",):
            out[f"{name}, {how}" if name.startswith("process") else name] = kept(aggregate_steps(values, marks, how))
    out["outcome, pairs"] = kept(trainer.predict(final).mean.cpu())
    for name, line in out.items():
        say(f"  {name:24s} " + "  ".join(f"{k} {v:6.1%}" for k, v in line.items()))
    out["reports"], out["cpu_s"] = reports, round(time.process_time() - start)
    say(
        f"  {json.dumps({k: {a: round(b, 3) for a, b in v.items()} for k, v in reports.items()})}\n  CPU {out['cpu_s']} s"
    )
    return out


def main() -> None:
    """Runs, and says what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--demonstrations", type=int, default=12000)
    parser.add_argument("--prompts", type=int, default=200, help="training sums whose answers are judged")
    parser.add_argument("--validation", type=int, default=50, help="further ones, for the choice of passes")
    parser.add_argument("--answers", type=int, default=4, help="to each of them")
    parser.add_argument("--rollouts", type=int, default=8, help="continuations of each beginning")
    parser.add_argument("--passes", type=float, nargs="+", default=[6, 15])
    parser.add_argument("--tests", type=int, default=400, help="held-out sums")
    parser.add_argument("--n", type=int, default=16, help="answers to each, of which one is kept")
    parser.add_argument(
        "--equal-tokens",
        action="store_true",
        help="also an outcome model with the rollouts' tokens spent on more answers",
    )
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found[str(seed)] = one_seed(seed, args, Path(folder), print)
        if args.out:
            args.out.write_text(json.dumps(found, indent=1))
    gaps = {s: 100 * (f["process, min"]["right"] - f["outcome"]["right"]) for s, f in found.items()}
    print("points more by process (min) than by outcome:", {s: round(g, 1) for s, g in gaps.items()})


if __name__ == "__main__":
    main()
