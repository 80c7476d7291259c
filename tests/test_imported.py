"""Runs of TRL, transformers and TensorBoard beside our own: the same names, and no bytes that hang, raise or fill the memory."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rlhf_nb.core import RunError
from rlhf_nb.widgets import imported
from rlhf_nb.widgets.imported import _METRICS, find_runs, log_files, read_import
from rlhf_nb.widgets.reader import RunReader
from rlhf_nb.widgets.runs import Runs, runs_told

NAMES = ("loss", "rewards/chosen", "objective/kl", "lr")  # of this package
TRL = ("loss", "rewards/chosen", "kl", "learning_rate")  # of the same in trainer_state.json


def state(folder: Path, steps: int = 30, names: tuple[str, ...] = TRL, **more: Any) -> Path:
    """A folder as transformers' Trainer leaves it: two checkpoints, the second of which repeats the first one's lines."""
    rows = [{"step": s, "epoch": s / 10, **{n: round(1 / s, 6) for n in names}} for s in range(1, steps + 1)]
    rows.append({"step": steps, "eval_loss": 0.25, "eval_runtime": 1.5})
    for step in (steps // 2, steps):
        (folder / f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
        told = {"log_history": [r for r in rows if r["step"] <= step], "max_steps": steps, "train_batch_size": 8} | more
        (folder / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(told))
    return folder


def record(step: int, **numbers: Any) -> bytes:
    """One record of an event file, as torch and TensorFlow frame it; `tensor_NAME` is written as TensorFlow 2 writes it."""
    from tensorboard.compat.proto.event_pb2 import Event

    event = Event(step=step, wall_time=1e9 + step)
    for tag, number in numbers.items():
        value = event.summary.value.add(tag=tag.removeprefix("tensor_"))
        if isinstance(number, str):
            value.tensor.string_val.append(number.encode())
        elif tag.startswith("tensor_"):
            value.tensor.dtype = 1
            value.tensor.float_val.append(number)
        else:
            value.simple_value = number
    data = event.SerializeToString()
    return len(data).to_bytes(8, "little") + bytes(4) + data + bytes(4)


def ours(folder: Path, steps: int = 30) -> Path:
    """The same numbers as a run of this package."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [{"step": 0, "type": "start", "method": "dpo", "total_steps": steps}]
    lines += [{"step": s, "type": "step", **{n: round(1 / s, 6) for n in NAMES}} for s in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in lines))
    return folder


