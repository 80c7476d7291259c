"""Two trainers side by side: each in a process and environment of its own, taking steps in turn.

A worker calls `Gate.step_done` after each training step: that stops its clock, reports the step, and waits until the driver
says "go". So at any moment one side computes and the other sleeps, both meet the same load of the machine, and start-up,
tokenisation and waiting are never timed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
HH = ROOT.parent / "shared" / "data" / "hh_rlhf_harmless.jsonl.gz"
MIB = 1 << 20
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # so that a checkout works without being installed


def memory(peak: bool = True) -> float:
    """Resident memory of this process in MiB, at its highest or now."""
    status = Path("/proc/self/status")
    if not status.exists():
        import resource

        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / MIB
    key = "VmHWM:" if peak else "VmRSS:"
    return next(int(x.split()[1]) for x in status.read_text().splitlines() if x.startswith(key)) / 1024


class Gate:
    """A worker's side: reports steps on the original stdout, and waits for its turn on stdin."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever a library prints goes to the log
        self.started = self.cpu = 0.0

    def _turn(self, record: dict[str, Any]) -> None:
        self.out.write(json.dumps(record) + "\n")
        if sys.stdin.readline().strip() != "go":
            os._exit(0)
        self.started, self.cpu = time.perf_counter(), time.process_time()

    def ready(self, **fields: Any) -> None:
        """Before the first step."""
        self._turn({"ready": True, "memory": memory(peak=False), **fields})

    def step_done(self, **fields: Any) -> None:
        """After a step."""
        seconds, cpu = time.perf_counter() - self.started, time.process_time() - self.cpu
        self._turn({"seconds": seconds, "cpu": cpu, "peak": memory(), **fields})


class Forked:
    """A process that goes on from this one's imports, with the few things of `subprocess.Popen` that are needed; for small jobs on a CPU.

    Args:
        work: what it does; it never returns here.
        log: where its output goes.
    """

    def __init__(self, work: Callable[[], object], log: Path) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setsid()
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1), os.dup2(out, 2)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 3600.0) -> int:
        """Until it has ended."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.02)
        return int(self.returncode or 0)

    def kill(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)


class Worker:
    """The driver's side of a worker."""

    def __init__(
        self, name: str, python: Path | str, script: str, job: dict[str, Any], folder: Path, threads: int
    ) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        path = folder / f"{name}.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        env = dict(
            os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), TOKENIZERS_PARALLELISM="false"
        )
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(HERE), str(ROOT)]
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
        env |= {"TRL_EXPERIMENTAL_SILENCE": "1"} | ({} if job.get("device") == "cuda" else {"CUDA_VISIBLE_DEVICES": ""})
        env.setdefault(
            "OMP_WAIT_POLICY", "passive"
        )  # threads that spin while they wait lose far more when something else runs
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), script, "--worker", job["side"], str(path)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=folder,
            )  # fmt: skip
        self.info: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []

    def read(self) -> dict[str, Any]:
        """The next report."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early:\n{self.log.read_text()[-4000:]}")
        record: dict[str, Any] = json.loads(line)
        return record

    def step(self) -> dict[str, Any]:
        """Let it take one step."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.steps.append(self.read())
        return self.steps[-1]

    def stop(self) -> None:
        """End it; it waits at its gate."""
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        self.process.wait(timeout=60)


@contextlib.contextmanager
def workers(script: str, jobs: dict[str, tuple[Path | str, dict[str, Any]]], threads: int) -> Iterator[list[Worker]]:
    """Start workers one after the other, each ready at its gate; end them afterwards.

    Args:
        script: the benchmark's file.
        jobs: name → (interpreter, job); `job["side"]` says which worker function runs.
        threads: of each.
    """
    started: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, (python, job) in jobs.items():
                worker = Worker(name, python, script, job, Path(folder), threads)
                started.append(worker)
                worker.info = worker.read()
            yield started
        except BaseException:  # who is in the middle of a step isn't waited for
            for worker in started:
                worker.process.kill()
            raise
        finally:
            for worker in started:
                worker.stop()


def alternate(sides: Sequence[Worker], warmup: int, steps: int) -> None:
    """Steps in turn, who begins changing each time; the first `warmup` of them are dropped from the times, not from `steps`."""
    for i in range(warmup + steps):
        for worker in sides if i % 2 == 0 else reversed(sides):
            worker.step()


def same_losses(a: Worker, b: Worker, steps: int, tolerance: float, what: str = "loss") -> float:
    """The largest relative difference of the first losses.

    Raises:
        SystemExit: it is above the tolerance, so the two sides don't compute the same thing.
    """
    pairs = [(x[what], y[what]) for x, y in zip(a.steps[:steps], b.steps[:steps])]
    worst = max(abs(x - y) / max(abs(x), abs(y), 1e-12) for x, y in pairs)
    shown = "  ".join(f"{x:.6f}/{y:.6f}" for x, y in pairs[:3])
    print(f"  first losses, {a.name}/{b.name}: {shown}  (largest relative difference of {len(pairs)}: {worst:.1e})")
    if not worst <= tolerance:
        raise SystemExit(
            f"{a.name} and {b.name} don't compute the same thing: losses differ by {worst:.1e} > {tolerance:.0e}"
        )
    return worst


