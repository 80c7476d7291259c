"""One process is two processes is ZeRO-2 is ZeRO-3 is FSDP2: losses, weights, rollouts; saving, resuming elsewhere."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree
from typing import Any

import patience
import pytest
import torch
from process_cases import CASES, LORA, run_ranks
from safetensors.torch import load_file

from rlhf_nb.core import CheckpointError, Precision, RunError
from rlhf_nb.run import checkpoint
from rlhf_nb.run.checkpoint import Part, latest_complete, load_checkpoint, problem_of, save_checkpoint
from rlhf_nb.run.strategies import connect

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
BAR = 1e-4


ALL = [*CASES, *(f"{case}_lora" for case in LORA)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a finished run; each is made once, and those of a strategy together: starting processes is what takes time."""
    root = tmp_path_factory.mktemp("runs")

    def run(case: str, strategy: str = "single", cases: Sequence[str] = ()) -> Path:
        folder: Path = root / strategy
        world, name = (1, "") if strategy == "single" else (2, strategy)
        if len(cases) > 1 and not folder.exists():
            with suppress(AssertionError):  # the case that failed is run again below, alone
                run_ranks(",".join(cases), folder, world, name, cpu=2400)
        if not (folder / case / "steps.json").exists():
            rmtree(folder / case, ignore_errors=True)
            run_ranks(case, folder / case, world, name)
        return folder / case

    return run


def steps(folder: Path) -> list[dict[str, float]]:
    return list(json.loads((folder / "steps.json").read_text()))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Trained tensors, without GPT-2's constant of the keys: it changes no attention, so its gradient is rounding, which Adam makes large."""
    found = load_file(folder / "weights.safetensors")
    for name in [k for k in found if k.endswith("attn.c_attn.bias")]:
        query, _, value = found[name].chunk(3)
        found[name] = torch.cat([query, value])
    return found


def far(a: Path, b: Path) -> float:
    """Largest relative difference of a trained tensor."""
    one, two = weights(a), weights(b)
    assert one.keys() == two.keys()
    return max(float((one[k] - two[k]).norm() / one[k].norm().clamp_min(1e-12)) for k in one)


def compare(one: Path, other: Path) -> None:
    """Losses and weights agree, and so do the rollouts of the first step where there are any."""
    for a, b in zip(steps(one), steps(other), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=BAR, abs=BAR)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=10 * BAR)
        for key in a.keys() & {"objective/kl_coef", "reward", "objective/scores"}:
            assert b[key] == pytest.approx(a[key], rel=BAR, abs=BAR)
    assert far(one, other) <= BAR
    assert first_rollouts(one) == first_rollouts(other)
    assert bool(first_rollouts(one)) == ("objective/scores" in steps(one)[0])


def first_rollouts(folder: Path) -> list[Any]:
    path = folder / "samples.jsonl"
    rows = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    return [(r["prompt"], r["tokens"]) for r in rows if r["step"] == 1]


@pytest.mark.slow  # 12 CPU seconds; test_recompute.py has ZeRO-3 in the fast tests
@needs_deepspeed
def test_zero3_is_one_process(tmp_path: Path) -> None:
    run_ranks("sft", tmp_path / "one", steps=4)
    run_ranks("sft", tmp_path / "two", 2, "zero3", steps=4)
    compare(tmp_path / "one", tmp_path / "two")


def test_a_tracker_leaves_ranks_connected(tmp_path: Path) -> None:
    """What the tracker does at the end of a run must not part ranks that have more to do."""
    pytest.importorskip("tensorboard")
    run_ranks("sft", tmp_path, 2, steps=2, trackers=["tensorboard"])
    assert list(tmp_path.rglob("events.out.tfevents*"))


