"""Throughput of the server: tokens a second of 16 streams at once against one, and against `transformers serve`, in turn.

Both servers run as processes of their own, one after the other, several rounds; all clients ask for the same number of tokens, greedily, and speak OpenAI's
protocol. Tokens are counted by the server's usage, or by pieces where it tells none.

    python benchmarks/serve_speed.py MODEL                  # a folder, such as ~/.cache/rlhf_nb/smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import openai

STORY = "Write a long story about {}, with many details."
SUBJECTS = (
    "a fox",
    "an owl",
    "a ship",
    "a king",
    "rain",
    "a clock",
    "bread",
    "the moon",
    "a train",
    "a letter",
    "snow",
    "a cat",
    "gold",
    "a well",
    "a map",
    "fire",
)


def ours(model: str, port: int) -> list[str]:
    """How our server is started."""
    return [
        sys.executable,
        "-m",
        "rlhf_nb",
        "serve",
        f"m={model}",
        "--port",
        str(port),
        "--set",
        "timeout=600",
        "--set",
        "max_context=1024",
    ]


def theirs(model: str, port: int) -> list[str]:
    """How transformers' server is started, with continuous batching."""
    return [
        str(Path(sys.executable).parent / "transformers"),
        "serve",
        model,
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--continuous-batching",
    ]


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def one(client: Any, model: str, subject: str, tokens: int) -> tuple[int, float]:
    """One stream: its tokens, and seconds to the first piece."""
    start, first, pieces, told = time.perf_counter(), 0.0, 0, 0
    asked = [{"role": "user", "content": STORY.format(subject)}]
    for part in client.chat.completions.create(
        model=model,
        messages=asked,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if part.choices and part.choices[0].delta.content:
            pieces += 1
            first = first or time.perf_counter() - start
        if part.usage is not None:
            told = part.usage.completion_tokens
    return told or pieces, first


def measure(client: Any, model: str, streams: int, tokens: int) -> tuple[float, float]:
    """Tokens a second over all streams, and the median time to the first piece."""
    start = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        got = list(pool.map(lambda s: one(client, model, s, tokens), SUBJECTS[:streams]))
    return sum(n for n, _ in got) / (time.perf_counter() - start), median(f for _, f in got)


def round_of(words: list[str], port: int, model: str, tokens: int) -> dict[int, tuple[float, float]]:
    """Start a server, ask it, end it."""
    log = tempfile.TemporaryFile("w+")
    server = subprocess.Popen(words, stdout=log, stderr=log, env=dict(os.environ))
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=600)
    try:
        for _ in range(240):
            if server.poll() is not None:
                break
            try:
                httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=5)
                measure(client, model, 1, 4)  # warm
                return {streams: measure(client, model, streams, tokens) for streams in (1, 16)}
            except (httpx.HTTPError, openai.APIConnectionError):
                time.sleep(0.5)
        log.seek(0)
        raise SystemExit(f"{words[0]} did not serve:\n{log.read()[-2000:]}")
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--alone", action="store_true", help="without transformers serve")
    args = parser.parse_args()
    model = str(Path(args.model).expanduser())
    kinds = {"rlhf-nb serve": (ours, "m")}
    if not args.alone and importlib.util.find_spec("transformers.cli") is not None:
        kinds["transformers serve"] = (theirs, model)
    found: dict[str, list[dict[int, tuple[float, float]]]] = {k: [] for k in kinds}
    for i in range(args.rounds):
        for kind, (words, name) in kinds.items():
            port = free_port()
            got = round_of(words(model, port), port, name, args.tokens)
            found[kind].append(got)
            print(
                f"round {i + 1}, {kind}: "
                + "; ".join(f"{s} streams {v:.1f} tokens/s, first piece {f:.2f} s" for s, (v, f) in got.items()),
                flush=True,
            )
    for kind, rounds in found.items():
        ratios = [r[16][0] / r[1][0] for r in rounds]
        print(
            f"{kind}: 16 streams {median(r[16][0] for r in rounds):.1f} tokens/s, one {median(r[1][0] for r in rounds):.1f}; ratio {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )
    if len(found) == 2:
        a, b = found.values()
        ratios = [x[16][0] / y[16][0] for x, y in zip(a, b)]
        print(
            f"ours against transformers serve at 16 streams: {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
