"""The memory planner (`rlhf_nb.scale.topology`) against what was measured on the CPU, in fresh processes.

    python benchmarks/check_topology.py [--only sft ppo] [--allocator default]   # eight settings, one process each: peaks
    python benchmarks/check_topology.py --stages [qwen2]                         # DDP and ZeRO on two processes: who holds what
    python benchmarks/check_topology.py --time [ddp fsdp2]                       # seconds of a step, two and four processes

Peaks. Every process first trains a tiny model of the same kind with the same method, so that libraries and thread pools are there, then
takes its resident memory as zero, builds the model (random weights, random words) and takes two steps (from the second
one on Adam's numbers exist). The peak (VmHWM) above zero is compared with `predict(...)`.peak. Linux only.

The planner counts tensors. glibc hands freed blocks of less than 32 MB back to its own heap instead of to the system, and holes
in that heap count as resident. So --allocator exact (the default) sets MALLOC_MMAP_THRESHOLD_ for the measured processes: blocks
above 1 MiB are returned at once, and what is measured is what the program uses. --allocator default measures what a process gets
that doesn't say anything.

Stages. A model of 22 million parameters is fine-tuned for three steps by one process, and by two under DDP, ZeRO-1, 2 and 3. When the
optimizer begins the third step, rank 0 adds up the bytes of the live tensors, each storage once, by what they are: the module's
parameters; gradients; the optimizer's numbers (Adam's averages, DeepSpeed's own copy of the weights); buffers for messages. DDP's
buffers are not Python's, so their size is taken from DDP's own log. Beside it stands the highest resident memory of that step
above what was there before the model; here blocks of tensors are smaller, so glibc's threshold is set to 128 KiB.

Time. In the processes that train, each step is predicted before it is made, from a probe of seconds: collectives by size
(`scale.measure`), the pieces of a step (`scale.cost`). Once before, the step of a model with as many layers that are 64 numbers wide
is timed, whose seconds are those that don't depend on widths. Prediction and step lie next to each other in time because a machine's
speed drifts; the median of four pairs counts.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import dataclasses
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
ADAPTERS = ("policy", "critic adapter", "reference", "reward adapter")  # of one backbone
SETTINGS: dict[str, dict[str, Any]] = {
    "SFT, all weights": {"model": LLAMA, "method": "sft", "mini_batch": 24, "prompt": 64, "completion": 96},
    "SFT, LoRA": {"model": LLAMA, "method": "sft", "mini_batch": 24, "prompt": 64, "completion": 96, "lora": 8},
    "reward model": {"model": LLAMA, "method": "reward", **PAIRS},
    "DPO, frozen reference": {"model": QWEN, "method": "dpo", **PAIRS},
    "DPO, cached reference": {"model": QWEN, "method": "dpo", **PAIRS, "reference": False, "holds": ("policy",)},
    "PPO, separate critic": {"model": QWEN, "method": "ppo", **ANSWERS},
    "PPO, Hydra": {"model": LLAMA, "method": "ppo", **ANSWERS, "lora": 8, "critic": "hydra", "holds": ADAPTERS},
    "GRPO": {"model": LLAMA, "method": "grpo", **ANSWERS, "rollout_batch": 64, "group": 8, "holds": ("policy",)},
}  # fmt: skip
BUDGET, STEPS = 2048, 2
STAGES = {"one process": (1, "ddp"), "DDP": (2, "ddp"), **{f"ZeRO-{n}": (2, f"zero{n}") for n in (1, 2, 3)}}
STAGED: dict[str, dict[str, Any]] = {
    "llama": {"model": LLAMA | {"hidden_size": 384, "intermediate_size": 1152}, "method": "sft", "mini_batch": 32, "prompt": 32, "completion": 32, "budget": 512},
    "qwen2": {"model": QWEN, "method": "sft", "mini_batch": 24, "prompt": 24, "completion": 40, "budget": 384},
}  # fmt: skip
SMALL: dict[str, Any] = {"prompt": 32, "completion": 64, "budget": 1024, "model": STAGED["llama"]["model"]}
SFT, DPO = SMALL | {"method": "sft", "mini_batch": 32}, SMALL | {"method": "dpo", "mini_batch": 16}
TIMED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "SFT, DDP, 2": (2, "ddp", SFT), "SFT, DDP, 4": (4, "ddp", SFT), "DPO, DDP, 2": (2, "ddp", DPO),
    "SFT, ZeRO-2, 2": (2, "zero2", SFT), "SFT, ZeRO-3, 2": (2, "zero3", SFT), "SFT, FSDP2, 2": (2, "fsdp2", SFT),
}  # fmt: skip
BUCKET = 4_000_000  # numbers in a message of DeepSpeed; its default, 500 million, would be many times the model
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip


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
    answers = {"sft": ("completion",), "reward": ("chosen", "rejected"), "dpo": ("chosen", "rejected")}.get(
        setting["method"], ()
    )
    return [{"prompt": words(r, vocabulary, p) + " "} | {k: words(r, vocabulary, c) for k in answers} for _ in range(n)]


def trainer_for(setting: dict[str, Any], model: Any, folder: str, rows: list[dict[str, str]]) -> Any:
    """The method's own trainer on a model."""
    from rlhf_nb.config import LoraSettings
    from rlhf_nb.models.adapters import add_lora
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.train import dpo, grpo, ppo, reward, sft

    method, tokenizer = setting["method"], tokenizer_for(model.config.vocab_size)
    lora = LoraSettings(r=setting["lora"]) if "lora" in setting else None
    p, c = setting["prompt"], setting["completion"]
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/run", "steps": setting.get("steps", STEPS), "epochs": None, "mini_batch_size": setting["mini_batch"],
        "token_budget": setting.get("budget", BUDGET),
        "device": "cpu", "console": False, "async_save": False, "model": {"lora": lora.to_dict() if lora else None},
        "data": {"max_prompt_length": 2 * p, "max_length": 2 * (p + c), "dedup": False},
    }  # fmt: skip
    hydra = setting.get("critic") == "hydra"
    policy = add_lora(model, lora) if lora and not hydra else model
    if method == "sft":
        return sft.SFTTrainer(sft.SFTConfig(**settings), policy, tokenizer, rows, [])
    if method == "reward":
        return reward.RewardTrainer(reward.RewardConfig(**settings, calibrate_rows=0), policy, tokenizer, rows, [])
    if method == "dpo":
        kind = "frozen" if setting.get("reference", True) else "cached"
        config = dpo.DPOConfig(**settings, reference=kind, reference_cache=f"{folder}/cache")
        return dpo.DPOTrainer(config, policy, tokenizer, rows, [])
    settings |= {"rollout_batch_size": setting["rollout_batch"], "sampling": {"max_new_tokens": c, "min_new_tokens": c}}
    if method == "grpo":
        grouped = grpo.GRPOConfig(**settings, num_generations=setting["group"])
        score = lambda prompts, completions, **columns: [float(len(x) % 7) for x in completions]
        return grpo.GRPOTrainer(grouped, policy, tokenizer, score, rows, [])
    scored = add_lora(copy.deepcopy(model), lora, "reward") if hydra else model
    judge = RewardModel.from_policy(scored, copy_decoder=not hydra)
    own = ppo.PPOConfig(**settings, critic=setting.get("critic", "separate"), num_inner_epochs=1)
    return ppo.PPOTrainer(own, policy, tokenizer, judge, rows, [])