def test_ranks_that_hang_show_where_both_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts idle time: importing on a busy machine is no hang, a collective that one rank never reaches is."""
    monkeypatch.setattr(patience.wait, "__defaults__", (8.0,))
    with pytest.raises(AssertionError, match="it hangs") as told:
        run_ranks("hang", tmp_path, 2)
    first, second = str(told.value).split("--- out-1.txt")
    assert "all_reduce" in first and "process_cases.py" in second and "all_reduce" not in second


def same_evaluations(one: Path, other: Path) -> None:
    """All ranks say what one process says, with seven held-out rows and with one."""
    alone = json.loads((one / "evaluations-0.json").read_text())
    for file in sorted(other.glob("evaluations-*.json")):
        for a, b in zip(alone, json.loads(file.read_text()), strict=True):
            assert a.keys() == b.keys() and all(a.values())
            for name in a:
                assert a[name].keys() == b[name].keys()
                for key, value in a[name].items():
                    if isinstance(value, float) and not key.startswith("time"):
                        assert b[name][key] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (name, key)


def test_ranks_share_an_evaluation(tmp_path: Path) -> None:
    run_ranks("evaluations", tmp_path / "one")
    run_ranks("evaluations", tmp_path / "two", 2)
    same_evaluations(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_ranks_share_an_evaluation_where_weights_are_shared_out(strategy: str, tmp_path: Path) -> None:
    run_ranks("evaluations", tmp_path / "one")
    run_ranks("evaluations", tmp_path / "two", 2, strategy)
    same_evaluations(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp2"])
def test_every_method_every_strategy(runs: Any, case: str, strategy: str) -> None:
    compare(runs(case, cases=ALL), runs(case, strategy, cases=ALL))


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_one_process_under_zero(runs: Any, tmp_path: Path, strategy: str) -> None:
    """Without a launcher, too: weights in main memory; the reference follows them there."""
    run_ranks("tr_dpo", tmp_path, 1, strategy)
    compare(runs("tr_dpo"), tmp_path)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_ranks_with_workers(strategy: str, tmp_path: Path) -> None:
    """Each rank has a worker, and goes on from the middle with answers that it drew ahead: the bits of ranks that draw."""
    own: dict[str, Any] = {"steps": 5, "save_every": 1, "keep_checkpoints": 99, "resample": 1}
    with_workers = own | {"rollouts": {"lag": 2, "workers": 1}}
    run_ranks("lagged", tmp_path / "a", 2, strategy, **own)
    run_ranks("lagged", tmp_path / "b", 2, strategy, **with_workers)
    assert far(tmp_path / "a", tmp_path / "b") == 0
    for folder in sorted((tmp_path / "b" / "checkpoints").iterdir())[2:]:
        rmtree(folder)
    run_ranks("lagged", tmp_path / "b", 2, strategy, resume=True, **with_workers)
    assert far(tmp_path / "a", tmp_path / "b") == 0
    alone = tmp_path / "alone"
    run_ranks("lagged", alone, **own)
    assert far(alone, tmp_path / "b") <= BAR


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_workers_need_whole_weights(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="each process that learns holds only a part of the weights"):
        run_ranks("lagged", tmp_path, 2, strategy, steps=1, rollouts={"workers": 1})


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("case", ["sft", "sft_lora"])
def test_saved_under_zero3_loads_plainly(runs: Any, case: str) -> None:
    from transformers import AutoModelForCausalLM

    one, three = (AutoModelForCausalLM.from_pretrained(runs(case, s) / "model") for s in ("single", "zero3"))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        a, b = one(ids).logits, three(ids).logits
    assert float((a - b).abs().max()) <= 1e-5 * max(1.0, float(a.abs().max()))


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("zero3", 2), ("", 1)),
        (("", 1), ("zero3", 2)),
        (("ddp", 2), ("zero2", 2)),
        (("zero2", 2), ("", 1)),
        (("zero3_offload", 2), ("fsdp2", 2)),
        (("fsdp2", 2), ("zero1", 2)),
    ],
)
def test_elastic_resume(runs: Any, tmp_path: Path, first: tuple[str, int], then: tuple[str, int]) -> None:
    """Six steps in one way, the other four in another: the same as ten in a row."""
    straight = runs("ppo")
    run_ranks("ppo", tmp_path, first[1], first[0], steps=6)
    run_ranks("ppo", tmp_path, then[1], then[0], resume=True)
    assert far(straight, tmp_path) <= BAR
    for a, b in zip(steps(straight), steps(tmp_path), strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=BAR, abs=BAR)


@pytest.mark.slow
def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    run_ranks("sft", tmp_path, 2, "", steps=4, save_every=2)
    newest = latest_complete(tmp_path / "checkpoints")
    assert newest is not None and newest.name.endswith("4")
    (newest / "model-00001-of-00002.safetensors").unlink()
    assert "rank 1 of 2" in str(problem_of(newest))
    with pytest.raises(CheckpointError, match="rank 1 of 2"):
        load_checkpoint(newest)
    said: list[str] = []
    older = latest_complete(tmp_path / "checkpoints", warn=said.append)
    assert older is not None and older.name.endswith("2") and "rank 1 of 2" in said[0]


@pytest.mark.slow
def test_no_whole_checkpoint_is_an_error(tmp_path: Path) -> None:
    """The only checkpoint has lost its last rank's shard: the run does not begin again by itself."""
    run_ranks("sft", tmp_path, 2, "", steps=2)
    next((tmp_path / "checkpoints").glob("step-*/optimizer-00001-of-00002.safetensors")).unlink()
    with pytest.raises(AssertionError, match=r"rank 1 of 2 wrote it.*Put the file back, or begin anew"):
        run_ranks("sft", tmp_path, 2, "", steps=4, resume=True)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "fsdp2"])
def test_fp16_is_refused_where_weights_are_shared_out(name: str) -> None:
    fp16 = Precision(torch.device("cpu"), torch.float16, torch.float32, torch.float16, True, "asked for")
    with pytest.raises(RunError, match=f"fp16 needs loss scaling, which is not built for {name}: use precision=fp32"):
        connect(name, fp16)


def test_a_part_that_will_never_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends in an error while a checkpoint is written: rank 0 does not wait half an hour for a rank that is gone."""
    monkeypatch.setattr(checkpoint, "HURRY", 0.3)
    ending, tensors = threading.Event(), {"model": {"w": torch.zeros(3)}, "optimizer": dict[str, torch.Tensor]()}
    ending.set()
    with pytest.raises(CheckpointError, match="rank 1 has not written its part and the run is ending"):
        save_checkpoint(
            tmp_path, 1, tensors, {"world_size": 2}, part=Part(0, 2, "t", {"model": {"w": ([6], 0)}}), ending=ending
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_copies_that_are_shared_out_are_one_process(tmp_path: Path) -> None:
    """HSDP: two copies of the weights, each on two of four processes; saved and gone on with on one, and the other way."""
    run_ranks("sft", tmp_path / "one", steps=4)
    run_ranks("sft", tmp_path / "four", 4, "fsdp2+rep2", steps=4)
    compare(tmp_path / "one", tmp_path / "four")
    for first, then in ((4, 1), (1, 4)):
        folder = tmp_path / f"{first}"
        run_ranks("sft", folder, first, "fsdp2+rep2" if first > 1 else "", steps=2)
        run_ranks("sft", folder, then, "fsdp2+rep2" if then > 1 else "", steps=4, resume=True)
        assert far(tmp_path / "one", folder) <= BAR
