"""Everything that must be known of a GPU, in one call: correctness, speed, decoding, a T4's limits, memory, resuming, several ranks.

    python benchmarks/gpu.py --out FOLDER [--minutes 9] [--only correct train ...] [--wheels FOLDER] [--model FOLDER]
    python benchmarks/gpu.py --luggage FOLDER     # beforehand, where there is a network: what that machine will lack
    python benchmarks/gpu.py --out FOLDER --tiny  # the same code on a CPU with tiny shapes (tests/test_gpu_script.py)

Needs a checkout, torch, transformers, peft and accelerate; no network. `--wheels` names a folder of wheels that are unpacked for
this call where the machine lacks the package. Weights are random, of real shapes; `--model` names a real model's folder, which
is used where tokens matter. Each part is a process of its own with a limit of time, so that none can hang the others; an
out-of-memory ends one measurement, not its part. What was measured stands in FOLDER/results.json, some seconds later at most, and as
tables for docs/results.md in FOLDER/table.md, bars first; FOLDER/log.txt has what the parts printed. There are no other files.

    correct  log-probs, gradients, sampler, trees against transformers in float64; host syncs a step; tests of numerics on the device
    train    SFT, DPO, GRPO, PPO, reward model on a 0.5B shape: tokens/s, MFU, peak and predicted peak; fast paths off
    peers    DPO and GRPO beside TRL on the same rows, in turn
    decode   tokens/s of 1, 8, 64, 256 rows against the floor of the memory's bandwidth; recorded graphs off; a draft; `generate`; vLLM
    switches attention with and without padding, by each kernel; graphs, pinned memory, segments that grow; compiled
    t4       15 GB at most, fp16 with loss scaling, no bf16, no FlashAttention: PPO 1.5B, QLoRA, GRPO 0.5B; and 12, 8 and 6 GB
    larger   as `train`, on a 1.5B shape
    memory   layers recomputed, tokens of a forward, logits in a chunk, activations on the host
    resume   a run killed and resumed: the same bits, where the device's algorithms are deterministic
    ranks    several ranks on one device
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import harness

PARTS = {  # in order of their worth, with the seconds that each may take; few need them all
    "correct": 80, "train": 45, "peers": 150, "decode": 50, "switches": 45, "t4": 75, "larger": 40, "memory": 25, "resume": 45, "ranks": 15,
}  # fmt: skip
LUGGAGE_MB = 40  # with a checkout of some 20 MB
LOG_BYTES = 1 << 19  # of each part's output that is kept
CUDA_LIBRARY = "cuda130"  # of bitsandbytes' libraries the one that is brought
WHEELS = (  # what a machine with torch, transformers, peft and accelerate may lack; the last ones are for comparisons
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typer", "rich", "pyyaml", "datasets", "dill", "multiprocess", "trl", "liger-kernel",
    "bitsandbytes",
)  # fmt: skip
LEAST = 12.0  # seconds without which a part isn't begun
EVERY = 5.0  # seconds between two savings of what parts under way have found


# --- the driver ----------------------------------------------------------------------------------------------------------------


def unpack(wheels: Path, into: Path) -> list[str]:
    """Unpack the wheels of packages that this interpreter lacks; returns their names."""
    found = []
    for wheel in sorted(wheels.glob("*.whl")):
        name = wheel.name.split("-")[0].replace("_", "-")
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(into)
            found.append(name)
    return found


def end(process: Any) -> None:
    """End a part and whatever it has started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue  # the second time: it hangs in the driver, and nobody waits for that


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


