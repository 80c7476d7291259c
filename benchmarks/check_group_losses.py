"""TRL's GRPO and RLOO on fixed numbers, as a fixture that `tests/test_losses_group.py` compares ours with.

    python benchmarks/check_group_losses.py [--check]

Runs `GRPOTrainer._generate_and_score_completions` and `_compute_loss` of TRL 1.16 (and RLOOTrainer's) in the environment of
`peers.py`: the real methods, in float64, with stand-ins for the model (returns given log-probs), for sampling and for rewards.
Writes `tests/data/group_losses.json`: the numbers put in, and per case the advantages, the loss of one optimizer step, its gradient in
the log-probs, and TRL's metrics. `--check` writes nothing and says whether the stored fixture is what TRL computes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import check_losses
import torch
from torch import Tensor

FIXTURE = check_losses.FIXTURE.with_name("group_losses.json")
GROUPS, SIZE, WIDTH, ALLOWED, EOS, PAD = 3, 4, 6, 8, 1, 0
ROWS = GROUPS * SIZE
Numbers = dict[str, Any]


def inputs() -> Numbers:
    """Scores, lengths, and per-token log-probs under policy, old policy and reference, seeded, as nested lists."""
    g = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)
    lens = torch.randint(1, WIDTH + 1, (ROWS,), generator=g)
    lens[0] = WIDTH
    inside = torch.arange(WIDTH) < lens[:, None]
    old = -0.05 - 2 * draw(ROWS, WIDTH)
    logps = (old + 1.2 * (draw(ROWS, WIDTH) - 0.5)).clamp(max=-1e-3)
    ref = (old + 1.6 * (draw(ROWS, WIDTH) - 0.5)).clamp(max=-1e-3)
    scores = 3 * draw(ROWS) - 1
    scores[SIZE : 2 * SIZE] = 0.7  # a group that teaches nothing
    keep = lambda x: torch.where(inside, x.round(decimals=6), 0.0).tolist()
    return {
        "group": SIZE,
        "allowed": ALLOWED,
        "lens": lens.tolist(),
        "finished": [i % 3 != 1 for i in range(ROWS)],
        "scores": scores.round(decimals=6).tolist(),
        "logps": keep(logps),
        "old": keep(old),
        "ref": keep(ref),
    }


# name, TRL's settings, ours
GRPO_CASES: list[tuple[str, Numbers, Numbers]] = [
    *[
        (f"{name}, kl {kl}", {"loss_type": trl, "beta": kl, **settings}, {"variant": name, "kl_coef": kl, **own})
        for kl in (0.0, 0.1)
        for name, trl, settings, own in (
            ("grpo", "grpo", {}, {}),
            ("bnpo", "bnpo", {}, {}),
            ("dr_grpo", "dr_grpo", {"scale_rewards": "none"}, {}),
            ("dapo", "dapo", {"epsilon_high": 0.28}, {}),
            ("gspo", "grpo", {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}, {}),
            ("cispo", "cispo", {"epsilon_high": 1.2}, {"clip_eps_high": 0.2}),
        )
    ],
    ("gspo, wide", {"importance_sampling_level": "sequence"}, {"variant": "gspo", "clip_eps_low": 0.2, "clip_eps_high": 0.2}),
    ("gspo per token", {"importance_sampling_level": "sequence", "loss_type": "dapo"}, {"variant": "gspo", "per": "token", "clip_eps_low": 0.2, "clip_eps_high": 0.2}),
    ("batch std", {"scale_rewards": "batch"}, {"scale": "batch"}),
    ("first update", {"loss_type": "grpo", "num_iterations": 1}, {}),
    ("grpo, cut answers masked", {"mask_truncated_completions": True}, {"mask_truncated": True}),
    ("dapo, cut answers masked", {"loss_type": "dapo", "mask_truncated_completions": True}, {"variant": "dapo", "clip_eps_high": 0.2, "mask_truncated": True}),
    *[
        (f"{name} in 3 micro-batches", {"loss_type": name, "accumulate": 3, "steps": 3}, {"variant": name, "clip_eps_high": 0.2, "scale": "group"})
        for name in ("grpo", "bnpo", "dr_grpo", "dapo")
    ],
    ("dapo, 1 of 3 updates", {"loss_type": "dapo", "accumulate": 1, "steps": 3}, {"variant": "dapo", "clip_eps_high": 0.2, "rows": SIZE}),
]  # fmt: skip
RLOO_CASES: list[tuple[str, Numbers, Numbers]] = [
    ("rloo", {}, {"kl_coef": 0.0}),
    ("rloo, kl 0.05", {"beta": 0.05}, {"kl_coef": 0.05}),
    ("rloo, clip 0.1 and 0.6", {"beta": 0.05, "epsilon_low": 0.1, "epsilon_high": 0.6}, {"kl_coef": 0.05, "clip_eps_low": 0.1, "clip_eps_high": 0.6}),
    ("rloo, whitened", {"beta": 0.05, "normalize_advantages": True}, {"kl_coef": 0.05, "whiten_advantages": True}),
]  # fmt: skip


# The rest runs in the peer's environment.
class Model(torch.nn.Module):
    """Stands in for a language model: each row's last prompt token is its number, and the row's log-probs are returned.

    Args:
        new: [rows, C], returned where gradients are recorded.
        old: [rows, C], returned where they aren't.
    """

    is_gradient_checkpointing = False

    def __init__(self, new: Tensor, old: Tensor) -> None:
        super().__init__()
        self.new, self.old = new, old

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        table = self.new if torch.is_grad_enabled() else self.old
        logps = table[input_ids[:, -table.shape[1] - 1] - 2]
        return SimpleNamespace(log_probs=logps, entropy=torch.zeros_like(logps))


def setting_up(trainer: type, x: Numbers, settings: Numbers) -> tuple[Any, Tensor]:
    """A trainer without its constructor that "samples" the given answers, and the leaf that holds their log-probs."""
    tensor = lambda name: torch.tensor(x[name], dtype=torch.float64)
    leaf = tensor("logps").requires_grad_()
    steps, iterations = settings.pop("steps", 1), settings.pop("num_iterations", 2)  # 2: old log-probs are kept
    accumulate = settings.pop("accumulate", 1)
    completions = [[9] * (n - 1) + [EOS if done else 9] for n, done in zip(x["lens"], x["finished"])]
    prompts = [[2 + i, 2 + i] for i in range(ROWS)]
    args = SimpleNamespace(
        per_device_train_batch_size=ROWS, per_device_eval_batch_size=ROWS, steps_per_generation=steps,
        gradient_accumulation_steps=accumulate, gradient_checkpointing_kwargs=None, report_to=[], delta=None, use_bias_correction_kl=False,
    )  # fmt: skip
    same = lambda x, **_: x
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=same, gather_for_metrics=same, unwrap_model=same, reduce=same, process_index=0,
        num_processes=1, is_main_process=False, autocast=contextlib.nullcontext, sync_gradients=True,
    )  # fmt: skip
    texts = [""] * ROWS
    found = (prompts, completions, texts)
    if trainer.__name__ == "GRPOTrainer":
        found = (prompts, completions, None, texts, None, {}, None, [])
    base = {
        "accelerator": accelerator, "args": args, "model": Model(leaf, tensor("old")).train(), "ref_model": Model(leaf, tensor("ref")),
        "state": SimpleNamespace(global_step=0), "_tokenizer": SimpleNamespace(pad_token_id=PAD), "eos_token_ids": [EOS], "pad_to_multiple_of": None, "mask_truncated_completions": False,
        "_generate": lambda prompts: found, "_calculate_rewards": lambda *_: tensor("scores")[:, None],
        "environment_factories": None, "environments": None, "tools": None, "_is_vlm": False, "use_vllm": False, "vllm_importance_sampling_correction": False,
        "num_iterations": iterations, "beta": 0.0, "epsilon_low": 0.2, "epsilon_high": 0.2, "num_generations": SIZE, "num_generations_eval": SIZE,
        "multi_objective_aggregation": "sum_then_normalize", "reward_weights": torch.ones(1, dtype=torch.float64), "reward_funcs": [None],
        "reward_func_names": ["given"], "reward_clip_range": None, "normalize_advantages": False, "scale_rewards": "group", "log_multimodal": False,
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)), "_pending_extra_logs": defaultdict(list), "_pending_metrics": defaultdict(list),
        "loss_type": "grpo", "importance_sampling_level": "token", "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
        "max_completion_length": ALLOWED, "current_gradient_accumulation_steps": accumulate, "_entropy_bonus_enabled": False,
    }  # fmt: skip
    return check_losses.bare(trainer, **(base | settings)), leaf


def call(trainer: type, x: Numbers, settings: Numbers) -> Numbers:
    """Advantages, and the loss of one optimizer step with its gradient in the log-probs."""
    from trl.trainer.utils import split_tensor_dict

    self, leaf = setting_up(trainer, x, dict(settings))
    batch = self._generate_and_score_completions([{"prompt": ""}] * ROWS)
    parts = split_tensor_dict(batch, self.args.steps_per_generation)[: self.args.gradient_accumulation_steps]
    loss = sum(self._compute_loss(self.model, part) for part in parts)
    short = lambda t: [float(f"{v:.12g}") for v in t.flatten().tolist()]
    metrics = {k: v[-1] for k, v in self._metrics["train"].items() if k in ("kl", "clip_ratio/region_mean")}
    grad = torch.autograd.grad(loss, leaf)[0]
    return {
        "advantages": short(batch["advantages"]),
        "loss": float(loss.detach()),
        "grad": short(grad[torch.arange(WIDTH) < torch.tensor(x["lens"])[:, None]]),
        "metrics": metrics if len(parts) == 1 else {},
    }


def work(x: Numbers) -> list[Numbers]:
    """All cases."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    torch.set_default_dtype(torch.float64)  # TRL's standard deviation divides counts, in float32 otherwise
    out: list[Numbers] = []
    for trainer, cases in ((GRPOTrainer, GRPO_CASES), (RLOOTrainer, RLOO_CASES)):
        method = trainer.__name__.removesuffix("Trainer").lower()
        for name, settings, own in cases:
            out.append({"name": name, "method": method, "ours": own, **call(trainer, x, settings)})
    return out


if __name__ == "__main__":
    check_losses.main(__doc__, inputs, __file__, work, ("trl-1.16",), FIXTURE)
