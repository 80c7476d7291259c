"""Twenty families of chat templates: one turn, three turns, tools, thoughts. Each row is taken, with the mask that a rendering by hand has, or refused in a sentence that cures it."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
from chat_families import FAMILIES, IM

from rlhf_nb.core import DataError
from rlhf_nb.data.formats import to_rows
from rlhf_nb.data.shapes import DataNote, Reading
from rlhf_nb.data.sources import tokenize_preferences, tokenize_prompts, tokenize_sft
from rlhf_nb.data.templates import set_chat_template, train_bpe

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "tide", "description": "of a day", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"type": "function", "function": {"name": "tide", "arguments": {"day": 3}}}
Q, A, THOUGHT = ["Ebb or flow?", "Why?", "Sure?"], ["Flow.", "The moon.", "Yes."], "Day 3."


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TALK = [m for q, a in zip(Q, A, strict=True) for m in (user(q), says(a))]
CALLED = [user(Q[0]), says("", tool_calls=[CALL]), {"role": "tool", "content": "low"}, says(A[0])]


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, bare: Any) -> dict[str, Any]:
    f = {"tokenizer": bare, **FAMILIES[request.param]}
    bare.add_special_tokens({"eos_token": f["eos"]})
    bare.chat_template = f["template"]
    return f


@pytest.fixture(scope="module")
def bare() -> Any:
    return train_bpe([*Q, *A], vocab_size=300)


def by_hand(f: dict[str, Any], talk: list[dict[str, Any]], tools: bool = False) -> list[tuple[str, str]]:
    """What stands before each answer of a dialogue, and the answer."""
    before, found = f["tools"].replace("TOOLS", json.dumps([TOOL])) if tools else f["start"], []
    for i, m in enumerate(talk):
        if m["role"] == "user":
            before += f["user"].replace("{}", m["content"])
        elif m["role"] == "tool":
            before += f["tool"].replace("{}", m["content"])
        elif m.get("tool_calls"):
            found.append((before + f["calls"][0], f["calls"][1]))
            before += f["called"]
        else:
            behind_tool = i > 0 and talk[i - 1]["role"] == "tool" and "after_tool" in f
            ask, now = (
                f["thinks"] if m.get("reasoning_content") else (f["after_tool"] if behind_tool else f["ask"], f["now"])
            )
            kept = f["past"] == f["ask"] + f["now"] or "mid" in f
            if kept and i < len(talk) - 1:
                now = now.removesuffix(f["eos"]) if m.get("reasoning_content") and "mid" in f else f.get("mid", now)
            found.append(
                (before + ask, now.replace("{t}", str(m.get("reasoning_content"))).replace("{}", m["content"]))
            )
            before += f["past"].replace("{}", m["content"])
    return found


def learnt(f: dict[str, Any], rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What stands before each stretch that counts in the loss, and the stretch."""
    found, tok = [], f["tokenizer"]
    for row in rows:
        ids, mask = row["prompt_ids"] + row["completion_ids"], [False] * len(row["prompt_ids"]) + row["completion_mask"]
        starts = [i for i, m in enumerate(mask) if m and not mask[i - 1]]
        for start in starts:
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            found.append((tok.decode(ids[:start]), tok.decode(ids[start:end])))
    return found


def sft(f: dict[str, Any], messages: list[dict[str, Any]], **more: Any) -> list[tuple[str, str]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNote)
        return learnt(f, tokenize_sft([{"messages": messages, **more}], f["tokenizer"], warn=False))


def test_there_are_twenty() -> None:
    assert len(FAMILIES) >= 20


@pytest.mark.parametrize("turns", [1, 3])
def test_turns(family: dict[str, Any], turns: int) -> None:
    talk = TALK[: 2 * turns]
    assert sft(family, talk) == by_hand(family, talk)
    told = {"prompt": talk[:1], "completion": talk[1:]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNote)
        assert learnt(family, tokenize_sft([told], family["tokenizer"], warn=False)) == by_hand(family, talk)
        (asked,) = tokenize_prompts([{"prompt": talk[:-1]}], family["tokenizer"], warn=False)
    given = family["tokenizer"].apply_chat_template(talk[:-1], tokenize=False, add_generation_prompt=True)
    assert family["tokenizer"].decode(asked["prompt_ids"]) == given, (
        "a prompt is what the template writes, however it treats earlier turns"
    )


@pytest.mark.parametrize("turns", [1, 3])
def test_pairs_weigh_the_last_turn(family: dict[str, Any], turns: int) -> None:
    """The dialogue is in the prompt, or it is in the answers, and differs there: only the last answer counts."""
    talk, tok = TALK[: 2 * turns], family["tokenizer"]
    other = [says("No.") if m["role"] == "assistant" else m for m in talk]
    rows = [
        {"prompt": talk[:-1], "chosen": talk[-1:], "rejected": other[-1:]},
        {"prompt": talk[:1], "chosen": talk[1:], "rejected": other[1:]},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNote)
        found = tokenize_preferences(rows, tok, warn=False)
    for row, theirs in zip(found, (talk[:-1] + other[-1:], other), strict=True):
        for side, whole in (("chosen", talk), ("rejected", theirs)):
            mask = row[f"{side}_mask"] or [True] * len(row[f"{side}_ids"])
            one = {"prompt_ids": row["prompt_ids"], "completion_ids": row[f"{side}_ids"], "completion_mask": mask}
            assert learnt(family, [one]) == by_hand(family, whole)[-1:]


