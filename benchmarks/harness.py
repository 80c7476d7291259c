"""Two trainers side by side, in processes and environments of their own, taking steps in turn; speeds, memory and a JSON file at the end.

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

import peers

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


Check = Callable[["Worker", "Worker"], object]


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


def show(ours: Worker, theirs: Worker, warmup: int, unit: str, whole: bool = False) -> dict[str, float]:
    """Print speeds, their ratio (of medians or over the whole run, and the spread over pairs of steps) and memory.

    Args:
        ours: after `alternate`.
        theirs: after `alternate`.
        warmup: steps left out.
        unit: of the speed, and the key in a step's report that says how many it did, as "pairs".
        whole: steps are equally many of these, and what counts is the time of all.
    """

    def speeds(worker: Worker, clock: str) -> list[float]:
        return [s[unit] / s[clock] for s in worker.steps[warmup:]]

    middle = statistics.harmonic_mean if whole else statistics.median
    a, b = speeds(ours, "seconds"), speeds(theirs, "seconds")
    ratios = sorted(x / y for x, y in zip(a, b))
    ratio, cpu = middle(a) / middle(b), middle(speeds(ours, "cpu")) / middle(speeds(theirs, "cpu"))
    peaks = [max(s["peak"] for s in w.steps) for w in (ours, theirs)]
    used = [p - w.info["memory"] for p, w in zip(peaks, (ours, theirs))]
    spent = [(statistics.mean if whole else middle)(s["cpu"] for s in w.steps[warmup:]) for w in (ours, theirs)]
    for worker, speed in ((ours, a), (theirs, b)):
        print(f"  {worker.name:28s} {middle(speed):10.2f} {unit}/s   ({min(speed):.2f} to {max(speed):.2f})")
    print(
        f"  ratio of {'all steps' if whole else 'medians'} {ratio:.2f}x  (steps: {ratios[0]:.2f} to {ratios[-1]:.2f}; by CPU time {cpu:.2f}x)"
    )
    print(f"  CPU seconds a step {spent[0]:.2f} / {spent[1]:.2f}")
    print(
        f"  peak memory {peaks[0]:.0f} / {peaks[1]:.0f} MiB = {peaks[0] / peaks[1]:.2f}; "
        f"above what was there before training {used[0]:.0f} / {used[1]:.0f} MiB = {used[0] / max(used[1], 1):.2f}",
        flush=True,
    )
    return {"ratio": ratio, "low": ratios[0], "high": ratios[-1], "cpu": cpu, "memory": peaks[0] / peaks[1]}


def compare(
    script: str, title: str, job: dict[str, Any], args: argparse.Namespace, unit: str, check: Check | None = None,
    peer: str = "trl-1.16", theirs: dict[str, Any] | None = None,
) -> tuple[Worker, Worker]:  # fmt: skip
    """Both sides of one comparison, steps in turn: what must be the same is checked, speeds are shown, numbers are kept in `--json`.

    Args:
        script: the benchmark's file.
        title: of the comparison.
        job: what both sides are told; "output" is the beginning of a folder's name.
        args: of the command line: steps, warmup, threads, json.
        unit: of the speed.
        check: is given both workers after their steps, and ends the program where they don't compute the same thing.
        peer: the other side's environment; "ours" is this one.
        theirs: what the other side is told differently.
    """
    other = "ours" if peer == "ours" else "trl"
    python = sys.executable if peer == "ours" else peers.ensure(peer)
    base = {"threads": args.threads} | job
    sides: dict[str, tuple[Path | str, dict[str, Any]]] = {
        "theirs": (
            python,
            base | {"side": other, "output": f"{job['output']}-theirs"} | (theirs or {}),
        ),  # first: ours may read what it writes
        "ours": (sys.executable, base | {"side": "ours", "output": f"{job['output']}-ours"}),
    }
    print(
        f"{title}, {args.threads} threads, {args.steps} steps each, in turn, load {os.getloadavg()[0]:.1f}", flush=True
    )
    with workers(script, sides, args.threads) as (b, a):
        alternate([a, b], args.warmup, args.steps)
    if check is not None:
        check(a, b)
    found = show(a, b, args.warmup, unit, bool(job.get("run")))
    steps = {"ours": a.steps[args.warmup :], "theirs": b.steps[args.warmup :]}
    keep(args.json, title, args.threads, unit, found | steps)
    return a, b


def keep(path: Path | None, title: str, threads: int, unit: str, found: dict[str, Any]) -> None:
    """Add a line with numbers to a file, if there is to be one."""
    if path is None:
        return
    about = {
        "title": title,
        "threads": threads,
        "date": time.strftime("%Y-%m-%d"),
        "processor": processor(),
        "unit": unit,
    }
    with path.open("a", encoding="utf-8") as f:
        f.write(json.dumps(about | found) + "\n")


def processor() -> str:
    """What a number belongs to: the widest instructions that this processor has for products."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text(encoding="utf-8").split() if info.exists() else []
    return next((name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags), "unknown")


