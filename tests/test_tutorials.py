"""The switch at the top of every tutorial: a model and preferences in local folders laid out as on the hub, with LoRA and Hydra."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from rlhf_nb.data import toy
from rlhf_nb.models.load import save_model

TUTORIALS = sorted((Path(__file__).resolve().parent.parent / "nbs" / "tutorials").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda p: p.stem)
def test_switch(path: Path, tmp_path: Path) -> None:
    model, data = tmp_path / "org--tiny-model", tmp_path / "org--pairs"
    save_model(toy.build_model(0), toy.build_tokenizer(), model)
    data.mkdir()
    rows = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in toy.preference_rows(600, 0)]
    (data / "train.jsonl").write_text("\n".join(json.dumps(r) for r in rows), encoding="utf-8")
    nb = nbformat.read(path, 4)
    switches = [c for c in nb.cells if c.cell_type == "code" and c.source.startswith("MODEL = ")]
    assert len(switches) == 1, "one switch at the top"
    switches[0].source = f"MODEL, DATA, LORA = {str(model)!r}, {str(data)!r}, True"
    for cell in nb.cells:
        if cell.cell_type == "code":  # the tutorials' sizes are for a T4; the path is what is tested here
            cell.source = (
                cell.source.replace("range(10)", "range(2)")
                .replace('"steps": 40', '"steps": 3')
                .replace("steps=150", "steps=30")
            )
    NotebookClient(nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = "".join(o.get("text", "") for c in nb.cells if c.cell_type == "code" for o in c.outputs)
    assert "Traceback" not in shown and len(shown) > 100