def test_tools(family: dict[str, Any]) -> None:
    if family["calls"] is None:
        with pytest.raises(
            DataError,
            match=r"doesn't write tools: 'tide'.*data.columns={tools: null}|refuses a dialogue.*model.chat_template=chatml",
        ):
            sft(family, CALLED, tools=[TOOL])
        return
    assert sft(family, CALLED, tools=[TOOL]) == by_hand(family, CALLED, tools=True)


def test_chatml_takes_what_a_template_refuses(family: dict[str, Any]) -> None:
    """model.chat_template=chatml, which our messages advise: tools, calls and several turns, with the masks that ChatML has by hand."""
    tok, end = family["tokenizer"], family["eos"]
    set_chat_template(tok, "chatml")
    marks = {
        **IM,
        "eos": end,
        "now": "{}" + end,
        "past": "<|im_start|>assistant\n{}" + end + "\n",
        "user": "<|im_start|>user\n{}" + end + "\n",
    }
    call = f'<tool_call>\n{{"name": "tide", "arguments": {{"day": 3}}}}\n</tool_call>{end}'
    told = 'You may call functions. These are there:\n<tools>\nTOOL\n</tools>\nTo call one, write:\n<tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    marks |= {
        "calls": (IM["ask"], call),
        "called": IM["ask"] + call + "\n",
        "tool": "<|im_start|>user\n<tool_response>\n{}\n</tool_response>" + end + "\n",
    }
    marks["tools"] = f"<|im_start|>system\n{told.replace('TOOL', json.dumps(TOOL))}{end}\n"
    for talk, tools in ((TALK, False), (CALLED, True)):
        assert sft(family, talk, **({"tools": [TOOL]} if tools else {})) == by_hand(marks, talk, tools)


@pytest.mark.parametrize("written", ["json", "lines", "python"])
def test_hermes_calls_in_text_are_calls(family: dict[str, Any], written: str) -> None:
    """Tools, calls and results between Hermes' tags are learnt as the template writes them; as text where it knows no calls."""
    called = {"name": CALL["function"]["name"], "arguments": CALL["function"]["arguments"]}
    tools = {"json": json.dumps([TOOL]), "lines": f"\n{json.dumps(TOOL)}\n", "python": repr([TOOL])}[written]
    told = f"You may call what stands within <tools> </tools> tags: <tools>{tools}</tools>"
    call = f"<tool_call>\n{repr(called) if written == 'python' else json.dumps(called)}\n</tool_call>"
    system = {"role": "system", "content": told}
    talk = [
        system,
        user(Q[0]),
        says(call),
        {"role": "tool", "content": "<tool_response>\nlow\n</tool_response>"},
        says(A[0]),
    ]
    if family["calls"] is not None:
        assert sft(family, talk) == by_hand(family, CALLED, tools=True)
        broken = [{**m, "content": m["content"].replace("}", "")} for m in talk[1:3]]
        assert broken[1]["content"] in sft(family, broken)[0][1], "what can't be read stays"
    elif "tool_calls" not in family["template"]:
        assert call in sft(family, talk[1:3])[0][1]


@pytest.mark.parametrize("where", ["apart", "inside"])
def test_thoughts(family: dict[str, Any], where: str) -> None:
    """Thoughts in a key of their own, or between tags in the answer: learnt as the model would write them, or refused with two settings that work."""
    apart = [user(Q[0]), says(A[0], reasoning_content=THOUGHT), user(Q[1]), says(A[1], reasoning_content=THOUGHT)]
    tagged = f"<think>\n{THOUGHT}\n</think>\n\n"
    inside = [m if m["role"] == "user" else says(tagged + m["content"]) for m in apart]
    if family["thinks"] is not None and (family["eos"] != "<|return|>" or where == "apart"):
        close = [
            m if m["role"] == "user" else {**m, "content": m["content"].replace("</think>\n\n", "</think>")}
            for m in inside
        ]
        assert sft(family, apart if where == "apart" else close) == by_hand(family, apart)
        return
    plain = [m if m["role"] == "user" else says(m["content"]) for m in apart]
    if where == "apart":
        with pytest.raises(
            DataError, match=r"leaves out what messages\[1\] thinks.*data.thoughts=inline.*data.thoughts=drop"
        ):
            sft(family, apart)
        (drop,) = to_rows([{"messages": apart}], "sft", Reading(thoughts="drop"))
        assert sft(family, drop["messages"]) == by_hand(family, plain)
        (inline,) = to_rows([{"messages": apart}], "sft", Reading(thoughts="inline"))
        assert inline["messages"] == inside
    assert sft(family, inside) == by_hand(family, inside), "what stands in the words is learnt with them"
