"""Fingerprints of the families in `fast.support`, for transformers' releases: the installed one, or the wheels and folders named.

    pip download --no-deps -d wheels transformers==5.22.2 && python .ci/fast_table.py wheels/*.whl

Before a new fingerprint goes into `fast.support.VERIFIED`, read what changed, and run tests/test_gate.py and the sweep with that release.
"""

from __future__ import annotations

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from rlhf_nb.fast.support import FAMILIES, VERIFIED, fingerprint


def sources(where: Path) -> dict[str, str]:
    """Text of each family's modeling file in a wheel or in an installed package."""
    files = {name: f"models/{family}/modeling_{family}.py" for name, family in FAMILIES.items()}
    if where.suffix != ".whl":
        return {name: (where / file).read_text(encoding="utf-8") for name, file in files.items()}
    with zipfile.ZipFile(where) as wheel:
        return {name: wheel.read(f"transformers/{file}").decode() for name, file in files.items()}


def main() -> None:
    """Print a line for each release, and all fingerprints in one."""
    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    every: set[str] = set()
    for where in [Path(x) for x in sys.argv[1:]] or [Path(spec.origin).parent]:
        found = {name: fingerprint(text, name.removesuffix("Model")) for name, text in sources(where).items()}
        every |= set(found.values())
        print(where.name, *(f"{name}={x}{'' if x in VERIFIED else ' (new)'}" for name, x in found.items()))
    print(*sorted(every))


if __name__ == "__main__":
    main()
