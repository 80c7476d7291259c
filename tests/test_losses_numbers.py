"""Numbers at the edge: ratios beyond what exp can hold, halves passed directly, and cut answers among those that others are compared with."""

from __future__ import annotations

import importlib
import inspect
import itertools
import math
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import rlhf_nb.losses
from rlhf_nb.core import ConfigError, decide_precision
from rlhf_nb.losses import advantages, distill, group, kl, kto, policy, preference, process, reward, sft
from rlhf_nb.losses.group import group_kl, group_surrogate
from rlhf_nb.losses.policy import clipped_surrogate
from rlhf_nb.losses.preference import PairLogps
from rlhf_nb.run.engine import Engine
from rlhf_nb.train.grpo import GRPO, VARIANTS, GRPOConfig
from rlhf_nb.train.online import Actor
from rlhf_nb.train.online_dpo import OnlineDPO
from rlhf_nb.train.pairs import OnlineDPOConfig
from rlhf_nb.train.ppo import PPO, PPOConfig
from rlhf_nb.train.rloo import RLOO, RLOOConfig
from rlhf_nb.types import LossSum, Rollout

torch.set_num_threads(1)

# -- exponentials ------------------------------------------------------------------------------------------------------

SURROGATES: dict[str, Callable[..., LossSum]] = {
    "ppo": clipped_surrogate,
    **{name: lambda *a, v=v: group_surrogate(*a, **{k: x for k, x in v.items() if k != "scale"}, max_length=600) for name, v in VARIANTS.items()},
    "rloo": lambda *a: group_surrogate(*a, level="answer", per="sequence"),
}  # fmt: skip
SHIFTS = (1e-3, 0.2, 5.0, 15.0, 50.0, 100.0, 1e3, 1e4)


