"""Answers that are drawn ahead: which weights drew them, that speed decides nothing, that a kill changes nothing."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
import warnings
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_harness import campaign

from rlhf_nb import GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer
from rlhf_nb.core import ConfigError, RewardError, derive_seed
from rlhf_nb.data import toy
from rlhf_nb.losses.group import truncated_weights
from rlhf_nb.run.log import read_metrics
from rlhf_nb.run.strategy import trained_tensors
from rlhf_nb.train.online_dpo import OnlineDPOTrainer
from rlhf_nb.train.pairs import OnlineDPOConfig
from rlhf_nb.train.raft import RAFTConfig, RAFTTrainer
from rlhf_nb.train.rloo import RLOOConfig, RLOOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:rollouts.lag is:UserWarning")
GROUPS: dict[str, Any] = {"num_generations": 4}
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "ppo": (PPOConfig, PPOTrainer, {"num_inner_epochs": 2, "kl_target": 1.0, "normalize_scores": True}),
    "grpo": (GRPOConfig, GRPOTrainer, GROUPS | {"resample": 1, "kl_coef": 0.05, "num_inner_epochs": 2}),
    "raft": (RAFTConfig, RAFTTrainer, GROUPS),
    "rloo": (RLOOConfig, RLOOTrainer, GROUPS),
    "online": (OnlineDPOConfig, OnlineDPOTrainer, {"num_generations": 2}),
}


def make(
    kind: str, folder: Path, lag: int, reward: Any = toy.gold_reward, prompts: int = 16, more: Any = None, **over: Any
) -> Any:
    config, trainer, own = METHODS[kind]
    settings: dict[str, Any] = {
        "steps": 4, "epochs": None, "rollout_batch_size": 8, "mini_batch_size": 4, "sampling": {"max_new_tokens": 6},
        "console": False, "device": "cpu", "seed": 1, "save_every": 1, "keep_checkpoints": 99, "rollouts": {"lag": lag},
        "optimizer": {"lr": 1e-2},
    }  # fmt: skip
    config = config.preset("toy", output_dir=str(folder), **settings | own | over)
    model, rows = toy.build_model(0, "tiny"), [row | (more or {}) for row in toy.train_prompts(prompts)]
    return trainer(config, model, toy.build_tokenizer(), reward=reward, rows=rows)


def weights(t: Any) -> str:
    digest = hashlib.sha256()
    for name, x in sorted(trained_tensors(t.engine.unwrap(t.method.module)).items()):
        digest.update(name.encode() + x.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def slowed(seed: int) -> Any:
    """The reward, late by a random time."""
    rng = random.Random(seed)

    def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
        time.sleep(0.05 * rng.random())
        return toy.gold_reward(prompts, completions, **columns)

    return reward


@pytest.mark.parametrize("lag", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", ["ppo", "grpo", "raft"])
def test_who_was_slow_decides_nothing(kind: str, lag: int, tmp_path: Path) -> None:
    found = []
    for seed in (0, 1):
        t = make(kind, tmp_path / str(seed), lag, slowed(seed))
        events = [{k: v for k, v in e.items() if not k.startswith("perf/") and k != "time"} for e in t.fit()]
        found.append((weights(t), events))
    assert str(found[0]) == str(found[1])
    assert [e["rollout/lag"] for e in found[0][1]] == [min(step, lag) for step in range(4)]
    shares = [e.get("rollout/effective_share") for e in found[0][1]]
    assert shares == [None] * 4 if kind == "raft" else shares[0] is None and all(0 < s < 1 for s in shares[1:])


def test_a_ticket_is_drawn_by_the_version_that_the_rule_names(tmp_path: Path) -> None:
    """Each answer is drawn again, alone, by the weights of version max(0, t - k): same tokens, same log-probs; and the
    prompts of the steps are those of a run without lag, each once."""
    lag, plain, t = 2, make("raft", tmp_path / "0", 0, steps=6), make("raft", tmp_path / "2", 2, steps=6)
    theirs = []
    plain.start()
    for _ in range(6):
        theirs.append(plain.collect(plain.next_batch()).prompts)
        plain.step += 1
    versions, learnt = [], []
    t.start()
    for step in range(6):
        versions.append({k: v.clone() for k, v in t.method.model.state_dict().items()})
        r = t.collect(t.next_batch())
        learnt.append((r, t.method.actor.ticket.version))
        assert sorted(t.method.actor.rollouts.tickets) == list(range(step + 1, min(step + lag + 1, 6)))
        t.finish_step(t.update(r))
    again = toy.build_model(0, "tiny").eval()
    for step, (r, version) in enumerate(learnt):
        assert r.prompts == theirs[step] and version == max(0, step - lag)
        again.load_state_dict(versions[version])
        first = t.method.collate([row for row in t.source.rows if row["prompt"] in r.prompts])
        for one in first:
            alone = t.method.answers(one, step, again)
            rows = [i for i, p in enumerate(r.prompts) if p == one.prompts[0]][: len(alone)]  # it may be drawn twice
            width = min(alone.completion_ids.shape[1], r.completion_ids.shape[1])
            assert torch.equal(alone.completion_ids[:, :width], r.completion_ids[rows, :width])
            mask = alone.completion_mask[:, :width]
            assert torch.equal(alone.rollout_logps[:, :width][mask], r.rollout_logps[rows][:, :width][mask])


def test_tickets_are_under_way_together(tmp_path: Path) -> None:
    """No clock: the reward of ticket 0 comes only once those of tickets 1 and 2 were asked for."""
    asked: list[int] = []
    third = threading.Event()

    def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
        asked.append(threading.get_ident())
        if len(asked) == 3:
            third.set()
        assert third.wait(60)
        return toy.gold_reward(prompts, completions, **columns)

    t = make("raft", tmp_path, 2, reward, steps=3)
    t.fit()
    assert len({*asked[:3]}) == 3 and threading.get_ident() not in asked


DEAD = pytest.mark.one_seed("counts the rounds: in each step some groups are dead")


@pytest.mark.parametrize(("kind", "rounds"), [("ppo", 0), ("grpo", 0), pytest.param("grpo", 1, marks=DEAD)])
def test_stopped_and_resumed(kind: str, rounds: int, tmp_path: Path) -> None:
    """A run goes on from each of its checkpoints to the same bits; the reward of a ticket ahead isn't asked for again, nor
    that of the further prompts that it was given in time."""
    calls = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
        calls.append(1)
        return toy.gold_reward(prompts, completions, **columns)

    more = {"resample": rounds} if kind == "grpo" else {}
    straight = make(kind, tmp_path, 2, reward, **more)
    straight.fit()
    assert len(calls) == 4 * (1 + rounds)
    for step in (3, 1):
        for folder in (tmp_path / "checkpoints").iterdir():
            if int(folder.name[5:]) > step:
                for file in folder.iterdir():
                    file.unlink()
                folder.rmdir()
        calls.clear()
        t = make(kind, tmp_path, 2, reward, **more)
        t.fit(resume=True)
        ahead = min(2, 4 - step) + rounds  # of further prompts, those of the next step were there
        assert weights(t) == weights(straight) and len(calls) == (4 - step) * (1 + rounds) - ahead


def test_further_prompts_are_drawn_ahead_too(tmp_path: Path) -> None:
    """With two rounds and a lag of 2: each is drawn a step after the one before it, and no prompt is asked twice."""
    t = make("grpo", tmp_path, 2, resample=2, steps=6, prompts=400, reward=lambda p, c, **_: [0.0] * len(c))
    t.start()
    asked = []
    for step in range(6):
        r = t.collect(t.next_batch())
        ticket = t.method.actor.ticket
        assert ticket.number == step and ticket.version == step  # the last round was learnt from last
        ahead = t.method.actor.rollouts.tickets
        assert [[x.version for x in ahead[n].further] for n in sorted(ahead)] == [[step]] * (step < 5) + [[]] * (
            step < 4
        )
        asked += [p for n in ahead for x in ahead[n].further for p in x.rollout().prompts[::4]]
        t.finish_step(t.update(r))
    assert len({*asked}) == len(asked) > 8


def test_a_reward_that_fails_costs_nothing(tmp_path: Path) -> None:
    straight = make("ppo", tmp_path / "a", 2)
    straight.fit()
    calls = []

    def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise OSError("the line is down")
        return toy.gold_reward(prompts, completions, **columns) if len(calls) < 3 else [None] * len(prompts)

    t = make("ppo", tmp_path / "b", 2, reward)
    with pytest.raises(RewardError, match="A checkpoint of step [012] was left"):
        t.fit()
    again = make("ppo", tmp_path / "b", 2)
    again.fit(resume=True)
    assert weights(again) == weights(straight)


def test_another_lag_after_a_resume(tmp_path: Path) -> None:
    make("raft", tmp_path, 2, steps=3).fit()
    for folder in (tmp_path / "checkpoints").iterdir():  # as if it had been killed after its first step
        if folder.name != "step-0000000001":
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    t = make("raft", tmp_path, 0, steps=5)
    with pytest.warns(UserWarning, match="rollouts.lag is 0, and was 2: the answers of 2 steps"):
        t.fit(resume=True)
    lags = {e["step"]: e.get("rollout/lag") for e in read_metrics(tmp_path) if e["type"] == "step"}
    assert lags == {1: 0.0, 2: 1.0, 3: 2.0, 4: 0.0, 5: 0.0} and not t.method.actor.rollouts.tickets


@pytest.mark.parametrize("kind", ["ppo", "raft"])
def test_a_run_that_had_ended_goes_on(kind: str, tmp_path: Path) -> None:
    """Its last checkpoint holds no ticket; with more steps it goes on, and with the same lag without a word."""
    make(kind, tmp_path, 2, steps=2).fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="rollouts.lag is 2, but the rewards")
        t = make(kind, tmp_path, 2, steps=4)
        t.fit(resume=True)
    lags = {e["step"]: e["rollout/lag"] for e in read_metrics(tmp_path) if e["type"] == "step"}
    assert lags == {1: 0, 2: 1, 3: 0, 4: 1}


@pytest.mark.parametrize(
    "value",
    [date(2020, 1, 1), b"x", {1, 2}, {1: 2}, object(), {"a": [date(2020, 1, 1)]}],
    ids=lambda v: type(v).__name__,
)
def test_columns_that_no_checkpoint_holds_are_refused_before_anything_is_drawn(value: Any, tmp_path: Path) -> None:
    t = make("raft", tmp_path, 1, more={"when": value})
    with pytest.raises(ConfigError, match="the column at 'when.0.* or set rollouts.lag=0"):
        t.fit()
    assert not t.method.actor.rollouts.tickets
    assert len(make("raft", tmp_path / "none", 0, more={"when": value}, steps=1).fit()) == 1


@pytest.mark.parametrize(("kind", "lag"), [("raft", 0), ("raft", 1), ("raft", 2), ("grpo", 2)])
def test_a_ctrl_c_does_not_wait_for_rewards(kind: str, lag: int, tmp_path: Path) -> None:
    """Whichever step waits, one Ctrl-C ends the run, and its checkpoint goes on to the bits of a run that was let be."""
    never, asked, seen = threading.Event(), threading.Event(), list[int]()

    def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
        seen.append(1)
        if len(seen) > 1:
            asked.set()
            never.wait(60)
        return toy.gold_reward(prompts, completions, **columns)

    t = make(kind, tmp_path / "a", lag, reward, reward_timeout=None)
    threading.Thread(
        target=lambda: (asked.wait(), time.sleep(0.3), os.kill(os.getpid(), signal.SIGINT)), daemon=True
    ).start()
    begun = time.monotonic()
    history = t.fit()
    assert history.stopped == "interrupted (SIGINT)" and t.step == (kind == "raft") and time.monotonic() - begun < 30
    never.set()
    again, straight = make(kind, tmp_path / "a", lag), make(kind, tmp_path / "b", lag)
    again.fit(resume=True)
    straight.fit()
    assert weights(again) == weights(straight)


def test_a_temperature_that_is_set_counts_for_what_is_drawn_from_then_on(tmp_path: Path) -> None:
    t = make("ppo", tmp_path, 1)
    t.start()
    for step in range(4):
        if step == 1:
            t.control.controls()["temperature"].set(0.5)
        r = t.collect(t.next_batch())
        warm = t.config.sampling.temperature if step < 2 else 0.5
        assert t.method.config.sampling.temperature == t.method.actor.ticket.temperature == warm
        now = t.method.module(r, temperature=warm).logps if step == 0 else None
        if now is not None:
            torch.testing.assert_close(now[r.completion_mask], r.old_logps[r.completion_mask], atol=1e-4, rtol=1e-4)
        t.finish_step(t.update(r))


def test_a_late_reward_is_late_in_a_thread_too(tmp_path: Path) -> None:
    def reward(prompts: Any, completions: Any, **columns: Any) -> Any:
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(RewardError, match="gave no answer within 0.2 s"):
        make("raft", tmp_path, 1, reward, reward_timeout=0.2, mini_batch_size=4, rollout_batch_size=4).fit()
    assert time.monotonic() - began < 25


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("ppo", {"lag": -1}, "rollouts.lag"),
    ("rloo", {"baseline": "remax"}, "rollouts.lag is 2, but baseline=remax asks for the reward of greedy answers: set"),
    ("online", {"opponent": "reference"}, "rollouts.lag is 2, but opponent is 'reference', whose answers are drawn"),
]


@pytest.mark.parametrize(("kind", "over", "sentence"), REFUSED)
def test_refused_before_the_first_step(kind: str, over: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(kind, tmp_path, over.pop("lag", 2), **over)


def test_nothing_to_hide_is_said(tmp_path: Path) -> None:
    from rlhf_nb.models.heads import RewardModel

    model = RewardModel.from_policy(toy.build_model(0, "tiny"))
    with pytest.warns(
        UserWarning, match="rollouts.lag is 1, but the reward 'reward_model' is computed by this process"
    ):
        make("raft", tmp_path, 1, model)
    for kind, cost in (("raft", "as fast"), ("rloo", r"[\d.e-]+ s a step faster, which scoring older answers takes")):
        match = f"rollouts.lag is 1, but the rewards of a step took 0 s of its .* s, so there .* lag=0 is {cost}"
        with pytest.warns(UserWarning, match=match):
            t = make(kind, tmp_path / kind, 1, steps=3)
            ask = t.method.actor.ask
            t.method.actor.rollouts.ask = lambda r, ask=ask: ask(r)._replace(seconds=0.0)  # however busy the machine is
            t.fit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("raft", tmp_path / "none", 0)
        make("raft", tmp_path / "workers", 1, model, rollouts={"lag": 1, "workers": 1})  # which draw meanwhile


# ---------------------------------------------------------------------------------------------------------------------
# kills, and what is learnt


def killed(run_dir: Path, kind: str) -> Any:
    """A run for `resume_harness`, with a reward that is late by a random time, another one in each process."""
    return make(kind, run_dir, 2, slowed(derive_seed(str(time.time_ns()))), steps=10, save_every=2)


ppo, grpo, raft = (partial(killed, kind=kind) for kind in ("ppo", "grpo", "raft"))  # called in a process of their own


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "grpo", "raft"])
def test_ten_kills(kind: str, tmp_path: Path) -> None:
    """kill -9 at random moments, every other one while a checkpoint is being written: the bits of a straight run."""
    assert campaign(f"tickets-{kind}", tmp_path, kills=10, seed=3, most_steps=4) >= 1


def test_masked_and_whole_answer_weights() -> None:
    """By hand: ratios 2, 0.25 and 1 of three tokens, and their products."""
    ratio = torch.tensor([[2.0, 0.25, 1.0], [2.0, 1.0, 3.0]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    how: Any = (ratio.log(), torch.zeros(2, 3), mask)
    assert truncated_weights(*how, 1.5).tolist() == [[1.5, 0.25, 1.0], [1.5, 1.0, 1.0]]
    assert truncated_weights(*how, 2.5, 0.5).tolist() == [[2.0, 0.0, 1.0], [2.0, 1.0, 1.0]]
    assert truncated_weights(*how, 2.5, None, "sequence").tolist() == [[0.5] * 3, [2.0] * 3]
    assert truncated_weights(*how, 1.5, 0.4, "sequence").tolist() == [[0.5] * 3, [0.0] * 3]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_as_good_as_without(seed: int, tmp_path: Path) -> None:
    """The last ten steps' scores with a lag of 1, 2 and 4 against those without, in standard deviations of answers."""
    found = {}
    for lag in (0, 1, 2, 4):
        settings = {"rollout_batch_size": 64, "mini_batch_size": 64, "num_generations": 8, "console": False}
        config = GRPOConfig.preset(
            "toy",
            output_dir=str(tmp_path / str(lag)),
            steps=80,
            epochs=None,
            seed=seed,
            rollouts={"lag": lag},
            **settings,
        )
        model = toy.build_model(0), toy.build_tokenizer()
        found[lag] = GRPOTrainer(config, *model, reward=toy.gold_reward, rows=toy.train_prompts(256)).fit()
    spread = sum(found[0].series("objective/scores_std")[-10:]) / 10
    scores = {lag: sum(h.series("reward")[-10:]) / 10 for lag, h in found.items()}
    assert all(abs(scores[lag] - scores[0]) < 0.1 * spread for lag in (1, 2, 4)), (scores, spread)
