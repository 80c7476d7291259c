"""Exports of a real model against their bars: python benchmarks/export_price.py [MODEL] [--out FOLDER].

20 prompts, f16 (with llama.cpp's cache of keys and values in fp32, and in fp16, its default) and q8_0: the same tokens by llama.cpp's own tokenizer, the
same greedy answers of 32 tokens as the model and, for f16, as PyTorch on the numbers of the file (which tells rounding from llama.cpp), KL (needs llama-cpp-python; without it it
ends). Each also prints its size.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rlhf_nb.data.templates import as_chat, encode_prompts
from rlhf_nb.export import llama_cpp
from rlhf_nb.export.gguf import load_fp32, write_gguf
from rlhf_nb.export.price import PROBE_PROMPTS, forward_of, greedy, token_kl
from rlhf_nb.export.source import ExportSource

MORE = (
    "Who wrote Romeo and Juliet?", "Name four planets of our solar system.", "How do I boil an egg so that the yolk stays soft?",
    "What does HTTP stand for?", "Write one line of a poem about rain.", "Which is heavier, a kilogram of iron or a kilogram of wool?",
    "Count from 1 to 12.", "Is 2024 a leap year? Answer in one sentence.",
)  # fmt: skip


def same_tokens(file: Path, source: ExportSource, ids: list[list[int]]) -> int:
    """How many prompts llama.cpp's own tokenizer reads as ours does."""
    import llama_cpp as library

    net: Any = library.Llama(model_path=str(file), vocab_only=True, verbose=False)
    texts = [source.tokenizer.decode(row).encode() for row in ids]
    found = sum(net.tokenize(text, add_bos=False, special=True) == row for text, row in zip(texts, ids))
    net.close()
    return found


def gguf_part(source: ExportSource, folder: Path) -> None:
    """llama.cpp's greedy answers against ours.

    Ours are the same if, after each beginning of theirs, our likeliest token is their next one: one pass over each answer says so.
    """
    if not llama_cpp.is_installed():
        print(f"gguf: skipped, llama.cpp is not installed: {llama_cpp.INSTALL}")
        return
    ids = encode_prompts(source.tokenizer, as_chat(source.tokenizer, [*PROBE_PROMPTS, *MORE]))
    own = forward_of(source.model)
    for kind, cache in (("f16", "f32"), ("f16", "f16"), ("q8_0", "f16")):
        file = folder / f"model-{kind}.gguf"
        if not file.is_file():
            write_gguf(source, file, kind)
        stored, of_file = forward_of(load_fp32(file)) if kind == "f16" else None, 0
        other, same, kls, tokens, seconds = llama_cpp.forward_of_file(file, 256, cache=cache), 0, [], 0, 0.0
        for prompt, row in zip([*PROBE_PROMPTS, *MORE], ids):
            begun = time.perf_counter()
            said = greedy(other, row, 32, source.eos)
            tokens, seconds = tokens + len(said), seconds + time.perf_counter() - begun
            whole = [*row, *said]
            a, b = own(whole, None)[0], other(whole, None)[0]
            kls.append(token_kl(a, b))
            wrong = [n for n, token in enumerate(said) if int(a[len(row) - 1 + n].argmax()) != token]
            same += not wrong
            if stored is not None:
                numbers = stored(whole, None)[0][len(row) - 1 :]
                of_file += all(int(n.argmax()) == token for n, token in zip(numbers, said))
            if wrong:
                two = a[len(row) - 1 + wrong[0]].log_softmax(-1).topk(2).values
                print(
                    f"  {kind}, cache {cache}: differs at token {wrong[0]} of {prompt!r}, where our first leads our second by {float(two[0] - two[1]):.3f} nats"
                )
        kl = torch.cat(kls)
        alike = "" if stored is None else f" ({of_file} of {len(ids)} as PyTorch on the file's own numbers)"
        print(
            f"gguf {kind}, cache in {cache}: the same prompt tokens {same_tokens(file, source, ids)} of {len(ids)}, the same greedy answers {same} of {len(ids)}{alike}, "
            f"KL {float(kl.mean()):.2g} nats a token (worst {float(kl.max()):.2g}), {file.stat().st_size / 1e6:.1f} MB, {tokens / seconds:.1f} tokens/s",
            flush=True,
        )
        del other


def main() -> None:
    """Measure what was asked for."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", default="smollm2")
    p.add_argument("--out", help="keep the exports in this folder; default: they are thrown away")
    a = p.parse_args()
    source = ExportSource(a.model)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(a.out or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        gguf_part(source, folder)


if __name__ == "__main__":
    main()
