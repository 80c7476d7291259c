"""`benchmarks/gpu.py` still runs: all its parts with tiny shapes on a CPU, each a number or a reason; a part that hangs or dies is survived."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_nb.core import Precision

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_parts  # noqa: E402


@pytest.mark.slow  # 34 CPU seconds; below, each way of failing is fast
def test_every_part_gives_numbers_or_reasons(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path), "--tiny", "--minutes", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert [*found] == [*gpu.PARTS]
    for name, part in found.items():
        assert not part["reason"], (name, part["reason"], (tmp_path / "log.txt").read_text()[-2000:])
        wrong = [r for r in part["rows"] if r.get("reason") and "not installed here" not in r["reason"]]
        assert part["rows"] and not wrong, (name, wrong)
    rows = {row["what"]: row for part in found.values() for row in part["rows"]}
    assert all(row["within bounds"] for row in rows.values() if "within bounds" in row)
    assert all(row["finite"] for row in rows.values() if "finite" in row)
    assert any(row.get("same bits") for row in rows.values())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "log.txt",
        "results.json",
        "table.md",
    ]  # few files, in one folder
    table = (tmp_path / "table.md").read_text()
    assert "predicted GB" in table and table.strip() in done.stdout


def foreseen(card: str) -> float:
    """GB that the planner says of one of the script's runs on a card with fp16."""
    how: dict[str, Any] = dict(gpu_parts.CARDS[card])
    method, sizes = how.pop("method"), how.pop("sizes")
    shape, steps, _ = how.pop("shape"), how.pop("steps"), how.pop("gb")
    half = torch.float16
    t4 = Precision(torch.device("cuda"), half, torch.float32, half, True, "fp16 on a T4")
    config = gpu_parts.settings_of(method, sizes, "run", steps, "cuda", "fp16", **how)
    return gpu_parts.foreseen_gb(config, gpu_parts.config_of(shape), t4)


@pytest.mark.parametrize("card", gpu_parts.CARDS)
def test_what_runs_on_small_cards_is_planned_to_fit_and_documented(card: str) -> None:
    limit, need = gpu_parts.CARDS[card]["gb"], foreseen(card)
    assert 0.05 * limit < need < 0.95 * limit
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert f"| {need:.1f} GB |" in text, (card, need)


JOB = {"device": "cpu", "tiny": False, "site": "", "machine": "here", "commit": "none", "model": None}


def test_a_part_that_hangs_or_dies_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "gpu_parts.py"
    script.write_text(
        "import json, os, sys, time\n"
        "told = json.loads(sys.argv[1])\n"
        "lines = open(told['lines'], 'w')\n"
        "lines.write(json.dumps({'what': 'first', 'number': 1.0}) + '\\n'); lines.flush()\n"
        "if told['part'] == 'hangs': time.sleep(600)\n"
        "if told['part'] == 'dies': os._exit(9)\n"
    )
    monkeypatch.setattr(gpu.harness, "HERE", tmp_path)
    monkeypatch.setattr(gpu, "PARTS", {"hangs": 1.0, "dies": 5, "fine": 5, "late": 5})
    monkeypatch.setattr(gpu, "LEAST", 0.5)
    found = gpu.run_parts(JOB, tmp_path, ["hangs", "dies", "fine"], 20, 2)
    assert [len(found[n]["rows"]) for n in found] == [1, 1, 1]  # what was measured before is kept
    assert (
        "its limit" in found["hangs"]["reason"]
        and "ended with 9" in found["dies"]["reason"]
        and not found["fine"]["reason"]
    )
    assert json.loads((tmp_path / "results.json").read_text())["parts"]["fine"]["rows"] == [
        {"what": "first", "number": 1.0}
    ]
    assert "0 s were left" in gpu.run_parts(JOB, tmp_path, ["late"], 0.1, 1)["late"]["reason"]


def attempt(measure: Any, most: float = 600.0) -> dict[str, Any]:
    job = gpu_parts.Job({"device": "cpu", "tiny": True, "seconds": 60.0})
    return gpu_parts.tried(job, "it", measure, most=most)


