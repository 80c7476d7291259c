"""What `plan` and `doctor` promise of a step: by the rule that training follows, and near what a step takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import rlhf_nb.scale.cost as cost
from rlhf_nb.config import LoraSettings
from rlhf_nb.data import toy
from rlhf_nb.fast.workers import workers_for
from rlhf_nb.models.adapters import add_lora
from rlhf_nb.scale.topology import Job, decoder_shape
from rlhf_nb.train.sft import SFTConfig, SFTTrainer

FACTOR = 2.0  # promised seconds are at most so many times too large or too small


def llama(**over: Any) -> LlamaConfig:
    sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 768}
    rest = {"vocab_size": 512, "tie_word_embeddings": True, "max_position_embeddings": 256}
    return LlamaConfig(**sizes | rest | over)


def job(**over: Any) -> Job:
    plain: dict[str, Any] = {"token_budget": 1024, "mini_batch": 32, "holds": ("policy",), "device": "cpu"}
    return Job("sft", 44, 44, **plain | over)


@pytest.mark.parametrize("lora", [None, 4])
@pytest.mark.parametrize("layers", [1, 6])
def test_cores_take_rows_by_the_rule_of_training(lora: int | None, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    small = llama(num_hidden_layers=layers, hidden_size=64 if layers == 1 else 256)
    net: Any = AutoModelForCausalLM.from_config(small)
    net = add_lora(net, LoraSettings(r=lora)) if lora else net
    found = cost.cores(decoder_shape(small), job(lora=lora))
    assert found == workers_for(net, learning=True) == (1 if layers == 1 else 4)


def test_half_precision_is_measured_as_it_trains() -> None:
    """The forward pass under autocast, the backward pass outside."""
    with torch.autocast("cpu", torch.bfloat16):
        speed = cost.measure_costs(
            llama(hidden_size=576, num_attention_heads=9, num_key_value_heads=3), job(group=2), None
        )
    assert speed.learn > 0 and speed.forward > 0


def test_models_with_more_trained_numbers_are_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    large = decoder_shape(llama(hidden_size=1024, num_hidden_layers=24, intermediate_size=3072, vocab_size=32000))
    assert 256e6 < large.total < 1e9
    assert cost.cores(large, job()) == 1 and cost.cores(large, job(lora=16)) == 4


def test_promised_seconds_are_near_those_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By CPU time, so that other work on the machine doesn't count."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(cost.time, "perf_counter", lambda: time.process_time() / threads)
    tokenizer, words = toy.build_tokenizer(), "the owl lives in the forest and hunts at night " * 5
    config = llama(vocab_size=len(tokenizer))
    settings = {"mini_batch_size": 32, "steps": 9, "epochs": None, "token_budget": 1024, "precision": "fp32"}
    trainer = SFTTrainer(
        SFTConfig.preset("toy", output_dir=str(tmp_path / "run"), console=False, **settings),
        AutoModelForCausalLM.from_config(config), tokenizer, eval_rows=[],
        rows=[{"prompt": f"{words[:200]}{i}", "completion": words[:200]} for i in range(64)],
    )  # fmt: skip
    batch = trainer.method.collate(trainer.source.next_batch(8))
    asked = job()
    assert abs(batch.prompt_ids.shape[1] - asked.prompt) < 4 and abs(batch.completion_ids.shape[1] - asked.completion) < 4  # fmt: skip
    trainer.start()
    trainer.train_step()
    taken, promised = [], []
    for _ in range(3):
        begin = cost.time.perf_counter()
        trainer.train_step()
        taken.append(cost.time.perf_counter() - begin)
        promised.append(
            cost.step_cost(decoder_shape(config), asked, asked, cost.measure_costs(config, asked, None)).seconds
        )
    trainer.lock.release()
    assert 1 / FACTOR < min(promised) / min(taken) < FACTOR, (promised, taken)
