"""Exports as a user makes them: how far they are from the model, and what isn't kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import call

from rlhf_nb.config import LoraSettings
from rlhf_nb.data import toy
from rlhf_nb.export import formats
from rlhf_nb.export.formats import EXPORT_RECORD, ExportSource, rounding_kl
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
    said = call("export", models / "adapter", "--to", "safetensors", "-o", tmp_path / "out")
    assert "the adapter merged" in said and "KL from the model" in said
    record = json_value((tmp_path / "out" / EXPORT_RECORD).read_bytes())
    assert record["kl"] < 1e-9 and record["kl"] <= record["kl_worst"] < 1e-6
    tuned = load_model(tmp_path / "out")[0].state_dict()
    wanted = merged_weights(ExportSource(str(models / "adapter")).model)
    assert all((tuned[k] - wanted[k]).abs().max() < 1e-6 for k in wanted)
    assert call("export", models / "adapter", "-o", tmp_path / "out", code=1).count("--overwrite") == 1


def test_rounding_is_told_and_is_what_the_files_hold(models: Path, tmp_path: Path) -> None:
    call("export", models / "plain", "--dtype", "bf16", "-o", tmp_path / "half")
    kl = json_value((tmp_path / "half" / EXPORT_RECORD).read_bytes())["kl"]
    full, half = load_model(models / "plain")[0], load_model(tmp_path / "half")[0]  # in fp32
    assert all(torch.equal(w.bfloat16().float(), half.state_dict()[k]) for k, w in full.state_dict().items())
    assert 0 < kl == pytest.approx(float(rounding_kl(full.eval(), half.eval()).mean()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "safetensor"], "Did you mean 'safetensors'?"),
        (["--to", "TorchScript"], "llama.cpp's converter"),
        (["--to", "onnx-int8"], "optimum-cli export onnx"),
        (["--to", "tensorrt"], "TensorRT-LLM reads --to safetensors"),
        (["--to", "gguf-q8_0"], "convert_hf_to_gguf.py FOLDER --outtype q8_0"),
        (["--dtype", "bf16"], "Nothing was left"),
        (["--max-kl", "1"], "rlhf-nb compare MODEL COPY --suite"),
    ],
    ids=["typo", "torchscript", "onnx", "tensorrt", "gguf", "too-dear", "an-earlier-option"],
)  # fmt: skip
def test_what_is_refused_leaves_nothing(
    models: Path, tmp_path: Path, words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "EXPORT_BOUND", 1e-12)
    out = call("export", models / "plain", *words, "-o", tmp_path / "x", code=2 if "--max-kl" in words else 1)
    assert said in " ".join(out.split()), out
    assert not (tmp_path / "x").exists()
