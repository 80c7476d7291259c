"""Merging as a user does it: memory, adapters, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command import call
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhf_nb.config import LoraSettings
from rlhf_nb.core import ModelError
from rlhf_nb.data import toy
from rlhf_nb.hub.card import read_run
from rlhf_nb.hub.push import push_to_hub
from rlhf_nb.models.adapters import add_lora
from rlhf_nb.models.load import load_model, merged_weights, save_model
from rlhf_nb.models.merge import merge_models, merged_tensor
from rlhf_nb.models.recipe import METHODS, NEEDS_BASE, MergePart, Recipe
from rlhf_nb.models.shards import ModelTensors, plan_shards
from rlhf_nb.untrusted import parse_yaml

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and three models that were moved from it a little; `good` answers as a copy of its prompt would."""
    folder, tokenizer = tmp_path_factory.mktemp("family"), toy.build_tokenizer()
    for i in range(4):
        model = toy.build_model(0, "tiny")
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * (i > 0))
        save_model(model, tokenizer, folder / f"m{i}")
    return folder


PROBE = """
import json, sys
from rlhf_nb.models.merge import merge_models
from rlhf_nb.models.recipe import METHODS, NEEDS_BASE, MergePart, Recipe
folder = sys.argv[1]

def memory(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) * 1024

def merge(method, source, shard):
    more = {"base": f"{source}/a"} if method in NEEDS_BASE else {}
    parts = [MergePart(model=f"{source}/{n}") for n in (("a", "b") if method == "slerp" else ("b", "c"))]
    merge_models(Recipe(method=method, models=parts, **more), f"{folder}/out-{method}", shard_bytes=shard)

found = {}
for method in METHODS:
    merge(method, f"{folder}/small", 10**6)  # imports and caches are not the merge
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins again here
    before = memory("VmRSS")
    merge(method, f"{folder}/large", 16 << 20)
    found[method] = memory("VmHWM") - before
print(json.dumps(found))
"""


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="only Linux resets the peak of a process's memory"
)
@pytest.mark.slow  # 12 CPU seconds
def test_memory_is_less_than_a_shard(tmp_path: Path) -> None:
    """Models of 47 MB in shards of 16 MB, tensors of 2 MB: the peak is at most 1.2 times the largest shard, for every method."""
    from transformers import LlamaConfig

    for size, width in (("small", 8), ("large", 700)):
        config = LlamaConfig(
            vocab_size=64, hidden_size=width, intermediate_size=width, num_hidden_layers=6, num_attention_heads=2, tie_word_embeddings=True
        )  # fmt: skip
        names = {f"model.layers.{i}.mlp.{p}.weight": (width, width) for i in range(6) for p in "uvwx"}
        shards = plan_shards({n: (torch.float32, s) for n, s in names.items()}, 16 << 20)
        for seed, name in enumerate("abc"):
            folder = tmp_path / size / name
            folder.mkdir(parents=True)
            config.save_pretrained(folder)
            for j, part in enumerate(shards):
                g = torch.Generator().manual_seed(10 * seed + j)
                save_file({n: torch.randn(names[n], generator=g) for n in part}, folder / f"model-{j}.safetensors")
            where = {n: f"model-{j}.safetensors" for j, part in enumerate(shards) for n in part}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path)], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    shard = max(f.stat().st_size for f in (tmp_path / "large" / "a").glob("*.safetensors"))
    peaks = json.loads(done.stdout.splitlines()[-1])
    print({m: f"{p / 1e6:.0f} MB" for m, p in peaks.items()}, f"the largest shard has {shard / 1e6:.0f} MB")
    assert set(peaks) == set(METHODS) and 2e6 < min(peaks.values()) and max(peaks.values()) <= 1.2 * shard
    for method in METHODS:
        written = sorted((tmp_path / f"out-{method}").glob("*.safetensors"))
        assert len(written) == 3 and sum(len(load_file(f)) for f in written) == 24
        index = json.loads((tmp_path / f"out-{method}" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 24 * 700 * 700 * 4


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_is_what_the_formula_says(method: str, family: Path, tmp_path: Path) -> None:
    parts = [MergePart(model=str(family / f"m{i}")) for i in (1, 2)]
    base = {"base": str(family / "m0")} if method in NEEDS_BASE else {}
    recipe = Recipe(method=method, models=parts, **base)  # type: ignore[arg-type]
    merge_models(recipe, tmp_path / "out", shard_bytes=50_000)
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    states = [load_model(family / f"m{i}")[0].state_dict() for i in range(3)]
    for name in ModelTensors(tmp_path / "out"):
        torch.testing.assert_close(got[name], merged_tensor(recipe, name, states[1:], states[0]), rtol=0, atol=1e-7)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1


def test_tokenizer_generation_config_and_card_come_along(family: Path, tmp_path: Path) -> None:
    said = call("merge", family / "m1", family / "m2", "-o", tmp_path / "out", "--dtype", "bf16")
    assert "bfloat16" in said
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), load_model(tmp_path / "out")[1]
    assert model.dtype == torch.bfloat16 and tokenizer.get_vocab() == toy.build_tokenizer().get_vocab()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "Merged by linear from 2 models" in card and "SHA-256" in card and str(tmp_path) not in card
    pushed = Path(push_to_hub(tmp_path / "out", "me/soup", dry_run=tmp_path / "push"))
    assert parse_yaml((pushed / "README.md").read_text().split("---\n")[1])["tags"] == ["rlhf-nb", "merge"]
    assert "base_model" not in (pushed / "README.md").read_text()  # a folder's name is no name on the hub
    assert (pushed / "merge.yaml").exists() and str(tmp_path) not in (pushed / "merge.yaml").read_text()
    assert read_run(tmp_path / "out").merged["recipe"]["method"] == "linear"


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["norm"]},
    ],
    ids=["plain", "rslora", "dora", "a-whole-layer"],
)
def test_adapters_are_merged_as_peft_does(lora: dict[str, Any], family: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(family / "m0")
    model = add_lora(model, LoraSettings(r=3, alpha=5, **lora))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * p.requires_grad)
    save_model(model, tokenizer, tmp_path / "adapter")
    wanted = merged_weights(model, "default")
    call("merge", tmp_path / "adapter", family / "m0", "--weights", "0.25,0.75", "-o", tmp_path / "out")
    start = load_model(family / "m0")[0].state_dict()
    for name, got in ModelTensors(tmp_path / "out").items():
        torch.testing.assert_close(got, 0.25 * wanted[name] + 0.75 * start[name], rtol=0, atol=1e-6)


