"""Our merges against mergekit's, number by number: python benchmarks/merge_peer.py --mergekit PYTHON [--model FOLDER].

PYTHON is one that can `import mergekit` (an environment of its own: it brings other versions of everything). Both read the same YAML and the same models:
random ones of two layers, and with --model two that were moved a little from a real one. The largest difference of any number is printed for each recipe.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rlhf_nb.core import derive_seed
from rlhf_nb.models.merge import merge_models, trim
from rlhf_nb.models.recipe import Recipe, from_mergekit
from rlhf_nb.models.shards import ModelTensors

# mergekit draws DARE's masks from torch's global state: here it is told ours, in the order in which it asks (models of a tensor one after the other).
KIT = """
import sys, json, torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
import mergekit.merge_methods.generalized_task_arithmetic as arithmetic
import mergekit.merge_methods.task_adapter as adapter
seeds, asked = {}, {"name": None, "i": 0}
whole = arithmetic.GeneralizedTaskArithmeticMerge.merge_group
def named(self, group, /, **parameters):
    asked["i"] = 0
    return whole(self, group, **parameters)
arithmetic.GeneralizedTaskArithmeticMerge.merge_group = named
execute = adapter.ExecuteMergeMethodTask.execute
def executing(self, *a, **k):
    asked["name"] = self.output_weight.name
    return execute(self, *a, **k)
adapter.ExecuteMergeMethodTask.execute = executing
import mergekit.sparsify as sparsify
def drawn(probabilities):
    seed = seeds[asked["name"]][asked["i"]]
    asked["i"] += 1
    kept = torch.empty(probabilities.shape, dtype=torch.bool)
    return kept.bernoulli_(round(float(probabilities.reshape(-1)[0]), 6), generator=torch.Generator().manual_seed(seed)).to(probabilities.dtype)
sparsify.torch = type("Torch", (), {"__getattr__": lambda self, k: drawn if k == "bernoulli" else getattr(torch, k)})()
for line in sys.stdin:
    job = json.loads(line)
    seeds.clear()
    seeds.update(job["seeds"])
    run_merge(MergeConfiguration.model_validate(job["settings"]), job["out"], MergeOptions(copy_tokenizer=False, quiet=True))
    print("merged", flush=True)
"""


def recipes(base: str, a: str, b: str) -> dict[str, dict[str, Any]]:
    """mergekit's settings of every method that is shared, plain and with gradients and filters."""
    gradient = [0.0, 0.7, 0.2]
    two = [
        {"model": a, "parameters": {"weight": 0.7, "density": 0.4}},
        {"model": b, "parameters": {"weight": 0.6, "density": 0.6}},
    ]
    plain = [{"model": m["model"], "parameters": {"weight": m["parameters"]["weight"]}} for m in two]
    by_name = [{"filter": "mlp", "value": gradient}, {"value": 0.4}]
    on = {"base_model": base, "models": two, "dtype": "float32"}
    return {
        "linear": {"merge_method": "linear", "models": plain, "dtype": "float32"},
        "linear, plain sum, gradient": {
            "merge_method": "linear", "models": [plain[0], {"model": b, "parameters": {"weight": gradient}}], "parameters": {"normalize": False}, "dtype": "float32",
        },
        "slerp": {"merge_method": "slerp", "base_model": a, "models": [{"model": a}, {"model": b}], "parameters": {"t": 0.3}, "dtype": "float32"},
        "slerp, gradient and filter": {"merge_method": "slerp", "base_model": a, "models": [{"model": a}, {"model": b}], "parameters": {"t": by_name}, "dtype": "float32"},
        "task_arithmetic": {"merge_method": "task_arithmetic", "base_model": base, "models": plain, "parameters": {"lambda": 0.8}, "dtype": "float32"},
        "task_arithmetic, subtracting": {
            "merge_method": "task_arithmetic", "base_model": base, "models": [plain[0], {"model": b, "parameters": {"weight": -0.5}}], "dtype": "float32",
        },
        "ties": {"merge_method": "ties", **on},
        "ties, rescaled, λ": {"merge_method": "ties", **on, "parameters": {"rescale": True, "normalize": False, "lambda": 0.9}},
        "dare_linear": {"merge_method": "dare_linear", **on},
        "dare_linear, not rescaled": {"merge_method": "dare_linear", **on, "parameters": {"rescale": False}},
        "dare_ties": {"merge_method": "dare_ties", **on},
        "dare_ties, normalised": {"merge_method": "dare_ties", **on, "parameters": {"normalize": True}},
        "passthrough": {"merge_method": "passthrough", "models": [{"model": a}], "dtype": "float32"},
    }  # fmt: skip