def arguments(doc: str | None, steps: int, threads: int = 2, ways: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The options that all comparisons have; `--worker` is for the processes they start.

    Args:
        doc: the script's own.
        steps: measured, unless told otherwise.
        threads: of each side, unless told otherwise.
        ways: in which the other side can run.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help="measured steps of each side")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--threads", type=int, default=threads)
    parser.add_argument("--quick", action="store_true", help="about two minutes: five steps, two ways")
    parser.add_argument("--token-budget", type=int, help="ours: tokens in a forward pass")
    parser.add_argument("--json", type=Path, help="file to which numbers are added, one line a comparison")
    parser.add_argument("--data", type=Path, default=HH, help="HH-RLHF pairs, gzipped JSON lines")
    parser.add_argument("--worker", nargs=2, metavar=("SIDE", "JOB"), help=argparse.SUPPRESS)
    if ways:
        parser.add_argument(
            "--against", nargs="+", choices=ways, default=None, help="ways of the other side (default: all)"
        )
    return parser


def set_threads(job: dict[str, Any]) -> None:
    """PyTorch's threads, in a worker."""
    import torch

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)


def worked(args: argparse.Namespace, ours: Callable[..., object], trl: Callable[..., object]) -> bool:
    """Whether this process is a worker; then its side's job is done when this returns. Otherwise `--quick` is applied.

    Args:
        args: from `arguments`.
        ours: does a job with rlhf_nb.
        trl: does it with TRL.
    """
    if args.quick:
        args.steps = min(args.steps, 5)
    if args.worker:
        job = json.loads(Path(args.worker[1]).read_text(encoding="utf-8"))
        set_threads(job)
        (ours if args.worker[0] == "ours" else trl)(job)
    return bool(args.worker)


# --- what both sides of a training comparison have in common ---------------------------------------------------------------


def settings(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Settings of our trainers."""
    return {
        "output_dir": job["output"], "steps": job["steps"], "epochs": None, "mini_batch_size": job["batch"], "token_budget": job["token_budget"],
        "optimizer": {"lr": job["lr"], "schedule": "constant", "warmup_steps": 0}, "precision": job.get("precision", "fp32"),
        "device": "cpu", "console": False, **more,
    }  # fmt: skip


def load(job: dict[str, Any]) -> tuple[Any, Any]:
    """Our tokenizer and model, in fp32 and without dropout."""
    from rlhf_nb.config import ModelConfig
    from rlhf_nb.core import decide_precision
    from rlhf_nb.models.load import disable_dropout, load_causal_lm, load_tokenizer

    where = ModelConfig(name_or_path=job["model"])
    tokenizer = load_tokenizer(where)
    return tokenizer, disable_dropout(load_causal_lm(where, decide_precision("cpu", "fp32"), tokenizer=tokenizer))


def touch(*models: Any) -> None:
    """Read all weights once, so that those mapped from a file are in memory before memory is measured."""
    for model in filter(None, models):
        for p in model.parameters():
            float(p.detach().sum())


def fit(
    method: Any, source: Any, config: Any, report: Callable[[Any, dict[str, Any]], dict[str, Any]], *models: Any
) -> None:
    """Train with rlhf_nb, a step at each turn.

    Args:
        method: of training.
        source: of rows.
        config: of the run.
        report: makes of a run and its event what a step says.
        models: read once before memory is measured.
    """
    from rlhf_nb.run.callbacks import Callback
    from rlhf_nb.run.loop import Trainer

    gate = Gate()

    class Turns(Callback):
        def on_start(self, run: Any) -> None:
            touch(*models)
            gate.ready()

        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            gate.step_done(**report(run, event))

    Trainer(method, source, config, callbacks=[Turns()]).fit()


def trl_settings(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Settings of TRL's trainers: nothing but training."""
    return {
        "output_dir": job["output"], "max_steps": job["steps"], "per_device_train_batch_size": job["batch"], "learning_rate": job["lr"],
        "lr_scheduler_type": "constant", "bf16": job.get("precision") == "bf16", "use_cpu": True, "gradient_checkpointing": False,
        "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "dataloader_num_workers": 0, **more,
    }  # fmt: skip


def recorded(
    trainer: Any, parts: list[dict[str, float]], read: dict[str, str], prepare: Callable[[Any], Any] | None = None
) -> Any:
    """TRL's trainer, which keeps the loss of each forward pass and some of its metrics.

    Args:
        trainer: TRL's class.
        parts: gets them.
        read: our name to the metric's.
        prepare: what becomes of tokenized rows; None: what TRL does.
    """

    class Recorded(trainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return prepare(dataset) if prepare is not None else super()._prepare_dataset(dataset, *args, **kwargs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            logged = self._metrics["train"]
            parts.append({"loss": float(loss), **{k: logged[v][-1] for k, v in read.items()}})
            return loss

    return Recorded


def turns(report: Callable[[Any], dict[str, Any]], begin: Callable[[], None] | None = None) -> Any:
    """A callback for TRL's trainers that takes a step at each turn.

    Args:
        report: makes of the trainer's state what a step says.
        begin: called before memory is measured.
    """
    from transformers import TrainerCallback

    gate = Gate()

    class Turns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if begin is not None:
                begin()
            gate.ready()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.step_done(**report(state))

    return Turns()


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
