"""Ranks that share the tokens of each row (+cp): the numbers of one process, resuming elsewhere, memory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from process_cases import run_ranks
from test_processes import far, first_rollouts, steps, weights

from rlhf_nb.core import ConfigError
from rlhf_nb.run.strategy import layout_of
from rlhf_nb.scale.plan import plan
from rlhf_nb.scale.topology import DecoderShape, Job, Split, predict_memory

BAR = 1e-5  # relative


def same(one: Path, other: Path) -> None:
    """Losses, weights and what was drawn are those of one process, in fp32."""
    for a, b in zip(steps(one), steps(other), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=BAR, abs=BAR)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=BAR)
    assert far(one, other) <= BAR
    assert first_rollouts(one) == first_rollouts(other)


def test_two_ranks_that_share_rows_are_one_process(tmp_path: Path) -> None:
    """Rows of unequal lengths, packed, some of a token or two; and the run goes on in one process."""
    run_ranks("dpo_lora", tmp_path / "one", steps=3)
    run_ranks("dpo_lora", tmp_path / "two", 2, "ddp+cp2", steps=2)
    run_ranks("dpo_lora", tmp_path / "two", steps=3, resume=True)
    same(tmp_path / "one", tmp_path / "two")


CASES = ("sft", "sft_lora", "reward", "dpo", "grpo", "grpo_lora", "ppo")


@pytest.mark.slow
def test_every_method_is_one_process(tmp_path: Path) -> None:
    run_ranks(",".join(CASES), tmp_path / "one", cpu=2400, steps=4)
    run_ranks(",".join(CASES), tmp_path / "two", 2, "ddp+cp2", cpu=2400, steps=4)
    for case in CASES:
        same(tmp_path / "one" / case, tmp_path / "two" / case)


@pytest.mark.slow
def test_weights_and_rows_are_shared(tmp_path: Path) -> None:
    """Four ranks, two of which share each row, and all of them the weights; layers computed again."""
    cases = "sft,reward,dpo,grpo"
    run_ranks(cases, tmp_path / "one", cpu=2400, steps=3)
    run_ranks(cases, tmp_path / "four", 4, "fsdp2+cp2", cpu=2400, steps=3, recompute=True)
    for case in cases.split(","):
        same(tmp_path / "one" / case, tmp_path / "four" / case)


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    run_ranks("sft", tmp_path / "one", steps=5)
    for i, (world, strategy) in enumerate([(2, "ddp+cp2"), (1, ""), (2, "fsdp2+cp2"), (2, "fsdp2"), (2, "ddp+cp2")]):
        run_ranks("sft", tmp_path / "many", world, strategy, steps=i + 1, resume=i > 0)
    assert far(tmp_path / "one", tmp_path / "many") <= BAR and weights(tmp_path / "many")


@pytest.mark.slow
def test_a_long_row_takes_half_the_memory() -> None:
    from context_rows import compare

    alone, *shared = compare(16384, [2])
    for rank in shared:
        assert rank["kept_mib"] <= 0.6 * alone["kept_mib"] and rank["off"] <= BAR
        assert rank["loss"] == pytest.approx(alone["loss"], rel=BAR)


def test_a_plan_shares_rows_that_fit_on_no_gpu() -> None:
    llama = DecoderShape(80, 8192, 28672, 64, 8, 128, 128256, tied=False)
    job = Job("sft", prompt=1024, completion=64512, mini_batch=512)
    found = plan(llama, job, 512)
    assert found.split.context == 4 and found.split.stage == 3
    assert "--strategy fsdp2+cp4" in found.command(job) and layout_of("fsdp2+cp4", 512).context == 4

    def layers(ranks: int) -> float:
        terms = predict_memory(llama, found.job, Split(512, 3, context=ranks)).terms
        return sum(t.bytes for t in terms if t.what == "of the layers")

    assert layers(8) == layers(1) / 8
    with pytest.raises(ConfigError, match="context is 3"):
        Split(8, 3, context=3)


def refused(folder: str) -> None:
    """One of two ranks, with models whose rows can't be shared."""
    from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig

    from rlhf_nb.config import OptimizerConfig
    from rlhf_nb.core import ModelError
    from rlhf_nb.run.engine import Engine
    from rlhf_nb.scoring.scores import completion_logps, sharing_rows
    from rlhf_nb.types import Completions

    engine, small = Engine(), {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}

    def make(config: Any) -> Any:
        return AutoModelForCausalLM.from_config(config)

    for model, reason in (
        (make(Gemma2Config(**small)), "attn_logit_softcapping"),
        (
            make(MistralConfig(**small, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})),
            "dynamic",
        ),
    ):
        with pytest.raises(ModelError, match=reason):
            engine.prepare(model, OptimizerConfig())
    window = make(MistralConfig(**small, sliding_window=8))
    with sharing_rows(engine.shared), pytest.raises(ModelError, match="window of 8"):
        completion_logps(window, Completions.from_lists([[3] * 5], [[4] * 5]))
    with sharing_rows(engine.shared), pytest.raises(Exception, match="different rows"):
        completion_logps(make(MistralConfig(**small)), Completions.from_lists([[3]], [[4 + engine.ranks.process]]))


def test_what_is_refused(tmp_path: Path) -> None:
    run_ranks("test_context:refused", tmp_path, 2, "ddp+cp2")
