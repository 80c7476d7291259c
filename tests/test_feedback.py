"""Feedback: what was acknowledged survives killed writers; the store forgets on request."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from rlhf_nb.core import ConfigError
from rlhf_nb.feedback.store import Feedback, FeedbackStore

ANSWER = "In the forest. " * 300  # long enough that a line may be torn


def write_forever(path: Path, who: str, told: int) -> None:
    """A server process: every line it prints to `told` is a rating that its user was thanked for."""
    store = FeedbackStore(path)
    for i in range(1_000_000):
        kept = store.add(who, Feedback("rating", "up", f"{who} asks {i}", (ANSWER,), ("v1",), consent=True))
        os.write(told, f"{kept.id}\n".encode())


def killed(path: Path, rng: random.Random, writers: int = 2) -> list[str]:
    """Start writers, kill them without warning; returns the ids that were acknowledged."""
    read, write = os.pipe()
    children = []
    for k in range(writers):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(read)
                write_forever(path, f"user {k}", write)
            finally:
                os._exit(1)
        children.append(pid)
    os.close(write)
    got = os.read(read, 17)  # at least one is written
    time.sleep(rng.random() * 0.02)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    while more := os.read(read, 1 << 16):
        got += more
    os.close(read)
    return [x for x in got.decode().split("\n") if len(x) == 16]


def check_kills(path: Path, times: int) -> tuple[int, int]:
    """Kill writers so many times; returns how many ratings were acknowledged, and how many lines are torn."""
    rng, acknowledged = random.Random(0), list[str]()
    for _ in range(times):
        acknowledged += killed(path, rng)
    store = FeedbackStore(path)
    store.add("last", Feedback("rating", "up", "p", ("a",), ("v1",), consent=True))  # closes a torn last line
    whole = {x.id for x in store.all() if x.user == store.hashed("last") or x.answers == (ANSWER,)}
    assert len(set(acknowledged)) == len(acknowledged) and set(acknowledged) <= whole
    return len(acknowledged), store.torn


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills are tried with fork, which this system lacks")


@needs_fork
@pytest.mark.filterwarnings("ignore")
def test_no_acknowledged_rating_is_lost_in_kills(tmp_path: Path) -> None:
    told, _ = check_kills(tmp_path / "feedback.jsonl", 5)
    assert told >= 5


@needs_fork
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_acknowledged_rating_is_lost_in_a_hundred_kills(tmp_path: Path) -> None:
    told, torn = check_kills(tmp_path / "feedback.jsonl", 100)
    print(f"100 kills: {told} ratings acknowledged, none lost, none torn; {torn} lines of nobody torn", file=sys.stderr)
    assert told >= 100


def test_the_check_of_kills_can_fail(tmp_path: Path) -> None:
    """A store that acknowledges before it writes is found out."""
    path = tmp_path / "feedback.jsonl"
    kept = FeedbackStore(path).add("ada", Feedback("rating", "up", "p", (ANSWER,), ("v1",), consent=True))
    line = path.read_bytes()
    path.write_bytes(line[:-2])
    assert kept.id not in {x.id for x in FeedbackStore(path).all()}
    assert json.loads(line)["id"] == kept.id


def test_presidio_finds_and_replaces(tmp_path: Path) -> None:
    pytest.importorskip("presidio_analyzer", reason="the extra pii is not installed")
    from rlhf_nb.feedback.scrub import Scrubber, presidio

    clean = Scrubber(presidio()[0])
    text = "Mail john.smith@example.org or call +1 415 555 0132, card 4111 1111 1111 1111, from 192.168.1.20."
    assert clean.text(text) == "Mail <EMAIL_ADDRESS> or call <PHONE_NUMBER>, card <CREDIT_CARD>, from <IP_ADDRESS>."
    assert clean.text("Owls live in the forest and eat 3 mice.") == "Owls live in the forest and eat 3 mice."
    if presidio()[1]:  # a spaCy model is installed
        assert "Gonzales" not in Scrubber(presidio(names=True)[0]).text("John Smith lives next to Maria Gonzales.")
    else:
        with pytest.raises(ConfigError, match="spacy download en_core_web_lg"):
            presidio(names=True)


def test_a_run_says_which_file_it_read(tmp_path: Path) -> None:
    """A model that was trained on an export is found by the file's contents, after the file was moved."""
    from crowd import simulate

    from rlhf_nb.data import toy
    from rlhf_nb.feedback.annotators import aggregate
    from rlhf_nb.feedback.governance import export_rows, models_that_saw
    from rlhf_nb.train.dpo import DPOConfig
    from rlhf_nb.train.stage import run_stage
    from rlhf_nb.widgets.labels import make_pairs

    store = FeedbackStore(tmp_path / "feedback.jsonl")
    prompts = [row["prompt"] for row in toy.train_prompts(12)]
    speakers = {
        name: [toy.speak(p, name, random.Random(i)) for i, p in enumerate(prompts)] for name in ("kind", "rude")
    }
    for who, x in simulate(make_pairs(prompts, speakers), users=2, poison=0.0):
        store.add(who, x)
    said = store.standing()
    made = export_rows(store, aggregate(said).pairs, said, tmp_path / "pairs.jsonl")
    moved = made.path.rename(tmp_path / "moved.jsonl")
    settings = {
        "output_dir": str(tmp_path / "runs/dpo"),
        "steps": 1,
        "epochs": None,
        "mini_batch_size": 4,
        "console": False,
        "device": "cpu",
    }
    run_stage(DPOConfig.preset("toy", data={"path": str(moved)}, model={"name_or_path": "toy"}, **settings))
    (saw,) = models_that_saw({made.users[0]}, store, [tmp_path / "runs"])
    assert saw.folder.name == "dpo" and saw.through == "pairs.jsonl"
    assert models_that_saw({"nobody"}, store, [tmp_path / "runs"]) == []


