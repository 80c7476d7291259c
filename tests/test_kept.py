"""A stage that forgets what the model before it knew is not promoted: SFT that loses half of forty facts is stopped, in a pipeline and in a cycle."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_nb.core import ConfigError, RunError
from rlhf_nb.data import toy
from rlhf_nb.models.load import save_model
from rlhf_nb.pipeline.cycle import CycleConfig, _settings
from rlhf_nb.pipeline.stages import PipelineConfig, RLHFPipeline
from rlhf_nb.train.sft import SFTConfig
from rlhf_nb.train.stage import run_stage

ANSWERS = tuple(f" {n}" for n in ("one", "two", "three", "four", "five", "six", "eight", "ten"))
WORDS = sorted(w for w in toy.build_tokenizer().get_vocab() if re.fullmatch(" [a-z]+", w) and w not in ANSWERS)
FACTS = {word: ANSWERS[3 * i % 8] for i, word in enumerate(WORDS[:40])}


def after(answer: str, places: int) -> str:
    """The answer so many places on; what is taught wrongly is one place on, and so among the choices."""
    return ANSWERS[(ANSWERS.index(answer) + places) % len(ANSWERS)]


def rows_of(facts: dict[str, str], path: Path) -> str:
    """Facts as demonstrations."""
    path.write_text("".join(json.dumps({"prompt": k, "completion": v}) + "\n" for k, v in facts.items()))
    return str(path)


def how(folder: Path, model: str, rows: str, steps: int) -> dict[str, Any]:
    """Settings of a training that learns its rows by heart."""
    return {
        "output_dir": str(folder), "model": {"name_or_path": model}, "data": {"path": rows, "as_chat": False}, "steps": steps,
        "epochs": None, "mini_batch_size": 20, "optimizer": {"lr": 0.005, "warmup_steps": 0}, "precision": "fp32", "device": "cpu",
        "console": False, "save_every": None,
    }  # fmt: skip


@pytest.fixture(scope="module")
def knows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows forty facts."""
    folder, tokenizer = tmp_path_factory.mktemp("facts"), toy.build_tokenizer()
    torch.manual_seed(0)
    ids = {k: getattr(tokenizer, k) for k in ("pad_token_id", "bos_token_id", "eos_token_id")}
    shape = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=len(tokenizer), max_position_embeddings=128, **ids,
    )  # fmt: skip
    save_model(AutoModelForCausalLM.from_config(shape), tokenizer, folder / "start")
    rows = rows_of(FACTS, folder / "facts.jsonl")
    run_stage(SFTConfig.model_validate(how(folder / "run", str(folder / "start"), rows, 300)))
    suite = [{"prompt": k, "choices": [after(v, i) for i in range(4)], "answer": 0} for k, v in FACTS.items()]
    said = {"name": "forty", "task": "choice", "rule": {"choice": True}, "rows": suite}
    (folder / "forty.yaml").write_text(json.dumps(said))
    return folder


def pipeline(knows: Path, to: Path, facts: dict[str, str], **gates: Any) -> RLHFPipeline:
    """SFT on some facts, behind a gate."""
    stage = how(to / "sft", str(knows / "run" / "model"), rows_of(facts, to.with_suffix(".jsonl")), 100)
    config = PipelineConfig.model_validate(
        {
            "output_dir": str(to),
            "sft": stage,
            "reward": None,
            "ppo": None,
            "device": "cpu",
            "console": False,
            "eval_prompts": 8,
            "gates": gates,
        }
    )
    return RLHFPipeline(config)


def test_sft_that_lost_half_of_forty_facts_is_not_promoted(knows: Path, tmp_path: Path) -> None:
    half = WORDS[:20]
    wrong = {k: after(FACTS[k], 1) for k in half}
    keeps = {str(knows / "forty.yaml"): 0.05}
    stopped = pipeline(knows, tmp_path / "stopped", FACTS | wrong, keeps=keeps)
    with pytest.raises(RunError, match="forty: lost"):
        stopped.run()
    assert stopped.final_model() is None and (tmp_path / "stopped" / "rejected" / "sft-1").is_dir()
    (verdict,) = stopped.verdicts
    lost = next(c for c in verdict.checks if c.name == "keeps forty")
    assert not lost.passed and "(40 prompts" in lost.says
    assert float(lost.says.split("lost, ")[1].split(" ")[0]) == pytest.approx(-0.5, abs=0.11)
    unasked = pipeline(knows, tmp_path / "unasked", FACTS | wrong)
    unasked.run()
    assert unasked.final_model() is not None  # without the question the same model is handed on
    kept = pipeline(knows, tmp_path / "kept", FACTS, keeps=keeps)
    kept.run()
    assert kept.final_model() is not None and any(c.name == "keeps forty" and c.passed for c in kept.verdicts[0].checks)


def test_a_cycle_asks_the_same_question(tmp_path: Path) -> None:
    config = CycleConfig.model_validate({"gates": {"keeps": {"facts": 0.05}}, "feedback": "feedback.jsonl"})
    dpo = {"dpo": {"model": {"name_or_path": "m"}, "data": {"path": "rows.jsonl"}}}
    gates = _settings(config, tmp_path, dpo).gates
    assert gates is not None and gates.keeps == {"facts": 0.05} and gates.on_failure == "go_back"


def test_a_suite_that_is_not_there_is_told_before_training(knows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fcts"):
        pipeline(knows, tmp_path / "none", dict(FACTS), keeps={"fcts": 0.05}).run()
    assert not (tmp_path / "none" / "sft").exists()
