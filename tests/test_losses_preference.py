"""The preference losses against TRL's own code: `tests/data/preference_losses.json`, written by `benchmarks/check_losses.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_nb.core import ConfigError
from rlhf_nb.losses.kto import RunningMean, mismatched_kl, suggest_weights, unpaired_loss
from rlhf_nb.losses.preference import (
    LOSSES,
    PairLogps,
    PairOptions,
    aot,
    desensitize,
    find_loss,
    ipo,
    log_ratios,
    nll,
    preference_loss,
    wpo_weights,
)

FIXTURE = json.loads((Path(__file__).parent / "data" / "preference_losses.json").read_text(encoding="utf-8"))
PAIRED = [case for case in FIXTURE["cases"] if case["kind"] == "pairs"]
SINGLE = [case for case in FIXTURE["cases"] if case["kind"] == "single"]
EXACT = {"rtol": 0.0, "atol": 1e-8}  # absolute, in float64
SORTED = {name for name, entry in LOSSES.items() if entry.whole_batch}


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def side(name: str, rows: slice = slice(None)) -> dict[str, Tensor]:
    columns = FIXTURE["inputs"][name]
    return {k: (torch.tensor(v) if k == "lens" else tensor(v))[rows] for k, v in columns.items()}


def pairs(
    chosen: Tensor, rejected: Tensor, rows: slice = slice(None), ld_alpha: float | None = None, reference: bool = True
) -> PairLogps:
    """Per-token log-probs as what a loss looks at."""
    lens = [side(name, rows)["lens"] for name in ("chosen", "rejected")]
    ref = [side(name, rows)["ref"] for name in ("chosen", "rejected")]

    def add(x: Tensor, own: Tensor, other: Tensor) -> Tensor:
        return x.sum(1) if ld_alpha is None else desensitize(x, own, other, ld_alpha)

    return PairLogps(
        add(chosen, lens[0], lens[1]),
        add(rejected, lens[1], lens[0]),
        add(ref[0], lens[0], lens[1]) if reference else None,
        add(ref[1], lens[1], lens[0]) if reference else None,
        *lens,
    )


def ours(case: dict[str, Any], rows: slice = slice(None)) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """Our mean loss of some pairs, its gradients in the per-token log-probs, and the statistics."""
    how = case["ours"]
    leaves = [side(name, rows)["logps"].requires_grad_() for name in ("chosen", "rejected")]
    reference = any(LOSSES[name].needs_reference for name in how["losses"])
    pair = pairs(leaves[0], leaves[1], rows, how.get("ld_alpha"), reference)
    weights = None
    if how.get("wpo"):
        parts = [side(name, rows) for name in ("chosen", "rejected")]
        c, r = ((x["logps"], x["log_sum_sq"], x["lens"]) for x in parts)
        weights = wpo_weights(c, r, ceiling=None)
    options = PairOptions(**how.get("options", {}))
    out = preference_loss(pair, how["losses"], beta=how["beta"], options=options, weights=weights)
    loss = out.mean
    if "nll" in how:
        loss = loss + how["nll"] * nll(pair).mean
    grads = list(torch.autograd.grad(loss, leaves))
    return loss.detach(), grads, {k: (s / n).item() for k, (s, n) in out.stats.items()}


@pytest.mark.parametrize("case", PAIRED, ids=lambda c: c["name"])
def test_pairs_like_trl(case: dict[str, Any]) -> None:
    near = {"rtol": 1e-5, "atol": 1e-5} if case["float32"] else EXACT  # TRL's α-divergence exists in 32 bits only
    loss, grads, stats = ours(case)
    torch.testing.assert_close(loss, tensor(case["mean"]), **near)
    for name, got, want in zip(("chosen", "rejected"), grads, map(tensor, case["grads"])):
        inside = torch.arange(got.shape[1]) < side(name)["lens"][:, None]
        want = want if want.dim() == 2 else want[:, None].expand_as(got)  # stored once where all tokens have the same
        torch.testing.assert_close(got[inside], want[inside], **near)
    each = torch.stack([ours(case, slice(i, i + 1))[0] for i in range(len(case["values"]))])
    torch.testing.assert_close(each, tensor(case["values"]), **near)
    if "f_divergence" not in case["name"] and case["metrics"] and "divergence" not in case["ours"].get("options", {}):
        for name, value in stats.items():
            assert value == pytest.approx(case["metrics"][name], abs=1e-6), name  # TRL averages accuracies in float32


def test_comparison_can_fail() -> None:
    """Swapped sides, swapped reference, another sign: each is far from the fixture, for every loss that has a case."""
    c, r = side("chosen"), side("rejected")
    pair = pairs(c["logps"], r["logps"])
    turned = PairLogps(pair.rejected, pair.chosen, pair.ref_rejected, pair.ref_chosen, *pair[:3:-1])
    swapped = PairLogps(pair.ref_chosen, pair.ref_rejected, pair.chosen, pair.rejected, *pair[4:])
    for case in PAIRED:
        if {"nll", "wpo", "ld_alpha"} & set(case["ours"]):
            continue
        how = case["ours"]
        for mutant in (turned, swapped):
            loss = preference_loss(
                mutant, how["losses"], beta=how["beta"], options=PairOptions(**how.get("options", {}))
            )
            assert abs(loss.mean.item() - case["mean"]) > 1e-3, case["name"]


def test_fixture_covers_every_loss() -> None:
    seen = {name for case in PAIRED for name in case["ours"]["losses"]}
    assert set(LOSSES) - seen == {"dpop"}, "TRL has no DPOP; everything else is compared"
    assert {case["trl"] for case in FIXTURE["cases"]} == {"1.16", "1.12"}


@pytest.mark.parametrize("case", SINGLE, ids=lambda c: c["name"])
def test_single_answers_like_trl(case: dict[str, Any]) -> None:
    x = {k: torch.tensor(v) if k == "labels" else tensor(v) for k, v in FIXTURE["inputs"]["single"].items()}
    how = dict(case["ours"])
    if how["loss"] == "bco":
        baseline: Tensor | float = case["metrics"]["delta"]
        running = RunningMean(decay=1.0)
        for logps, ref in ((x["kl_logps"], x["kl_ref"]), (x["logps"], x["ref"])):
            rewards = how["beta"] * (logps - ref)
            running.update(rewards.sum().item(), rewards.numel())
        assert running.value == pytest.approx(baseline, abs=1e-6)  # TRL keeps its running mean in float32
    else:
        baseline = mismatched_kl(x["kl_logps"] - x["kl_ref"]) if how["loss"] == "kto" else 0.0
    leaf = x["logps"].requires_grad_()
    out = unpaired_loss(leaf, x["ref"], x["labels"], baseline=baseline, **how)
    torch.testing.assert_close(out.mean.detach(), tensor(case["mean"]), **EXACT)
    torch.testing.assert_close(torch.autograd.grad(out.mean, leaf)[0], tensor(case["grad"]), **EXACT)
    if how["loss"] != "bco":
        for name, value in case["metrics"].items():
            total, count = out.stats[name]
            assert (total / count).item() == pytest.approx(value, abs=1e-8), name


def test_where_we_differ_on_purpose() -> None:
    """IPO as the paper writes it; WPO with the paper's ceiling; ORPO's rewards are log odds; α is the paper's."""
    c, r = side("chosen"), side("rejected")
    pair = pairs(c["logps"], r["logps"])
    averaged = next(case for case in PAIRED if case["name"] == "ipo")
    by_sums = ipo(pair, beta=0.1, average=False)
    torch.testing.assert_close(ipo(pair, beta=0.1).mean(), tensor(averaged["mean"]), **EXACT)
    margin = pair.chosen - pair.ref_chosen - pair.rejected + pair.ref_rejected
    torch.testing.assert_close(by_sums, (margin - 5.0) ** 2)
    assert abs(by_sums.mean().item() - averaged["mean"]) > 0.1

    rows = (c["logps"], c["log_sum_sq"], c["lens"]), (r["logps"], r["log_sum_sq"], r["lens"])
    free, held = wpo_weights(*rows, ceiling=None), wpo_weights(*rows)
    assert free.max() > 1
    torch.testing.assert_close(held, free.clamp(max=1))

    odds = preference_loss(pair, {"orpo": 1.0}, beta=1.0).stats["rewards/chosen"][0]
    p = (pair.chosen / pair.chosen_lens).exp()
    torch.testing.assert_close(odds, (p / (1 - p)).log().sum())

    forward, alpha = log_ratios(pair, "forward_kl"), log_ratios(pair, "alpha_divergence", 1.0)
    torch.testing.assert_close(forward, alpha)
    torch.testing.assert_close(log_ratios(pair, "alpha_divergence", 0.0), log_ratios(pair))


