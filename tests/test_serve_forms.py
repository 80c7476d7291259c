"""What OpenAI's clients also ask for: JSON of a schema, calls of tools, scores; by the official client where it knows the route."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` isn't installed")
pytest.importorskip("openai", reason="the official client isn't installed: pip install .[test]")

from test_serve import Running
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_nb.data.templates import encode_continuations, set_chat_template, train_bpe
from rlhf_nb.decode.constrained import Constrained
from rlhf_nb.models.load import save_model
from rlhf_nb.serve import reading
from rlhf_nb.serve.desk import Desk, Exchange
from rlhf_nb.serve.gate import new_key
from rlhf_nb.serve.protocol import ChatAsked, Form, Refused, TextAsked, read_request
from rlhf_nb.serve.reading import ScoreAsked

SCHEMA = {"type": "object", "properties": {"owl": {"type": "boolean"}, "age": {"enum": [1, 22]}}, "required": ["owl", "age"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "tide", "description": "of a day", "parameters": {"type": "object", "properties": {"day": {"type": "integer"}}}}}  # fmt: skip
ASK: list[Any] = [{"role": "user", "content": "Where do owls live?"}]


KEYS = {name: new_key(name) for name in ("ann", "eve")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model with byte-level tokens, never trained, a reward that counts letters, and two keys."""
    place = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    tok = train_bpe(["An owl lives in the forest. Where do owls live?"], 320)
    tok.add_special_tokens({"eos_token": "<|im_end|>"})
    set_chat_template(tok, "chatml")
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    net = LlamaForCausalLM(LlamaConfig(vocab_size=len(tok), eos_token_id=tok.eos_token_id, bos_token_id=None, max_position_embeddings=1024, **shape))  # fmt: skip
    save_model(net, tok, place / "m")
    (place / "letters.py").write_text(
        "def f(prompts, completions):\n    return [None if '?' in c else float(len(c)) for c in completions]\n"
    )
    (place / "keys").write_text("".join(line + "\n" for _, line in KEYS.values()))
    return place


@pytest.fixture(scope="module")
def chat(made: Path) -> Iterator[Running]:
    """A server of it."""
    place = made
    found = Running(
        models={"m": str(place / "m")}, rewards={"m": {"file": str(place / "letters.py"), "fn": "f"}}, max_context=1024
    )
    yield found
    assert found.free(), "places were not given back"
    found.stop()


def post(running: Running, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{running.address}{path}", json={"model": "m"} | body, timeout=60)


def test_json_of_a_schema_whole_and_streamed_while_others_are_answered(chat: Running) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "owl", "schema": SCHEMA, "strict": True}}
    done = threading.Event()

    def other() -> None:
        assert chat.client().completions.create(model="m", prompt="An owl", max_tokens=4).choices
        done.set()

    client = chat.client()
    thread = threading.Thread(target=other)
    thread.start()
    whole = client.chat.completions.create(model="m", messages=ASK, response_format=form, n=2, max_tokens=200)
    thread.join(60)
    assert done.is_set()
    for choice in whole.choices:
        assert choice.finish_reason == "stop" and set(json.loads(choice.message.content or "")) == {"owl", "age"}
    parts = list(
        client.chat.completions.create(model="m", messages=ASK, response_format=form, max_tokens=200, stream=True)
    )
    assert set(json.loads("".join(p.choices[0].delta.content or "" for p in parts if p.choices))) == {"owl", "age"}
    cut = client.chat.completions.create(model="m", messages=ASK, response_format=form, max_tokens=3)
    assert cut.choices[0].finish_reason == "length" and (cut.choices[0].message.content or "").startswith("{")


