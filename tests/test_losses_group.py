"""GRPO, its variants and RLOO against TRL's own code: `tests/data/group_losses.json`, written by `benchmarks/check_group_losses.py`.

What is run here is what training runs: `advantages`, `denominators` and `loss` of the methods, with given log-probs instead of a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_nb.core import decide_precision
from rlhf_nb.run.engine import Engine, weigh
from rlhf_nb.train.grpo import GRPO, VARIANTS, GRPOConfig
from rlhf_nb.train.rloo import RLOO, RLOOConfig
from rlhf_nb.types import Rollout

FIXTURE = json.loads((Path(__file__).parent / "data" / "group_losses.json").read_text(encoding="utf-8"))
X, CASES = FIXTURE["inputs"], {case["name"]: case for case in FIXTURE["cases"]}
EXACT = {"rtol": 0.0, "atol": 1e-11}
DIFFERENT = {"rloo, whitened", "bnpo in 3 micro-batches", "dapo, 1 of 3 updates"}  # each has a test below
LENS = torch.tensor(X["lens"])
INSIDE = torch.arange(int(LENS.max())) < LENS[:, None]


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def rollout() -> Rollout:
    """The fixture's answers as a rollout in float64."""
    ids = torch.full(INSIDE.shape, 9)
    return Rollout(
        prompt_ids=torch.full((len(LENS), 2), 5), prompt_mask=torch.ones(len(LENS), 2, dtype=torch.bool), completion_ids=ids,
        completion_lens=LENS, completion_mask=INSIDE.clone(), uid=torch.arange(len(LENS)), finished=torch.tensor(X["finished"]),
        prompts=[""] * len(LENS), texts=[""] * len(LENS), old_logps=tensor(X["old"]), ref_logps=tensor(X["ref"]), scores=tensor(X["scores"]),
    )  # fmt: skip


def method(case: dict[str, Any], leaf: Tensor) -> Any:
    """A method with the case's switches that reads log-probs from the leaf."""
    kind, config = (GRPO, GRPOConfig) if case["method"] == "grpo" else (RLOO, RLOOConfig)
    settings = {k: v for k, v in case["ours"].items() if k != "rows"}
    self: Any = object.__new__(kind)
    self.config = config(sampling={"max_new_tokens": X["allowed"]}, num_generations=X["group"], **settings)
    self.engine = Engine(decide_precision("cpu", "fp32"))
    self.kl = self.config.kl_controller()
    self.module = lambda micro, **_: SimpleNamespace(logps=leaf[micro.uid])
    return self


