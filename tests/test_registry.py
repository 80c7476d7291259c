"""A method registered in a notebook cell is known to command line, pipeline, launcher, doctor and planner at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import patience
import pytest
import torch
from command import call
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import ConfigError, decide_precision
from rlhf_nb.data import toy
from rlhf_nb.pipeline.doctor import doctor
from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
from rlhf_nb.run.log import read_metrics
from rlhf_nb.scale.topology import job_of, predict_memory
from rlhf_nb.train import registry
from rlhf_nb.train.registry import built_in, register
from rlhf_nb.train.sft import SFTConfig, SFTTrainer
from rlhf_nb.train.stage import read_json
from rlhf_nb.types import LossSum

torch.set_num_threads(1)

# The cell: a config with one setting more, a loss, a trainer. It is run here, and in a process where it is `__main__`.
CELL = '''
from pydantic import Field, model_validator
from rlhf_nb.train.registry import register
from rlhf_nb.train.sft import SFT, SFTConfig, SFTTrainer
from rlhf_nb.types import LossSum

FLOOR = 1e-9


class FocalConfig(SFTConfig):
    """SFT that looks most at the tokens it finds hard."""

    focus: float = Field(default=2.0, ge=0, description="exponent of (1 - p)")

    @model_validator(mode="after")
    def _known(self) -> "FocalConfig":
        if self.focus > 9:
            raise ValueError(f"focus is {self.focus}, and above 9 only the hardest token counts: lower it.")
        return self


class Focal(SFT):
    """The focal loss, Lin et al., arXiv 1708.02002."""

    name = "focal"

    def loss(self, micro):
        logps, mask = self.module(micro).logps, micro.completion_mask
        each = -((1 - logps.exp()).clamp(min=FLOOR) ** self.config.focus) * logps
        return {"sft": (LossSum(each.where(mask, 0.0).sum(), mask.sum()), 1.0)}


@register("focal", FocalConfig, rows="sft", starts_from=("sft",), about="Fine-tune where it is hard.")
class FocalTrainer(SFTTrainer):
    """SFT with the focal loss."""

    def __init__(self, config, *args, **options):
        super().__init__(config, *args, **options)
        self.method.__class__ = Focal
'''
SHORT = {"steps": 3, "mini_batch_size": 8, "console": False}


@pytest.fixture(autouse=True)
def cell() -> Any:
    """The cell's names; its method is forgotten afterwards."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, names)
    yield names
    registry._METHODS.pop("focal", None)
    PipelineConfig.model_fields.pop("focal", None)
    PipelineConfig.model_rebuild(force=True)


def losses(run: Path) -> list[float]:
    return [e["loss"] for e in read_metrics(run) if e["type"] == "step"]


def test_command_line(tmp_path: Path) -> None:
    assert "Fine-tune where it is hard" in call("--help") and "--resume" in call("focal", "--help")
    assert "focus: 2.0" in call("config", "show", "focal") and "exponent" in call("config", "init", "focal")
    over = [f"{k}={str(v).lower()}" for k, v in SHORT.items()]
    for focus in (0, 4):
        where = f"output_dir={tmp_path / str(focus)}"
        assert "Model:" in call("focal", "--toy", f"focus={focus}", where, *over)
    assert "Model:" in call("sft", "--toy", f"output_dir={tmp_path / 'sft'}", *over)
    plain = losses(tmp_path / "sft")
    assert losses(tmp_path / "0") == pytest.approx(plain) and losses(tmp_path / "4")[0] < plain[0] - 0.05
    assert read_json(tmp_path / "4" / "stage.json")["stage"] == "focal"


def test_pipeline(tmp_path: Path) -> None:
    values = {
        "reward": None,
        "ppo": None,
        "base": {"size": "tiny"},
        "eval_prompts": 8,
        "questions": 1,
        "console": False,
    }
    config = PipelineConfig.preset(
        "toy",
        output_dir=str(tmp_path / "run"),
        sft={"steps": 2},
        focal={**SHORT, "focus": 3.0, "steps": 2, "epochs": None},
        **values,
    )
    pipeline = RLHFPipeline(config, lambda text: None)
    assert pipeline.stages == ["base", "sft", "focal"] and pipeline.needs("focal") == ["sft"]
    results = pipeline.run()
    assert set(results["policies"]) == {"base", "sft", "focal"} and results["stages"]["focal"]["seconds"] > 0
    assert PipelineConfig.load(tmp_path / "run").focal == config.focal
    assert pipeline.focal(resume=True).skipped
    with pytest.raises(ConfigError, match=r"focal\.focus"):
        config.replace(focal={"focus": -1.0})


