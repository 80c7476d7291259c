"""Rewards. A name of TRL's that isn't here is answered with what to write."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Nothing is kept here but the modules."""
    if not name.startswith("_"):
        from ..aliases import instead_of

        if said := instead_of(name, __name__):
            raise ImportError(said)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
