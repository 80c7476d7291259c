"""Mutated files for everything that reads files: errors of the package, in time, or it is a fault. `python tests/fuzz.py --n 20000`.

Each target takes a good file, damages it in a random but repeatable way, and reads it as a run, a view, a server or a command would. Damage is bytes
that are flipped, values of another type, values that are dear to check (hundreds of thousands of nulls, a megabyte of text, twenty thousand
keys), and names that are links, pipes, sockets or folders. A fault is any exception that isn't one of the package's own, more than five CPU seconds,
more than 512 MB of memory, or a good checkpoint that isn't found beside a damaged one.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from rich.console import Console

from rlhf_nb.bench.talk import manner_of, read_generation
from rlhf_nb.config import ModelConfig, parse_overrides, read_config_file
from rlhf_nb.core import RlhfError
from rlhf_nb.data import toy
from rlhf_nb.data.readers import read_rows
from rlhf_nb.data.sources import tokenize_preferences, tokenize_sft
from rlhf_nb.judges.constitution import load_constitution
from rlhf_nb.judges.endpoint import AnswerCache, read_reply
from rlhf_nb.learn.checks import grade
from rlhf_nb.models.heads import RewardModel, ScalarHead
from rlhf_nb.models.load import find_model, load_model, load_tokenizer
from rlhf_nb.pipeline.stages import PipelineConfig
from rlhf_nb.run.checkpoint import latest_complete, load_checkpoint, save_checkpoint
from rlhf_nb.run.control import Control, RunControl
from rlhf_nb.run.lock import RunLock, holder_of
from rlhf_nb.run.log import EventLog, RunDir, read_metrics
from rlhf_nb.run.state import roll_back
from rlhf_nb.scale.predict import named_gpu, plan_report
from rlhf_nb.scale.topology import DecoderShape, Job
from rlhf_nb.serve.protocol import ChatAsked, Refused, TextAsked, read_request
from rlhf_nb.train.grpo import GRPOConfig
from rlhf_nb.train.sft import SFTConfig
from rlhf_nb.train.stage import read_json
from rlhf_nb.untrusted import Unreadable, json_value
from rlhf_nb.widgets.labels import LabelStore, Pair, annotator_agreement, tally, to_preferences
from rlhf_nb.widgets.reader import open_runs
from rlhf_nb.widgets.report import metrics_text, report, screen
from rlhf_nb.widgets.runs import Runs
from rlhf_nb.widgets.samples import read_samples, sample_table, select_samples, token_measures, tokens_html

SECONDS, MB = 5, 512
SNIPPETS = [
    b"[" * 3000, b'{"a":' * 3000, b'"\\ud83d"', b'\\ud83d', b"\xed\xa0\xbd", b"\xff\xfe", b"\x00" * 16, b"\n", b"\r", b"\r\n\r\n", b"null", b"true", b"-1",
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 40, b"9" * 5000, b"0.1", b'""', b'"', b"{}", b"[]", b"}", b"]", b",", b":", b"\\", b"\x1b[2J",
    b"\x1b]52;c;aGk=\x07", b"\xe2\x80\xae", b"<script>alert(1)</script>", b"x" * 70_000, b"&a ", b"*a ", b"<<: ", b"- ", b"!!int ", b"!!python/name:os.system ",
    b"? ", b"| ", b"# ", b"'", b"%", b"\t", b"\xef\xbb\xbf", b"1_000", b"2026-13-45", b"=", b"@", b"&a [*a, *a]", b"../../etc/passwd", b"id", b"step", b"served",
]  # fmt: skip
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**53, 2**63, 10**400, -(10**400), 0.5, 1e308, "NaN", "Infinity", "", "x", "toy", "\ud83d", "a" * 70_000, "\x1b[31m", "1", [], {},
    [[]], [1, "x", None], {"": {}}, {"a": [1]}, [{"role": "user"}], ["\ud800"], [[[[[[[[]]]]]]]], "../x", "step", "set", "label", "auto", "1e-5", {"value": "x", "low": [], "high": {}},
]  # fmt: skip

DEAR: list[Callable[[], Any]] = [  # small to write, dear to check one by one
    lambda: [None] * 200_000, lambda: [[0]] * 100_000, lambda: [{}] * 100_000, lambda: "a" * 1_000_000, lambda: {f"k{i}": None for i in range(20_000)},
    lambda: [{"role": "user", "content": [{"type": "text", "text": 1}]}] * 20_000, lambda: "(" * 200_000, lambda: [[[[[[0] * 8] * 8] * 8] * 8] * 8],
]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a value of JSON."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


def retyped(value: Any, draw: random.Random) -> Any:
    """A value with something else at one of its places, or with a key that is gone, double or of another name."""
    value = json.loads(json.dumps(value))
    place = draw.choice(list(places(value)))
    other = draw.choice(DEAR)() if draw.random() < 0.05 else draw.choice(VALUES)
    if not place:
        return other
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    what = draw.randrange(4) if isinstance(inner, dict) else 3
    if what == 0:
        del inner[place[-1]]
    elif what == 1:
        inner[str(draw.choice(VALUES))[:100]] = inner.pop(place[-1])
    else:
        inner[place[-1]] = other
    return value


def bytewise(data: bytes, draw: random.Random) -> bytes:
    """A file with a few wounds: bytes flipped, put in, taken out, doubled, or everything after a place gone."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        at, n = draw.randrange(len(out) + 1), draw.choice((1, 1, 2, 5, 20, 200))
        what = draw.randrange(6)
        if what == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            del out[at : at + n]
        elif what == 2:
            out[at:at] = out[at : at + n]
        elif what == 3:
            del out[at:]
        else:
            out[at:at] = draw.choice(SNIPPETS)
    return bytes(out)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A damaged file: by its bytes, or, of JSON or lines of JSON, by its values."""
    if draw.random() < 0.5:
        return bytewise(data, draw)
    try:
        return json.dumps(retyped(json.loads(data), draw)).encode()
    except ValueError:
        pass
    rows = data.split(b"\n")
    at = draw.randrange(len(rows))
    try:
        rows[at] = json.dumps(retyped(json.loads(rows[at]), draw)).encode()
        return b"\n".join(rows)
    except ValueError:
        return bytewise(data, draw)


def jsonl(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(r).encode() + b"\n" for r in rows)


EVENTS = jsonl(
    {"time": 1.0, "rank": 0, "step": 0, "type": "start", "method": "ppo", "total_steps": 40, "format": 1,
     "controls": {"kl_coef": {"value": 0.1, "low": 0.0, "high": 10.0}, "lr": {"value": 1e-3, "low": 0.0, "high": 0.1}}},
    *({"time": 1.0 + s, "rank": 0, "step": s, "type": "step", "loss": 1 / s, "objective/kl": 0.1 * s, "objective/scores": 0.2 * s, "lr": 1e-3,
       "policy/entropy_avg": 2.0, "perf/step_s": 0.1, "perf/tokens_per_s": 100.0, "grad_norm": "NaN" if s == 7 else 1.0} for s in range(1, 13)),
    {"time": 9.0, "rank": 0, "step": 6, "type": "eval", "eval/gold": 0.5},
    {"time": 9.1, "rank": 0, "step": 7, "type": "control", "request": "set", "id": "a", "key": "kl_coef", "ok": True, "why": "", "old": 0.1, "new": 0.2},
    {"time": 9.2, "rank": 0, "step": 8, "type": "warning", "message": "a word"},
    {"time": 9.3, "rank": 0, "step": 9, "type": "save", "path": "step-9"},
    {"time": 9.4, "rank": 0, "step": 12, "type": "end", "reason": None},
)  # fmt: skip
SAMPLES = jsonl(
    *({"time": 1.0, "rank": 0, "step": s, "type": "sample", "prompt": "Visitor: Where do owls live?\nPip:" if s % 2 else [{"role": "user", "content": "Hi"}],
       "completion": " In trees.", "tokens": [5, 6, 7], "old_logps": [-1.0, -0.5, -0.1], "ref_logps": [-1.1, -0.4, -0.2], "values": [0.1, 0.2, 0.3],
       "advantages": [0.5, -0.5, 0.0], "score": 1.5, "rewards": {"gold": 1.0}} for s in range(1, 6))
)  # fmt: skip
CONFIG = (
    SFTConfig(
        steps=10, output_dir="runs/x", data={"path": "rows.jsonl"}, model={"name_or_path": "toy", "lora": {"r": 4}}
    )
    .to_yaml()
    .encode()
)
GRPO_JSON = GRPOConfig.preset("toy").to_json().encode()
PIPELINE = PipelineConfig.preset("toy").to_yaml().encode()
CONTROL = jsonl(
    {"time": 1.0, "id": "abc", "request": "set", "key": "kl_coef", "value": 0.2},
    {"served": "abc", "step": 3, "ok": True, "request": "set", "key": "kl_coef", "value": 0.2},
    {"time": 2.0, "id": "def", "request": "pause"}, {"time": 2.0, "id": "ghi", "request": "resume"}, {"time": 2.0, "id": "jkl", "request": "save"},
)  # fmt: skip
SFT_ROWS = jsonl(*({k: r[k] for k in ("prompt", "completion")} for r in toy.sft_rows(6)))
PAIR_ROWS = jsonl({"prompt": "Q: 1?\n", "chosen": "one", "rejected": "two", "margin": 0.5}, {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
                  {"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}], "rejected": [{"role": "assistant", "content": "c"}]})  # fmt: skip
TABLE = b'prompt,completion,label\n"a, b",c,1\nd,"e\nf",0\n"[{""role"": ""user"", ""content"": ""x""}]",g,1\n'
PRINCIPLES = b"principles:\n  - ask: Which answer is kinder?\n    name: kind\n  - Which is shorter?\n"
REPLY = json.dumps({"message": {"content": "A"}, "logprobs": {"content": [{"token": "A", "logprob": -0.1, "top_logprobs": [{"token": "A", "logprob": -0.1}, {"token": "B", "logprob": -2.0}]}]}}).encode()  # fmt: skip

STATE = json.dumps(
    {"log_history": [{"step": s, "loss": 1 / s, "eval_loss": 0.5} for s in (1, 2, 3)], "max_steps": 3}
).encode()
EVENT = (
    (38).to_bytes(8, "little")
    + bytes(4)
    + b"\t"
    + bytes(8)
    + b"\x10\x03*\x19\n\x17\n\x10train/learning_r\x15\0\0\0?"
    + bytes(4)
)  # of TensorBoard
MACHINE = json.dumps(
    {"flops": 1e14, "bandwidth": 1e12, "memory": 80, "link": 1e11, "network": 1e10, "host": 1e10, "products": 0.5}
).encode()

CHAT = json.dumps({"model": "m", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 8,
                   "temperature": 0.5, "stop": ["x"], "n": 2, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "user": "u"}).encode()  # fmt: skip
TEXT = json.dumps(
    {"model": "m", "prompt": ["Hi", "Ho"], "max_tokens": 8, "logprobs": 2, "echo": True, "seed": 3, "top_p": 0.9}
).encode()


class Target(NamedTuple):
    """One kind of file: what a good one holds, what reads it, how often it is drawn."""

    good: bytes
    read: Callable[[Path, bytes], Any]  # gets an empty folder, and the damaged bytes
    weight: int


class Paper:
    """What a control file is served with, without a model."""

    def __init__(self, folder: Path) -> None:
        self.run_dir, self.step = RunDir(folder), 3
        self.log = EventLog(self.run_dir.metrics_path)
        ranks = SimpleNamespace(everyone=lambda x: [x])
        self.engine = SimpleNamespace(
            is_main=True, gather_object=lambda x: [x], ranks=ranks, set_lr=lambda step: 1e-3, lr_scale=1.0
        )
        self.config = SimpleNamespace(optimizer=SimpleNamespace(lr=1e-3))
        self.number = 0.1
        self.method = SimpleNamespace(controls=lambda: {"kl_coef": Control(lambda: self.number, self.put, 0.0, 10.0)})
        self.observers = SimpleNamespace(call=lambda *a: None)
        self.meter = SimpleNamespace(seconds={}, exclude=lambda s: None)

    def put(self, value: float) -> None:
        self.number = value

    def event(self, kind: str, **fields: Any) -> None:
        self.log.append(kind, self.step, **fields)

    def save(self) -> None:
        """Nothing to save."""

    evaluate = save


def control(folder: Path, data: bytes) -> None:
    """Asked while it runs, then resumed from a checkpoint that knew nothing of it."""
    path, run = folder / "control.jsonl", Paper(folder)
    run.event("start")
    steering = RunControl(run)
    path.write_bytes(data)
    steering.waiting()
    steering.serve(SimpleNamespace(requested="over"))  # type: ignore[arg-type]  # a pause ends at once
    run.log.close()
    again = RunControl(Paper(folder))
    again.listen(0)
    again.run.log.close()
    assert (
        path.stat().st_size < len(data) + 100_000 and run.run_dir.metrics_path.stat().st_size < 3 * len(data) + 100_000
    )
    assert all(isinstance(e, dict) for e in read_metrics(folder))


def metrics(folder: Path, data: bytes) -> None:
    """A damaged log: seen in the terminal, in a report, by Prometheus, and cut back by a resume."""
    (folder / "metrics.jsonl").write_bytes(data)
    readers = open_runs(folder)
    readers[0].poll()
    Console(file=io.StringIO(), width=100, force_terminal=True).print(screen(readers))
    metrics_text(readers)
    if readers[0].status.state != "waiting":
        report(readers, folder / "report.html")
    EventLog(folder / "metrics.jsonl").truncate_after(5)
    for e in read_metrics(folder):
        float(e["step"]), e.get("type")


def samples(folder: Path, data: bytes) -> None:
    """Damaged samples: in a report, and token by token."""
    (folder / "metrics.jsonl").write_bytes(EVENTS)
    (folder / "samples.jsonl").write_bytes(data)
    report(folder)
    rows = read_samples(folder)
    sample_table(select_samples(rows, "kl"))
    for row in rows:
        if token_measures(row):
            tokens_html(row)


def config(folder: Path, data: bytes) -> None:
    """A damaged config.yaml: as a record in a run's folder, and as a config to train with."""
    (folder / "config.yaml").write_bytes(data)
    (folder / "metrics.jsonl").write_bytes(EVENTS)
    reader = open_runs(folder)[0]
    reader.poll()
    str(reader.status)
    report(reader, folder / "report.html")
    kind = PipelineConfig if data[:4] == PIPELINE[:4] else SFTConfig
    try:
        kind.load(folder / "config.yaml").to_yaml()
    finally:
        RunDir(folder).open({"steps": 10}, resume=True)  # a record never stands in the way


