"""Throughput of the server: tokens a second of 16 streams at once against one, and against `transformers serve`, in turn.

Both servers run as processes of their own, one after the other, several rounds, in the same number format; all clients ask for the same number of tokens,
greedily, and speak OpenAI's protocol. Tokens are counted by the server's usage, or by pieces where it tells none. On a busy machine believe the processor time.

    python benchmarks/serve_speed.py MODEL                  # a folder, such as ~/.cache/rlhf_nb/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import harness
import httpx
import psutil

STORY = "Write a long story about {}, with many details."
SUBJECTS = (
    "a fox|an owl|a ship|a king|rain|a clock|bread|the moon|a train|a letter|snow|a cat|gold|a well|a map|fire".split(
        "|"
    )
)


FORMATS = {"fp32": "float32", "bf16": "bfloat16"}  # our word, transformers' word


def ours(model: str, port: int, precision: str) -> list[str]:
    """How our server is started."""
    words = [sys.executable, "-m", "rlhf_nb", "serve", f"m={model}", "--port", str(port)]
    for setting in ("timeout=600", "max_context=1024", f"precision={precision}"):
        words += ["--set", setting]
    return words


def theirs(model: str, port: int, precision: str) -> list[str]:
    """How transformers' server is started, with continuous batching."""
    words = [str(Path(sys.executable).parent / "transformers"), "serve", model, "--port", str(port)]
    return [*words, "--host", "127.0.0.1", "--continuous-batching", "--dtype", FORMATS[precision]]


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Stream(NamedTuple):
    """What came of one stream."""

    tokens: int
    first: float  # seconds to the first piece


class Load(NamedTuple):
    """What came of some streams at once."""

    speed: float  # tokens a second, over all
    first: float  # seconds to the first piece, median
    cpu: float  # milliseconds of the server's processor time a token


async def one(port: int, model: str, subject: str, tokens: int) -> Stream:
    """One stream, read with as little work as can be: client and server share the cores."""
    asked = {
        "model": model, "messages": [{"role": "user", "content": STORY.format(subject)}], "max_tokens": tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    body = json.dumps(asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    start, first, pieces, last = time.perf_counter(), 0.0, 0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + body)
    if b" 200 " not in (status := await reader.readline()):
        raise SystemExit(f"the server said {status!r}: {await reader.read()!r}")
    async for line in reader:
        if line.startswith(b"data: {"):
            pieces, last = pieces + 1, line
            if not first and any(c["delta"].get("content") for c in json.loads(line[6:])["choices"]):
                first = time.perf_counter() - start
    writer.close()
    used = json.loads(last[6:]).get("usage")
    return Stream(used["completion_tokens"] if used else pieces, first)


async def measure(process: psutil.Process, port: int, model: str, streams: int, tokens: int) -> Load:
    """Some streams at once."""
    start, before = time.perf_counter(), sum(process.cpu_times()[:2])
    got = await asyncio.gather(*(one(port, model, s, tokens) for s in SUBJECTS[:streams]))
    total = sum(s.tokens for s in got)
    cpu = 1000 * (sum(process.cpu_times()[:2]) - before) / total
    return Load(total / (time.perf_counter() - start), median(s.first for s in got), cpu)


def round_of(words: list[str], port: int, model: str, tokens: int) -> dict[int, Load]:
    """Start a server, ask it, end it."""
    log = tempfile.TemporaryFile("w+")
    server = subprocess.Popen(words, stdout=log, stderr=log, env=dict(os.environ))
    try:
        for _ in range(240):
            if server.poll() is not None:
                break
            try:
                httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5)
            except httpx.HTTPError:
                time.sleep(0.5)
                continue
            process = psutil.Process(server.pid)
            asyncio.run(measure(process, port, model, 1, 4))  # warm
            return {streams: asyncio.run(measure(process, port, model, streams, tokens)) for streams in (1, 16)}
        log.seek(0)
        raise SystemExit(f"{words[0]} did not serve:\n{log.read()[-2000:]}")
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def spread(values: list[float]) -> str:
    """Median and range."""
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--precision", default="fp32", choices=FORMATS, help="of both servers")
    parser.add_argument("--alone", action="store_true", help="without transformers serve")
    parser.add_argument("--json", type=Path, help="file to which the ratios are added")
    args = parser.parse_args()
    model = str(Path(args.model).expanduser())
    kinds = {"rlhf-nb serve": (ours, "m")}
    if not args.alone and importlib.util.find_spec("transformers.cli") is not None:
        kinds["transformers serve"] = (theirs, model)
    found: dict[str, list[dict[int, Load]]] = {k: [] for k in kinds}
    for i in range(args.rounds):
        for kind, (words, name) in kinds.items():
            port = free_port()
            got = round_of(words(model, port, args.precision), port, name, args.tokens)
            found[kind].append(got)
            said = "; ".join(
                f"{s} streams {x.speed:.1f} tokens/s, first piece {x.first:.2f} s, {x.cpu:.1f} CPU ms a token"
                for s, x in got.items()
            )
            print(f"round {i + 1}, {kind}, {args.precision}: {said}", flush=True)
    for kind, rounds in found.items():
        print(
            f"{kind}: 16 streams {spread([r[16].speed for r in rounds])} tokens/s, CPU ms a token {spread([r[16].cpu for r in rounds])}"
        )
        print(f"{kind}: 16 streams against one {spread([r[16].speed / r[1].speed for r in rounds])}")
    if len(found) == 2:
        pairs = list(zip(*found.values()))
        print(
            f"ours against transformers serve at 16 streams: tokens/s {spread([a[16].speed / b[16].speed for a, b in pairs])}"
        )
        cpu = [b[16].cpu / a[16].cpu for a, b in pairs]
        print(f"theirs against ours at 16 streams: CPU seconds {spread(cpu)}")
        speeds = [a[16].speed / b[16].speed for a, b in pairs]
        found = {"ratio": median(speeds), "low": min(speeds), "high": max(speeds), "cpu": median(cpu)}
        harness.keep(args.json, f"serving, {args.precision}", os.cpu_count() or 1, "tokens", found)


if __name__ == "__main__":
    main()
