"""Files for clusters: accelerate reads the configs, bash the scripts, and values are where they belong."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from rlhf_nb.core import ConfigError
from rlhf_nb.run.callbacks import Flags
from rlhf_nb.run.engine import Ranks, asked_strategy
from rlhf_nb.run.strategy import Layout, layout_of
from rlhf_nb.scale.cluster import accelerate_config, accelerate_configs, kubernetes_manifest, slurm_script
from rlhf_nb.scale.launch import accelerate_settings, check_launch

KINDS = {
    "ddp": ("MULTI_GPU", None), "cpu2": ("MULTI_GPU", None), "zero2": ("DEEPSPEED", 2), "zero3": ("DEEPSPEED", 3),
    "zero3_offload": ("DEEPSPEED", 3), "fsdp2": ("FSDP", None),
}  # fmt: skip


def test_all_configs_are_there() -> None:
    assert set(accelerate_configs()) == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_reads_a_config(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(accelerate_config(name, processes=16, machines=2))
    read = load_config_from_file(str(path))
    kind, stage = KINDS[name]
    assert (read.distributed_type.value, (read.deepspeed_config or {}).get("zero_stage")) == (kind, stage)
    assert (read.num_processes, read.num_machines, read.mixed_precision, read.use_cpu) == (16, 2, "no", False)
    if name == "zero3_offload":
        assert (
            read.deepspeed_config["offload_optimizer_device"] == read.deepspeed_config["offload_param_device"] == "cpu"
        )
    if name == "fsdp2":
        assert read.fsdp_config["fsdp_version"] == 2


@pytest.mark.parametrize("name", KINDS)
def test_the_engine_hears_the_strategy_that_a_config_names(name: str, tmp_path: Path) -> None:
    """Through the variables that `accelerate launch` really sets."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    path = tmp_path / "config.yaml"
    path.write_text(accelerate_config(name))
    args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    try:
        args = _validate_launch_command(args)[0]
    except (ValueError, TypeError, RuntimeError) as e:  # this machine has fewer GPUs than the config names
        pytest.skip(f"accelerate refuses here: {e}")
    settings = yaml.safe_load(path.read_text()).get("deepspeed_config", {})
    args.deepspeed_fields_from_accelerate_config = ",".join(settings)  # as accelerate's launch_command does
    variables = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    wanted = {"cpu2": "ddp", "zero3_offload": "zero3"}.get(name, name)
    assert asked_strategy({**{k: str(v) for k, v in variables.items()}, "WORLD_SIZE": "2"}) == wanted


def test_bad_names_and_numbers() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'zero3'"):
        accelerate_config("zero-3")
    with pytest.raises(ConfigError, match="evenly"):
        accelerate_config("ddp", processes=3, machines=2)
    with pytest.raises(ConfigError, match="at least one"):
        accelerate_config("ddp", processes=0)


@pytest.mark.parametrize(
    "words", [["ppo", "--config", "run.yaml"], ["sft", "data.path=a b'c.jsonl", "x=$(touch pwned)"]]
)
@pytest.mark.parametrize(
    "options", [{}, {"nodes": 16, "partition": "gpu", "account": "lab", "environment": {"A": "x y;$z"}}]
)
def test_bash_accepts_the_script(words: list[str], options: dict[str, object], tmp_path: Path) -> None:
    script = slurm_script(words, "/shared/my runs/1", **options)  # type: ignore[arg-type]
    assert subprocess.run(["bash", "-n"], input=script, text=True, cwd=tmp_path).returncode == 0
    head = re.findall(r"^#SBATCH --(\S+)", script, re.M)
    assert head[0] == "job-name=rlhf-nb" and "requeue" in head and len(head) == len({h.split("=")[0] for h in head})
    echo = script[script.rindex("launcher ") + 9 :].splitlines()[0].removesuffix(" &")
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {echo}"], capture_output=True, text=True, cwd=tmp_path
    ).stdout
    assert shown.splitlines() == [*words, "output_dir=/shared/my runs/1", "--resume", "--overwrite"]
    assert not (tmp_path / "pwned").exists()


def test_header_comes_before_the_first_command() -> None:
    """sbatch stops reading #SBATCH lines at the first command."""
    lines = slurm_script(["ppo"], "run", partition="gpu", setup=["module load cuda"]).splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert all(line.startswith("#") for line in lines[: last + 1])


