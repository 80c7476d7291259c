"""The parts of `benchmarks/gpu.py`, one process each: `python benchmarks/gpu_parts.py JSON`, which gpu.py starts.

Each part is a generator of rows, {"what": ..., a number or several: ..., "reason": why there is none}, written as soon as they are known.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

Row = dict[str, Any]
GB = 1e9
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2},
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
VOCABULARY = {"0.5B": 151_936, "1.5B": 151_936, "tiny": 96}
BIG = {
    "sft": (0, 1024, 32),
    "dpo": (256, 256, 32),
    "reward": (256, 256, 32),
    "ppo": (128, 128, 64),
    "grpo": (128, 128, 64),
}
SMALL = {name: (6 * (p > 0), 8, 4 if name in ("sft", "dpo", "reward") else 8) for name, (p, _, _) in BIG.items()}
# method: (tokens of a prompt, of an answer, rows of a step)


class Job:
    """What gpu.py told this process."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.begun, self.told = time.monotonic(), told
        self.tiny: bool = told["tiny"]
        self.device = torch.device(told["device"])
        self.seconds: float = told["seconds"]
        self.sizes = SMALL if self.tiny else BIG

    @property
    def left(self) -> float:
        """Seconds until this part must have ended."""
        return self.seconds - (time.monotonic() - self.begun)

    def shape(self, name: str) -> str:
        """A shape's name, or "tiny"."""
        return "tiny" if self.tiny else name

    @property
    def precision(self) -> str:
        """The number format that is measured: what a run takes by itself."""
        return "fp32" if self.device.type == "cpu" else "auto"


# --- small tools ---------------------------------------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def forget(device: torch.device) -> None:
    """Give back what nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: torch.device) -> float:
    """Bytes at the peak since `forget`, in GB; on a CPU those of the process."""
    return torch.cuda.max_memory_allocated() / GB if device.type == "cuda" else harness.memory() * 2**20 / GB


class Late(BaseException):
    """A measurement's time is over; nothing between may take it for an error of its own."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Inside, `Late` is raised after so many seconds."""

    def ring(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tried(job: Job, what: str, measure: Callable[[], Row], needs: float = 3.0, most: float = 600.0) -> Row:
    """A row, or the reason why there is none; what the attempt held is given back.

    Args:
        needs: seconds without which it isn't begun; most: seconds after which it is given up, so that others have their turn.
    """
    if job.left < needs:
        return {"what": what, "reason": f"not begun: {job.left:.0f} s were left"}
    limit = min(most, job.left - 1)
    try:
        with limited(limit):
            return {"what": what} | measure()
    except Late:
        return {"what": what, "reason": f"given up after {limit:.0f} s"}
    except torch.OutOfMemoryError as e:
        return {"what": what, "reason": f"out of memory: {'. '.join(str(e).split('. ')[:2])}"}
    except (
        Exception,
        SystemExit,
    ) as e:  # a number or a reason: whatever goes wrong here, or in a worker, is the reason
        return {"what": what, "reason": f"{type(e).__name__}: {str(e).strip()[:300]}"}
    finally:
        forget(job.device)


def start(job: Job, words_: list[str], log: Path, env: dict[str, str]) -> tuple[Any, Path]:
    """A process of this file, and where its output goes."""
    if job.tiny:

        def work() -> None:
            os.environ.update(env)
            main(words_)

        return harness.Forked(work, log), log
    with log.open("w") as out:
        command = [sys.executable, __file__, *words_]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | env), log


def ended(process: Any, seconds: float) -> int | None:
    """A process's exit code; None where it had to be ended."""
    try:
        return int(process.wait(timeout=max(1.0, seconds)))
    except subprocess.TimeoutExpired:
        return None
    finally:  # also where our own time is over
        if process.poll() is None:
            process.kill()


@contextmanager
def switched(**env: str) -> Iterator[None]:
    """Inside, switches of the package (`RLHF_NB_...`) are set."""
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def preload() -> None:
    """Import what tiny parts need, once for all of them; nothing is computed yet."""
    torch.set_num_threads(1)
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    import rlhf_nb.scale.topology  # noqa: F401
    from rlhf_nb.train.registry import methods

    methods()


def timed(job: Job, work: Callable[[], Any], least: int = 2, most: float = 3.0) -> float:
    """Median seconds of a piece of work, after one that warms up."""
    work()
    wait(job.device)
    found, begun, most = list[float](), time.monotonic(), 0.0 if job.tiny else most
    while len(found) < least or (time.monotonic() - begun < min(most, job.left / 4) and len(found) < 20):
        start = time.perf_counter()
        work()
        wait(job.device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


_tokenizers: dict[int, Any] = {}


def tokenizer(vocabulary: int) -> Any:
    """One word, one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocabulary not in _tokenizers:
        known = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, vocabulary)}}
        plain = Tokenizer(models.WordLevel(known, unk_token="<eos>"))
        plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        _tokenizers[vocabulary] = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    return _tokenizers[vocabulary]


def config_of(shape: str) -> Any:
    """A Qwen2's configuration."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=VOCABULARY[shape], max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        **SHAPES[shape],
    )  # fmt: skip


def model_of(shape: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A Qwen2 with random weights, made on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype, attn_implementation="sdpa").eval()


def words(r: random.Random, vocabulary: int, n: int) -> str:
    """So many tokens as text."""
    return " ".join(f"w{r.randrange(2, vocabulary)}" for _ in range(n))


