"""rlhf_nb/cli/facts.json: what `rlhf-nb --help` says of methods and settings, written down so that help needs no torch. `--check` only compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "rlhf_nb" / "cli" / "facts.json"


def text() -> str:
    """The file as it should be."""
    sys.path.insert(0, str(ROOT))
    from rlhf_nb.cli.settings import written_facts

    return json.dumps(written_facts(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PLACE.write_text(text(), encoding="utf-8")
    elif not PLACE.exists() or PLACE.read_text(encoding="utf-8") != text():
        raise SystemExit(f"{PLACE.relative_to(ROOT)} differs from the methods' settings: run `make export`")
