"""Best of 16 by a process reward against by an outcome reward, on sums written out leg by leg (`data.legs`).

`python benchmarks/process_rewards.py --seeds 0 1 2` trains, for each seed, a policy on a speaker who slips in one leg of five, draws its answers to training
sums, and labels their steps by rollouts of the policy itself. Two judges then start from the policy's weights and see the same answers in the same number of
updates: one learns a label for each step, the other one label for each answer, whether its result is right. Each is trained with every setting of the same
grid, and what it is used with (setting; for steps the aggregate, too) is chosen by the best of 16 answers to validation sums. Only then 16 answers to each
test sum are drawn, and each judge keeps one. Neither training nor validation ever sees a test sum.

Beside them: one answer, the majority of 16, any of 16 (an oracle), steps labelled with the truth instead of rollouts, and with `--equal-tokens` an outcome
judge that gets as many more answers as the rollouts cost tokens. `--answers 1000 2000 4000` repeats all of it for several numbers of answers.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_nb.config import SamplingConfig
from rlhf_nb.data import legs
from rlhf_nb.data.sources import prompt_batch
from rlhf_nb.data.steps import StepRule
from rlhf_nb.decode.choose import best_of_curve
from rlhf_nb.evaluate.intervals import Estimate, majority_interval, mean_interval, share_interval
from rlhf_nb.losses.process import AGGREGATES, Aggregate, aggregate_steps
from rlhf_nb.rewards.process import ProcessReward
from rlhf_nb.rollout.sampler import sample
from rlhf_nb.rollout.steps import label_steps
from rlhf_nb.train.process import ProcessConfig, ProcessTrainer
from rlhf_nb.train.sft import SFTConfig, SFTTrainer
from rlhf_nb.types import Completions, Rollout

SAMPLING = SamplingConfig(max_new_tokens=40)
LEGS, WHOLE = StepRule(";"), StepRule("\n")
TOK = legs.build_tokenizer()
ANYWHERE = tuple(range(1, 10))  # a slip goes to any other digit: two seldom cancel
Rows = list[dict[str, Any]]


def policy(seed: int, rows: int) -> Any:
    """A model that was fine-tuned on the speaker's answers."""
    folder = tempfile.mkdtemp()
    config = SFTConfig.preset(
        "toy", output_dir=folder, console=False, epochs=1.5, mini_batch_size=64, token_budget=4096, seed=seed,
        optimizer={"lr": 5e-3, "schedule": "cosine", "warmup_steps": 20},
    )  # fmt: skip
    model = legs.build_model(seed)
    SFTTrainer(config, model, TOK, legs.legs_demonstrations(rows, seed, by=ANYWHERE)).fit(overwrite=True)
    shutil.rmtree(folder)
    return model


def draw(model: Any, prompts: list[str], n: int, seed: int) -> Rollout:
    """n answers to each prompt."""
    return sample(model, prompt_batch(TOK, prompts), SAMPLING, tokenizer=TOK, seed=seed, num_samples=n)


def tokens_of(r: Rollout) -> list[list[int]]:
    """The tokens of answers."""
    return [ids[:n] for ids, n in zip(r.completion_ids.tolist(), r.completion_lens.tolist())]


def answers_of(drawn: Rollout) -> Rows:
    """Drawn answers as rows; an empty one has no step, and is left out."""
    return [{"prompt": p, "completion": t} for p, t in zip(drawn.prompts, drawn.texts) if t.strip()]


def outcome_rows(answers: Rows) -> Rows:
    """Each answer as one step, whose label is whether the result is right."""
    marks = legs.right_result([r["prompt"] for r in answers], [r["completion"] for r in answers])
    return [
        {"prompt": r["prompt"], "completions": [r["completion"]], "labels": [mark > 0.5]}
        for r, mark in zip(answers, marks)
    ]


def sizes(n: int) -> list[int]:
    """1, 2, 4, ... up to n: how many answers there are to choose from."""
    return [2**i for i in range(n.bit_length()) if 2**i <= n]