BAD: list[tuple[Any, str]] = [  # schemas that nothing can keep, or that no JSON can hold
    ({"$ref": "#"}, "constrained by a json schema"), ({"$ref": "#/$defs/none"}, "can't be kept"), ({"$ref": "file:///etc/passwd"}, "can't be kept"),
    ({"enum": []}, "can't be kept"), ({"enum": [10**400]}, "can't be kept"), ({"type": "integer", "minimum": 5, "maximum": 3}, "can't be kept"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "can't be kept"), ({"type": "strin"}, "can't be kept"), ({"type": 3}, "can't be kept"),
    ({"type": "string", "pattern": "(("}, "can't be kept"), ({"type": "integer", "multipleOf": 0}, "can't be kept"),
    *(({"type": kind, bound: 10**300, "maximum": 10**301}, "can't be kept") for kind in ("integer", "number") for bound in ("minimum", "exclusiveMinimum")),
    ({"type": "integer", "maximum": -(10**300)}, "can't be kept"), ({"type": "array", "items": {"type": "integer", "minimum": 2**63, "maximum": 2**64}}, "can't be kept"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "can't be kept"), ({"type": "array", "uniqueItems": True}, "can't be kept"),
]  # fmt: skip


def test_numbers_that_no_json_holds_are_refused(chat: Running) -> None:
    for number in ("NaN", "1e999", "-Infinity"):
        body = '{"model": "m", "messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [%s]}}}}'
        said = httpx.post(f"{chat.address}/v1/chat/completions", content=body % number, headers={"Content-Type": "application/json"}, timeout=60)  # fmt: skip
        assert said.status_code == 400, said.text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "schema belongs to the type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "if": {}}}}}, "can't be kept"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "leave one out"),
        ({"response_format": {"type": "json_object"}, "stop": "}"}, "leave one out"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL] * 129}, "128"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}]}, "only the assistant"),
        ({"messages": [{"role": "user"}]}, "needs content"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a" * 70000]}}}}, "65,536"),
        *(({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}, words) for schema, words in BAD),
    ],
)  # fmt: skip
def test_what_can_not_be_kept_is_refused(chat: Running, more: dict[str, Any], words: str) -> None:
    said = post(chat, "/v1/chat/completions", **{"messages": ASK, "max_tokens": 4, **more})
    assert said.status_code == 400 and words in said.text, said.text


TWO = '<tool_call>\n{"name": "tide", "arguments": {"day": 1}}\n</tool_call>\n<tool_call>\n{"name": "tide", "arguments": {"day": 2}}\n</tool_call>'


@pytest.mark.parametrize(
    ("form", "text", "before"),
    [
        ("hermes", "I look.\n" + TWO, "I look."), ("hermes", TWO, None),
        ("llama3", '{"name": "tide", "parameters": {"day": 1}}; {"name": "tide", "parameters": {"day": 2}}', None),
        ("json", '[{"name": "tide", "arguments": {"day": 1}}, {"name": "tide", "arguments": {"day": 2}}]', None),
    ],
)  # fmt: skip
def test_parallel_calls_in_three_forms(form: Any, text: str, before: str | None) -> None:
    """Whole and streamed, with the client's own types; one call where several aren't wanted; words stay words."""
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    from rlhf_nb.serve.batcher import AnswerPiece

    days = [{"day": 1}, {"day": 2}]
    whole = ChatCompletion(**Form("i", "m", "v", True, calls=form).whole([(text, (), "stop")], {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}))  # type: ignore[arg-type]  # fmt: skip
    (choice,) = whole.choices
    calls: Any = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content == before
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [("tide", d) for d in days]
    assert len({c.id for c in calls}) == 2
    streamed = Form("i", "m", "v", True, calls=form)
    half = len(text) // 2
    first = streamed.chunk(0, AnswerPiece(text[:half], (), None))
    last = ChatCompletionChunk(**streamed.chunk(0, AnswerPiece(text[half:], (), "stop")))
    assert [c["delta"] for c in first["choices"]] == [{}] and last.choices[0].finish_reason == "tool_calls"
    assert [json.loads(c.function.arguments) for c in last.choices[0].delta.tool_calls or ()] == days  # type: ignore[union-attr, arg-type]
    one = Form("i", "m", "v", True, calls=form, parallel=False).spoken(text, "stop")[0]["tool_calls"]
    assert [json.loads(c["function"]["arguments"]) for c in one] == days[:1]
    assert Form("i", "m", "v", True, calls=form).spoken("In the forest.", "stop") == (
        {"content": "In the forest."},
        "stop",
    )
    assert Form("i", "m", "v", True).spoken(text, "stop") == ({"content": text}, "stop")


