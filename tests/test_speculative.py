"""Speculative decoding gives the policy's own distribution: every continuation enumerated, 20,000 draws counted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rlhf_nb.config import LoraSettings, SamplingConfig
from rlhf_nb.data import toy
from rlhf_nb.decode import speculative
from rlhf_nb.decode.speculative import Speculative
from rlhf_nb.models.adapters import add_lora
from rlhf_nb.rollout.choosing import Chooser
from rlhf_nb.types import PromptBatch

DRAWS, LENGTH = 20_000, 3


@pytest.fixture(scope="module")
def world() -> tuple[Any, Any, Any, PromptBatch]:
    """Tokenizer, policy, a draft that resembles it, and a prompt in which something repeats."""
    torch.set_num_threads(1)
    tok, policy = toy.build_tokenizer(), toy.build_model(0, "tiny").eval()
    with torch.no_grad():
        policy.lm_head.weight.mul_(3.0)
    draft, g = copy.deepcopy(policy), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.5 * p.std().nan_to_num(0.1))
    text = "Visitor: How many legs do wolves have?\nPip:"
    return tok, policy, draft, PromptBatch.from_lists([tok(text)["input_ids"]], prompts=[text])


def enumerated(policy: Any, prompts: PromptBatch, s: SamplingConfig) -> dict[tuple[int, ...], float]:
    """The probability of each continuation, from the model's own logits."""
    choose, cells = Chooser(s, torch.tensor([], dtype=torch.int64)), {(): 1.0}
    for place in range(LENGTH):
        asked = torch.tensor([[*prompts.prompt_ids[0].tolist(), *c] for c in cells])
        with torch.no_grad():
            w = choose.weights(policy(asked).logits[:, -1], place)[1].double()
        w = w / w.sum(1, keepdim=True)
        cells = {
            (*c, t): p * float(w[i, t]) for i, (c, p) in enumerate(cells.items()) for t in w[i].nonzero()[:, 0].tolist()
        }
    return cells


def chi2(decoder: Speculative, world: Any, s: SamplingConfig) -> tuple[float, int]:
    """χ² of the counts against the enumeration, and its degrees of freedom."""
    tok, policy, _, prompts = world
    cells = enumerated(policy, prompts, s)
    seen = dict.fromkeys(cells, 0)
    for step in range(4):
        r = decoder.generate(policy, prompts, s, tokenizer=tok, seed=3, step=step, num_samples=DRAWS // 4, eos=[])
        for row in r.completion_ids.tolist():
            seen[tuple(row)] += 1  # a continuation that cannot be is a KeyError
    expected = torch.tensor([DRAWS * p for p in cells.values()], dtype=torch.float64)
    counts, many = torch.tensor(list(seen.values()), dtype=torch.float64), expected >= 5
    pairs = [(counts[many], expected[many])]
    if not bool(many.all()):
        pairs.append((counts[~many].sum()[None], expected[~many].sum()[None]))
    value = sum(float(((c - e).square() / e).sum()) for c, e in pairs)
    return value, sum(len(c) for c, _ in pairs) - 1


SETTINGS = [{"temperature": 1.3, "top_k": 5}, {"temperature": 1.5, "top_p": 0.6}]


@pytest.mark.parametrize("settings", SETTINGS, ids=["top-k", "top-p"])
@pytest.mark.parametrize("kind", ["model", pytest.param("look-up", marks=pytest.mark.slow)])
def test_same_distribution(world: Any, kind: str, settings: dict[str, Any]) -> None:
    s = SamplingConfig(max_new_tokens=LENGTH, **settings)
    decoder = Speculative(world[2] if kind == "model" else "look-up", ahead=2, most_rows=DRAWS)
    value, df = chi2(decoder, world, s)
    assert decoder.plain is None and df > 20
    assert value < df + 3.3 * (2 * df) ** 0.5, f"χ² = {value:.0f} at {df} degrees of freedom"
    if kind == "model":
        assert decoder.cost is not None and 0.2 < decoder.cost.gains["accepted"] < 0.99


def test_the_reference_as_a_draft(world: Any) -> None:
    tok, policy, _, prompts = world
    tuned = add_lora(copy.deepcopy(policy), LoraSettings(r=4), seed=0).eval()
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=g) * 0.06)
    s = SamplingConfig(max_new_tokens=LENGTH, temperature=1.3, top_k=5)
    decoder = Speculative("reference", ahead=2, most_rows=DRAWS)
    value, df = chi2(decoder, (tok, tuned, None, prompts), s)
    assert decoder.plain is None and value < df + 3.3 * (2 * df) ** 0.5, f"χ² = {value:.0f} at {df} degrees of freedom"
    assert decoder.cost is not None and 0.2 < decoder.cost.gains["accepted"] < 0.99


def test_a_rule_that_keeps_every_proposal_is_found_out(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(p: Any, q: Any, token: Any, *_: Any) -> tuple[Any, Any]:
        return token, torch.ones_like(token, dtype=torch.bool)

    monkeypatch.setattr(speculative, "accept_or_redraw", keep)
    s = SamplingConfig(max_new_tokens=LENGTH, temperature=1.3, top_k=5)
    try:
        value, df = chi2(Speculative(world[2], ahead=2, most_rows=DRAWS), world, s)
    except KeyError:  # the draft's own top-k lets another token through
        return
    assert value > df + 10 * (2 * df) ** 0.5
