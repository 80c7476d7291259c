"""Episodes: which tokens count, whom waiting costs, what a foreign tool can break, and what is refused before the first step."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import random
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import call

from rlhf_nb.config import SamplingConfig
from rlhf_nb.core import ConfigError, DataError, Stopped, derive_seed, stoppable
from rlhf_nb.data import toy
from rlhf_nb.data.sources import collate_prompts
from rlhf_nb.data.templates import make_chat_template
from rlhf_nb.fast.engine import FEWEST_ROWS, RowCache, decoder_for
from rlhf_nb.rollout import episodes as module
from rlhf_nb.rollout.backends import OurSampler, Request, Sampler
from rlhf_nb.rollout.episodes import EpisodeConfig, Episodes, Step, Turn, environment_kinds
from rlhf_nb.rollout.sampler import as_rollout
from rlhf_nb.rollout.tools import Call, Tools, call_form
from rlhf_nb.train.grpo import VARIANTS, GRPOConfig, GRPOTrainer
from rlhf_nb.train.online_dpo import OnlineDPOTrainer
from rlhf_nb.train.pairs import OnlineDPOConfig
from rlhf_nb.train.ppo import PPOConfig, PPOTrainer
from rlhf_nb.train.raft import RAFTConfig, RAFTTrainer
from rlhf_nb.train.rloo import RLOOConfig, RLOOTrainer
from rlhf_nb.types import Rollout

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
tok = toy.build_tokenizer()


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are seen here even where a test before switched the logging of all that existed off."""
    logger = logging.getLogger(module.__name__)
    monkeypatch.setattr(logger, "disabled", False)
    monkeypatch.setattr(logging.root.manager, "disable", 0)
    logger.setLevel(logging.WARNING)


WORDS = ("Where do owls live?", "What do bees eat?", "Tell me about frogs.", "How many legs do wolves have?")


class Chat:
    """Replies with words that the seed draws, for as many turns as it draws."""

    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        self.rng = random.Random(derive_seed("chat", seed))
        return None if self.rng.random() < 0.5 else " " + self.rng.choice(WORDS)

    def step(self, turn: Turn) -> Step:
        return Step(self.rng.choice(WORDS), self.rng.random(), turn.number >= 4 or self.rng.random() < 0.3)

    def close(self) -> None:
        pass


class Waiting(Chat):
    """The same, at random speeds."""

    def step(self, turn: Turn) -> Step:
        time.sleep(random.random() * 0.02)
        return super().step(turn)


class Noted(Sampler):
    """Our sampler, and what it drew by prompt, sample and position."""

    name, exact = "noted", True

    def __init__(self) -> None:
        self.drawn: dict[tuple[int, int, int], list[int]] = {}
        self.seconds = 0.0

    def answer(self, model: Any, request: Request) -> Rollout:
        begun = time.monotonic()
        r = OurSampler().answer(model, request)
        p = request.prompts
        assert p.before is not None and p.start is not None
        for key, ids, n in zip(
            zip(p.uid.tolist(), p.before.tolist(), p.start.tolist()), r.completion_ids, r.completion_lens
        ):
            self.drawn[key] = ids[: int(n)].tolist()
        self.seconds += time.monotonic() - begun
        return r


class Ends(Sampler):
    """Ends each turn at once."""

    name, exact = "ends", True

    def answer(self, model: Any, request: Request) -> Rollout:
        n = len(request.prompts)
        end = torch.full((n, 1), 2)
        return as_rollout(
            request.prompts, 1, end, torch.ones(n, dtype=torch.int64), torch.ones(n, dtype=torch.bool), None, tok
        )


def play(
    make: Any, n: int = 8, samples: int = 2, new: int = 24, inner: Sampler | None = None, **config: Any
) -> Rollout:
    """Episodes on toy questions."""
    config = {"max_seconds": 20.0} | config
    sampler = Episodes(
        inner or OurSampler(), environment_kinds(make, config.pop("tools", ())), EpisodeConfig(**config), tok, 256
    )
    rows = sampler.tokenize(toy.train_prompts(n, 3))
    how: dict[str, Any] = {"tokenizer": tok, "seed": 5, "step": 2, "num_samples": samples, "eos": ENDS}
    return sampler.generate(MODEL, collate_prompts(rows, 0), SamplingConfig(max_new_tokens=new), **how)


MODEL = toy.build_model(0, "tiny")
# a twentieth of the words ends a turn, so that an untrained model's turns are short
ENDS = [i for i in range(len(tok)) if i % 12 == 2]


def test_one_turn_is_the_plain_answer_bit_for_bit() -> None:
    class Once(Chat):
        def reset(self, row: dict[str, Any], seed: int) -> str | None:
            return None

        def step(self, turn: Turn) -> Step:
            return Step(done=True)

    r = play(Once)
    rows = module.tokenize_prompts(toy.train_prompts(8, 3), tok, chat=True, warn=False)
    plain = OurSampler().generate(
        MODEL,
        collate_prompts(rows, 0),
        SamplingConfig(max_new_tokens=24),
        tokenizer=tok,
        seed=5,
        step=2,
        num_samples=2,
        eos=ENDS,
    )
    for name in ("prompt_ids", "completion_ids", "completion_mask", "rollout_logps", "uid", "finished"):
        assert torch.equal(getattr(r, name), getattr(plain, name)), name