def gradient(loss: Callable[..., LossSum], shift: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and gradient of a surrogate whose log-ratios are `shift`."""
    old = torch.full_like(shift, -1.0)
    logps = (old + shift).requires_grad_()
    total = loss(logps, old, advantage, torch.ones_like(shift, dtype=torch.bool)).total
    return total.detach(), torch.autograd.grad(total, logps)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SURROGATES)
def test_a_huge_ratio_has_no_nan(name: str, dtype: torch.dtype) -> None:
    """Whatever isn't bad has a finite loss and a finite gradient, however far its ratio rose; a finite loss never comes with a broken gradient."""
    for size, sign, advantage in itertools.product(SHIFTS, (1.0, -1.0), (1.0, 0.0, -1.0)):
        if size > torch.finfo(dtype).max:
            continue
        total, grad = gradient(
            SURROGATES[name], torch.full((1, 3), sign * size, dtype=dtype), torch.full((1, 3), advantage, dtype=dtype)
        )
        where = f"shift {sign * size}, advantage {advantage}: {total}, {grad}"
        assert not total.isnan() and not grad.isnan().any(), where
        if advantage >= 0 or sign < 0:
            assert total.isfinite() and grad.isfinite().all(), where
        elif dtype is torch.float32:  # a half can't hold the gradient that brings a bad answer back
            assert not total.isfinite() or grad.isfinite().all(), where


def test_rloo_of_a_long_answer() -> None:
    """500 tokens, each 0.2 nats likelier: the answer's ratio is e^100. A good answer is clipped, so its gradient is 0, not NaN."""
    total, grad = gradient(SURROGATES["rloo"], torch.full((1, 500), 0.2), torch.ones(1, 500))
    assert total.item() == pytest.approx(-1.2, abs=1e-5) and not grad.any()


def plain_surrogate(logps: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """PPO's loss, as its paper writes it."""
    ratio = (logps - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()


def test_elsewhere_not_a_bit_has_changed() -> None:
    """The bound lies where the gradient is 0 anyway."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        shift = 4 * torch.randn(50, 40, dtype=dtype)
        advantage = torch.randn(50, 40, dtype=dtype)
        old, mask = torch.full_like(shift, -3.0), torch.ones(50, 40, dtype=torch.bool)
        found = []
        for loss in (lambda *a: clipped_surrogate(*a).total, plain_surrogate):
            x = (old + shift).requires_grad_()
            total = loss(x, old, advantage, mask)
            found.append((total.detach(), torch.autograd.grad(total, x)[0]))
        assert torch.equal(found[0][1], found[1][1])
        torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)


def test_kl_terms_are_never_finite_with_a_broken_gradient() -> None:
    for kind, size, sign in itertools.product(("k1", "k2", "k3"), SHIFTS, (1.0, -1.0)):
        ref = torch.full((1, 3), -1.0)
        x = (ref + sign * size).requires_grad_()
        total = group_kl(x, ref, torch.ones(1, 3, dtype=torch.bool), kind=kind).total
        (grad,) = torch.autograd.grad(total, x)
        assert not total.isnan() and not grad.isnan().any() and (not total.isfinite() or grad.isfinite().all())


# -- halves ------------------------------------------------------------------------------------------------------------

torch.manual_seed(0)
MASK = torch.arange(12) < torch.tensor([12, 7, 1, 0, 9, 12])[:, None]
LOGPS, REF, OLD = (-30 * torch.rand(6, 12) for _ in range(3))
SCORES, SUMS, REF_SUMS = 300 * torch.randn(6), -900 * torch.rand(6), -900 * torch.rand(6)
OTHER, REF_OTHER = -900 * torch.rand(6), -900 * torch.rand(6)
LENS = torch.tensor([12, 7, 1, 5, 9, 12])
LABELS = torch.tensor([True, False, True, True, False, False])
PAIR = ("pair", SUMS, OTHER, REF_SUMS, REF_OTHER)


def pair(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> PairLogps:
    return PairLogps(chosen, rejected, ref_chosen, ref_rejected, LENS, LENS.flip(0))


def of_pair(f: Callable[..., Any], **how: Any) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    return lambda *x: f(pair(*x), **how), PAIR[1:]  # type: ignore[return-value]


TOKENS = (LOGPS, REF)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "kl.kl_terms": (lambda x, y: kl.kl_terms(kl.wide(x) - kl.wide(y), "k2"), TOKENS),
    "kl.kl_estimate": (lambda x, y: kl.kl_estimate(x, y, "k3"), TOKENS),
    "kl.mean_and_error": (kl.mean_and_error, (SCORES,)),
    "kl.kl_report": (lambda x, y: kl.kl_report(x, y, MASK), TOKENS),
    "advantages.kl_shaped_rewards": (lambda s, x, y: advantages.kl_shaped_rewards(s, x, y, MASK, 0.1), (SCORES, *TOKENS)),
    "advantages.gae": (lambda x, y: advantages.gae(x, y, MASK), (100 * LOGPS, 100 * REF)),
    "advantages.moments": (lambda x: advantages.moments(x, MASK), (100 * LOGPS,)),
    "advantages.whiten": (lambda x: advantages.whiten(x, MASK), (100 * LOGPS,)),
    "advantages.rloo_baseline": (lambda s: advantages.rloo_baseline(s, 3), (SCORES,)),
    "advantages.group_advantages": (lambda s: advantages.group_advantages(s, 3), (SCORES,)),
    "sft.sft_loss": (lambda x: sft.sft_loss(x, MASK), (LOGPS,)),
    "reward.logistic": (lambda x: reward.logistic(x, 0.1), (SCORES,)),
    "reward.bradley_terry": (lambda x, y: reward.bradley_terry(x, y), (SCORES, REF_SUMS)),
    "reward.centering": (lambda x, y: reward.centering(x, y), (SCORES, REF_SUMS)),
    "process.step_loss": (lambda x, y: process.step_loss(x, kl.wide(y).exp(), MASK), TOKENS),
    "process.aggregate_steps": (lambda x: process.aggregate_steps(kl.wide(x).exp(), MASK, "product"), (LOGPS,)),
    "process.step_rewards": (lambda x: process.step_rewards(x, MASK), (LOGPS,)),
    "process.move_to_steps": (lambda x, y: process.move_to_steps(x, y, MASK), TOKENS),
    "process.group_step_advantages": (lambda x: process.group_step_advantages(x, MASK, MASK, 3), (LOGPS,)),
    "policy.bounded": (lambda x, y: policy.bounded(kl.wide(x), kl.wide(y), 0.2), (LOGPS, REF)),
    "policy.clipped_surrogate": (lambda x, y, a: policy.clipped_surrogate(x, y, a, MASK), (LOGPS, LOGPS - 0.1, REF)),
    "policy.clipped_value": (lambda x, y, r: policy.clipped_value(x, y, r, MASK), (100 * LOGPS, 100 * REF, 100 * OLD)),
    "policy.entropy_bonus": (lambda x: policy.entropy_bonus(x, MASK), (-LOGPS,)),
    "group.group_surrogate": (lambda x, y, a: group.group_surrogate(x, y, a, MASK, level="sequence"), (LOGPS, LOGPS - 0.1, SCORES)),
    "group.group_kl": (lambda x, y: group.group_kl(x, y, MASK, kind="k2"), TOKENS),
    "group.truncated_weights": (lambda x, y: group.truncated_weights(x, y, MASK), TOKENS),
    "kto.weigh_sides": (lambda x: kto.weigh_sides(kl.wide(x), LABELS, 2.0, 1.0), (SCORES,)),
    "kto.kto": (lambda x: kto.kto(x, LABELS, 0.5, beta=0.1), (SCORES,)),
    "kto.apo_zero_unpaired": (lambda x: kto.apo_zero_unpaired(x, LABELS, beta=0.1), (SCORES,)),
    "kto.bco": (lambda x: kto.bco(x, LABELS, 0.5, beta=0.1), (SCORES,)),
    "kto.mismatched_kl": (kto.mismatched_kl, (SCORES.abs(),)),
    "kto.unpaired_loss": (lambda x, y: kto.unpaired_loss(x, y, LABELS), (SUMS, REF_SUMS)),
    "preference.log_ratios": of_pair(preference.log_ratios, divergence="forward_kl"),
    "preference.mean_logps": of_pair(preference.mean_logps),
    "preference.sum_logps": of_pair(preference.sum_logps),
    "preference.log_odds": of_pair(preference.log_odds),
    "preference.power_rewards": of_pair(preference.power_rewards),
    "preference.nll": of_pair(preference.nll),
    "preference.wpo_weights": (lambda x, y: preference.wpo_weights((x, y, LENS), (y, x, LENS)), TOKENS),
    "preference.desensitize": (lambda x: preference.desensitize(x, LENS, LENS.flip(0), 0.5), (LOGPS,)),
    "preference.preference_loss": of_pair(preference.preference_loss, losses={"sigmoid": 1.0, "sppo_hard": 0.1}),
    "distill.keep_likeliest": (lambda x: distill.keep_likeliest(x, 4)[0], (LOGPS,)),
    "distill.divergence": (lambda x, y: distill.divergence(x, *distill.keep_likeliest(y, 4), "js"), TOKENS),
    "distill.distill_loss": (lambda x, y: distill.distill_loss(-x, -y, MASK), TOKENS),
    **{f"preference.{e.loss.__name__}": of_pair(e.loss, beta=e.beta) for e in preference.LOSSES.values()},
}  # fmt: skip
# no tensors go in, or only counts and shapes
OTHERS = {
    "kl.check_tokens", "kl.wide", "advantages.merge_moments", "reward.check_pairs", "reward.check_smoothing", "policy.explained_variance", "group.token_weights",
    "kto.suggest_weights", "kto.check_unpaired", "preference.find_loss", "preference.check_losses",
}  # fmt: skip


def test_every_public_function_is_here() -> None:
    found = set()
    for info in pkgutil.iter_modules(rlhf_nb.losses.__path__):
        module = importlib.import_module(f"rlhf_nb.losses.{info.name}")
        found |= {f"{info.name}.{n}" for n in module.__all__ if inspect.isfunction(getattr(module, n))}
    assert found == set(CALLS) | OTHERS


def numbers(x: Any) -> list[Tensor]:
    """All tensors in a result, whatever it is."""
    if isinstance(x, Tensor):
        return [x]
    parts = list(x.values()) if isinstance(x, dict) else list(x) if isinstance(x, tuple) else []
    return [t for part in parts for t in numbers(part)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_halves_are_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    """Half-precision tensors give, to the bit, what their values in float32 give."""
    f, inputs = CALLS[name]
    halves = [x.to(dtype) for x in inputs]
    got, want = numbers(f(*halves)), numbers(f(*(x.float() for x in halves)))
    assert len(got) == len(want) > 0
    for a, b in zip(got, want):
        assert a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()), (a, b)
        assert torch.equal(a.isnan(), b.isnan())
    wide = numbers(f(*(x.double() for x in halves)))
    for a, b in zip(got, wide):
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-3, atol=1e-4, equal_nan=True)


# -- cut answers -------------------------------------------------------------------------------------------------------

METHODS: dict[str, tuple[type, type, dict[str, Any]]] = {
    **{f"rloo {b}": (RLOO, RLOOConfig, {"baseline": b}) for b in ("rloo", "remax", "batch", "group_batch")},
    "rloo whitened": (RLOO, RLOOConfig, {"whiten_advantages": True}),
    **{f"grpo {s}": (GRPO, GRPOConfig, {"scale": s}) for s in ("group", "batch", "none")},
}  # fmt: skip


def made(kind: type, config: Any) -> Any:
    """A method without a model."""
    self: Any = object.__new__(kind)
    self.config, self.engine, self.reference = config, Engine(decide_precision("cpu", "fp32")), None
    self.tokenizer, self._warned, self.kl = SimpleNamespace(pad_token_id=0), False, None
    self.actor = Actor(self)
    return self


def rollout(scores: list[float], finished: tuple[bool, ...]) -> Rollout:
    """Answers of two tokens, on which policy and reference agree."""
    n = len(scores)
    zeros, real = torch.zeros(n, 2), torch.ones(n, 2, dtype=torch.bool)
    return Rollout(
        prompt_ids=torch.full((n, 1), 5), prompt_mask=torch.ones(n, 1, dtype=torch.bool), completion_ids=torch.full((n, 2), 9), completion_lens=torch.full((n,), 2),
        completion_mask=real.clone(), uid=torch.arange(n), finished=torch.tensor(finished), prompts=[""] * n, texts=[""] * n, old_logps=zeros - 1, ref_logps=zeros - 1,
        values=zeros.clone(), scores=torch.tensor(scores),
    )  # fmt: skip


class Scores:
    """Rewards that are known, none of them at a step."""

    steps, fns = None, ()

    def __init__(self, scores: list[float]) -> None:
        self.scores = torch.tensor(scores)

    def __call__(self, r: Rollout) -> tuple[Tensor, dict[str, Tensor]]:
        return self.scores.clone(), {}


def learnt(self: Any, scores: list[float], finished: tuple[bool, ...]) -> Rollout:
    """A rollout as training goes on with it."""
    r = rollout(scores, finished)
    self.rewards = Scores(scores)
    told = {"greedy": torch.ones(len(scores))} if getattr(self.config, "baseline", "") == "remax" else {}
    return cast(Rollout, self.leave_out_cut(self.advantages(self.score(r), **told)))


@pytest.mark.parametrize("name", METHODS)
def test_a_cut_answer_is_compared_with_and_learns_nothing(name: str) -> None:
    """Every pattern of cut answers: those that ended get the advantages that they would get without a mask, the others none."""
    kind, config, how = METHODS[name]
    both = [made(kind, config(num_generations=4, kl_coef=0.0, mask_truncated=m, **how)) for m in (True, False)]
    for finished in itertools.product((True, False), repeat=4):
        for scores in ([5.0, 5.0, 5.0, 5.0], [1.0, 2.0, 4.0, -3.0]):
            masked, whole = (learnt(self, scores, finished).need("advantages") for self in both)
            assert torch.equal(masked, torch.where(torch.tensor(finished)[:, None], whole, 0.0)), (finished, scores)
            if scores[0] == scores[3] and "remax" not in name:
                assert not masked.any(), f"equal scores, and yet {masked[:, 0].tolist()}"


def test_rloo_by_hand() -> None:
    """Scores 5, 5, 5, 5 and the last one cut: nothing is better than anything."""
    self = made(RLOO, RLOOConfig(num_generations=4, kl_coef=0.0, mask_truncated=True))
    r = learnt(self, [5.0, 5.0, 5.0, 5.0], (True, True, True, False))
    assert r.need("advantages")[:, 0].tolist() == [0.0, 0.0, 0.0, 0.0]
    assert r.completion_mask.tolist() == [[True] * 2] * 3 + [[False] * 2]
    mixed = learnt(self, [4.0, 1.0, 1.0, 1.0], (True, True, True, False)).need("advantages")[:, 0]
    torch.testing.assert_close(mixed, torch.tensor([3.0, -1.0, -1.0, 0.0]))


def test_ppo_whitens_what_it_learns_from() -> None:
    """PPO compares with its critic, not with siblings: mean and variance are those of the tokens that count."""
    self = made(PPO, PPOConfig(mask_truncated=True, missing_eos=None))
    self.kl, self.normalizer = kl.FixedKL(0.0), None
    r = learnt(self, [1.0, 2.0, 4.0, 100.0], (True, True, True, False))
    kept = r.need("advantages")[:3]
    assert abs(float(kept.mean())) < 1e-6 and float(kept.var()) == pytest.approx(1.0, abs=1e-4)
    assert not r.completion_mask[3].any()


def test_a_pair_with_a_cut_answer_is_no_pair() -> None:
    self = made(OnlineDPO, OnlineDPOConfig(mask_truncated=True))
    for finished in itertools.product((True, False), repeat=2):
        r = learnt(self, [1.0, 2.0], finished)
        assert bool(r.need("advantages").any()) == all(finished), finished
        assert int(self.denominators(r)["preference"]) == int(all(finished))


# -- answers that never end --------------------------------------------------------------------------------------------


def scored(config: Any, scores: list[float], finished: tuple[bool, ...]) -> list[float]:
    self = made(GRPO, config)
    self.rewards = Scores(scores)
    return cast(list[float], self.score(rollout(scores, finished)).need("scores").tolist())


def test_not_ending_is_never_worth_more() -> None:
    """Taken from the score: the same answer is worth more with an end than without one, whatever it scores."""
    for score in (-7.0, -1.0, 0.0, 3.0):
        with_end, without = scored(
            GRPOConfig(num_generations=2, mini_batch_size=2, missing_eos=1.0), [score] * 2, (True, False)
        )
        assert without == with_end - 1.0
    ppo = PPOConfig()
    assert (ppo.missing_eos, ppo.missing_eos_mode) == (1.0, "subtract")


def test_a_fixed_score_says_when_it_pays() -> None:
    """A number not above 0 stays what it was: the score itself. Where finished answers fall below it, it is said."""
    config = GRPOConfig(num_generations=2, mini_batch_size=2, missing_eos=-1.0)
    assert config.missing_eos_mode == "fixed"
    assert scored(config, [0.0, -5.0], (True, False)) == [0.0, -1.0]
    with pytest.warns(UserWarning, match="1 of 1 finished answers score below"):
        assert scored(config, [-5.0, -5.0], (True, False)) == [-5.0, -1.0]
    with pytest.raises(ConfigError, match="would reward answers that never end"):
        GRPOConfig(missing_eos=-1.0, missing_eos_mode="subtract")
    assert math.isclose(PPOConfig(missing_eos_penalty=2.0).missing_eos, 2.0)  # TRL's word, with TRL's meaning
