"""Data on real input: HH-RLHF dialogues through formats, templates and sources, and what a kill between two rows leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from rlhf_nb.core import DataError
from rlhf_nb.data.formats import DataWarning, extract_prompt, parse_hh, to_format
from rlhf_nb.data.readers import open_rows, read_rows
from rlhf_nb.data.sources import (
    MemorySource,
    StreamSource,
    collate_completions,
    collate_preferences,
    collate_prompts,
    deduplicate,
    length_report,
    tokenize_preferences,
    tokenize_prompts,
    tokenize_sft,
)
from rlhf_nb.data.templates import encode_conversation, encode_pair, encode_prompt, train_bpe

ROOT = Path(__file__).resolve().parent.parent
HH = ROOT.parent / "shared" / "data" / "hh_rlhf_harmless.jsonl.gz"
needs_hh = pytest.mark.skipif(
    not HH.is_file(), reason="the HH-RLHF sample ../shared/data/hh_rlhf_harmless.jsonl.gz is not here"
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return read_rows(HH)


@pytest.fixture(scope="module")
def tok(rows: list[dict[str, Any]]) -> Any:
    return train_bpe((r["chosen"] for r in rows), vocab_size=2048)


@needs_hh
def test_dialogues_go_to_messages(rows: list[dict[str, Any]]) -> None:
    for text in (r[k] for r in rows for k in ("chosen", "rejected")):
        turns = parse_hh(text)
        assert turns[0]["role"] == "user" and turns[-1]["role"] == "assistant"
        marks = {"user": "Human", "assistant": "Assistant"}
        assert parse_hh("".join(f"\n\n{marks[m['role']]}: {m['content']}".rstrip() for m in turns)) == turns


@needs_hh
def test_prompts_are_shared_and_nothing_is_lost(rows: list[dict[str, Any]]) -> None:
    last_turn = 0
    for row in rows:
        prompt, chosen, rejected = extract_prompt(row["chosen"], row["rejected"])
        assert (prompt + chosen, prompt + rejected) == (row["chosen"], row["rejected"])
        assert str(prompt).endswith("\n\nAssistant:")
        normal = to_format(row)
        assert normal["prompt"] + normal["chosen"] == parse_hh(row["chosen"])
        assert normal["chosen"][0]["role"] == normal["rejected"][0]["role"] == "assistant"
        last_turn += len(normal["chosen"]) == len(normal["rejected"]) == 1
    assert last_turn >= 1299  # one pair parts earlier


@needs_hh
def test_pairs_become_a_batch(rows: list[dict[str, Any]], tok: Any) -> None:
    with pytest.warns(DataWarning, match=r"4 of 1300 rows are dropped: 4 with an empty completion"):
        pairs = tokenize_preferences(rows, tok)
    assert len(pairs) == 1296
    prompts = tokenize_prompts(rows, tok)
    by_prompt = {tuple(p["prompt_ids"]) for p in prompts}
    assert sum(tuple(p["prompt_ids"]) in by_prompt for p in pairs) == len(pairs)  # generation sees what training saw
    batch = collate_preferences(pairs[:16], tok.pad_token_id).check()
    for side, lens in ((batch.chosen_ids, batch.chosen_lens), (batch.rejected_ids, batch.rejected_lens)):
        assert (side.gather(1, lens[:, None] - 1) == tok.eos_token_id).all()
        assert ((side == tok.eos_token_id).sum(1) == 1).all()
    assert collate_prompts(prompts[:8], tok.pad_token_id).check().uid.unique().numel() == 8
    again = tokenize_preferences(rows[:40], tok, warn=False)
    assert again == tokenize_preferences(rows[:40], tok, warn=False)


@needs_hh
def test_masks_of_real_dialogues(rows: list[dict[str, Any]], tok: Any) -> None:
    for row in rows[:200]:
        turns = parse_hh(row["chosen"])
        if not all(m["content"] for m in turns):
            continue
        ids, mask = encode_conversation(tok, turns)
        answers = "".join(f" {m['content']}<|eos|>" for m in turns if m["role"] == "assistant")
        assert tok.decode([i for i, m in zip(ids, mask, strict=True) if m]) == answers
        assert tok.decode(ids) == tok.apply_chat_template(turns, tokenize=False)
        prompt, completion = encode_pair(tok, turns[:-1], turns[-1:])
        assert prompt + completion == ids and prompt == encode_prompt(tok, turns[:-1])


@needs_hh
def test_lengths_and_limits(rows: list[dict[str, Any]], tok: Any) -> None:
    report = length_report(tokenize_preferences(rows, tok, warn=False), max_length=1024)
    assert report.cut_fraction < 0.05 and report.total[50] > 100
    with pytest.warns(DataWarning) as told:
        cut = tokenize_preferences(rows[:100], tok, max_length=64)
    said = " ".join(str(w.message) for w in told)
    assert "1 of 100 rows are dropped" in said and "lose tokens (row 1, say: " in said and "); set max_length=" in said
    assert all(len(r["prompt_ids"]) + max(len(r["chosen_ids"]), len(r["rejected_ids"])) <= 64 for r in cut)
    assert all(r["chosen_ids"] and r["rejected_ids"] and r["prompt_ids"][0] == tok.bos_token_id for r in cut)


@needs_hh
def test_real_data_has_its_repetitions(rows: list[dict[str, Any]]) -> None:
    assert len(deduplicate(rows, warn=False)) <= len(rows)
    with pytest.warns(
        DataWarning,
        match="3 of 1303 rows occur more than once"
        if len(deduplicate(rows, warn=False)) == 1300
        else "occur more than once",
    ):
        deduplicate([*rows, *rows[:3]])


@needs_hh
@pytest.mark.parametrize("taken", [0, 1, 63, 64, 700, 1290, 1297, 2000])
def test_stream_goes_on_with_the_next_row(tok: Any, taken: int) -> None:
    def make(seed: int) -> StreamSource:
        transform = partial(tokenize_prompts, tok=tok, warn=False)
        return StreamSource(open_rows(HH), seed, buffer=256, transform=transform)

    source = make(1)
    source.next_batch(taken)
    state = json.loads(json.dumps(source.state_dict()))
    expected = [r["prompt_ids"] for r in source.next_batch(50)]
    again = make(2)
    again.load_state_dict(state)
    assert [r["prompt_ids"] for r in again.next_batch(50)] == expected


KILLED = """
import json, os, signal, sys
from rlhf_nb.data.sources import MemorySource, StreamSource
rows = [{"n": i, "text": "x" * (i % 7)} for i in range(101)]
from rlhf_nb.data.mix import MixSource
kinds = {"memory": MemorySource, "stream": StreamSource}
if sys.argv[1] in kinds:
    source = kinds[sys.argv[1]](rows, seed=7)