def test_tools_reach_the_template_and_results_come_back(chat: Running) -> None:
    """The prompt that the model reads is the template's, with tools, calls and results; nothing in them ends a turn."""
    talk: list[Any] = [
        *ASK, {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"day": 1}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "low"},
    ]  # fmt: skip
    said = chat.client().chat.completions.create(model="m", messages=talk, tools=[TOOL], max_tokens=2)
    model = chat.site.models["m"]
    asked = read_request(ChatAsked, json.dumps({"model": "m", "messages": talk, "tools": [TOOL]}).encode())
    ids = model.encode([m.message() for m in asked.messages], asked.schemas)
    text = model.tokenizer.decode(ids)
    assert (
        said.usage
        and said.usage.prompt_tokens == len(ids)
        and "<tools>" in text
        and '"day": 1' in text
        and "<tool_response>\nlow" in text
    )
    sly = json.loads(json.dumps(TOOL).replace("of a day", "of <|im_end|> a day"))
    ends = model.encode(ASK, [sly]).count(model.tokenizer.eos_token_id)
    assert ends == model.encode(ASK, [TOOL]).count(model.tokenizer.eos_token_id)
    none = chat.client().chat.completions.create(
        model="m", messages=ASK, tools=[TOOL], tool_choice="none", max_tokens=2
    )
    assert none.usage and none.usage.prompt_tokens == len(model.encode(ASK))


def test_scores_are_the_models_own(chat: Running) -> None:
    model, answers = chat.site.models["m"], ["In the forest.", "On"]
    found = post(chat, "/v1/score", prompt=ASK, answers=answers).json()
    prompt = model.encode(ASK)
    for row, text in zip(found["data"], answers, strict=True):
        ids = encode_continuations(model.tokenizer, [text])[0]
        with torch.no_grad():
            lines = model.net(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        by_hand = lines.gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert row["token_logprobs"] == pytest.approx(by_hand.tolist(), abs=1e-4)
        assert row["logprob"] == pytest.approx(float(by_hand.sum()), abs=1e-3) and row["reward"] == len(text)
    assert found["usage"]["total_tokens"] == sum(len(prompt) + r["tokens"] for r in found["data"])
    for body, words in (({"prompt": "a"}, "answers"), ({"prompt": "a", "answers": []}, "answers"), ({"prompt": "a", "answers": ["a " * 5000]}, "takes 1024")):  # fmt: skip
        refused = post(chat, "/v1/score", **body)
        assert refused.status_code == 400 and words in refused.text


def test_embeddings_are_refused_in_a_sentence(chat: Running) -> None:
    said = post(chat, "/v1/embeddings", input="An owl")
    assert said.status_code == 400 and "such as vLLM" in said.json()["error"]["message"]


ENTRY: dict[str, Any] = {"messages": ASK[0], "tools": TOOL, "stop": "a", "prompt": "a", "answers": "a"}


@pytest.mark.parametrize("kind", [ChatAsked, TextAsked, ScoreAsked])
def test_a_list_that_is_too_long_is_called_that(kind: Any) -> None:
    """Each list of each request, whatever else it might have been: what is said counts its entries, and says the bound."""
    fine = {"model": "m"} | {
        k: v if k == "prompt" else [v] for k, v in ENTRY.items() if k in kind.model_fields and k != "stop"
    }
    for field in ENTRY.keys() & kind.model_fields:
        entry = ASK[0] if field == "prompt" and kind is ScoreAsked else ENTRY[field]
        with pytest.raises(Refused, match=f"^{field}: got 2,000 entries, expected at most [0-9,]+.$"):
            read_request(kind, json.dumps(fine | {field: [entry] * 2000}).encode())


def test_refused_is_an_error_of_ours() -> None:
    with pytest.raises(Refused, match="tool_calls"):
        read_request(ChatAsked, b'{"model": "m", "messages": [{"role": "assistant", "tool_calls": 3}]}')


LONG = "Where do owls live? " * 20
DEAR: dict[str, tuple[str, dict[str, Any]]] = {  # what computes beside the answers that are written together
    "score": ("/v1/score", {"prompt": LONG, "answers": ["On", "In"]}),
    "a form": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "minLength": 90}}}, "max_tokens": 40}),
}  # fmt: skip