def test_rows_are_what_was_drawn_and_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[list[int]] = []
    real = module.encode_replies
    monkeypatch.setattr(module, "encode_replies", lambda *a: replies.extend(out := real(*a)) or out)
    inner = Noted()
    r = play(Chat, n=25, samples=8, new=40, inner=inner)
    assert len(r) == 200 and sum(e["turns"] > 1 for e in r.columns["episode"]) > 50
    said = {tuple(x) for x in replies}
    for i, (uid, e) in enumerate(zip(r.uid.tolist(), r.columns["episode"])):
        n, joined, logps = int(r.completion_lens[i]), list[int](), r.rollout_logps
        row, mask = r.completion_ids[i, :n].tolist(), r.completion_mask[i, :n].tolist()
        sample = i % 8 + 8 * sum(u == uid for u in r.uid[: i - i % 8 : 8].tolist())
        for k, (a, b) in enumerate(e["drawn"]):
            if k:
                assert tuple(row[len(joined) : a]) in said
                joined += row[len(joined) : a]
            drawn = inner.drawn[uid, sample, a]
            assert drawn[: b - a] == row[a:b] and (len(drawn) == b - a or e["stop"] == "tokens")
            joined += row[a:b]
        assert joined == row and mask == [any(a <= t < b for a, b in e["drawn"]) for t in range(n)]
        assert (
            logps is not None
            and bool((logps[i, :n][torch.tensor(mask)] < 0).all())
            and not bool(logps[i][~r.completion_mask[i]].any())
        )


def test_order_and_company_change_no_token() -> None:
    one, two, apart = play(Chat), play(Waiting), play(Waiting, max_seconds=19.0)
    for r in (two, apart):
        assert torch.equal(one.completion_ids, r.completion_ids) and torch.equal(one.completion_mask, r.completion_mask)
    other = play(Chat, samples=4)
    for i in range(8):
        for k in range(2):
            a, b = one[2 * i + k].trim(), other[4 * i + k].trim()
            assert torch.equal(a.completion_ids, b.completion_ids)


def test_what_is_kept_between_turns_changes_no_bit_and_saves_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """All turns' keys and values kept, some of them for want of memory, none: the same rows; fewer tokens are read."""
    read, real = [0], RowCache.states
    size = RowCache(decoder_for(MODEL, 1), 1, 1).decoder.token_bytes * 128  # a row's

    def counted(self: RowCache, rows: Any, blocks: Any, least: int = FEWEST_ROWS) -> Any:
        read[0] += sum(map(len, blocks)) if least > 1 else 0
        return real(self, rows, blocks, least)

    class Forgets(OurSampler):
        def answer(self, model: Any, request: Request) -> Rollout:
            return super().answer(model, replace(request, kept=None))

    monkeypatch.setattr(RowCache, "states", counted)
    monkeypatch.setattr("rlhf_nb.fast.engine.workers_for", lambda model: 1)
    found = []
    for inner in (OurSampler(), OurSampler(cache_bytes=8 * size), Forgets(), Forgets(cache_bytes=8 * size)):
        read[0] = 0
        found.append((play(Chat, samples=4, new=40, inner=inner), read[0]))
    rows, tokens = [r for r, _ in found], [n for _, n in found]
    assert all(torch.equal(r.completion_ids, rows[0].completion_ids) for r in rows)
    assert all(torch.equal(r.rollout_logps, rows[0].rollout_logps) for r in rows)
    assert tokens[0] < 0.8 * tokens[2] and tokens[1] < tokens[3], tokens


@pytest.mark.parametrize("words", [300, 30_000])
def test_a_first_reply_that_leaves_no_room_is_said(words: int, caplog: pytest.LogCaptureFixture) -> None:
    """Once; an episode that has grown too long after some turns is nothing to warn of."""

    class Long(Chat):
        def step(self, turn: Turn) -> Step:
            return Step("owl " * (words if turn.number == late else 1))

    late = 1
    r = play(Long, n=2, new=60)
    assert {e["stop"] for e in r.columns["episode"]} == {"tokens"} and "Turn.room" in caplog.text
    assert len(caplog.records) == 1 and "the first reply of environment 'Long' leaves no room" in caplog.text
    caplog.clear()
    late = 2
    play(Long, n=2, new=60)
    assert not caplog.records