def test_an_adapter_on_a_shared_end_is_refused(family: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model, _ = load_model(family / "m0")
    get_peft_model(model, LoraConfig(r=2, target_modules=["embed_tokens"])).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(family / "m0")}))
    with pytest.raises(ModelError, match="both ends of the model share"):
        ModelTensors(tmp_path / "adapter")


def test_the_answer_to_a_typo(family: Path, tmp_path: Path) -> None:
    m1, m2, out = family / "m1", family / "m2", tmp_path / "out"
    for words, wanted in [
        ((m1, m2, "--method", "ties"), "mergekit-yaml FILE FOLDER"),
        ((m1, m2, "--method", "wrap"), "Did you mean 'warp'?"),
        ((m1, family / "m22"), "Did you mean"),
        ((m1, "smollm"), "Did you mean 'smollm2'?"),
        ((m1, m2, "--weights", "0.5,x"), "--weights is '0.5,x'"),
        ((m1, m2, "--t", "0.3"), "--t means nothing to linear"),
        ((m1, m2, "--method", "slerp", "--t", "3"), "≤ 1"),
        (("kit.yaml",), "mergekit-yaml FILE FOLDER"),
        ((m1, m2, "--shard-size", "big"), "--shard-size is 'big'"),
        ((m1, m2, "--dtype", "int8"), "--dtype 'int8'"),
        ((m1,), "--method warp --scale 0.5"),
        ((m1, m2, "--method", "greedy"), "linear"),
        ((m1, m2, "--weights=1,-1"), "add up to 0"),
    ]:
        said = call("merge", *words, "-o", out, code=1)
        assert wanted in said, said
        assert not out.exists()
    said = call("merge", m1, m2, "--density", "0.3", "-o", out, code=2)
    assert "mergekit-yaml FILE FOLDER" in " ".join(said.replace("│", " ").split())
    said = call("merg", m1, m2, code=2)
    assert "Did you mean 'merge'?" in said