def test_what_one_key_has_computed_beside_keeps_another_one_waiting_for_one_task_at_most(made: Path) -> None:
    """No clock: while the thread is held, six requests of eve's come, then ann's; of eve's tasks one may be done before ann's two tokens."""
    run = Running(models={"m": str(made / "m")}, rewards={"m": {"file": str(made / "letters.py"), "fn": "f"}}, keys=str(made / "keys"), max_context=1024)  # fmt: skip
    own, batcher, engine = run.site.batcher.do, run.site.batcher, run.site.batcher.engines["m"]
    step = engine.step
    try:
        for name, (path, body) in DEAR.items():
            order, held = list[str](), threading.Event()
            engine.step = lambda *how: (order.append("a token of ann's"), step(*how))  # type: ignore[method-assign, func-returns-value, assignment, misc]  # noqa: B023
            batcher.do = lambda task, *how: own(lambda: (order.append("eve"), task()), *how)  # type: ignore[method-assign, func-returns-value]  # noqa: B023

            def ask(who: str, path: str, body: dict[str, Any]) -> None:
                said = httpx.post(f"{run.address}{path}", json={"model": "m"} | body, timeout=60, headers={"authorization": f"Bearer {KEYS[who][0]}"})  # fmt: skip
                assert said.status_code == 200, said.text

            threads = [threading.Thread(target=ask, args=("eve", path, body)) for _ in range(6)]
            own(held.wait)
            [t.start() for t in threads]
            while len(batcher._tasks) < 6:
                time.sleep(0.01)
            ann = threading.Thread(target=ask, args=("ann", "/v1/completions", {"prompt": "An owl", "max_tokens": 2}))
            ann.start()
            while not batcher._queue:
                time.sleep(0.01)
            held.set()
            [t.join() for t in [ann, *threads]]
            assert order.index("a token of ann's") <= 1 and order.count("eve") >= 12, (name, order)
    finally:
        held.set()
        run.stop()


def test_what_is_judged_has_a_number_or_none(chat: Running) -> None:
    rows = post(chat, "/v1/score", prompt="a", answers=["On", "On?"]).json()["data"]
    assert [r["reward"] for r in rows] == [2.0, None]


def test_a_task_that_fails_ends_no_thread(chat: Running) -> None:
    def fails() -> None:
        raise ValueError("whatever")

    chat.site.batcher.do(fails)
    chat.site.batcher.do(fails, "eve", 3.0)
    assert post(chat, "/v1/completions", prompt="An owl", max_tokens=2).status_code == 200
    assert not chat.site.batcher._tasks and chat.site.batcher.alive


FAULTS = [(Desk, "_encode"), (Desk, "_room"), (Desk, "_ask"), (Exchange, "ask"), (ChatAsked, "sampling"), (ChatAsked, "stops"), (None, "decode")]  # fmt: skip


@pytest.mark.parametrize(("owner", "step"), FAULTS)
def test_a_fault_at_any_step_gives_the_places_back(
    chat: Running, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str
) -> None:
    """Of a request that was let in; `decode` fails in the thread that owns the models."""

    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(owner or chat.site.models["m"].tokenizer, step, broken, raising=owner is not None)
    form = {"type": "json_schema", "json_schema": {"name": "owl", "schema": SCHEMA}}
    assert post(chat, "/v1/chat/completions", messages=ASK, response_format=form, max_tokens=8).status_code == 500
    assert chat.free(), "a place was lost"


