"""The board of serving in Grafana: its metrics exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_the_board_of_serving_asks_for_metrics_that_are_emitted() -> None:
    pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
    meters = pytest.importorskip("rlhf_nb.serve.meters", reason="the server is not part of this tree")

    lane = SimpleNamespace(passes=1, tokens=1)
    emitter = meters.Meters(SimpleNamespace(engines={"pip": lane}, running=1, waiting=0, most=16, alive=True))
    emitter.ended("pip", "stop", 3, 4, 0.1, 0.2, 0.9)
    emitter.refused.labels("429").inc()
    served = emitter.text().decode()
    names = set(re.findall(r"(?m)^(rlhf_nb_\w+)", served))
    board = json.loads((DOCS / "grafana-serving.json").read_text())
    texts = [t["expr"] for p in board["panels"] for t in p.get("targets", [])] + [
        v["query"]["query"] for v in board["templating"]["list"][1:]
    ]
    asked = {n for text in texts for n in re.findall(r"rlhf_nb_\w+", text)}
    assert len(asked) > 12 and asked <= names, sorted(asked - names)
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids) and all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])
