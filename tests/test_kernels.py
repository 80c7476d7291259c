"""`fast.kernels` under Triton's interpreter: numbers and gradients are PyTorch's, the head's too. Skipped where Triton isn't there (a GPU's PyTorch brings it)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rlhf_nb.fast import kernels

ROOT = Path(__file__).parent.parent
interpreted = pytest.mark.skipif(find_spec("triton") is None, reason="Triton isn't installed here")


def test_a_cpu_uses_none_of_them_and_asks_for_no_triton() -> None:
    code = (
        "import sys, torch; from rlhf_nb.fast import kernels; assert not kernels.fused(torch.device('cpu')); "
        "assert torch.version.cuda or 'triton' not in sys.modules; "
        "import importlib.util as u, os; u.find_spec = lambda name: None; os.environ['TRITON_INTERPRET'] = '1'; "
        "import importlib; assert not importlib.reload(kernels).TRITON"  # asked for, and not installed
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env).returncode == 0


def test_what_fails_on_a_card_is_said_once_and_pytorch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(kernels.log, "warning", lambda text, *words: said.append(text % words))
    card, old = torch.device("cuda:7"), torch.device("cuda:6")
    monkeypatch.setattr(kernels, "TRITON", True)
    monkeypatch.setattr(kernels, "_refused", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[0])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (7, 5) if d == old else (9, 0))
    tried: list[torch.device] = []
    chosen = [7]

    def wrong(device: torch.device) -> str:
        tried.append(device)
        return "norm is off by 0.5"

    monkeypatch.setattr(kernels, "kernel_difference", wrong)
    assert not kernels.fused(card) and not kernels.fused(card)
    chosen[0] = 6
    assert not kernels.fused(old) and not kernels.fused(card)
    chosen[0] = 7
    assert tried == [card] and len(said) == 1 and "cuda:7: norm is off by 0.5" in said[0]
    kernels._refused.clear()
    monkeypatch.setattr(kernels, "kernel_difference", lambda device: 1 / 0)
    assert not kernels.fused(card) and "ZeroDivisionError" in said[-1]
    kernels._refused.clear()
    monkeypatch.setattr(kernels, "kernel_difference", lambda device: "")
    assert kernels.fused(card) and not kernels.fused(card, torch.float64)
    chosen[0] = 0
    assert not kernels.fused(card)
    chosen[0] = 7
    monkeypatch.setenv("RLHF_NB_KERNELS", "0")
    assert not kernels.fused(card)
    monkeypatch.delenv("RLHF_NB_KERNELS")
    monkeypatch.setenv("RLHF_NB_FAST", "0")
    assert not kernels.fused(card)


INTERPRETED = """
import torch
from rlhf_nb.fast import kernels
from rlhf_nb.scoring.head import head_logps
cpu = torch.device("cpu")
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    with torch.inference_mode():
        assert kernels.kernel_difference(cpu, dtype) == "", dtype
z = torch.randn(3, 70)
said = kernels.logit_stats(z, torch.tensor([-100, 70, 3]), 1.0, False, False)[0]
assert said.isnan().tolist() == [True, True, False] and abs(float(said[2] - z[2].log_softmax(0)[3])) < 1e-5
torch.manual_seed(0)
for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
    for temperature, entropy, chunk in ((1.0, False, 3), (0.7, True, 4), (1.0, True, 100)):
        leaves = [torch.randn(*s).to(dtype).requires_grad_() for s in ((10, 16), (50, 16), (50,))]
        y, g = torch.randint(0, 50, (10,)), torch.randn(2, 10)
        found = []
        for on in (True, False):
            kernels.fused = lambda device, dtype=None, on=on: on
            logps, h = head_logps(*leaves, y, temperature, entropy, chunk=chunk)
            loss = (logps * g[0]).sum() + (0 if h is None else (h * g[1]).sum())
            found.append([logps, *([] if h is None else [h]), *torch.autograd.grad(loss, leaves)])
        column = torch.stack([y, y + 1], 1)[:, 0]
        assert not column.is_contiguous()
        kernels.fused = lambda device, dtype=None: True
        assert torch.equal(head_logps(*leaves, column, temperature, chunk=chunk)[0], found[0][0])
        for one, two in zip(*found, strict=True):
            assert float((one - two).abs().max()) <= near * float(two.abs().max()), (dtype, temperature, entropy, chunk)
"""


@interpreted
def test_numbers_and_gradients_are_pytorchs() -> None:
    env = os.environ | {"TRITON_INTERPRET": "1"}
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", INTERPRETED], cwd=ROOT, env=env).returncode == 0
