"""What OpenAI's clients also ask for: JSON of a schema, calls of tools, scores and embeddings; by the official client where it knows the route."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi", reason="the extra `serve` isn't installed")
pytest.importorskip("openai", reason="the official client isn't installed: pip install .[test]")

from test_serve import Running
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_nb.data.templates import CHATML, encode_continuations, train_bpe
from rlhf_nb.models.load import save_model
from rlhf_nb.serve.protocol import ChatAsked, Form, Refused, read_request

SCHEMA = {"type": "object", "properties": {"owl": {"type": "boolean"}, "age": {"enum": [1, 22]}}, "required": ["owl", "age"], "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "tide", "description": "of a day", "parameters": {"type": "object", "properties": {"day": {"type": "integer"}}}}}  # fmt: skip
ASK: list[Any] = [{"role": "user", "content": "Where do owls live?"}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A chat model with byte-level tokens, never trained, and a reward that counts letters."""
    place = tmp_path_factory.mktemp("chat")
    torch.manual_seed(0)
    tok = train_bpe(["An owl lives in the forest. Where do owls live?"], 320)
    tok.add_special_tokens({"eos_token": "<|im_end|>"})
    tok.chat_template = CHATML
    shape: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    net = LlamaForCausalLM(LlamaConfig(vocab_size=len(tok), eos_token_id=tok.eos_token_id, bos_token_id=None, max_position_embeddings=1024, **shape))  # fmt: skip
    save_model(net, tok, place / "m")
    (place / "letters.py").write_text("def f(prompts, completions):\n    return [float(len(c)) for c in completions]\n")
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
    assert first["choices"] == [] and last.choices[0].finish_reason == "tool_calls"
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


def test_embeddings_are_means_of_length_one(chat: Running) -> None:
    model, texts = chat.site.models["m"], ["An owl lives in the forest.", "An owl"]
    said = chat.client().embeddings.create(model="m", input=texts, encoding_format="float")
    with torch.no_grad():
        for row, text in zip(said.data, texts, strict=True):
            mean = model.net.model(torch.tensor([model.encode(text)])).last_hidden_state[0].mean(0)
            torch.testing.assert_close(torch.tensor(row.embedding), mean / mean.norm(), atol=1e-4, rtol=0)
    packed = post(chat, "/v1/embeddings", input=texts[0], encoding_format="base64").json()["data"][0]["embedding"]
    raw = base64.b64decode(packed)
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(said.data[0].embedding, abs=1e-6)
    for bad in ("", [], ["a", ""], ["a " * 5000]):
        assert post(chat, "/v1/embeddings", input=bad).status_code == 400
    assert post(chat, "/v1/embeddings", input="a", model="no").status_code == 404


def test_refused_is_an_error_of_ours() -> None:
    with pytest.raises(Refused, match="tool_calls"):
        read_request(ChatAsked, b'{"model": "m", "messages": [{"role": "assistant", "tool_calls": 3}]}')
