"""Samplers behind one interface: what a run does when somebody else samples, and what it says about its time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rlhf_nb.config import SamplingConfig
from rlhf_nb.core import ConfigError, RewardError
from rlhf_nb.data import toy
from rlhf_nb.losses.group import truncated_weights
from rlhf_nb.rollout.backends import OurSampler
from rlhf_nb.run.callbacks import where_time_goes
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer
from rlhf_nb.train.online_dpo import OnlineDPOTrainer
from rlhf_nb.train.pairs import OnlineDPOConfig
from rlhf_nb.train.ppo import PPOConfig, PPOTrainer
from rlhf_nb.train.rloo import RLOOConfig, RLOOTrainer
from rlhf_nb.types import PromptBatch, Rollout

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
tok = toy.build_tokenizer()
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "grpo": (GRPOConfig, GRPOTrainer, {"num_generations": 4}),
    "rloo": (RLOOConfig, RLOOTrainer, {}),
    "ppo": (PPOConfig, PPOTrainer, {"num_inner_epochs": 1}),
}
OPPONENTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "remax": (RLOOConfig, RLOOTrainer, {"baseline": "remax"}),
    "reference": (OnlineDPOConfig, OnlineDPOTrainer, {"opponent": "reference"}),
}


def vowels(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """A cheap reward that differs within a group."""
    return [sum(c in "aeiou" for c in text) / 10 for text in completions]


def trainer(kind: str, folder: Path, reward: Any = vowels, **settings: Any) -> Any:
    """Two steps of a tiny run."""
    config, make, more = (KINDS | OPPONENTS)[kind]
    settings = {
        "steps": 2,
        "mini_batch_size": 8,
        "rollout_batch_size": 8,
        "sampling": {"max_new_tokens": 8},
        **more,
        **settings,
    }
    c = config.preset("toy", output_dir=str(folder), console=False, **settings)
    return make(c, toy.build_model(0, "tiny"), tok, reward=reward, rows=toy.train_prompts(32, 0), eval_rows=[])


class Elsewhere:
    """Draws with a policy that is a little off, like an engine with other kernels or older weights."""

    name, exact, slots_in_use = "elsewhere", False, None

    def __init__(self, spread: float = 0.05, tells: bool = True) -> None:
        self.spread, self.tells = spread, tells

    def generate(self, model: Any, prompts: PromptBatch, sampling: SamplingConfig, **how: Any) -> Rollout:
        off = toy.build_model(0, "tiny")
        off.load_state_dict(model.state_dict())
        with torch.no_grad():
            for p in off.parameters():
                p.add_(self.spread * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
        r = OurSampler().generate(off, prompts, sampling, **how)
        r.rollout_logps = r.rollout_logps if self.tells else None
        return r


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_step_says_where_its_time_went(kind: str, tmp_path: Path) -> None:
    run = trainer(kind, tmp_path / "run")
    event = run.fit()[-1]
    shares = [event[f"perf/{k}_share"] for k in ("generate", "score", "update")]
    assert all(0 < s < 1 for s in shares) and 0.5 < sum(shares) <= 1.0
    assert 0.5 < event["perf/slots_in_use"] <= 1 and event["perf/generated_tokens_per_s"] > 0
    assert "sampling/logp_difference_mean" not in event, "our own sampler is the scorer"
    assert where_time_goes(event).startswith("gen/score/upd") and "slots" in where_time_goes(event)
    assert where_time_goes({"loss": 1.0}) == ""


@pytest.mark.parametrize("kind", list(KINDS))
def test_difference_is_logged_and_corrected(kind: str, tmp_path: Path) -> None:
    run = trainer(kind, tmp_path / "run", **({"whiten_advantages": False} if kind == "ppo" else {}))
    run.method.sampler = Elsewhere()
    r = run.collect(run.next_batch())
    assert not torch.equal(r.old_logps, r.rollout_logps), "π_old is the scorer's"
    assert run.method.metrics()["sampling/logp_difference_mean"] > 0.01
    w = truncated_weights(r.old_logps, r.rollout_logps, r.completion_mask, 2.0)
    assert w[r.completion_mask].std() > 0.01 and w.max() <= 2
    if kind == "ppo":
        plain = run.method.config.model_copy(update={"importance_cap": 1.0})
        weighed = r.advantages.clone()
        r.rollout_logps = r.old_logps  # as if they agreed
        run.method.config = plain
        torch.testing.assert_close(weighed, run.method.advantages(r).advantages * w)
    else:
        torch.testing.assert_close(run.method.correction(r), w)


@pytest.mark.parametrize("more", [{}, {"old_logps": "recompute"}, {"num_inner_epochs": 2}, {"rollout_batch_size": 16}])
def test_one_step_makes_no_second_pass(more: dict[str, Any], tmp_path: Path) -> None:
    """In bf16 the sampler's log-probs are off; where the only update computes π_old anyway, it isn't scored before."""
    run = trainer("grpo", tmp_path / "run", precision="bf16", steps=1, **more)
    event = run.fit()[-1]
    assert 0 < event["sampling/logp_difference_mean"] < 0.2 and 0.9 < event["sampling/importance_mean"] < 1.1
    assert ("sampling/logp_difference_max" in event) == bool(more), "what only a scoring pass before the update says"
    assert abs(event["val/ratio"] - 1) < (1e-6 if not more else 0.1)
    r = run.collect(run.next_batch())
    assert torch.equal(r.old_logps, r.rollout_logps) == (not more)


@pytest.mark.parametrize("kind", list(KINDS))
def test_sampler_without_log_probs(kind: str, tmp_path: Path) -> None:
    run = trainer(kind, tmp_path / "run")
    run.method.sampler = Elsewhere(tells=False)
    event = run.fit()[-1]
    assert math.isfinite(event["loss"]) and "sampling/logp_difference_mean" not in event
    other = trainer(kind, tmp_path / "other", old_logps="sampler")
    other.method.sampler = Elsewhere(tells=False)
    with pytest.raises(
        ConfigError, match=r"old_logps=sampler, but elsewhere returns no log-probs: use old_logps=auto\."
    ):
        other.fit()


class Spy(OurSampler):
    """Notes who was asked, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Any, bool, int]] = []

    def generate(self, model: Any, prompts: PromptBatch, sampling: SamplingConfig, **how: Any) -> Rollout:
        self.asked.append((model, how.get("greedy", False), how["num_samples"]))
        return super().generate(model, prompts, sampling, **how)


