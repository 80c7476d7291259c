"""Exports as a user makes them: the price, and what isn't kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import call

from rlhf_nb.config import LoraSettings
from rlhf_nb.data import toy
from rlhf_nb.export.formats import EXPORT_RECORD
from rlhf_nb.export.source import ExportSource
from rlhf_nb.models.adapters import add_lora
from rlhf_nb.models.load import load_model, merged_weights, save_model
from rlhf_nb.untrusted import json_value


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy model, and an adapter of it that changes its answers."""
    folder = tmp_path_factory.mktemp("models")
    save_model(toy.build_model(0, "tiny"), toy.build_tokenizer(), folder / "plain")
    tuned = add_lora(load_model(folder / "plain")[0], LoraSettings(r=2))
    for p in tuned.parameters():
        p.data.add_(0.2 * p.requires_grad)
    save_model(tuned, toy.build_tokenizer(), folder / "adapter")
    return folder


def test_an_adapter_is_exported_merged(models: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    first, second = (row["prompt"] for row in toy.test_prompts(2))
    rows.write_text(
        "\n".join(json.dumps(r) for r in ({"prompt": first, "completion": " It has four legs."}, {"prompt": second}))
    )
    said = call(
        "export",
        models / "adapter",
        "--to",
        "safetensors",
        "-o",
        tmp_path / "out",
        "--on",
        rows,
        "--answer-tokens",
        3,
        "--reward",
        "gold",
    )
    assert "the adapter merged" in said and "gold: " in said and "rows.jsonl" in said
    price = json_value((tmp_path / "out" / EXPORT_RECORD).read_bytes())["price"]
    assert price["kl"] < 1e-9 and price["prompts"] == 2 and price["rewards"]["gold"]["lost"] == 0
    tuned = load_model(tmp_path / "out")[0].state_dict()
    wanted = merged_weights(ExportSource(str(models / "adapter")).model)
    assert all((tuned[k] - wanted[k]).abs().max() < 1e-6 for k in wanted)
    assert (
        call("export", models / "adapter", "--to", "safetensors", "-o", tmp_path / "out", code=1).count("--overwrite")
        == 1
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "safetensor"], "Did you mean 'safetensors'?"),
        (["--to", "TorchScript"], "llama.cpp's converter"),
        (["--to", "onnx-int8"], "optimum-cli export onnx"),
        (["--to", "tensorrt"], "TensorRT-LLM reads --to safetensors"),
        (["--to", "gguf-q8_0"], "convert_hf_to_gguf.py FOLDER --outtype q8_0"),
        (["--on", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--dtype", "bf16", "--max-kl", "1e-12"], "Nothing was left"),
        (["--reward", "{file: nowhere.py, fn: f}"], "nowhere.py"),
    ],
    ids=["typo", "torchscript", "onnx", "tensorrt", "gguf", "no-file", "too-dear", "no-reward"],
)  # fmt: skip
def test_what_is_refused_leaves_nothing(models: Path, tmp_path: Path, words: list[str], said: str) -> None:
    out = call("export", models / "plain", *words, "-o", tmp_path / "x", "--answer-tokens", 2, code=1)
    assert said in " ".join(out.split()), out
    assert not (tmp_path / "x").exists()
