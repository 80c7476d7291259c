"""Shift every seed by `RLHF_NB_TEST_SEED`, so that a claim which holds for one seed only shows itself.

Python imports this module at its start wherever its folder is on `PYTHONPATH`; `conftest.py` puts it there for the tests, their
subprocesses, the notebooks' forks and their kernels. What is shifted when torch or the package's module is imported: `torch.manual_seed`,
`torch.Generator.manual_seed` (weights, order of rows, noise) and `rollout.numbers.uniforms` (drawn answers). Data that are made from
a seed (the toy world's rows) and `core.derive_seed` stay. A shift of 0 changes nothing.

And a process that has imported transformers doesn't look through a million objects as it ends, which takes it 1.3 CPU seconds.
"""

import atexit
import functools
import gc
import importlib.abc
import os
import sys
from types import ModuleType

atexit.register(gc.freeze)
APART = 1_000_003  # neighbouring seeds stay apart: 0, 1, 2 shifted by 1 shares none with 0, 1, 2


def shift(seed):  # type: ignore[no-untyped-def]
    return int(seed) + APART * int(os.environ.get("RLHF_NB_TEST_SEED") or 0)


def shift_torch(torch: ModuleType) -> None:
    plain, C = torch.random.manual_seed, torch._C.Generator

    class AnyGenerator(type(C)):  # type: ignore[misc]
        def __instancecheck__(cls, one: object) -> bool:  # the default generator is none of our class
            return isinstance(one, C)

    class Generator(C, metaclass=AnyGenerator):  # type: ignore[misc, valid-type]
        def manual_seed(self, seed):  # type: ignore[no-untyped-def]
            super().manual_seed(shift(seed))
            return self

    def manual_seed(seed):  # type: ignore[no-untyped-def]
        return plain(shift(seed))

    torch.Generator, torch.manual_seed, torch.random.manual_seed = Generator, manual_seed, manual_seed  # type: ignore[attr-defined]


def shift_numbers(numbers: ModuleType) -> None:
    plain = numbers.uniforms

    @functools.wraps(plain)  # whose source the dojo shows
    def uniforms(seed, *where):  # type: ignore[no-untyped-def]
        return plain(shift(seed), *where)

    numbers.uniforms = uniforms  # type: ignore[attr-defined]


class Shift(importlib.abc.MetaPathFinder):
    """Finds a module as the others do, and changes it once it is loaded."""

    changes = {"torch": shift_torch, "rlhf_nb.rollout.numbers": shift_numbers}

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in self.changes:
            return None
        specs = (f.find_spec(name, path, target) for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        if (spec := next(filter(None, specs), None)) is not None:
            load, change = spec.loader.exec_module, self.changes[name]

            def exec_module(module: ModuleType) -> None:
                load(module)
                change(module)

            spec.loader.exec_module = exec_module
        return spec


if os.environ.get("RLHF_NB_TEST_SEED", "0") not in ("", "0") and not any(f.__class__.__name__ == "Shift" for f in sys.meta_path):  # fmt: skip
    sys.meta_path.insert(0, Shift())