def test_three_programs_share_their_panels(tmp_path: Path) -> None:
    """A curve of each in one panel, with equal numbers, whichever file they came from."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    ours(tmp_path / "here")
    state(tmp_path / "trl")
    with SummaryWriter(str(tmp_path / "tb")) as writer:
        for s in range(1, 31):
            for tag in ("train/loss", "train/rewards/chosen", "train/kl", "train/learning_rate"):
                writer.add_scalar(tag, round(1 / s, 6), s)
            writer.add_image("picture", __import__("numpy").zeros((3, 4, 4)), s)
        writer.add_text("args", json.dumps({"beta": 0.1, "seed": 3}))
    (extra,) = log_files(tmp_path / "tb")
    with open(extra, "ab") as f:
        f.write(record(31, tensor_loss=0.5))
    runs = Runs(tmp_path)
    rows = {r["name"]: r for r in runs.rows()}
    assert {n: r["method"] for n, r in rows.items()} == {"here": "dpo", "trl": "transformers", "tb": "TensorBoard"}
    assert rows["trl"]["state"] == "ended" and rows["trl"]["total"] == 30 and rows["tb"]["numbers"]["loss"] == 0.5
    compared = runs.compare("here", "trl", "tb")
    for reader in compared.readers:
        for name in NAMES:
            steps, values = reader.series(name)
            assert steps[:30].tolist() == [*range(1, 31)]
            assert values[:30].tolist() == pytest.approx([1 / s for s in range(1, 31)], abs=1e-6)
    assert compared.readers[1].last("eval/loss") == 0.25
    assert compared.readers[2].config == {"beta": 0.1, "seed": 3}
    panels = {p["title"]: [x["label"] for x in p["lines"]] for _, ps in _groups(compared) for p in ps}
    assert panels["KL to the start, nats per answer"] == ["here", "trl", "tb"]
    assert runs.compare("here", "tb", by="kl").data()["groups"]
    assert "TensorBoard" in runs_told(tmp_path)


def _groups(compared: Any) -> list[tuple[str, Any]]:
    return [(g["name"], g["panels"]) for g in compared.data()["groups"]]


def test_what_a_tracker_wrote_is_no_second_run(tmp_path: Path) -> None:
    inside = ours(tmp_path / "here") / "rlhf_nb"
    inside.mkdir()
    (inside / "events.out.tfevents.1").write_bytes(b"")
    logs = state(tmp_path / "trl") / "runs"
    logs.mkdir()
    (logs / "events.out.tfevents.1").write_bytes(b"")
    assert sorted(p.name for p in find_runs(tmp_path)) == ["here", "trl"]
    assert [p.name for p in find_runs(tmp_path / "trl" / "checkpoint-30")] == ["checkpoint-30"], "opened on purpose"


def test_a_run_that_goes_on_is_read_again(tmp_path: Path) -> None:
    folder = state(tmp_path / "trl", steps=10, max_steps=50)
    reader = RunReader(folder)
    assert reader.poll() and not reader.poll()
    assert reader.status.state == "running" and reader.status.step == 10 and reader.status.total == 50
    state(folder, steps=20, max_steps=50)
    assert reader.poll() and reader.last("loss") == 0.05 and reader.generation == 2
    assert RunReader(folder, window=(5, 7)).poll()
    os.utime(folder / "checkpoint-20" / "trainer_state.json", (1e9, 1e9))
    reader.poll()
    assert reader.status.over


def test_without_tensorboard_the_line_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1").write_bytes(bytes(40))
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    runs = Runs(tmp_path)
    assert "pip install tensorboard" in runs.rows()[0]["status"]
    with pytest.raises(RunError, match="pip install tensorboard"):
        runs.compare("tb")


def hostile_files() -> dict[str, list[bytes]]:
    """Bytes that somebody may call a state or an event file."""
    good, rng = record(1, loss=0.5, **{"train/objective/kl": 2.0}), random.Random(0)
    many = b"".join(record(s, **{f"tag{s}.{i}": 1.0 for i in range(500)}) for s in range(8))
    events = [
        b"", bytes(100), good[:-5], (2**64 - 1).to_bytes(8, "little") + bytes(50), (1 << 40).to_bytes(8, "little") + bytes(50),
        (1 << 20).to_bytes(8, "little") + bytes(50), record(2**62, loss=1.0), record(-1, loss=1.0), record(1, loss=float("nan")), many,
        record(1, **{"args/x": "[" * 900}), record(1, **{"args/x": json.dumps({"steps": "x", "kl_budget": [1]})}), record(1, tensor_loss=float("inf")),
    ]  # fmt: skip
    events += [bytes(rng.randrange(256) if rng.random() < 0.05 else b for b in good * 4) for _ in range(60)]
    row = {"step": 1, "loss": 0.5}
    told: list[Any] = [
        [], 3, {"log_history": 3}, {"log_history": [3, [], {}, {"loss": 1}, {"step": "1", "loss": 1}, {"step": True, "loss": 1}, {"step": 1, "loss": True}]},
        {"log_history": [row], "max_steps": "x"}, {"log_history": [row], "max_steps": -1}, {"log_history": [row], "max_steps": 10**400},
        {"log_history": [{"step": 1, "loss": 10**400}, {"step": 10**400, "loss": 1}, {"step": 2**60, "loss": 1}, {"step": 1, "x": float("nan")}]},
        {"log_history": [{"step": 1, **{f"k{i}": 1 for i in range(5000)}}]}, {"log_history": [row], "steps": [1], "kl_budget": "x", "kl_target": {}},
    ]  # fmt: skip
    states = [json.dumps(x).encode() for x in told]
    states += [b"", b"\xff\xfe", b"[" * 10**6, b'{"log_history": ' + b"[" * 10**6, bytes(1000)]
    return {"trainer_state.json": states, "events.out.tfevents.1": events}


@pytest.mark.parametrize("name", ["trainer_state.json", "events.out.tfevents.1"])
def test_no_bytes_hang_or_raise(name: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    begin, files = time.process_time(), hostile_files()[name]
    for i, data in enumerate(files):
        (tmp_path / f"run-{i}").mkdir()
        (tmp_path / f"run-{i}" / name).write_bytes(data)
    runs = Runs(tmp_path)
    assert len(runs.rows()) == len(files)
    for i in range(len(files)):
        found = read_import(log_files(tmp_path / f"run-{i}"))
        assert len(found.numbers) <= _METRICS
        assert all(len(s) == len(v) and (s >= 0).all() and (s < 2**53).all() for s, v in found.numbers.values())
        try:
            json.dumps(runs.compare(f"run-{i}").data(), allow_nan=False)
        except RunError as error:
            assert name in str(error)
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("kind", ["small records", "empty records", "wide records", "settings", "a state"])
def test_a_large_file_is_read_in_part(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, records and settings are counted; what is beyond is said, and what came before is shown."""
    pytest.importorskip("tensorboard")
    assert imported._MOST < 10**6  # read in about five seconds
    monkeypatch.setattr(imported, "_MOST", 600)
    files = {
        "small records": record(1, loss=0.5) * 1000, "empty records": record(1, loss=0.5) + bytes(16) * 1000,
        "wide records": record(1, loss=0.5) + record(2, **{f"a{i}": 1.0 for i in range(900)}),
        "settings": record(1, loss=0.5) + b"".join(record(1, **{f"args/{k}": json.dumps({f"{k}.{i}": i for i in range(900)})}) for k in range(9)),
    }  # fmt: skip
    path = tmp_path / ("trainer_state.json" if kind == "a state" else "events.out.tfevents.1")
    rows = [{"step": s, "loss": 0.5} for s in range(900)]
    path.write_bytes(files[kind] if kind in files else json.dumps({"log_history": rows}).encode())
    found = read_import([path])
    assert found.numbers["loss"][1][0] == 0.5 and sum(len(s) for s, _ in found.numbers.values()) <= 601
    assert len(found.config) <= _METRICS and (kind == "settings") == (not found.problem), found.problem
    assert "more than 600 records and numbers" in found.problem or kind == "settings"