def ours(case: dict[str, Any], cuts: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """Advantages, loss, gradient and statistics of one optimizer step, in micro-batches that begin at the cuts."""
    leaf, r = tensor(X["logps"]).requires_grad_(), rollout()
    self = method(case, leaf)
    if case["ours"].get("mask_truncated"):
        r.completion_mask = r.completion_mask & r.finished[:, None]
    if case["name"] == "first update":
        r.old_logps = leaf.detach().clone()
    r = self.advantages(r)
    mini = r[: case["ours"].get("rows", len(r))]
    counts, loss, stats = self.denominators(mini), torch.zeros((), dtype=torch.float64), {}
    for a, b in zip((0, *cuts), (*cuts, len(mini))):
        terms = self.loss(mini[a:b])
        loss = loss + weigh(terms, counts, torch.device("cpu"))
        for term, _ in terms.values():
            for name, (total, n) in term.stats.items():
                before = stats.get(name, (0.0, 0.0))
                stats[name] = (before[0] + float(total), before[1] + float(n))
    grad = torch.autograd.grad(loss, leaf)[0]
    return r.need("advantages"), loss.detach(), grad, {k: s / n for k, (s, n) in stats.items()}


@pytest.mark.parametrize("name", [n for n in CASES if n not in DIFFERENT])
def test_like_trl(name: str) -> None:
    case = CASES[name]
    for cuts in ((), (1, 5, 6)):  # TRL's micro-batches are equally large; ours may be cut anywhere
        advantages, loss, grad, stats = ours(case, cuts)
        mask = INSIDE & torch.tensor(X["finished"])[:, None] if case["ours"].get("mask_truncated") else INSIDE
        want = tensor(case["advantages"])[:, None].expand_as(advantages)
        torch.testing.assert_close(advantages, torch.where(mask, want, 0.0), **EXACT)
        torch.testing.assert_close(loss, tensor(case["loss"]), **EXACT)
        torch.testing.assert_close(grad[INSIDE], tensor(case["grad"]), **EXACT)
        assert not grad[~mask].any()
        if "kl" in case["metrics"] and case["method"] == "grpo":
            assert stats["kl"] == pytest.approx(case["metrics"]["kl"], abs=1e-8)
        if "clip_ratio/region_mean" in case["metrics"] and case["method"] == "grpo" and not name.startswith("gspo"):
            clipped = case["metrics"]["clip_ratio/region_mean"]
            assert stats["policy/clipfrac_avg"] == pytest.approx(clipped, abs=1e-6)  # TRL counts in float32


def test_fixture_can_fail_and_is_whole() -> None:
    """Every variant has a case; and policy and old policy swapped, or a mask dropped, would be seen."""
    assert {c["ours"].get("variant", "grpo") for c in CASES.values()} == set(VARIANTS)
    assert any(c["metrics"].get("clip_ratio/region_mean", 0) > 0.1 for c in CASES.values())
    case = CASES["grpo, kl 0.0"]
    leaf, r = tensor(X["old"]).requires_grad_(), rollout()
    r.old_logps = tensor(X["logps"])
    self = method(case, leaf)
    swapped = weigh(self.loss(self.advantages(r)), self.denominators(r), torch.device("cpu"))
    assert abs(float(swapped.detach()) - case["loss"]) > 1e-3
    r = rollout()
    r.completion_mask = torch.ones_like(r.completion_mask)
    unmasked = weigh(self.loss(self.advantages(r)), self.denominators(r), torch.device("cpu"))
    assert abs(float(unmasked.detach()) - case["loss"]) > 1e-3


def test_batch_std() -> None:
    """The group's mean, and the standard deviation of all scores of the batch: not of what is left after the mean is taken off."""
    scores, case = tensor(X["scores"]), CASES["batch std"]
    each = scores - scores.view(-1, X["group"]).mean(1).repeat_interleave(X["group"])
    torch.testing.assert_close(ours(case)[0][:, 0], each / (scores.std() + 1e-4), **EXACT)
    assert abs(float(scores.std()) - float(each.std())) > 1e-2


def test_rloo_whitened() -> None:
    """TRL adds 1e-4 to the standard deviation, ours 1e-8 to the variance."""
    whitened, plain = (tensor(CASES[n]["advantages"]) for n in ("rloo, whitened", "rloo, kl 0.05"))
    centered = plain - plain.mean()
    torch.testing.assert_close(whitened, centered / (plain.std() + 1e-4), **EXACT)
    got = ours(CASES["rloo, whitened"])[0]
    torch.testing.assert_close(got[:, 0], centered / (plain.var() + 1e-8).sqrt(), **EXACT)
    torch.testing.assert_close(got[:, 0], whitened, rtol=2e-4, atol=0.0)


def test_bnpo_in_micro_batches() -> None:
    """TRL's BNPO divides each micro-batch by its own tokens, so cutting a batch changes it; ours divides by the step's tokens."""
    cut, case = CASES["bnpo in 3 micro-batches"], CASES["bnpo, kl 0.0"]
    size = X["group"]
    _, loss, grad, _ = ours(cut, (size, 2 * size))
    torch.testing.assert_close(loss, tensor(case["loss"]), **EXACT)
    torch.testing.assert_close(grad[INSIDE], tensor(case["grad"]), **EXACT)
    assert abs(cut["loss"] - case["loss"]) > 1e-3
    tokens = INSIDE.view(-1, size, INSIDE.shape[1]).sum((1, 2))
    share = (tokens.sum() / (len(tokens) * tokens.double())).repeat_interleave(size)[
        :, None
    ]  # how TRL's weighs an answer
    torch.testing.assert_close((grad * share)[INSIDE], tensor(cut["grad"]), **EXACT)


def test_dapo_with_several_updates_per_batch() -> None:
    """TRL divides by the mean tokens of an update, ours by the tokens of this one."""
    case, rows = CASES["dapo, 1 of 3 updates"], X["group"]
    _, loss, grad, _ = ours(case)
    factor = int(LENS[:rows].sum()) / (int(LENS.sum()) / (len(LENS) / rows))
    torch.testing.assert_close(loss * factor, tensor(case["loss"]), **EXACT)
    torch.testing.assert_close(grad[INSIDE] * factor, tensor(case["grad"]), **EXACT)
    assert abs(factor - 1) > 0.05