def test_doctor_and_planner(cell: dict[str, Any]) -> None:
    config = cell["FocalConfig"].preset("toy")
    assert not [f for f in doctor(config) if f.level == "error" and "GB" not in f.what]
    short = cell["FocalConfig"].preset("toy", data={"max_length": 16, "max_prompt_length": 8})
    assert any("rows are cut" in f.what and f.level == "warning" for f in doctor(short))
    shape, cpu = toy.toy_model_config(), decide_precision("cpu")
    same = predict_memory(shape, job_of(SFTConfig.preset("toy"), cpu))
    assert predict_memory(shape, job_of(config, cpu)).by_role("step") == same.by_role("step")


@pytest.mark.slow
def test_launch_on_two_processes(tmp_path: Path) -> None:
    """From a kernel where the classes are `__main__`'s: they are sent to the ranks, their check and their globals too."""
    script = CELL + textwrap.dedent(f"""
        if __name__ == "__main__":
            from rlhf_nb.scale.launch import launch
            config = FocalConfig.preset("toy", output_dir={str(tmp_path / "two")!r}, focus=3.0, **{SHORT!r})
            done = launch(config, num_processes=2, device="cpu", restarts=0, say=None)
            print(done.value["metrics"], done.model)
    """)
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = patience.run([sys.executable, "-c", script], cpu=600, env=env)
    assert done.returncode == 0, done.stdout[-3000:]
    call(
        "focal",
        "--toy",
        "focus=3",
        f"output_dir={tmp_path / 'one'}",
        *(f"{k}={str(v).lower()}" for k, v in SHORT.items()),
    )
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert json.loads((tmp_path / "two" / "stage.json").read_text())["stage"] == "focal"


def test_a_shell_is_told_of_methods_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "my_methods.py").write_text(CELL)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    env = {**os.environ, "PYTHONPATH": paths, "RLHF_NB_METHODS": "my_methods", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "rlhf_nb", "config", "show", "focal", "focus=1"]
    assert "focus: 1.0" in subprocess.run(command, env=env, text=True, capture_output=True, timeout=120).stdout
    said = subprocess.run(
        command, env=env | {"RLHF_NB_METHODS": "my_method"}, text=True, capture_output=True, timeout=120
    )
    assert said.returncode == 1 and "RLHF_NB_METHODS names 'my_method'" in said.stderr and said.stderr.count("\n") == 1


def test_every_built_in_method_is_found_in_its_own_file() -> None:
    found = registry.methods()
    own = [name for name, m in found.items() if m.trainer.__module__.startswith("rlhf_nb.")]
    assert set(own) == set(built_in()) and own == list(found)[: len(own)]
    assert own[:2] == ["sft", "rlaif"] and own[-1] == "raft"
    for name, module in built_in().items():
        method = found[name]
        assert method.trainer.__module__ == module and method.about.endswith((".", "them."))
        assert registry.of(method.config) is method and set(method.starts_from) <= set(own)


def test_methods_are_found_without_importing_them() -> None:
    code = "import sys; from rlhf_nb.train.registry import built_in; print([m for m in built_in().values() if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120)
    assert told.stdout == "[]\n", told.stderr


def test_register_leaves_the_class_as_it_is() -> None:
    class Mine(SFTTrainer):
        """Nothing of its own."""

    before = dict(vars(Mine))
    try:
        assert register("untouched", type("MineConfig", (SFTConfig,), {}), rows="sft")(Mine) is Mine
        assert dict(vars(Mine)) == before
    finally:
        registry._METHODS.pop("untouched", None)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"already rlhf_nb\.train\.sft\.SFTTrainer"):
        register("sft", SFTConfig, rows="sft")(type("Mine", (SFTTrainer,), {}))
    with pytest.raises(ConfigError, match="Did you mean 'focal'"):
        registry.get("focall")
    with pytest.raises(ConfigError, match="belongs to no method"):
        registry.of(LossSum)


def test_a_command_that_is_not_there_is_named_with_one_that_is() -> None:
    found = CliRunner().invoke(app, ["focall"])
    assert found.exit_code == 2 and "Did you mean 'focal'" in found.output
