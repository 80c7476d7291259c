"""How long does another client wait for /health, by the clock, while each POST route gets its hostile bodies on a busy machine?

The server is a process of its own (`rlhf-nb serve`, toy model, keys, page and feedback), and so are the hostile client, the client that watches, and two
that only count: both cores of a machine with two are busy. One row a route, and how far the server's resident memory is above that of its start.

    python tests/hostile_clock.py                 # about three minutes; --busy 0 without the two that count
    python tests/hostile_clock.py --only /v1/score
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from test_serve_hostile import exchange
from test_serve_routes import FIELDS, KEYS, hostile, request, status

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/feedback", "/v1/score")
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def count() -> None:
    """Keep a core busy."""
    while True:
        pass


def resident(pid: int) -> float:
    """Of a process, in MB."""
    rows = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(r for r in rows if r.startswith("VmRSS")).split()[1]) / 1000


def watch(port: int, pid: int, ended: Event, told: Any) -> None:
    """Ask for /health again and again; tell the waits in seconds and the most memory in MB."""
    waits, most = [], 0.0
    while not ended.is_set():
        start = time.monotonic()
        said = exchange(port, HEALTH, 60)
        waits.append(time.monotonic() - start)
        assert status(said) == 200, said
        most = max(most, resident(pid))
        time.sleep(0.005)
    told.put((waits, most))


def send(port: int, path: str) -> tuple[int, list[str]]:
    """Every hostile body in every field of a route: how many, and what was answered neither by a refusal nor by an end."""
    wrong, sent = [], 0
    for name, value in hostile(120_000 if path == "/v1/feedback" else 900_000).items():
        for field in FIELDS:
            body = f'{{"model": "toy", {json.dumps(field)}: {value}}}'.encode()
            with socket.create_connection(("127.0.0.1", port), timeout=60) as s:
                try:
                    s.sendall(request(path, body))
                    said = s.recv(4096)
                except OSError:  # refused before all was sent
                    said = b""
            sent += 1
            if status(said) not in (0, 400, 413):
                wrong.append(f"{path} {field} {name}: {said[-200:]!r}")
    return sent, wrong


def serve(place: Path) -> tuple[subprocess.Popen[bytes], int]:
    """A server of the toy model, when it answers."""
    from rlhf_nb.data import toy
    from rlhf_nb.data.templates import set_chat_template

    toy.build_model(3, "tiny").save_pretrained(place / "toy")
    set_chat_template(toy.build_tokenizer()).save_pretrained(place / "toy")
    (place / "keys").write_text("".join(line + "\n" for _, line in KEYS.values()))
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    command = f"serve toy={place / 'toy'} --set port={port} --set keys={place / 'keys'} --set page=true --set feedback={place / 'votes.jsonl'}"
    log = (place / "log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-c", "from rlhf_nb.cli.main import app; app()", *command.split()], stdout=log, stderr=log
    )
    for _ in range(600):
        try:
            if status(exchange(port, HEALTH)) == 200:
                return server, port
        except OSError:
            pass
        if server.poll() is not None:
            break
        time.sleep(0.1)
    server.kill()
    raise SystemExit((place / "log").read_text())


def main() -> None:
    """Print a row a route."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=2, help="how many processes count beside")
    parser.add_argument("--only", nargs="*", default=PATHS, help="routes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, port = serve(Path(folder))
        beside = [multiprocessing.Process(target=count, daemon=True) for _ in range(args.busy)]
        try:
            for p in beside:
                p.start()
            begun = resident(server.pid)
            for path in (None, *args.only):
                ended, told = multiprocessing.Event(), multiprocessing.Queue()
                other = multiprocessing.Process(target=watch, args=(port, server.pid, ended, told), daemon=True)
                start = time.monotonic()
                other.start()
                sent, wrong = send(port, path) if path else (time.sleep(5) or 0, [])
                ended.set()
                waits, most = told.get(timeout=70)
                waits.sort()
                print(
                    f"{path or 'nothing'}: {sent} bodies in {time.monotonic() - start:.0f} s; {len(waits)} waits, at most {waits[-1] * 1000:.0f} ms "
                    f"(99 %: {waits[int(0.99 * len(waits))] * 1000:.0f}); memory + {most - begun:.0f} MB",
                    *wrong[:3],
                    flush=True,
                )
        finally:
            for p in beside:
                p.terminate()
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    main()
