"""How long a start takes with and without kept tokens: `python benchmarks/token_cache.py [--rows 20000] [--model FOLDER]`."""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k_train.jsonl.gz"


def write(path: Path, n: int) -> None:
    """n questions with answers; the number in front makes each another."""
    with gzip.open(GSM8K, "rt") as f:
        rows = [json.loads(line) for line in f]
    many = (
        {"question": f"{i}. {rows[i % len(rows)]['question']}", "answer": rows[i % len(rows)]["answer"]}
        for i in range(n)
    )
    path.write_text("\n".join(map(json.dumps, many)))


def start(path: str, tokenizer: str, cache: str) -> None:
    """One start up to the first batch, timed; prints seconds, CPU seconds and MB of rows in memory."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from rlhf_nb import SFTConfig, SFTTrainer

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tok = AutoTokenizer.from_pretrained(tokenizer)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tok), **sizes))
    folder = str(Path(path).parent / "run")
    data = {"path": path, "eval_size": 100, "cache": cache or False}
    config = SFTConfig(data=data, output_dir=folder, console=False, device="cpu", steps=1, epochs=None)
    wall, cpu, before = time.perf_counter(), time.process_time(), _private()
    SFTTrainer(config, model, tok).source.next_batch(8)
    print(f"{time.perf_counter() - wall:.1f} {time.process_time() - cpu:.1f} {_private() - before:.0f}")


def _private() -> float:
    """MB of memory that this process shares with nobody."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def main() -> None:
    """Three starts, each a process: without, with an empty cache, and with a full one; three times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument(
        "--model", help="folder with a tokenizer that has a chat template; default: one learnt from the rows"
    )
    parser.add_argument("--start", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        start(*options.start)
        return
    if not GSM8K.is_file():
        sys.exit(f"{GSM8K} is not here, so there are no rows to measure with.")
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "rows.jsonl"
        write(path, options.rows)
        tokenizer = options.model
        if tokenizer is None:
            from rlhf_nb.data.templates import train_bpe

            tokenizer = str(Path(home) / "tokenizer")
            train_bpe(path.read_text().splitlines()[:7000], 8192).save_pretrained(tokenizer)
        print("start                 seconds   CPU seconds   MB of its own")
        for k in range(3):
            for name, cache in (("no cache", ""), ("cache, first", f"{home}/{k}"), ("cache, second", f"{home}/{k}")):
                command = [sys.executable, __file__, "--start", str(path), tokenizer, cache]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                print(f"{name:20s}{out[0]:>9}{out[1]:>14}{out[2]:>16}", flush=True)


if __name__ == "__main__":
    main()
