"""The server: official client, exact answers, admission, cancellation, drain, and 60 hostile requests."""

from __future__ import annotations

import queue
import random
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="the official client isn't installed: pip install .[test]")
pytest.importorskip("fastapi", reason="the extra `serve` isn't installed")
httpx = pytest.importorskip("httpx", reason="the official client isn't installed: pip install .[test]")

import torch  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from rlhf_nb.config import ModelConfig, SamplingConfig  # noqa: E402
from rlhf_nb.core import ModelError, decide_precision  # noqa: E402
from rlhf_nb.data import toy  # noqa: E402
from rlhf_nb.data.templates import set_chat_template  # noqa: E402
from rlhf_nb.fast import engine  # noqa: E402
from rlhf_nb.fast.support import use_fast  # noqa: E402
from rlhf_nb.feedback.traffic import TrafficLog, read_traffic  # noqa: E402
from rlhf_nb.models.load import load_causal_lm, load_tokenizer  # noqa: E402
from rlhf_nb.rollout.sampler import sample  # noqa: E402
from rlhf_nb.run.log import resident_mb  # noqa: E402
from rlhf_nb.serve.api import create_app  # noqa: E402
from rlhf_nb.serve.batcher import TURN, AnswerPiece, Ask, Batcher, ServedEngine  # noqa: E402
from rlhf_nb.serve.door import bind, make_server  # noqa: E402
from rlhf_nb.serve.gate import new_key  # noqa: E402
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

    def __init__(self, traffic: TrafficLog | None = None, routers: Any = (), **settings: Any) -> None:
        config = ServeConfig(**{"max_context": 128, "max_concurrent": 4, "port": 0, **settings})
        self.site = load_site(config)
        self.app = create_app(self.site, routers, traffic)
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


def test_a_full_server_says_when_to_come_again(folder: str) -> None:
    found = Running(models={"toy": folder}, max_concurrent=1, max_queue=1)
    asked = {"model": "toy", "prompt": "otters", "max_tokens": 100, "temperature": 1}
    with ThreadPoolExecutor(6) as pool:
        done = list(
            pool.map(
                lambda i: httpx.post(f"{found.address}/v1/completions", json={**asked, "seed": i}, timeout=60), range(6)
            )
        )
    full = [r for r in done if r.status_code == 429]
    assert 1 <= len(full) <= 4 and all(
        int(r.headers["Retry-After"]) >= 1 and r.json()["error"]["code"] == "server_busy" for r in full
    )
    assert sum(r.status_code == 200 for r in done) == 6 - len(full) and found.free()
    found.stop()


def test_keys_and_limits(folder: str, tmp_path: Path) -> None:
    (ann, line), (bob, other) = new_key("ann"), new_key("bob")
    (tmp_path / "keys").write_text(f"{line}\n{other}\n")
    found = Running(models={"toy": folder}, keys=str(tmp_path / "keys"), requests_per_minute=2)
    asked: dict[str, Any] = {"model": "toy", "prompt": "otters", "max_tokens": 2}
    with pytest.raises(openai.AuthenticationError):
        found.client("sk-guess").completions.create(**asked)
    for _ in range(2):
        found.client(ann).completions.create(**asked)
    with pytest.raises(openai.RateLimitError, match="more than 2 requests a minute") as e:
        found.client(ann).completions.create(**asked)
    assert 1 <= int(e.value.response.headers["Retry-After"]) <= 30
    found.client(bob).completions.create(**asked)  # another key's use is its own
    found.stop()


def test_what_takes_too_long_is_an_error_and_no_short_answer(running: Running) -> None:
    asked: dict[str, Any] = {"model": "toy", "prompt": "otters", "max_tokens": 110, "n": 4, "temperature": 1, "seed": 1}
    body = {"timeout": 0.001}
    with pytest.raises(openai.APIStatusError, match="took too long"):
        running.client().completions.create(**asked, extra_body=body)
    with pytest.raises(openai.APIError, match="took too long"):
        list(running.client().completions.create(**asked, stream=True, extra_body=body))
    assert running.free()


