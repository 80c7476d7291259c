"""The templates that come along: a question and its answer as the model's own template writes them, whole dialogues too where that one keeps what it
wrote; nothing is rewritten once the dialogue goes on; marks around what the model writes, and nothing else, which is what our masks say as well."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from chat_corpus import DIALOGUES, EOS, NAMES, TOOLS, read, renderings
from chat_families import FAMILIES
from safetensors.torch import save_file
from test_chat_families import TALK, learnt
from transformers.utils.chat_template_utils import render_jinja_template
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.config import ModelConfig
from rlhf_nb.core import ConfigError, DataError
from rlhf_nb.data.shapes import DataNote
from rlhf_nb.data.sources import tokenize_sft
from rlhf_nb.data.templates import (
    Reply,
    dialogue_pieces,
    encode_replies,
    family_templates,
    set_chat_template,
    template_names,
    template_of,
    train_bpe,
)
from rlhf_nb.models.load import load_tokenizer
from rlhf_nb.pipeline.doctor import load_start

OWN = read()
ARGUMENTS = '{"day": 3, "days": ["Mon", "Tue"], "unit": "m"}'
XML = '<tool_call>\n<function=tide>\n<parameter=day>\n3\n</parameter>\n<parameter=days>\n["Mon", "Tue"]\n</parameter>\n<parameter=unit>\nm\n</parameter>\n</function>\n</tool_call>'
JSON = f'<tool_call>\n{{"name": "tide", "arguments": {ARGUMENTS}}}\n</tool_call>'
IM, DS, DS_CALL = "<|im_end|>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
# by hand: an answer, one with thoughts, a call of a tool (None: the family leaves it out or refuses it)
HAND: dict[str, tuple[str, str | None, str | None]] = {
    "chatml": ("{}</s>", None, f"{JSON}</s>"),
    "smollm2": ("{}" + IM, None, None),
    "qwen2.5": ("{}" + IM, None, JSON + IM),
    "qwen3": ("<think>\n\n</think>\n\n{}" + IM, "<think>\n{t}\n</think>\n\n{}" + IM, f"<think>\n\n</think>\n\n{JSON}{IM}"),
    "qwen3.5": ("\n</think>\n\n{}" + IM, "{t}\n</think>\n\n{}" + IM, f"\n</think>\n\n{XML}{IM}"),
    "qwen3.5-nothink": ("{}" + IM, "{t}\n</think>\n\n{}" + IM, XML + IM),
    "nemotron3": ("{}" + IM, "{t}\n</think>\n{}" + IM, f"\n{XML}\n{IM}"),
    "glm4.5": ("\n<think></think>\n{}", "\n<think>{t}</think>\n{}", '\n<think></think>\n<tool_call>tide\n<arg_key>day</arg_key>\n<arg_value>3</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>["Mon", "Tue"]</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>m</arg_value>\n</tool_call>'),
    "gpt-oss": ("<|channel|>final<|message|>{}", "<|channel|>analysis<|message|>{t}<|end|><|start|>assistant<|channel|>final<|message|>{}",
        f" to=functions.tide<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"),
    "deepseek-r1": ("{}" + DS, "{t}\n</think>\n\n{}" + DS, f"{DS_CALL}function<｜tool▁sep｜>tide\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>{DS}"),
    "deepseek-v3.1": ("{}" + DS, "{t}\n</think>\n\n{}" + DS, f"{DS_CALL}tide<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>{DS}"),
    "llama3": ("{}<|eot_id|>", None, None),
    "llama3.1": ("{}<|eot_id|>", None, f'{{"name": "tide", "parameters": {ARGUMENTS}}}<|eot_id|>'),
    "gemma": ("{}<end_of_turn>", None, None),
    "gemma3": ("{}<end_of_turn>", None, None),
    "phi3": ("{}<|end|>\n", None, None),
    "phi4": ("{}<|im_end|>", None, None),
    "mistral-nemo": ("{}</s>", None, f'[TOOL_CALLS][{{"name": "tide", "arguments": {ARGUMENTS}, "id": "call00003"}}]</s>'),
}  # fmt: skip
THINKS = [name for name, (_, thinks, _) in HAND.items() if thinks]


def bare(name: str, by_name: bool = True) -> Any:
    """A tokenizer with the special tokens that a family's template writes."""
    tok = train_bpe(["Ebb or flow?", "Day 3."], vocab_size=300)
    ends = {**EOS, "chatml": "</s>", "glm4.5": "<|endoftext|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>"}
    eos = ends.get(name) or next(e for e in (IM, DS, "<|eot_id|>") if e in HAND[name][0])
    tok.add_special_tokens({"eos_token": eos, "bos_token": NAMES.get(name, "<|bos|>")})
    return set_chat_template(tok, name) if by_name else tok


