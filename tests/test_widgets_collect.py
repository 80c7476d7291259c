"""Labels survive: killed writers, torn lines, full disks, several hands on one file; keys mean what they say."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_nb.core import ConfigError, DataError, RunError
from rlhf_nb.data import toy
from rlhf_nb.data.formats import COLUMNS, detect_format
from rlhf_nb.data.readers import read_rows
from rlhf_nb.widgets.collect import LabelDesk, LabelQueue, PreferenceCollector, pair_html, read_pairs
from rlhf_nb.widgets.labels import (
    LABEL_FORMATS,
    LabelStore,
    Pair,
    annotator_agreement,
    cohen_kappa,
    export_preferences,
    label_rows,
    make_pairs,
    tally,
    to_preferences,
)

ROOT = Path(__file__).resolve().parent.parent
PAIRS = [Pair(f"prompt {i}", f"first {i}", f"second {i}", ("x", "y")) for i in range(40)]


def queue(path: Path, who: str = "ada", **options: object) -> LabelQueue:
    return LabelQueue(PAIRS, LabelStore(path, who), least_seconds=0.0, **options)  # type: ignore[arg-type]


WRITER = """
import sys
from rlhf_nb.widgets.labels import LabelStore, Pair
store = LabelStore(sys.argv[1], sys.argv[2])
for i in range(10_000):
    store.add(Pair(f"prompt {i}", f"first {i} " + "x" * 3000, f"second {i}"), "first")
    print(i, flush=True)