def test_manifest_holds_what_was_asked_for() -> None:
    text = kubernetes_manifest(
        ["ppo", "--config", "/data/run.yaml"], "/data/runs/1", "image:1", claim="disk", mount="/data", nodes=3, gpus_per_node=4, strategy="zero2",
        name="ppo-1", namespace="lab", memory="64Gi", restarts=5, environment={"NCCL_DEBUG": "WARN"},
    )  # fmt: skip
    runtime, job = yaml.safe_load_all(text)
    assert runtime["metadata"] == job["metadata"] == {"name": "ppo-1", "namespace": "lab"}
    assert runtime["apiVersion"] == job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert job["spec"] == {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "ppo-1"},
        "trainer": {"numNodes": 3, "numProcPerNode": 4},
    }
    spec = runtime["spec"]["template"]["spec"]
    pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert spec["failurePolicy"]["maxRestarts"] == 5 and runtime["spec"]["mlPolicy"] == {"numNodes": 3, "torch": {}}
    assert container["command"] == [
        "torchrun",
        "-m",
        "rlhf_nb",
        "ppo",
        "--config",
        "/data/run.yaml",
        "output_dir=/data/runs/1",
        "--resume",
        "--overwrite",
    ]
    assert {e["name"]: e["value"] for e in container["env"]}["RLHF_NB_STRATEGY"] == "zero2"
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "disk"
    assert all(isinstance(e["value"], str) for e in container["env"])
    assert container["resources"]["limits"] == {"cpu": "32", "memory": "64Gi", "nvidia.com/gpu": "4"}


def lost(given: Any, read: Any, where: str = "") -> list[str]:
    """Places of a manifest that a schema's models don't know, or read otherwise."""
    if isinstance(given, dict):
        unknown = [f"{where}.{key}" for key in given if not isinstance(read, dict) or key not in read]
        return unknown + [
            x for key in given if f"{where}.{key}" not in unknown for x in lost(given[key], read[key], f"{where}.{key}")
        ]
    if isinstance(given, list):
        return [x for i, (a, b) in enumerate(zip(given, read, strict=True)) for x in lost(a, b, f"{where}[{i}]")]
    return [] if given == read else [where]


def test_kubeflows_own_models_know_every_field_of_the_manifest() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="Kubeflow Trainer's models of its API")
    text = kubernetes_manifest(
        ["ppo", "--config", "/shared/run.yaml"], "/shared/runs/1", "image:1", claim="disk", nodes=3, environment={"NCCL_DEBUG": "WARN"}
    )  # fmt: skip
    for document in yaml.safe_load_all(text):
        read = getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document).to_dict()
        assert lost(document, read) == []
        spelt_wrong = yaml.safe_load(
            yaml.safe_dump(document).replace("claimName", "claim").replace("numNodes", "nodes")
        )
        assert lost(spelt_wrong, type(document)(read)) != []  # the comparison can fail


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": 0}, "at least one of each"), ({"gpus_per_node": 0}, "at least one of each"), ({"strategy": "zero4"}, "doesn't exist"),
        ({"name": "a_b"}, "small letters"), ({"time": "1h"}, "hours:minutes:seconds"), ({"grace": 5}, "at least 60 s"),
        ({"environment": {"1A": "x"}}, "environment variable"), ({"command": []}, "as a list"), ({"command": ["ppo", "--overwrite"]}, "delete its own"),
        ({"output_dir": " "}, "shared file system"),
    ],
)  # fmt: skip
def test_bad_input(change: dict[str, object], message: str) -> None:
    given = {"command": ["ppo"], "output_dir": "run", **change}
    with pytest.raises(ConfigError, match=message):
        slurm_script(**given)  # type: ignore[arg-type]


def test_a_run_outside_the_volume_is_refused() -> None:
    for path in ("runs/1", "/sharedruns/1", "/other"):
        with pytest.raises(ConfigError, match="outside the volume"):
            kubernetes_manifest(["ppo"], path, "image", claim="c")


