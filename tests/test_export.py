"""Exports as a user makes them: each format, its price, and what isn't kept."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import call
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as models_
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf_nb.config import LoraSettings
from rlhf_nb.data import toy
from rlhf_nb.export import llama_cpp
from rlhf_nb.export.formats import EXPORT_RECORD, FORMATS
from rlhf_nb.export.price import PROBE_PROMPTS
from rlhf_nb.export.source import ExportSource
from rlhf_nb.models.adapters import add_lora
from rlhf_nb.models.load import load_model, merged_weights, save_model
from rlhf_nb.models.places import find_copy
from rlhf_nb.untrusted import json_value

ROOT = Path(__file__).resolve().parent.parent


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
        (["--to", "gguf-q8"], "Did you mean 'gguf-q8_0'?"),
        (["--to", "TorchScript"], "--to gguf-f16"),
        (["--to", "onnx-int8"], "optimum-cli export onnx"),
        (["--to", "tensorrt"], "TensorRT-LLM reads --to safetensors"),
        (["--to", "gguf"], "the tokenizer is WordLevel"),
        (["--to", "safetensors", "--on", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--to", "safetensors", "--dtype", "bf16", "--max-kl", "1e-12"], "Nothing was left"),
        (["--to", "safetensors", "--reward", "{file: nowhere.py, fn: f}"], "nowhere.py"),
    ],
    ids=["typo", "torchscript", "onnx", "tensorrt", "words", "no-file", "too-dear", "no-reward"],
)  # fmt: skip
def test_what_is_refused_leaves_nothing(models: Path, tmp_path: Path, words: list[str], said: str) -> None:
    out = call("export", models / "plain", *words, "-o", tmp_path / "x", "--answer-tokens", 2, code=1)
    assert said in " ".join(out.split()), out
    assert not (tmp_path / "x").exists()


def test_every_format_says_what_it_is() -> None:
    for name, form in FORMATS.items():
        assert form.about and 0 < form.bound <= 0.1 and form.bits > 0, name


needs_llama_cpp = pytest.mark.skipif(not llama_cpp.is_installed(), reason=f"needs llama.cpp: {llama_cpp.INSTALL}")


@pytest.fixture(scope="module")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose tokenizer is byte-level BPE, wide enough for blocks of 256."""
    core = Tokenizer(models_.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(PROBE_PROMPTS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<s>")
    config = LlamaConfig(
        vocab_size=320, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=0, eos_token_id=1, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bytes")
    save_model(LlamaForCausalLM(config).eval(), tokenizer, folder)
    return folder


def test_without_llama_cpp_a_gguf_file_is_unpacked_and_q4_k_m_is_refused(
    bytes_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "is_installed", lambda: False)
    said = call("export", bytes_model, "--to", "q8_0", "-o", tmp_path / "q8", "--answer-tokens", 2)
    price = json_value((tmp_path / "q8" / EXPORT_RECORD).read_bytes())["price"]
    assert (
        "unpacked weights (llama-cpp-python is not installed)" in said
        and price["tokens_per_second"] is None
        and 0 < price["kl"] < 0.02
    )
    assert sorted(p.name for p in (tmp_path / "q8").iterdir()) == ["README.md", EXPORT_RECORD, "model-q8_0.gguf"]
    assert "pip install llama-cpp-python" in call("export", bytes_model, "--to", "q4_k_m", "-o", tmp_path / "k", code=1)
    assert not (tmp_path / "k").exists()


@needs_llama_cpp
@pytest.mark.parametrize("kind", ["gguf-f16", "gguf-q8_0", "gguf-q4_k_m"])
def test_llama_cpp_opens_what_is_written(bytes_model: Path, tmp_path: Path, kind: str) -> None:
    call("export", bytes_model, "--to", kind, "-o", tmp_path / "x", "--answer-tokens", 4, "--force")
    price = json_value((tmp_path / "x" / EXPORT_RECORD).read_bytes())["price"]
    assert (
        price["measured_by"].startswith("llama.cpp")
        and price["kl"] < {"gguf-f16": 1e-4, "gguf-q8_0": 1e-2, "gguf-q4_k_m": 1.0}[kind]
    )


@pytest.mark.slow
@needs_llama_cpp
@pytest.mark.skipif(find_copy("smollm2") is None, reason="needs the model smollm2: rlhf-nb get smollm2")
def test_llama_cpp_answers_as_we_do(tmp_path: Path) -> None:
    """llama.cpp reads each prompt as we do, and answers from the f16 file as PyTorch does on its numbers; against the model only near ties differ."""
    told = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "export_price.py", "smollm2", "--out", tmp_path], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    ).stdout  # fmt: skip
    read = re.findall(
        r"gguf (\w+), cache in (\w+): the same prompt tokens (\d+) of 20, the same greedy answers (\d+) of 20", told
    )
    assert [(kind, cache, n) for kind, cache, n, _ in read] == [
        ("f16", "f32", "20"),
        ("f16", "f16", "20"),
        ("q8_0", "f16", "20"),
    ], told
    assert (
        "the same greedy answers" in told
        and "(20 of 20 as PyTorch on the file's own numbers)" in told.split("\ngguf f16, cache in f16")[0]
    ), told
    leads = [float(x) for x in re.findall(r"  f16, cache \w+: .* by ([\d.]+) nats", told)]
    assert len(leads) == 40 - int(read[0][3]) - int(read[1][3]) and max(leads, default=0) < 0.02 and len(leads) <= 6, (
        told
    )
