"""Weights that are rounded once for many passes give the bits of weights that are rounded in each."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rlhf_nb.fast import linear
from rlhf_nb.run import engine
from rlhf_nb.scoring import scores
from rlhf_nb.train.dpo import DPOConfig, DPOTrainer


def _model(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def _words(a: int, n: int) -> str:
    return " ".join(f"w{2 + (a + 7 * i) % 62}" for i in range(n))


ROWS = [
    {"prompt": _words(i, 4 + i), "chosen": " " + _words(3 * i, 3 + i % 4), "rejected": " " + _words(5 * i + 1, 5)}
    for i in range(8)
]


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often `half_of` found a copy that was there."""
    seen: list[int] = []
    of = linear._Copies.of

    def counted(self: Any, weight: Any, dtype: Any) -> Any:
        before = len(self.made)
        found = of(self, weight, dtype)
        seen.append(int(found is not None and len(self.made) == before))
        return found

    monkeypatch.setattr(linear._Copies, "of", counted)
    return seen


def _run(folder: Any, threads: int) -> list[tuple[float, float]]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        config = DPOConfig(
            output_dir=folder, steps=3, epochs=None, mini_batch_size=8, token_budget=48, precision="bf16", device="cpu",
            optimizer={"lr": 1e-2, "schedule": "constant", "warmup_steps": 0}, console=False,
        )  # fmt: skip
        trainer = DPOTrainer(config, model=_model(), tokenizer=_tokenizer(), rows=ROWS)
        trainer.fit()
        return [(e["loss"], e["grad_norm"]) if "grad_norm" in e else (e["loss"], 0.0) for e in trainer.history]
    finally:
        torch.set_num_threads(before)


def test_a_run_has_the_bits_of_one_that_rounds_in_each_pass(
    tmp_path: Any, rounded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = _run(tmp_path / "shared", 1)
    assert sum(rounded) > 50  # several passes of the reference, and several of the policy, found what was there
    for module in (engine, scores):
        monkeypatch.setattr(module, "half_copies", lambda *a: nullcontext())
    n = len(rounded)
    assert _run(tmp_path / "each", 1) == shared and len(rounded) == n
    assert shared[0][0] == pytest.approx(0.6931, abs=1e-3) and shared[2][0] < shared[0][0]


def test_who_learns_keeps_no_old_copy(tmp_path: Any) -> None:
    """Weights change in each step, and the next scoring sees it: a copy doesn't outlive its block."""
    model = _model()
    c = scores.Completions.from_lists([[5, 6, 7]] * 4, [[8, 9], [10], [11, 12, 13], [14]], 0)

    def logps() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return scores.completion_logps(model, c, token_budget=8).logps

    before = logps()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert not torch.equal(logps(), before)
    assert linear._copies.get() is None


def test_large_models_keep_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model()
    monkeypatch.setattr(linear, "HUGE", 1000)
    with linear.half_copies(model, torch.bfloat16):
        assert linear._copies.get() is None
    monkeypatch.setenv("RLHF_NB_FAST", "0")
    monkeypatch.setattr(linear, "HUGE", 1 << 30)
    with linear.half_copies(model, torch.bfloat16):
        assert linear._copies.get() is None