class Part:
    """One part at work.

    Args:
        name: of PARTS.
        job: what all parts are told.
        out: where its lines and its log go.
        limit: seconds that it may take.
    """

    def __init__(self, name: str, job: dict[str, Any], out: Path, limit: float) -> None:
        self.name, self.limit, self.begun = name, limit, time.monotonic()
        self.lines, self.log = out / f"{name}.jsonl", out / f"{name}.log"
        self.lines.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        told = json.dumps(job | {"part": name, "seconds": limit * 0.92, "lines": str(self.lines.resolve())})
        env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(harness.HERE), str(harness.ROOT), os.environ.get("PYTHONPATH"), job["site"]])
        )
        if job["device"] == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        self.process: Any = None
        if job["tiny"]:  # most of a tiny part's time would go into imports

            def work() -> None:
                os.environ.update(env)
                sys.path.append(job["site"])
                import gpu_parts

                gpu_parts.main([told])

            self.process = harness.Forked(work, self.log)
            return
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(harness.HERE / "gpu_parts.py"), told], stdout=log, stderr=subprocess.STDOUT, env=env,
                start_new_session=True,
            )  # fmt: skip

    def done(self) -> bool:
        """Whether it has ended, or must."""
        if self.process.poll() is None and time.monotonic() - self.begun < self.limit:
            return False
        late = self.process.poll() is None
        end(self.process)
        self.reason = f"ended after {self.limit:.0f} s, its limit" if late else ""
        if not late and self.process.returncode:
            tail = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            self.reason = f"process ended with {self.process.returncode}: {' '.join(tail)[:300]}"
        return True

    def so_far(self) -> dict[str, Any]:
        """What it has found by now."""
        return {
            "seconds": round(time.monotonic() - self.begun, 1),
            "reason": "under way",
            "rows": read_lines(self.lines),
        }

    def said(self) -> str:
        """The end of what it printed."""
        text = self.log.read_bytes()[-LOG_BYTES:].decode("utf-8", errors="replace") if self.log.exists() else ""
        return f"=== {self.name}\n{text.rstrip()}\n\n"

    def result(self) -> dict[str, Any]:
        """What it found."""
        rows = read_lines(self.lines)
        if not rows and not self.reason:
            self.reason = "it measured nothing"
        return {"seconds": round(time.monotonic() - self.begun, 1), "reason": self.reason, "rows": rows}


def run_parts(job: dict[str, Any], out: Path, names: list[str], seconds: float, together: int) -> dict[str, Any]:
    """All parts, `together` at a time; results are written after each, and every few seconds."""
    finish, results, written = time.monotonic() + seconds, dict[str, Any](), 0.0
    waiting, working = list(names), list[Part]()
    (out / "log.txt").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as work:
        while waiting or working:
            while waiting and len(working) < together:
                name, left = waiting.pop(0), finish - time.monotonic()
                if left < LEAST:
                    results[name] = {"seconds": 0, "reason": f"not begun: {left:.0f} s were left", "rows": []}
                    continue
                share = PARTS[name] * max(1.0, seconds / 540)
                working.append(Part(name, job, Path(work), min(share, left)))
            time.sleep(0.05)
            over = [p for p in working if p.done()]
            for part in over:
                working.remove(part)
                results[part.name] = part.result()
                with (out / "log.txt").open("a", encoding="utf-8") as log:
                    log.write(part.said())
                shown = results[part.name]
                print(
                    f"{part.name}: {len(shown['rows'])} rows in {shown['seconds']} s {shown['reason']}".rstrip(),
                    flush=True,
                )
            if over or time.monotonic() - written > EVERY:
                known, written = results | {p.name: p.so_far() for p in working}, time.monotonic()
                save(out, job, {name: known[name] for name in names if name in known})
    return {name: results[name] for name in names}


def save(out: Path, job: dict[str, Any], results: dict[str, Any]) -> None:
    """Everything so far, in one piece."""
    text = json.dumps({"machine": job["machine"], "commit": job["commit"], "parts": results}, indent=1)
    (out / "results.json.tmp").write_text(text + "\n", encoding="utf-8")
    os.replace(out / "results.json.tmp", out / "results.json")
    (out / "table.md").write_text(tables(job, results), encoding="utf-8")


