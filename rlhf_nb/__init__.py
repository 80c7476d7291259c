"""RLHF you can read, run and ship: the public names, each imported when it is first used."""

__version__ = "0.2.0.dev0"

import re
import warnings
from importlib import import_module
from pkgutil import get_data
from typing import Any

# what TRL's scripts import, too; documented in docs/trl.md
_SCRIPTS = {"ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config", "get_kbit_device_map"}
_RENAMED = {"score": "logps"}  # names of the version before
# where each public name lives: the lines `from .MODULE import NAME as NAME, ...` of `__init__.pyi`
_LINES = re.findall(r"^from \.(\S+) import (.+)$", (get_data(__name__, "__init__.pyi") or b"").decode("utf-8"), re.M)
_HOME = {words.split(" as ")[0]: module for module, names in _LINES for words in names.split(", ")}
__all__ = ["__version__", *_HOME] # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it."""
    if name in _RENAMED:
        old, name = name, _RENAMED[name]
        warnings.warn(f"rlhf_nb.{old} is now rlhf_nb.{name}; the old name goes with the next version", FutureWarning, 2)
    if name in _SCRIPTS:
        return getattr(import_module(f"{__name__}.train.words"), name)
    if name not in _HOME:
        if not name.startswith("_") and (said := import_module(f"{__name__}.aliases").instead_of(name)):
            raise ImportError(said)  # an AttributeError would lose the sentence in `from rlhf_nb import NAME`
        names = ", ".join(sorted(_HOME))
        raise AttributeError(f"module 'rlhf_nb' has no attribute {name!r}; its public names are: {names}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    """The public names, used or not, and what is there already."""
    return sorted({*__all__, *globals()})
