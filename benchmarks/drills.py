"""Incident drills against a real `rlhf-nb serve`: what breaks, who notices, what is lost.

    OMP_NUM_THREADS=1 python benchmarks/drills.py [--drills kill end disk slow crowd poison] [--model toy] [--connections 1000]

Each drill starts a server of its own on a free port with the toy model (another with --model), does harm, and prints one row of a table:
what was done, what was seen, and whether the runbook's promise (docs/operations.md) held. Exit code 1 if one didn't.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

PROMPT = "Visitor: How many legs do owls have?\nPip:"


class Seen(NamedTuple):
    """What a drill showed."""

    done: str
    seen: str
    held: bool


class Server:
    """A server in a process of its own.

    Args:
        model: that is served, under the name pip.
        folder: of its traffic log and what it says.
        settings: KEY=VALUE.
        port: 0: any that is free.
    """

    def __init__(self, model: str, folder: Path, *settings: str, port: int = 0) -> None:
        self.folder, self.said = folder, folder / "server.log"
        words = [w for s in (f"traffic={folder / 'traffic.jsonl'}", *settings) for w in ("--set", s)]
        command = [sys.executable, "-m", "rlhf_nb", "serve", f"pip={model}", "--port", str(port), *words]
        began = time.monotonic()
        with open(self.said, "ab") as out:
            start = out.tell()
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        found = None
        while found is None:
            found = re.search(rb"http://127\.0\.0\.1:(\d+)/v1", self.said.read_bytes()[start:])
            if self.process.poll() is not None or time.monotonic() - began > 180:
                raise RuntimeError(f"the server did not start: {self.said.read_text()[-500:]}")
            time.sleep(0.05)
        self.port, self.started_s = int(found[1]), time.monotonic() - began

    def ask(self, tokens: int = 8, timeout: float = 30.0, **more: Any) -> tuple[int, Any]:
        """Status and answer of one request; status 0: no answer."""
        body = {"model": "pip", "prompt": PROMPT, "max_tokens": tokens, "seed": 1} | more
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, None
        finally:
            connection.close()

    def text(self) -> str:
        """The answer to the same question with the same seed."""
        return str(self.ask()[1]["choices"][0]["text"])

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", path)
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    def end(self) -> int | None:
        """Tell it to end, and wait."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        return self.process.returncode


@contextmanager
def served(model: str, *settings: str) -> Iterator[Server]:
    """A server for one drill."""
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        server = Server(model, Path(folder), *settings)
        try:
            yield server
        finally:
            server.end()


def stream(server: Server, out: list[str], tokens: int = 60) -> threading.Thread:
    """A client that reads a stream in a thread: "whole" where it ended as it should, "cut" where it broke off."""

    def run() -> None:
        body = json.dumps({"model": "pip", "prompt": PROMPT, "max_tokens": tokens, "stream": True, "n": 4, "seed": 1})
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode()
            out.append("whole" if text.rstrip().endswith("[DONE]") else f"{reply.status}")
        except (OSError, http.client.HTTPException):
            out.append("cut")
        finally:
            connection.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def whole_lines(path: Path) -> tuple[int, int]:
    """Whole lines of a log, and torn ones."""
    rows = path.read_bytes().split(b"\n") if path.exists() else []
    good = 0
    for row in filter(None, rows):
        with suppress(ValueError):
            good += isinstance(json.loads(row), dict)
    return good, sum(map(bool, rows)) - good


def running(server: Server, wanted: int, seconds: float = 20.0) -> int:
    """Wait until so many answers are being written; how many are."""
    until, n = time.monotonic() + seconds, 0
    while n < wanted and time.monotonic() < until:
        found = re.search(r"(?m)^rlhf_nb_answers_running (\S+)", server.get("/metrics")[1])
        n = int(float(found[1])) if found else 0
    return n


def drill_kill(model: str, given: argparse.Namespace) -> Seen:
    """kill -9 while answers are streamed."""
    with served(model) as server:
        before = server.text()
        out: list[str] = []
        clients = [stream(server, out) for _ in range(8)]
        busy = running(server, 1)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        for c in clients:
            c.join(30)
        good, torn = whole_lines(server.folder / "traffic.jsonl")
        again = Server(model, server.folder, port=server.port)
        try:
            same = again.text() == before
        finally:
            again.end()
        after = whole_lines(server.folder / "traffic.jsonl")
        told = f"{busy} or more in flight; clients: {dict(Counter(out))}; log {good} whole lines, {torn} torn; same port after {again.started_s:.1f} s, same answer: {same}"
        return Seen(
            "kill -9 in mid-stream, 8 clients",
            told,
            busy > 0 and same and torn <= 1 and after[0] > good and set(out) <= {"cut", "whole"},
        )


