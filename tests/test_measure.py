"""Measured links and rates: what two processes write is a topology file that can be planned with; a step is predicted from its pieces."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from process_cases import make, run_ranks
from test_cli import call

from rlhf_nb.core import ConfigError
from rlhf_nb.run.roles import ClusterTopology
from rlhf_nb.run.strategy import layout_of
from rlhf_nb.scale.cost import Speed
from rlhf_nb.scale.measure import MESSAGE_SIZES, Wires, predict_ranks
from rlhf_nb.scale.plan import plans
from rlhf_nb.scale.predict import WIRE, named_gpu, predict_step
from rlhf_nb.scale.topology import DecoderShape, Job

SHAPE = DecoderShape(4, 64, 128, 4, 4, 16, 512, False)
SPEED = Speed(1e-5, 3e-5, 2e-5, 6e-5, 0.0, 0.0, 1e-9)


def line(latency: float, rate: float) -> Wires:
    """Wires whose collectives all take latency + bytes / rate."""
    return Wires(MESSAGE_SIZES, *[tuple(latency + size / rate for size in MESSAGE_SIZES)] * 4)


def test_messages_of_each_strategy_are_counted() -> None:
    job = Job(
        "sft", 16, 16, token_budget=64, mini_batch=8, device="cpu", format=Job("sft").format._replace(weight=4, grad=4)
    )
    free, slow = line(0.0, 1e18), line(0.0, 1e6)
    size, layers = 4 * SHAPE.total / 1e6, 4 * (SHAPE.total - 2 * 512 * 64) / 1e6  # seconds at 1 MB a second
    forwards = 2  # of a rank's 4 rows of 32 tokens, 64 at a time
    least = MESSAGE_SIZES[0] / 1e6  # of a message, which the fixed part holds
    expected = {
        "ddp": size - least, "zero2": (2 * forwards + 1) * (size - least), "zero3": 3 * forwards * (size - least),
        "fsdp2": (forwards + 1) * size + forwards * layers - least * (forwards * (2 * 4 + 1) + 4 + 1),
    }  # fmt: skip
    for strategy, seconds in expected.items():
        found = predict_ranks(SHAPE, job, strategy, 2, SPEED, slow, fixed=0.5, crowd=1.0)
        nothing = predict_ranks(SHAPE, job, strategy, 2, SPEED, free, fixed=0.5, crowd=1.0)
        assert math.isclose(found.wait - nothing.wait, seconds, rel_tol=1e-6), strategy
        assert math.isclose(nothing.wait, 0.5, abs_tol=1e-6) and found.update == nothing.update


def test_ranks_that_share_cores_take_turns() -> None:
    job = Job("sft", 16, 16, token_budget=64, mini_batch=8, device="cpu")
    alone, shared = (predict_ranks(SHAPE, job, "ddp", 4, SPEED, line(0, 1e18), crowd=c) for c in (1.0, 2.0))
    assert math.isclose(shared.update, 2 * alone.update)
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    many = predict_ranks(SHAPE, job, "ddp", 4 * here, SPEED, line(0, 1e18))
    assert math.isclose(
        many.update, 4 * predict_ranks(SHAPE, job, "ddp", 4 * here, SPEED, line(0, 1e18), crowd=1.0).update
    )


def test_between_sizes_time_is_a_line_that_goes_on() -> None:
    wires = line(1e-3, 1e9)
    for size in (1 << 14, 3 << 20, 1 << 30):
        assert math.isclose(wires.seconds("all_gather", size), 1e-3 + size / 1e9, rel_tol=1e-9)
    assert wires.seconds("reduce_scatter", 0) == wires.reduce_scatter[0]


@pytest.mark.slow  # 20 CPU seconds each
@pytest.mark.parametrize("launcher", ["itself", "torchrun"])
def test_what_is_measured_can_be_planned_with(launcher: str, tmp_path: Path) -> None:
    out = tmp_path / "cluster_topology.yaml"
    words = ["measure-cluster", "--device", "cpu", "--out", str(out)]
    if launcher == "itself":
        call(*words, "-n", "2")
    else:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29653"]
        env: dict[str, Any] = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*torchrun, "-m", "rlhf_nb", *words], env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stderr.count("| all-reduce, GB/s |") == 1  # one rank speaks
    found = ClusterTopology.load(out)
    assert found.world == 2 and found.nodes[0].teraflops > 1e-4 and found.nodes[0].hardware == "cpu"
    (link,) = found.links
    assert link.gigabytes_per_s > 0.01 and 0 < link.latency_us < 1e6
    assert found.link(0, 1) == link
    assert "| 0-1 | actor+critic |" in call("plan", "sft", "--toy", "--topology", str(out))


def test_messages_of_an_update_are_timed(tmp_path: Path) -> None:
    run_ranks("sft", tmp_path, 2, "fsdp2", steps=2, comm_every=2)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first, second = (e for e in map(json.loads, lines) if e["type"] == "step")
    assert "perf/collective_s" not in first and first["perf/tokens_per_s_per_device"] > 0
    assert 0 < second["perf/collective_s"] < second["perf/update_s"] and 0 < second["perf/exposed_comm_share"] < 1


@pytest.mark.parametrize(("case", "times"), [("sft", 0), ("reward", 0), ("dpo", 1), ("kto", 1)])
def test_ranks_gather_a_model_only_where_a_step_looks_with_it(case: str, times: int, tmp_path: Path) -> None:
    trainer = make(case, output_dir=str(tmp_path / "run"), console=False)
    trainer.start()
    gathered, whole = [], trainer.engine.strategy.whole
    trainer.engine.strategy.whole = lambda: (gathered.append(case), whole())[1]
    trainer.train_step()
    trainer.log.close()
    assert len(gathered) == times


def bucket_main(root: str) -> None:
    """What a rank does: whether DDP and DeepSpeed were told the size of a message."""
    wrapped: Any = make("sft", output_dir=f"{root}/run", console=False).method.module
    told = getattr(wrapped, "bucket_bytes_cap", None) or 4 * wrapped.zero_reduce_bucket_size()
    Path(root, f"told-{os.environ['RANK']}").write_text(str(told))


@pytest.mark.parametrize("strategy", ["ddp+mb4", "zero2+mb4"])
def test_gradients_travel_in_buckets_of_the_size_asked_for(strategy: str, tmp_path: Path) -> None:
    run_ranks("test_measure:bucket_main", tmp_path, 2, strategy)
    assert [Path(tmp_path, f"told-{r}").read_text() for r in (0, 1)] == [str(4 << 20)] * 2


def test_a_bucket_is_a_part_of_a_strategy() -> None:
    assert layout_of("zero2_offload+mb128") == layout_of("zero2_offload")._replace(bucket=128)
    with pytest.raises(ConfigError, match="mb is not built for fsdp2; use ddp.mb25"):
        layout_of("fsdp2+mb25")


def test_the_page_that_weighs_pipelines_has_the_planners_numbers() -> None:
    llama, gpu = DecoderShape(80, 8192, 28672, 64, 8, 128, 128256, tied=False), named_gpu("h100")
    page = (Path(__file__).parents[1] / "docs" / "system_design.md").read_text(encoding="utf-8")
    for rows in (512, 4096, 32768):
        (found,) = plans(llama, Job("sft", 512, 512, token_budget=8192, mini_batch=rows), [512], 80.0, None).values()
        assert found is not None and found.split.stage == 3
        step = predict_step(llama, found, gpu)
        stages, many = 8, rows * 8 // 512
        once = step.update * (3 / 4 if found.job.recompute else 1) * (many + stages - 1) / many
        sums, states = (
            4 * llama.total / stages / (WIRE * min(gpu.link, 8 * gpu.network)),
            many * 1024 * llama.hidden * 4,
        )
        pipeline, bubble = once + sums + states / (WIRE * gpu.network), (stages - 1) / (many + stages - 1)
        row = f"| {rows:,} | {step.seconds:.2f} | {step.wait:.2f} | {pipeline:.2f} | {100 * bubble:.0f} % |"
        assert row in page, row