def rows_of(method: str, sizes: tuple[int, int, int], vocabulary: int, steps: int) -> list[dict[str, str]]:
    """Random rows in the method's format; lengths vary by a quarter."""
    r, (prompt, answer, rows) = random.Random(0), sizes
    columns = {"sft": ("completion",), "dpo": ("chosen", "rejected"), "reward": ("chosen", "rejected")}.get(method, ())

    def some(n: int) -> str:
        return words(r, vocabulary, max(1, r.randint(n * 3 // 4, n) - 1))

    return [{"prompt": some(max(prompt, 4)) + " "} | {c: some(answer) for c in columns} for _ in range(rows * steps)]


def score(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """A reward that differs between answers."""
    return [float(len(str(text)) % 17) / 17 for text in completions]


def settings_of(
    method: str, sizes: tuple[int, int, int], folder: str, steps: int, device: str, precision: str, tiny: bool = False, lora: int | None = None,
    **over: Any,
) -> Any:  # fmt: skip
    """A method's config.

    Args:
        sizes: tokens of a prompt, of an answer, rows of a step.
        over: what differs from what is measured by default.
    """
    from rlhf_nb.train.registry import get

    info, (prompt, answer, rows) = get(method), sizes
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/run", "steps": steps, "epochs": None, "mini_batch_size": rows, "device": device, "console": False, "save_every": None,
        "precision": precision, "token_budget": 64 if tiny else 16_384, "model": {"lora": {"r": lora} if lora else None},
        "data": {"max_prompt_length": max(prompt, 4), "max_length": max(prompt, 4) + answer, "dedup": False},
    }  # fmt: skip
    if info.online:
        settings |= {"rollout_batch_size": rows, "sampling": {"max_new_tokens": answer, "min_new_tokens": answer}}
        settings |= {"num_generations": 4 if tiny else 8}
    if method == "ppo":
        settings |= {"num_generations": 1, "num_inner_epochs": 1}
    if method == "reward":
        settings |= {"calibrate_rows": 0, "baseline_pairs": 0}
    return info.config(**(settings | over))


def trainer_of(
    job: Job, method: str, shape: str, folder: str, steps: int, sizes: tuple[int, int, int] | None = None, lora: int | None = None,
    precision: str = "", reward: Any = score, **over: Any,
) -> Any:  # fmt: skip
    """A method's own trainer on random weights and random words."""
    from rlhf_nb.config import LoraSettings
    from rlhf_nb.core import decide_precision
    from rlhf_nb.models.adapters import add_lora
    from rlhf_nb.train.registry import get

    info, (prompt, answer, rows) = get(method), sizes or job.sizes[method]
    asked = precision or job.precision
    config = settings_of(method, (prompt, answer, rows), folder, steps, job.device.type, asked, job.tiny, lora, **over)
    chosen = decide_precision(config.device, config.precision)
    model = model_of(shape, job.device, chosen.frozen_dtype if lora else torch.float32)
    if lora and over.get("critic") != "hydra":
        model = add_lora(model, LoraSettings(r=lora))
    given = {"reward": reward} if info.online else {}
    rows_ = rows_of(method, (prompt, answer, rows), VOCABULARY[shape], steps)
    trainer: Any = info.trainer
    return trainer(config, model, tokenizer(VOCABULARY[shape]), rows=rows_, eval_rows=[], **given)


def foreseen_gb(config: Any, model: Any, precision: Any) -> float:
    """What the planner says that a step holds at its peak, in GB; rewards are functions here.

    Args:
        config: of the run.
        model: its configuration.
        precision: where and in which formats it computes.
    """
    import dataclasses

    from rlhf_nb.scale.topology import Split, job_of, predict_memory

    asked = job_of(config, precision)
    held = tuple(h for h in asked.models if not h.startswith("reward")) if asked.info.online else asked.models
    return predict_memory(model, dataclasses.replace(asked, holds=held), Split()).peak / GB


def steps_of(job: Job, trainer: Any, steps: int, warm: int = 1) -> Row:
    """Steps of a run: tokens a second, MFU, peak beside what was predicted, host syncs of the last step."""
    trainer.start()
    shape = next(m.config for m in trainer.method.module.modules() if hasattr(m, "config"))
    foreseen = foreseen_gb(trainer.config, shape, trainer.engine.precision)
    events, syncs = list[Row](), None
    for i in range(warm + steps):
        if i == warm:
            wait(job.device)
            begun = time.perf_counter()
        with counted_syncs(trainer) if i == warm - 1 else nullcontext([]) as seen:
            events.append(trainer.train_step())
        syncs = len(seen) if i == warm - 1 and job.device.type == "cuda" else syncs
        if i >= warm and job.left < 2:
            break
    wait(job.device)
    seconds, done = time.perf_counter() - begun, events[warm:]
    tokens = sum(e["perf/tokens_per_s"] * e["perf/step_s"] for e in done)
    work = sum(e.get("perf/mfu", 0.0) * e["perf/step_s"] for e in done)
    peak = peak_gb(job.device)
    return {
        "tokens/s": tokens / seconds, "MFU": work / seconds if work else None, "s a step": seconds / len(done), "peak GB": peak, "predicted GB": foreseen,
        "predicted ÷ peak": foreseen / peak, "reserved ÷ peak": torch.cuda.max_memory_reserved() / GB / peak if job.device.type == "cuda" else None, "syncs a step": syncs, "finite": all(math.isfinite(e["loss"]) for e in events),
    }  # fmt: skip


@contextmanager
def counted_syncs(trainer: Any) -> Iterator[list[str]]:
    """Inside, each time that CUDA makes the host wait is noted, but for sampling."""
    seen: list[str] = []
    if trainer.engine.device.type != "cuda":
        yield seen
        return
    sampler = getattr(trainer.method, "sampler", None)
    with ExitStack() as stack:
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        if sampler is not None:
            own = sampler.generate

            def quiet(*args: Any, **kwargs: Any) -> Any:
                torch.cuda.set_sync_debug_mode("default")
                try:
                    return own(*args, **kwargs)
                finally:
                    torch.cuda.set_sync_debug_mode("warn")

            sampler.generate = quiet
            stack.callback(sampler.__dict__.pop, "generate", None)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
        about = [(w, str(w.message)) for w in caught]  # setting the mode says that it is a prototype
        seen += [f"{w.filename}:{w.lineno}" for w, m in about if "synchroniz" in m and "prototype" not in m]


def run_of(job: Job, method: str, shape: str, steps: int = 4, **how: Any) -> Row:
    """A few steps of a run."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(job, method, shape, folder, steps + 3, **how)
        try:
            return steps_of(job, trainer, steps)
        finally:
            trainer.lock.release()


# --- 1. correctness ------------------------------------------------------------------------------------------------------------

FAMILIES = {
    "qwen2": {"num_key_value_heads": 2}, "llama": {"num_key_value_heads": 2}, "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None}, "gpt2": {}, "qwen2, tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
}  # fmt: skip


def small_model(family: str) -> Any:
    """A small model in float64 on the CPU, with weights large enough that its distributions are not flat."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    plain = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    gpt2 = {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }
    shape = gpt2 if family == "gpt2" else plain | FAMILIES[family]
    config = AutoConfig.for_model(family.split(",")[0], **({"vocab_size": 160, "tie_word_embeddings": False} | shape))
    config.pad_token_id = config.eos_token_id = config.bos_token_id = None
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0) if p.dim() > 1 else None
    return model


def some_answers(device: torch.device) -> Any:
    """Prompts with three answers each, of different lengths."""
    from rlhf_nb.types import Completions

    r = random.Random(1)
    prompts, answers = list[list[int]](), list[list[int]]()
    for n in (5, 17, 40, 64):
        prompt = [r.randrange(2, 160) for _ in range(n)]
        for _ in range(3):
            prompts.append(prompt)
            answers.append([r.randrange(2, 160) for _ in range(r.randint(1, 30))])
    return Completions.from_lists(prompts, answers).to(device)


def gradient(model: Any) -> torch.Tensor:
    """All gradients as one vector in float64 on the CPU; they are cleared."""
    flat = torch.cat([p.grad.detach().cpu().double().reshape(-1) for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return flat


def compared(job: Job, family: str, name: str) -> Row:
    """A family in a number format: the largest gap of log-probs and the relative one of the gradient, on each path of the scorer."""
    import copy

    from rlhf_nb.core import DTYPES
    from rlhf_nb.fast.linear import gradients_in_place
    from rlhf_nb.fast.support import can_run, use_fast
    from rlhf_nb.scoring.check import BOUNDS, plain_logps, self_check
    from rlhf_nb.scoring.scores import completion_logps

    exact, dtype = small_model(family), DTYPES[name]
    model_says = can_run(exact)
    c = some_answers(torch.device("cpu"))
    want = plain_logps(exact, c)
    (want.sum() / 100).backward()
    slope, there = gradient(exact), c.completion_mask
    model, here = copy.deepcopy(exact).float().to(job.device), c.to(job.device)
    cast = nullcontext() if dtype == torch.float32 else torch.autocast(job.device.type, dtype)
    found: Row = {}
    with cast:
        for path, fast, share in (("fast", True, False), ("trees", True, "always"), ("plain", False, False)):
            with use_fast(fast), gradients_in_place(path == "fast"):  # as the loop has it
                logps = completion_logps(model, here, token_budget=512, share_prompts=share).logps
                torch.autograd.backward(logps.sum() / 100)
            gap = float((logps.detach().cpu().double() - want)[there].abs().max())
            g = gradient(model)
            found |= {
                f"{path}: log-probs off by": gap,
                f"{path}: gradient off by": float((g - slope).norm() / slope.norm()),
            }
        found["self-check off by"] = self_check(model, here, rows=8).scorer
    gaps = [v for k, v in found.items() if "gradient" not in k]
    slack = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    slopes = [v for k, v in found.items() if "gradient" in k]
    inside = max(gaps) <= BOUNDS[dtype] and max(slopes) <= slack
    return found | {"fast paths": model_says or "may be taken", "attention": kernel_of(dtype), "within bounds": inside}


def sampled(job: Job, family: str, name: str) -> Row:
    """Greedy answers against `generate`'s, and the sampler's log-probs against the scorer's."""
    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.core import DTYPES
    from rlhf_nb.rollout.sampler import sample_tokens
    from rlhf_nb.scoring.check import BOUNDS
    from rlhf_nb.scoring.scores import completion_logps
    from rlhf_nb.types import Completions, PromptBatch

    r, model, dtype = random.Random(2), small_model(family).float().to(job.device), DTYPES[name]
    prompts = [[r.randrange(2, 160) for _ in range(n)] for n in (4, 11, 30, 30)]
    batch = PromptBatch.from_lists(prompts).to(job.device)
    new = 40
    how: dict[str, Any] = {"eos": [], "pad": 0, "seed": 0}
    cast = nullcontext() if dtype == torch.float32 else torch.autocast(job.device.type, dtype)
    with cast, torch.no_grad():
        ours = sample_tokens(model, batch, SamplingConfig(max_new_tokens=new), greedy=True, **how)[0].tolist()
        same = total = 0
        for prompt, mine in zip(prompts, ours):
            ids = torch.tensor([prompt], device=job.device)
            settings = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
            first = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), new
            )  # after it they read different texts
            same, total = same + first, total + min(first + 1, new)
        ids, said, lens, _ = sample_tokens(model, batch, SamplingConfig(max_new_tokens=new), num_samples=2, **how)
        again = batch[[i // 2 for i in range(2 * len(prompts))]]
        c = Completions(again.prompt_ids, again.prompt_mask, ids, lens, torch.ones_like(ids, dtype=torch.bool))
        gap = float((completion_logps(model, c, token_budget=1024).logps - said).abs().max())
    return {
        "greedy tokens as `generate`'s": same / total,
        "log-probs, scorer and sampler off by": gap,
        "within bounds": gap <= BOUNDS[dtype],
    }


TESTS = ("test_losses_numbers.py", "test_losses_group.py", "test_losses_preference.py")


class Sent(TorchFunctionMode):
    """Inside, what is made without naming a device is made on the CPU, so that seeds mean the same, and sent to a device; what it meets follows it.

    Args:
        device: where to.
    """

    STAY = frozenset(("__set__", "copy_", "to", "__setitem__", "__getitem__", "index_put_"))  # these know both sides

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.sent = device, 0

    def _send(self, x: Any) -> Any:
        return x.to(self.device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            made = func(*args, **kwargs)
            self.sent += 1
            return made if kwargs.get("device") is not None or not isinstance(made, torch.Tensor) else self._send(made)
        if getattr(func, "__name__", "") not in self.STAY:
            seen = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
            args, kwargs = tree_map(self._send, (args, kwargs)) if len(seen) > 1 else (args, kwargs)
        return func(*args, **kwargs)


def numeric_tests(told: dict[str, Any]) -> None:
    """The process of `tests_on_device`."""
    import pytest

    device, sent = torch.device(told["device"]), [0]

    class Device:
        @pytest.fixture(autouse=True)
        def on_the_device(self) -> Iterator[None]:
            with Sent(device) as mode:
                yield
            sent[0] += mode.sent

    os.chdir(harness.ROOT)
    files = [f"tests/{n}" for n in (TESTS[-1:] if told["tiny"] else TESTS)]
    how = ["-q", "-ra", "-p", "no:cacheprovider", "-m", "not slow", "--tb=line", "-W", "ignore"]
    code = int(pytest.main([*how, *files], plugins=[Device()]))
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code}")
    print(f"tensors sent: {sent[0]}")


def tests_on_device(job: Job) -> Row:
    """The tests of numerics with all their tensors on the device: how many pass, which fail."""
    if find_spec("pytest") is None:
        return {"reason": "pytest is not installed here"}
    with tempfile.TemporaryDirectory() as folder:
        process, log = start(job, ["--tests", json.dumps(job.told)], Path(folder, "log"), {})
        code = ended(process, max(5.0, job.left - 3))
        lines = log.read_text(errors="replace").strip().splitlines()
    said = [x for x in lines if " passed" in x or " failed" in x]
    if code != 0 or not said:
        return {"reason": f"the tests ended with {code}: {' '.join(lines[-1:])[:300]}"}
    failed = [x.split(" ")[1].split("::")[-1] for x in lines if x.startswith(("FAILED", "ERROR"))]
    count = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", said[-1])}
    return {"passed": count.get("passed", 0), "failed": count.get("failed", 0) + count.get("error", 0), "first that failed": ", ".join(failed[:12]) or None, "within bounds": not failed}  # fmt: skip


def kernels_agree(job: Job, name: str) -> Row:
    """Whether `fast.kernels` gives PyTorch's numbers and gradients in a number format."""
    from rlhf_nb.core import DTYPES
    from rlhf_nb.fast import kernels

    why = kernels.kernel_difference(job.device, DTYPES[name]) if kernels.TRITON else "Triton isn't there"
    return {"used": kernels.fused(job.device), "differs": why or None, "within bounds": not why}


def part_correct(job: Job) -> Iterator[Row]:
    """Numbers against transformers in float64 on the CPU."""
    formats = ("fp32", "bf16") if job.device.type == "cpu" else ("fp32", "bf16", "fp16")
    if job.device.type == "cuda":
        for name in formats:
            yield tried(job, f"our kernels, {name}", lambda n=name: kernels_agree(job, n))
    for name in formats:
        for family in ("qwen2",) if job.tiny or name == "fp16" else FAMILIES:
            yield tried(job, f"scorer, {family}, {name}", lambda f=family, n=name: compared(job, f, n))
    for name in formats[:1] if job.tiny else formats:
        for family in ("qwen2",) if job.tiny else ("qwen2", "gpt2"):
            yield tried(job, f"sampler, {family}, {name}", lambda f=family, n=name: sampled(job, f, n))
    for method in () if job.tiny else ("sft", "dpo", "ppo", "grpo"):
        yield tried(job, f"host syncs, {method}", lambda m=method: syncs_of(job, m))
    yield tried(job, "tests of numerics", lambda: tests_on_device(job), needs=3 if job.tiny else 15)
    for kernel in ("loop",) if job.tiny else ("rows", "varlen", "flash_attn", "efficient", "flex"):
        for name in {"loop": formats[:1], "flex": formats[1:2]}.get(kernel, formats):
            what = f"scorer, qwen2, {name}, attention by {kernel}"
            yield tried(job, what, lambda k=kernel, n=name: by(job, k, n), most=20)
    if job.told.get("model"):
        for name in formats:
            yield tried(job, f"the real model, {name}", lambda n=name: real(job, n))


def real(job: Job, name: str) -> Row:
    """A model somebody trained: log-probs of a text against its own forward pass in fp32, and its greedy answer against `generate`'s."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.core import DTYPES
    from rlhf_nb.rollout.sampler import sample_tokens
    from rlhf_nb.scoring.check import BOUNDS, plain_logps
    from rlhf_nb.scoring.scores import completion_logps
    from rlhf_nb.types import Completions, PromptBatch

    dtype, new = DTYPES[name], 8 if job.tiny else 64
    words_of = AutoTokenizer.from_pretrained(job.told["model"])
    model = AutoModelForCausalLM.from_pretrained(job.told["model"], dtype=torch.float32).to(job.device).eval()
    text = "A graphics card multiplies matrices. To know whether it does so correctly, one compares its numbers with those of a slower machine."
    ids = words_of(text)["input_ids"]
    c = Completions.from_lists([ids[:8]] * 2, [ids[8:], ids[8:16]]).to(job.device)
    cast = nullcontext() if dtype == torch.float32 else torch.autocast(job.device.type, dtype)
    with torch.no_grad():
        want = plain_logps(model, c)
        with cast:
            got = completion_logps(model, c, token_budget=1024).logps
            batch = PromptBatch.from_lists([ids[:8]]).to(job.device)
            how = SamplingConfig(max_new_tokens=new)
            ours = sample_tokens(model, batch, how, greedy=True, eos=[], pad=0, seed=0)[0][0].tolist()
            asked = batch.prompt_ids
            theirs = model.generate(
                asked, attention_mask=torch.ones_like(asked), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )[0, 8:].tolist()  # fmt: skip
    gap = float((got - want)[c.completion_mask].abs().max())
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), new)
    bound = BOUNDS[dtype]
    return {
        "log-probs off by": gap,
        "greedy tokens before the first that differs from `generate`'s": same,
        "within bounds": gap <= bound,
    }


def by(job: Job, kernel: str, name: str) -> Row:
    """A measurement with attention by one kernel, or why it isn't taken here."""
    from rlhf_nb.core import DTYPES

    with switched(RLHF_NB_ATTENTION=kernel):
        found = compared(job, "qwen2", name)
        why = not_taken(kernel, DTYPES[name])
    return {"reason": why} if why else found


def syncs_of(job: Job, method: str) -> Row:
    """Where a step makes the host wait, beside sampling."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = (
            trainer_of(job, method, "tiny", folder, 5, sizes=SMALL[method], token_budget=64, num_generations=4)
            if method == "grpo"
            else trainer_of(job, method, "tiny", folder, 5, sizes=SMALL[method], token_budget=64)
        )
        trainer.start()
        try:
            trainer.train_step()
            trainer.train_step()
            with counted_syncs(trainer) as seen:
                event = trainer.train_step()
        finally:
            trainer.lock.release()
    where = ", ".join(dict.fromkeys(Path(x).name for x in seen))
    return {"syncs a step": len(seen), "updates": event["updates"], "where": where or None}


# --- 2. training ---------------------------------------------------------------------------------------------------------------


def part_train(
    job: Job, name: str = "0.5B", methods: tuple[str, ...] = ("dpo", "grpo", "sft", "ppo", "reward")
) -> Iterator[Row]:
    """Every method; then what its speed owes to what."""
    from rlhf_nb.fast.support import use_fast

    shape = job.shape(name)
    steps = 1 if job.tiny else 4
    for method in methods:
        lora = {"critic": "shared"} if method == "ppo" else {}
        lora |= {"token_budget": 32_768} if name == "0.5B" and roomy(job) else {}
        yield tried(job, f"{method} {shape}", lambda m=method, h=lora: run_of(job, m, shape, steps, **h))
    for method in methods[:1] if job.tiny else methods[:3]:
        with use_fast(False):
            yield tried(
                job, f"{method} {shape}, fast paths off", lambda m=method: run_of(job, m, shape, max(1, steps // 2))
            )


def roomy(job: Job) -> bool:
    """Whether a 0.5B model's forwards may have 32,768 tokens here."""
    return job.device.type == "cuda" and torch.cuda.get_device_properties(0).total_memory > 70 * GB


def part_peers(job: Job) -> Iterator[Row]:
    """TRL on the same rows, in turn."""
    for method in ("dpo", "grpo"):
        yield from against_trl(job, method, job.shape("0.5B"))


SWITCHES: dict[str, tuple[str, dict[str, str]]] = {  # what a switch is worth: the method it shows in, and how it is set
    "as it is": ("dpo", {}),
    "attention by padded rows": ("dpo", {"RLHF_NB_ATTENTION": "rows"}),
    "rows of different lengths": ("sft", {}),
    "rows of different lengths, attention by padded rows": ("sft", {"RLHF_NB_ATTENTION": "rows"}),
    "attention by the memory-efficient kernel": ("dpo", {"RLHF_NB_ATTENTION": "efficient"}),
    "graphs of decoding": ("grpo", {}),
    "graphs of decoding off": ("grpo", {"RLHF_NB_CUDA_GRAPHS": "0"}),
    "our kernels off": ("sft", {"RLHF_NB_KERNELS": "0"}),
    "ordinary memory instead of pinned": ("dpo", {"RLHF_NB_PINNED": "0"}),
}  # fmt: skip


def part_switches(job: Job) -> Iterator[Row]:
    """What each way of being fast is worth: with it and without it."""
    shape, steps = job.shape("0.5B"), 1 if job.tiny else 4
    for what, (method, env) in list(SWITCHES.items())[1:2] if job.tiny else SWITCHES.items():

        def measure(method: str = method, env: dict[str, str] = env) -> Row:
            with switched(**env):
                return with_kernel(job, method, shape, steps)

        yield tried(job, f"{method} {shape}, {what}", measure, most=30)
    for growing in () if job.tiny else (True, False):
        env = {"PYTORCH_ALLOC_CONF": f"expandable_segments:{growing}"} | {
            "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{growing}"
        }
        what = f"sft {shape}, segments of memory that {'grow' if growing else 'do not grow'}"
        yield tried(job, what, lambda e=env: apart(job, e, "sft", shape, steps), most=40)
    flex = {"RLHF_NB_ATTENTION": "flex" if job.device.type == "cuda" else "loop"}
    yield tried(
        job,
        f"dpo {shape}, attention by {flex['RLHF_NB_ATTENTION']}, in a process of its own",
        lambda: apart(job, flex, "dpo", shape, steps),
        most=60,
    )
    yield tried(
        job, f"sft {shape}, fast paths off, compiled", lambda: compiled(job, shape), needs=1 if job.tiny else 20
    )


def not_taken(kernel: str, dtype: torch.dtype) -> str:
    """Why an attention kernel was refused in this process for a number format; "" where it wasn't."""
    from rlhf_nb.fast import attention

    said = [why for (name, shape), why in attention._refused.items() if name == kernel and shape.dtype == dtype]
    return "" if "" in said or kernel == "rows" else (said or ["it was never asked"])[-1]


def kernel_of(dtype: torch.dtype) -> str:
    """Which attention kernel was taken in this process for a number format, by what is asked for now; "rows" for none."""
    from rlhf_nb.fast import attention

    asked = attention.asked_attention()
    taken = {name for (name, shape), why in attention._refused.items() if not why and shape.dtype == dtype}
    return next((name for name in (attention.AUTO if asked == "auto" else (asked,)) if name in taken), "rows")


def with_kernel(job: Job, method: str, shape: str, steps: int) -> Row:
    """A few steps, or why the attention kernel that is asked for isn't taken."""
    from rlhf_nb.core import decide_precision

    found, kernel = run_of(job, method, shape, steps), os.environ.get("RLHF_NB_ATTENTION", "rows")
    dtype = decide_precision(job.device, job.precision).compute_dtype
    why = not_taken(kernel, dtype)
    return {"reason": why} if why else {"attention": kernel_of(dtype)} | found


def apart(job: Job, env: dict[str, str], method: str, shape: str, steps: int) -> Row:
    """A few steps in a process of its own: what its environment says, counts from the start."""
    with tempfile.TemporaryDirectory() as folder:
        row, log = Path(folder, "row.json"), Path(folder, "log")
        told = json.dumps(job.told | {"one": [method, shape, steps], "row": str(row)})
        code = ended(start(job, ["--one", told], log, env)[0], job.left - 2)
        if code != 0 or not row.exists():
            tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
            return {"reason": f"process ended with {code}: {tail[0][:300]}"}
        found: Row = json.loads(row.read_text())
        return found


def one_run(told: dict[str, Any]) -> None:
    """The process of `apart`."""
    job, (method, shape, steps) = Job(told), told["one"]
    Path(told["row"]).write_text(json.dumps(with_kernel(job, method, shape, steps)))


def compiled(job: Job, shape: str) -> Row:
    """The model's own forward pass through torch.compile."""
    from rlhf_nb.fast.support import use_fast
    from rlhf_nb.scoring.head import split_head

    with tempfile.TemporaryDirectory() as folder, use_fast(False):
        trainer = trainer_of(job, "sft", shape, folder, 12)
        split_head(trainer.method.model)[0].compile(dynamic=True, backend="eager" if job.tiny else "inductor")
        try:
            return steps_of(job, trainer, 1 if job.tiny else 4, warm=1 if job.tiny else 3)
        finally:
            trainer.lock.release()


def part_larger(job: Job) -> Iterator[Row]:
    """The same on 1.5B."""
    yield from part_train(job, "1.5B", ("sft",) if job.tiny else ("grpo", "dpo", "sft", "ppo", "reward"))


def against_trl(job: Job, method: str, shape: str) -> Iterator[Row]:
    """Our steps and TRL's in turn, each in a process of its own on the same device."""
    what = f"{method} {shape}, TRL in turn"
    if find_spec("trl") is None:
        yield {"what": what, "reason": "TRL is not installed here (bring its wheel)"}
        return

    def measure() -> Row:
        steps = 1 if job.tiny else 4
        told = job.told | {"method": method, "shape": shape, "steps": steps + 3, "threads": 2}
        sides = {side: (sys.executable, told | {"side": side}) for side in ("ours", "trl")}
        with harness.workers(__file__, sides, 2) as (ours, trl):
            harness.alternate([ours, trl], 1, steps)
            speeds = [statistics.median(s["tokens"] / s["seconds"] for s in w.steps[1:]) for w in (ours, trl)]
            peaks = [max(s["gb"] for s in w.steps) for w in (ours, trl)]
        return {
            "ours, tokens/s": speeds[0],
            "TRL, tokens/s": speeds[1],
            "ratio": speeds[0] / speeds[1],
            "ours, peak GB": peaks[0],
            "TRL, peak GB": peaks[1],
        }

    yield tried(job, what, measure, needs=1 if job.tiny else 25, most=110)


def side(name: str, path: str) -> None:
    """A worker of `against_trl`."""
    told = json.loads(Path(path).read_text(encoding="utf-8"))
    job, gate = Job(told), harness.Gate()
    method, shape, steps = told["method"], told["shape"], told["steps"]
    prompt, answer, rows = job.sizes[method]
    with tempfile.TemporaryDirectory() as folder:
        if name == "ours":
            trainer = trainer_of(job, method, shape, folder, steps)
            trainer.start()
            gate.ready()
            for _ in range(steps):
                event = trainer.train_step()
                wait(job.device)
                gate.step_done(tokens=event["perf/tokens_per_s"] * event["perf/step_s"], gb=peak_gb(job.device))
        else:
            trl_side(job, gate, method, shape, steps, folder)
    os._exit(0)


def trl_side(job: Job, gate: harness.Gate, method: str, shape: str, steps: int, folder: str) -> None:
    """TRL's trainer on the same rows."""
    from datasets import Dataset
    from transformers import TrainerCallback

    prompt, answer, rows = job.sizes[method]
    group, half = (4 if job.tiny else 8), job.device.type == "cuda"
    data = rows_of(method, (prompt, answer, rows), VOCABULARY[shape], steps)
    common: dict[str, Any] = {
        "output_dir": folder, "max_steps": steps, "bf16": half, "use_cpu": not half, "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no",
        "logging_strategy": "no", "disable_tqdm": True, "learning_rate": 1e-6,
    }  # fmt: skip
    each = min(rows, 16)

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            wait(job.device)
            gate.step_done(tokens=tokens, gb=peak_gb(job.device))

    from transformers import AutoModelForCausalLM

    words_of = tokenizer(VOCABULARY[shape])
    model_of(shape, job.device).save_pretrained(
        f"{folder}/base"
    )  # TRL loads its reference from where the policy came from
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/base", dtype=torch.float32).to(job.device)
    trainer: Any
    if method == "dpo":
        from trl import DPOConfig, DPOTrainer

        lens = [[len(row[k].split()) for k in ("prompt", "chosen", "rejected")] for row in data]
        tokens = sum(2 * p + a + b + 2 for p, a, b in lens) / steps
        args = DPOConfig(
            **common, per_device_train_batch_size=each, gradient_accumulation_steps=rows // each, max_length=None
        )
        trainer = DPOTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_list(data),
            processing_class=words_of,
            callbacks=[Turns()],
        )
    else:
        from trl import GRPOConfig, GRPOTrainer

        lens = [[len(row["prompt"].split())] for row in data]
        tokens = rows * (sum(n for [n] in lens) / len(lens) + answer)
        args = GRPOConfig(
            **common, per_device_train_batch_size=each, gradient_accumulation_steps=rows // each, num_generations=group, max_completion_length=answer,
            beta=0.0, generation_kwargs={"min_new_tokens": answer},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model, args=args, train_dataset=Dataset.from_list([{"prompt": r["prompt"].strip()} for r in data]), processing_class=words_of,
            reward_funcs=[score], callbacks=[Turns()],
        )  # fmt: skip
    trainer.train()


# --- 3. decoding ---------------------------------------------------------------------------------------------------------------


def bandwidth(job: Job) -> float:
    """Bytes a second of a large copy on the device, read and written."""
    n = 1 << (22 if job.tiny else 29)
    x = torch.randn(n // 4, device=job.device)
    y = torch.empty_like(x)
    return 2 * n / timed(job, lambda: y.copy_(x), 5)


def decoded(job: Job, model: Any, rows: int, speed: float, graphs: bool = True, fixed: bool | None = None) -> Row:
    """Tokens a second of so many rows, and which part of the speed that reading all weights and keys once a token allows."""
    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.rollout.sampler import sample_tokens
    from rlhf_nb.types import PromptBatch

    prompt, new = (6, 9) if job.tiny else (64, 129)
    r, vocabulary = random.Random(0), model.config.vocab_size
    batch = PromptBatch.from_lists([[r.randrange(2, vocabulary) for _ in range(prompt)] for _ in range(rows)]).to(
        job.device
    )

    def seconds(tokens: int) -> float:
        how = SamplingConfig(max_new_tokens=tokens)
        return timed(job, lambda: sample_tokens(model, batch, how, eos=[], pad=0, seed=0, fixed_shapes=fixed), most=1.0)

    with switched(RLHF_NB_CUDA_GRAPHS="1" if graphs else "0"):
        each = (seconds(new) - seconds(1)) / (new - 1)
    config, kind = model.config, job.device.type
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else next(model.parameters()).dtype
    size = cast.itemsize
    weights = sum(p.numel() for p in model.parameters()) * size
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    keys = 2 * config.num_hidden_layers * heads * (prompt + new / 2) * size * rows
    floor = (weights + keys) / speed
    return {
        "tokens/s": rows / each,
        "ms a token": 1e3 * each,
        "floor, ms": 1e3 * floor,
        "share of the floor's speed": floor / each,
    }


def part_decode(job: Job) -> Iterator[Row]:
    """One model, more and more rows."""
    half = torch.float32 if job.device.type == "cpu" else torch.bfloat16
    model = model_of(job.shape("0.5B"), job.device, half)
    speed = bandwidth(job)
    yield {"what": "a large copy", "GB/s": speed / GB}
    counts = (1, 4) if job.tiny else (1, 8, 64, 256)
    for rows in counts:
        yield tried(job, f"{rows} rows", lambda n=rows: decoded(job, model, n, speed))
    for rows in counts[-2:]:
        yield tried(job, f"{rows} rows, graphs off", lambda n=rows: decoded(job, model, n, speed, False))
        yield tried(
            job, f"{rows} rows, graphs off, shapes free", lambda n=rows: decoded(job, model, n, speed, False, False)
        )
    yield tried(
        job,
        f"{counts[-2]} rows, weights in fp32, as a policy has them that trains",
        lambda: rounding(job, counts[-2], speed),
    )
    yield tried(job, f"{counts[-2]} rows, `generate`", lambda: by_generate(job, model, counts[-2]))
    yield tried(
        job, f"{counts[-2]} rows, vLLM", lambda: by_vllm(job, model, counts[-2]), needs=1 if job.tiny else 45, most=90
    )


def rounding(job: Job, rows: int, speed: float) -> Row:
    """Decoding under autocast: each weight is rounded once a call."""
    half = torch.bfloat16
    with torch.autocast(job.device.type, half):
        return decoded(job, model_of(job.shape("0.5B"), job.device), rows, speed)


def by_generate(job: Job, model: Any, rows: int) -> Row:
    """transformers' own."""
    prompt, new = (6, 9) if job.tiny else (64, 129)
    ids = torch.randint(2, model.config.vocab_size, (rows, prompt), device=job.device)

    def seconds(tokens: int) -> float:
        how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True, "pad_token_id": 0}
        return timed(job, lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **how), least=1, most=0.0)

    each = (seconds(new) - seconds(1)) / (new - 1)
    return {"tokens/s": rows / each, "ms a token": 1e3 * each}


def by_vllm(job: Job, model: Any, rows: int) -> Row:
    """vLLM on the same weights."""
    if find_spec("vllm") is None:
        return {"reason": "vLLM is not installed here"}
    from vllm import LLM, SamplingParams

    prompt, new = (6, 9) if job.tiny else (64, 129)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer(model.config.vocab_size).save_pretrained(folder)
        engine = LLM(folder, dtype="bfloat16", max_model_len=prompt + new, gpu_memory_utilization=0.4)
        asked = [{"prompt_token_ids": torch.randint(2, 1000, (prompt,)).tolist()} for _ in range(rows)]

        def seconds(tokens: int) -> float:
            return timed(
                job,
                lambda: engine.generate(asked, SamplingParams(max_tokens=tokens, ignore_eos=True), use_tqdm=False),
                1,
                0.0,
            )

        each = (seconds(new) - seconds(1)) / (new - 1)
    return {"tokens/s": rows / each, "ms a token": 1e3 * each}


# --- 4. a T4's limits, and students' cards -------------------------------------------------------------------------------------


@contextmanager
def card(job: Job, gigabytes: float) -> Iterator[None]:
    """As on a card of another kind: so many GB, and of SDPA's kernels those that a T4 has."""
    if job.device.type != "cuda":
        yield
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    whole = torch.cuda.get_device_properties(0).total_memory
    forget(job.device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, gigabytes * GB / whole))
    try:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]), switched(RLHF_NB_ATTENTION="efficient"):
            yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