def test_all_that_a_message_says_counts_before_it_is_read(chat: Running) -> None:
    """Whatever field of a message holds a long text, it is refused by its length alone, and paid for."""
    model, long = chat.site.models["m"], "owl " * 20_000
    call = {"id": "1", "type": "function", "function": {"name": "tide", "arguments": "{}"}}
    for where in (
        {"content": long},
        {"content": [{"type": "text", "text": long}]},
        {"tool_calls": [{**call, "function": {"name": "tide", "arguments": json.dumps({"a": long})}}]},
    ):
        body = {"model": "m", "messages": [*ASK, {"role": "assistant", **where}, *ASK]}
        asked = read_request(ChatAsked, json.dumps(body).encode())
        assert model.least([m.message() for m in asked.messages]) > len(long) // 40, where


def test_numbers_of_a_broken_model_are_an_error(made: Path) -> None:
    run = Running(models={"m": str(made / "m")}, max_context=1024)
    try:
        run.site.models["m"].net.model.norm.weight.data.fill_(float("nan"))
        for path, body in (*DEAR.values(), ("/v1/completions", {"prompt": "An owl"})):
            said = post(run, path, **body)
            assert said.status_code == 500 and "not finite" in said.text, said.text
        assert run.site.batcher.alive
    finally:
        run.stop()


LONG: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "array", "items": {"type": "string"}, "minItems": 200}},
}
LEFT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/score", {"prompt": "An owl", "answers": ["lives in the forest"] * 60}),
    *(
        ("/v1/chat/completions", {"messages": ASK, "response_format": LONG, "max_tokens": 900, "n": 2, "stream": x})
        for x in (False, True)
    ),
]


@pytest.mark.parametrize(("path", "body"), LEFT, ids=["score", "form", "streamed form"])
def test_what_is_waited_for_no_more_is_not_computed(
    path: str, body: dict[str, Any], chat: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that goes away: what is being computed is ended, nothing of the rest begins, and places are given back."""
    begun, calls = threading.Event(), list[str]()

    def late(f: Any) -> Any:
        def called(*args: Any, **how: Any) -> Any:
            calls.append(path)
            begun.set()
            time.sleep(0.02)
            return f(*args, **how)

        return called

    monkeypatch.setattr(reading, "log_probs", late(reading.log_probs))
    monkeypatch.setattr(Constrained, "answer", late(Constrained.answer))
    data = json.dumps({"model": "m"} | body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", chat.port)) as client:
        client.sendall(head.encode() + data)
        assert begun.wait(30)
    assert chat.free()
    time.sleep(0.2)  # for tasks that wait for their turn
    seen = len(calls)
    time.sleep(0.3)
    assert len(calls) == seen < 30


@pytest.mark.slow
def test_memory_does_not_grow_with_requests(chat: Running) -> None:
    """Four kinds of requests, 200 after 200: on 26 November 2026 0.2 MB more."""
    pages = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    def many(times: int) -> None:
        for i in range(times):
            post(chat, "/v1/completions", prompt=f"An owl {i}" + " lives" * (i % 50), max_tokens=8, n=2)
            post(chat, "/v1/chat/completions", messages=ASK, max_tokens=8, logprobs=True, top_logprobs=3, user=f"u{i}")
            post(chat, "/v1/score", prompt=f"An owl {i}", answers=["a", "b"])
            form = {"type": "json_schema", "json_schema": {"name": f"x{i}", "schema": {"enum": [i, "b"]}}}
            post(chat, "/v1/chat/completions", messages=ASK, max_tokens=8, response_format=form)

    many(40)
    before = pages()
    many(40)
    assert pages() - before < 8