def build(setting: dict[str, Any]) -> Any:
    """The model, with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = dict(setting["model"])
    special = {"max_position_embeddings": 2048, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, **special)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def measure(setting: dict[str, Any]) -> dict[str, float]:
    """Train two steps; MiB above what was there, highest while sampling and scoring, and highest while updating."""
    rows = rows_for(setting, setting["model"]["vocab_size"], STEPS + 1)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    zero, started = harness.memory(peak=False), time.process_time()
    model = build(setting)
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


def planned(setting: dict[str, Any]) -> tuple[Any, Any]:
    """The model's config, and the job."""
    from transformers import AutoConfig

    from rlhf_nb.scale.topology import NUMBER_FORMATS, Job

    shape = dict(setting["model"])
    given = {k: v for k, v in setting.items() if k not in ("model", "budget", "critic", "reference")}
    given |= {"token_budget": setting.get("budget", BUDGET), "format": NUMBER_FORMATS["fp32"], "device": "cpu"}
    return AutoConfig.for_model(shape.pop("model_type"), **shape), Job(**given)


def predicted(setting: dict[str, Any], **split: Any) -> Any:
    """The planner's account."""
    from rlhf_nb.scale.topology import Split, predict_memory

    return predict_memory(*planned(setting), Split(**split))


def worker(name: str) -> None:
    """In a process of its own: libraries first, with a tiny model, then the measurement."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if name in STAGED:
        print(json.dumps(stage_worker(STAGED[name])))
        return
    setting = SETTINGS[name]
    measure(setting | {"model": setting["model"] | TINY, "prompt": 8, "completion": 8})
    print(json.dumps(measure(setting)))


def tensors_in(x: Any) -> Iterator[Any]:
    """All tensors in nested lists and dicts."""
    if isinstance(x, (list, tuple, dict)):
        for y in x.values() if isinstance(x, dict) else x:
            yield from tensors_in(y)
    elif hasattr(x, "untyped_storage"):
        yield x


def holdings(trainer: Any) -> dict[str, float]:
    """MiB of this process's live tensors by role, each storage once."""
    import torch

    module, optimizer, wrapper = trainer.engine.module, trainer.engine.optimizer, trainer.method.module
    params = list(module.parameters())
    stepped = [p for group in optimizer.param_groups for p in group["params"]]  # DeepSpeed's are flat parts
    zero = getattr(getattr(trainer.engine.strategy, "ds", None), "optimizer", None)
    of_zero = lambda *names: [getattr(zero, name, None) for name in names]
    groups = {
        "parameters": [*(p.data for p in params), *(getattr(p, "ds_tensor", None) for p in params)],
        "gradients": [*(p.grad for p in [*params, *stepped]), *of_zero("averaged_gradients", "grad_partitions_flat_buffer")],
        "optimizer": [*map(dict, optimizer.state.values()), *of_zero("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")],
        "messages": [bucket.buffer for bucket in getattr(zero, "ipg_buckets", {}).values()],
    }  # fmt: skip
    found, seen = dict.fromkeys(groups, 0.0), set()
    for role, things in groups.items():
        for t in tensors_in(things):
            store = t.untyped_storage()
            if store.data_ptr() and store.data_ptr() not in seen:
                seen.add(store.data_ptr())
                found[role] += store.nbytes() / harness.MIB
    if isinstance(wrapper, torch.nn.parallel.DistributedDataParallel):
        log = wrapper._get_ddp_logging_data()
        sizes = log.get("rebuilt_bucket_sizes") or log["bucket_sizes"]
        found["messages"] += sum(float(x) for x in str(sizes).split(",")) / harness.MIB
    return found


