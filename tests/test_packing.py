"""A processor that can't pack weights gets the plain products, bit for bit, and is told what its bf16 costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rlhf_nb.core import decide_precision
from rlhf_nb.data import toy
from rlhf_nb.fast import linear
from rlhf_nb.rollout.sampler import draw
from rlhf_nb.scoring.scores import logps
from rlhf_nb.train.dpo import DPOConfig, DPOTrainer
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer

torch.set_num_threads(1)
pytestmark = pytest.mark.fast_path
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every weight is large enough to be packed on any machine, and no trial has happened."""
    monkeypatch.setattr(linear, "PACK", range(1, 1 << 26))
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    linear._packs.cache_clear()
    yield
    linear._packs.cache_clear()


def refusing(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Makes oneDNN's operator raise as on AVX2; the list gets the number format of each call."""
    calls: list[torch.dtype] = []

    def raises(weight: torch.Tensor, *_: Any) -> torch.Tensor:
        calls.append(weight.dtype)
        raise RuntimeError("mkldnn_reorder_linear_weight: bf16 path needs the cpu support avx_ne_convert or avx512bw")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", raises)
    return calls


def products(dtype: torch.dtype) -> None:
    """A projection gives the plain product's bits, alone and added to a residual."""
    torch.manual_seed(0)
    layer, x, y = torch.nn.Linear(48, 40), torch.randn(5, 48).to(dtype), torch.randn(5, 40).to(dtype)
    w, b = layer.weight.detach().to(dtype), layer.bias.detach().to(dtype)
    with torch.no_grad():
        ours = linear.Projection([layer], True, dtype)
        assert not ours.packed
        assert torch.equal(ours(x), F.linear(x, w, b))
        assert torch.equal(ours.add_to(y, x), torch.addmm(y, x, w.t()).add_(b))


@DTYPES
def test_a_processor_that_refuses_is_asked_once_and_multiplies_plainly(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = refusing(monkeypatch)
    products(dtype)
    products(dtype)
    assert calls == [dtype]


@DTYPES
def test_a_wrong_product_or_a_missing_operator_is_no_packing(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Operator:
        """Packs nothing; every sum is off by `error`."""

        def __init__(self, error: float) -> None:
            self.error = error

        def __call__(self, x: Any, w: Any, b: Any, *_: Any) -> Any:
            return F.linear(x, w, b) + self.error

        def binary(self, x: Any, y: Any, w: Any, b: Any, *_: Any) -> Any:
            return y + F.linear(x, w, b) + self.error

    weight = torch.zeros(32, 64, dtype=dtype)
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda w: w)
    for error, packs in ((0.0, True), (5.0, False)):
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", Operator(error))
        linear._packs.cache_clear()
        assert linear.pays_to_pack(weight) is (packs and torch.backends.mkldnn.is_available())
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, w, b, *_: F.linear(x, w, b))
    linear._packs.cache_clear()
    assert not linear.pays_to_pack(weight)  # without its `binary`
    products(dtype)


def sampled_and_scored(_: Path) -> list[Any]:
    model = toy.build_model(0, "tiny").eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ids, drawn = draw(model, [[5, 6, 7], [8, 9]], 6, seed=3)
        return [ids, [x.tolist() for x in [*drawn, *logps(model, [[5, 6, 7], [8, 9]], [list(x) for x in ids])]]]


def history(trainer: Any) -> list[Any]:
    steps = trainer.fit()
    assert trainer.engine.precision.compute_dtype == torch.bfloat16
    return [[(e["loss"], e.get("reward"), e.get("grad_norm")) for e in steps], trainer.method.model.state_dict()]


SHORT: dict[str, Any] = {
    "steps": 2, "epochs": None, "rollout_batch_size": 8, "mini_batch_size": 8, "precision": "bf16", "device": "cpu", "console": False,
}  # fmt: skip


def grpo(folder: Path) -> list[Any]:
    config = GRPOConfig.preset("toy", output_dir=str(folder), num_generations=4, **SHORT)
    model, tokenizer = toy.build_model(0, "tiny"), toy.build_tokenizer()
    return history(GRPOTrainer(config, model, tokenizer, reward=toy.gold_reward, eval_rows=[]))


def dpo(folder: Path) -> list[Any]:
    config = DPOConfig.preset("toy", output_dir=str(folder), **SHORT)
    return history(DPOTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), eval_rows=[]))


@pytest.mark.parametrize("work", [sampled_and_scored, grpo, dpo], ids=lambda f: f.__name__)
def test_bf16_runs_where_nothing_can_be_packed(
    work: Callable[[Path], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = refusing(monkeypatch)
    got = work(tmp_path / "refused")
    assert calls == ([] if work is dpo else [torch.bfloat16])  # DPO draws no answers
    monkeypatch.setattr(linear, "pays_to_pack", lambda weight: False)
    plain = work(tmp_path / "plain")
    torch.testing.assert_close(got, plain, rtol=0, atol=0, equal_nan=True)


def test_the_reason_says_where_bf16_is_slower_than_fp32() -> None:
    slow = decide_precision("cpu", "bf16", cpu=lambda: 0.25)
    quick = decide_precision("cpu", "bf16", cpu=lambda: 3.0)
    assert slow[:5] == quick[:5] and slow.compute_dtype == torch.bfloat16
    assert "0.25 times" in slow.reason and "precision=fp32" in slow.reason and "\n" not in slow.reason
    assert quick.reason == "bf16 on the CPU, as asked"
    auto = decide_precision("cpu", cpu=lambda: 0.25, parameters=1 << 30)
    assert auto.compute_dtype == torch.float32
