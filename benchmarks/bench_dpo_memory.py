"""DPO: peak memory of a step against TRL's DPOTrainer, where the vocabulary is large (151,936, as Qwen2's).

    python benchmarks/bench_dpo_memory.py [--layers 2] [--pairs 4] [--prompt 320] [--answer 192] [--against batch single ...] [--cached]

A Qwen2 of hidden size 896 with fewer layers than the 24 of its 0.5B model, random weights, random tokens, fp32, AdamW; both sides see the same
tokens, and losses must agree. TRL runs all pairs in one forward (`batch`), with activations checkpointed (`checkpointing`: its
default), or one pair a forward (`single`). Ours: one pair, or as many as fit, in a forward of --token-budget tokens.

Peaks are of the process. "Above what was there" leaves out libraries, policy and reference; what remains is gradients and Adam's
moments, the same on both sides and needed by any trainer that uses AdamW, and activations and buffers, which differ.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import bench_dpo
import harness
import pairs

WAYS = ("batch", "checkpointing", "single")


def prepare(folder: Path, args: argparse.Namespace) -> tuple[list[dict[str, list[int]]], float]:
    """Write model and tokenizer; return random pairs and the MiB that gradients and Adam's moments take."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=args.vocabulary, hidden_size=896, intermediate_size=4864, num_hidden_layers=args.layers, num_attention_heads=14,
            num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder / "model"
    )
    r = random.Random(0)

    def ids(n: int) -> list[int]:
        return [r.randrange(2, args.vocabulary) for _ in range(r.randint(n * 3 // 4, n * 5 // 4))]

    sizes = {"prompt_ids": args.prompt, "chosen_ids": args.answer, "rejected_ids": args.answer}
    rows = [{k: ids(n) for k, n in sizes.items()} | {"margin": None} for _ in range(args.pairs * (args.steps + 1))]
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{size / 1e6:.0f}M parameters ({args.layers} layers), {args.pairs} pairs a step of about {args.prompt} + 2 x {args.answer} tokens"
    )
    return rows, 3 * 4 * size / harness.MIB


def main() -> None:
    parser = harness.arguments(__doc__, steps=2, ways=WAYS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--pairs", type=int, default=4, help="a step")
    parser.add_argument("--prompt", type=int, default=320, help="tokens on average")
    parser.add_argument("--answer", type=int, default=192, help="tokens on average")
    parser.add_argument("--cached", action="store_true", help="the reference is computed before, on both sides")
    args = parser.parse_args()
    args.warmup = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, fixed = prepare(folder, args)
        print(f"gradients and Adam's moments take {fixed:.0f} MiB on either side")
        for way in args.against or WAYS:
            job = pairs.job_of(
                folder, rows, batch=args.pairs, steps=args.steps + 1, lr=1e-5, token_budget=args.token_budget or 1024, cached=args.cached,
                accumulate=args.pairs if way == "single" else 1, checkpointing=way == "checkpointing", output=str(folder / way),
            )  # fmt: skip
            title = (
                f"DPO, vocabulary of {args.vocabulary}, TRL {way}, reference {'cached' if args.cached else 'beside'}"
            )
            same = lambda ours, trl: pairs.near(ours, trl, ("loss", *bench_dpo.READ), 1e-4)
            harness.compare(bench_dpo.__file__, title, job, args, "pairs", same)


if __name__ == "__main__":
    main()