@pytest.mark.parametrize("blocks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_who_waits_costs_the_others_nothing(blocks: bool) -> None:
    """32 episodes of 3 turns; each turn waits 0.2 s, one of an episode 3 s: on an event loop, or each in a thread."""

    class Slow(Chat):
        def reset(self, row: dict[str, Any], seed: int) -> str | None:
            self.late = bool(row["late"])
            return None

        def step(self, turn: Turn) -> Any:
            seconds, said = 3.0 if self.late and turn.number == 1 else 0.2, Step("And then?", done=turn.number == 3)
            if not blocks:
                return self.later(seconds, said)
            time.sleep(seconds)
            return said

        async def later(self, seconds: float, said: Step) -> Step:
            await asyncio.sleep(seconds)
            return said

    inner = Noted()
    sampler = Episodes(inner, environment_kinds(Slow), EpisodeConfig(max_turns=3), tok, 256)
    rows = sampler.tokenize([q | {"late": i == 17} for i, q in enumerate(toy.train_prompts(32, 3))])
    begun, cpu = time.monotonic(), time.process_time()
    r = sampler.generate(
        MODEL, collate_prompts(rows, 0), SamplingConfig(max_new_tokens=60), tokenizer=tok, seed=0, eos=ENDS
    )
    wall, cpu = time.monotonic() - begun, time.process_time() - cpu
    longest = max(e["wait_tools_s"] for e in r.columns["episode"])
    assert longest >= 3.0 and sum(e["turns"] == 3 for e in r.columns["episode"]) > 20
    print(
        f"{wall:.2f} s; the longest waits {longest:.2f} s; CPU {cpu:.2f} s, drawing on the clock {inner.seconds:.2f} s"
    )
    computed = cpu / len(os.sched_getaffinity(0)) if inner.seconds < 1.2 * cpu else inner.seconds  # cores were busy
    assert wall <= 1.3 * (longest + computed), (wall, longest, cpu, inner.seconds)


async def one_by_one(*values: Any) -> Any:
    for value in values:
        yield value


async def in_time(value: Any) -> Any:
    return value


RESULTS: dict[str, tuple[Callable[[], Any], str]] = {  # whatever comes one by one is what comes, not its address
    "a generator": (lambda: (i for i in range(3)), "[0, 1, 2]"), "a set": (lambda: {4}, "[4]"), "a frozenset": (lambda: frozenset(), "[]"),
    "a map": (lambda: map(str, [1]), '["1"]'), "a zip": (lambda: zip("a", "b"), '[["a", "b"]]'), "a range": (lambda: range(2), "[0, 1]"),
    "keys": (lambda: {"k": 1}.keys(), '["k"]'), "values": (lambda: {"k": 1}.values(), "[1]"), "items": (lambda: {"k": 1}.items(), '[["k", 1]]'),
    "a deque": (lambda: deque([1]), "[1]"), "an async generator": (lambda: one_by_one(1, 2), "[1, 2]"), "a coroutine's set": (lambda: in_time({4}), "[4]"),
    "inside": (lambda: {"found": (i for i in "ab")}, '{"found": ["a", "b"]}'), "without end": (lambda: itertools.count(), json.dumps(list(range(1000)))),
    "a list": (lambda: [1], "[1]"), "words": (lambda: "a b", "a b"), "nothing": (lambda: None, "null"),
}  # fmt: skip
LATE: dict[str, Callable[[], Any]] = {  # fails or waits where it is read, not where it is made
    "a generator that waits": lambda: (threading.Event().wait(20) for _ in range(1)), "a generator that fails": lambda: (1 // i for i in range(1)),
    "a coroutine's generator that fails": lambda: in_time(1 // i for i in range(1)),
}  # fmt: skip


def test_a_result_is_read_as_what_it_holds() -> None:
    schemas = [{"function": {"name": name}} for name in [*RESULTS, *LATE]]
    tools = Tools([*(f for f, _ in RESULTS.values()), *LATE.values()], schemas)
    begun = time.monotonic()
    said = tools.call([Call(name, {}) for name in [*RESULTS, *LATE]], 2.0)
    assert time.monotonic() - begun < 10
    assert [r.text for r in said[: len(RESULTS)]] == [words for _, words in RESULTS.values()]
    assert all(r.failed for r in said[len(RESULTS) :]) and not any(r.failed for r in said[: len(RESULTS)])


def broken(kind: str) -> Callable[[], Any]:
    """A tool that fails in one way."""

    def tool() -> Any:
        """Fails."""
        if kind == "hangs":
            threading.Event().wait(20)
        if kind == "exits":
            raise SystemExit(3)
        if kind == "raises":
            raise RuntimeError("no luck")
        return {"bytes": b"\xff", "object": object(), "nan": float("nan"), "none": None}[kind]

    return tool


@pytest.mark.parametrize("kind", ["hangs", "exits", "raises", "bytes", "object", "nan", "none"])
def test_a_broken_tool_is_an_observation(kind: str) -> None:
    class Says(Sampler):
        name, exact = "says", True

        def answer(self, model: Any, request: Request) -> Rollout:
            call = '{"name": "tool", "arguments": {}}'
            ids = [
                [*letters(call if n == 0 else "ok", add_special_tokens=False)["input_ids"], 2]
                for n in request.prompts.start
            ]
            answers = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in ids], True, 0)
            lens = torch.tensor([len(x) for x in ids])
            return as_rollout(request.prompts, 1, answers, lens, torch.ones(len(ids), dtype=torch.bool), None, letters)

    letters = toy.word_tokenizer((toy.PAD, toy.BOS, toy.EOS, toy.UNK, *map(chr, range(32, 127)), "\n"), r"[\s\S]")
    sampler = Episodes(
        Says(), environment_kinds(None, [broken(kind)]), EpisodeConfig(call_seconds=0.4, form="json"), letters
    )
    rows = sampler.tokenize([{"prompt": "a"}, {"prompt": "b"}])
    begun = time.monotonic()
    r = sampler.generate(
        None, collate_prompts(rows, 0), SamplingConfig(max_new_tokens=200), tokenizer=letters, seed=0, num_samples=2
    )
    assert time.monotonic() - begun < 8 and r.finished.tolist() == [True] * 4 and r.rollout_logps is None
    for e in r.columns["episode"]:
        assert (
            e["turns"] == 2
            and e["tool_failures"] == int(kind in ("hangs", "exits", "raises"))
            and e["messages"][-2]["role"] == "tool"
        )


BROUGHT = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<function=(?P<name>\w+)>", "close": "</function>", "repeats": True, "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>\w+)>(?P<value>.*?)</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}  # fmt: skip