def config_json(folder: Path, data: bytes) -> None:
    (folder / "grpo.json").write_bytes(data)
    GRPOConfig.load(folder / "grpo.json").to_yaml(comments=True)


def overrides(folder: Path, data: bytes) -> None:
    words = data.decode("utf-8", "replace").split("\n")
    SFTConfig.load(None, words)
    parse_overrides(words)


def data_file(name: str) -> Callable[[Path, bytes], None]:
    """A file of rows, tokenized as training would."""

    def read(folder: Path, data: bytes) -> None:
        path = folder / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") and data[:20] != b"raw" else data)
        rows = read_rows(path)
        tokenize_sft(rows, TOKENIZER, 64)
        if "pairs" in name:
            tokenize_preferences(rows, TOKENIZER, 64)

    return read


def labels(folder: Path, data: bytes) -> None:
    path = folder / "labels.jsonl"
    path.write_bytes(data)
    store = LabelStore(path, "ann")
    found = store.labels()
    to_preferences(found, "both"), annotator_agreement(found), tally(found)
    store.add(Pair("q", "one", "two", ("x", "y")), "first")
    assert any(x.pair.first == "one" for x in LabelStore(path).labels()), "a label was lost"


def checkpoint(folder: Path, data: bytes) -> None:
    """The newer of two checkpoints is damaged in one of its files: the older one, or the newer if it is whole, is found and good."""
    shutil.copytree(CHECKPOINTS, folder / "c")
    draw = random.Random(data)
    newest = sorted((folder / "c").iterdir())[-1]
    victim = draw.choice(sorted(newest.iterdir()))
    if draw.random() < 0.1:
        victim.unlink()
    else:
        victim.write_bytes(mutated(victim.read_bytes(), draw))
    found = latest_complete(folder / "c", warn=lambda text: None)
    assert found is not None, "a good checkpoint was lost"
    try:
        tensors, meta = load_checkpoint(found)
    except RlhfError:
        assert found == newest, "a good checkpoint was refused"
        tensors, meta = load_checkpoint(sorted((folder / "c").iterdir())[0])
    good = float(tensors["model"]["w"][0]) if "model" in tensors and "w" in tensors["model"] else None
    assert good in (1.0, 2.0, None)


