"""One table of ratios, ours over the peer's: `make bench`. Adds what it measured to `docs/performance.jsonl` and writes `docs/performance.md` from it.

Each row is a comparison of one of the scripts beside this one, which take steps in turn and check first that both sides compute the same; the settings are small
enough for all rows to take less than 45 minutes on two quiet cores. A row that can't be measured here (no data, no peer, no time left) says why and stays as it was.

    python benchmarks/table.py                    # all rows
    python benchmarks/table.py dpo start          # rows whose names begin so
    python benchmarks/table.py --write            # the page alone
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import harness
import psutil

LINES, PAGE = harness.ROOT / "docs" / "performance.jsonl", harness.ROOT / "docs" / "performance.md"


class Row(NamedTuple):
    """A row of the table."""

    name: str
    what: str
    command: str  # script and options; "" for start-up, which is measured here


ROWS = [
    Row("sft", "SFT, packed (bfd), 12M parameters, fp32", "bench_sft.py --steps 4 --warmup 1 --against bfd"),
    Row("reward", "reward model, 12M parameters, fp32, batches grouped by length", "bench_reward.py --steps 6 --warmup 2 --against grouped"),
    Row("dpo", "DPO, SmolLM2, bf16, batches grouped by length", "bench_dpo.py --task smollm2 --precision bf16 --against grouped --steps 3 --warmup 1"),
    Row("dpo-cached", "the same, reference log-probs made before, on both sides", "bench_dpo.py --task smollm2 --precision bf16 --against cached-grouped --steps 3 --warmup 1"),
    Row("kto", "KTO, 12M parameters, fp32, batches grouped by length", "bench_kto.py --against grouped --steps 6 --warmup 2"),
    Row("grpo-24", "GRPO, SmolLM2, at most 24 new tokens, bf16", "bench_grpo.py --task smollm2 --threads 2 --precision bf16 --against full --steps 2 --warmup 1"),
    Row("grpo-64", "GRPO, SmolLM2, at most 64 new tokens, bf16", "bench_grpo.py --task smollm2 --threads 2 --precision bf16 --against full --new-tokens 64 --steps 1 --warmup 1"),
    Row("grpo-run", "a run that learns, 4 steps, right or wrong as reward: the same, all steps counted", "bench_grpo.py --task smollm2 --threads 2 --precision bf16 --against full --run 4"),
    Row("ppo", "PPO, SmolLM2, adapters, a verifier, bf16", "bench_ppo.py --task smollm2 --threads 2 --precision bf16 --train adapters --steps 1 --warmup 0"),
    Row("decode", "decoding, 12M parameters, 64 rows × 64 tokens, a quarter ends early, against `generate`", "bench_grpo.py --decode --task hh --threads 2 --ended 0.25 --new-tokens 64 --repeats 3"),
    Row("floor", "a step of decoding, SmolLM2, bf16, two threads, beside the machine's floor", "bench_grpo.py --floor --threads 2 --precision bf16"),
    Row("serve", "server, SmolLM2, 16 streams of 64 tokens, fp32, against `transformers serve`", "serve_speed.py {smollm2} --rounds 2"),
    Row("start-toy", "from the command to the first step: GRPO, toy model", ""),
    Row("start-smollm2", "from the command to the first step: GRPO, SmolLM2", ""),
]  # fmt: skip


def kept(path: Path) -> list[dict[str, Any]]:
    """Lines of a file of JSON lines; none where there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def compared(row: Row, folder: Path, smollm2: str, limit: float) -> dict[str, Any]:
    """A comparison's ratios; the last one where a script makes several.

    Raises:
        RuntimeError: it could not be made, with the last line that the script said.
    """
    script, *options = row.command.format(smollm2=smollm2).split()
    out = folder / f"{row.name}.jsonl"
    command = [sys.executable, str(harness.HERE / script), *options, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    lines = kept(out)
    if done.returncode or not lines:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1])
    return {k: lines[-1][k] for k in ("ratio", "low", "high", "cpu", "memory", "steps") if lines[-1].get(k) is not None}