class Asked(NamedTuple):
    """16 answers to each of some sums."""

    answers: Completions
    texts: list[str]
    right: Tensor  # [sums, 16]
    way: Tensor  # the same for all legs

    @classmethod
    def of(cls, sums: list[str], drawn: list[list[int]], n: int) -> Asked:
        """From the tokens of answers."""
        prompts, texts = [p for p in sums for _ in range(n)], TOK.batch_decode(drawn, skip_special_tokens=True)
        tokens = Completions.from_lists([TOK(p)["input_ids"] for p in prompts], drawn, TOK.pad_token_id)
        right, way = (torch.tensor(f(prompts, texts)).view(-1, n) for f in (legs.right_result, legs.right_way))
        return cls(tokens, texts, right, way)

    def scores(self, judge: ProcessReward, how: Aggregate) -> Tensor:
        """[sums, 16], what a judge says of the answers."""
        return aggregate_steps(*judge.steps(self.answers), how).view(self.right.shape)

    def curve(self, scores: Tensor) -> Tensor:
        """Share of right answers among the best of 1, 2, ... 16, without bias."""
        return best_of_curve(scores, self.right).mean(0)

    def kept(self, scores: Tensor, what: Tensor | None = None) -> Tensor:
        """[sums], whether the best of 16 is right; where several are best, the share of them."""
        return best_of_curve(scores, self.right if what is None else what)[:, -1]


class Parts:
    """What has been computed, kept as JSON files in a folder, so that a run may be done in pieces.

    Args:
        folder: holds them.
        most: how many new parts are computed before the run ends; None: all.
    """

    def __init__(self, folder: Path, most: int | None = None) -> None:
        self.folder, self.left = folder, most
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """A part, made where it isn't there."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            if self.left == 0:
                raise SystemExit(f"The part {name} is next: the same line goes on.")
            path.write_text(json.dumps(make()))
            self.left = None if self.left is None else self.left - 1
        return json.loads(path.read_text())


class Chosen(NamedTuple):
    """What a judge says, with the settings that were best on the validation sums."""

    scores: Tensor  # [sums, 16], of the test's answers
    how: Aggregate
    report: dict[str, Any]


def train(
    model: Any, rows: Rows, rule: StepRule, updates: int, folder: Path, seed: int, **settings: Any
) -> ProcessReward:
    """A judge that starts from the policy's weights."""
    config = ProcessConfig.preset(
        "toy", output_dir=str(folder), console=False, epochs=None, steps=updates, mini_batch_size=32, token_budget=4096, seed=seed, data={"path": "legs", "dedup": False},
        boundary={"separator": rule.separator}, **settings,
    )  # fmt: skip
    trainer = ProcessTrainer(config, copy.deepcopy(model), TOK, rows, [])
    trainer.fit(overwrite=True)
    return ProcessReward(trainer.net, TOK)