def shown(value: Any) -> str:
    """A cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "/").replace("\n", " ")


def bars(job: dict[str, Any], results: dict[str, Any]) -> list[tuple[str, str, Any, Any]]:
    """What is asked of a GPU, what was measured of it (or why it wasn't), and whether that is enough."""
    rows = {name: {row["what"]: row for row in part["rows"]} for name, part in results.items()}

    def one(bar: str, part: str, what: str, key: str, least: float | None = None, most: float | None = None) -> Any:
        row = rows.get(part, {}).get(what, {})
        value, asked = row.get(key), f"≥ {least:g}" if most is None else f"≤ {most:g}"
        if not isinstance(value, int | float):
            why = row.get("reason") or results.get(part, {}).get("reason") or "not asked for"
            return bar, asked, why, "not measured"
        enough = value >= (least or 0) and value <= (math.inf if most is None else most) and row.get("finite", True)
        return bar, asked, value, enough if job["device"] == "cuda" else "not on a GPU"

    of = "tiny" if job["tiny"] else "0.5B"
    cards = ("PPO 1.5B, LoRA Hydra, 15 GB", "GRPO 0.5B, all weights, 8 × 256 tokens, 12 GB")
    found = [
        one("MFU of SFT", "train", f"sft {of}", "MFU", least=0.45),
        one("DPO against TRL", "peers", f"dpo {of}, TRL in turn", "ratio", least=1.5),
        one("GRPO against TRL", "peers", f"grpo {of}, TRL in turn", "ratio", least=2),
        *(
            one(f"decoding against its floor, {n}", "decode", f"{n} rows", "share of the floor's speed", least=0.5)
            for n in ((1, 4) if job["tiny"] else (1, 8, 64, 256))
        ),
        one("GB of PPO 1.5B, LoRA Hydra, 6 steps", "t4", cards[0], "peak GB", most=15),
        one("GB of GRPO 0.5B, all weights", "t4", cards[1], "peak GB", most=12),
        *(
            one(f"host syncs a step, {m}", "correct", f"host syncs, {m}", "syncs a step", most=2)
            for m in ("sft", "dpo", "ppo", "grpo")
        ),
    ]
    every = [row for part in rows.values() for row in part.values()]
    ratios = [row["predicted ÷ peak"] for row in every if "predicted ÷ peak" in row]
    near = sum(1 / 1.15 <= x <= 1.15 for x in ratios)
    worst = f", from {min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""
    found.append(
        (
            "predicted within 15 % of the measured peak",
            "all",
            f"{near} of {len(ratios)} settings{worst}",
            near == len(ratios) > 0,
        )
    )
    inside = [row["within bounds"] for row in every if "within bounds" in row]
    found.append(
        (
            "numbers within rounding of transformers'",
            "all",
            f"{sum(inside)} of {len(inside)}",
            all(inside) and bool(inside),
        )
    )
    mute = [
        what
        for what, row in ((r["what"], r) for r in every)
        if not {*row} - {"what", "reason"} and not row.get("reason")
    ]
    found.append(
        (
            "a number or a reason of each measurement",
            "all",
            f"{len(every) - len(mute)} of {len(every)}",
            not mute and bool(every),
        )
    )
    return (
        found
        if job["device"] == "cuda"
        else [(*bar[:3], "not on a GPU" if bar[3] is not True else True) for bar in found]
    )


def tables(job: dict[str, Any], results: dict[str, Any]) -> str:
    """Results as Markdown."""
    lines = [f"{job['machine']}; commit {job['commit']}; `python benchmarks/gpu.py`", ""]
    lines += ["| bar | asked | measured | met |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(map(shown, bar)) + " |" for bar in bars(job, results)] + [""]
    for name, result in results.items():
        lines += [f"**{name}** ({result['seconds']} s){': ' + result['reason'] if result['reason'] else ''}", ""]
        kinds = dict.fromkeys(
            tuple(sorted({*row} - {"what", "reason"})) for row in result["rows"] if {*row} - {"what", "reason"}
        )
        spare = [row for row in result["rows"] if not {*row} - {"what", "reason"}]
        for kind in kinds:
            mine = [r for r in result["rows"] if tuple(sorted({*r} - {"what", "reason"})) == kind]
            columns = [
                "what",
                *(c for c in mine[0] if c in kind),
                *(["reason"] if any(r.get("reason") for r in mine) else []),
            ]
            lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(shown(r.get(c)) for c in columns) + " |" for r in mine] + [""]
        lines += [f"- {row.get('what')}: {row.get('reason')}" for row in spare] + ([""] if spare else [])
    return "\n".join(lines)


# --- what the other machine will lack --------------------------------------------------------------------------------------


def slim(wheel: Path) -> None:
    """Leave out of a wheel the libraries for other GPUs: `unpack` doesn't miss them, and they are most of bitsandbytes."""
    aside = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(aside, "w", zipfile.ZIP_DEFLATED) as some:
        for entry in whole.infolist():
            kind = re.search(r"/libbitsandbytes_(\w+)\.so$", entry.filename)
            if kind is None or kind[1] in (CUDA_LIBRARY, "cpu"):
                some.writestr(entry, whole.read(entry))
    aside.replace(wheel)


def luggage(folder: Path, model: Path | None, python: str) -> int:
    """Gather wheels, and the real model where it fits; says what was left out, and why. Returns the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tags = [x for n in (28, 27, 24, 17) for x in ("--platform", f"manylinux_2_{n}_x86_64")]
    tags += ["--platform", "manylinux2014_x86_64", "--implementation", "cp", "--python-version", python]
    total, left_out = 0, []
    for name in WHEELS:
        with tempfile.TemporaryDirectory() as place:
            pip = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--disable-pip-version-check",
                "--retries=1",
                "--timeout=15",
                "--no-deps",
                "--only-binary=:all:",
            ]
            pin = f"=={importlib.metadata.version('pydantic-core')}" if name == "pydantic-core" else ""
            pin = f"=={importlib.metadata.version('pydantic')}" if name == "pydantic" else pin
            done = subprocess.run([*pip, *tags, "-d", place, name + pin], capture_output=True, text=True)
            got = sorted(Path(place).glob("*.whl"))
            if not got:
                left_out.append(f"{name}: no wheel was found ({done.stderr.strip().splitlines()[-1:] or ['?']})")
                continue
            slim(got[0])
            size = got[0].stat().st_size
            if total + size > LUGGAGE_MB << 20:
                left_out.append(f"{name}: {size / 2**20:.0f} MB, and {total / 2**20:.0f} of {LUGGAGE_MB} MB are taken")
                continue
            total += size
            shutil.copy(got[0], folder)
            print(f"{got[0].name}: {size / 2**20:.1f} MB")
    size = sum(f.stat().st_size for f in model.rglob("*") if f.is_file()) if model and model.is_dir() else 0
    if not size:
        left_out.append("the real model: no folder was given (--model), or it isn't there; weights will be random")
    elif total + size > LUGGAGE_MB << 20:
        left_out.append(
            f"the real model: {size / 2**20:.0f} MB, and {total / 2**20:.0f} of {LUGGAGE_MB} MB are taken; weights will be random"
        )
    else:
        shutil.copytree(str(model), folder / "model", dirs_exist_ok=True)
        total += size
    print(f"{total / 2**20:.0f} MB in {folder}", *(f"left out: {x}" for x in left_out), sep="\n")
    return total


def machine(device: str) -> str:
    """What the numbers were taken on, in a line; asked of a process of its own, so that this one holds nothing on the GPU."""
    code = (
        "import platform, torch, transformers; cuda = torch.cuda.is_available(); p = torch.cuda.get_device_properties(0) if cuda else None; "
        "print((f'{p.name}, {p.total_memory / 2**30:.0f} GiB, compute capability {p.major}.{p.minor}' if cuda else 'CPU'), "
        "f'Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}', sep='; ')"
    )
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=120)
    except subprocess.TimeoutExpired:
        return "unknown machine (it didn't answer within 120 s)"
    return done.stdout.strip() or f"unknown machine ({done.stderr.strip()[-200:]})"


def commit() -> str:
    """Of this checkout, "unknown" without git."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=harness.ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def main() -> None:
    """All parts, in order of their worth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for results.json, table.md and logs")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--wheels", type=Path, help="folder of wheels that this machine may lack")
    parser.add_argument("--model", type=Path, help="folder of a real model (SmolLM2-135M-Instruct)")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes on a CPU: does the script still run?")
    parser.add_argument(
        "--luggage", type=Path, metavar="FOLDER", help="gather wheels (and --model, if it fits) and stop"
    )
    parser.add_argument("--commit", help="of this checkout, where git isn't there to say it")
    parser.add_argument("--python", default="3.12", help="of the machine that the luggage is for")
    args = parser.parse_args()
    if args.luggage:
        luggage(args.luggage, args.model, args.python)
        return
    if args.out is None:
        parser.error("--out FOLDER is needed: where should results go?")
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as site:
        brought = unpack(args.wheels, Path(site)) if args.wheels else []
        device = "cpu" if args.tiny else args.device
        about = machine(device)
        device = ("cpu" if about.startswith("CPU") else "cuda") if device == "auto" else device
        if device == "cpu" and not args.tiny:
            raise SystemExit(
                "no GPU is seen here, and real shapes would take hours on a CPU: give --tiny to try the script itself."
            )
        model = args.model or (args.wheels / "model" if args.wheels and (args.wheels / "model").is_dir() else None)
        job = {
            "device": device, "tiny": args.tiny, "site": site, "machine": about, "commit": args.commit or commit(), "brought": brought,
            "model": str(model.resolve()) if model else None,
        }  # fmt: skip
        print(f"{about}; commit {job['commit']}" + (f"; brought: {', '.join(brought)}" if brought else ""), flush=True)
        spent = time.monotonic() - begun
        if args.tiny:
            sys.path.append(site)
            import gpu_parts

            gpu_parts.preload()
        results = run_parts(job, args.out, args.only, args.minutes * 60 - spent - 5, 2 if args.tiny else 1)
    save(args.out, job, results)
    print("\n" + tables(job, results))
    print(f"all in {time.monotonic() - begun:.0f} s; {args.out}/results.json, {args.out}/table.md")


if __name__ == "__main__":
    main()
