"""A server whose model another server computes: our own stands for vLLM behind the door."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_serve import Running, folder, openai  # noqa: F401

httpx = pytest.importorskip("httpx", reason="the official client isn't installed: pip install .[test]")

from rlhf_nb.core import ConfigError  # noqa: E402
from rlhf_nb.feedback.traffic import TrafficLog, read_traffic  # noqa: E402
from rlhf_nb.serve.gate import new_key  # noqa: E402
from rlhf_nb.serve.settings import ServeConfig  # noqa: E402
from rlhf_nb.serve.upstream import find_upstream  # noqa: E402


@pytest.fixture(scope="module")
def behind(folder: str) -> Iterator[Running]:  # noqa: F811
    """The server that computes."""
    found = Running(models={"toy": folder}, max_context=512)
    yield found
    assert found.free(), "places were not given back"
    found.stop()


ASKED: dict[str, Any] = {"prompt": "Where do otters live?", "max_tokens": 12}


def test_what_the_one_behind_says_comes_out_in_front(behind: Running, tmp_path: Path) -> None:
    log = TrafficLog(tmp_path / "traffic.jsonl", texts=True)
    front = Running(log, upstreams={"far": f"{behind.address}/v1"})
    one, two = behind.client(), front.client()
    try:
        for more in ({"temperature": 0}, {"seed": 4, "n": 2}, {"seed": 4, "logprobs": 2, "stop": ["e"]}):
            want = one.completions.create(model="toy", **ASKED, **more).to_dict()
            got = two.completions.create(model="far", **ASKED, **more).to_dict()
            assert got["choices"] == want["choices"] and got["usage"] == want["usage"] and got["model"] == "far"
        asked: dict[str, Any] = {
            "messages": [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
            "max_tokens": 8, "seed": 1,
        }  # fmt: skip
        whole = one.chat.completions.create(model="toy", **asked).choices[0].message.content
        for include in (False, True):
            parts = list(
                two.chat.completions.create(
                    model="far", **asked, stream=True, stream_options={"include_usage": include}
                )
            )
            assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole
            assert (parts[-1].usage is not None) == include and {p.model for p in parts} == {"far"}
        assert [m.id for m in two.models.list()] == ["far"] and two.models.retrieve("far").id == "far"
        lines = list(read_traffic(log.path))
        assert len(lines) == 5 and all(x.finish in ("length", "stop") and x.tokens_answer > 0 for x in lines)
        assert lines[-1].answer == whole and lines[0].tokens_prompt > 0 and lines[0].model == "far"
        assert 'rlhf_nb_answers_total{finish="length",model="far"}' in httpx.get(f"{front.address}/metrics").text
        for more, said in (({"best_of": 3}, "best_of is not handed on"), ({"max_tokens": 9999}, "ask for fewer")):
            with pytest.raises(openai.BadRequestError, match=said):
                two.completions.create(model="far", **{**ASKED, **more})
        with pytest.raises(openai.BadRequestError, match="shorten one of them"):  # the other server's own words
            two.completions.create(model="far", prompt="otters " * 2000, max_tokens=5)
        with pytest.raises(openai.NotFoundError, match="Did you mean"):
            two.completions.create(model="fra", **ASKED)
    finally:
        assert front.free()
        front.stop()


def test_who_goes_away_in_front_is_gone_behind(behind: Running) -> None:
    front = Running(upstreams={"far": f"{behind.address}/v1"}, max_concurrent=2, max_queue=0)
    lane = behind.site.batcher.engines["toy"]
    step = lane.step
    try:
        body = {"model": "far", **ASKED, "max_tokens": 100, "temperature": 0, "stream": True}
        whole = behind.client().completions.create(model="toy", prompt=ASKED["prompt"], max_tokens=100, temperature=0)
        assert whole.usage.completion_tokens == 100, "this model ends by itself too soon for the test"
        lane.step = lambda: (time.sleep(0.05), step())[1]  # type: ignore[method-assign, func-returns-value]
        for _ in range(2):
            with httpx.stream("POST", f"{front.address}/v1/completions", json=body) as r:
                assert r.status_code == 200 and next(r.iter_lines()).startswith("data: {")
            assert front.free() and behind.free()
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{front.address}/v1/completions", json={**body, "stream": False}, timeout=0.3)
        assert front.free() and behind.free()
        slow = httpx.post(f"{front.address}/v1/completions", json={**body, "stream": False, "timeout": 0.3}, timeout=20)
        assert slow.status_code == 504 and behind.free()
        with httpx.stream("POST", f"{front.address}/v1/completions", json={**body, "timeout": 0.3}) as r:
            *_, last = [x for x in r.iter_lines() if x]
        assert json.loads(last[6:])["error"]["code"] == "deadline" and behind.free()
        with pytest.raises(openai.BadRequestError, match="places"):
            front.client().completions.create(model="far", **ASKED, n=3)
    finally:
        lane.step = step  # type: ignore[method-assign]
        assert front.free()
        front.stop()


def test_keys_of_the_two_servers_don_t_meet(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    keys = {}
    for name in ("client", "front"):
        keys[name], line = new_key(name)
        (tmp_path / name).write_text(line)
    behind = Running(models={"toy": folder}, keys=str(tmp_path / "front"))
    monkeypatch.setenv("BEHIND_KEY", keys["front"])
    far: dict[str, Any] = {"upstreams": {"toy": f"{behind.address}/v1"}}
    with pytest.raises(ConfigError, match="401"):
        find_upstream("toy", f"{behind.address}/v1")
    front = Running(**far, upstream_keys={"toy": "BEHIND_KEY"}, keys=str(tmp_path / "client"))
    try:
        assert front.client(keys["client"]).completions.create(model="toy", **ASKED).choices
        with pytest.raises(openai.AuthenticationError):
            front.client(keys["front"]).completions.create(model="toy", **ASKED)
        behind.stop()
        with pytest.raises(openai.InternalServerError) as e:
            front.client(keys["client"]).completions.create(model="toy", **ASKED)
        assert e.value.status_code == 502 and str(behind.port) not in str(e.value) and keys["front"] not in str(e.value)
    finally:
        assert front.free()
        front.stop()


HEAD = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        ("text/event-stream", HEAD, "broke off"),
        ("text/event-stream", HEAD + b"data: {broken\n\n", "no answer"),
        ("text/event-stream", HEAD + b'data: {"error": {"message": "secret"}}\n\n', "an error in its answer"),
        ("application/json", b'{"choices": 3}', "no answer"),
        ("application/json", b"[" * 100_000, "no answer"),
    ],
)
def test_an_answer_that_is_none_is_an_error(kind: str, body: bytes, said: str) -> None:
    class Liar(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply("application/json", b'{"data": [{"id": "x"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(kind, body)

        def reply(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    liar = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    threading.Thread(target=liar.serve_forever, daemon=True).start()
    front = Running(upstreams={"x": f"http://127.0.0.1:{liar.server_port}/v1"})
    try:
        streams = kind == "text/event-stream"
        r = httpx.post(f"{front.address}/v1/completions", json={"model": "x", **ASKED, "stream": streams}, timeout=20)
        assert r.status_code == (200 if streams else 502) and said in r.text and "secret" not in r.text
        assert "[DONE]" not in r.text
    finally:
        assert front.free()
        front.stop()
        liar.shutdown()
        liar.server_close()


def test_settings_of_upstreams_are_explained() -> None:
    for more, said in (
        ({"upstreams": {"a": "ftp://x"}}, "upstreams.a: expected an address.*http or https"),
        ({"models": {"a": "toy"}, "upstreams": {"a": "http://x/v1"}}, "given twice"),
        ({"upstreams": {"a": "http://x/v1"}, "upstream_keys": {"b": "KEY"}}, "not served"),
        ({"upstreams": {"a": "http://x/v1"}, "upstream_keys": {"a": "sk-secret"}}, "never the key itself"),
        ({"upstreams": {"a": "http://x/v1"}, "split": {"c": {"a": 1.0}}}, "not served"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServeConfig(**more)
    with pytest.raises(ConfigError, match="vllm serve"):
        find_upstream("a", "http://127.0.0.1:9/v1")