def choose(
    name: str, make: Callable[[dict[str, Any], Path], ProcessReward], grid: list[dict[str, Any]], hows: tuple[Aggregate, ...], validation: Asked,
    test: Asked, parts: Parts,
) -> Chosen:  # fmt: skip
    """Train with every setting of a grid; keep what chooses best among answers to validation sums."""

    def scored(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
        judge = make(settings, folder)
        found: dict[str, Any] = {"right": {}, "test": {}}
        for how in hows:
            mine = validation.scores(judge, how)
            found["right"][how] = float(validation.kept(mine).mean())
            found["test"][how] = test.scores(judge, how).tolist()
        return found

    tried = []
    for i, settings in enumerate(grid):
        with tempfile.TemporaryDirectory() as folder:
            found = parts.get(f"{name}-{i}", partial(scored, settings, Path(folder)))
        tried += [(found["right"][how], torch.tensor(found["test"][how]), how, settings) for how in hows]
    share, scores, how, settings = max(tried, key=lambda t: t[0])
    report = {"validation": share, "settings": settings}
    return Chosen(
        scores, how, report | {"tried": [{"right": s, "aggregate": h, "settings": g} for s, _, h, g in tried]}
    )


def one_seed(
    seed: int, n_answers: int, args: argparse.Namespace, parts: Parts, say: Callable[[str], None]
) -> dict[str, Any]:
    """All numbers of one seed with so many answers to learn from."""
    start = time.process_time()
    model = legs.build_model(seed)
    weights = parts.get(
        "policy", lambda: {k: v.tolist() for k, v in policy(seed, args.demonstrations).state_dict().items()}
    )
    model.load_state_dict({k: torch.tensor(v) for k, v in weights.items()})
    learnt = [s.text for s in legs.sums(-(-n_answers // args.each), 1000 + seed)]
    held = [s.text for s in legs.sums(args.validation + args.tests, 9000, True)]
    drawn = parts.get("drawn", lambda: {"answers": answers_of(draw(model, learnt, args.each, seed)),
                                        "held": tokens_of(draw(model, held, args.n, seed + 1))})  # fmt: skip
    answers, cut = drawn["answers"][:n_answers], args.validation
    wrote = sum(len(TOK(r["completion"])["input_ids"]) for r in answers)
    say(f"seed {seed}: {len(answers)} answers to {len(learnt)} sums ({wrote:,} tokens)")
    validation = Asked.of(held[:cut], drawn["held"][: cut * args.n], args.n)
    asked = Asked.of(held[cut:], drawn["held"][cut * args.n :], args.n)
    rates = [{"optimizer": {"lr": lr, "schedule": "cosine", "warmup_steps": 20}} for lr in args.rates]
    hard = [{**settings, "hard_from": args.hard_from} for settings in rates]

    def judge(name: str, rows: Rows, rule: StepRule, grid: list[dict[str, Any]]) -> Chosen:
        make = lambda settings, folder: train(model, rows, rule, args.updates, folder, seed, **settings)
        return choose(name, make, grid, AGGREGATES if rule is LEGS else ("last",), validation, asked, parts)

    judges, rollouts = {}, 0
    if args.labels != "truth":

        def labels() -> dict[str, Any]:
            how: dict[str, Any] = {"n": args.rollouts, "sampling": SAMPLING, "rule": LEGS, "seed": seed}
            found = label_steps(model, TOK, answers, legs.right_result, **how)
            return {"rows": found.rows, "tokens": found.tokens}

        known = parts.get("labels", labels)
        rollouts = known["tokens"]
        say(f"seed {seed}: labels by rollouts, {rollouts:,} tokens")
        judges["process"] = judge("process", known["rows"], LEGS, hard)
    if args.labels != "rollouts":
        truth = [legs.step_row(r["prompt"], r["completion"], soft=False) for r in answers]
        judges["process, told"] = judge("told", truth, LEGS, rates)
    judges["outcome"] = judge("outcome", outcome_rows(answers), WHOLE, rates)
    if args.equal_tokens:
        times = round(args.each * (1 + rollouts / wrote))
        more = parts.get("more", lambda: answers_of(draw(model, learnt, times, seed + 77)))
        say(f"seed {seed}: an outcome judge on {len(more)} answers")
        judges["outcome, equal tokens"] = judge("more", outcome_rows(more), WHOLE, rates)
    scores = {name: found.scores for name, found in judges.items()}
    right = {name: asked.kept(s) for name, s in scores.items()}
    ends = [t.rpartition("=")[2] for t in asked.texts]
    wanted = [str(legs.read_sum(p).answer) for p in held[cut:]]
    shares = {
        "one answer": mean_interval(asked.right.mean(1)),
        **{name: mean_interval(values) for name, values in right.items()},
        "majority": majority_interval(ends, wanted, args.n, args.n),
        "any of them": share_interval(asked.right.max(1).values),
    }
    gaps = {name: mean_interval(right[name] - right["outcome"]) for name in right if name != "outcome"}
    for name, e in shares.items():
        more_said = ""
        if name in judges:
            way = float(asked.kept(scores[name], asked.way).mean())
            more_said = f"  all legs right {way:.1%}  {judges[name].how}, {judges[name].report['settings']}, validation {judges[name].report['validation']:.1%}"
        say(f"  {name:22s} {e.value:6.1%} [{e.low:.1%}, {e.high:.1%}]{more_said}")
    for name, gap in gaps.items():
        say(f"  {name} − outcome {100 * gap.value:+.1f} points [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]")
    say(f"  CPU {time.process_time() - start:.0f} s")
    curves = {name: asked.curve(s) for name, s in [*scores.items(), ("any of them", asked.right.double())]}
    shown = {name: [float(curve[k - 1]) for k in sizes(args.n)] for name, curve in curves.items()}
    shown["majority"] = [majority_interval(ends, wanted, args.n, k).value for k in sizes(args.n)]

    def plain(e: Estimate) -> list[float]:
        return [e.value, e.low, e.high]

    return {
        "answers": len(answers), "tokens": wrote, "rollout_tokens": rollouts, "shares": {k: plain(e) for k, e in shares.items()}, "gaps": {k: plain(e) for k, e in gaps.items()},
        "curves": shown, "judges": {k: c.report for k, c in judges.items()}, "cpu_s": round(time.process_time() - start),
    }  # fmt: skip


def figure(found: dict[str, Any], path: Path) -> None:
    """Right answers of the best of n, over n: the means of all seeds."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "process rewards"
    runs = list(found.values())
    looks = {"any of them": "k:", "majority": "C2-", "process": "C0-", "process, told": "C0--", "outcome": "C1-"}
    chart, axis = plt.subplots(figsize=(5, 3))
    for name, look in looks.items():
        each = [r["curves"][name] for r in runs if name in r["curves"]]
        if not each:
            continue
        curve = torch.tensor(each).mean(0)
        axis.plot([2**i for i in range(len(curve))], curve, look, marker=".", label=name)
    axis.set(xlabel="answers to choose from", ylabel="right answers", xscale="log")
    axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axis.legend(fontsize=7)
    chart.tight_layout()
    chart.savefig(path, metadata={"Date": None})


def main() -> None:
    """Runs, and says what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--demonstrations", type=int, default=20000, help="of the speaker, for the policy")
    parser.add_argument("--answers", type=int, nargs="+", default=[8000], help="that both judges learn from")
    parser.add_argument("--each", type=int, default=4, help="of them to each sum")
    parser.add_argument("--rollouts", type=int, default=8, help="continuations of each beginning")
    parser.add_argument("--hard-from", type=float, default=0.25, help="labels of at least this become 1")
    parser.add_argument("--updates", type=int, default=2000, help="of 32 answers, for each judge and setting")
    parser.add_argument("--rates", type=float, nargs="+", default=[4e-4, 1e-3], help="learning rates that both try")
    parser.add_argument("--validation", type=int, default=120, help="sums by which settings are chosen")
    parser.add_argument("--tests", type=int, default=360, help="further sums, for the result")
    parser.add_argument("--n", type=int, default=16, help="answers to each, of which one is kept")
    parser.add_argument(
        "--equal-tokens",
        action="store_true",
        help="also an outcome judge with the rollouts' tokens spent on more answers",
    )
    parser.add_argument("--labels", choices=["rollouts", "truth", "both"], default="both", help="of steps")
    parser.add_argument("--keep", type=Path, help="a folder for finished parts: the same line goes on with them")
    parser.add_argument("--parts", type=int, help="with --keep: compute so many new parts and end")
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    parser.add_argument("--figure", type=Path, help="an SVG file; with --read of earlier numbers")
    parser.add_argument("--read", type=Path, nargs="+", help="JSON files of earlier runs: draw and sum up only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for path in args.read or []:
        found |= json.loads(path.read_text())
    for n_answers in () if args.read else args.answers:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as aside:
                parts = Parts((args.keep or Path(aside)) / f"{n_answers}-{seed}", args.parts)
                found[f"{n_answers} answers, seed {seed}"] = one_seed(
                    seed, n_answers, args, parts, lambda s: print(s, flush=True)
                )
            if args.out:
                args.out.write_text(json.dumps(found, indent=1))
    for name, f in found.items():
        for judge, (value, low, high) in f["gaps"].items():
            print(f"{name}: {judge} − outcome {100 * value:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]")
    if args.figure:
        figure(found, args.figure)


if __name__ == "__main__":
    main()