def model_folder(folder: Path, data: bytes) -> None:
    """One file of a model's folder is damaged."""
    shutil.copytree(MODEL, folder / "m")
    draw = random.Random(data)
    victim = draw.choice([f for f in sorted((folder / "m").iterdir()) if f.name != "tokenizer.json"])
    damaged = mutated(victim.read_bytes(), draw)
    victim.write_bytes(damaged)
    find_model(str(folder / "m"))
    manner_of(CHATTY, read_generation(ModelConfig(name_or_path=str(folder / "m"))))
    load_model(str(folder / "m"), device="cpu")


def reward_folder(folder: Path, data: bytes) -> None:
    """One file of a reward model's folder is damaged."""
    shutil.copytree(REWARD, folder / "m")
    draw = random.Random(data)
    victim = draw.choice([f for f in sorted((folder / "m").iterdir()) if f.suffix != ".md"])
    victim.write_bytes(mutated(victim.read_bytes(), draw))
    RewardModel.load(folder / "m")


def adapter_folder(folder: Path, data: bytes) -> None:
    (folder / "adapter_config.json").write_bytes(data)
    (folder / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    load_model(str(folder), device="cpu")


def small(folder: Path, data: bytes) -> None:
    """Files that are read by one small function each."""
    path = folder / "some.json"
    path.write_bytes(data)
    read_json(path)
    AnswerCache(path)
    read_metrics(path)
    read_reply(json_value(data), ["A", "B"])


def imported(name: str) -> Callable[[Path, bytes], None]:
    """What another program wrote of a run: in the table of runs, and drawn."""

    def read(folder: Path, data: bytes) -> None:
        (folder / "theirs").mkdir()
        (folder / "theirs" / name).write_bytes(data)
        runs = Runs(folder)
        json.dumps(runs.rows(), allow_nan=False)
        json.dumps(runs.compare("theirs").data(), allow_nan=False)

    return read


def beside(folder: Path, data: bytes) -> None:
    """A note that a stranger put beside a run."""
    run = folder / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_bytes(EVENTS)
    (run / "notes.json").write_bytes(data)
    runs = Runs(folder)
    json.dumps(runs.rows(), allow_nan=False)
    runs.tag("run", "seen")


def submission(folder: Path, data: bytes) -> None:
    """What a student handed in; the exercise's name is always damaged, so nothing is run."""
    (folder / "ada.json").write_bytes(data.replace(b"rloo", b"r1oo"))
    grade(folder, seed=0)


def machine(folder: Path, data: bytes) -> None:
    """The rates of a kind of GPU, and what they predict."""
    (folder / "mine.yaml").write_bytes(data)
    gpu = named_gpu(str(folder / "mine.yaml"))
    shape = DecoderShape(2, 64, 128, 4, 4, 16, 100, False)
    plan_report(shape, Job("dpo", 16, 16, token_budget=64, mini_batch=8), (1, 64), gpu, price=1.0)


def principles(folder: Path, data: bytes) -> None:
    (folder / "p.yaml").write_bytes(data)
    read_config_file(folder / "p.yaml")
    load_constitution(folder / "p.yaml")


def body(folder: Path, data: bytes) -> None:
    """The body of a request to the server."""
    for kind in (ChatAsked, TextAsked):
        with suppress(Refused):
            read_request(kind, data)


def bind(path: Path) -> None:
    """A socket's name; bound from its folder, because a socket's path is short."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)
    finally:
        os.chdir(here)


def sparse(path: Path) -> None:
    """A terabyte that takes no room."""
    with open(path, "wb") as f:
        f.truncate(1 << 40)


def kinds_of_names(victim: Path) -> dict[str, Callable[[Path], None]]:
    """How to make each kind of name that is no file of its folder's; `victim` lies outside, beside a pipe."""
    return {
        "link": lambda p: p.symlink_to(victim),
        "link to nothing": lambda p: p.symlink_to(victim.with_name("made.txt")),
        "link to itself": lambda p: p.symlink_to(p.name),
        "link to a device": lambda p: p.symlink_to("/dev/zero"),
        "link to a pipe": lambda p: p.symlink_to(victim.with_name("pipe")),
        "pipe": os.mkfifo,
        "socket": bind,
        "directory": lambda p: p.mkdir(),
    }


def folder_of_names(folder: Path, data: bytes) -> None:
    """A run, or a model's folder, in which one to three names are no files; read and written by whatever does."""
    draw, home, victim = random.Random(data), folder / "run", folder / "outside" / "diary.txt"
    victim.parent.mkdir()
    victim.write_bytes(EVENTS)
    os.mkfifo(victim.with_name("pipe"))
    shutil.copytree(CHECKPOINTS, home / "checkpoints")
    shutil.copytree(MODEL, home / "model")
    for name, text in (
        ("metrics.jsonl", EVENTS),
        ("samples.jsonl", SAMPLES),
        ("config.yaml", CONFIG),
        ("control.jsonl", CONTROL),
    ):
        (home / name).write_bytes(text)
    names = [p.relative_to(home) for p in home.rglob("*") if p.is_file()]
    names += [Path("lock.json"), Path("questions.jsonl"), Path("stage.json"), Path("metrics.rank1.jsonl")]
    for name in draw.sample(names, draw.choice((1, 1, 2, 3))):
        (home / name).unlink(missing_ok=True)
        draw.choice([*kinds_of_names(victim).values(), sparse])(home / name)
    run, readers = RunDir(home), open_runs(home)
    acts: list[Callable[[], Any]] = [
        lambda: read_metrics(home), lambda: read_samples(home), lambda: report(home, folder / "report.html"), run.config,
        lambda: [r.poll() for r in readers], lambda: run.request("pause"), lambda: run.open({"steps": 10}, resume=True), lambda: find_model(str(home / "model")),
        lambda: load_model(str(home / "model"), device="cpu"), lambda: SFTConfig.load(home), lambda: read_json(home / "stage.json"), lambda: roll_back(home, 1),
        lambda: EventLog(run.metrics_path).append("step", 3), lambda: EventLog(run.samples_path).truncate_after(3), lambda: RunLock(home).__enter__().__exit__(),
        lambda: load_checkpoint(latest_complete(run.checkpoints, warn=lambda text: None) or home), lambda: holder_of(home),
    ]  # fmt: skip
    draw.shuffle(acts)
    try:
        for act in acts[:4]:
            with suppress(RlhfError, Unreadable):
                act()
    finally:
        assert victim.read_bytes() == EVENTS and not victim.with_name("made.txt").exists(), (
            "something outside was changed"
        )


TOKENIZER, CHATTY = toy.build_tokenizer(), SimpleNamespace(chat_template="x", eos_token_id=1)
CHECKPOINTS, MODEL, REWARD = Path(), Path(), Path()


def prepare(folder: Path) -> None:
    """Good checkpoints and a good model, made once."""
    global CHECKPOINTS, MODEL, REWARD
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    CHECKPOINTS, MODEL, REWARD = folder / "checkpoints", folder / "model", folder / "reward"
    for step in (1, 2):
        tensors = {"model": {"w": torch.full((4,), float(step))}, "optimizer": {"m": torch.zeros(4)}}
        save_checkpoint(
            CHECKPOINTS, step, tensors, {"step": step, "name": "sft", "world_size": 1, "engine": {"lr": [1.0]}}, keep=2
        )
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    net = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), **shape, max_position_embeddings=32))
    says = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "eos_token_id": [1, 2],
        "max_new_tokens": 32,
        "typical_p": 0.9,
    }
    net.generation_config = GenerationConfig(do_sample=True, repetition_penalty=1.1, **says)
    net.save_pretrained(MODEL)
    TOKENIZER.save_pretrained(MODEL)
    RewardModel(net.model, ScalarHead(8, "mlp", 4), pooling="mean").save(
        REWARD, load_tokenizer(ModelConfig(name_or_path="toy"))
    )