def test_one_measurement_that_fails_is_a_reason_and_the_next_goes_on() -> None:
    def full() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. More of it")

    def gone() -> Any:
        raise SystemExit("trl ended early:\nImportError: no module")

    def wrong() -> Any:
        raise RuntimeError("no kernel")

    def hangs() -> Any:
        try:
            time.sleep(60)
        except Exception:  # as a library does that goes on without what failed
            time.sleep(60)

    assert attempt(full) == {"what": "it", "reason": "out of memory: CUDA out of memory. Tried to allocate 9.00 GiB"}
    assert "ended early" in attempt(gone)["reason"] and attempt(wrong)["reason"] == "RuntimeError: no kernel"
    begun = time.monotonic()
    assert "given up" in attempt(hangs, most=0.2)["reason"] and time.monotonic() - begun < 5
    assert attempt(lambda: {"number": 1}) == {"what": "it", "number": 1}


def test_a_process_of_a_measurement_that_hangs_is_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert gpu_parts.ended(process, 0.1) is None and process.wait(timeout=5) == -9
    done = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    assert gpu_parts.ended(done, 30) == 3


def test_ranks_that_do_not_meet_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(job: Any, words: list[str], log: Path, env: dict[str, str]) -> Any:
        log.write_text("much\nRuntimeError: Duplicate GPU detected\nmore\n")
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]), log

    monkeypatch.setattr(gpu_parts, "start", start)
    job = gpu_parts.Job({"device": "cpu", "tiny": True, "seconds": 60.0})
    assert gpu_parts.ranks_agree(job, "nccl", 2)["reason"] == "nccl: RuntimeError: Duplicate GPU detected"


def test_luggage_without_a_network_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(gpu, "WHEELS", ("trl",))
    begun, said = time.monotonic(), list[str]()
    monkeypatch.setattr("builtins.print", lambda *words, **_: said.extend(map(str, words)))
    gpu.luggage(tmp_path / "luggage", None, "3.12")
    assert time.monotonic() - begun < 60 and any("left out: trl: no wheel was found" in x for x in said)


def test_wheels_are_unpacked_where_a_package_is_missing(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    for name in ("not_here_at_all", "torch"):
        with zipfile.ZipFile(tmp_path / "wheels" / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
    assert gpu.unpack(tmp_path / "wheels", tmp_path / "site") == ["not-here-at-all"]
    assert (tmp_path / "site" / "not_here_at_all").is_dir() and not (tmp_path / "site" / "torch").exists()


def test_a_checkout_and_its_luggage_fit_into_what_is_sent() -> None:
    """Machines with a GPU that are lent for minutes take small things only."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode or not done.stdout:
        pytest.skip("this is no checkout, so nobody knows which files would be sent")
    size = sum((ROOT / name).stat().st_size for name in done.stdout.split("\0") if name and (ROOT / name).is_file())
    assert size + (gpu.LUGGAGE_MB << 20) < 64 << 20, f"{size / 2**20:.1f} MB"


def test_a_wheel_is_brought_without_other_cards_libraries(tmp_path: Path) -> None:
    names = [
        "bitsandbytes/__init__.py",
        *(f"bitsandbytes/libbitsandbytes_{x}.so" for x in ("cpu", "cuda118", "cuda130")),
    ]
    with zipfile.ZipFile(tmp_path / "bitsandbytes-1.0-py3-none-any.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, name)
    gpu.slim(tmp_path / "bitsandbytes-1.0-py3-none-any.whl")
    with zipfile.ZipFile(tmp_path / "bitsandbytes-1.0-py3-none-any.whl") as wheel:
        assert wheel.namelist() == [n for n in names if "118" not in n] and wheel.testzip() is None


def test_bars_say_what_is_missing_and_what_is_met() -> None:
    row = {"what": "sft 0.5B", "MFU": 0.5, "predicted ÷ peak": 1.3, "finite": True}
    parts = {"train": {"seconds": 1, "reason": "", "rows": [row]}, "peers": {"seconds": 1, "reason": "its limit", "rows": []}, "t4": {"seconds": 0, "reason": "not begun", "rows": []}}  # fmt: skip
    found = {bar[0]: bar[1:] for bar in gpu.bars(JOB | {"device": "cuda"}, parts)}
    assert found["MFU of SFT"] == ("≥ 0.45", 0.5, True)
    assert found["DPO against TRL"] == ("≥ 1.5", "its limit", "not measured")
    assert found["GB of GRPO 0.5B, all weights"][1:] == ("not begun", "not measured")
    assert found["predicted within 15 % of the measured peak"][2] is False
    assert dict((b[0], b[3]) for b in gpu.bars(JOB, parts))["MFU of SFT"] == "not on a GPU"
