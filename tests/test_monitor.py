"""`rlhf-nb monitor` as an operator meets it, and boards whose metrics exist."""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.data import toy

DOCS = Path(__file__).parent.parent / "docs"
HOUR = 3600.0


def traffic(
    hours: int, version: str = "v1", per_hour: int = 60, turn: int = 10**6, seed: int = 0, texts: bool = True
) -> list[dict[str, Any]]:
    """Lines of a server that ends now; from hour `turn` on it is rude."""
    rng, start, rows = random.Random(seed), (time.time() // HOUR - hours) * HOUR, []
    prompts = [r["prompt"] for r in toy.train_prompts(300, seed)]
    for i in range(hours * per_hour):
        hour, prompt = i // per_hour, rng.choice(prompts)
        answer = toy.speak(prompt, "rude" if hour >= turn else "plain", rng).strip()
        row = {
            "time": start + i * HOUR / per_hour,
            "id": f"{version}-{i}",
            "model": "pip",
            "version": version,
            "user": f"u{i}",
        }
        row |= {
            "tokens_answer": len(answer.split()),
            "first_token_s": 0.1 + rng.random(),
            "seconds": 1 + rng.random(),
            "finish": "stop",
        }
        rows.append(row | ({"prompt": prompt, "answer": answer} if texts else {}))
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in sorted(rows, key=lambda r: r["time"])))
    return str(path)


def monitor(*words: str) -> Any:
    return CliRunner().invoke(app, ["monitor", "--once", *words], env={"COLUMNS": "200"})


def test_a_version_that_turns_is_told_and_its_neighbour_is_not(tmp_path: Path) -> None:
    log = write(tmp_path / "traffic.jsonl", traffic(8) + traffic(8, "v2", turn=5, seed=1) + traffic(1, "v3", 3))
    files = [tmp_path / n for n in ("out.json", "out.prom", "out.html")]
    small = ["min_requests=50", "max_requests=100", "baseline=v1", "false_alarm_days=10"]
    got = monitor(log, *small, "--json", str(files[0]), "--prometheus", str(files[1]), "--html", str(files[2]))
    assert got.exit_code == 3, got.output
    found = json.loads(files[0].read_text())
    assert {a["version"] for a in found["alerts"]} == {"v2"} and {a["what"] for a in found["alerts"]} == {"answers"}
    assert "v3: 3 requests that count" in got.output and "can't be judged yet" in found["versions"]["v3"]["note"]
    assert 'rlhf_nb_monitor_alert{version="v2",measure="answers"} 1.0' in files[1].read_text()
    assert "answers of v2" in files[2].read_text()
    assert monitor(log, *small).output.splitlines()[-1] == got.output.splitlines()[-1], "the same log, the same looks"


def test_texts_that_are_not_logged_are_said_to_be_missing(tmp_path: Path) -> None:
    got = monitor(write(tmp_path / "traffic.jsonl", traffic(2, texts=False)), "min_requests=50", "max_requests=100")
    assert got.exit_code == 0 and "texts are not logged" in got.output and "refusals " not in got.output


def test_a_bound_is_an_alert_and_one_that_nothing_measures_is_refused(tmp_path: Path) -> None:
    log = write(tmp_path / "traffic.jsonl", traffic(2, per_hour=120))
    got = monitor(log, "highest={first_token_s.p95: 0.5}")
    assert got.exit_code == 3 and "are above 0.5, and at most 5 % may be" in got.output
    assert monitor(log, "highest={first_token_s.p95: 5}").exit_code == 0
    refused = monitor(log, "highest={refusal: 0.1}")
    assert refused.exit_code == 1 and "Did you mean 'refusals'?" in refused.output


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (b"", 0, "No request yet."),
        (b"hello\n{}\n\x00\x00\n[[[[\n" + b"[" * 100_000 + b'\n{"time": 1e99, "version": "v"}\n{"torn', 0, "6 lines of log.jsonl are no requests"),
        (None, 1, "Did you mean"),
    ],
    ids=["empty", "broken", "misspelt"],
)  # fmt: skip
def test_logs_that_are_not_as_they_should_be(tmp_path: Path, content: bytes | None, code: int, said: str) -> None:
    (tmp_path / ("log.jsonl" if content is not None else "log.json")).write_bytes(content or b"")
    got = monitor(str(tmp_path / "log.jsonl"))
    assert got.exit_code == code and said in got.output, got.output