"""


def writer(path: Path, who: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), who], stdout=subprocess.PIPE, text=True, env=env)


def test_nothing_acknowledged_is_lost_when_writers_are_killed(tmp_path: Path) -> None:
    """Two processes write to one file and are killed without warning; what they were told is stored is there."""
    path = tmp_path / "labels.jsonl"
    workers = {who: writer(path, who) for who in ("ada", "bob")}
    told: dict[str, int] = {}
    try:
        for who, process in workers.items():
            assert process.stdout is not None
            for line in process.stdout:
                told[who] = int(line)
                if told[who] >= 25:
                    break
        time.sleep(0.05)
    finally:
        for process in workers.values():
            process.send_signal(signal.SIGKILL)
    for who, process in workers.items():
        assert process.stdout is not None
        told[who] = max([told[who], *(int(x) for x in process.stdout.read().split() if x.isdigit())])
        process.wait()
        process.stdout.close()
    store = LabelStore(path, "ada")
    for who, last in told.items():
        stored = {x.pair.prompt for x in store.labels(who)}
        assert {f"prompt {i}" for i in range(last + 1)} <= stored
    store.add(Pair("later", "a", "b"), "tie")
    assert LabelStore(path).labels("ada")[-1].pair.prompt == "later"


@pytest.mark.parametrize("cut", [2, 20, 200])
def test_torn_line_costs_only_itself(tmp_path: Path, cut: int) -> None:
    q = queue(tmp_path / "l.jsonl")
    for key in "abt":
        q.press(key)
    path = q.store.path
    path.write_bytes(path.read_bytes()[:-cut])
    again = LabelStore(path, "ada")
    assert len(again.labels()) == 2 and again.torn == 0  # an unfinished line may still be being written
    with pytest.warns(UserWarning, match="torn"):
        again.add(PAIRS[39], "first")
    assert [x.pair.prompt for x in again.labels()][-1] == "prompt 39" and len(again.labels()) == 3
    with pytest.warns(UserWarning, match="torn"):
        assert len(LabelStore(path, "ada").labels()) == 3


def test_line_without_its_end_is_whole_after_the_next(tmp_path: Path) -> None:
    q = queue(tmp_path / "l.jsonl")
    q.press("a")
    q.store.path.write_bytes(q.store.path.read_bytes()[:-1])
    again = LabelStore(q.store.path, "ada")
    assert len(again.labels()) == 0
    again.add(PAIRS[39], "first")
    assert len(again.labels()) == 2 and again.torn == 0


def test_resume_asks_only_what_is_open(tmp_path: Path) -> None:
    q = queue(tmp_path)
    asked = []
    for _ in range(15):
        assert q.current is not None
        asked.append(q.current.id)
        q.press(random.Random(len(asked)).choice("abtxs"))
    again = queue(tmp_path)
    assert again.done == 15 and again.current is not None and again.current.id not in asked
    assert again.order == q.order
    bob = queue(tmp_path, "bob")
    assert bob.done == 0 and bob.current is not None and bob.current.id == asked[0]


def test_undo_crosses_a_restart_and_a_second_verdict_replaces(tmp_path: Path) -> None:
    q = queue(tmp_path)
    first = q.current
    q.press("a")
    again = queue(tmp_path)
    assert again.press("u").startswith("Taken back") and again.current == first and again.done == 0
    again.press("t")
    assert first is not None
    again.store.add(first, "both_bad")
    assert [x.verdict for x in again.store.labels()] == ["both_bad"]
    lines = [json.loads(x) for x in again.store.path.read_text().splitlines()]
    assert [e["type"] for e in lines] == ["label", "undo", "label", "label"]  # nothing is ever deleted


def test_letters_are_about_the_screen_and_verdicts_about_the_pair(tmp_path: Path) -> None:
    q = queue(tmp_path)
    seen = set()
    for _ in PAIRS:
        assert q.current is not None
        left, pair = q.sides[0], q.current
        q.press("a")
        label = q.store.labels()[-1]
        assert {"first": pair.first, "second": pair.second}[label.verdict] == left
        seen.add(label.swapped)
    assert seen == {True, False}
    rows = to_preferences(q.store.labels())
    assert len(rows) == len(PAIRS) and detect_format(rows[0]) == "preference"


def test_keys_that_do_not_count(tmp_path: Path) -> None:
    slow = LabelQueue(PAIRS, LabelStore(tmp_path / "a.jsonl"), least_seconds=30.0)
    assert "too soon" in slow.press("a") and slow.done == 0
    long = LabelQueue([Pair("p", "word " * 1000, "short")], LabelStore(tmp_path / "b.jsonl"), least_seconds=0.0)
    assert "word word" not in pair_html(long) and "short" not in pair_html(long)
    for key in "abtxs":
        assert "Open both" in long.press(key)
    long.press("o")
    assert "word word" in pair_html(long) and long.press("b") == "Stored: B."
    assert "means nothing" in queue(tmp_path / "c").press("q") and "no label" in queue(tmp_path / "c").press("u")


def test_full_disk_keeps_the_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.write", full)
    q = queue(tmp_path / "full.jsonl")
    before = q.current
    assert "was not stored" in q.press("a") and q.current is before
    with pytest.raises(RunError, match="Free some space"):
        q.store.add(PAIRS[0], "first")


def test_file_cut_by_somebody(tmp_path: Path) -> None:
    q = queue(tmp_path)
    q.press("a")
    q.store.path.write_text("")
    assert "became shorter" in q.press("b")


def test_events_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    q = queue(tmp_path)
    q.press("a")
    with open(q.store.path, "a") as f:
        f.write(json.dumps({"type": "star", "pair": "x", "annotator": "ada"}) + "\n")
    assert len(LabelStore(tmp_path).labels()) == 1 and LabelStore(tmp_path).torn == 0


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to compare"):
        make_pairs(["p"], {})
    with pytest.raises(DataError, match="2 prompts"):
        make_pairs(["p", "q"], {"x": ["one"], "y": ["a", "b"]})
    with pytest.raises(ConfigError, match="ties"):
        to_preferences([], ties="keep")
    with pytest.raises(DataError, match="no pairs"):
        LabelQueue([], LabelStore(tmp_path))
    with pytest.raises(DataError, match="one of a, b, t"):
        PreferenceCollector(PAIRS, path=tmp_path).label_with(lambda p, a, b: "c")


def test_kappa_by_hand_and_agreement(tmp_path: Path) -> None:
    yes_no = ["y"] * 20 + ["y"] * 5 + ["n"] * 10 + ["n"] * 15, ["y"] * 20 + ["n"] * 5 + ["y"] * 10 + ["n"] * 15
    assert cohen_kappa(*yes_no)[0] == pytest.approx(0.4)  # the textbook's example: p_o 0.7, p_e 0.5
    for who in ("ada", "bob"):
        q = queue(tmp_path, who)
        while q.current is not None:
            want = "first" if int(q.current.prompt.split()[1]) % 2 else "second"
            q.press("ab"[(want == "second") != q.swapped])
    (found,) = annotator_agreement(q.store.labels())
    assert found.n == 40 and found.agree == 1.0 and found.kappa == 1.0
    assert tally(q.store.labels())[0]["a wins"] == 40 == tally(q.store.labels())[0]["b wins"]


def test_messages_and_export(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "Hi <there>"}]
    collector = PreferenceCollector([prompt], {"x": ["one & only"], "y": ["two"]}, path=tmp_path, least_seconds=0.0)
    page = collector.static_html()
    assert "Hi &lt;there&gt;" in page and "one &amp; only" in page
    collector.press("a")
    assert export_preferences(collector.labels(), tmp_path / "out.jsonl") == 1
    (row,) = (json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines())
    assert row["prompt"] == prompt and {row["chosen"], row["rejected"]} == {"one & only", "two"}


def test_widget_without_a_front_end(tmp_path: Path) -> None:
    pytest.importorskip("ipywidgets")
    collector = PreferenceCollector(PAIRS, path=tmp_path, least_seconds=0.0)
    parts = (collector.widget, collector._parts)[1]

    def typed(pair: str | None = None, **said: object) -> str:
        """What the page's script writes into the field; returns what the page is told."""
        here = collector.queue.current
        assert here is not None
        parts["keys"].value = json.dumps({"pair": pair or here.id, "count": random.random(), **said})
        return str(parts["told"].value)

    assert "Stored: A." in typed(key="a", reasons=["clearer", "<b>"]) and collector.queue.done == 1
    before = collector.queue.current
    assert before is not None and "Stored: tie." in typed(key="t")
    assert (
        "another pair" in typed(pair=before.id, key="b") and collector.queue.done == 2
    )  # it was meant for the one before
    assert "Taken back" in typed(key="u") and collector.queue.done == 1 and collector.queue.current == before
    assert "Note stored" in typed(note="hm")
    for bad in (
        "",
        "{",
        "[1]",
        '{"pair": 3}',
        "9" * 5000,
        "x" * 100_000,
    ):  # whatever stands in the field, the queue stays
        parts["keys"].value = bad
    parts["finish"].click()  # nothing was displayed: nothing to replace
    again = PreferenceCollector(PAIRS, path=tmp_path)
    assert again.queue.done == 1 and again.store.note_on(before) == "hm" and again.labels()[0].reasons == ("clearer",)


