"""A GPU that isn't there: tensors that say they are on "cuda", compute on the CPU, and note each time the host would have to wait for them.

Inside `pretend()`, `x.to("cuda")` and `torch.zeros(..., device="cuda")` give tensors whose numbers and control flow are real. An operation
that mixes both devices fails as it would on a GPU. What makes the host wait is noted with the line of the package that asked for it: a
number or a list read from a tensor, a copy to the host, every operation whose result's shape depends on values, and a copy from the host
that isn't `non_blocking`: `.to`, `.cuda`, `copy_`, a tensor made on the device of Python's numbers, an index or a value of the host's.
A number that only fills (`torch.full`, `x[i] = 1.0`) goes along with the kernel.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

CUDA = torch.device("cuda", 0)
WAITS = {  # operations that a GPU must have finished before the host knows what to do next
    "_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount",
    "repeat_interleave", "argwhere", "allclose", "nonzero_static_",
}  # fmt: skip
BY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
MOVES = {"copy_", "_to_copy"}
COPIED = {"tensor", "as_tensor", "asarray", "new_tensor"}  # made on the host, then copied
WITH_VALUES = {
    "__setitem__": 2,
    "copy_": 1,
    "where": 1,
}  # from which argument on a tensor of no dimensions is copied, too


class Waits:
    """Where the host waited, and what was sent up."""

    def __init__(self) -> None:
        self.places: list[str] = []
        self.sent = 0
        self.on = True

    def note(self, what: str) -> None:
        """One more, with the innermost line of the package."""
        if self.on:
            here = [
                f
                for f in traceback.extract_stack()
                if "/rlhf_nb/rlhf_nb/" in f.filename or "/rlhf_nb/" in f.filename and "/tests/" not in f.filename
            ]
            here = [f for f in here if "site-packages" not in f.filename] or traceback.extract_stack()[-4:-3]
            self.places.append(f"{here[-1].filename.split('rlhf_nb/')[-1]}:{here[-1].lineno} {what}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside nothing is noted."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before


_waits = Waits()


class OnGPU(torch.Tensor):
    """A tensor "on the GPU": `inner` holds its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, requires_grad: bool = False) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device="cpu", requires_grad=requires_grad
        )  # fmt: skip
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnGPU({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        known: dict[int, Tensor] = {}
        plain: list[Tensor] = []

        def down(x: Any) -> Any:
            if isinstance(x, OnGPU):
                known[id(x.inner)] = x
                return x.inner
            if isinstance(x, Tensor) and x.dim() and x.numel():
                plain.append(x)
            return x

        inner_args, inner_kwargs = tree_map(down, args), tree_map(down, kwargs)
        if plain and name not in MOVES | BY_INDEX:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got {plain[0].shape} on the CPU."
            )
        _waits.sent += bool(plain)
        by_mask = name in BY_INDEX and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in inner_args[1]
        )
        if name in WAITS or by_mask:
            _waits.note(f"{name} by a mask" if by_mask else name)
        elif plain and not (kwargs.get("non_blocking") or name == "copy_" and args[2:] == (True,)):
            _waits.note(f"{name} from the host" if isinstance(args[0], OnGPU) else f"{name} to the host")
        inner_kwargs.pop("device", None)
        out = func(*inner_args, **inner_kwargs)

        def up(x: Any) -> Any:
            return (
                known.get(id(x))
                if isinstance(x, Tensor) and id(x) in known
                else OnGPU(x)
                if isinstance(x, Tensor)
                else x
            )

        return tree_map(up, out)


def there(x: Any) -> bool:
    """Whether something names the GPU."""
    return isinstance(x, str | torch.device) and torch.device(x).type == "cuda"


def here(x: Any) -> bool:
    """Whether something names the CPU."""
    return isinstance(x, str | torch.device) and torch.device(x).type == "cpu"