def by_hand(name: str, messages: list[dict[str, Any]]) -> list[str]:
    """What the model writes in a dialogue."""
    plain, thinks, called = HAND[name]
    out = []
    for m in messages:
        if m["role"] == "assistant":
            form = called if "tool_calls" in m else thinks if m.get("reasoning_content") and thinks else plain
            out.append(str(form).replace("{t}", str(m.get("reasoning_content"))).replace("{}", m["content"]))
    return out


def keeps(texts: list[str], eos: str) -> bool:
    """Whether no answer is rewritten by what follows, an EOS at its end aside."""
    ends = [t.removesuffix(eos) for t in texts[1::2]]
    return all(b.startswith(a) for a, *later in zip(ends, texts[2::2], texts[3::2]) for b in later)


def test_each_has_its_own_renderings_and_a_mask_by_hand() -> None:
    assert sorted(HAND) == template_names() and sorted([*OWN, "chatml"]) == template_names()


@pytest.mark.parametrize("name", OWN)
def test_as_the_model_itself_renders(name: str) -> None:
    """All of it where the model's own template keeps what it wrote; what follows the last question or result elsewhere. Mistral's asks with
    instructions, and leaves them out once there is an answer."""
    template, eos, whole = template_of(name), EOS.get(name, ""), 0
    for dialogue, own in OWN[name].items():
        ours = renderings(template, name, dialogue)
        assert (ours is None) == (own is None), dialogue
        if own is None or ours is None or (name.startswith("deepseek") and "thinking" in dialogue):
            continue  # refused by both; or thoughts, which DeepSeek's template never writes
        words = [m["content"] for m in DIALOGUES[dialogue]]
        said = [words[i - 1] for i, m in enumerate(DIALOGUES[dialogue]) if m["role"] == "assistant"]
        history = keeps(own, eos) and (name != "mistral-nemo" or dialogue not in ("system", "tools, system, thinking"))
        whole += history
        for i, (a, b) in enumerate(zip(ours, own)):
            a, b = a.removesuffix(eos), b.removesuffix(eos)
            assert a == b if history or i == 0 else a.rpartition(said[i // 2])[2] == b.rpartition(said[i // 2])[2], (
                dialogue
            )
    assert whole >= (1 if name in THINKS or name == "mistral-nemo" else 3)


@pytest.mark.parametrize("name", HAND)
def test_nothing_is_rewritten(name: str) -> None:
    for dialogue in DIALOGUES:
        texts = renderings(template_of(name), name, dialogue)
        assert keeps(texts or [], "")
        assert texts is not None or name in ("gemma", "gemma3", "llama3.1")


@pytest.mark.parametrize("name", HAND)
def test_marks_and_masks_by_hand(name: str) -> None:
    """Marks as other programs read them, our renderings without marks, and the tokens that count: one row, what the model writes."""
    tok, (_, thinks, called) = bare(name), HAND[name]
    tokens = {"bos_token": tok.bos_token, "eos_token": tok.eos_token}
    for dialogue in ("1 turn", "3 turns", *(["thinking"] if thinks else []), *(["tools"] if called else [])):
        messages, tools = DIALOGUES[dialogue], TOOLS[dialogue] if "deepseek" not in name else None
        expected = by_hand(name, messages)
        (text,), (marks,) = render_jinja_template(
            [messages], tools, chat_template=tok.chat_template, return_assistant_tokens_mask=True, **tokens
        )
        assert [text[a:b] for a, b in marks] == expected
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DataNote)
            (pieces,) = dialogue_pieces(tok, [messages], tools=[tools])[0]
            found = tokenize_sft([{"messages": messages, **({"tools": tools} if tools else {})}], tok, warn=False)
        assert len(found) == 1 and [p.text for p in pieces if p.answer] == expected
        last = [*expected[:-1], expected[-1].removesuffix(tok.eos_token) + tok.eos_token]
        assert [words for _, words in learnt({"tokenizer": tok}, found)] == last


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "phi3"])
def test_a_split_dialogue_names_the_template_that_keeps_it(name: str) -> None:
    """What the note advises makes one row of each dialogue, and asks for an answer as before."""
    tok = bare(name, by_name=False)
    tok.chat_template = FAMILIES[name]["template"]
    with pytest.warns(DataNote, match=f"1 of 2 dialogues became 3 rows.*model.chat_template={name} keeps all turns"):
        split = tokenize_sft([{"messages": TALK}, {"messages": TALK[:2]}], tok)
    assert family_templates(tok) == [name] and len(split) == 4
    set_chat_template(tok, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept = tokenize_sft([{"messages": TALK}, {"messages": TALK[:2]}], tok)
    assert len(kept) == 2 and kept[0]["prompt_ids"] == split[0]["prompt_ids"]
    assert sum(map(len, (r["completion_ids"] for r in kept))) < sum(
        len(r["prompt_ids"] + r["completion_ids"]) for r in split
    )
    assert family_templates(tok) == []


def test_a_look_shows_every_row_of_a_split_dialogue(tmp_path: Path) -> None:
    tok = bare("qwen3", by_name=False)
    tok.chat_template = FAMILIES["qwen3"]["template"]
    tok.save_pretrained(tmp_path / "model")
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps({"messages": TALK}) for _ in range(2)))
    look = ["data", str(tmp_path / "talks.jsonl"), "--rows", "1", "--model", str(tmp_path / "model")]
    said = CliRunner().invoke(app, look).output
    assert "2 dialogues are a row for each answer. model.chat_template=qwen3 keeps a dialogue whole." in said
    assert said.count("«") - 1 == 3  # one in the legend
    said = CliRunner().invoke(app, [*look, "model.chat_template=qwen3"]).output
    assert "a row for each answer" not in said and said.count("«") - 1 == 3