def test_told_to_end_it_finishes_what_it_says(folder: str) -> None:
    found = Running(models={"toy": folder})
    stream = iter(
        found.client().completions.create(model="toy", prompt="otters", max_tokens=60, stream=True, temperature=0)
    )
    parts = [next(stream)]
    found.server.handle_exit(15, None)
    parts += list(stream)
    assert parts[-1].choices[0].finish_reason in ("stop", "length") and found.desk.gate.draining
    found.stop()
    with pytest.raises(openai.APIConnectionError):
        found.client().models.list()


def test_adapters_share_a_base_and_users_stay_with_their_model(folder: str, tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    made = {}
    for seed, name in enumerate(("kind", "rude")):
        torch.manual_seed(seed)
        net = get_peft_model(
            AutoModelForCausalLM.from_pretrained(folder),
            LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False),
        )
        net.save_pretrained(tmp_path / name)
        load_tokenizer(ModelConfig(name_or_path=folder)).save_pretrained(tmp_path / name)
        made[name] = str(tmp_path / name)
    log = TrafficLog(tmp_path / "traffic.jsonl", texts=True)
    found = Running(
        log,
        models={"base": folder},
        adapters=made,
        split={"chat": {"kind": 0.5, "rude": 0.5}},
    )
    client, prompt = found.client(), toy.PROMPT.format(question=QUESTIONS[0])
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 16, "temperature": 0}

    def ask(name: str, user: str = "u") -> str:
        return str(client.completions.create(model=name, user=user, **asked).choices[0].text)

    names = ["base", "kind", "rude"] * 3
    with ThreadPoolExecutor(9) as pool:
        got = list(pool.map(ask, names))
    wanted = {n: offline(place, [prompt], 16, greedy=True)[0] for n, place in {"base": folder, **made}.items()}
    assert got == [wanted[n] for n in names] and len(set(wanted.values())) == 3
    each = {u: {ask("chat", u) for _ in range(3)} for u in map(str, range(8))}
    assert all(len(texts) == 1 for texts in each.values()) and len(set.union(*each.values())) == 2
    assert found.free()
    time.sleep(0.2)
    found.stop()
    lines = list(read_traffic(log.path))
    assert {x.model for x in lines} == {"base", "kind", "rude"}
    assert len({x.version for x in lines}) == 3 and not any("127.0.0.1" in x.user for x in lines)


def test_best_of_takes_what_the_reward_likes(folder: str) -> None:
    found = Running(models={"toy": folder}, rewards={"toy": "gold"}, max_n=8, max_concurrent=8)
    prompt = toy.PROMPT.format(question=QUESTIONS[0])
    ask = partial(found.client().completions.create, model="toy", prompt=prompt, max_tokens=12, temperature=1, seed=4)
    every, best = ([c.text for c in ask(**how).choices] for how in ({"n": 8}, {"n": 3, "best_of": 8}))
    scores = toy.gold_reward([prompt] * 8, every)
    assert sorted(scores, reverse=True)[:3] == toy.gold_reward([prompt] * 3, best)
    assert best == sorted(every, key=dict(zip(every, scores)).__getitem__, reverse=True)[:3]
    found.stop()


def test_speculation_changes_no_answer(folder: str) -> None:
    found = Running(models={"toy": folder}, ahead={"toy": 8})
    prompts = [toy.PROMPT.format(question=q) * 2 for q in QUESTIONS[:3]]
    got = [
        found.client().completions.create(model="toy", prompt=p, max_tokens=40, temperature=0).choices[0].text
        for p in prompts
    ]
    assert got == offline(folder, prompts, 40, greedy=True)
    lane = found.site.batcher.engines["toy"]
    assert lane.tokens > lane.passes  # several tokens a pass
    found.stop()


def test_logs_hold_no_text_unless_asked(folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = TrafficLog(tmp_path / "traffic.jsonl")
    found = Running(log, models={"toy": folder})
    with caplog.at_level("DEBUG"):
        found.client().completions.create(model="toy", prompt="otters secretly", max_tokens=4, user="ann@example.org")
    found.stop()
    kept = log.path.read_text() + "\n".join(
        r.getMessage() for r in caplog.records if r.name.startswith(("rlhf_nb", "uvicorn"))
    )
    assert "secretly" not in kept and "example.org" not in kept and '"tokens_prompt"' in kept


def test_connections_beyond_the_bound_keep_nobody_out_who_is_in(folder: str) -> None:
    """Silent connections make room for newcomers; requests that have begun keep their places."""
    import socket

    server = Running(models={"toy": folder}, max_connections=3)
    try:
        silent = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(5)]
        time.sleep(0.2)
        begun = []
        for _ in range(3):
            begun.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            begun[-1].sendall(head + b"Content-Length: 2\r\n\r\n{")
            time.sleep(0.1)
        late = socket.create_connection(("127.0.0.1", server.port), timeout=20)
        late.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 503 " in late.recv(100) and all(s.recv(100) == b"" for s in silent)
        for s in begun:
            s.sendall(b"}")
            assert b" 400 " in s.recv(100)
            s.close()
        time.sleep(0.2)
        assert httpx.get(f"{server.address}/health").status_code == 200
    finally:
        server.stop()


