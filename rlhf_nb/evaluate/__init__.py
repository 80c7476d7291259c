"""The room is also the function of its name, so that `rlhf_nb.evaluate(...)` works whatever was imported before it."""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `rlhf_nb.evaluate.policy.evaluate`."""
        from .policy import evaluate

        return evaluate(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
