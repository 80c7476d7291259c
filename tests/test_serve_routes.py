"""What one client sends must not keep another one waiting: the same hostile set on every route of the application."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` isn't installed")
pytest.importorskip("openai", reason="the official client isn't installed: pip install .[test]")

from test_serve import Running, folder  # noqa: F401
from test_serve_hostile import exchange

from rlhf_nb.run.log import resident_mb
from rlhf_nb.serve.gate import new_key
from rlhf_nb.serve.settings import ServeConfig
from rlhf_nb.serve.start import _routers

KEYS = {name: new_key(name) for name in ("ann", "eve")}
FIELDS = ("prompt", "messages", "answers", "input", "tools", "response_format", "user", "no such thing")


def repeated(entry: str, size: int) -> str:
    """A list of one entry, so many bytes long."""
    return "[" + ",".join([entry] * (size // (len(entry) + 1))) + "]"


def hostile(size: int) -> dict[str, str]:
    """Values that cost their reader more than their sender."""
    wide = "{" + ",".join(f'"{i}":1' for i in range(60)) + "}"
    bad = {f"a list of {e}": repeated(e, size) for e in ("null", "1", '""', '"a"', "[]", "{}", "[1]", "[null]", '{"role":"x"}', "1e9", wide)}  # fmt: skip
    bad["a list that ends wrong"] = repeated("1", size)[:-1] + ",null]"
    bad["texts, then a null"] = repeated('"a"', size)[:-1] + ",null]"
    bad["keys"] = "{" + ",".join(f'"{i:x}":1' for i in range(size // 10)) + "}"
    bad["brackets"] = "[" * (size // 2) + "]" * (size // 2)
    bad["letters"] = json.dumps("a" * size)
    bad["half characters"] = '"' + "\\ud83d" * (size // 6) + '"'
    bad["letters beyond ASCII"] = json.dumps("\u20ac" * (size // 3), ensure_ascii=False)
    bad["digits"] = "9" * size
    return bad


def request(path: str, body: bytes, name: str = "eve", length: int | None = None) -> bytes:
    """A POST of somebody who has a key."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[name][0]}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


