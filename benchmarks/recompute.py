"""Peak memory of a training step with and without `recompute`, at SmolLM2-135M's shape and forwards of 1,024 tokens.

    python benchmarks/recompute.py [--methods sft dpo ppo] [--tokens 1024]

Random weights, random tokens, fp32, AdamW, all weights train; each figure is from a process of its own, which makes two steps (in the
second one Adam's averages are there). The same process with rows of 16 tokens has all of that too, weights, gradients, averages, the
reference and the critic, but hardly any activations. What a process with long rows needs above it are the activations.

SFT: one row. DPO: one pair behind its shared prompt. PPO: one prompt with an answer, policy and critic apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

import harness

SHAPE = dict(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
    max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
WORDS = 1000


def words(n: int, r: random.Random) -> str:
    """So many tokens as text."""
    return " ".join(f"w{r.randrange(WORDS)}" for _ in range(n))


def tokenizer() -> Any:
    """One word, one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i + 2 for i in range(WORDS)}}
    plain = Tokenizer(models.WordLevel(known, unk_token="<eos>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")


def answer_of(method: str, tokens: int) -> int:
    """Tokens of an answer; PPO writes its own, which is slow here, so it is short."""
    return max(tokens // (32 if method == "ppo" else 8), 4)


def rows_of(method: str, tokens: int) -> list[dict[str, Any]]:
    """Two rows whose forward has so many tokens, the end-of-text tokens among them."""
    r = random.Random(0)
    answer = answer_of(method, tokens)
    if method == "sft":
        return [{"prompt": words(8, r), "completion": words(tokens - 9, r)} for _ in range(2)]
    if method == "dpo":
        made = [(words(tokens - 2 * answer, r), words(answer - 1, r), words(answer - 1, r)) for _ in range(2)]
        return [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in made]
    return [{"prompt": words(tokens - answer, r)} for _ in range(2)]


def worker(method: str, tokens: int, again: bool) -> None:
    """Two steps; prints the peak of this process in MiB, the seconds of the second step, and its loss."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlhf_nb.scoring.scores import log

    log.setLevel("ERROR")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    settings: dict[str, Any] = dict(
        steps=2, epochs=None, mini_batch_size=1, rollout_batch_size=1, token_budget=tokens, device="cpu", precision="fp32", console=False,
        recompute=again, data={"max_length": tokens + 1, "max_prompt_length": tokens},
    )  # fmt: skip
    answer = answer_of(method, tokens)
    more: dict[str, Any] = {}
    if method == "sft":
        from rlhf_nb.train.sft import SFTConfig as Config
        from rlhf_nb.train.sft import SFTTrainer as Trainer
    elif method == "dpo":
        from rlhf_nb.train.dpo import DPOConfig as Config
        from rlhf_nb.train.dpo import DPOTrainer as Trainer
    else:
        from rlhf_nb.train.ppo import PPOConfig as Config
        from rlhf_nb.train.ppo import PPOTrainer as Trainer

        settings |= {"sampling": {"max_new_tokens": answer, "min_new_tokens": answer}, "critic": "separate"}
        settings |= {"num_inner_epochs": 1}
        more["reward"] = lambda prompts, completions: [0.01 * len(x) for x in completions]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            Config(**settings, output_dir=folder), model, tokenizer(), rows=rows_of(method, tokens), **more
        )
        trainer.start()
        trainer.train_step()
        begun = time.perf_counter()
        event = trainer.train_step()
        seconds = time.perf_counter() - begun
        print(json.dumps({"peak": harness.memory(), "seconds": seconds, "loss": event["loss"]}), flush=True)
        os._exit(0)


def measure(method: str, tokens: int, again: bool) -> dict[str, float]:
    """One worker's account."""
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_ARENA_MAX": "1", "PYTHONWARNINGS": "ignore"}
    env["PYTHONPATH"] = os.pathsep.join(
        [*filter(None, [os.environ.get("PYTHONPATH")]), str(harness.HERE), str(harness.ROOT)]
    )
    command = [sys.executable, __file__, "--worker", method, str(tokens), str(int(again))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["sft", "dpo", "ppo"])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--worker", nargs=3, metavar=("METHOD", "TOKENS", "AGAIN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], int(args.worker[1]), args.worker[2] == "1")
        return
    print(
        "| method | without activations, MiB | kept, MiB | recomputed, MiB | activations, recomputed ÷ kept | seconds a step | loss |"
    )
    print("|---|---:|---:|---:|---:|---|---|")
    for method in args.methods:
        floor, kept, again = (
            measure(method, n, on) for n, on in ((16, False), (args.tokens, False), (args.tokens, True))
        )
        without = floor["peak"]
        part = (again["peak"] - without) / (kept["peak"] - without)
        print(
            f"| {method.upper()} | {without:,.0f} | +{kept['peak'] - without:,.0f} | +{again['peak'] - without:,.0f} | {part:.0%} "
            f"| {kept['seconds']:.0f} → {again['seconds']:.0f} | {kept['loss']:.6f}, {again['loss']:.6f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