def test_asked_again(tmp_path: Path) -> None:
    """Pairs that come twice: unannounced, turned round, long after; the first answer stays; kill and undo keep count."""
    q, places = queue(tmp_path, repeats=0.4), dict[str, list[tuple[int, str]]]()
    for turn in range(200):
        if q.current is None:
            break
        places.setdefault(q.current.id, []).append((turn, q.sides[0]))
        q.press("a" if turn % 3 else "t")
        if turn == 30:
            before = q.current
            q.press("u")
            q.press("t")
            q = queue(tmp_path, repeats=0.4)  # another kernel
            assert q.current == before
    twice = [x for x in places.values() if len(x) > 1]
    assert q.current is None and q.done == 40 and 8 <= len(twice) <= 24 and max(map(len, places.values())) == 2
    assert all(b[0] - a[0] >= 1 and a[1] != b[1] for a, b in twice)
    early = [b[0] - a[0] for a, b in twice if b[0] < 40]
    assert early and min(early) >= LabelQueue.GAP
    labels, again = q.store.labels(), q.store.labels(again=True)
    assert len(labels) == 40 and len(again) == len(twice) and len(to_preferences(labels)) <= 40
    (own,) = annotator_agreement([*labels, *again])
    assert own.annotators == ("ada", "ada again") and own.n == len(twice)


