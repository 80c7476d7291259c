"""Datasets of a hub on this machine, through the libraries that a user's run goes through: parquet, JSON lines, revisions, refusals, a broken download, no network."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import COMMITS, Hub

ROWS, LINES = "somebody/rows", "somebody/lines"
WORKER = """
import json, sys, warnings
from rlhf_nb.core import DataError
from rlhf_nb.data.readers import open_rows
for line in sys.stdin:
    asked, said = json.loads(line), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            rows = list(open_rows(asked.pop("path"), **({"streaming": False} | asked))())
        except DataError as e:
            rows, said = None, [str(e)]
    said += [str(w.message) for w in caught if w.category.__name__ == "DataWarning"]
    print(json.dumps({"rows": rows, "said": " ".join(said)}), flush=True)
"""


def rows(word: str, n: int) -> list[dict[str, str]]:
    """Demonstrations that tell where they are from."""
    return [{"prompt": f"{word} {i}?", "completion": f" It is {i}."} for i in range(n)]


def parquet(found: list[dict[str, str]]) -> bytes:
    """Rows as a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(found), file)
    return file.getvalue()


def jsonl(found: list[dict[str, str]]) -> bytes:
    """Rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in found).encode()


def environment(address: str, home: Path, **more: str) -> dict[str, str]:
    """A user whose hub is this address."""
    own = {"HF_ENDPOINT": address, "HF_HOME": str(home / "hf"), "XDG_CACHE_HOME": str(home / "cache"), "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}  # fmt: skip
    return {**os.environ, **own, **more}


class Reader:
    """A process that reads datasets, as a run does, and tells what it found."""

    def __init__(self, address: str, home: Path, **more: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER], env=environment(address, home, **more), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def send(self, path: str, **asked: Any) -> None:
        """Ask, without waiting."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"path": path, **asked}) + "\n")
        self.process.stdin.flush()

    def __call__(self, path: str, **asked: Any) -> tuple[list[dict[str, str]] | None, str]:
        """Rows (None: there was an error), and what was said."""
        self.send(path, **asked)
        assert self.process.stdout is not None
        found = json.loads(self.process.stdout.readline())
        return found["rows"], found["said"]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub with datasets of two kinds of files."""
    served = Hub(
        datasets={
            ROWS: {
                "main": {
                    "README.md": b"---\nlicense: mit\n---\n# rows\n",
                    "data/train-00000-of-00001.parquet": parquet(rows("new", 5)),
                    "data/test-00000-of-00001.parquet": parquet(rows("held out", 2)),
                },
                "v1": {"data/train-00000-of-00001.parquet": parquet(rows("old", 3))},
            },
            LINES: {"main": {"train.jsonl": jsonl(rows("line", 4)), "test.jsonl": jsonl(rows("last", 1))}},
            "somebody/two": {
                "main": {
                    "README.md": b"---\nconfigs:\n- config_name: easy\n  data_files: easy.jsonl\n- config_name: hard\n  data_files: hard.jsonl\n---\n",
                    "easy.jsonl": jsonl(rows("easy", 1)),
                    "hard.jsonl": jsonl(rows("hard", 2)),
                }
            },
            "somebody/secret": {"main": {"train.jsonl": jsonl(rows("secret", 1))}},
            "somebody/script": {"main": {"script.py": b"import os"}},
            "somebody/nothing": {"main": {"README.md": b"# nothing\n", "notes.md": b"none"}},
            "somebody/torn": {"main": {"train.parquet": parquet(rows("torn", 9))}},
        },
        gated={"somebody/secret"},
        wrong={"train.parquet"},
    )
    served.start()
    yield served
    served.stop()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's caches."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def read(hub: Hub, home: Path) -> Iterator[Reader]:
    """A process that can reach the hub."""
    reader = Reader(hub.address, home)
    yield reader
    reader.close()


def test_parquet_and_lines_splits_and_revisions(read: Reader) -> None:
    assert read(ROWS) == (rows("new", 5), "") and read(ROWS, split="test") == (rows("held out", 2), "")
    assert read(LINES) == (rows("line", 4), "") and read(LINES, split="test") == (rows("last", 1), "")
    assert read(ROWS, split="train[:2]")[0] == rows("new", 2) and read(ROWS, streaming=True)[0] == rows("new", 5)
    assert read(f"{ROWS}@v1") == (rows("old", 3), "") == read(ROWS, revision="v1")
    assert read(ROWS, revision=COMMITS["v1"])[0] == rows("old", 3) and read(ROWS)[0] == rows("new", 5)
    assert read("somebody/two", subset="hard")[0] == rows("hard", 2)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"path": "somebody/secret"}, ("is gated", "datasets/somebody/secret in a browser", "hf auth login")),
        ({"path": "somebody/nobody"}, ("there is no dataset 'somebody/nobody'", "private")),
        ({"path": f"{ROWS}@v9"}, ("has no revision 'v9'", f"datasets/{ROWS}/tree/main")),
        ({"path": LINES, "split": "dev"}, ("has no split 'dev'", "train, test", "data.split")),
        ({"path": "somebody/two"}, ("several configurations", "data.subset to one of: easy, hard")),
        ({"path": "somebody/two", "subset": "hrad"}, ("no configuration 'hrad'", "easy, hard", "data.subset")),
        ({"path": "somebody/script"}, ("code of strangers isn't run", "refs/convert/parquet")),
        ({"path": "somebody/nothing"}, ("holds no files of rows",)),
        ({"path": "somebody/torn"}, ("can't be read", "hf cache rm dataset/somebody/torn")),
    ],
    ids=lambda x: "-".join(str(v) for v in x.values()) if isinstance(x, dict) else "",
)
def test_every_refusal_is_a_sentence(read: Reader, asked: dict[str, str], words: tuple[str, ...]) -> None:
    found, said = read(**asked)
    assert found is None and all(word in said for word in words), said
    assert "Traceback" not in said and "Error:" not in said and len(said) < 700, said


def test_offline_afterwards_the_revision_that_was_asked_for(hub: Hub, home: Path, read: Reader) -> None:
    for asked in (f"{ROWS}@v1", ROWS, LINES):  # main was fetched after v1
        assert read(asked)[0]
    hub.asked.clear()
    alone = Reader(hub.address, home, HF_HUB_OFFLINE="1")
    try:
        assert alone(ROWS) == (rows("new", 5), "") and alone(ROWS, split="test")[0] == rows("held out", 2)
        assert alone(f"{ROWS}@v1") == (rows("old", 3), "") == alone(ROWS, revision="v1")
        assert alone(LINES, split="test")[0] == rows("last", 1) and alone(ROWS, streaming=True)[0] == rows("new", 5)
        found, said = alone(f"{ROWS}@v2")
        assert (
            found is None
            and "revision 'v2' is not in the cache. Another" in said
            and "HF_HUB_OFFLINE=0 rlhf-nb data" in said
        ), said
        found, said = alone("somebody/never")
        assert found is None and "HF_HUB_OFFLINE=0 rlhf-nb data somebody/never" in said, said
        assert not hub.asked
    finally:
        alone.close()


def test_a_hub_that_is_gone_or_busy_or_refuses(hub: Hub, home: Path, read: Reader) -> None:
    assert read(ROWS)[0] and read(f"{ROWS}@v1")[0]
    hub.gated.add(ROWS)  # what is refused stays refused, though the cache has it
    try:
        found, said = read(ROWS)
        assert found is None and "is gated" in said, said
    finally:
        hub.gated.clear()
    gone = Reader("http://127.0.0.1:9", home)
    try:
        found, said = gone(f"{ROWS}@v1")
        assert found == rows("old", 3) and "its copy in the cache is read (commit bbbbbbb)" in said, said
        found, said = gone("somebody/never")
        assert found is None and "can't be reached" in said and "again when the network is back" in said, said
    finally:
        gone.close()
    hub.gated.add("somebody/secret")


def test_a_broken_download_goes_on_where_it_stopped(hub: Hub, tmp_path: Path) -> None:
    """Killed in the middle of a large file; the client writes pieces of 10 MB."""
    import random

    piece, letters = 10 << 20, random.Random(0).choices("abcdefghij", k=1 << 16)
    block = "".join(letters)
    many = [{"prompt": str(i), "completion": block} for i in range(24 << 4)]
    file, name = "train.jsonl", "somebody/large"
    hub.datasets[name] = {"main": {file: jsonl(many)}}
    assert len(hub.datasets[name]["main"][file]) > 2 * piece
    hub.stall[file] = piece * 3 // 2
    first = Reader(hub.address, tmp_path)
    first.send(name)
    deadline, partial = time.monotonic() + 90, 0
    while partial < piece and time.monotonic() < deadline:
        assert first.process.poll() is None, "the process ended, though the hub has sent a part of the file"
        time.sleep(0.05)
        partial = max((p.stat().st_size for p in tmp_path.rglob("*.part")), default=0)
    first.process.send_signal(signal.SIGKILL)
    first.close()
    assert partial >= piece
    hub.released.set()
    hub.asked.clear()
    second = Reader(hub.address, tmp_path)
    try:
        found, said = second(name)
    finally:
        second.close()
    assert found == many and not said
    ranges = [r for verb, p, r in hub.asked if verb == "GET" and p.endswith(file)]
    assert len(ranges) == 1 and int(ranges[0].removeprefix("bytes=").split("-")[0]) >= piece, ranges


def test_a_run_learns_offline_from_a_revision_that_was_read_before(
    hub: Hub, home: Path, tmp_path: Path, read: Reader
) -> None:
    assert read(f"{ROWS}@v1")[0] == rows("old", 3)
    line = ["sft", "--toy", f"data.path={ROWS}", "data.revision=v1", "data.eval_size=1", "steps=1", "epochs=null", "mini_batch_size=2", f"output_dir={tmp_path}/run"]  # fmt: skip
    alone = environment(hub.address, home, HF_HUB_OFFLINE="1")
    done = subprocess.run([sys.executable, "-m", "rlhf_nb", *line], env=alone, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "run" / "model" / "model.safetensors").is_file(), done.stderr
    assert "revision: v1" in (tmp_path / "run" / "config.yaml").read_text()