CARDS: dict[str, dict[str, Any]] = {  # what is run under which limit; docs/gpu.md has the same lines
    "PPO 1.5B, LoRA Hydra, 15 GB": {"gb": 15, "method": "ppo", "shape": "1.5B", "sizes": (128, 128, 32), "lora": 16, "critic": "hydra", "token_budget": 1024, "steps": 6},
    "GRPO 0.5B, all weights, 8 × 256 tokens, 15 GB": {"gb": 15, "method": "grpo", "shape": "0.5B", "sizes": (64, 256, 8), "token_budget": 2048, "steps": 6},
    "GRPO 0.5B, all weights, 8 × 256 tokens, 12 GB": {"gb": 12, "method": "grpo", "shape": "0.5B", "sizes": (64, 256, 8), "token_budget": 2048, "steps": 4},
    "GRPO 0.5B, all weights, recomputed, 8 × 256 tokens, 12 GB": {"gb": 12, "method": "grpo", "shape": "0.5B", "sizes": (64, 256, 8), "recompute": True, "token_budget": 2048, "steps": 4},
    "GRPO 0.5B, LoRA, 8 × 256 tokens, 8 GB": {"gb": 8, "method": "grpo", "shape": "0.5B", "sizes": (64, 256, 8), "lora": 16, "token_budget": 2048, "steps": 4},
    "PPO 1.5B, LoRA Hydra, recomputed, 8 GB": {"gb": 8, "method": "ppo", "shape": "1.5B", "sizes": (128, 128, 32), "lora": 16, "critic": "hydra", "token_budget": 1024, "recompute": True, "steps": 3},
    "GRPO 0.5B, LoRA, recomputed, 8 × 256 tokens, 6 GB": {"gb": 6, "method": "grpo", "shape": "0.5B", "sizes": (64, 256, 8), "lora": 16, "token_budget": 1024, "recompute": True, "steps": 4},
}  # fmt: skip