def test_an_answer_that_is_replied_to_names_the_template_that_keeps_it() -> None:
    tok = bare("qwen3", by_name=False)
    tok.chat_template = FAMILIES["qwen3"]["template"]
    reply = Reply(
        {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nLow."},
        tok.eos_token_id,
        [{"role": "user", "content": "Why?"}],
    )
    with pytest.raises(DataError, match="rewrites an answer once it is replied to.*model.chat_template=qwen3\\."):
        encode_replies(tok, [reply])
    (ids,) = encode_replies(set_chat_template(tok, "qwen3"), [reply])
    assert tok.decode(ids) == "\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


def test_tools_that_are_not_written_name_a_template_that_writes_them() -> None:
    """A family's template is named only where it cures: SmolLM2's knows no tools."""
    tok = bare("smollm2", by_name=False)
    tok.chat_template = template_of("smollm2") + "{# the model's own #}"
    assert family_templates(tok) == ["smollm2"]
    with pytest.raises(DataError, match="doesn't write tools: 'tide'.*model.chat_template=chatml does"):
        dialogue_pieces(tok, [DIALOGUES["tools"]], tools=[TOOLS["tools"]])


@pytest.mark.parametrize("name", ["chatml", "qwen3.5"])
def test_by_name(name: str, tmp_path: Path) -> None:
    bare("qwen3", by_name=False).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({}, tmp_path / "model.safetensors")
    config = ModelConfig(name_or_path=str(tmp_path), chat_template=name)
    assert load_tokenizer(config).chat_template == template_of(name) == load_start(config).tokenizer.chat_template


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    """A template of no braces would write its own name for every dialogue."""
    bare("qwen3", by_name=False).save_pretrained(tmp_path)
    for told, says in (("qwen33", "Did you mean 'qwen3'"), ("missing/file.txt", "Those are chatml, deepseek-r1")):
        with pytest.raises(ConfigError, match=f"model.chat_template is '{told}': no file.*{says}"):
            load_tokenizer(ModelConfig(name_or_path=str(tmp_path), chat_template=told))
    assert template_of("{{ messages }}") == "{{ messages }}"
