"""The examples of CONTRIBUTING.md run as they stand, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_nb.losses.preference import LOSSES
from rlhf_nb.run.log import read_metrics
from rlhf_nb.train import registry

TEXT = (Path(__file__).resolve().parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    assert len(BLOCKS) == 5  # loss, method, family, reward, widget
    try:
        for block in BLOCKS:
            exec(block, names)
        assert registry.methods()["focal"].trainer is names["FocalTrainer"]
        pair = names["PairLogps"](*(torch.tensor([x]) for x in (-1.0, -1.0, -1.0, -1.0)), *2 * [torch.tensor([1])])
        assert float(names["squared_hinge"](pair, beta=0.1)) == 1.0
        assert [e["step"] for e in names["history"]] == [1, 2]
        assert names["event"]["reward"] < 0
        assert [e["step"] for e in read_metrics(tmp_path / "run") if e["type"] == "step"] == [1, 2]
    finally:
        LOSSES.pop("squared_hinge", None)
        registry._METHODS.pop("focal", None)


def test_paths_and_commands_exist() -> None:
    root = Path(__file__).resolve().parent.parent
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, re.M), f"make {target}"
    for path in re.findall(r"`((?:nbs|docs|tests)/[\w./]+\.\w+)`", TEXT):
        assert (root / path).exists(), path