def short(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """A reward for length: −|20 − characters|, as in the example that people try on a free T4."""
    return [-abs(20.0 - len(text)) for text in completions]


def on_card(job: Job, gb: float, method: str, shape: str, steps: int, sizes: tuple[int, int, int], **how: Any) -> Row:
    """A run in fp16 with loss scaling under a limit of memory."""
    if job.tiny:
        sizes, shape, steps = (6, 8, 8), "tiny", 2
        how |= {"token_budget": 128}
    how |= {"precision": "fp32" if job.device.type == "cpu" else "fp16"}
    if method == "grpo":
        how |= {"num_generations": 8, "mini_batch_size": sizes[2], "rollout_batch_size": sizes[2]}
    with card(job, gb):
        found = run_of(job, method, shape, steps - 1, reward=short, sizes=sizes, **how)
    return {"limit GB": gb, "steps": steps} | found | {"fits": found["peak GB"] <= gb}


def qlora(job: Job) -> Row:
    """SFT of adapters on a backbone in 4 bits, through the command's own loading."""
    if find_spec("bitsandbytes") is None:
        return {"reason": "bitsandbytes is not installed here (bring its wheel)"}
    if job.device.type != "cuda":
        return {"reason": "4 bits need CUDA, which is not installed here"}
    from rlhf_nb.train.sft import SFTConfig, SFTTrainer

    with tempfile.TemporaryDirectory() as folder, card(job, 15):
        model = model_of("1.5B", job.device, torch.float16)
        model.save_pretrained(f"{folder}/base")
        tokenizer(VOCABULARY["1.5B"]).save_pretrained(f"{folder}/base")
        del model
        forget(job.device)
        config = SFTConfig(
            output_dir=f"{folder}/run", steps=6, epochs=None, mini_batch_size=8, precision="fp16", device="cuda", console=False, save_every=None,
            model={"name_or_path": f"{folder}/base", "lora": {"r": 16, "quantize_4bit": True}}, data={"max_length": 512, "dedup": False}, token_budget=1024,
        )  # fmt: skip
        trainer = SFTTrainer(config, rows=rows_of("sft", (0, 500, 8), VOCABULARY["1.5B"], 6), eval_rows=[])
        try:
            return {"limit GB": 15} | steps_of(job, trainer, 4)
        finally:
            trainer.lock.release()


def part_t4(job: Job) -> Iterator[Row]:
    """Cards that people have."""
    names = list(CARDS)[:2] if job.tiny else list(CARDS)
    for name in names:
        yield tried(job, name, lambda n=name: on_card(job, **CARDS[n]), most=45)
    yield tried(job, "QLoRA: SFT 1.5B in 4 bits, 15 GB", lambda: qlora(job))


# --- 5. memory -----------------------------------------------------------------------------------------------------------------


def heads_loss(job: Job, whose: str) -> Row:
    """Forward and backward pass from states to the mean loss."""
    import torch.nn.functional as F

    from rlhf_nb.scoring.head import head_logps

    shape, n = job.shape("0.5B"), 64 if job.tiny else 8192
    hidden, vocabulary = SHAPES[shape]["hidden_size"], VOCABULARY[shape]
    half = torch.float32 if job.device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    w = torch.randn(vocabulary, hidden, device=job.device, dtype=half).mul_(0.02).requires_grad_(True)
    x = torch.randn(n, hidden, device=job.device, dtype=half).requires_grad_(True)
    targets = torch.randint(0, vocabulary, (n,), device=job.device)
    if whose == "Liger":
        if find_spec("liger_kernel") is None or job.device.type != "cuda":
            return {
                "reason": "Liger is not installed here" + ("" if job.device.type == "cuda" else ", or there is no GPU")
            }
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()

    def work() -> torch.Tensor:
        if whose == "ours":
            loss = -head_logps(x, w, None, targets)[0].mean()
        elif whose == "Liger":
            loss = fused(w, x, targets)
        else:
            loss = F.cross_entropy(F.linear(x, w).float(), targets)
        torch.autograd.backward(loss)
        w.grad = x.grad = None
        return loss.detach()

    seconds = timed(job, work, most=1.0)
    forget(job.device)
    before = peak_gb(job.device)
    loss = float(work())
    return {"ms": 1e3 * seconds, "peak GB above weights": peak_gb(job.device) - before, "loss": loss}


def part_memory(job: Job) -> Iterator[Row]:
    """What costs memory, and what saves it."""
    from rlhf_nb.core import growing_segments
    from rlhf_nb.scoring import head

    growing_segments()
    if job.device.type == "cuda":
        held = torch.ones(1 << 20, device=job.device)
        seen = any(s.get("is_expandable") for s in torch.cuda.memory_snapshot())
        yield {"what": "memory in segments that grow", "in use": seen, "numbers": float(held.sum())}

    shape = job.shape("0.5B")
    budgets = (32, 64) if job.tiny else (2048, 4096, 8192, 16_384)
    for again in (False, True):
        for budget in budgets if not again else budgets[-1:]:
            words_ = f"sft {shape}, forwards of {budget:,} tokens{', recomputed' if again else ''}"
            yield tried(
                job,
                words_,
                lambda b=budget, a=again: run_of(job, "sft", shape, 1 if job.tiny else 2, token_budget=b, recompute=a),
            )
    kind = job.device.type
    before = head.CHUNK_LOGITS[kind]
    for power in (10, 12) if job.tiny else (25, 27):
        head.CHUNK_LOGITS[kind] = 1 << power
        yield tried(
            job, f"sft {shape}, 2^{power} logits in a chunk", lambda: run_of(job, "sft", shape, 1 if job.tiny else 2)
        )
    head.CHUNK_LOGITS[kind] = before

    for whose in ("ours", "PyTorch, whole logits", "Liger"):
        yield tried(job, f"head and loss of one forward, {whose}", lambda w=whose: heads_loss(job, w))

    def on_host() -> Row:
        with torch.autograd.graph.save_on_cpu(pin_memory=job.device.type == "cuda"):
            return run_of(job, "sft", shape, 1)

    yield tried(job, f"sft {shape}, activations on the host", on_host)


# --- 6. kill and resume --------------------------------------------------------------------------------------------------------


def resumed(job: Job, method: str, deterministic: bool) -> Row:
    """A run of four steps, and one that is killed after two and resumed, each in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        told = json.dumps(job.told | {"method": method, "deterministic": deterministic})

        def go(name: str, steps: int, resume: bool) -> None:
            words_ = ["--run", told, f"{folder}/{name}", str(steps), str(int(resume))]
            process, log = start(job, words_, Path(f"{folder}/{name}.log"), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
            code = ended(process, job.left - 2)
            if code not in (0, -signal.SIGKILL):
                raise RuntimeError(log.read_text(errors="replace").strip()[-400:])

        go("straight", 4, False)
        go("killed", -2, False)
        go("killed", 4, True)
        a, b = (torch.load(f"{folder}/{name}/weights.pt", weights_only=True) for name in ("straight", "killed"))
        gap = max(float((a[k].double() - b[k].double()).abs().max()) for k in a)
        return {"same bits": all(torch.equal(a[k], b[k]) for k in a), "largest gap of a weight": gap}


def run_and_maybe_die(told: dict[str, Any], folder: str, steps: int, resume: bool) -> None:
    """A process of `resumed`; negative steps: killed after so many, with a checkpoint behind it."""
    job = Job(told)
    if told["deterministic"]:
        torch.use_deterministic_algorithms(True, warn_only=False)
    sizes = SMALL[told["method"]]
    trainer = trainer_of(
        job,
        told["method"],
        "tiny",
        folder,
        4,
        sizes=sizes,
        token_budget=64,
        save_every=1,
        async_save=False,
        **({"num_generations": 4} if told["method"] == "grpo" else {}),
    )
    if steps < 0:
        from rlhf_nb.run.callbacks import Callback

        class Killer(Callback):
            def on_save(self, run: Any, folder: Path) -> None:
                run.writer.wait()
                if run.step == -steps:
                    os.kill(os.getpid(), signal.SIGKILL)

        trainer.observers.active.append(Killer())
    trainer.fit(resume=resume)
    weights = {n: p.detach().cpu() for n, p in trainer.method.module.named_parameters() if p.requires_grad}
    torch.save(weights, f"{folder}/weights.pt")


def part_resume(job: Job) -> Iterator[Row]:
    """Bits after a kill."""
    for method in ("sft",) if job.tiny else ("sft", "grpo"):
        words_ = f"{method}, killed and resumed, deterministic algorithms"
        yield tried(job, words_, lambda m=method: resumed(job, m, True))


# --- 7. several ranks on one device --------------------------------------------------------------------------------------------


def ranks_agree(job: Job, backend: str, world: int) -> Row:
    """Ranks that share one device exchange the gradient of a scored batch; it must be one process's."""
    with tempfile.TemporaryDirectory() as folder:
        told = json.dumps(job.told | {"backend": backend})
        ranks = [
            start(
                job, ["--rank", told, folder, str(r), str(world)], Path(f"{folder}/log-{r}"), {"OMP_NUM_THREADS": "1"}
            )[0]
            for r in range(world)
        ]
        until = time.monotonic() + max(5.0, min(30.0, job.left - 2))
        codes = [ended(r, until - time.monotonic()) for r in ranks]
        if None in codes:
            return {"reason": f"{backend}: the ranks did not meet within their time"}
        if any(code != 0 for code in codes):
            said = [x for r in range(world) for x in Path(f"{folder}/log-{r}").read_text(errors="replace").splitlines()]
            lines = [x for x in said if "Error" in x or "error" in x] or ["ended early"]
            return {"reason": f"{backend}: {lines[-1].strip()[:300]}"}
        return {"ranks": world, "gradient off by": json.loads(Path(f"{folder}/gap.json").read_text())}


def rank_main(told: dict[str, Any], folder: str, rank: int, world: int) -> None:
    """One rank."""
    import torch.distributed as dist

    from rlhf_nb.scoring.scores import completion_logps

    job = Job(told)
    dist.init_process_group(told["backend"], init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    model = small_model("qwen2").float().to(job.device)
    c = some_answers(job.device)
    torch.autograd.backward(completion_logps(model, c, token_budget=512).logps.sum())
    whole = gradient(model)
    mine = c[list(range(rank * len(c) // world, (rank + 1) * len(c) // world))]
    torch.autograd.backward(completion_logps(model, mine, token_budget=512).logps.sum())
    for p in model.parameters():
        dist.all_reduce(p.grad)
    gap = float((gradient(model) - whole).norm() / whole.norm())
    if rank == 0:
        Path(f"{folder}/gap.json").write_text(json.dumps(gap))
    dist.barrier()
    dist.destroy_process_group()


def part_ranks(job: Job) -> Iterator[Row]:
    """What several ranks can do on one device."""
    one = job.device.type == "cpu" or torch.cuda.device_count() == 1  # NCCL refuses two ranks on a card
    for backend in ("gloo",) if one else ("gloo", "nccl"):
        yield tried(job, f"2 ranks, {backend}", lambda b=backend: ranks_agree(job, b, 2))


# --- one process ---------------------------------------------------------------------------------------------------------------

ALL: dict[str, Callable[[Job], Iterator[Row]]] = {
    "correct": part_correct, "train": part_train, "peers": part_peers, "decode": part_decode, "switches": part_switches, "t4": part_t4, "larger": part_larger, "memory": part_memory, "resume": part_resume,
    "ranks": part_ranks,
}  # fmt: skip


def main(words_: list[str]) -> None:
    """A part, a worker of a comparison, or a process that is killed."""
    warnings.filterwarnings("ignore")
    if words_[0] == "--worker":
        side(words_[1], words_[2])
        return
    told = json.loads(words_[1 if words_[0].startswith("--") else 0])
    if told["device"] == "cpu":
        torch.set_num_threads(1)
    if words_[0] == "--run":
        run_and_maybe_die(told, words_[2], int(words_[3]), words_[4] == "1")
        return
    if words_[0] == "--tests":
        numeric_tests(told)
        return
    if words_[0] == "--one":
        one_run(told)
        return
    if words_[0] == "--rank":
        rank_main(told, words_[2], int(words_[3]), int(words_[4]))
        return
    job = Job(told)
    with open(told["lines"], "w", encoding="utf-8") as lines:
        for row in ALL[told["part"]](job):
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