def started(row: Row, folder: Path, limit: float) -> dict[str, Any]:
    """CPU seconds of `rlhf-nb grpo` until its first step begins and until it has ended; children count.

    Raises:
        RuntimeError: it ended before.
    """
    run = folder / row.name
    words = ["--toy"] if row.name == "start-toy" else ["--config", "smollm2_grpo"]
    command = [sys.executable, "-m", "rlhf_nb", "grpo", *words, f"output_dir={run}", "steps=1", "eval_every=null"]
    end, spent, seen = time.monotonic() + limit, 0.0, {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while len(seen) < 2 and process.poll() is None and time.monotonic() < end:
            spent = sum(psutil.Process(process.pid).cpu_times()[:4])
            for event in kept(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []:
                seen.setdefault(event["type"], spent) if event["type"] in ("start", "step") else None
            time.sleep(0.02)
        process.terminate()
    if len(seen) < 2:
        raise RuntimeError("the run ended before its first step")
    return {"begins": seen["start"], "ends": seen["step"]}


def machine() -> dict[str, Any]:
    """What numbers belong to."""
    return {
        "date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {harness.processor()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1), "torch": version("torch"), "peer": "TRL 1.16 (PPO: 1.12)",
    }  # fmt: skip


def shown(line: dict[str, Any]) -> str:
    """One measurement as cells of the table."""
    if "begins" in line:
        return f"{line['begins']:.1f} CPU s to its beginning, {line['ends']:.1f} to its end | | "
    if "steps" in line:
        return (
            "; ".join(
                f"{n} rows: {ms:.0f} CPU ms, {share:.0%} of the floor's speed" for n, ms, *_, share in line["steps"]
            )
            + " | | "
        )
    memory = f"{line['memory']:.2f}" if "memory" in line else ""
    return f"**{line['ratio']:.2f}×** ({line['low']:.2f}–{line['high']:.2f}) | {line['cpu']:.2f}× | {memory}"


def write_page() -> None:
    """`docs/performance.md` from all lines: the newest of each row, then the history."""
    lines = kept(LINES)
    text = [
        "# Performance", "",
        "`make bench` wrote this page: ours and the peer take steps in turn on the same machine, with the same model, data, order, precision and threads, and must "
        "compute the same numbers first ([how](../benchmarks/README.md); GRPO and PPO are compared so in fp32 only, and their rows in bf16 were not). A ratio above 1 means that ours is faster; it is one of medians, with the range over steps. "
        "The ratio by CPU time counts the work of both sides and hardly depends on what else runs. Memory is ours over the peer's (0.5 is half). [Results](results.md) has more settings, and GPUs are in [gpu](gpu.md).", "",
        "## Newest", "", "| what | ratio | by CPU time | memory | date | load | machine |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    cells = lambda x: f"{shown(x)} | {x['date']} | {x['load']} | {x['machine']}, torch {x['torch']} |"
    for row in ROWS:
        of_it = [x for x in lines if x["name"] == row.name]
        text += [f"| {row.what} | {cells(of_it[-1])}"] if of_it else []
    text += [
        "",
        "## History",
        "",
        "| row | ratio | by CPU time | memory | date | load | machine |",
        "|---|---|---|---|---|---|---|",
    ]
    text += [f"| `{x['name']}` | {cells(x)}" for x in reversed(lines)]
    PAGE.write_text("\n".join(text) + "\n", encoding="utf-8")


def main() -> None:
    """Measure the rows that are asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of rows' names (default: all)")
    parser.add_argument(
        "--minutes", type=float, default=45.0, help="in all; rows that don't begin in time are left out"
    )
    parser.add_argument("--write", action="store_true", help="measure nothing")
    args = parser.parse_args()
    rows = [] if args.write else [r for r in ROWS if not args.names or r.name.startswith(tuple(args.names))]
    smollm2 = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "rlhf_nb" / "smollm2-135m-instruct"
    end = time.monotonic() + 60 * args.minutes
    for row in rows:
        begin, about = time.monotonic(), machine()
        try:
            if begin > end:
                raise RuntimeError(f"{args.minutes:g} minutes are over")
            with tempfile.TemporaryDirectory() as folder:
                how = (started, row, Path(folder)) if not row.command else (compared, row, Path(folder), str(smollm2))
                found = how[0](*how[1:], end - begin)
        except (RuntimeError, subprocess.TimeoutExpired) as e:
            print(f"{row.name}: not measured: {e}", flush=True)
            continue
        with LINES.open("a", encoding="utf-8") as f:
            f.write(json.dumps({"name": row.name} | found | about) + "\n")
        print(f"{row.name}: {shown(found)} ({time.monotonic() - begin:.0f} s)", flush=True)
    write_page()


if __name__ == "__main__":
    main()