def drill_end(model: str, given: argparse.Namespace) -> Seen:
    """SIGTERM while answers are streamed."""
    with served(model, "drain=20") as server:
        out: list[str] = []
        clients = [stream(server, out) for _ in range(8)]
        busy = running(server, 1)
        began = time.monotonic()
        server.process.terminate()
        time.sleep(0.05)
        late = server.ask(timeout=5)[0]
        server.process.wait(60)
        took = time.monotonic() - began
        for c in clients:
            c.join(30)
        good, torn = whole_lines(server.folder / "traffic.jsonl")
        told = f"{busy} or more in flight; clients: {dict(Counter(out))}; a late request got {late or 'no connection'}; ended after {took:.1f} s with code {server.process.returncode}; log {good} whole, {torn} torn"
        return Seen(
            "SIGTERM in mid-stream, 8 clients",
            told,
            0 < busy and out == ["whole"] * 8 and late in (0, 503) and torn == 0 and took < 25,
        )


@contextmanager
def small_disk() -> Iterator[tuple[Path, Callable[[], None]]]:
    """A folder on a disk of 64 kB that is full, and a function that makes room; /dev/full where nothing can be mounted."""
    with tempfile.TemporaryDirectory(prefix="drill-disk-") as folder:
        place = Path(folder)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True).returncode:
            yield Path("/dev"), lambda: None
            return
        try:
            with open(place / "ballast", "wb", buffering=0) as f, suppress(OSError):
                while True:
                    f.write(b"x" * 1024)
            yield place, (place / "ballast").unlink
        finally:
            subprocess.run(["umount", "-l", folder], check=False)


def drill_disk(model: str, given: argparse.Namespace) -> Seen:
    """The traffic log's disk is full, then it isn't."""
    with small_disk() as (place, make_room):
        log = place / ("full" if str(place) == "/dev" else "traffic.jsonl")
        with served(model, f"traffic={log}") as server:
            full = [server.ask()[0] for _ in range(5)]
            health = server.get("/health")[0]
            said = server.said.read_text().count("No space left")
            make_room()
            after = [server.ask()[0] for _ in range(5)]
            good, torn = whole_lines(log) if log.is_file() else (5, 0)
            told = f"answers while full: {dict(Counter(full))}, health {health}, said so {said} times; after room was made: {dict(Counter(after))}, {good} whole lines, {torn} torn"
            return Seen(
                "full disk under the traffic log",
                told,
                full == after == [200] * 5 and health == 200 and said >= 1 and good >= 5 and torn <= 1,
            )