class _Up(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return OnGPU(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g.inner


def up(x: Tensor) -> Any:
    """On the GPU."""
    if isinstance(x, OnGPU):
        return x
    _waits.sent += 1
    return _Up.apply(x) if x.requires_grad and not x.is_leaf else OnGPU(x.detach().clone(), x.requires_grad)  # type: ignore[no-untyped-call]


def sent(x: Tensor, quick: bool) -> Any:
    """Copied up; without `non_blocking` the host waits until it is there."""
    if not quick and not isinstance(x, OnGPU):
        _waits.note("a copy from the host")
    return up(x)


class _Mode(TorchFunctionMode):
    """What names devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, Tensor):
            if name == "cuda":
                return sent(first, bool(kwargs.get("non_blocking") or True in args[1:]))
            if name == "pin_memory":
                return first
            if name in ("cpu", "numpy") and isinstance(first, OnGPU):
                _waits.note(name)
                return first.inner.clone() if name == "cpu" else first.inner.numpy()
            if name == "tolist" and isinstance(first, OnGPU):
                _waits.note(name)
                return first.inner.tolist()
            if name in WITH_VALUES and isinstance(first, OnGPU) and not kwargs.get("non_blocking"):
                for value in args[WITH_VALUES[name] :]:  # below, a tensor of no dimensions looks like a number
                    if isinstance(value, Tensor) and not isinstance(value, OnGPU) and not value.dim():
                        _waits.note("a value from the host")
            if name in ("to", "type_as"):
                return self.move(func, first, args[1:], kwargs)
            if (
                name == "__set__"
                and isinstance(first, OnGPU)
                and len(args) == 2
                and isinstance(args[1], OnGPU)
                and func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
            ):
                first.inner = args[1].inner
                return None
        if name == "pad_sequence" and isinstance(first[0], OnGPU):  # C++ that asks the first of them where it is
            return OnGPU(func([x.inner for x in first], *args[1:], **kwargs))
        if there(kwargs.get("device")) or name == "new_tensor" and isinstance(first, OnGPU):
            kwargs.pop("device", None)
            made = func(*args, **kwargs)
            if name in COPIED and isinstance(made, Tensor):
                return sent(made, False)
            return up(made) if isinstance(made, Tensor) else made
        if here(kwargs.get("device")) and isinstance(first, OnGPU) and name.startswith("new_"):
            return func(first.inner, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def move(self, func: Any, x: Tensor, args: Any, kwargs: Any) -> Any:
        """`x.to(...)`."""
        target = kwargs.pop("device", None)
        rest = []
        for a in args:
            if isinstance(a, Tensor):
                target, rest = a.device, [*rest, a.dtype]
            elif isinstance(a, str | torch.device):
                target = a
            else:
                rest.append(a)
        quick = bool(kwargs.pop("non_blocking", False) or rest and rest[-1] is True)
        rest = [a for a in rest if isinstance(a, torch.dtype)]
        if target is not None and there(target):
            x = sent(x, quick)
        elif target is not None and here(target) and isinstance(x, OnGPU):
            _waits.note("to the CPU")
            x = x.inner.clone()
        return x.to(*rest, **kwargs) if rest or kwargs else x


@contextmanager
def pretend() -> Iterator[Waits]:
    """Inside there is a GPU; gives the list of places where the host waited."""
    global _waits
    _waits = Waits()
    with pytest.MonkeyPatch.context() as patch, _Mode():
        patch.setattr(nn.Module, "to", _module_to)
        patch.setattr(
            torch.inference_mode, "__enter__", lambda self: self.__dict__.setdefault("off", torch.no_grad()).__enter__()
        )
        patch.setattr(torch.inference_mode, "__exit__", lambda self, *e: self.__dict__.pop("off").__exit__(*e))
        patch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
        yield _waits


_to = nn.Module.to


def _module_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`module.to(...)`: parameters of the GPU are other objects than those of the CPU."""
    if any(there(a) for a in (*args, *kwargs.values()) if isinstance(a, str | torch.device)):
        move_module(module)
        args = tuple(a for a in args if isinstance(a, torch.dtype))
        kwargs = {k: v for k, v in kwargs.items() if k == "dtype"}
    return _to(module, *args, **kwargs) if args or kwargs else module


def move_module(module: nn.Module) -> nn.Module:
    """A module's parameters and buffers on the GPU; shared ones stay shared."""
    moved: dict[int, tuple[Any, Any]] = {}  # with what was moved, so that no other tensor gets its id
    for m in module.modules():
        for name, p in list(m._parameters.items()):
            if p is not None:
                _, made = moved.setdefault(id(p), (p, up(p.detach())))
                made._is_param = True
                made.requires_grad_(p.requires_grad)
                m._parameters[name] = made
        for name, b in list(m._buffers.items()):
            if b is not None:
                m._buffers[name] = moved.setdefault(id(b), (b, up(b)))[1]
    return module


if __name__ == "__main__":
    with pretend() as waits:
        w = move_module(nn.Linear(3, 2))
        x = torch.ones(4, 3).to("cuda")
        w(x).sum().backward()
        print(w.weight.grad, w(x).sum().item(), waits.places, waits.sent, sys.version)