def test_whole_batch_losses_are_flagged() -> None:
    """Cutting a batch changes exactly the losses that say so."""
    c, r = side("chosen"), side("rejected")
    for name, entry in LOSSES.items():
        whole = entry.loss(pairs(c["logps"], r["logps"]), beta=0.5).sum()
        cuts = [slice(i, i + 1) for i in range(6)]
        parts = sum(entry.loss(pairs(c["logps"][k], r["logps"][k], k), beta=0.5).sum() for k in cuts)
        assert torch.allclose(whole, parts, rtol=0, atol=1e-12) != entry.whole_batch, name
    with pytest.raises(ConfigError, match="aot sorts"):
        preference_loss(pairs(c["logps"], r["logps"]), {"aot": 1.0}, weights=torch.ones(6))
    assert aot(pairs(c["logps"], r["logps"]), beta=0.1).shape == (6,)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_extreme_float32(name: str) -> None:
    """Log-probs as far apart as they get in training: no NaN in value or gradient, and no infinity."""
    big = torch.tensor([-1e-9, -900.0, -900.0, 0.0, -3.0], requires_grad=True)
    small = torch.tensor([-900.0, -1e-9, -900.0, -0.0, -2e4], requires_grad=True)
    ref = torch.full((5,), -300.0)
    lens = torch.tensor([1, 900, 9, 3, 200])
    out = preference_loss(PairLogps(big, small, ref, ref.clone(), lens, lens), {name: 1.0})
    assert torch.isfinite(out.total), out.total
    for grad in torch.autograd.grad(out.total, (big, small)):
        assert torch.isfinite(grad).all(), grad
    assert all(torch.isfinite(x).all() for stat in out.stats.values() for x in stat)


def test_refusals_name_the_way_out() -> None:
    c, r = side("chosen"), side("rejected")
    free = pairs(c["logps"], r["logps"], reference=False)
    with pytest.raises(ConfigError, match="simpo"):
        preference_loss(free, {"sigmoid": 1.0})
    with pytest.raises(ConfigError, match="Did you mean 'sigmoid_norm'"):
        find_loss("sigmoid-norms")
    with pytest.raises(ConfigError, match="belongs to: simpo, alphapo"):
        preference_loss(free, {"cpo": 1.0}, options=PairOptions(gamma=1.0))
    with pytest.raises(ConfigError, match="beta"):
        preference_loss(free, {"cpo": 1.0}, beta=0.0)


def test_suggested_weights_balance() -> None:
    for good, bad in ((100, 100), (4, 3), (900, 100), (100, 900), (1, 1000)):
        d, u = suggest_weights(good, bad)
        assert min(d, u) == 1.0 and 1 - 1e-9 <= d * good / (u * bad) <= 4 / 3 + 1e-9
