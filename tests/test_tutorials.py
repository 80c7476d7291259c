"""The switch at the top of every tutorial: a model and preferences in local folders laid out as on the hub, with LoRA and Hydra."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from rlhf_nb.data import toy
from rlhf_nb.data.templates import train_bpe
from rlhf_nb.models.load import save_model

FOLDER = Path(__file__).resolve().parent.parent / "nbs" / "tutorials"
TUTORIALS = sorted(p for p in FOLDER.glob("*.ipynb") if p.stem != "formulas_with_knobs")  # which trains nothing


READS_LETTERS = ("gsm8k_with_a_verifier", "ai_feedback", "a_policy_learns_to_use_a_calculator")  # digits, a wide window


def sums(n: int) -> list[dict[str, Any]]:
    """Rows with GSM8K's columns."""
    rng, rows = random.Random(0), []
    for _ in range(n):
        a, b = rng.randint(1, 40), rng.randint(1, 40)
        question = f"Tom has {a} apples and buys {b} more. How many has he?"
        rows.append({"question": question, "answer": f"{a} + {b} = <<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"})
    return rows


def save_reader(folder: Path, texts: list[str]) -> None:
    """An untrained model that reads any text, with a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tok = train_bpe(texts, 400)
    ids = {k: getattr(tok, k) for k in ("pad_token_id", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    save_model(
        LlamaForCausalLM(LlamaConfig(vocab_size=len(tok), max_position_embeddings=4096, **shape, **ids)), tok, folder
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_switch(path: Path, tmp_path: Path) -> None:
    model, data = tmp_path / "org--tiny-model", tmp_path / "org--rows"
    data.mkdir()
    rows = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in toy.preference_rows(600, 0)]
    rows = sums(200) if path.stem.startswith("gsm8k") else rows
    (data / "train.jsonl").write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")
    if path.stem in READS_LETTERS:
        save_reader(model, [str(v) for r in rows for v in r.values()])
    else:
        save_model(toy.build_model(0), toy.build_tokenizer(), model)
    nb = nbformat.read(path, 4)
    switches = [c for c in nb.cells if c.cell_type == "code" and c.source.startswith("MODEL = ")]
    assert len(switches) == 1, "one switch at the top"
    switches[0].source = f"MODEL, DATA, LORA = {str(model)!r}, {str(data)!r}, True"
    for cell in nb.cells:
        if cell.cell_type == "code":  # the tutorials' sizes are for a T4; the path is what is tested here
            cell.source = (
                cell.source.replace("range(10)", "range(2)")
                .replace('"steps": 40', '"steps": 3')
                .replace("steps=150", "steps=30")
                .replace("rows[:128], rows[128:]", "rows[:8], rows[8:]")
                .replace('"max_new_tokens": 256', '"max_new_tokens": 24')
                .replace("prompts=256", "prompts=32")
            )
    NotebookClient(nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "".join(o.get("text", "") for c in nb.cells if c.cell_type == "code" for o in c.outputs)
    meant = path.stem == "multi_gpu_from_a_cell"  # it shows the traceback of a rank that fails
    assert shown.count("Traceback") == meant and len(shown) > 100
