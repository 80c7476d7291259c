"""What mutants once got through: numbers so small that they are computed here by hand."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resume_harness import Numbers, Points, Regression, regression_config
from torch import Tensor, nn

from rlhf_nb.config import OptimizerConfig
from rlhf_nb.data import toy
from rlhf_nb.data.sources import MemorySource, collate_preferences
from rlhf_nb.losses.group import group_surrogate
from rlhf_nb.losses.policy import clipped_surrogate
from rlhf_nb.losses.preference import PairLogps, aot, aot_unpaired, cpo, dpo
from rlhf_nb.rewards.formats import near_target
from rlhf_nb.run.checkpoint import Part, load_checkpoint, save_checkpoint
from rlhf_nb.run.loop import Feed, Trainer, add_pairs
from rlhf_nb.run.strategy import build_optimizer, clip_by
from rlhf_nb.train.dpo import DPO, DPOConfig, DPOTrainer
from rlhf_nb.train.kto import KTOConfig, KTOTrainer
from rlhf_nb.train.ppo import PPOConfig, PPOTrainer

torch.set_num_threads(1)

RATIOS = torch.tensor([[0.5, 0.75, 1.25, 1.5]], dtype=torch.float64)
# a fall is clipped where the advantage is below 0, a rise where it is above
ADVANTAGES = torch.tensor([[-1.0, -2.0, 1.0, 3.0]], dtype=torch.float64)
MASK = torch.ones(1, 4, dtype=torch.bool)


def test_each_side_is_clipped_by_its_own_bound() -> None:
    """0.5 and 1.5 lie beyond 1 − 0.4 and 1 + 0.1, 1.25 beyond the upper one, 0.75 inside: −(−0.6 − 2 · 0.75 + 1.1 + 3 · 1.1)."""
    old = torch.zeros(1, 4, dtype=torch.float64)
    loss = clipped_surrogate(RATIOS.log(), old, ADVANTAGES, MASK, clip_eps_low=0.4, clip_eps_high=0.1)
    assert float(loss.total) == pytest.approx(-2.3, abs=1e-12)
    group = group_surrogate(RATIOS.log(), old, ADVANTAGES, MASK, clip_eps_low=0.4, clip_eps_high=0.1, per="token")
    assert float(group.total) == pytest.approx(-2.3, abs=1e-12)


def test_correction_weighs_each_token() -> None:
    """At ratio 1 the loss is −Σ A · w."""
    logps, weights = torch.zeros(1, 4, dtype=torch.float64), torch.tensor([[1.0, 0.5, 2.0, 0.25]], dtype=torch.float64)
    loss = group_surrogate(logps, logps, ADVANTAGES, MASK, per="token", correction=weights)
    assert float(loss.total) == pytest.approx(-(-1.0 - 2 * 0.5 + 2.0 + 3 * 0.25), abs=1e-12)


@pytest.mark.parametrize("loss", [dpo, cpo, aot, aot_unpaired], ids=lambda f: f.__name__)
def test_smoothing_is_a_mixture_of_both_labels(loss: Any) -> None:
    """(1 − ε) · loss of the pair + ε · loss of the pair turned round; with one pair, sorting does nothing."""
    chosen, rejected, zero = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, -3.5, 0.0))
    pair = PairLogps(chosen, rejected, zero, zero, torch.tensor([1]), torch.tensor([1]))
    margin, share = 0.4 * 2.5, 0.2
    want = (1 - share) * math.log1p(math.exp(-margin)) + share * math.log1p(math.exp(margin))
    assert float(loss(pair, beta=0.4, label_smoothing=share)) == pytest.approx(want, abs=1e-12)


def test_weight_decay_spares_biases_and_norms() -> None:
    """Without gradient a step leaves (1 − lr · decay) of a matrix, and all of the rest."""
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2), nn.Embedding(4, 2))
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    optimizer = build_optimizer(module, OptimizerConfig(lr=0.5, weight_decay=0.1))
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in module.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if p.dim() >= 2 else 1.0), msg=name)
    assert any(float(b.abs().sum()) > 0 and b.dim() < 2 for b in before.values())


def settings(folder: Path, **over: Any) -> dict[str, Any]:
    return {"output_dir": str(folder / "run"), "console": False, "steps": 1, "epochs": None, "device": "cpu", **over}


def tiny_ppo(folder: Path, **over: Any) -> PPOTrainer:
    small = {
        "rollout_batch_size": 8,
        "mini_batch_size": 8,
        "num_inner_epochs": 1,
        "sampling": {"max_new_tokens": 6},
        "missing_eos": None,
    }
    config = PPOConfig.preset("toy", **settings(folder, reward="gold", **(small | over)))
    policy = "policy" if "policy" in inspect.signature(PPOTrainer).parameters else "model"
    given: dict[str, Any] = {policy: toy.build_model(0, "tiny"), "tokenizer": toy.build_tokenizer()}
    return PPOTrainer(config, **given, reward=toy.gold_reward, rows=toy.train_prompts(8))


@pytest.mark.parametrize("coefs", [(0.0, 0.0), (0.7, 0.0), (0.3, 0.4)])
def test_ppo_adds_its_three_losses_by_their_weights(coefs: tuple[float, float], tmp_path: Path) -> None:
    """One optimizer step: loss = policy + vf_coef · value − entropy_coef · entropy."""
    value, entropy = coefs
    optimizer = OptimizerConfig(lr=1e-3, schedule="constant", warmup_steps=0)
    trainer = tiny_ppo(tmp_path, vf_coef=value, entropy_coef=entropy, optimizer=optimizer)
    event = trainer.fit()[-1]
    assert event["loss/value_avg"] > 1e-3
    want = event["loss/policy_avg"] + value * event["loss/value_avg"]
    if entropy:
        want -= entropy * event["policy/entropy_avg"]
    assert event["loss"] == pytest.approx(want, rel=1e-4, abs=1e-6)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_moving_reference_moves(kind: str, tmp_path: Path) -> None:
    """After two steps with sync_every=2: 0.4 of where it started + 0.6 of the policy; after one step nothing."""
    rows = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in toy.preference_rows(16)]
    for steps, share in ((1, 0.0), (2, 0.6)):
        config: Any = DPOConfig if kind == "dpo" else KTOConfig
        optimizer = OptimizerConfig(lr=1e-3, schedule="constant", warmup_steps=0)
        cfg = config.preset(
            "toy", **settings(tmp_path / str(steps), steps=steps, mini_batch_size=8, reference="moving", sync_every=2, sync_mixup=0.6, optimizer=optimizer)
        )  # fmt: skip
        model = toy.build_model(0, "tiny")
        start = flat(model).clone()
        trainer: Any = (DPOTrainer if kind == "dpo" else KTOTrainer)(cfg, model, toy.build_tokenizer(), rows)
        trainer.fit()
        policy, reference = flat(model), flat(trainer.method.reference.model)
        assert float((policy - start).abs().max()) > 1e-4
        torch.testing.assert_close(reference, start + share * (policy - start), rtol=0, atol=1e-6)


def test_each_epoch_has_its_own_order() -> None:
    source = MemorySource([{"n": i} for i in range(32)], seed=3)
    first, second = ([r["n"] for r in source.next_batch(32)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(32)) and first != second


def test_chosen_stays_chosen() -> None:
    row = {"prompt_ids": [5], "chosen_ids": [7, 1], "rejected_ids": [8, 9, 1], "margin": None}
    pairs = collate_preferences([row], pad_id=0)
    assert pairs.chosen_lens.tolist() == [2] and pairs.rejected_lens.tolist() == [3]
    assert pairs.completions(0).completion_ids.tolist() == [[7, 1, 0], [8, 9, 1]]


def test_parts_are_joined_by_their_places_not_by_their_ranks(tmp_path: Path) -> None:
    """Rank 0 holds the second half of a parameter."""
    for rank, (start, values) in ((1, (0, [1.0, 2.0])), (0, (2, [3.0, 4.0]))):
        part = Part(rank, 2, "t", {"model": {"w": ([2, 2], start)}})
        folder = save_checkpoint(tmp_path, 1, {"model": {"w": torch.tensor(values)}}, {"world_size": 2}, part=part)
    tensors, _ = load_checkpoint(folder)
    assert tensors["model"]["w"].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_each_inner_epoch_has_its_own_order() -> None:
    method = SimpleNamespace(mini_batches=lambda data, seed: iter([seed]))
    config = SimpleNamespace(num_inner_epochs=3, seed=0, rollout_batch_size=1)
    method.group = 1
    run: Any = SimpleNamespace(config=config, step=4, method=method, engine=SimpleNamespace(roles=None))
    assert len(set(Feed(run).mini_batches(None))) == 3


class Flaky(Regression):
    """Every second step its loss is not a number."""

    def collect(self, batch: Points, step: int) -> Points:
        return Points(batch.x, batch.y * (float("nan") if step % 2 else 1.0))


def test_only_updates_in_a_row_are_too_many(tmp_path: Path) -> None:
    """With max_nonfinite=1 a run survives any number of bad updates that have good ones between them."""
    config = regression_config(steps=6, max_nonfinite=1, num_inner_epochs=1, rollout_batch_size=8, mini_batch_size=8)
    run = Trainer(Flaky(), Numbers(), config, run_dir=tmp_path / "run")
    assert len(run.fit()) == 6 and run.bad_in_a_row == 1
    assert all(bool(torch.isfinite(p).all()) for p in run.method.module.parameters())


def test_evaluation_uses_up_no_random_number(tmp_path: Path) -> None:
    run = Trainer(Regression(), Numbers(), regression_config(), run_dir=tmp_path / "run")
    run.start()
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    assert run.evaluate()  # draws eight points
    assert torch.equal(torch.rand(3), want)


def test_statistics_of_updates_add_up() -> None:
    assert add_pairs({"a": (1.0, 2.0)}, {"a": (3.0, 4.0), "b": (5.0, 6.0)}) == {"a": (4.0, 6.0), "b": (5.0, 6.0)}


def test_small_gradients_stay_as_they_are() -> None:
    for norm, factor in ((0.5, 1.0), (4.0, 0.25)):
        gradient = torch.tensor([2.0])
        clip_by([gradient], norm, 1.0)
        assert float(gradient) == 2.0 * factor


def test_ppo_returns_are_advantages_plus_values(tmp_path: Path) -> None:
    run = tiny_ppo(tmp_path, whiten_advantages=False)
    r = run.score(run.rollout(run.prompts()))
    assert r.values is not None  # the critic begins at 0, where nothing would be seen
    r.values = torch.randn(r.values.shape, generator=torch.Generator().manual_seed(0))
    r = run.advantages(r)
    assert r.advantages is not None and r.returns is not None
    torch.testing.assert_close(r.returns, torch.where(r.completion_mask, r.advantages + r.values, 0.0))
    assert float((r.returns - r.advantages).abs().max()) > 0.5


def test_ppo_tells_its_controller_what_it_measured(tmp_path: Path) -> None:
    """No drift at the first step, so the price falls by its largest step: 0.2 · 8 / 100."""
    run = tiny_ppo(tmp_path, kl_coef=0.05, kl_target=6.0, kl_horizon=100.0)
    run.fit()
    assert run.method.kl.coef == pytest.approx(0.05 * (1 - 0.2 * 8 / 100), rel=1e-6)


def test_the_anchor_of_dpo_is_averaged_over_tokens() -> None:
    rows = [{"prompt_ids": [5], "chosen_ids": [7] * n, "rejected_ids": [8], "margin": None} for n in (2, 3)]
    counts = DPO.denominators(SimpleNamespace(), collate_preferences(rows, pad_id=0))  # type: ignore[arg-type]
    assert {k: int(n) for k, n in counts.items()} == {"preference": 2, "nll": 5}


def test_too_short_is_as_far_as_too_long() -> None:
    assert near_target(5, 10, 20) == near_target(15, 10, 20) == 0.75