else:
    kind = kinds[sys.argv[1].removeprefix("mix of ")]
    source = MixSource([kind(rows[:70], seed=7), kind(rows[70:], seed=8)], [0.8, 0.2], ["a", "b"], seed=7)
if sys.argv[2] != "-":
    source.load_state_dict(json.load(open(sys.argv[2])))
out = open(sys.argv[3], "a")
for step in range(int(sys.argv[4])):
    out.write(json.dumps([r["n"] for r in source.next_batch(6)]) + "\\n"); out.flush()
    json.dump(source.state_dict(), open(sys.argv[3] + ".state.tmp", "w"))
    os.replace(sys.argv[3] + ".state.tmp", sys.argv[3] + ".state")
if sys.argv[5] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", ["memory", "stream", "mix of memory", "mix of stream"])
def test_killed_and_resumed_in_another_process(kind: str, tmp_path: Path) -> None:
    def go(state: str, out: Path, steps: int, end: str) -> int:
        env = {**os.environ, "PYTHONHASHSEED": "random", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", KILLED, kind, state, str(out), str(steps), end]
        run = subprocess.run if "mix" in kind and state != "-" else forked.run  # a fresh interpreter has other hashes
        return run(command, timeout=120, env=env).returncode

    assert go("-", tmp_path / "straight", 40, "") == 0
    assert go("-", tmp_path / "killed", 23, "kill") == -9
    assert go(str(tmp_path / "killed.state"), tmp_path / "killed", 17, "") == 0
    assert (tmp_path / "killed").read_text() == (tmp_path / "straight").read_text()


def test_pad_equal_to_eos_is_harmless() -> None:
    texts = ["Owls sleep by day.", "Otters hold hands while they sleep."]
    tok = train_bpe(texts, 300)
    careful = collate_completions(
        tokenize_sft([{"prompt": "Tell me.", "completion": f" {t}"} for t in texts], tok), tok.pad_token_id
    )
    tok.pad_token = tok.eos_token
    careless = collate_completions(
        tokenize_sft([{"prompt": "Tell me.", "completion": f" {t}"} for t in texts], tok), tok.pad_token_id
    )
    assert torch.equal(careful.completion_mask, careless.completion_mask)
    ends = careless.completion_lens - 1
    assert careless.completion_mask.gather(1, ends[:, None]).all()
    assert (careless.completion_ids.gather(1, ends[:, None]) == tok.eos_token_id).all()


@pytest.mark.parametrize(
    ("content", "rows", "words"),
    [
        ('{"prompt": "a", "completion": "b"}\n{"prompt": ', None, r"line 2: not valid JSON"),
        ("", None, "has no rows"),
        ('{"prompt": "a", "answer": "b"}\n', None, r"row 0: the columns are prompt, answer, but"),
        ('{"prompt": "a", "completion": "  "}\n', None, r"All 1 rows were dropped \(1 with an empty completion\)"),
        ('{"prompt": 3, "completion": "b"}\n', None, r"row 0, prompt is int"),
        ('{"messages": [{"role": "user"}]}\n', None, r"messages\[0\] has no 'content'"),
    ],
    ids=["broken json", "empty file", "missing column", "empty completion", "wrong type", "message without content"],
)
def test_bad_files_end_in_one_sentence(tmp_path: Path, content: str, rows: None, words: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    tok = train_bpe(["a b"], 259)
    with pytest.raises(DataError, match=words) as caught:
        tokenize_sft(read_rows(path), tok)
    assert "\n" not in str(caught.value)


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "pairs_train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"no file .*pair_train.jsonl.*The nearest there is: .*pairs_train.jsonl"):
        read_rows(tmp_path / "pair_train.jsonl")


def test_label_outside_0_1() -> None:
    with pytest.raises(DataError, match="label is 2; expected 0 or 1"):
        to_format({"prompt": "a", "completion": "b", "label": 2})


def test_good_data_is_silent() -> None:
    tok = train_bpe(["a b"], 259)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = tokenize_preferences([{"prompt": "a", "chosen": " b", "rejected": " c"}], tok, 100)
    assert MemorySource(done).next_batch(3) == done * 3


def test_bpe_beside_another_familys_model_survives_saving(tmp_path: Path) -> None:
    """transformers reads a tokenizer by the rules of the model beside it; ours must come back as it was saved."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlhf_nb.config import ModelConfig
    from rlhf_nb.data.templates import train_bpe
    from rlhf_nb.models.load import load_tokenizer, save_model

    text = "Hello there, don't you know 123 foxes?\n\n  Yes."
    tok = train_bpe([text] * 20, 300)
    config = Qwen2Config(
        vocab_size=len(tok),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
    )
    save_model(Qwen2ForCausalLM(config), tok, tmp_path / "model")
    again = load_tokenizer(ModelConfig(name_or_path=str(tmp_path / "model")))
    assert again(text)["input_ids"] == tok(text)["input_ids"] and len(again) == len(tok)


def test_a_streamed_run_trains_on_no_held_out_row_and_drops_what_teaches_nothing(tmp_path: Path) -> None:
    """Held-out rows are the first of the stream; neither they nor their repetitions are trained on, and one bad row ends nothing."""
    from rlhf_nb import SFTConfig, SFTTrainer

    words = "Ducks eat seeds and like what you".split()
    rows = [{"prompt": "Visitor: Hi Pip!\nPip:", "completion": f" {a} {b}."} for a in words for b in words][:40]
    rows[20]["completion"] = " "
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in [*rows, rows[3]]))
    data = {"path": str(path), "streaming": True, "eval_size": 8, "max_length": 64}
    config = SFTConfig(
        output_dir=tmp_path / "run", model={"name_or_path": "toy"}, data=data, steps=4, epochs=None, device="cpu",
        mini_batch_size=8, rollout_batch_size=8, console=False,
    )  # fmt: skip
    trainer = SFTTrainer(config)
    assert trainer.config.data.max_prompt_length is None and len(trainer.held_out) == 8
    held = {tuple(r["completion_ids"]) for r in trainer.held_out}
    with pytest.warns(UserWarning, match="1 of the first .* rows of the stream teach nothing"):
        given = {tuple(r["completion_ids"]) for _ in range(8) for r in trainer.source.next_batch(8)}
    assert len(given) == 31 and not given & held
    assert trainer.model is trainer.method.model
    assert trainer.state.global_step == 0 and trainer.state.log_history == []


def test_a_mistyped_file_of_this_folder_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="Did you mean the file 'rows.jsonl'"):
        read_rows("rows.jsnol")
