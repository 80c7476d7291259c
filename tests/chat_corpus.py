"""Dialogues that every family's template is tried on, and what the models' own templates make of them.

`python tests/chat_corpus.py FOLDER` renders the dialogues by the templates `FOLDER/NAME.jinja`, as their models ship them, into
`tests/data/chat_renderings.json`: for each dialogue and each of its answers the text that asks for it, and the text that ends in it; null where
the template refuses. Each text is [how many characters of the one before it begins with, the rest]. The day stands as DATE.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "data" / "chat_renderings.json"
NAMES = {
    "llama3": "<|begin_of_text|>",
    "llama3.1": "<|begin_of_text|>",
    "gemma": "<bos>",
    "gemma3": "<bos>",
    "mistral-nemo": "<s>",
}
NAMES |= {
    "deepseek-r1": "<｜begin▁of▁sentence｜>",
    "deepseek-v3.1": "<｜begin▁of▁sentence｜>",
}  # BOS of those that write it
EOS = {"phi3": "<|endoftext|>", "gpt-oss": "<|return|>", "mistral-nemo": "</s>"}
DAYS = {"type": "array", "items": {"type": "string"}, "description": "names of days"}
UNIT = {"type": "string", "enum": ["m", "ft"], "default": "m"}
PLACE = {"type": "object", "properties": {"lat": {"type": "number"}, "lon": {"type": "number"}}, "required": ["lat"]}
FIELDS = {"day": {"type": "integer", "description": "of the month"}, "days": DAYS, "unit": UNIT, "place": PLACE}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["day"]}
TIDE = {"type": "function", "function": {"name": "tide", "description": "The tide of a day.", "parameters": SCHEMA}}
PING = {
    "type": "function",
    "function": {"name": "ping", "description": "Is it there?", "parameters": {"type": "object", "properties": {}}},
}


def user(words: str) -> dict[str, Any]:
    return {"role": "user", "content": words}


def says(words: str, thoughts: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": words}
    out |= {} if thoughts is None else {"reasoning_content": thoughts, "thinking": thoughts}
    return out | ({"tool_calls": list(calls)} if calls else {})


def call(day: int) -> dict[str, Any]:
    arguments = {"day": day, "days": ["Mon", "Tue"], "unit": "m"}
    return {"id": f"call0000{day}", "type": "function", "function": {"name": "tide", "arguments": arguments}}


def tool(words: str, day: int) -> dict[str, Any]:
    return {"role": "tool", "name": "tide", "tool_call_id": f"call0000{day}", "content": words}


SYSTEM = {"role": "system", "content": "Be brief."}
DIALOGUES: dict[str, list[dict[str, Any]]] = {
    "1 turn": [user("Ebb or flow?"), says("Flow.")],
    "3 turns": [user("Ebb or flow?"), says("Flow."), user("Why?"), says("The moon."), user("Sure?"), says("Yes.")],
    "system": [SYSTEM, user("Ebb or flow?"), says("Flow."), user("Why?"), says("The moon.")],
    "thinking": [user("Ebb or flow?"), says("Flow.", "Day 3."), user("Why?"), says("The moon.", "Pull?")],
    "tools": [user("Tide?"), says("", None, call(3)), tool("low", 3), says("Low."), user("Sure?"), says("Yes.")],
    "two calls": [user("Tides?"), says("I look.", None, call(3), call(4)), tool("low", 3), tool("high", 4), says("Both.")],
    "tools, system, thinking": [SYSTEM, user("Tide?"), says("", "Ask.", call(3)), tool("low", 3), says("Low.", "So."), user("Sure?"), says("Yes.", "Hm.")],
}  # fmt: skip
TOOLS = {name: [TIDE, PING] if name.startswith("tools") else None for name in DIALOGUES}


def read() -> dict[str, dict[str, list[str] | None]]:
    """What the models' own templates write: {template: {dialogue: texts}}."""
    out: dict[str, dict[str, list[str] | None]] = {}
    for name, found in json.loads(FILE.read_text(encoding="utf-8")).items():
        out[name] = {}
        for dialogue, parts in found.items():
            texts: list[str] = []
            for n, rest in parts or ():
                texts.append((texts[-1][:n] if texts else "") + rest)
            out[name][dialogue] = None if parts is None else texts
    return out


def renderings(template: str, name: str, dialogue: str) -> list[str] | None:
    """The texts of a dialogue by a template, in the environment of transformers: what asks for each answer, what ends in it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages, texts = DIALOGUES[dialogue], list[str]()
    tokens = {"bos_token": NAMES.get(name, ""), "eos_token": EOS.get(name, "")}
    for i, m in enumerate(messages):
        for part, ask in ((messages[:i], True), (messages[: i + 1], False)) if m["role"] == "assistant" else ():
            for arguments in (dict, json.dumps):  # some join a call's arguments as text
                told = json.loads(json.dumps(part))
                for c in [c for t in told for c in t.get("tool_calls", ())]:
                    c["function"]["arguments"] = arguments(c["function"]["arguments"])
                try:
                    (text,), _ = render_jinja_template(
                        [told], TOOLS[dialogue], chat_template=template, add_generation_prompt=ask, **tokens
                    )
                    break
                except Exception:
                    if arguments is json.dumps:
                        return None
            texts.append(text.replace(datetime.date.today().isoformat(), "DATE"))
    return texts


if __name__ == "__main__":
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    for path in Path(sys.argv[1]).glob("*.jinja"):
        found[path.stem] = {}
        template = path.read_text(encoding="utf-8")
        for dialogue in DIALOGUES:
            texts = renderings(template, path.stem, dialogue)
            before = ["", *(texts or [])]
            parts = [[len(os.path.commonprefix([a, b])), b] for a, b in zip(before, texts or ())]
            found[path.stem][dialogue] = None if texts is None else [[n, b[n:]] for n, b in parts]
    FILE.write_text(json.dumps(dict(sorted(found.items())), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