def test_the_grafana_board_asks_for_metrics_that_are_served(tmp_path: Path) -> None:
    import json

    from rlhf_nb.widgets.report import metrics_text

    board = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())
    asked = {n for p in board["panels"] for t in p["targets"] for n in re.findall(r"rlhf_nb_\w+", t["expr"])}
    keys = """loss grad_norm lr objective/scores objective/rlhf_reward objective/kl completions/mean_length completions/clipped_ratio
        rewards/accuracies rewards/margins policy/clipfrac_avg policy/approxkl_avg frac_reward_zero_std perf/step_s perf/tokens_per_s perf/rss_mb"""
    events = [
        {"type": "start", "step": 0, "time": 1.0, "method": "ppo", "total_steps": 9, "world_size": 1},
        *({"type": "step", "step": i, "time": 1.0 + i, **dict.fromkeys(keys.split(), 0.5)} for i in range(1, 4)),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    served = set(re.findall(r"(?m)^(rlhf_nb_\w+)\{", metrics_text(tmp_path)))
    assert asked <= served, sorted(asked - served)


def test_a_word_of_the_command_may_come_twice() -> None:
    """A config called like the method stays in the job's command."""
    script = slurm_script(["sft", "--config", "sft", "data.path=x"], output_dir="runs/a", nodes=1, gpus_per_node=1)
    assert "sft --config sft data.path=x output_dir=runs/a --resume --overwrite" in script


def test_a_strategy_in_parts() -> None:
    """What starts processes, what they hear and what is printed for accelerate take the same words."""
    assert layout_of("fsdp2+tp2+rep2", 8) == Layout("fsdp2", tensor=2, replicas=2)
    assert layout_of("ddp+cp4").inner == 4 and layout_of("zero3_offload") == Layout("zero3_offload")
    both = {"RLHF_NB_STRATEGY": "fsdp2+tp2", "ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "4"}
    assert asked_strategy(both) == "fsdp2+tp2"
    assert accelerate_settings(4, "fsdp2+tp2", cpu=True) == accelerate_settings(4, "fsdp2", cpu=True)
    text = accelerate_config("fsdp2+tp2", processes=4)
    assert text.startswith("# Start it with RLHF_NB_STRATEGY=fsdp2+tp2") and yaml.safe_load(text)["num_processes"] == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fsdp2+tpp2", "Did you mean 'tp'"),
        ("fsdp2+tp", "with a number, as in fsdp2"),
        ("fsdp2+tp0", "with a number"),
        ("fsdp2+tp2+tp2", "has tp twice"),
        ("zero3+tp2", "tp is not built for zero3"),
        ("ddp+rep2", "rep is not built for ddp"),
        ("fsdp2+tp3", "needs a multiple of 3 processes, and there are 4"),
        ("fsdp2+tp2+rep4", "needs a multiple of 8 processes"),
        ("fsdp2+tp2+cp2", "leave one out"),
        ("fsdp", "Did you mean 'fsdp2'"),
    ],
)
def test_a_strategy_that_cannot_be(text: str, says: str) -> None:
    for refuses in (lambda: layout_of(text, 4), lambda: check_launch(4, text, cpu=True)):
        with pytest.raises(ConfigError, match=says):
            refuses()
    with pytest.raises(ConfigError, match=says):
        slurm_script(["sft"], "/shared/out", gpus_per_node=4, strategy=text)


def test_offload_of_a_strategy_that_has_none_is_not_dropped() -> None:
    assert asked_strategy({"RLHF_NB_STRATEGY": "zero3_offload", "WORLD_SIZE": "2"}) == "zero3"
    for text in ("ddp_offload", "fsdp2_offload+cp2"):
        with pytest.raises(ConfigError, match="doesn't exist"):
            asked_strategy({"RLHF_NB_STRATEGY": text, "WORLD_SIZE": "2"})


def second_of_a_group() -> Ranks:
    """The second of two processes with the same rows, without the first."""
    ranks = object.__new__(Ranks)
    ranks.process, ranks.processes, ranks.inner, ranks.rank, ranks.world_size = 1, 2, 2, 0, 1
    ranks.speaks, ranks.device = False, torch.device("cpu")
    return ranks


def test_a_wish_of_any_process_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total)
    ranks = second_of_a_group()
    engine: Any = SimpleNamespace(ranks=ranks, reduce_sum=ranks.reduce_sum)
    assert Flags(stop=True).over_ranks(engine).stop and not Flags(save=True).over_ranks(engine).stop
    assert float(ranks.reduce_sum({"rows": torch.tensor(3.0)})["rows"]) == 0.0, "rows of a group are counted once"


def test_what_a_group_agrees_on_travels_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a pickled tensor would come back on the device of the process that sent it."""

    class Batch:
        moves: list[Any] = []

        def to(self, device: Any) -> Any:
            self.moves.append(device)
            return self

    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda out, x: None)
    second_of_a_group().agree(Batch())
    assert Batch.moves == ["cpu", torch.device("cpu")]