@pytest.mark.parametrize("form", ["auto", "json"])
def test_a_tokenizers_own_response_template_reads_calls(form: str) -> None:
    """Two calls at once, numbers as the tool's schema has them; a thought that the prompt began calls nothing."""
    calls = "<function=good><parameter=x>3</parameter></function><function=good><parameter=x>4</parameter></function>"

    class Says(Sampler):
        name, exact = "says", True

        def answer(self, model: Any, request: Request) -> Rollout:
            texts = [f"hm {calls}</think>{calls}" if n == 0 else "ok" for n in request.prompts.start]
            ids = [[*letters(x, add_special_tokens=False)["input_ids"], 2] for x in texts]
            answers = torch.nn.utils.rnn.pad_sequence([torch.tensor(x) for x in ids], True, 0)
            lens = torch.tensor([len(x) for x in ids])
            return as_rollout(request.prompts, 1, answers, lens, torch.ones(len(ids), dtype=torch.bool), None, letters)

    letters = toy.word_tokenizer((toy.PAD, toy.BOS, toy.EOS, toy.UNK, *map(chr, range(32, 127)), "\n"), r"[\s\S]")
    letters.chat_template = (
        "{{ tools }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    letters.response_template = BROUGHT
    sampler = Episodes(Says(), environment_kinds(None, [good]), EpisodeConfig(form=form), letters)
    prompts = collate_prompts(sampler.tokenize([{"prompt": "a"}]), 0)
    r = sampler.generate(None, prompts, SamplingConfig(max_new_tokens=600), tokenizer=letters, seed=0, num_samples=1)
    (e,) = r.columns["episode"]
    results = [m["content"] for m in e["messages"] if m["role"] == "tool"]
    assert (e["calls"], results) == ((2, ["6", "8"]) if form == "auto" else (0, []))


@pytest.mark.parametrize("key", ["start_anchor_pattern", "open_pattern", "close_pattern", "tag_pattern"])
def test_a_strangers_expression_cannot_hold_a_run(key: str) -> None:
    """A response template is a file of the model's: what backtracks for ever is refused before the first step."""
    hostile = {
        **BROUGHT,
        "fields": {**BROUGHT["fields"], "tool_calls": {**BROUGHT["fields"]["tool_calls"], key: r"((a+)+)+$"}},
    }
    with pytest.raises(ConfigError, match="response template is refused.*may take for ever.*episodes.form=hermes"):
        call_form("", hostile)
    assert call_form("", BROUGHT) is BROUGHT


@pytest.mark.parametrize("brought", ["x", ["y"], {"fields": 3}, {"fields": None}, {"fields": {"content": {}}}, None])
def test_a_template_that_is_none_is_no_template(brought: Any) -> None:
    assert call_form("<tool_call>", brought) == "hermes"


BAD_STEPS: dict[str, Any] = {
    "nothing": None, "text": "hi", "gymnasium's five": ("b", 1.0, False, False, {}), "a number to say": Step(3),  # type: ignore[arg-type]
    "bytes": Step(b"b"), "one message": Step({"role": "user", "content": "b"}), "no role": Step([{"content": "b"}]),  # type: ignore[arg-type, list-item]
    "a role that is a number": Step([{"role": 3, "content": "b"}]), "no words": Step([{"role": "user", "content": None}]),  # type: ignore[list-item]
    "a tool without tools": Step([{"role": "tool", "content": "b"}]), "nan": Step("b", math.nan), "none": Step("b", None),  # type: ignore[arg-type]
    "a metric of words": Step("b", metrics={"a": "b"}), "a metric of nan": Step("b", metrics={"a": math.nan}),  # type: ignore[dict-item]
    "an error": ValueError("b"), "an exit": SystemExit(3),
}  # fmt: skip


class Falsy(Exception):
    """An error that counts as false, and has no words."""

    def __len__(self) -> int:
        return 0

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("where", ["reset", "step"])
def test_whatever_an_environment_says_the_run_goes_on(where: str, caplog: pytest.LogCaptureFixture) -> None:
    def say(bad: Any) -> Any:
        if isinstance(bad, BaseException):
            raise bad
        return bad

    class Bad(Mute):
        answers: Any = None

        def reset(self, row: dict[str, Any], seed: int) -> Any:
            said = self.answers
            return say(said.says if isinstance(said, Step) else said) if where == "reset" else None

        def step(self, turn: Turn) -> Any:
            return say(self.answers) if where == "step" else Step(done=True)

    bad = BAD_STEPS | {"an odd error": Falsy()}
    if where == "reset":  # these say something, or nothing, which is no mistake there
        bad = {k: v for k, v in bad.items() if k not in ("nothing", "text", "nan", "none") and "metric" not in k}
    for name, what in bad.items():
        caplog.clear()
        Bad.answers = what
        r = play(Bad, n=2, samples=1)
        known = [e["stop"] for e in r.columns["episode"] if e["stop"] != "tokens"]
        assert known and set(known) == {"failed"} and not bool(r.finished.any()), name
        assert len(caplog.records) == 1 and "None" not in caplog.text.replace("NoneType", "").replace("': None", ""), (
            name
        )
    for says in ("half \ud800", "\ue0000\ue001 <eos>\x00", "x" * 10**5):  # words are words, whatever they spell
        Bad.answers = Step(says, done=True)
        told = play(Bad, n=2, samples=1, max_turns=2).columns["episode"]
        assert where == "reset" or "failed" not in [e["stop"] for e in told]
        lengths = [len(m["content"]) for e in told for m in e["messages"]]
        assert where == "reset" or max(lengths) <= 64 * 256, "a log would hold what no row has room for"


def test_what_reset_fails_at_stays_a_failure_where_the_answer_is_cut() -> None:
    class Bad(Chat):
        def reset(self, row: dict[str, Any], seed: int) -> str | None:
            raise OSError("no such game")

    r = play(Bad, new=1)
    assert {e["stop"] for e in r.columns["episode"]} == {"failed"}


def test_environments_are_closed_once_whatever_happened_and_have_rows_of_their_own() -> None:
    closed: list[Any] = []

    class Takes(Chat):
        def reset(self, row: dict[str, Any], seed: int) -> str | None:
            row["todo"].pop()
            self.left = len(row["todo"])
            return None

        def close(self) -> None:
            closed.append(self)

    class Stops(Sampler):
        name, exact = "stops", True

        def answer(self, model: Any, request: Request) -> Rollout:
            raise KeyboardInterrupt

    for inner in (OurSampler(), Stops()):
        closed.clear()
        sampler = Episodes(inner, environment_kinds(Takes), EpisodeConfig(), tok, 256)
        prompts = collate_prompts(sampler.tokenize([q | {"todo": [1, 2, 3]} for q in toy.train_prompts(2, 3)]), 0)
        how: dict[str, Any] = {"tokenizer": tok, "seed": 5, "num_samples": 3, "eos": ENDS}
        try:
            sampler.generate(MODEL, prompts, SamplingConfig(max_new_tokens=8), **how)
        except KeyboardInterrupt:
            assert isinstance(inner, Stops)
        assert len(closed) == 6 and len({id(e) for e in closed}) == 6
        assert all(e.left == 2 for e in closed) and prompts.columns["todo"] == [[1, 2, 3]] * 2


def test_a_stop_waits_for_environments_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """All at the same time, and not for ever: what they hold (containers, browsers) would be left behind."""
    closed, reason, last = list[Any](), [""], [0.3]

    class Hangs(Chat):
        async def step(self, turn: Turn) -> Step:
            reason[0] = "interrupted"
            await asyncio.sleep(20)
            return Step(done=True)

        def close(self) -> None:
            time.sleep(last[0])
            closed.append(self)

    sampler = Episodes(OurSampler(), environment_kinds(Hangs), EpisodeConfig(), tok, 256)
    prompts = collate_prompts(sampler.tokenize(toy.train_prompts(2, 3)), 0)
    how: dict[str, Any] = {"tokenizer": tok, "seed": 5, "num_samples": 3, "eos": ENDS}
    for seconds, count in ((0.3, 6), (30.0, 0)):
        closed.clear()
        reason[0], last[0], begun = "", seconds, time.monotonic()
        with stoppable(lambda: reason[0]), pytest.raises(Stopped):
            sampler.generate(MODEL, prompts, SamplingConfig(max_new_tokens=8), **how)
        assert len(closed) == count and time.monotonic() - begun < 10
        monkeypatch.setattr(module, "_CLOSING", 0.5)


@pytest.mark.parametrize(
    ("pays", "reward"), [(np.float32(1.5), 1.5), (torch.tensor(1.5), 1.5), (True, 1.0), (2, 2.0), (np.int64(3), 3.0),
                         (None, None), (math.nan, None), ([1.0], None), ("much", None), (OSError("gone"), None)])  # fmt: skip
def test_what_a_class_for_trl_pays_is_paid_or_told(
    pays: Any, reward: float | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pays(Increment):
        def get_reward(self) -> Any:
            if isinstance(pays, BaseException):
                raise pays
            return pays

        @property
        def view(self) -> Any:
            raise RuntimeError("only a tool that is called is asked")

    names = "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    monkeypatch.setattr(tok, "chat_template", names + make_chat_template("Visitor:", "\nPip:"))
    r = play(Pays, n=2, samples=1, inner=Ends())
    told = r.columns["episode"]
    assert {sum(e["rewards"]) for e in told} == {reward or 0.0}
    assert {e["stop"] for e in told} == {"failed" if reward is None else "done"}
    assert ("didn't pay" in caplog.text) == (reward is None)


METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    **{v: (GRPOConfig, GRPOTrainer, {"num_generations": 4, "variant": v, "kl_coef": 0.1}) for v in VARIANTS},
    **{b: (RLOOConfig, RLOOTrainer, {"baseline": b}) for b in ("rloo", "remax", "batch", "group_batch")},
    **{f"ppo {c}": (PPOConfig, PPOTrainer, {"critic": c, "entropy_coef": 0.1}) for c in ("separate", "shared")},
    "raft": (RAFTConfig, RAFTTrainer, {"num_generations": 4}),
    "online dpo": (OnlineDPOConfig, OnlineDPOTrainer, {"num_generations": 4}),
    "xpo": (OnlineDPOConfig, OnlineDPOTrainer, {"opponent": "reference", "xpo_alpha": 0.1}),
}


def trainer(kind: str, folder: Path, **more: Any) -> Any:
    """A tiny run in an environment."""
    config, make, own = METHODS[kind]
    size = {"steps": 2, "mini_batch_size": 16, "sampling": {"max_new_tokens": 24}, "console": False}
    own = (
        size
        | own
        | ({} if config in (RAFTConfig, GRPOConfig, RLOOConfig, OnlineDPOConfig) else {"rollout_batch_size": 16})
    )
    parts = {"environment": Chat, "rows": toy.train_prompts(16, 0), "eval_rows": []}
    given = {k: more.pop(k) for k in ("environment", "rows", "tools", "reward") if k in more}
    c = config.preset("toy", output_dir=str(folder), **own | more)
    return make(c, more_endings(toy.build_model(0, "tiny")), toy.build_tokenizer(), **parts | given)


def more_endings(model: Any) -> Any:
    """The model, many of whose tokens end a turn: its generation config says so."""
    model.generation_config.eos_token_id = sorted({*ENDS, tok.eos_token_id})
    return model


@pytest.mark.parametrize("credit", ["episode", "turns"])
@pytest.mark.parametrize("kind", METHODS)
def test_observations_teach_nothing(kind: str, credit: str, tmp_path: Path) -> None:
    t = trainer(kind, tmp_path / "run", episodes={"credit": credit})
    t.start()
    method, r = t.method, t.collect(t.next_batch())
    holes = r.real & ~r.completion_mask
    assert int(holes.sum()) > 20, "there are no observations to look at"
    outs: list[Any] = []
    inner = method.module

    def looked(fill: float) -> Callable[..., Any]:
        def call(micro: Any, **options: Any) -> Any:
            out = inner(micro, **options)
            for name in ("logps", "values", "entropy"):
                if isinstance(x := getattr(out, name, None), torch.Tensor):
                    leaf = torch.where(micro.completion_mask, x.detach(), fill).requires_grad_()
                    outs.append((leaf, micro.completion_mask))
                    out = out._replace(**{name: leaf}) if hasattr(out, "_replace") else out
            return out

        return call

    def losses(fill: float, data: Any) -> tuple[list[float], list[torch.Tensor]]:
        outs.clear()
        method.module = looked(fill)
        try:
            terms = [x for micro in method.micro_batches(data) for x in method.loss(micro).values()]
        finally:
            method.module = inner
        sum(weight * x.total for x, weight in terms).backward()
        for leaf, mask in outs:
            assert leaf.grad is None or not bool(leaf.grad[~mask].any()), "an observation has a gradient"
        return [float(x.total.detach()) for x, _ in terms], [leaf.grad for leaf, _ in outs if leaf.grad is not None]

    clean, grads = losses(0.0, r)
    assert any(bool(g.any()) for g in grads)
    wild = r[torch.arange(len(r))]
    for name in ("old_logps", "ref_logps", "rollout_logps", "values", "returns", "token_rewards", "advantages"):
        if (x := getattr(wild, name)) is not None:
            setattr(
                wild, name, torch.where(holes, torch.full_like(x, 7e7 if name == "advantages" else float("nan")), x)
            )
    if method.name in ("online_dpo", "raft"):  # signs of whole answers are read off their advantages
        wild.advantages = r.advantages
    dirty, same = losses(float("nan"), wild)
    assert dirty == clean and all(torch.equal(a, b) for a, b in zip(grads, same))


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo separate", "raft", "online dpo"])
def test_methods_learn_from_episodes(kind: str, tmp_path: Path) -> None:
    t = trainer(kind, tmp_path / "run", eval={})
    history = t.fit()
    event = history[-1]
    assert event["rollout/turns"] > 1.2 and "rewards/environment" in event and event["completions/max_length"] <= 24
    again = trainer(kind, tmp_path / "again")
    again.fit()
    weights = zip(t.method.model.parameters(), again.method.model.parameters())
    assert all(torch.equal(a, b) for a, b in weights), "the same run ends elsewhere"
    sample = (tmp_path / "run" / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert '"messages"' in sample and '"drawn"' in sample and "environments" not in sample


class Increment:
    """As TRL's documentation has it."""

    def __init__(self) -> None:
        self.counter = 0

    def reset(self, **row: Any) -> str | None:
        self.counter = 0
        return None

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter


def test_a_class_for_trl_runs_unchanged(tmp_path: Path) -> None:
    seen: list[Any] = []

    def reward_func(environments: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(environments)
        return [float(env.counter + i) for i, env in enumerate(environments)]

    short = toy.build_tokenizer()
    names = "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    short.chat_template = names + make_chat_template("Visitor:", "\nPip:")
    c = GRPOConfig.preset("toy", output_dir=str(tmp_path / "run"), console=False, steps=1, mini_batch_size=8, num_generations=4,
        sampling={"max_new_tokens": 8})  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        t = GRPOTrainer(
            model=toy.build_model(0, "tiny"), args=c, processing_class=short, reward_funcs=reward_func,
            train_dataset=toy.train_prompts(16, 0), environment_factory=Increment,
        )  # fmt: skip
        t.train()
    assert len(seen) == 8 and all(isinstance(env, Increment) for env in seen) and len({id(env) for env in seen}) == 8


def tool_without_hints(x, y):  # type: ignore[no-untyped-def]
    """Add."""
    return x + y


def good(x: int) -> int:
    """Double.

    Args:
        x: a number.
    """
    return 2 * x


def unknown_hint(x: Missing) -> int:  # type: ignore[name-defined] # noqa: F821
    """Double.

    Args:
        x: a number.
    """
    return 2


class NoReset:
    def step(self, turn: Turn) -> Step:
        return Step()


class Mute(Chat):
    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        return None


class Fails(Chat):
    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        raise OSError("no such game")


class Three(Chat):
    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        return 3  # type: ignore[return-value]


class Late(Chat):
    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        time.sleep(2)
        return "a"


class NoSeed:
    def reset(self, row: dict[str, Any]) -> None: ...

    def step(self, turn):  # type: ignore[no-untyped-def]
        return Step()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no reset": ({"environment": NoReset}, "has no reset"),
    "a short reset": ({"environment": NoSeed}, "has reset(row: 'dict[str, Any]') -> 'None' and step(turn): one that replies has reset(self, row, seed)"),
    "a hint of nothing": ({"tools": [unknown_hint], "reward": len}, "described to a model: name 'Missing' is not defined"),
    "no hints": ({"tools": [tool_without_hints], "reward": len}, "tool 'tool_without_hints' can't be described"),
    "two of one name": ({"tools": [good, good], "reward": len}, "two tools are called 'good'"),
    "a number as tools": ({"tools": 3, "reward": len}, "tools is 3, and 3 can't be called: write tools=[FUNCTION, ...]"),
    "a name as tools": ({"tools": "good", "reward": len}, "tools is 'good', and 'good' can't be called"),
    "tools by name": ({"tools": {"good": good}, "reward": len}, "can't be called"),
    "a number among tools": ({"tools": [good, 3], "reward": len}, "and 3 can't be called"),
    "unknown in a row": (
        {"environment": {"chat": Chat}, "rows": [{"prompt": "a", "environment": "chatt"}]}, "Did you mean 'chat'"),
    "none in a row": ({"environment": {"chat": Chat}, "rows": [{"prompt": "a"}]}, "asks for the environment None"),
    "no prompt": ({"environment": Mute, "rows": [{"answer": 1}]}, "nothing to answer"),
    "a reset that fails": ({"environment": Fails, "rows": [{"answer": 1}]}, "gives none (OSError: no such game), so"),
    "a reset that says a number": ({"environment": Three, "rows": [{"answer": 1}]}, "gives none (TypeError: 3 is neither text"),
    "a late reset": ({"environment": Late, "rows": [{"answer": 1}], "episodes": {"call_seconds": 0.1}}, "'Late' gives none (TimeoutError: gave no answer within"),
    "no prompt, and tools alone": ({"tools": [good], "environment": None, "reward": len, "rows": [{"answer": 1}]}, "has no prompt, and no environment gives one"),
    "wrong arguments": ({"environment": None, "episodes": {"environment": "calculator", "options": {"digitz": 3}}}, "environment 'Calculator' can't be made (TypeError: "),
    "limits of nothing": ({"environment": None, "episodes": {"max_turns": 3}}, "episodes.max_turns is set, but neither"),
    "credit of nothing": ({"environment": None, "episodes": {"credit": "turns"}}, "episodes.credit is set, but neither"),
    "no room": ({"environment": Chat, "episodes": {"max_tokens": 2}}, "has room for 2"),
    "an object": ({"environment": Chat()}, "give the class"),
    "unknown name": ({"environment": None, "episodes": {"environment": "calculater"}}, "Did you mean 'calculator'"),
    "a decoder": ({"environment": Chat, "decoder": {"stop": "json"}}, "Use decoder=plain"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_refused_before_the_first_step(what: str, tmp_path: Path) -> None:
    given, words = BAD[what]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((ConfigError, DataError)) as error:
            trainer("grpo", tmp_path / "run", **given)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_decoder_and_an_environment_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="several: leave one of them out"):
        trainer("raft", tmp_path / "run", environment=Chat, decoder={"kind": "best_of_n"})


def test_templates_are_refused_before_the_first_step(tmp_path: Path) -> None:
    def run(template: str, **parts: Any) -> Any:
        t = toy.build_tokenizer()
        t.chat_template = template
        c = GRPOConfig.preset("toy", output_dir=str(tmp_path / "run"), console=False, steps=1, mini_batch_size=8)
        return GRPOTrainer(c, toy.build_model(0, "tiny"), t, rows=toy.train_prompts(8, 0), **parts)

    plain = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    with pytest.raises(
        ConfigError, match="no place for tools, so the model would never see 'good'.*model.chat_template=chatml"
    ):
        run(plain, tools=[good], reward=len)
    rewrites = "{% for m in messages %}{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}{{ eos_token }}{% endfor %}"
    with pytest.raises(DataError, match="rewrites an answer once it is replied to: token"):
        run(rewrites, environment=Chat)


def test_the_page_about_environments_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "environments.md").read_text(encoding="utf-8")
    (code,), configs = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "yml"))
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(code, "environments.md", "exec"), {"__name__": "page"})
    assert "rollout/turns" in (tmp_path / "echo" / "metrics.jsonl").read_text(encoding="utf-8")
    for config in configs:
        (tmp_path / "run.yaml").write_text(config, encoding="utf-8")
        assert GRPOConfig.load("run.yaml", ["episodes.max_turns=3"]).episodes.max_turns == 3