def stage_worker(setting: dict[str, Any]) -> dict[str, float]:
    """On every rank: three steps; what rank 0 holds as its optimizer begins the last, and its peak over that step."""
    import torch

    torch.set_num_threads(1)
    learn(setting | {"model": setting["model"] | TINY, "prompt": 8, "completion": 8})  # libraries, threads
    return learn(setting)


def learn(setting: dict[str, Any]) -> dict[str, float]:
    """Three steps of training (DDP makes its buffers anew in the second); see `stage_worker`."""
    rows = rows_for(setting, setting["model"]["vocab_size"], STEPS + 2)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    zero, found = harness.memory(peak=False), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(setting, build(setting), folder, rows)
        gc.collect()
        trainer.start()

        def look(*args: Any) -> None:
            now = holdings(trainer)
            if sum(now.values()) > sum(v for k, v in found.items() if k != "peak"):
                found.update(now)

        trainer.engine.optimizer.register_step_pre_hook(look)
        for _ in range(STEPS + 1):
            found.clear()
            Path("/proc/self/clear_refs").write_text("5")  # the highest mark starts anew
            trainer.train_step()
            found["peak"] = harness.memory() - zero
        trainer.log.close()
    return found


def stages(model: str) -> None:
    """The table of DDP and ZeRO, MiB on rank 0; last, the numbers as a dict, for `scale.topology`."""
    from rlhf_nb.scale.launch import launch

    roles = {"parameters": "policy", "gradients": "gradients", "optimizer": "optimizer", "messages": "overhead"}
    print("measured (predicted), MiB on rank 0; the first four as the optimizer begins its third step\n")
    print(f"| | {' | '.join(roles)} | all four | peak | difference |\n|---|{'---:|' * (len(roles) + 3)}")
    everything = {}
    for name, (world, strategy) in STAGES.items():
        if world == 1:
            command = [sys.executable, __file__, "--worker", model]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
        else:
            with tempfile.TemporaryDirectory() as folder:
                found = launch(
                    stage_worker, STAGED[model], num_processes=world, strategy=strategy, device="cpu", run_dir=folder, restarts=0, say=None,
                    zero={"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0},
                ).value  # fmt: skip
        stage = int(strategy[-1]) if strategy.startswith("zero") else 0
        budget = predicted(STAGED[model], gpus=world, stage=stage, bucket=BUCKET)
        want = budget.by_role("step")
        pairs = [(found[mine], want[theirs] / harness.MIB) for mine, theirs in roles.items()]
        pairs += [(sum(m for m, _ in pairs), sum(w for _, w in pairs)), (found["peak"], budget.peak / harness.MIB)]
        cells = " | ".join(f"{m:.1f} ({w:.1f})" for m, w in pairs)
        print(f"| {name} | {cells} | {pairs[-1][1] / pairs[-1][0] - 1:+.1%} |", flush=True)
        everything[name] = {k: round(v, 1) for k, v in found.items()}
    print(f"\n{everything}")


def time_worker(name: str) -> dict[str, Any]:
    """On every rank: before each step its pieces are measured and it is predicted; rank 0's seconds of both, and its peak."""
    import torch
    import torch.distributed as dist

    from rlhf_nb.scale.cost import Speed, measure_costs
    from rlhf_nb.scale.measure import measure_wires, predict_ranks
    from rlhf_nb.scale.topology import decoder_shape

    torch.set_num_threads(1)
    ranks, strategy, setting = TIMED[name]
    short = {
        "prompt": 4,
        "completion": 4,
        "budget": setting["budget"] * 8 // (setting["prompt"] + setting["completion"]),
    }
    thin = setting | short | {"model": setting["model"] | TINY | {"num_hidden_layers": 8}}
    fixed = statistics.median(train_timed(thin)["seconds"])
    config, job = planned(setting)
    own, cores = dataclasses.replace(job, mini_batch=job.mini_batch // ranks), os.cpu_count() or 1

    def predict() -> list[float]:
        told, speed = [None] * ranks, Any
        for turn in range(0, ranks, cores):  # as many at once as there are cores
            if turn <= dist.get_rank() < turn + cores:
                speed = measure_costs(config, own, None)
            dist.barrier()
        dist.all_gather_object(told, speed)
        mean = Speed(*(statistics.fmean(column) for column in zip(*told)))
        wires = measure_wires(torch.device("cpu"))
        return list(predict_ranks(decoder_shape(config), job, strategy, ranks, mean, wires, fixed))

    return train_timed(setting, predict)


def train_timed(setting: dict[str, Any], before: Any = None, steps: int = 5) -> dict[str, Any]:
    """Seconds of each step but the first, what was predicted before each, and the peak of the last in MiB above what was there before
    the model."""
    import torch.distributed as dist

    rows, found = rows_for(setting, setting["model"]["vocab_size"], steps), dict[str, Any](seconds=[], predicted=[])
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    zero = harness.memory(peak=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(setting | {"steps": steps}, build(setting), folder, rows)
        gc.collect()
        trainer.start()
        for step in range(steps):
            if step and before is not None:
                found["predicted"].append(before())
            Path("/proc/self/clear_refs").write_text("5")
            dist.barrier()
            begun = time.perf_counter()
            trainer.train_step()
            found["seconds"] += [time.perf_counter() - begun] if step else []
        trainer.log.close()
    return found | {"peak": harness.memory() - zero}


def times(only: list[str]) -> None:
    """The table of predicted and measured steps."""
    from rlhf_nb.scale.launch import launch

    print("| setting | predicted, s | measured, s | difference | predicted, MiB | measured, MiB | difference |")
    print("|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for name in [n for n in TIMED if not only or any(o.lower() in n.lower() for o in only)]:
        ranks, strategy, setting = TIMED[name]
        zero = {"reduce_bucket_size": BUCKET, "stage3_param_persistence_threshold": 0} if "zero" in strategy else None
        with tempfile.TemporaryDirectory() as folder:
            how: dict[str, Any] = {"num_processes": ranks, "strategy": strategy, "device": "cpu", "run_dir": folder}
            got = launch(time_worker, name, restarts=0, say=None, zero=zero, **how).value
        stage, split = {"ddp": (0, {}), "fsdp2": (3, {"live": 0})}.get(strategy) or (int(strategy[-1]), {})
        pairs = [(sum(parts), seconds) for parts, seconds in zip(got["predicted"], got["seconds"])]
        want, took, off = (statistics.median(x) for x in zip(*((p, s, p / s - 1) for p, s in pairs)))
        room, peak = predicted(setting, gpus=ranks, stage=stage, bucket=BUCKET, **split).peak / harness.MIB, got["peak"]
        print(
            f"| {name} | {want:.2f} | {took:.2f} | {off:+.1%} | {room:.0f} | {peak:.0f} | {room / peak - 1:+.1%} |",
            flush=True,
        )
        print(
            [[round(x, 3) for x in parts] + [round(s, 2)] for parts, s in zip(got["predicted"], got["seconds"])],
            file=sys.stderr,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="settings whose name contains one of these")
    parser.add_argument("--allocator", choices=("exact", "default"), default="exact")
    parser.add_argument("--stages", nargs="?", const="llama", choices=list(STAGED), help="DDP and ZeRO, two processes")
    parser.add_argument("--time", nargs="*", metavar="NAME", help="seconds of a step, two and four processes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(harness.ROOT), str(harness.HERE)])
    if args.allocator == "exact":
        limit = str(1 << 17 if args.stages or args.time is not None else 1 << 20)
        os.environ["MALLOC_MMAP_THRESHOLD_"] = limit  # read by the processes that are started from here on
        print(f"measured with MALLOC_MMAP_THRESHOLD_={limit}, which this script sets for the measured processes\n")
    if args.time is not None:
        times(args.time)
        return
    if args.stages:
        stages(args.stages)
        return
    chosen = [n for n in SETTINGS if not args.only or any(o.lower() in n.lower() for o in args.only)]
    print(
        f"| setting ({args.allocator} allocator) | predicted, MiB | measured, MiB | difference | CPU s |\n|---|---:|---:|---:|---:|"
    )
    worst = 0.0
    for name in chosen:
        done = subprocess.run([sys.executable, __file__, "--worker", name], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: {done.stderr[-2000:]}")
        found, want = json.loads(done.stdout.splitlines()[-1]), predicted(SETTINGS[name]).peak / harness.MIB
        peak = max(found["collect"], found["update"])
        difference = want / peak - 1
        worst = max(worst, abs(difference))
        print(f"| {name} | {want:.0f} | {peak:.0f} | {difference:+.1%} | {found['cpu']:.0f} |", flush=True)
    print(f"\nlargest difference of {len(chosen)}: {worst:.1%}")


if __name__ == "__main__":
    main()