SHARES = [(n, 1, 0) for n in (3, 20, 10**6)]
SHARES += [pytest.param(n, 3, s, marks=pytest.mark.slow) for n in (1, 3, 20, 10**6) for s in (0, 1, 2)]


@pytest.mark.parametrize(("names", "judged", "seed"), SHARES)
def test_new_names_of_one_address_are_one_opinion(names: int, judged: int, seed: int) -> None:
    """A fifth of the votes is hostile, under so many names; counting heads must be beaten by ten points."""
    from crowd import simulate

    from rlhf_nb.data import toy
    from rlhf_nb.feedback.annotators import aggregate
    from rlhf_nb.widgets.labels import make_pairs

    prompts = [row["prompt"] for row in toy.train_prompts(500, seed=3)]
    speakers = {n: [toy.speak(p, n, random.Random(i)) for i, p in enumerate(prompts)] for n in toy.PERSONAS}
    said = []
    for i, (who, x) in enumerate(
        simulate(make_pairs(prompts, speakers, per_prompt=1, seed=seed), judged=judged, seed=seed)
    ):
        user = f"mallory-{i % names}" if who == "mallory" else who
        said.append(Feedback(**{**x.__dict__, "user": user, "source": "one key", "id": f"{i:06d}"}))

    def right(rows: list[dict[str, object]]) -> float:
        gaps = [toy.gold_reward([str(r["prompt"])] * 2, [str(r["chosen"]), str(r["rejected"])]) for r in rows]
        return sum(float(a > b) for a, b in gaps if a != b) / sum(bool(a != b) for a, b in gaps)

    assert right(aggregate(said).pairs) > right(aggregate(said, robust=False).pairs) + 0.1