def test_the_page_runs_nothing_but_its_own_script(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("rlhf_nb.serve.page")
    from rlhf_nb.serve.start import _routers

    config = {"models": {"toy": folder}, "page": True}
    found = Running(routers=_routers(ServeConfig(**config)), **config)
    shown = httpx.get(found.address)
    assert (
        shown.status_code == 200
        and "<textarea" in shown.text
        and "unsafe" not in shown.headers["content-security-policy"]
    )
    assert "default-src 'none'" in shown.headers["content-security-policy"] and "data-feedback" not in shown.text
    assert httpx.get(found.address, headers={"host": "evil.example"}).status_code == 421
    found.stop()


def test_feedback_goes_through_the_gate(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("rlhf_nb.serve.thumbs", reason="this version takes no feedback")
    from rlhf_nb.serve.start import _routers

    key, line = new_key("ann")
    (tmp_path / "keys").write_text(line)
    config = {"models": {"toy": folder}, "keys": str(tmp_path / "keys"), "feedback": str(tmp_path / "said.jsonl")}
    found = Running(routers=_routers(ServeConfig(**config)), **config)
    said = {"rating": "up", "version": "v", "model": "toy"}
    assert httpx.post(f"{found.address}/v1/feedback", json=said).status_code == 401
    mine = {"authorization": f"Bearer {key}"}
    assert (
        httpx.post(
            f"{found.address}/v1/feedback", content=b"{}", headers={**mine, "content-type": "text/plain"}
        ).status_code
        == 415
    )
    assert httpx.post(f"{found.address}/v1/feedback", json=said, headers=mine).status_code == 201
    found.stop()
    assert (tmp_path / "said.jsonl").read_text().count('"up"') == 1


def test_port_zero_is_said_and_not_dropped() -> None:
    from rlhf_nb.serve.start import read_settings

    assert (
        read_settings(None, ["toy"], None, port=0).port == 0
        and read_settings(None, ["toy"], None, port=None).port == 8000
    )


def test_a_setting_that_is_typed_where_models_stand_is_no_model() -> None:
    from rlhf_nb.core import ConfigError
    from rlhf_nb.serve.settings import ServeConfig
    from rlhf_nb.serve.start import read_settings

    for name in ServeConfig.model_fields:
        with pytest.raises(ConfigError, match=f"type --set {name}=8001"):
            read_settings(None, ["toy", f"{name}=8001"], None)


def test_a_link_that_moves_while_it_is_loaded_changes_nothing(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhf_nb.serve import site as served

    v2, current = tmp_path / "v2", tmp_path / "current"
    shutil.copytree(folder, v2)
    toy.build_model(4, "tiny").save_pretrained(v2)
    current.symlink_to(folder)
    load = served.load_causal_lm

    def promoted(*args: Any, **kwargs: Any) -> Any:
        net = load(*args, **kwargs)
        current.unlink()
        current.symlink_to(v2)
        return net

    monkeypatch.setattr(served, "load_causal_lm", promoted)
    site = load_site(ServeConfig(models={"toy": str(current)}, max_context=64))
    assert site.models["toy"].version == served.version_of(folder) != served.version_of(str(v2))

    def replaced(*args: Any, **kwargs: Any) -> Any:
        net = load(*args, **kwargs)
        toy.build_model(5, "tiny").save_pretrained(v2)
        return net

    monkeypatch.setattr(served, "load_causal_lm", replaced)
    with pytest.raises(ModelError, match="changed while they were loaded"):
        load_site(ServeConfig(models={"toy": str(v2)}, max_context=64))


def test_an_answer_has_the_same_bits_alone_and_in_any_company(folder: str) -> None:
    """6 orders × 4 numbers of places, with and without guesses; tokens and log-probs, those of other tokens included."""
    net, tokenizer, rng = toy.build_model(3, "tiny").eval(), toy.build_tokenizer(), random.Random(0)
    common = [rng.randrange(5, 60) for _ in range(20)]
    prompts = [[*common[: 20 * (i % 2)], *(rng.randrange(5, 60) for _ in range(1 + 7 * (i % 5)))] for i in range(12)]

    def told(places: int, order: list[int], ahead: int) -> dict[int, list[Any]]:
        engine = ServedEngine(net, tokenizer, places, 96, ahead=ahead, most_drafted=2)
        batcher, said = Batcher({"toy": engine}, places).start(), {i: queue.Queue[AnswerPiece]() for i in order}
        for i in order:
            how = SamplingConfig(max_new_tokens=4 + i, temperature=(0.7, 1.0, 1.3)[i % 3], top_p=(1.0, 0.9)[i % 2])
            eos = [tokenizer.eos_token_id]
            batcher.put("toy", Ask(prompts[i], how, eos, said[i].put, i % 4 == 0, seed=i, top=i % 3, owner="ab"[i % 2]))
        out: dict[int, list[Any]] = {i: [] for i in order}
        for i in order:
            while not out[i] or not isinstance(out[i][-1], str):
                piece = said[i].get(timeout=60)
                out[i] += [*piece.tokens, *([piece.finish] if piece.finish else [])]
        batcher.stop()
        return out

    alone = {i: told(1, [i], 0)[i] for i in range(12)}
    assert {x[-1] for x in alone.values()} <= {"stop", "length"} and len(
        {t.id for x in alone.values() for t in x[:-1]}
    ) > 20
    for places in (1, 3, 6, 12):
        for order in range(6):
            found = told(places, random.Random(order).sample(range(12), 12), 4 * (order % 2))
            assert found == alone, (places, order)


@pytest.mark.parametrize("places", [1, 4])
@pytest.mark.parametrize("flood", ["long answers", "long prompts", "many of them", "tasks"])
def test_two_tokens_in_a_flood_wait_for_two_steps_at_most(flood: str, places: int) -> None:
    """No clock: what of eve's is read and written between ann's request and her second token, with every place taken by eve."""
    engine = ServedEngine(toy.build_model(3, "tiny").eval(), toy.build_tokenizer(), places, 256)
    batcher, rng, done = Batcher({"toy": engine}, places, read=64), random.Random(0), list[str]()
    begin = engine.begin
    told: dict[str, Any] = {"eve": 0, "ann": 0, "turns": 0, "read": []}

    def ask(owner: str, length: int, tokens: int) -> None:
        ids, how = [rng.randrange(5, 60) for _ in range(length)], SamplingConfig(max_new_tokens=tokens)

        def count(piece: AnswerPiece) -> None:
            told[owner] += len(piece.tokens)

        batcher.put("toy", Ask(ids, how, [], count, owner=owner))

    def reads(asks: Any) -> None:
        told["read"] += [(a.owner, len(a.ids)) for a in asks]
        begin(asks)

    engine.begin = reads  # type: ignore[method-assign]
    for _ in range(2 * places):
        ask("eve", 8, 200)
    for _ in range(3):
        batcher._turn()
    assert len(engine.rows) == places
    most = 2 if places > 1 else TURN
    for _ in range({"long answers": 8, "long prompts": 30, "many of them": 500, "tasks": 0}[flood]):
        ask("eve", 200 if flood == "long prompts" else 4, 50)
    for _ in range(20 if flood == "tasks" else 0):
        batcher.do(lambda: done.append("eve"), "eve", 100.0)
    told |= {"eve": 0, "read": []}
    ask("ann", 5, 2)
    while told["ann"] < 2 and told["turns"] < 50:
        batcher._turn()
        told["turns"] += 1
    assert told["turns"] <= most and told["read"][0] == ("ann", 5) and len(done) <= 1, (told, len(done))
    assert told["eve"] <= most * places and sum(n for owner, n in told["read"] if owner == "eve") <= 64 + 200, told


def test_more_owners_than_places_take_turns() -> None:
    """Each long answer that fills a place belongs to another owner; whoever comes later gets two tokens within a turn, and all answers end whole."""
    engine = ServedEngine(toy.build_model(3, "tiny").eval(), toy.build_tokenizer(), 3, 256)
    batcher, said, turns = Batcher({"toy": engine}, 3), dict[str, int](), 0
    ends = dict[str, str | None]()

    def ask(owner: str, tokens: int) -> None:
        def tell(piece: AnswerPiece) -> None:
            said[owner] = said.get(owner, 0) + len(piece.tokens)
            ends[owner] = piece.finish

        batcher.put("toy", Ask([7, 8, 9], SamplingConfig(max_new_tokens=tokens), [], tell, owner=owner))

    for i in range(3):
        ask(f"eve {i}", 150)
    batcher._turn()
    for owner in ("ann", "bob"):
        ask(owner, 2)
    while said.get("bob", 0) < 2 and turns < 99:
        batcher._turn()
        turns += 1
    assert said["ann"] == said["bob"] == 2 and turns <= TURN + 1, (turns, said)
    while batcher.running or batcher.waiting:
        batcher._turn()
    assert set(ends.values()) == {"length"} and said == {"eve 0": 150, "eve 1": 150, "eve 2": 150, "ann": 2, "bob": 2}


def test_exact_is_said_only_where_it_was_measured(folder: str, running: Running) -> None:
    said = httpx.get(f"{running.address}/v1/models").json()["data"][0]
    assert said["answers"] == "exact" and said["id"] == "toy"
    half = load_site(ServeConfig(models={"toy": folder}, max_context=64, precision="bf16"))
    assert half.models["toy"].answers.startswith("close: in half precision")
    with use_fast(False):
        own = load_site(ServeConfig(models={"toy": folder}, max_context=64))
    assert own.models["toy"].answers.startswith("close: the model runs its own forward pass")


@pytest.mark.skipif(engine._TRIM is None, reason="what is freed is given back by glibc only when asked")
def test_a_growing_cache_gives_back_what_it_left() -> None:
    net: Any = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096,
    )).eval()  # fmt: skip
    took: list[float] = []

    def serve() -> None:  # in a thread, as the server
        with torch.inference_mode():
            cache = engine.RowCache(engine.decoder_for(net, 4096), 16, 4096, 1, 16 * 4400)
            torch.ones(31_000_000, dtype=torch.uint8)  # once such a block was freed, glibc keeps blocks up to its size
            before = resident_mb()
            for rows in (1, 2, 3, 5, 9, 16):
                cache.grow(rows, 4000)
                for layer in cache.cache:
                    layer[:, :rows] = 1
            took.append((resident_mb() - before) / (cache.nbytes / 2**20))

    thread = threading.Thread(target=serve)
    thread.start(), thread.join()
    assert took[0] < 1.15, f"{took[0]:.2f} times what keys and values take"


def test_memory_is_stated_and_kept(folder: str) -> None:
    from rlhf_nb.serve.site import memory_plan

    settings: dict[str, Any] = {"models": {"toy": folder}, "max_context": 128}
    site, (row,) = load_site(ServeConfig(**settings, cache=1e-9)), memory_plan(ServeConfig(**settings, cache=1e-9))
    engine = site.batcher.engines["toy"]
    columns = engine.columns(128)
    assert 128 < columns <= 128 + 32 and row.cache == 2 * columns * row.token and engine.memory.nbytes <= row.cache
    assert row.weights == sum(p.numel() * 4 for p in engine.model.parameters())
    told: queue.Queue[AnswerPiece] = queue.Queue()
    site.batcher.start()
    site.batcher.put(
        "toy", *(Ask([5 + i] * 60, SamplingConfig(max_new_tokens=68), [], told.put, seed=i) for i in range(6))
    )
    most, ends = 0, 0
    while ends < 6:
        ends += told.get(timeout=60).finish is not None
        most = max(most, engine.memory.nbytes)
    site.batcher.stop()
    assert row.cache / 2 < most <= row.cache  # two at a time
    (whole,) = memory_plan(ServeConfig(models={"toy": folder}))
    memory = load_site(ServeConfig(models={"toy": folder})).batcher.engines["toy"].memory
    assert whole.cache > 16 * 4096 * row.token and memory.nbytes <= 260 * row.token
