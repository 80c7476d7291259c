"""The memory planner (`rlhf_nb.topology`) against measured peaks: eight settings, each in a fresh process on the CPU.

    python benchmarks/check_topology.py [--only sft ppo] [--allocator default]

Every process first trains a tiny model of the same kind with the same method, so that libraries and thread pools are there, then
takes its resident memory as zero, builds the model (random weights, random words) and takes two steps (from the second
one on Adam's numbers exist). The peak (VmHWM) above zero is compared with `predict(...)`.peak. Linux only.

The planner counts tensors. glibc hands freed blocks of less than 32 MB back to its own heap instead of to the system, and holes
in that heap count as resident. --allocator exact (the default) makes it return blocks above 1 MiB at once, so that what is measured is
what the program uses; --allocator default measures what a process gets that doesn't say anything.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness

LLAMA = {
    "model_type": "llama", "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "vocab_size": 32_000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
PAIRS = {"mini_batch": 16, "prompt": 64, "completion": 96}
ANSWERS = {"mini_batch": 16, "rollout_batch": 16, "prompt": 64, "completion": 80}
SETTINGS: dict[str, dict[str, Any]] = {
    "SFT, all weights": {"model": LLAMA, "method": "sft", "mini_batch": 24, "prompt": 64, "completion": 96},
    "SFT, LoRA": {"model": LLAMA, "method": "sft", "mini_batch": 24, "prompt": 64, "completion": 96, "lora": 8},
    "reward model": {"model": LLAMA, "method": "reward", **PAIRS},
    "DPO, frozen reference": {"model": QWEN, "method": "preference", **PAIRS},
    "DPO, cached reference": {"model": QWEN, "method": "preference", **PAIRS, "reference": False},
    "PPO, separate critic": {"model": QWEN, "method": "ppo", **ANSWERS},
    "PPO, Hydra": {"model": LLAMA, "method": "ppo", **ANSWERS, "lora": 8, "critic": "hydra"},
    "GRPO": {"model": LLAMA, "method": "grpo", **ANSWERS, "rollout_batch": 64, "group": 8, "reference": False, "reward_model": False},
}  # fmt: skip
BUDGET, STEPS = 2048, 2


def words(r: random.Random, vocabulary: int, n: int) -> str:
    """About n random words."""
    return " ".join(f"w{r.randrange(2, vocabulary)}" for _ in range(r.randint(n * 3 // 4, n * 5 // 4)))


def tokenizer_for(vocabulary: int) -> Any:
    """Word n is token n."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def rows_for(setting: dict[str, Any], vocabulary: int, steps: int) -> list[dict[str, str]]:
    """Random rows in the method's format."""
    r, p, c = random.Random(0), setting["prompt"], setting["completion"]
    n = max(setting["mini_batch"], setting.get("rollout_batch", 0)) * steps
    answers = {"sft": ("completion",), "reward": ("chosen", "rejected"), "preference": ("chosen", "rejected")}.get(
        setting["method"], ()
    )
    return [{"prompt": words(r, vocabulary, p) + " "} | {k: words(r, vocabulary, c) for k in answers} for _ in range(n)]