def test_every_format_is_read_back(tmp_path: Path) -> None:
    """What labels become is what `data.path` reads, whatever the format; a decision's two sides are never mixed up."""
    store = LabelStore(tmp_path, "ada")
    for pair, verdict in zip(PAIRS, ("first", "second", "tie", "both_bad", "skip")):
        store.add(pair, verdict)
    LabelStore(tmp_path, "bob").add(PAIRS[0], "first")
    store.refresh()
    assert set(LABEL_FORMATS) == set(COLUMNS) - {"stepwise"}
    for form in LABEL_FORMATS:
        n = export_preferences(store.labels(), tmp_path / f"{form}.jsonl", format=form)
        rows = read_rows(tmp_path / f"{form}.jsonl")
        assert n == len(rows) == (6 if form == "unpaired" else 2) and detect_format(rows[0]) == form
        won = [json.dumps(r) for r in rows if r.get("label", True)]
        assert "prompt 0" in won[0] and "prompt 1" in won[1] and (form == "prompt" or "first 0" in won[0])
        if form not in ("preference", "prompt"):
            assert "second 0" not in won[0] and "second 1" in won[1] and "first 1" not in won[1]
    thumbs = {(r["prompt"], r["completion"]): r["label"] for r in label_rows(store.labels(), "unpaired", ties="both")}
    assert thumbs["prompt 3", "first 3"] is thumbs["prompt 3", "second 3"] is False
    assert thumbs["prompt 2", "first 2"] is thumbs["prompt 2", "second 2"] is True
    with pytest.raises(ConfigError, match="stepwise"):
        label_rows([], "stepwise")


def test_pairs_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": p.prompt, "chosen": p.first, "rejected": p.second} for p in PAIRS]
    file.write_text("".join(json.dumps(r) + "\n" for r in [*rows, rows[0] | {"rejected": rows[0]["chosen"]}]))
    pairs = read_pairs(file)
    assert [(p.prompt, p.first, p.second) for p in pairs] == [(p.prompt, p.first, p.second) for p in PAIRS]
    desk = LabelDesk(pairs, tmp_path / "l.jsonl", least_seconds=0.0)
    for who in ("ada", "  bob\n", "bob"):
        desk.queue(who).press("a")
    assert set(desk.queues) == {"ada", "bob"} and {x.annotator for x in LabelStore(desk.path).labels()} == {
        "ada",
        "bob",
    }
    assert len(LabelStore(desk.path).labels("bob")) == 2
    with pytest.raises(ConfigError, match="annotator"):
        desk.queue(" ")
    desk.MOST = 2
    with pytest.raises(RunError, match="people label here"):
        desk.queue("eve")


def test_simulated_labels_train_a_reward_model(tmp_path: Path) -> None:
    from rlhf_nb.train.reward import RewardConfig, RewardTrainer

    prompts = [r["prompt"] for r in toy.train_prompts(60, seed=3)]
    rng = random.Random(0)
    said = {who: [toy.speak(p, who, rng) for p in prompts] for who in ("kind", "rude")}
    collector = PreferenceCollector(prompts, said, path=tmp_path, annotator="simulated")
    collector.label_with(lambda p, a, b: "a" if toy.gold_reward([p], [a]) > toy.gold_reward([p], [b]) else "b")
    rows = collector.preferences()
    settings = {"output_dir": str(tmp_path / "rm"), "epochs": 10.0, "console": False, "mini_batch_size": 16}
    trainer = RewardTrainer(
        RewardConfig.preset("toy", **settings), toy.build_model(0, "tiny"), toy.build_tokenizer(), rows=rows
    )
    history = trainer.fit()
    assert history[-1]["rewards/accuracies"] > 0.9
    collector.ask_least_sure(trainer.members, toy.build_tokenizer())  # nothing is open: nothing to ask
