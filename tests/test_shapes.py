"""Data as it lies about: a small file of each shape that people have, read as it is, trained on, or refused in one sentence."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rlhf_nb import DPOConfig
from rlhf_nb.cli.main import app
from rlhf_nb.config import DataConfig
from rlhf_nb.core import DataError
from rlhf_nb.data import toy
from rlhf_nb.data.formats import DataWarning, to_format, to_rows
from rlhf_nb.data.rows import in_kind, load_rows, stream_rows
from rlhf_nb.data.shapes import SHAPES, DataNote, Reading
from rlhf_nb.data.sources import tokenize_preferences, tokenize_prompts, tokenize_sft
from rlhf_nb.data.templates import train_bpe
from rlhf_nb.pipeline.data_look import text_parts

ANIMALS = ["owl", "otter", "fox", "bear", "crane", "heron", "lynx", "newt"]
Q = [f"Where does the {a} sleep?" for a in ANIMALS]
A = [f"The {a} sleeps in its den." for a in ANIMALS]
B = [f"No idea about any {a}." for a in ANIMALS]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def rated(good: str, bad: str) -> list[dict[str, Any]]:
    low = {"honesty": {"Rating": "2"}, "helpfulness": {"Rating": "N/A"}}
    high = {"honesty": {"Rating": "5"}, "helpfulness": {"Rating": "4"}}
    return [
        {"response": bad, "annotations": low, "overall_score": 10.0, "model": "m1"},
        {"response": good, "annotations": high, "overall_score": 7.5, "model": "m2"},
        {"response": bad + " Truly.", "annotations": low, "overall_score": 1.0, "model": "m3"},
    ]


TIDE = {
    "type": "function",
    "function": {"name": "tide", "description": "of a day", "parameters": {"type": "object", "properties": {"day": {"type": "integer"}}}},
}  # fmt: skip
CALL = {"type": "function", "function": {"name": "tide", "arguments": '{"day": 3}'}}

FILES: dict[str, list[dict[str, Any]]] = {
    "sharegpt": [{"id": i, "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for i, (q, a) in enumerate(zip(Q, A, strict=True))],
    "alpaca": [{"instruction": "Answer.", "input": q, "output": a, "text": f"### Answer.\n{q}\n### {a}"} for q, a in zip(Q, A, strict=True)],
    "prompt_response": [{"prompt": q, "response": a} for q, a in zip(Q, A, strict=True)],
    "thumbs": [{"prompt": q, "response": t, "label": t is a} for q, a, b in zip(Q, A, B, strict=True) for t in (a, b)],
    "question_thumbs": [
        {"question": q, "answer": t, "thumbs_up": t is a} for q, a, b in zip(Q, A, B, strict=True) for t in (a, b)
    ],
    "alpaca_thumbs": [
        {"instruction": "Answer.", "input": q, "output": t, "label": int(t is a)}
        for q, a, b in zip(Q, A, B, strict=True) for t in (a, b)
    ],
    "question_answer": [{"question": q, "answer": a} for q, a in zip(Q, A, strict=True)],
    "question_pairs": [{"question": q, "chosen": a, "rejected": b} for q, a, b in zip(Q, A, B, strict=True)],
    "orca": [{"system": "Be brief.", "question": q, "chosen": a, "rejected": b} for q, a, b in zip(Q, A, B, strict=True)],
    "ultrafeedback": [{"source": "x", "instruction": q, "completions": rated(a, b)} for q, a, b in zip(Q, A, B, strict=True)],
    "hh": [{"chosen": f"\n\nHuman: {q}\n\nAssistant: {a}", "rejected": f"\n\nHuman: {q}\n\nAssistant: {b}"} for q, a, b in zip(Q, A, B, strict=True)],
    "nectar": [
        {"prompt": f"\n\nHuman: {q}\n\nAssistant: ", "answers": [{"answer": b, "model": "m", "rank": 2.0}, {"answer": a, "model": "n", "rank": 1.0}], "turns": 1}
        for q, a, b in zip(Q, A, B, strict=True)
    ],
    "kto": [{"prompt": q, "completion": t, "label": t is a} for q, a, b in zip(Q, A, B, strict=True) for t in (a, b)],
    "messages": [{"messages": [user(q), says(a)]} for q, a in zip(Q, A, strict=True)],
    "tools": [
        {"messages": [user(q), {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "low"}, says(a)], "tools": json.dumps([TIDE])}
        for q, a in zip(Q, A, strict=True)
    ],
    "stepwise": [{"prompt": q, "completions": ["First.", a], "labels": [1, 0]} for q, a in zip(Q, A, strict=True)],
}  # fmt: skip

# what a method gets of the first row: file, purpose, row; or the sentence that it is refused with
ASKED = [user(Q[0])]
EXPECTED: list[tuple[str, str, Any]] = [
    ("sharegpt", "sft", {"messages": [user(Q[0]), says(A[0])], "id": 0}),
    ("sharegpt", "prompt", {"prompt": ASKED, "id": 0}),
    ("sharegpt", "preference", "row 0: the columns are id, conversations, but the format 'preference' needs chosen+rejected. They are read as ShareGPT"),
    ("alpaca", "sft", {"prompt": [user(f"Answer.\n\n{Q[0]}")], "completion": [says(A[0])]}),
    ("alpaca", "preference", "read as Alpaca: instruction + input → prompt, output → completion, which makes prompt+completion. Pairs come from"),
    ("alpaca", "unpaired", "kto needs a label, 0 or 1"),
    ("prompt_response", "sft", {"prompt": Q[0], "completion": A[0]}),
    ("prompt_response", "prompt", {"prompt": Q[0], "response": A[0]}),
    ("thumbs", "unpaired", {"prompt": Q[0], "completion": A[0], "label": True}),
    ("question_thumbs", "unpaired", {"prompt": ASKED, "completion": [says(A[0])], "label": True}),
    ("alpaca_thumbs", "unpaired", {"prompt": [user(f"Answer.\n\n{Q[0]}")], "completion": [says(A[0])], "label": True}),
    ("thumbs", "preference", "Pairs come from two answers"),
    ("question_answer", "sft", {"prompt": ASKED, "completion": [says(A[0])]}),
    ("question_answer", "prompt", {"prompt": ASKED, "question": Q[0], "answer": A[0]}),
    ("question_pairs", "preference", {"prompt": ASKED, "chosen": [says(A[0])], "rejected": [says(B[0])]}),
    ("orca", "preference", {"prompt": [{"role": "system", "content": "Be brief."}, *ASKED], "chosen": [says(A[0])], "rejected": [says(B[0])]}),
    ("orca", "sft", {"prompt": [{"role": "system", "content": "Be brief."}, *ASKED], "completion": [says(A[0])]}),
    ("ultrafeedback", "preference", {"prompt": ASKED, "chosen": [says(A[0])], "rejected": None, "margin": 2.5, "source": "x"}),
    ("ultrafeedback", "sft", {"prompt": ASKED, "completion": [says(A[0])], "source": "x"}),
    ("hh", "preference", {"prompt": ASKED, "chosen": [says(A[0])], "rejected": [says(B[0])]}),
    ("nectar", "preference", {"prompt": ASKED, "chosen": [says(A[0])], "rejected": [says(B[0])], "turns": 1}),
    ("nectar", "unpaired", {"prompt": ASKED, "completion": [says(A[0])], "label": True}),
    ("kto", "unpaired", {"prompt": Q[0], "completion": A[0], "label": True}),
    ("messages", "sft", {"messages": [user(Q[0]), says(A[0])]}),
    ("stepwise", "sft", "needs text or messages or prompt+completion or chosen+rejected"),
]  # fmt: skip


def write(folder: Path, name: str) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in FILES[name]), encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNote)
        yield


@pytest.fixture(scope="module")
def tok() -> Any:
    return train_bpe([*Q, *A, *B, "tide"], vocab_size=400)


@pytest.mark.parametrize(("name", "kind", "row"), EXPECTED, ids=[f"{n}-{k}" for n, k, _ in EXPECTED])
def test_a_file_of_each_shape(tmp_path: Path, name: str, kind: Any, row: Any) -> None:
    data = DataConfig(path=write(tmp_path, name))
    if isinstance(row, str):
        with pytest.raises(DataError) as e:
            load_rows(data, kind)
        assert row in str(e.value) and "rename_columns" not in str(e.value)
        return
    found = load_rows(data, kind)[0]
    first = dict(found[0])
    if row.get("rejected", "") is None:
        assert first["rejected"][0]["content"].startswith(B[0])
        row = row | {"rejected": first["rejected"]}
    assert first == row
    if kind != "unpaired" and "thumbs" not in name and name != "kto":
        assert len(found) == len(ANIMALS)
    again = list(to_rows(found, kind))
    assert again == found, "once normal, always normal"
    kept = stream_rows(data.replace(streaming=True, shuffle_buffer=1), [], kind, 0, lambda rows: rows)
    assert kept.next_batch(len(found)) == found, "a stream reads the same"


SHEPHERD = "{q} Step 1: Look. {x}\nStep 2: {a} {y}"
XLAM_TOOLS = [
    {"name": "tide", "description": "of a day", "parameters": {"day": {"type": "integer", "description": "which"}}}
]
STEPS = [
    {
        "completions": [{"text": "Look.", "rating": 1}, {"text": "Sleep.", "rating": -1}],
        "human_completion": None,
        "chosen_completion": 0,
    },
    {"completions": [{"text": "No.", "rating": -1}], "human_completion": None, "chosen_completion": None},
]
ARENA = [
    {"winner": w, "conversation_a": [user(Q[0]), says(A[0])], "conversation_b": [user(Q[0]), says(B[0])]}
    for w in ("model_a", "tie")
]
MORE: dict[str, tuple[list[dict[str, Any]], str, dict[str, Any]]] = {  # shape: rows, purpose, what the first becomes
    "openai_pairs": ([{"input": {"messages": ASKED, "tools": [], "parallel_tool_calls": True}, "preferred_output": [says(A[0])], "non_preferred_output": [says(B[0])]}],
                     "preference", {"prompt": ASKED, "chosen": [says(A[0])], "rejected": [says(B[0])]}),
    "arena": (ARENA, "preference", {"prompt": ASKED, "chosen": [says(A[0])], "rejected": [says(B[0])]}),
    "arena_answers": ([{"prompt": Q[0], "response_a": B[0], "response_b": A[0], "winner": "B"}], "preference", {"prompt": ASKED, "chosen": [says(A[0])], "rejected": [says(B[0])]}),
    "math_shepherd": ([{"input": SHEPHERD.format(q=Q[0], a=A[0], x="ки", y="ки"), "label": SHEPHERD.format(q=Q[0], a=A[0], x="+", y="-"), "task": "GSM8K"}],
                      "stepwise", {"prompt": Q[0], "completions": ["Step 1: Look.", f"Step 2: {A[0]}"], "labels": [True, False], "task": "GSM8K"}),
    "prm800k": ([{"question": {"problem": Q[0], "ground_truth_answer": "den"}, "label": {"steps": STEPS, "finish_reason": "found_error"}}],
                "stepwise", {"prompt": Q[0], "completions": ["Look.", "No."], "labels": [True, False]}),
    "numina": ([{"problem": Q[0], "solution": A[0], "answer": "den", "problem_type": "Algebra"}], "sft", {"prompt": ASKED, "completion": [says(A[0])]}),
    "xlam": ([{"id": 0, "query": Q[0], "answers": json.dumps([{"name": "tide", "arguments": {"day": 3}}]), "tools": json.dumps(XLAM_TOOLS)}],
             "sft", {"id": 0, "messages": [user(Q[0]), {**says(""), "tool_calls": [{"type": "function", "function": {"name": "tide", "arguments": {"day": 3}}}]}],
                     "tools": [{"type": "function", "function": {"name": "tide", "description": "of a day", "parameters": {"type": "object", "properties": XLAM_TOOLS[0]["parameters"]}}}]}),
}  # fmt: skip


HERMES = [
    {
        "type": "function",
        "function": {"name": "tide", "description": "of a day", "parameters": {"type": "object", "properties": {}}},
    }
]
TOLD = "You may call: <tools>" + json.dumps(HERMES) + "</tools>"
SAYS_CALL = '<tool_call>\n{"name": "tide", "arguments": {}}\n</tool_call>'
LAST: dict[str, tuple[list[Any], str, dict[str, Any]]] = {  # what the columns of a format say already; or no columns
    "rlvr": ([{"messages": ASKED, "ground_truth": "den", "dataset": "gsm8k"}], "prompt", {"prompt": ASKED, "ground_truth": "den", "dataset": "gsm8k"}),
    "tulu_sft": ([{"id": "x", "messages": [user(Q[0]), says(A[0])], "source": "mix"}], "sft", {"messages": [user(Q[0]), says(A[0])], "id": "x", "source": "mix"}),
    "tulu_pairs": ([{"id": "x", "prompt": Q[0], "chosen": [user(Q[0]), says(A[0])], "rejected": [user(Q[0]), says(B[0])], "chosen_rating": 4.0}],
                   "preference", {"prompt": ASKED, "chosen": [says(A[0])], "rejected": [says(B[0])], "id": "x", "chosen_rating": 4.0}),
    "hermes": ([{"conversations": [{"from": "system", "value": TOLD}, {"from": "human", "value": Q[0]}, {"from": "gpt", "value": SAYS_CALL},
                                   {"from": "tool", "value": "low"}, {"from": "gpt", "value": A[0]}], "tools": json.dumps(HERMES)}],
               "sft", {"messages": [{"role": "system", "content": TOLD}, user(Q[0]), says(SAYS_CALL), {"role": "tool", "content": "low"}, says(A[0])]}),
    "numina_cot": ([{"source": "x", "problem": Q[0], "solution": A[0], "messages": [user(Q[0]), says(A[0])]}], "sft",
                   {"messages": [user(Q[0]), says(A[0])], "source": "x", "problem": Q[0], "solution": A[0]}),
    "numina_15": ([{"problem": Q[0], "solution": A[0], "answer": "den", "problem_type": "Algebra", "question_type": "proof"}], "sft", {"prompt": ASKED, "completion": [says(A[0])]}),
    "parts": ([{"messages": [{"role": "user", "content": [{"type": "text", "text": Q[0]}]}, says(A[0])]}], "sft", {"messages": [user(Q[0]), says(A[0])]}),
    "text lines": ([A[0]], "sft", {"text": A[0]}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAST)
def test_the_last_shapes(tmp_path: Path, name: str) -> None:
    rows, kind, first = LAST[name]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    assert load_rows(DataConfig(path=str(path)), kind)[0] == [first]  # type: ignore[arg-type]
    code, text = look(str(path), "--rows", "0")
    methods = {"prompt": "grpo", "sft": "sft", "preference": "dpo"}
    assert code == 0 and methods[kind] in text, text


# method that trains on the file of each shape; Magpie and Arena among them
TRAINS = {
    **dict.fromkeys(("sharegpt", "alpaca", "prompt_response", "question_answer", "messages", "numina", "tulu_sft"), "sft"),
    **dict.fromkeys(("hermes", "xlam", "tools", "numina_cot", "text lines"), "sft"),
    **dict.fromkeys(("question_pairs", "orca", "ultrafeedback", "hh", "nectar", "openai_pairs", "arena", "tulu_pairs"), "preference"),
    **dict.fromkeys(("kto", "thumbs", "question_thumbs", "alpaca_thumbs"), "unpaired"), **dict.fromkeys(("stepwise", "prm800k", "math_shepherd"), "stepwise"),
    "rlvr": "prompt",
}  # fmt: skip


def test_twenty_five_shapes_and_more() -> None:
    assert set(TRAINS) <= {*FILES, *MORE, *LAST} and len(TRAINS) >= 25


@pytest.mark.parametrize("name", TRAINS)
def test_three_rows_of_each_shape_become_what_a_method_trains_on(tmp_path: Path, tok: Any, name: str) -> None:
    from rlhf_nb.train.method import tokenize_rows

    kind: Any = TRAINS[name]
    rows = FILES[name] if name in FILES else [json.loads(json.dumps(r)) for r in {**MORE, **LAST}[name][0]]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    chatty = train_bpe([*Q, *A, *B, "tide"], vocab_size=400)
    chatty.chat_template = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        made = tokenize_rows(kind, load_rows(DataConfig(path=str(path)), kind)[0], chatty, DataConfig())
    assert made and all(row["prompt_ids"] or kind == "sft" for row in made)
    said = chatty.decode([i for k, v in made[0].items() if k.endswith("_ids") for i in v])
    assert ("sleep" in said) or name == "text lines"


def test_questions_alone_are_no_demonstrations(tok: Any) -> None:
    with pytest.raises(DataError, match=r"1 with no answer \(prompts are for grpo, rloo and ppo\)"):
        tokenize_sft(LAST["rlvr"][0], tok)


def test_a_picture_inside_a_message_is_refused_with_its_place() -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "den.png"}]}, says(A[0])]}
    with pytest.raises(DataError, match=r"row 0, messages\[0\].content has a part of the type 'image_url'"):
        list(to_rows([row], "sft"))


def test_a_thousand_pairs_of_hh_where_there_is_a_hub_and_the_toy_where_there_is_none(monkeypatch: Any) -> None:
    asked = []

    def hub(name: str, split: str, subset: Any, streaming: bool, revision: str) -> Any:
        asked.append((name, split, revision))
        return lambda: iter(FILES["hh"])

    monkeypatch.setattr("rlhf_nb.data.rows.open_rows", hub)
    data = DPOConfig.load(None, ["data=hh-1k", "model=toy"]).data
    assert len(load_rows(data.replace(eval_size=None), "preference")[0]) == len(ANIMALS)
    assert [each[:2] for each in asked] == [("Anthropic/hh-rlhf", "train[:1000]")] and len(asked[0][2]) == 40
    asked.clear()
    load_rows(data.replace(eval_size=None, revision="mine"), "preference")
    assert asked[0][2] == "mine"
    monkeypatch.undo()
    with pytest.warns(DataWarning, match="hh-1k is 1000 rows of the hub's Anthropic/hh-rlhf, which can't be had.*toy"):
        found = load_rows(data.replace(dedup=False), "preference")[0]
    assert len(found) == 1000 and {"prompt", "chosen", "rejected"} <= found[0].keys()


@pytest.mark.parametrize("name", MORE)
def test_more_shapes(tmp_path: Path, name: str) -> None:
    rows, kind, first = MORE[name]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)
        found = load_rows(DataConfig(path=str(path)), kind)[0]  # type: ignore[arg-type]
    assert found == [first], "a tie compares nothing"
    title = next(s.title for s in SHAPES if s.name == name)
    code, text = look(str(path), "--rows", "0")
    assert code == 0 and title in " ".join(text.split()), text


def test_what_those_shapes_can_not_hold_is_said() -> None:
    with pytest.raises(DataError, match="row 0, winner is 'both of them'; known are model_a"):
        list(to_rows([{**ARENA[0], "winner": "both of them"}], "preference"))
    with pytest.raises(DataError, match="step 2 of the input ends in no \\+ or - there"):
        list(
            to_rows(
                [{**MORE["math_shepherd"][0][0], "label": SHEPHERD.format(q=Q[0], a=A[0], x="+", y="?")}], "stepwise"
            )
        )


def test_two_readings_that_say_the_same_are_one() -> None:
    """Magpie has each dialogue twice; where the two differ, it is asked which."""
    row = {"instruction": Q[0], "response": A[0], "conversations": FILES["sharegpt"][0]["conversations"]}
    assert list(to_rows([row], "sft"))[0]["messages"] == [user(Q[0]), says(A[0])]
    assert next(to_rows([row], "prompt"))["prompt"] == ASKED
    with pytest.raises(DataError, match="data.shape=sharegpt or data.shape=alpaca"):
        list(to_rows([{**row, "response": B[0]}], "sft"))


@pytest.mark.parametrize("column", ["image", "images", "video"])
def test_pictures_are_refused_with_their_column(column: str) -> None:
    row = {"messages": [user(Q[0]), says(A[0])], column: [{"path": "den.png"}]}
    with pytest.raises(
        DataError, match=rf"row 0, {column}: the row has pictures.*data.columns={{{column}: null}} goes without"
    ):
        list(to_rows([row], "sft"))
    assert list(to_rows([{**row, column: []}], "sft"))


def test_lines_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(f"{A[0]}\n\n{A[1]}\r\n")
    assert load_rows(DataConfig(path=str(tmp_path / "book.txt")), "sft")[0] == [{"text": A[0]}, {"text": A[1]}]


def test_all_sixteen_are_covered() -> None:
    assert len(FILES) == 16 and set(FILES) == {n for n, _, _ in EXPECTED} | {"tools"}


@pytest.mark.parametrize("name", [n for n in FILES if n not in ("stepwise", "tools")])
def test_every_shape_becomes_tokens(tmp_path: Path, tok: Any, name: str) -> None:
    rows = load_rows(DataConfig(path=write(tmp_path, name)), "sft")[0]
    said = tokenize_sft(rows, tok)
    assert tok.decode(said[0]["completion_ids"], skip_special_tokens=True).strip() == A[0] and len(said) == len(ANIMALS)
    for row in tokenize_prompts(load_rows(DataConfig(path=write(tmp_path, name)), "prompt")[0], tok):
        assert "sleep?" in tok.decode(row["prompt_ids"]) and "den" not in tok.decode(row["prompt_ids"])


def test_a_thumb_down_is_no_demonstration() -> None:
    with pytest.warns(DataWarning, match="8 of 16 rows are disliked answers and are left out. row 1: the label says"):
        assert len(list(to_rows(FILES["kto"], "sft"))) == 8
    with pytest.raises(DataError, match="All 1 rows are left out. row 0: the label"):
        list(to_rows(FILES["kto"][1:2], "sft"))


def test_what_a_file_was_taken_for_is_said_once() -> None:
    with pytest.warns(DataNote) as said:
        list(to_rows(FILES["alpaca"], "sft"))
    assert [str(w.message) for w in said] == ["read as Alpaca: instruction + input → prompt, output → completion."]


def test_the_draw_among_worse_answers_is_addressed() -> None:
    rows = FILES["ultrafeedback"]
    mixed = random.Random(0).sample(rows, len(rows))
    read = {r["prompt"][0]["content"]: r["rejected"] for r in to_rows(rows, "preference", Reading(seed=5))}
    assert read == {r["prompt"][0]["content"]: r["rejected"] for r in to_rows(mixed, "preference", Reading(seed=5))}
    drawn = {json.dumps([r["rejected"] for r in to_rows(rows, "preference", Reading(seed=s))]) for s in range(5)}
    assert len(drawn) > 1


def test_answers_rated_alike_are_counted() -> None:
    alike = [{"instruction": "Why?", "completions": [{"response": x, "rating": 3} for x in "ab"]}]
    with pytest.warns(DataWarning, match="1 of 9 rows have no two answers of which one is better"):
        assert len(list(to_rows([*FILES["ultrafeedback"], *alike], "preference"))) == 8


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        ({"instruction": "a", "output": "b", "question": "c", "answer": "d"}, "sft", "data.shape=alpaca or data.shape=question_answer"),
        ({"instruction": "a", "output": "b", "text": "c"}, "sft", "data.shape=alpaca or data.shape=text"),
        ({"problem": "a", "answer": "b", "solution": "c"}, "sft", "data.columns={solution: null}"),
        ({"task": "Name one.", "chosen": "Owl.", "rejected": "Fox."}, "preference", "data.columns={task: prompt} takes it, data.columns={task: null}"),
        ({"conversations": [{"from": "judge", "value": "x"}]}, "sft", "row 0, conversations[0] is from 'judge'; known are"),
        ({"messages": [{"from": "human", "value": "x"}]}, "sft", "data.columns={messages: conversations}"),
        ({"messages": [user("x"), says("y")], "tools": ["tide"]}, "sft", "data.columns={tools: null} drops"),
        ({"prompt": "x", "answers": [{"answer": "a", "rank": "first"}, {"answer": "b", "rank": 2}]}, "preference", "rank is 'first'; expected a number"),
        ({"prompt": "x", "response": "y", "label": "great"}, "unpaired", "label is 'great'; expected 0 or 1"),
        ({"query": "x", "reply": "y"}, "sft", "data.columns={query: prompt, reply: completion} reads them so"),
        ({"prompt": "x", "complete": "y"}, "sft", "Did you mean 'completion' by 'complete'? data.columns={complete: completion}"),
        ({"instruction": "x", "completions": [{"text": "a"}, {"text": "b"}]}, "preference", "but the format 'preference' needs chosen+rejected"),
        ({"prompt": "x", "response": "y", "helpfulness": 4}, "preference", "or by ratings (docs/data.md)"),
        ({"instruction": ["x"], "output": "y"}, "sft", "row 0, instruction (prompt)[0] is str ("),
        ({"question": 7, "answer": "y"}, "sft", "prompt: int (7) is no text"),
    ],
)  # fmt: skip
def test_nothing_is_accepted_wrongly(row: dict[str, Any], kind: Any, words: str) -> None:
    with pytest.raises(DataError) as e:
        list(in_kind([row], kind))
    assert words in str(e.value), str(e.value)


def test_columns_are_renamed_by_a_line_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"query": "Why?", "reply": "So.", "prompt": 3}))
    data = DataConfig(path=str(path), columns={"query": "prompt", "reply": "completion", "prompt": None})
    assert load_rows(data, "sft")[0] == [{"prompt": "Why?", "completion": "So."}]
    with pytest.raises(
        DataError, match=r"no column 'repyl'.*Did you mean 'reply'\? Write data.columns={reply: completion}"
    ):
        load_rows(data.replace(columns={"repyl": "completion"}), "sft")
    with pytest.raises(DataError, match="data.shape 'alpacca' is unknown. Did you mean 'alpaca'"):
        load_rows(data.replace(shape="alpacca", columns={}), "sft")
    torn = {"instruction": "a", "output": "b", "text": "c"}
    path.write_text(json.dumps(torn))
    for shape, row in (
        ("text", {"text": "c"}),
        ("alpaca", {"prompt": [user("a")], "completion": [says("b")], "text": "c"}),
    ):
        found = load_rows(DataConfig(path=str(path), shape=shape), "sft")[0]
        assert found == [row], shape
        assert tokenize_sft(found, toy.build_tokenizer(), warn=False) is not None


TEMPLATE = (
    "{%- if tools %}[tools] {{ tools | tojson }}\n{% endif -%}{%- for m in messages -%}<{{ m.role }}> {{ m.content }}"
    "{%- for c in m.tool_calls or [] %} call {{ c.function.name }} {{ c.function.arguments.day }}{% endfor -%}"
    "{{ eos_token if m.role == 'assistant' else '' }}\n{%- endfor -%}{%- if add_generation_prompt %}<assistant>{% endif -%}"
)


def test_tools_and_calls_go_through_the_template(tmp_path: Path, tok: Any) -> None:
    import copy

    data = DataConfig(path=write(tmp_path, "tools"))
    rows = load_rows(data, "sft")[0]
    assert rows[0]["tools"] == [TIDE] and rows[0]["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"day": 3}
    able = copy.deepcopy(tok)
    able.chat_template = TEMPLATE
    (one, *_) = tokenize_sft(rows, able)
    assert '"name": "tide"' in tok.decode(one["prompt_ids"])
    learnt = tok.decode([i for i, m in zip(one["completion_ids"], one["completion_mask"], strict=True) if m])
    assert "call tide 3" in learnt and A[0] in learnt and "low" not in learnt
    asked = tokenize_prompts(load_rows(data, "prompt")[0], able)
    assert "[tools]" in tok.decode(asked[0]["prompt_ids"]) and "low" in tok.decode(asked[0]["prompt_ids"])
    with pytest.raises(DataError, match=r"doesn't write tools: 'tide'.*data.columns={tools: null}"):
        tokenize_sft(rows, tok)
    bare = load_rows(data.replace(columns={"tools": None}), "sft")[0]
    with pytest.raises(DataError, match=r"doesn't write calls of tools: messages\[1\] calls 'tide'"):
        tokenize_sft(bare, tok)
    pair = {"prompt": [user(Q[0])], "chosen": [says(A[0])], "rejected": [says(B[0])], "tools": [TIDE]}
    assert "[tools]" in tok.decode(tokenize_preferences([pair], able)[0]["prompt_ids"])


def test_every_entry_of_the_table_is_tried_here() -> None:
    read = {s.name for s in SHAPES for rows in FILES.values() if s.columns(rows[0])}
    more = {"sharegpt_pairs", "alpaca_pairs", "ranking", *MORE}
    assert read | more == {s.name for s in SHAPES}
    turns = {
        "conversations": [{"from": "human", "value": Q[0]}],
        "chosen": {"from": "gpt", "value": A[0]},
        "rejected": {"from": "gpt", "value": B[0]},
    }
    halves = {"instruction": "Answer.", "input": Q[0], "chosen": A[0], "rejected": B[0]}
    for row, prompt in ((turns, Q[0]), (halves, f"Answer.\n\n{Q[0]}")):
        (found,) = to_rows([row], "preference")
        assert found == {"prompt": [user(prompt)], "chosen": [says(A[0])], "rejected": [says(B[0])]}


def shape_table() -> str:
    """The shapes, their columns and what comes of them, as a table in Markdown."""
    lines = ["| shape | columns | read as |", "|---|---|---|"]
    for s in SHAPES:
        columns = "; ".join(f"`{text}` → {role}" if text != role else f"`{text}`" for role, text in s.roles.items())
        lines.append(f"| `{s.name}` ({s.title}) | {columns.replace('|', chr(92) + '|')} | {s.gives} |")
    return "\n".join(lines)


def test_the_table_in_the_documentation_is_the_table_in_the_code() -> None:
    text = (Path(__file__).resolve().parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
    assert shape_table() in text
    for word in ("data.columns=", "data.shape="):
        assert word in text and word.removeprefix("data.").rstrip("=") in DataConfig.model_fields


def look(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["data", *words])
    return result.exit_code, result.output


def test_the_command_shows_what_a_method_would_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "orca")
    held = [FILES["orca"][3], {"system": "", "question": "Who?", "chosen": "x", "rejected": "y"}]
    (tmp_path / "held.jsonl").write_text("\n".join(map(json.dumps, held)))
    code, text = look("orca.jsonl", "--eval", "held.jsonl", "--rows", "1")
    assert (
        code == 0 and "question → prompt (system → first message)" in text and "system    → the first message" in text
    )
    assert "1 of 2 rows stand here, too (its row 0 is row 3 here)" in text and "data.eval_size=NUMBER" in text
    assert f"«{A[0]}»\n‹{B[0]}›" in text and "Lengths in words" in text
    code, text = look("orca.jsonl", "--for", "grpo", "--rows", "1")
    assert code == 0 and "Shown as prompts" in text and "«" not in text.split("— row 0")[1]
    write(tmp_path, "kto")
    code, text = look("kto.jsonl", "--model", "toy", "--rows", "2")
    assert code == 0 and "rows; tokens" in text and "<eos>»" in text and "<eos>›" in text


def test_the_command_names_row_column_and_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [*FILES["alpaca"], {"instruction": "x", "output": 7}, FILES["alpaca"][0]]
    (tmp_path / "bad.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, text = look("bad.jsonl", "--rows", "0")
    assert (
        code == 1
        and "1 row is wrong" in text
        and "row 8, output (completion) is int (7)" in text
        and "1 row is there before (row 9 is row 0)" in text
    )
    (tmp_path / "odd.jsonl").write_text(json.dumps({"query": "Why\u001b[2J?", "reply": "So."}))
    code, text = look("odd.jsonl", "--for", "sft")
    assert code == 1 and "data.columns={query: prompt, reply: completion}" in text and "rename_columns" not in text
    code, text = look("odd.jsonl", "data.columns={query: prompt, reply: completion}")
    assert code == 0 and "\u001b" not in text and "␛[2J" in text
    code, text = look("odd.jsonl", "data.colums={query: prompt}")
    assert code == 1 and "Did you mean 'data.columns'?" in text


@pytest.mark.parametrize("write", [str.title, str.upper])
@pytest.mark.parametrize(("name", "kind"), [("alpaca", "sft"), ("kto", "unpaired"), ("question_pairs", "preference")])
def test_columns_in_capitals_lose_nothing(name: str, kind: str, write: Any) -> None:
    """The advice renames every column of the shape, Alpaca's input included, and following it reads the row."""
    small = {c: v for c, v in FILES[name][0].items() if c != "text"}
    row = {write(c): v for c, v in small.items()}
    with pytest.raises(DataError, match="small letters") as refused:
        to_format(row, kind)
    names = yaml.safe_load("{" + str(refused.value).partition("data.columns={")[2].partition("}")[0] + "}")
    assert names.keys() == row.keys()
    assert to_format({names[c]: v for c, v in row.items()}, kind) == to_format(small, kind)


@pytest.mark.parametrize("label", ["easy", None, 0, 1.0, True])
def test_a_label_that_is_no_thumb_is_looked_at_like_any_column(label: Any) -> None:
    """A reward's own column may be called so."""
    assert text_parts({"prompt": "1+1?", "label": label})
    assert text_parts({"prompt": "1+1?", "completion": "2", "label": label})


def test_rated_answers_that_all_become_demonstrations_are_told() -> None:
    with pytest.warns(DataNote, match="Each response is learnt from, badly rated ones too"):
        list(in_kind([{"prompt": "x", "response": "y", "helpfulness": 0}], "sft"))