def trainer_for(setting: dict[str, Any], model: Any, folder: str, rows: list[dict[str, str]]) -> Any:
    """The method's own trainer on a model."""
    from rlhf_nb.config import LoraSettings
    from rlhf_nb.models.adapters import add_lora
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.train import grpo, ppo, preference, reward, sft

    method, tokenizer = setting["method"], tokenizer_for(model.config.vocab_size)
    lora = LoraSettings(r=setting["lora"]) if "lora" in setting else None
    p, c = setting["prompt"], setting["completion"]
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/run", "steps": STEPS, "epochs": None, "mini_batch_size": setting["mini_batch"], "token_budget": BUDGET,
        "device": "cpu", "console": False, "async_save": False, "model": {"lora": lora.to_dict() if lora else None},
        "data": {"max_prompt_length": 2 * p, "max_length": 2 * (p + c), "dedup": False},
    }  # fmt: skip
    hydra = setting.get("critic") == "hydra"
    policy = add_lora(model, lora) if lora and not hydra else model
    if method == "sft":
        return sft.SFTTrainer(sft.SFTConfig(**settings), policy, tokenizer, rows, [])
    if method == "reward":
        return reward.RewardTrainer(reward.RewardConfig(**settings, calibrate_rows=0), policy, tokenizer, rows, [])
    if method == "preference":
        kind = "frozen" if setting.get("reference", True) else "cached"
        config = preference.PreferenceConfig(**settings, reference=kind, reference_cache=f"{folder}/cache")
        return preference.PreferenceTrainer(config, policy, tokenizer, rows, [])
    settings |= {"rollout_batch_size": setting["rollout_batch"], "sampling": {"max_new_tokens": c, "min_new_tokens": c}}
    if method == "grpo":
        grouped = grpo.GRPOConfig(**settings, num_generations=setting["group"])
        score = lambda prompts, completions, **columns: [float(len(x) % 7) for x in completions]
        return grpo.GRPOTrainer(grouped, policy, tokenizer, score, rows, [])
    scored = add_lora(copy.deepcopy(model), lora, "reward") if hydra else model
    judge = RewardModel.from_policy(scored, copy_decoder=not hydra)
    return ppo.PPOTrainer(
        ppo.PPOConfig(**settings, critic=setting.get("critic", "separate"), num_inner_epochs=1),
        policy,
        tokenizer,
        judge,
        rows,
        [],
    )


def measure(setting: dict[str, Any]) -> dict[str, float]:
    """Train two steps; MiB above what was there, highest while sampling and scoring, and highest while updating."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(setting["model"])
    rows = rows_for(setting, shape["vocab_size"], STEPS + 1)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    zero, started = harness.memory(peak=False), time.process_time()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        shape.pop("model_type"),
        **shape,
        max_position_embeddings=2048,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(setting, model, folder, rows)
        del model
        gc.collect()
        trainer.start()
        for _ in range(STEPS):
            batch, peaks = trainer.next_batch(), []
            for work in (trainer.collect, trainer.update):
                Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
                batch = work(batch)
                peaks.append(harness.memory() - zero)
            trainer.finish_step(batch)
        trainer.log.close()
    return {"collect": peaks[0], "update": peaks[1], "cpu": time.process_time() - started}


def predicted(setting: dict[str, Any]) -> dict[str, float]:
    """What the planner says, in MiB."""
    from transformers import AutoConfig

    from rlhf_nb.topology import FORMATS, Job, predict

    shape = dict(setting["model"])
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    job = Job(
        **{k: v for k, v in setting.items() if k != "model"}, token_budget=BUDGET, format=FORMATS["fp32"], device="cpu"
    )
    budget = predict(config, job)
    update = max(budget.at("backward"), budget.at("step"))
    return {
        "collect": budget.at("sampling") / harness.MIB,
        "update": update / harness.MIB,
        "peak": budget.peak / harness.MIB,
    }


def worker(name: str) -> None:
    """In a process of its own: libraries first, with a tiny model, then the measurement."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    setting = SETTINGS[name]
    small = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    measure(setting | {"model": setting["model"] | small, "prompt": 8, "completion": 8})
    print(json.dumps(measure(setting)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="settings whose name contains one of these")
    parser.add_argument("--allocator", choices=("exact", "default"), default="exact")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    env = dict(
        os.environ,
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        PYTHONPATH=os.pathsep.join([str(harness.ROOT), str(harness.HERE)]),
    )
    if args.allocator == "exact":
        env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    chosen = [n for n in SETTINGS if not args.only or any(o.lower() in n.lower() for o in args.only)]
    print(
        f"| setting ({args.allocator} allocator) | predicted, MiB | measured, MiB | difference | CPU s |\n|---|---:|---:|---:|---:|"
    )
    worst = 0.0
    for name in chosen:
        done = subprocess.run([sys.executable, __file__, "--worker", name], env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        found, want = json.loads(done.stdout.splitlines()[-1]), predicted(SETTINGS[name])
        peak = max(found["collect"], found["update"])
        difference = want["peak"] / peak - 1
        worst = max(worst, abs(difference))
        print(f"| {name} | {want['peak']:.0f} | {peak:.0f} | {difference:+.1%} | {found['cpu']:.0f} |", flush=True)
    print(f"\nlargest difference of {len(chosen)}: {worst:.1%}")


if __name__ == "__main__":
    main()