TARGETS: dict[str, Target] = {
    "control.jsonl": Target(CONTROL, control, 30),
    "metrics.jsonl": Target(EVENTS, metrics, 20),
    "samples.jsonl": Target(SAMPLES, samples, 15),
    "config.yaml": Target(CONFIG, config, 10),
    "pipeline.yaml": Target(PIPELINE, config, 3),
    "grpo.json": Target(GRPO_JSON, config_json, 10),
    "overrides": Target(b"optimizer.lr=1e-5\nseed=3\nmodel.lora={r: 8}\ndata.path=x.jsonl\nsteps=null", overrides, 10),
    "rows.jsonl": Target(SFT_ROWS, data_file("rows.jsonl"), 20),
    "pairs.jsonl": Target(PAIR_ROWS, data_file("pairs.jsonl"), 20),
    "rows.json": Target(json.dumps([json.loads(r) for r in SFT_ROWS.splitlines()]).encode(), data_file("rows.json"), 10),
    "rows.csv": Target(TABLE, data_file("rows.csv"), 10),
    "rows.tsv": Target(TABLE.replace(b",", b"\t"), data_file("rows.tsv"), 5),
    "rows.jsonl.gz": Target(SFT_ROWS, data_file("rows.jsonl.gz"), 5),
    "labels.jsonl": Target(b"", labels, 10),
    "checkpoint": Target(b"seed of the damage", checkpoint, 20),
    "model": Target(b"seed of the damage", model_folder, 6),
    "reward model": Target(b"seed of the damage", reward_folder, 4),
    "adapter": Target(json.dumps({"base_model_name_or_path": "x/y", "peft_type": "LORA", "r": 4}).encode(), adapter_folder, 2),
    "names": Target(b"seed of the damage", folder_of_names, 30),
    "chat body": Target(CHAT, body, 10),
    "text body": Target(TEXT, body, 5),
    "small files": Target(REPLY, small, 10),
    "principles.yaml": Target(PRINCIPLES, principles, 5),
    "trainer_state.json": Target(STATE, imported("trainer_state.json"), 5),
    "events": Target(EVENT * 5, imported("events.out.tfevents.1"), 10),
    "beside a run": Target(b'{"note": "n", "tags": ["a"], "parent": "../x", "at": 3, "changed": ["a: 1 -> 2"]}', beside, 5),
    "submission": Target(b'{"student": "ada", "answers": {"rloo": "def f(s): return s"}}', submission, 5),
    "machine.yaml": Target(MACHINE, machine, 5),
}  # fmt: skip


