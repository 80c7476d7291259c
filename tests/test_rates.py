"""The learning rate that a run takes where none was said: by method and adapter, as docs/rates.md has it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from rlhf_nb import DPOConfig, GRPOConfig, SFTConfig, SFTTrainer
from rlhf_nb.core import ConfigError
from rlhf_nb.train.registry import methods

torch.set_num_threads(1)
PAGE = (Path(__file__).parent.parent / "docs" / "rates.md").read_text(encoding="utf-8")
TABLE = {
    name: (float(full), float(lora))
    for name, full, lora in re.findall(r"^\| ([a-z]+) \| (\S+) \| (\S+) \|", PAGE, re.M)
}


def test_the_page_names_every_method_that_trains() -> None:
    own = {n for n, m in methods().items() if m.config.__module__.startswith("rlhf_nb.")}  # examples register others
    assert set(TABLE) == {n for n in own if methods()[n].config.has("optimizer.lr")}


@pytest.mark.parametrize("name", TABLE)
def test_rates_are_those_of_the_page(name: str) -> None:
    kind, (full, lora) = methods()[name].config, TABLE[name]
    plain, adapter = kind(), kind(model={"lora": {}})  # type: ignore[arg-type]
    assert (plain.optimizer.lr, adapter.optimizer.lr) == (full, lora)  # type: ignore[attr-defined]
    assert adapter.replace(model={"lora": None}).optimizer.lr == full  # what was resolved isn't taken for said
    assert kind.load(None, ["optimizer.lr=null", "model.lora.r=8"]).optimizer.lr == lora  # type: ignore[attr-defined]


def test_what_was_said_stays() -> None:
    said = GRPOConfig(optimizer={"lr": 3e-4}, model={"lora": {}})  # type: ignore[arg-type]
    assert said.optimizer.lr == 3e-4 and GRPOConfig.model_validate(said.to_dict()).optimizer.lr == 3e-4
    resolved = DPOConfig.model_validate(DPOConfig(model={"lora": {}}).to_dict())  # type: ignore[arg-type]
    assert resolved.optimizer.lr == 1e-5 and resolved.replace(model={"lora": None}).optimizer.lr == 1e-5  # a run's file
    with pytest.raises(ConfigError, match="sgd has no usual rate"):
        SFTConfig(optimizer={"name": "sgd"})  # type: ignore[arg-type]


def test_the_number_is_in_the_log_and_in_the_config(tmp_path: Path) -> None:
    toy = SFTConfig.preset("toy").to_dict() | {"output_dir": str(tmp_path / "run"), "steps": 1, "console": False}
    toy["optimizer"]["lr"], toy["model"]["lora"] = None, {"r": 2}
    trainer = SFTTrainer(SFTConfig.model_validate(toy))
    trainer.fit()
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["lr"] == 2e-4 == SFTConfig.load(tmp_path / "run").optimizer.lr


def test_an_adapter_that_comes_with_the_model_counts(tmp_path: Path) -> None:
    """As TRL's scripts have it: `peft_config`, or a model of peft."""
    from peft import LoraConfig, get_peft_model

    from rlhf_nb.data import toy

    rows = [{"prompt": "where do owls live", "completion": "owls live"}] * 4
    for peft in (True, False):
        config = SFTConfig(output_dir=str(tmp_path), steps=1, epochs=None, device="cpu", console=False)
        lora, model = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"), toy.build_model(size="tiny")
        given = {"peft_config": lora} if not peft else {}
        made = SFTTrainer(config, get_peft_model(model, lora) if peft else model, toy.build_tokenizer(), rows, **given)
        assert made.config.optimizer.lr == 2e-4
