"""Faults of the outside: a reward that hangs, a judge that times out once, a run that stops for them and what it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from process_cases import make

from rlhf_nb.core import RewardError
from rlhf_nb.judges.judge import FunctionJudge, JudgeReward
from rlhf_nb.rewards.base import Rewards
from rlhf_nb.types import Completions, Rollout


def rollout(texts: list[str], prompts: list[str] | None = None) -> Rollout:
    c = Completions.from_lists([[1]] * len(texts), [[2, 3]] * len(texts))
    columns = {
        k: getattr(c, k) for k in ("prompt_ids", "prompt_mask", "completion_ids", "completion_lens", "completion_mask")
    }
    return Rollout(
        **columns,
        prompts=prompts or ["p"] * len(texts),
        texts=texts,
        finished=torch.ones(len(texts), dtype=torch.bool),
        uid=torch.arange(len(texts)),
    )


def hangs(prompts: list[str], completions: list[str]) -> list[float]:
    """For ever, on one answer, and with a handler that would swallow any ordinary exception."""
    try:
        while "c" in completions:
            time.sleep(60)
    except Exception:
        return [0.0] * len(completions)
    return [1.0] * len(completions)


async def sleeps(prompts: list[str], completions: list[str]) -> list[float]:
    if "c" in completions:
        await asyncio.sleep(60)
    return [1.0] * len(completions)


async def blocks(prompts: list[str], completions: list[str]) -> list[float]:
    if "c" in completions:
        threading.Event().wait(30)
    return [1.0] * len(completions)


@pytest.mark.parametrize("fn", [hangs, sleeps, blocks], ids=lambda f: f.__name__)
def test_a_reward_that_hangs_is_named_with_its_row(fn: Any) -> None:
    before, begun = signal.getsignal(signal.SIGURG), time.monotonic()
    with pytest.raises(
        RewardError, match=rf"'{fn.__name__}' gave no answer within 0.4 s, on row 2 of 4: .*completion 'c'"
    ):
        Rewards(fn, timeout=0.4)(rollout(["a", "b", "c", "d"]))
    assert time.monotonic() - begun < 20 and signal.getsignal(signal.SIGURG) is before
    scores, _ = (patient := Rewards(fn, timeout=0.4, on_error="skip", fallback=-1.0))(rollout(["a", "c"]))
    assert scores.tolist() == [1.0, -1.0] and patient.stats[f"rewards/{fn.__name__}/failed"] == 1


def test_no_limit_and_other_threads() -> None:
    """Without a limit nothing is touched; in another thread, which no signal reaches, the limit holds as well."""
    found: list[Any] = []

    def ask() -> None:
        with pytest.raises(RewardError, match="gave no answer within 0.1 s"):
            Rewards(slow, timeout=0.1)(rollout(["a"]))
        found.append("refused")

    slow = lambda prompts, completions: (time.sleep(0.3), [1.0] * len(completions))[1]
    assert Rewards(slow, timeout=None)(rollout(["a"]))[0].tolist() == [1.0]
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == ["refused"]


def test_one_timeout_is_asked_again_answer_by_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    told: list[str] = []
    monkeypatch.setattr("rlhf_nb.rewards.base.log.warning", lambda text, *args: told.append(text % args))

    def judge(prompts: list[str], completions: list[str]) -> list[float]:
        asked.append(len(completions))
        if len(asked) == 1:
            raise TimeoutError("the server was busy")
        return [float(len(x)) for x in completions]

    scores, _ = Rewards(judge)(rollout(["a", "bb", "ccc"]))
    assert scores.tolist() == [1.0, 2.0, 3.0] and asked == [3, 1, 1, 1]
    assert len(told) == 1 and "the server was busy" in told[0]


def test_a_judge_that_compares_is_asked_again_prompt_by_prompt() -> None:
    calls: list[int] = []

    def score(prompts: Any, completions: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) == 1:
            raise TimeoutError
        return [float(len(x)) for x in completions]

    reward = JudgeReward(FunctionJudge(score), mode="pairwise")
    texts, prompts = ["a", "bbbb", "cccc", "d"], ["p", "q", "p", "q"]
    scores, _ = Rewards(reward)(rollout(texts, prompts))
    assert scores[2] > scores[0] and scores[1] > scores[3]


def test_a_judge_that_stays_silent_stops_the_run(tmp_path: Path) -> None:
    def silent(prompts: list[str], completions: list[str]) -> list[float]:
        raise TimeoutError("nobody there")

    with pytest.raises(
        RewardError, match=r"'silent' raised TimeoutError: nobody there \(test_faults\.py, line \d+\), on row 0 of 2"
    ):
        Rewards(silent)(rollout(["a", "b"]))


@pytest.mark.parametrize(
    "fault",
    [ConnectionError("the endpoint is gone"), KeyboardInterrupt("the endpoint is gone")],
    ids=["fails", "Ctrl-C twice"],
)
def test_a_run_that_stops_for_its_reward_loses_nothing(fault: BaseException, tmp_path: Path) -> None:
    """Three steps, then the reward fails; the checkpoint is of the third step, and going on gives the same bits as never having failed."""
    from rlhf_nb.data import toy

    calls = 0

    def fragile(prompts: Any, completions: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise fault
        return toy.gold_reward(prompts, completions)

    def run(folder: Path, reward: Any, **how: Any) -> Any:
        trainer = make("grpo", reward=reward, output_dir=str(folder), steps=6, save_every=None)
        trainer.fit(**how)
        return {n: p.detach().clone() for n, p in trainer.method.module.named_parameters()}

    straight = run(tmp_path / "straight", toy.gold_reward)
    with pytest.raises(
        (RewardError, KeyboardInterrupt),
        match=r"the endpoint is gone.* A checkpoint of step 3 was left; resume goes on from there",
    ):
        run(tmp_path / "broken", fragile)
    assert sorted(p.name for p in (tmp_path / "broken" / "checkpoints").glob("step-*")) == ["step-0000000003"]
    after = run(tmp_path / "broken", toy.gold_reward, resume=True)
    assert all(torch.equal(after[n], p) for n, p in straight.items())


def trains_slowly(seconds: float) -> str:
    """What a rank does: a log that grows."""
    from rlhf_nb.run.log import EventLog

    if os.environ["RANK"] == "0":
        log = EventLog(Path(os.environ["RLHF_NB_LAUNCH"]).parent / "metrics.jsonl")
        log.append("start", 0, total_steps=3)
        for step in (1, 2, 3):
            log.append("step", step, loss=1 / step)
            log.append("warning", step, message=f"odd {step}")
            time.sleep(seconds / 3)
    time.sleep(seconds)
    return "done"


def test_launch_tells_while_it_runs(tmp_path: Path) -> None:
    from rlhf_nb.scale.launch import launch

    told: list[tuple[float, str]] = []
    done = launch(
        trains_slowly,
        3.0,
        num_processes=2,
        device="cpu",
        run_dir=tmp_path,
        restarts=0,
        say=lambda text: told.append((time.time(), text)),
    )
    end, said = time.time(), [text for _, text in told]
    assert done.value == "done" and said[0].startswith("2 processes (ddp) begin")
    assert [x for x in said if x.startswith("note")] == ["note: odd 1", "note: odd 2", "note: odd 3"]
    assert "step 3/3  loss 0.3333" in said
    first = next(t for t, text in told if text == "note: odd 1")
    assert end - first > 2.0  # while it ran