@pytest.mark.parametrize("kind", list(OPPONENTS))
def test_whoever_is_compared_with_comes_from_the_same_sampler(kind: str, tmp_path: Path) -> None:
    run = trainer(kind, tmp_path / "run")
    spy = run.method.sampler = Spy()
    run.collect(run.next_batch())
    policy, reference = run.method.model, run.method.reference.model
    expected = {
        "remax": [(policy, True, 1), (policy, False, 4)],
        "reference": [(policy, False, 1), (reference, False, 1)],
    }
    assert spy.asked == expected[kind]


@pytest.mark.parametrize("kind", list(OPPONENTS))
def test_opponents_with_another_sampler(kind: str, tmp_path: Path) -> None:
    silent = trainer(kind, tmp_path / "silent")
    silent.method.sampler = Elsewhere(tells=False)
    assert math.isfinite(silent.fit()[-1]["loss"])


@pytest.mark.parametrize("sampler", ["ours", "generate"])
def test_evaluation_asks_the_sampler_of_the_settings(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf_nb.evaluate import policy

    asked = []

    class Asked(OurSampler):
        def answer(self, model: Any, request: Any) -> Rollout:
            asked.append((request.sampling.sampler, self.batch_size))
            return super().answer(model, request)

    monkeypatch.setattr(policy, "OurSampler", Asked)
    model, texts = toy.build_model(0, "tiny"), [r["prompt"] for r in toy.test_prompts(6, 0)]
    prompts = PromptBatch.from_lists([tok(t)["input_ids"] for t in texts], prompts=texts)
    how = SamplingConfig(max_new_tokens=8, sampler=sampler, top_k=5)
    found = policy.evaluate(model, tok, prompts, {"vowels": vowels}, model, how, batch_size=4)
    assert asked == [(sampler, 4)]
    assert abs(float(found.kl["k1"].mean)) < 1e-4, "the policy against itself, whatever the engine says of its filters"


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda prompts, completions, **c: [1.0] * (len(completions) - 1), "7"),
        (lambda prompts, completions, **c: [None] * len(completions), "no reward function has an opinion on 8 of 8"),
        (lambda prompts, completions, **c: [math.nan] * len(completions), "expected a finite number"),
        (lambda prompts, completions, answer, **c: [0.0] * len(completions), "needs the column 'answer'"),
    ],
    ids=["one too few", "nobody has an opinion", "NaN", "no answer column"],
)
def test_bad_rewards_end_in_a_sentence(reward: Any, says: str, tmp_path: Path) -> None:
    rows = [{"prompt": r["prompt"]} for r in toy.train_prompts(32, 0)]
    config = GRPOConfig.preset(
        "toy",
        output_dir=str(tmp_path / "run"),
        console=False,
        steps=1,
        mini_batch_size=8,
        num_generations=4,
        sampling={"max_new_tokens": 6},
    )
    run = GRPOTrainer(config, toy.build_model(0, "tiny"), tok, reward=reward, rows=rows, eval_rows=[])
    with pytest.raises(RewardError, match=says):
        run.fit()


def test_group_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_generations.*1"):
        GRPOConfig.preset("toy", num_generations=1)
    with pytest.raises(ConfigError, match="compares an answer with its siblings"):
        RLOOConfig.preset("toy", num_generations=1)
    assert RLOOConfig.preset("toy", num_generations=1, baseline="batch").num_generations == 1
