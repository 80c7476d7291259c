"""Speculative decoding on a real model: tokens per CPU second with and without a look-up as the draft, on texts that repeat and on texts that don't.

Both ways answer the same prompts in turn, each several times; the best of each is compared, so that other work on the machine counts little. The answers
must be the same, token by token.

    OMP_NUM_THREADS=1 python benchmarks/speculative.py MODEL          # a folder or a name, such as smollm2
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from rlhf_nb.config import ModelConfig, SamplingConfig
from rlhf_nb.core import decide_precision
from rlhf_nb.data.sources import prompt_batch
from rlhf_nb.decode.decoder import Plain
from rlhf_nb.decode.speculative import Speculative
from rlhf_nb.models.load import load_causal_lm, load_tokenizer

PARAGRAPH = (
    "The river Wey rises near Alton and flows through Farnham, Godalming and Guildford before it meets the Thames at Weybridge. Barges carried corn, "
    "timber and chalk on it until 1969. The locks are looked after by the National Trust, which also owns the towpath, the mill at Shalford and the old "
    "wharf in Guildford."
)
CODE = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return area(width, height) * depth\n"
ASKED = {
    "copy a paragraph": f"Repeat the following text word by word, without any change:\n\n{PARAGRAPH}",
    "edit a paragraph": f"Repeat the following text, but write Alton in capitals:\n\n{PARAGRAPH}",
    "repeat code": f"Repeat this Python code exactly:\n\n{CODE}",
    "a story": "Write a short story about a lighthouse keeper who finds a letter.",
    "an explanation": "Explain why the sky is blue.",
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--new", type=int, default=96, help="longest answer, in tokens")
    parser.add_argument("--times", type=int, default=3, help="each answer is written so often")
    parser.add_argument("--temperature", type=float, default=None, help="default: greedy")
    args = parser.parse_args()
    torch.set_num_threads(1)
    place = ModelConfig(name_or_path=args.model)
    tokenizer = load_tokenizer(place)
    model = load_causal_lm(place, decide_precision("cpu"), tokenizer=tokenizer, trainable=False)
    how: dict[str, Any] = {"tokenizer": tokenizer, "seed": 1, "greedy": args.temperature is None}
    sampling = SamplingConfig(max_new_tokens=args.new, temperature=args.temperature or 1.0)
    print(
        "| text | tokens | plain, tokens/s | with look-up | ratio | tokens per pass | same answer |\n|---|---|---|---|---|---|---|"
    )
    for name, text in ASKED.items():
        batch, ours = prompt_batch(tokenizer, [text]), Speculative()
        best: dict[str, float] = {}
        answers: dict[str, Any] = {}
        for _ in range(args.times):
            for kind, decoder in (("plain", Plain()), ("look-up", ours)):
                begin = time.process_time()
                answers[kind] = decoder.generate(model, batch, sampling, **how)
                spent = time.process_time() - begin
                best[kind] = min(spent, best.get(kind, spent))
        n, same = int(answers["plain"].completion_lens[0]), answers["plain"].texts == answers["look-up"].texts
        rates, cost = [n / best[k] for k in ("plain", "look-up")], ours.cost
        assert cost is not None
        print(
            f"| {name} | {n} | {rates[0]:.1f} | {rates[1]:.1f} | {rates[1] / rates[0]:.2f} | {cost.gains['tokens per pass']:.2f} | {'yes' if same else 'no'} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
