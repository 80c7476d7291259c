"""The server: official client, exact answers, admission, cancellation, drain, and 60 hostile requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="the official client isn't installed: pip install .[test]")
pytest.importorskip("fastapi", reason="the extra `serve` isn't installed")
httpx = pytest.importorskip("httpx", reason="the official client isn't installed: pip install .[test]")

from rlhf_nb.config import ModelConfig, SamplingConfig  # noqa: E402
from rlhf_nb.core import decide_precision  # noqa: E402
from rlhf_nb.data import toy  # noqa: E402
from rlhf_nb.data.templates import set_chat_template  # noqa: E402
from rlhf_nb.feedback.traffic import TrafficLog  # noqa: E402
from rlhf_nb.models.load import load_causal_lm, load_tokenizer  # noqa: E402
from rlhf_nb.rollout.sampler import sample  # noqa: E402
from rlhf_nb.serve.api import create_app  # noqa: E402
from rlhf_nb.serve.door import bind, make_server  # noqa: E402
from rlhf_nb.serve.settings import ServeConfig  # noqa: E402
from rlhf_nb.serve.site import load_site  # noqa: E402
from rlhf_nb.types import PromptBatch  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the toy world with a chat template, as a folder."""
    place = tmp_path_factory.mktemp("served") / "toy"
    tokenizer = set_chat_template(toy.build_tokenizer())
    toy.build_model(3, "tiny").save_pretrained(place)
    tokenizer.save_pretrained(place)
    return str(place)


class Running:
    """A server of this process, on a free port."""

    def __init__(self, traffic: TrafficLog | None = None, **settings: Any) -> None:
        config = ServeConfig(**{"max_context": 128, "max_concurrent": 4, "port": 0, **settings})
        self.site = load_site(config)
        self.app = create_app(self.site, traffic=traffic)
        self.desk = self.app.state.desk
        self.socket = bind("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.server = make_server(self.app, config, lambda: setattr(self.desk.gate, "draining", True))
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.005)

    def client(self, key: str = "none") -> Any:
        """The official client."""
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=60)

    def free(self) -> bool:
        """Whether every place is given back, soon."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            if not (self.site.batcher.running or self.site.batcher.waiting or self.desk.gate.taken):
                return True
            time.sleep(0.01)
        return False

    def stop(self) -> None:
        """End it."""
        self.server.should_exit = True
        self.thread.join(20)
        self.site.batcher.stop()
        assert not self.thread.is_alive() and not self.site.batcher.thread.is_alive()


@pytest.fixture(scope="module")
def running(folder: str) -> Iterator[Running]:
    """A server that most tests share."""
    found = Running(models={"toy": folder}, header_seconds=1.0)
    yield found
    assert found.free(), "places were not given back"
    found.stop()


QUESTIONS = [f"Where do {a} {v}?" for a in ("otters", "owls", "foxes", "bears") for v in ("live", "sleep")]


def offline(folder: str, asked: list[str], tokens: int, **how: Any) -> list[str]:
    """What the offline sampler says to prompts."""
    place = ModelConfig(name_or_path=folder)
    tokenizer = load_tokenizer(place)
    model = load_causal_lm(place, decide_precision("cpu"), tokenizer=tokenizer, trainable=False)
    rows = [tokenizer("<bos>" + a, add_special_tokens=False)["input_ids"] for a in asked]
    sampling = SamplingConfig(max_new_tokens=tokens, **{k: v for k, v in how.items() if k not in ("greedy", "seed")})
    r = sample(
        model,
        PromptBatch.from_lists(rows),
        sampling,
        tokenizer=tokenizer,
        seed=how.get("seed", 0),
        greedy=how.get("greedy", False),
    )
    return list(r.texts)


def test_sixteen_streams_say_what_offline_greedy_decoding_says(running: Running, folder: str) -> None:
    prompts = [toy.PROMPT.format(question=q) for q in QUESTIONS] * 2
    wanted = offline(folder, prompts, 24, greedy=True)
    client = running.client()

    def ask(prompt: str) -> str:
        parts = client.completions.create(model="toy", prompt=prompt, max_tokens=24, temperature=0, stream=True)
        return "".join(p.choices[0].text for p in parts)

    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(ask, prompts))
    assert got == wanted and len(set(got)) > 3 and running.free()


def test_a_seed_gives_the_offline_samplers_answer(running: Running, folder: str) -> None:
    prompt = toy.PROMPT.format(question=QUESTIONS[0])
    got = running.client().completions.create(
        model="toy", prompt=prompt, max_tokens=20, seed=11, top_p=0.8, temperature=0.7
    )
    assert [got.choices[0].text] == offline(folder, [prompt], 20, seed=11, top_p=0.8, temperature=0.7)


def test_chat_streams_stops_and_counts(running: Running) -> None:
    client = running.client()
    asked: dict[str, Any] = {
        "model": "toy",
        "messages": [{"role": "user", "content": "Where do otters live?"}],
        "max_tokens": 20,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    said = whole.choices[0]
    assert said.message.role == "assistant" and len(said.logprobs.content) == whole.usage.completion_tokens
    assert all(
        max(t.top_logprobs, key=lambda x: x.logprob).logprob == pytest.approx(t.logprob) for t in said.logprobs.content
    )
    parts = list(
        client.chat.completions.create(**asked, stream=True, n=2, seed=1, stream_options={"include_usage": True})
    )
    for i in range(2):
        assert "".join(c.delta.content or "" for p in parts for c in p.choices if c.index == i) == said.message.content
    assert parts[-1].usage.completion_tokens == 2 * whole.usage.completion_tokens
    text = said.message.content
    stop = text[len(text) // 2 :][:3]
    stopped = client.chat.completions.create(**asked, stop=[stop, "never said"]).choices[0]
    assert (stopped.finish_reason, stopped.message.content) == ("stop", text.split(stop)[0])


def test_who_goes_away_leaves_no_place_taken(running: Running) -> None:
    stream = running.client().completions.create(
        model="toy", prompt="otters", max_tokens=100, n=4, stream=True, temperature=1, seed=1
    )
    next(iter(stream))
    stream.close()
    assert running.free()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{running.address}/v1/completions",
            json={"model": "toy", "prompt": "otters", "max_tokens": 100, "n": 4},
            timeout=0.02,
        )
    assert running.free()