def test_a_million_tags_and_tags_of_a_megabyte(tmp_path: Path) -> None:
    """Names of metrics are counted and bounded, and one that spells a path leads nowhere."""
    pytest.importorskip("tensorboard")
    begin, strange = time.process_time(), tmp_path / "runs"
    names = ["../../etc/passwd", "/etc/passwd", "a\0b", "..", "", "%2e%2e%2f", "C:\\x", "nan" * 20]
    many = b"".join(record(s, **{f"{s}.{i}": float("nan") for i in range(1000)}) for s in range(1000))
    for name, data in {
        "many": many,
        "long": b"".join(record(1, **{f"{i}" + "a" * 1_000_000: 1.0}) for i in range(100)),
        "paths": record(1, **dict.fromkeys(names, 1.0)),
        "nan": b"".join(record(s, loss=float("nan")) for s in range(20_000)),
    }.items():
        (strange / name).mkdir(parents=True)
        (strange / name / "events.out.tfevents.1").write_bytes(data)
    begin = time.process_time()
    runs = Runs(strange)
    shown = {row["name"]: len(json.dumps(runs.compare(row["name"]).data(), allow_nan=False)) for row in runs.rows()}
    assert set(shown) == {"many", "long", "paths", "nan"} and max(shown.values()) < 5_000_000, shown
    assert time.process_time() - begin < 20
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]


def test_names_that_are_no_files(tmp_path: Path) -> None:
    """A pipe, a link out of the folder and a folder under these names: said, or no run; never waited for."""
    for name in ("pipe", "link", "folder"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    os.mkfifo(tmp_path / "runs" / "pipe" / "trainer_state.json")
    (tmp_path / "secret.json").write_text('{"log_history": [{"step": 1, "loss": 1}]}')
    (tmp_path / "runs" / "link" / "trainer_state.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "runs" / "folder" / "events.out.tfevents.1").mkdir()
    assert Runs(tmp_path / "runs").rows() == []
    for name in ("pipe", "link", "folder"):
        reader = RunReader(tmp_path / "runs" / name)
        reader.poll()
        assert not reader.keys


def test_what_lies_beside_a_run_may_be_anything(tmp_path: Path) -> None:
    """Notes that a stranger wrote: bounded text."""
    told: list[Any] = [
        3,
        [],
        {"note": 3, "tags": "x"},
        {"note": "n" * 9000, "tags": ["t" * 99, 3, None] * 50},
        {"note": "\x1b[2J", "tags": ["\u202e"]},
    ]
    for i, one in enumerate(told):
        folder = ours(tmp_path / "runs" / f"run-{i}", 3)
        (folder / "notes.json").write_text(json.dumps(one))
    (ours(tmp_path / "runs" / "nested", 3) / "notes.json").write_text("[" * 9000)
    (ours(tmp_path / "runs" / "linked", 3) / "notes.json").symlink_to(tmp_path / "runs" / "run-3" / "notes.json")
    runs = Runs(tmp_path / "runs")
    rows = {row["name"]: row for row in runs.rows()}
    assert len(rows) == len(told) + 2 and json.dumps(list(rows.values()), allow_nan=False)
    assert len(rows["run-3"]["note"]) == 2000 and rows["run-3"]["tags"] == ["t" * 40] * 7
    assert not any("\x1b" in r["note"] or "\u202e" in "".join(r["tags"]) for r in rows.values())
    assert not rows["linked"]["note"]
    runs.note("run-2", "mine")
    runs.tag("run-2", "a", "b", "a")
    runs.tag("run-2", remove=["a"])
    assert next(r for r in runs.rows() if r["name"] == "run-2")["tags"] == ["b"]