def label_file() -> bytes:
    """A good file of labels."""
    with tempfile.TemporaryDirectory() as folder:
        for who in ("ann", "bob"):
            store = LabelStore(Path(folder) / "labels.jsonl", who)
            for i, verdict in enumerate(("first", "second", "tie", "skip")):
                store.add(Pair(f"q{i}", f"a{i}", f"b{i}", ("one", "two")), verdict, seconds=1.5)
            store.note(Pair("q0", "a0", "b0"), "a word")
            store.undo()
        return (Path(folder) / "labels.jsonl").read_bytes()


def memory(word: str) -> float:
    """MB of this process, of a line of /proc/self/status: VmRSS is what it holds now, VmHWM the most since it was last reset."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(x for x in lines if x.startswith(word)).split()[1]) / 1024
    except (OSError, StopIteration):  # no such file here: nothing is said of memory
        return 0.0


def forget_peak() -> float:
    """Count the most memory from here on; returns what is held now."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


class TooLong(BaseException):
    """A case has used up its time."""


@contextmanager
def limited(seconds: float, wall: float = 120) -> Iterator[None]:
    """Raise inside when the CPU time is used up, which other work on the machine doesn't use; or when a case waits without computing."""
    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds, f"more than {seconds} s of CPU time"),
        signal.SIGALRM: (signal.ITIMER_REAL, wall, f"it waits: more than {wall} s"),
    }

    def over(number: int, frame: Any) -> None:
        raise TooLong(timers[signal.Signals(number)][2])

    before = {number: signal.signal(number, over) for number in timers}
    for timer, limit, _ in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, (timer, *_) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def case(name: str, number: int, seed: int = 0) -> str:
    """Run one case; returns the fault, or "" when there is none."""
    target, draw = TARGETS[name], random.Random(f"{seed}/{name}/{number}")
    data = mutated(target.good, draw) if target.good != b"seed of the damage" else f"{seed}/{name}/{number}".encode()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held = forget_peak()
        try:
            with limited(SECONDS):
                target.read(Path(folder), data)
        except (RlhfError, Unreadable) as e:
            if not str(e).strip() or len(str(e)) > 10_000:
                return f"{name} {number}: a message of {len(str(e))} characters: {str(e)[:200]}"
        except (Exception, TooLong) as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            ours = [f for f in traceback.extract_tb(e.__traceback__) if "rlhf_nb" in f.filename]
            place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else f"{where.filename}:{where.lineno}"
            return f"{name} {number}: {type(e).__name__} at {place}: {str(e)[:200]}"
        if (grown := memory("VmHWM") - held) > MB:
            return f"{name} {number}: {grown:.0f} MB"
    return ""


def campaign(n: int, seed: int = 0, only: str = "") -> tuple[Counter[str], list[str]]:
    """n cases over all targets; returns how many of each, and the faults."""
    TARGETS["labels.jsonl"] = TARGETS["labels.jsonl"]._replace(good=label_file())
    names = [k for k, t in TARGETS.items() if only in k for _ in range(t.weight)]
    draw, done, faults = random.Random(seed), Counter[str](), list[str]()
    first = [k for k in TARGETS if only in k]  # each once, then by weight
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for _ in range(n):
            name = first.pop() if first else draw.choice(names)
            done[name] += 1
            fault = case(name, done[name], seed)
            if "it waits" in fault:  # a clock also runs where others have stopped this process: once more
                fault = case(name, done[name], seed)
            if fault:
                faults.append(fault)
    return done, faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of a target's name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.process_time()
    counts, found = campaign(given.n, given.seed, given.only)
    for line in found[:60]:
        print(line)
    print(", ".join(f"{k} {v}" for k, v in sorted(counts.items())))
    print(f"{sum(counts.values())} files, {len(found)} faults, {time.process_time() - begin:.0f} s")
    sys.exit(bool(found))