@pytest.fixture(scope="module")
def whole(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:  # noqa: F811
    """A server with every route that there is."""
    place = tmp_path_factory.mktemp("whole")
    (place / "keys").write_text("".join(line + "\n" for _, line in KEYS.values()))
    settings: dict[str, Any] = {"keys": str(place / "keys"), "page": True, "feedback": str(place / "feedback.jsonl")}
    config = ServeConfig(models={"toy": folder}, **settings)
    found = Running(None, _routers(config), models={"toy": folder}, header_seconds=2.0, **settings)
    yield found
    assert found.free(), "places were not given back"
    found.stop()


def posts(running: Running) -> list[str]:
    """The paths that take a body."""
    return sorted({r.path for r in running.app.routes if "POST" in (getattr(r, "methods", None) or ())})


class Watch:
    """Another client that asks for /health again and again, and the memory of the process.

    `slowest` is the CPU that the server and its clients used while one answer was waited for: what the wait takes where no other program is in the way.
    """

    def __init__(self, port: int) -> None:
        self.port, self.slowest, self.wall, self.most, self.ended = port, 0.0, 0.0, 0.0, threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self.ended.is_set():
            start, cpu = time.monotonic(), time.process_time()
            said = exchange(self.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 60)
            assert b" 200 " in said.split(b"\r\n")[0], said
            wall, used = time.monotonic() - start, time.process_time() - cpu
            self.wall, self.slowest = max(self.wall, wall), max(self.slowest, min(wall, used))
            self.most = max(self.most, resident_mb())
            time.sleep(0.005)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.ended.set()
        self.thread.join()


def status(said: bytes) -> int:
    """Of a response; 0: there was none."""
    return int(said.split(b" ", 2)[1]) if said.startswith(b"HTTP/") else 0


def test_all_routes_are_known(whole: Running) -> None:
    assert posts(whole) == ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/feedback", "/v1/score"]


def test_a_hostile_body_delays_nobody_on_any_route(whole: Running) -> None:
    with Watch(whole.port) as quiet:
        time.sleep(2)
    sizes = {path: 120_000 if path == "/v1/feedback" else 900_000 for path in posts(whole)}  # within the route's bound
    bodies = {size: hostile(size) for size in sizes.values()}  # made before: making them is no work of the server
    begun, wrong, sent = resident_mb(), [], 0
    with Watch(whole.port) as watch:
        for path, size in sizes.items():
            for name, value in bodies[size].items():
                for field in FIELDS:
                    body = f'{{"model": "toy", {json.dumps(field)}: {value}}}'.encode()
                    with socket.create_connection(("127.0.0.1", whole.port), timeout=60) as s:
                        try:
                            s.sendall(request(path, body))
                        except OSError:  # refused before all was sent
                            pass
                        try:
                            said = s.recv(4096)
                        except OSError:
                            said = b""
                    sent += 1
                    if status(said) not in (0, 400, 413):
                        wrong.append(f"{path} {field} {name}: {said[-200:]!r}")
    print(
        f"{sent} bodies: /health after {watch.slowest * 1000:.0f} CPU ms at most ({watch.wall * 1000:.0f} ms on the clock, {quiet.wall * 1000:.0f} before), "
        f"memory + {watch.most - begun:.0f} MB"
    )
    assert not wrong, "\n".join(wrong[:9])
    assert watch.slowest < 0.25, f"/health took {watch.slowest:.2f} CPU seconds"
    assert watch.most - begun < 100, f"memory grew by {watch.most - begun:.0f} MB"


def test_small_chunks_delay_nobody_on_any_route(whole: Running, caplog: pytest.LogCaptureFixture) -> None:
    """Each chunk is an event of its own for the parser; a hundred thousand of them are six hundred kilobytes."""
    with Watch(whole.port) as quiet:
        time.sleep(1)
    for path in posts(whole):
        head = request(path, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        with Watch(whole.port) as watch, socket.create_connection(("127.0.0.1", whole.port), timeout=60) as s:
            try:
                s.sendall(head + b"1\r\n{\r\n" * 100_000)
                said = s.recv(4096)
            except OSError:
                said = b""
            time.sleep(0.2)
        print(
            f"{path}: /health after {watch.slowest * 1000:.0f} CPU ms at most ({watch.wall * 1000:.0f} ms on the clock, {quiet.wall * 1000:.0f} before)"
        )
        assert status(said) in (0, 400) and watch.slowest < 0.25
    honest = json.dumps({"model": "toy", "prompt": "otters", "max_tokens": 2}).encode()
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in (honest[:9], honest[9:10], honest[10:]))
    head = request("/v1/completions", b"", "ann").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    assert b" 200 " in exchange(
        whole.port, head.replace(b"Host:", b"Connection: close\r\nHost:") + pieces + b"0\r\n\r\n"
    )
    assert not [r for r in caplog.records if r.exc_info], "a body that breaks off is no fault of the server"


def test_connections_without_a_head_lock_nobody_out(whole: Running) -> None:
    """More silent connections than there are places, and new ones all the time."""
    silent = [socket.create_connection(("127.0.0.1", whole.port), timeout=10) for _ in range(530)]
    try:
        for _ in range(5):
            start = time.monotonic()
            assert (
                status(exchange(whole.port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))
                == 200
            )
            assert time.monotonic() - start < 1
            silent += [socket.create_connection(("127.0.0.1", whole.port), timeout=10) for _ in range(20)]
    finally:
        for s in silent:
            s.close()


def test_slow_bodies_are_gone_on_every_route(whole: Running) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        for path in [*posts(whole), "/nowhere"]:
            slow = []
            for _ in range(530):
                s = socket.create_connection(("127.0.0.1", whole.port), timeout=10)
                s.sendall(request(path, b"{", length=500))
                slow.append(s)
            start = time.monotonic()
            while (left := len(whole.server.server_state.connections)) and time.monotonic() - start < 20:
                time.sleep(0.05)
            print(f"{path}: {left} of 530 left after {time.monotonic() - start:.1f} s")
            for s in slow:
                s.close()
            assert not left, f"{left} slow bodies are still held at {path}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_flood_of_one_key_delays_another_one_little(whole: Running) -> None:
    """Long answers that are let in, prompts that are refused, and bodies that are wrong, all of eve's; ann wants two tokens."""
    ended = threading.Event()
    long = {"model": "toy", "prompt": "Where do otters live?", "max_tokens": 1000, "n": 16, "timeout": 60}
    bodies = [
        json.dumps(long).encode(),
        json.dumps({**long, "prompt": "otters " * 120_000}).encode(),
        json.dumps({**long, "prompt": ["otters " * 8000] * 16}).encode(),
        b'{"model": "toy", "prompt": ' + repeated("null", 900_000).encode() + b"}",
    ]

    def flood(body: bytes) -> None:
        while not ended.is_set():
            with socket.create_connection(("127.0.0.1", whole.port), timeout=60) as s:
                try:
                    s.sendall(request("/v1/completions", body))
                    s.settimeout(1.0)
                    s.recv(4096)
                except OSError:
                    pass

    threads = [threading.Thread(target=flood, args=(b,)) for b in [bodies[0]] * 6 + bodies[1:] * 2]
    for t in threads:
        t.start()
    try:
        time.sleep(2)
        took = []
        for _ in range(5):
            start = time.monotonic()
            asked = json.dumps({"model": "toy", "prompt": "What do owls eat?", "max_tokens": 2}).encode()
            with socket.create_connection(("127.0.0.1", whole.port), timeout=60) as s:
                s.sendall(request("/v1/completions", asked, "ann"))
                said = s.recv(4096)
            assert status(said) == 200, said
            took.append(time.monotonic() - start)
    finally:
        ended.set()
        for t in threads:
            t.join()
    print(f"two tokens in a flood: {max(took):.2f} s at most")
    assert max(took) < 5