def test_neither_one_flood_nor_many_names_move_the_limit_of_others() -> None:
    from rlhf_nb.feedback.annotators import Vote, limited

    def kept(counts: dict[str, int]) -> Counter[str]:
        votes = [Vote(user, f"item-{i}", 1, f"{user}-{i}") for user, n in counts.items() for i in range(n)]
        return Counter(v.user for v in limited(votes))

    honest = {f"user-{i}": 72 for i in range(16)}
    for names in (1, 3, 20):
        assert kept(honest | {f"mallory-{i}": 280 // names for i in range(names)}).items() >= honest.items(), names
    assert kept({f"user-{i}": 10 for i in range(9)} | {"mallory": 100})["mallory"] == 30


def test_only_what_chance_does_not_explain_tells_users_apart() -> None:
    """Forty worlds in which all users are equally right, and one in which they aren't."""
    from rlhf_nb.feedback.annotators import _shrunk

    draw, apart = random.Random(0), []
    for _ in range(40):
        votes = {f"user-{i}": draw.randrange(40, 100) for i in range(16)}
        right = {u: sum(draw.random() < 0.8 for _ in range(n)) / n for u, n in votes.items()}
        pulled = _shrunk(right, votes, set())
        apart.append((max(pulled.values()) - min(pulled.values())) / (max(right.values()) - min(right.values())))
    assert sorted(apart)[20] < 0.35 and max(apart) <= 1
    few = _shrunk({"a": 0.6, "b": 0.9, "c": 0.3, "d": 0.4}, dict.fromkeys("abcd", 1000), {"c"})
    assert few["a"] == pytest.approx(0.6, abs=0.01) and few["b"] == pytest.approx(0.9, abs=0.01)
    assert (few["c"], few["d"]) == (0.3, 0.4), "who isn't believed pulls none"


def test_a_name_is_forgotten_under_every_key_and_address(tmp_path: Path) -> None:
    from rlhf_nb.feedback.store import forget

    store = FeedbackStore(tmp_path / "feedback.jsonl")
    for source in ("key ann", "address 10.0.0.1"):
        for user in ("u-17", "u-18"):
            store.add(user, Feedback("rating", "up", "p", ("a",), ("v1",), consent=True), source)
    assert len({x.user for x in store.all()}) == 4 and len(forget(store, "u-17").ids) == 2
    assert {x.name for x in store.all()} == {store.hashed("u-18")}
    assert len(forget(store, "key ann").ids) == 1


def test_the_documented_call_forgets_in_logs_and_finds_copies_exports_and_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from command import call

    from rlhf_nb.feedback.governance import export_rows
    from rlhf_nb.feedback.traffic import Served, TrafficLog

    documented = (Path(__file__).parents[1] / "docs/feedback.md").read_text()
    line = next(line for line in documented.splitlines() if "--forget" in line and line.startswith("rlhf-nb"))
    store, log = FeedbackStore(tmp_path / "feedback.jsonl"), TrafficLog(tmp_path / "traffic.jsonl", texts=True)
    answer = Served(1.8e9, "cmpl-1", "pip", "v1", "", 3, 4, 0.1, 0.2, "stop", prompt="where I live", answer="there")
    for number, source in enumerate(("key ann", "address 10.0.0.1", "key bob")):
        for user in ("u-17", "u-18"):
            store.add(user, Feedback("choice", "first", f"p{number}", ("a", "b"), ("v1", "v1"), consent=True), source)
            log.add(answer, user, source)
        if number == 0:
            log.path.rename(log.path.with_name("traffic.jsonl.1"))
    said = store.standing()
    rows = [{"prompt": x.prompt, "chosen": "a", "rejected": "b", "feedback": [x.id]} for x in said]
    made = export_rows(store, rows, said, tmp_path / "pairs.jsonl")
    (tmp_path / "models/v2").mkdir(parents=True)
    (tmp_path / "models/v2/data.json").write_text(json.dumps({"read": [{"digest": made.digest}]}))
    (tmp_path / "last week.txt").write_bytes(store.path.read_bytes())
    monkeypatch.chdir(tmp_path)
    shown = call(*line.split()[1:])
    assert {x.name for x in store.all()} == {store.hashed("u-18")} and len(store) == 3
    assert "last week.txt" in shown and "pairs.jsonl" in shown and "Models that saw it: 1" in shown
    for part in (log.path, log.path.with_name("traffic.jsonl.1")):
        lines = [json.loads(line) for line in part.read_text().splitlines() if line.strip()]
        assert lines and {line["name"] for line in lines} == {log.names.hashed("u-18")}


@pytest.mark.parametrize("field", ["annotator", "user", "name", "from", "source"])
def test_a_line_in_any_shape_is_forgotten_by_its_owner(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The body of a request as the docs show it has no annotator: it was deleted, and then the command ended in a KeyError."""
    from command import call

    monkeypatch.chdir(tmp_path)
    lines = [{field: who, "model": "pip", "id": f"c-{who}", "rating": "up"} for who in ("zoe", "bob")]
    Path("f.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = call("feedback", "f.jsonl", "--forget", "zoe")
    assert "zoe" not in Path("f.jsonl").read_text() and "bob" in Path("f.jsonl").read_text() and "1" in shown