def test_an_environment_by_its_name_on_a_command_line(tmp_path: Path) -> None:
    words = [
        "--toy",
        "steps=1",
        "mini_batch_size=8",
        "num_generations=4",
        "console=false",
        "device=cpu",
    ]
    words += [f"output_dir={tmp_path / 'run'}", "episodes.options.questions=2"]
    call("grpo", *words, "episodes.environment=toy")
    events = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert "rollout/turns" in events and "rewards/environment" in events
    others = [w for w in words if "questions" not in w]  # an environment whose first words are its own
    call("grpo", *others, "--overwrite", "episodes.environment=test_episodes:Chat")
    said = call("grpo", *words, "--overwrite", "episodes.environment=toi", code=1)
    assert "Did you mean 'toy'?" in " ".join(said.split())
    said = call("grpo", *words, "--overwrite", "episodes.environment=mine.py:Echo", code=1)
    assert "A module is named without the file's ending: 'mine'." in " ".join(said.split())


@pytest.mark.parametrize("how", ["whole", "streamed", "held out"])
def test_rows_of_a_file_need_no_prompt_where_reset_gives_one(how: str, tmp_path: Path) -> None:
    """The first message is the environment's; a row that has a prompt keeps it, and its misspelt name is no row without."""
    file, more = (
        tmp_path / "rows.jsonl",
        {"whole": [], "streamed": ["data.streaming=true"]}.get(how, ["data.eval_size=2"]),
    )
    rows: list[Any] = [{"animal": a} for a in ("owls", "bees", "frogs", "wolves")] + [
        {"prompt": "Guess!", "animal": "owls"}
    ]
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    words = [
        "--toy", "steps=3", "mini_batch_size=4", "num_generations=2", "console=false", "device=cpu", f"data.path={file}",
        f"output_dir={tmp_path / 'run'}", "samples_per_step=4", "sampling.max_new_tokens=4", *more,
    ]  # fmt: skip
    call("grpo", *words, "episodes.environment=twenty-questions")
    said = [json.loads(x) for x in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    first = {x["prompt"] if isinstance(x["prompt"], str) else x["prompt"][0]["content"] for x in said}
    assert len(said) >= 12 and "I think of an animal. Ask me what it is like, or guess." in first
    assert first <= {"I think of an animal. Ask me what it is like, or guess.", "Guess!"}
    if how == "whole":
        found = " ".join(
            call(
                "doctor", "grpo", *words, "episodes.environment=twenty-questions", f"output_dir={tmp_path / 'b'}"
            ).split()
        )
        assert "the columns are" not in found
        for name, environment, sentence in (
            ("promt", ["episodes.environment=twenty-questions"], "Did you mean 'prompt' by 'promt'?"),
            ("animal", ["rewards=[{verify: number}]"], "row 0: the columns are animal, but one of the formats needs"),
        ):
            file.write_text(json.dumps({name: "owl"}) + "\n")
            said_of = " ".join(call("grpo", *words, "--overwrite", *environment, code=1).split())
            assert sentence in said_of, said_of


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_policy_learns_to_use_a_calculator(seed: int) -> None:
    path = Path(__file__).resolve().parent.parent / "nbs" / "tutorials" / "a_policy_learns_to_use_a_calculator.ipynb"
    cells = [
        "".join(c["source"]) for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"
    ]
    made: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for source in cells[1 : next(i for i, s in enumerate(cells) if "def learner" in s) + 1]:
            exec(compile(source.partition('if MODEL == "toy":\n    trainer')[0], path.name, "exec"), made)
        t = made["learner"](seed, *made["guesser"](seed))
        before = t.evaluate()["eval/environment"]
        t.fit()
        after = t.evaluate()["eval/environment"]
    print(f"seed {seed}: {before:.0%} -> {after:.0%}")
    assert before < 0.2 and after >= 0.8
