"""Soak a server: clients that cancel at random, send rubbish and read slowly, beside honest ones whose every answer is compared with offline greedy decoding.

The server is a process of its own (`rlhf-nb serve`), so its memory is its own. At the end: wrong answers, places and rows left, memory at three times, the
tail of times.

    python benchmarks/soak.py MODEL --minutes 4 --clients 32        # a folder or a name, such as smollm2
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from rlhf_nb.config import ModelConfig, SamplingConfig
from rlhf_nb.core import decide_precision
from rlhf_nb.models.load import load_causal_lm, load_tokenizer
from rlhf_nb.rollout.sampler import sample
from rlhf_nb.types import PromptBatch

SUBJECTS = ("an otter", "a lighthouse", "the sea", "a clock", "bread", "the moon", "a bicycle", "rain")
PROMPTS = [f"{how} {s}" for s in SUBJECTS for how in ("Tell me about", "Write a poem on", "Why do people like")]


def expected(model: str, longest: int) -> dict[str, str]:
    """Offline greedy answers, of `longest` tokens at most, by prompt."""
    place = ModelConfig(name_or_path=model)
    tokenizer = load_tokenizer(place)
    net = load_causal_lm(place, decide_precision("auto"), tokenizer=tokenizer, trainable=False)
    from rlhf_nb.data.templates import encode_prompts

    r = sample(
        net,
        PromptBatch.from_lists(encode_prompts(tokenizer, PROMPTS)),
        SamplingConfig(max_new_tokens=longest),
        tokenizer=tokenizer,
        seed=0,
        greedy=True,
    )
    return dict(zip(PROMPTS, r.texts))


class Soak:
    """What all clients share.

    Args:
        address: of the server; wanted: answers by prompt; tokens: of an answer, at most; end: on the clock of time.monotonic.
    """

    def __init__(self, address: str, wanted: dict[str, str], tokens: int, end: float) -> None:
        self.address, self.wanted, self.tokens, self.end = address, wanted, tokens, end
        self.did: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: list[float] = []
        self.first: list[float] = []
        self.lock = threading.Lock()

    def client(self, number: int) -> None:
        """One client, until the end."""
        rng = random.Random(number)
        with httpx.Client(base_url=self.address, timeout=300) as web:
            while time.monotonic() < self.end:
                kind = rng.choices(("whole", "stream", "cancel", "slow", "rubbish"), (4, 4, 2, 1, 1))[0]
                try:
                    what = getattr(self, kind)(web, rng)
                except httpx.HTTPError as e:
                    what = f"{kind}: {type(e).__name__}"
                with self.lock:
                    self.did[what] += 1

    def _body(self, prompt: str, **more: Any) -> dict[str, Any]:
        return {"model": "m", "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, **more}

    def _compare(self, prompt: str, text: str, start: float, timed: bool = True) -> str:
        with self.lock:
            self.seconds += [time.monotonic() - start] if timed else []  # a slow reader's time is its own
            if text != self.wanted[prompt]:
                self.wrong.append(f"{prompt!r}: {text[:80]!r} instead of {self.wanted[prompt][:80]!r}")
        return "compared"

    def whole(self, web: httpx.Client, rng: random.Random) -> str:
        """Ask for a whole answer, and compare it."""
        prompt, start = rng.choice(PROMPTS), time.monotonic()
        r = web.post("/v1/completions", json=self._body(prompt))
        return (
            self._compare(prompt, r.json()["choices"][0]["text"], start)
            if r.status_code == 200
            else f"status {r.status_code}"
        )

    def stream(self, web: httpx.Client, rng: random.Random, pause: float = 0.0) -> str:
        """The same, piece by piece."""
        prompt, start, text, done = rng.choice(PROMPTS), time.monotonic(), "", False
        with web.stream("POST", "/v1/completions", json=self._body(prompt, stream=True)) as r:
            if r.status_code != 200:
                return f"status {r.status_code}"
            for line in r.iter_lines():
                if line.startswith("data: {"):
                    if not text and not pause:
                        with self.lock:
                            self.first.append(time.monotonic() - start)
                    text += json.loads(line[6:])["choices"][0]["text"]
                    time.sleep(pause)
                done |= line == "data: [DONE]"
        return self._compare(prompt, text, start, not pause) if done else "stream without an end"

    def slow(self, web: httpx.Client, rng: random.Random) -> str:
        """The same, read slowly."""
        return self.stream(web, rng, pause=rng.uniform(0.05, 0.3))

    def cancel(self, web: httpx.Client, rng: random.Random) -> str:
        """Go away in the middle."""
        stop = rng.randrange(0, self.tokens)
        with web.stream(
            "POST", "/v1/completions", json=self._body(rng.choice(PROMPTS), stream=True, n=rng.choice((1, 1, 2)))
        ) as r:
            for i, _ in enumerate(r.iter_lines()):
                if i >= stop:
                    break
        return "cancelled"

    def rubbish(self, web: httpx.Client, rng: random.Random) -> str:
        """Send what is no request."""
        content = rng.choice(
            (
                b"{",
                b"[" * 5000,
                b"\xff\xfe",
                json.dumps(self._body("x", max_tokens=10**9)).encode(),
                b'{"model": "m", "prompt": "\\ud83d"}',
            )
        )
        r = web.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        return (
            "rubbish refused" if r.status_code in (400, 413) or b"ud83d" in content else f"rubbish got {r.status_code}"
        )


def memory(pid: int) -> float:
    """Resident memory of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def meter(address: str, name: str) -> float:
    """A number of /metrics."""
    found = re.search(rf"^{name} (\S+)", httpx.get(f"{address}/metrics", timeout=30).text, re.M)
    return float(found[1]) if found else float("nan")