def random_family(folder: Path) -> list[str]:
    """A random model of three layers, and two others that are random too."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False
    )  # fmt: skip
    for i in range(3):
        torch.manual_seed(i)
        LlamaForCausalLM(config).save_pretrained(folder / f"m{i}")
    return [str(folder / f"m{i}") for i in range(3)]


def moved_family(folder: Path, model: str) -> list[str]:
    """A real model, and two that were moved from it by a hundredth of each tensor's spread."""
    start = ModelTensors(model)
    for i in range(3):
        out = folder / f"r{i}"
        out.mkdir()
        g = torch.Generator().manual_seed(i)
        tensors = {}
        for name, x in start.items():
            x = x.float().clone()
            tensors[name] = x + 0.01 * float(x.std()) * torch.randn(x.shape, generator=g) if i else x
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        (out / "config.json").write_bytes((start.folder / "config.json").read_bytes())
    return [str(folder / f"r{i}") for i in range(3)]


def kept_beyond(recipe: Recipe) -> int:
    """How many entries TIES keeps here and sorting does not, because they are as large as the smallest one kept; which of those sorting keeps is chance."""
    if recipe.method != "ties" or recipe.base is None:
        return 0
    base, more = ModelTensors(recipe.base), 0
    for part in recipe.models:
        model = ModelTensors(part.model)
        density = part.density
        assert isinstance(density, float)
        for name in base:
            delta = model[name].float() - base[name].float()
            more += int((trim(delta, density) != 0).sum()) - max(1, int(density * delta.numel()))
    return more


def largest_difference(ours: Path, theirs: Path) -> tuple[float, int, int]:
    """Of any number of two models, how many tensors were compared, and how many numbers differ by more than 1e-6."""
    mine, worst, seen, apart = ModelTensors(ours), 0.0, set(), 0
    for file in sorted(theirs.glob("*.safetensors")):
        with safe_open(str(file), "pt") as opened:
            for name in opened.keys():
                if name in mine.tied or name not in mine:
                    continue
                seen.add(name)
                difference = (mine[name].float() - opened.get_tensor(name).float()).abs()
                worst, apart = max(worst, float(difference.max())), apart + int((difference > 1e-6).sum())
    if seen != set(mine):
        raise SystemExit(f"mergekit wrote no {sorted(set(mine) - seen)[0]}")
    return worst, len(seen), apart


def seeds_of(recipe: Recipe, names: list[str]) -> dict[str, list[int]]:
    """The seeds of our draws, by tensor."""
    return {n: [derive_seed("dare", recipe.seed, i, n) for i in range(len(recipe.models))] for n in names}


def main() -> None:
    """Print one line a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergekit", required=True, help="a Python that can import mergekit")
    parser.add_argument("--model", help="a real model's folder; left out: random weights only")
    parser.add_argument("--only", default="", help="recipes whose name holds this")
    args = parser.parse_args()
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="merge-peer-") as temporary:
        folder = Path(temporary)
        env = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        peer = subprocess.Popen(
            [args.mergekit, "-c", KIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        assert peer.stdin is not None and peer.stdout is not None
        families = {"random": random_family(folder)} | (
            {"real": moved_family(folder, args.model)} if args.model else {}
        )
        for kind, (base, a, b) in families.items():
            for title, settings in recipes(base, a, b).items():
                if args.only not in title:
                    continue
                ours, theirs = folder / "ours", folder / "theirs"
                begin = time.perf_counter()
                recipe = from_mergekit(settings)
                merge_models(recipe, ours)
                seconds = [time.perf_counter() - begin]
                begin = time.perf_counter()
                job = {
                    "settings": settings,
                    "out": str(theirs),
                    "seeds": seeds_of(recipe, list(ModelTensors(base).table)),
                }
                peer.stdin.write(json.dumps(job) + "\n")
                peer.stdin.flush()
                while (said := peer.stdout.readline()) != "merged\n":
                    if not said:
                        sys.exit(f"mergekit failed on {title}: {json.dumps(settings)}")
                seconds.append(time.perf_counter() - begin)
                apart, n, differing = largest_difference(ours, theirs)
                ties = kept_beyond(recipe) if differing else 0
                if not 0 < differing <= ties:
                    worst = max(worst, apart)
                more = (
                    f"{differing} numbers differ, {ties} entries were as large as the smallest one kept"
                    if differing
                    else ""
                )
                print(
                    f"{kind:7} {title:32} {apart:.1e}  ({n} tensors; {seconds[0]:.1f} s, mergekit {seconds[1]:.1f} s) {more}",
                    flush=True,
                )
                shutil.rmtree(ours)
                shutil.rmtree(theirs)
        peer.stdin.close()
        peer.wait()
    print(f"largest difference, but for entries that TIES keeps or not by chance: {worst:.1e}")
    if worst > 1e-6:
        sys.exit("more than 1e-6")


if __name__ == "__main__":
    main()