def dribble(port: int, seconds: float) -> float:
    """A client that sends its head byte by byte; seconds until it was shown out."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as s:
        for byte in b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 10_000:
            try:
                s.send(bytes([byte]))
                if select.select([s], [], [], 0.1)[0]:
                    break
            except OSError:
                break
            if time.monotonic() - began > seconds:
                break
    return time.monotonic() - began


def deaf(port: int) -> socket.socket:
    """A client that asks for a stream and never reads."""
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    s.connect(("127.0.0.1", port))
    body = json.dumps({"model": "pip", "prompt": PROMPT, "max_tokens": 60, "stream": True, "n": 2}).encode()
    s.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )
    return s


def drill_slow(model: str, given: argparse.Namespace) -> Seen:
    """Clients that send slowly, and clients that never read."""
    with served(model, "header_seconds=2", "timeout=5") as server:
        before = time.monotonic()
        server.ask()
        alone = time.monotonic() - before
        shown: list[float] = []
        slow = [
            threading.Thread(target=lambda: shown.append(dribble(server.port, 15.0)), daemon=True) for _ in range(20)
        ]
        for t in slow:
            t.start()
        asleep = [deaf(server.port) for _ in range(10)]
        times = []
        for _ in range(10):
            began = time.monotonic()
            if server.ask()[0] == 200:
                times.append(time.monotonic() - began)
        for t in slow:
            t.join(20)
        time.sleep(6)
        left = re.search(r"(?m)^rlhf_nb_answers_running (\S+)", server.get("/metrics")[1])
        for s in asleep:
            s.close()
        still = float(left[1]) if left else -1
        told = f"20 that send a byte in 0.1 s: shown out after {max(shown):.1f} s at the latest (limit 2); 10 that never read; meanwhile {len(times)} of 10 others answered, {max(times, default=9e9):.2f} s at most (alone {alone:.2f}); {still:g} answers still held 6 s later"
        return Seen("30 slow clients", told, max(shown) < 6 and len(times) == 10 and still == 0)


def drill_crowd(model: str, given: argparse.Namespace) -> Seen:
    """Many connections at once."""
    with served(model) as server:
        head = json.dumps({"model": "pip", "prompt": PROMPT, "max_tokens": 8, "seed": 1}).encode()
        request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % len(head)
            + head
        )
        sockets, statuses = [], Counter[str]()
        for _ in range(given.connections):
            s = socket.socket()
            s.settimeout(60)
            try:
                s.connect(("127.0.0.1", server.port))
                sockets.append(s)
            except OSError:
                statuses["not connected"] += 1
        began = time.monotonic()
        for s in sockets:
            with suppress(OSError):
                s.sendall(request)
        for s in sockets:
            try:
                reply = s.recv(65536)
                statuses[reply[9:12].decode() or "closed"] += 1
            except OSError:
                statuses["no answer"] += 1
            s.close()
        took = time.monotonic() - began
        health, again = server.get("/health")[0], server.ask()[0]
        with suppress(OSError):
            open_files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        told = (
            f"{dict(statuses)} in {took:.1f} s; afterwards health {health}, a request {again}, {open_files} open files"
        )
        held = (
            health == again == 200
            and statuses["200"] > 0
            and not statuses["no answer"]
            and set(statuses) <= {"200", "429", "503", "closed"}
        )
        return Seen(f"{given.connections:,} connections at once", told, held)


def drill_poison(model: str, given: argparse.Namespace) -> Seen:
    """One user in five judgements chooses the worse answer, always."""
    import random

    from rlhf_nb.data import toy
    from rlhf_nb.feedback.annotators import aggregate
    from rlhf_nb.feedback.people import simulate
    from rlhf_nb.feedback.store import FeedbackStore
    from rlhf_nb.widgets.labels import Pair

    rng, pairs = random.Random(0), []
    for row in toy.train_prompts(400, 0):
        one, two = (
            toy.speak(row["prompt"], rng.choice(("kind", "plain", "rude", "confused")), rng).strip() for _ in range(2)
        )
        if one != two:
            pairs.append(Pair(row["prompt"], one, two))
    with tempfile.TemporaryDirectory(prefix="drill-") as folder:
        store = FeedbackStore(Path(folder))
        for who, said in simulate(pairs, users=16, poison=0.2):
            store.add(who, said)
        standing = store.standing()
        counted, robust = aggregate(standing, robust=False).pairs, aggregate(standing)
        mallory = store.hashed("mallory")
        caught = [u.name for u in robust.outliers]
        share = sum(x.user == mallory for x in standing) / len(standing)
        told = (
            f"{len(standing)} judgements, {share:.0%} of them mallory's; rows whose chosen answer is better by gold: {better(counted):.1%} of {len(counted)} as they came, "
            f"{better(robust.pairs):.1%} of {len(robust.pairs)} aggregated; left out: {len(caught)} user(s), mallory among them: {mallory in caught}"
        )
        return Seen(
            "poisoned feedback, 20 % by one user", told, caught == [mallory] and better(robust.pairs) > better(counted)
        )


def better(rows: list[dict[str, Any]]) -> float:
    """Share of pairs whose chosen answer has more gold; equal ones don't count."""
    from rlhf_nb.data import toy

    gold = [toy.gold_reward([r["prompt"]] * 2, [r["chosen"], r["rejected"]]) for r in rows]
    known = [a > b for a, b in gold if a != b]
    return sum(known) / len(known)


DRILLS: dict[str, Callable[[str, argparse.Namespace], Seen]] = {
    "kill": drill_kill, "end": drill_end, "disk": drill_disk, "slow": drill_slow, "crowd": drill_crowd, "poison": drill_poison,
}  # fmt: skip


def main() -> None:
    """Run drills and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--drills", nargs="+", default=list(DRILLS), choices=list(DRILLS))
    parser.add_argument("--model", default="toy")
    parser.add_argument("--connections", type=int, default=1000)
    given = parser.parse_args()
    bad = 0
    print("| drill | what was seen | promise |\n|---|---|---|", flush=True)
    for name in given.drills:
        try:
            done = DRILLS[name](given.model, given)
        except Exception as e:
            done = Seen(name, f"{type(e).__name__}: {e}", False)
        bad += not done.held
        print(f"| {done.done} | {done.seen} | {'held' if done.held else '**broken**'} |", flush=True)
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