def tail(values: list[float]) -> str:
    """Median and tail."""
    v = sorted(values) or [float("nan")]
    return ", ".join(f"p{q} {v[min(len(v) - 1, int(len(v) * q / 100))]:.2f} s" for q in (50, 95, 99))


def main() -> None:
    """Print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    wanted = expected(args.model, args.tokens)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    log = tempfile.TemporaryFile("w+")
    words = [
        sys.executable,
        "-m",
        "rlhf_nb",
        "serve",
        f"m={args.model}",
        "--port",
        str(port),
        "--set",
        "max_queue=256",
        "--set",
        "timeout=300",
    ]
    server, address = subprocess.Popen(words, stderr=log, env=dict(os.environ)), f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{address}/ready", timeout=5).raise_for_status()
                break
            except httpx.HTTPError:
                if server.poll() is not None:
                    log.seek(0)
                    raise SystemExit(log.read()) from None
                time.sleep(0.5)
        begin = time.monotonic()
        soak = Soak(address, wanted, args.tokens, begin + 60 * args.minutes)
        threads = [threading.Thread(target=soak.client, args=(i,)) for i in range(args.clients)]
        for t in threads:
            t.start()
        sizes = []
        while any(t.is_alive() for t in threads):
            time.sleep(min(10, 6 * args.minutes))
            sizes.append(memory(server.pid))
        time.sleep(2)
        left = [meter(address, f"rlhf_nb_answers_{x}") for x in ("running", "waiting")]
        seconds = time.monotonic() - begin
        print(
            f"{seconds:.0f} s, {args.clients} clients, {sum(soak.did.values())} requests: "
            + ", ".join(f"{n} {k}" for k, n in soak.did.most_common())
        )
        print(f"wrong answers: {len(soak.wrong)} of {soak.did['compared']}", *soak.wrong[:5], sep="\n  ")
        print(f"rows left running {left[0]:.0f}, waiting {left[1]:.0f}; server alive: {server.poll() is None}")
        third = max(1, len(sizes) // 3)
        parts = [sum(p) / len(p) for p in (sizes[:third], sizes[third : 2 * third] or sizes[-1:], sizes[-third:])]
        print(
            "memory, mean of each third: "
            + ", ".join(f"{p:.0f} MiB" for p in parts)
            + f"; last third against the middle one {parts[2] / parts[1] - 1:+.1%}"
        )
        print(
            f"answers: {tail(soak.seconds)}; first piece: {tail(soak.first)}; {meter(address, 'rlhf_nb_step_tokens_total') / seconds:.1f} tokens/s"
        )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        log.seek(0)
        faults = [line for line in log.read().splitlines() if "Traceback" in line or "Error" in line]
        print(f"ended with {server.returncode}; faults in its log: {len(faults)}", *faults[:5], sep="\n  ")


if __name__ == "__main__":
    main()