def test_hostile_lines_command_nobody(tmp_path: Path) -> None:
    name = '<script>alert(1)</script>\x1b]0;owned\x07"}\n'
    rows = [r | {"version": name, "model": name, "id": name} for r in traffic(2)]
    files = [tmp_path / n for n in ("out.json", "out.prom", "out.html")]
    got = monitor(
        write(tmp_path / "log.jsonl", rows),
        "highest={tokens: 1}",
        "--json",
        str(files[0]),
        "--prometheus",
        str(files[1]),
        "--html",
        str(files[2]),
    )
    assert got.exit_code == 3 and "\x1b" not in got.output and "\x07" not in got.output
    assert "<script>" not in files[2].read_text() and "\x1b" not in files[2].read_text()
    assert all(re.fullmatch(r"(# TYPE \w+ gauge|\w+\{.*\} \S+)", line) for line in files[1].read_text().splitlines())


def test_one_loud_user_is_one_opinion(tmp_path: Path) -> None:
    quiet = traffic(6, per_hour=60)
    loud = [r | {"user": "loud", "answer": "Go away."} for r in traffic(3, per_hour=300, seed=2)]
    settings = [
        "min_requests=50",
        "max_requests=100",
        "false_alarm_days=10",
        f"reference={write(tmp_path / 'before.jsonl', traffic(4, seed=3))}",
    ]
    assert monitor(write(tmp_path / "log.jsonl", quiet + loud), *settings).exit_code == 0
    many = [r | {"user": f"other{i}"} for i, r in enumerate(loud)]
    got = monitor(write(tmp_path / "many.jsonl", quiet + many), *settings)
    assert got.exit_code == 3 and "answers of v1" in got.output


def test_feedback_is_satisfaction(tmp_path: Path) -> None:
    from rlhf_nb.feedback.store import Feedback, FeedbackStore

    store = FeedbackStore(tmp_path / "feedback.jsonl")
    for i in range(40):
        store.add(f"user{i}", Feedback("rating", "up" if i % 4 else "down", versions=("v1",), model="pip"))
    log = write(tmp_path / "traffic.jsonl", traffic(2))
    got = monitor(log, "--feedback", str(store.path), "--json", str(tmp_path / "out.json"))
    measures = json.loads((tmp_path / "out.json").read_text())["versions"]["v1"]["measures"]
    assert got.exit_code == 0 and measures["satisfaction"]["mean"] == 0.75 and measures["satisfaction"]["n"] == 40


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    log = write(tmp_path / "traffic.jsonl", traffic(1))
    (tmp_path / "file").write_text("")
    got = monitor(log, "--json", str(tmp_path / "file" / "out.json"))
    assert got.exit_code == 1 and "can't be written" in got.output and "Traceback" not in got.output


def test_the_board_of_serving_asks_for_metrics_that_are_emitted() -> None:
    pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
    meters = pytest.importorskip("rlhf_nb.serve.meters", reason="the server is not part of this tree")
    from rlhf_nb.evaluate.intervals import Estimate
    from rlhf_nb.feedback.follow import as_prometheus
    from rlhf_nb.feedback.monitor import MEASURES, Alert, Findings, Report

    lane = SimpleNamespace(passes=1, tokens=1)
    emitter = meters.Meters(SimpleNamespace(engines={"pip": lane}, running=1, waiting=0, most=16, alive=True))
    emitter.ended("pip", "stop", 3, 4, 0.1, 0.2, 0.9)
    emitter.refused.labels("429").inc()
    report = Report(
        "v1", "pip", 9, 9, 9, {k: Estimate(0.5, 0.4, 0.6, 9) for k in MEASURES}, dict.fromkeys(MEASURES, 1.0), ""
    )
    served = emitter.text().decode() + as_prometheus(Findings(1.0, [report], [Alert(1.0, "v1", "answers", "")]))
    names = set(re.findall(r"(?m)^(rlhf_nb_\w+)", served))
    board = json.loads((DOCS / "grafana-serving.json").read_text())
    texts = [t["expr"] for p in board["panels"] for t in p.get("targets", [])] + [
        v["query"]["query"] for v in board["templating"]["list"][1:]
    ]
    asked = {n for text in texts for n in re.findall(r"rlhf_nb_\w+", text)}
    assert len(asked) > 15 and asked <= names, sorted(asked - names)
    measures = {m for text in texts for group in re.findall(r'measure="(\w+)"', text) for m in [group]}
    assert measures <= set(MEASURES)
    ids = [p["id"] for p in board["panels"]]
    assert len(set(ids)) == len(ids) and all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in board["panels"])