def show(ours: Worker, theirs: Worker, warmup: int, unit: str, count: str) -> dict[str, float]:
    """Print speeds, their ratio (of medians, and the spread over pairs of steps) and memory.

    Args:
        ours: after `alternate`.
        theirs: after `alternate`.
        warmup: steps left out.
        unit: of the speed, as "pairs".
        count: the key in a step's report that says how many units it did.
    """

    def speeds(worker: Worker, clock: str) -> list[float]:
        return [s[count] / s[clock] for s in worker.steps[warmup:]]

    a, b = speeds(ours, "seconds"), speeds(theirs, "seconds")
    ratios = sorted(x / y for x, y in zip(a, b))
    ratio = statistics.median(a) / statistics.median(b)
    cpu = statistics.median(speeds(ours, "cpu")) / statistics.median(speeds(theirs, "cpu"))
    peaks = [max(s["peak"] for s in w.steps) for w in (ours, theirs)]
    used = [p - w.info["memory"] for p, w in zip(peaks, (ours, theirs))]
    for worker, speed in ((ours, a), (theirs, b)):
        print(f"  {worker.name:28s} {statistics.median(speed):10.2f} {unit}/s   ({min(speed):.2f} to {max(speed):.2f})")
    print(f"  ratio of medians {ratio:.2f}x  (steps: {ratios[0]:.2f} to {ratios[-1]:.2f}; by CPU time {cpu:.2f}x)")
    seconds = [statistics.median(s["cpu"] for s in w.steps[warmup:]) for w in (ours, theirs)]
    print(f"  CPU seconds a step (medians) {seconds[0]:.2f} / {seconds[1]:.2f}")
    print(
        f"  peak memory {peaks[0]:.0f} / {peaks[1]:.0f} MiB = {peaks[0] / peaks[1]:.2f}; "
        f"above what was there before training {used[0]:.0f} / {used[1]:.0f} MiB = {used[0] / max(used[1], 1):.2f}"
    )
    return {"ratio": ratio, "low": ratios[0], "high": ratios[-1], "cpu": cpu, "memory": peaks[0] / peaks[1]}


def arguments(doc: str | None, **defaults: int) -> argparse.ArgumentParser:
    """The options that all comparisons have; `--worker` is for the processes they start."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=defaults["steps"], help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=defaults.get("threads", 2))
    parser.add_argument("--quick", action="store_true", help="about two minutes")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "JOB"), help=argparse.SUPPRESS)
    return parser


def set_threads(job: dict[str, Any]) -> None:
    """PyTorch's threads, in a worker."""
    import torch

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)


def worked(args: argparse.Namespace, ours: Callable[..., object], trl: Callable[..., object]) -> bool:
    """Whether this process is a worker; then its side's job is done when this returns.

    Args:
        args: from `arguments`.
        ours: does a job with rlhf_nb.
        trl: does it with TRL.
    """
    if args.worker:
        job = json.loads(Path(args.worker[1]).read_text(encoding="utf-8"))
        set_threads(job)
        (ours if args.worker[0] == "ours" else trl)(job)
    return bool(args.worker)


# --- shared by the benchmarks on HH-RLHF -----------------------------------------------------------------------------------


def hh_tokenizer(texts: Sequence[str], vocabulary: int = 8192) -> Any:
    """A byte-level BPE learnt from the texts, with pad (0) and end-of-text (1) apart."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer, tok.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=["<pad>", "<eos>"], show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<pad>", eos_token="<eos>")


def hh_pairs(path: Path) -> list[dict[str, str]]:
    """Pairs as prompt (up to and with the last assistant mark), chosen and rejected.

    Raises:
        SystemExit: the file isn't there.
    """
    import gzip

    if not path.exists():
        raise SystemExit(
            f"skipped: {os.path.relpath(path)} isn't there (HH-RLHF pairs as gzipped JSON lines; say where with --data)"
        )
    mark, out = "\n\nAssistant:", []
    with gzip.open(path, "rt", encoding="utf-8") as f:
        for row in map(json.loads, f):
            cut = row["chosen"].rfind(mark) + len(mark)
            chosen, rejected = row["chosen"][cut:], row["rejected"][cut:]
            if (
                row["rejected"][:cut] == row["chosen"][:cut]
                and chosen.strip()
                and rejected.strip()
                and chosen != rejected
            ):
                out.append({"prompt": row["chosen"][:cut], "chosen": chosen, "rejected": rejected})
    return out


def qwen2(tokenizer: Any, hidden: int = 384, layers: int = 6) -> Any:
    """A Qwen2 of about 12M parameters with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def smollm2() -> tuple[Any, Any]:
    """Tokenizer and model of SmolLM2-135M-Instruct in fp32, as `rlhf-nb get smollm2` left them."""
    from rlhf_nb.config import ModelConfig
    from rlhf_nb.core import decide_precision
    from rlhf_nb.models.load import load_causal_lm, load_tokenizer

    where = ModelConfig(name_or_path="smollm2")
    tokenizer = load_tokenizer(where)
    return tokenizer, load_causal_lm(where, decide_precision("cpu", "fp32"), tokenizer=tokenizer)


def grouped(lengths: Sequence[int], batch: int, mega: int = 50) -> list[int]:
    """Row numbers such that a batch holds rows of similar length, as transformers' length-grouped sampler orders them."""
    out: list[int] = []
    for start in range(0, len(lengths), mega * batch):
        part = range(start, min(start + mega * batch, len(lengths)))
        out += sorted(part, key=lambda i: -lengths[i])
    return out
