"""First attempts of somebody who comes from TRL, typed as its documentation has them: each trains, or one sentence says what to write."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import RlhfError
from rlhf_nb.data import toy
from rlhf_nb.data.convert import to_unpaired
from rlhf_nb.data.templates import set_chat_template
from rlhf_nb.models.load import save_model

torch.set_num_threads(1)


class Attempt(NamedTuple):
    """What is typed, and what the answer has to say; "" for what has to train."""

    code: str
    said: str = ""


REWARD = """
def reward_num_unique_chars(completions, **kwargs):
    return [float(len(set(c))) for c in completions]
"""
ATTEMPTS = {
    # -- SFT -----------------------------------------------------------------------------------------------------------
    "sft, three lines": Attempt("""
from rlhf_nb import SFTTrainer
trainer = SFTTrainer(model=model_id, train_dataset=demonstrations)
trainer.train()
"""),
    "sft, a chat data set and a config": Attempt("""
from rlhf_nb import SFTConfig, SFTTrainer
training_args = SFTConfig(
    output_dir=out, max_length=128, learning_rate=2e-5, num_train_epochs=1, logging_steps=10, eval_strategy="steps", eval_steps=1,
    save_strategy="steps", save_steps=50, lr_scheduler_type="cosine", warmup_steps=1, weight_decay=0.01, max_grad_norm=1.0,
    gradient_checkpointing=True, assistant_only_loss=True, packing=False, report_to="none", optim="adamw_torch", use_cpu=True, seed=42,
)
trainer = SFTTrainer(model=model_id, args=training_args, train_dataset=chats, eval_dataset=chats[:4])
trainer.train()
trainer.save_model(out + "/final")
trainer.save_model()
"""),
    "sft, the collator for completions": Attempt("""
from rlhf_nb import SFTTrainer, DataCollatorForCompletionOnlyLM
""", r"DataConfig\(completion_only=True\), which is the default"),
    "sft, peft and 4 bits": Attempt("""
from peft import LoraConfig
from rlhf_nb import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    model_id, train_dataset=demonstrations, peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig(output_dir=out, completion_only_loss=True, max_steps=1, dataset_num_proc=None),
)
trainer.train()
"""),
    "sft, a chat format for a base model": Attempt("""
from rlhf_nb import setup_chat_format
""", r"set_chat_template\(tokenizer\) of rlhf_nb.data.templates"),
    # -- preferences ---------------------------------------------------------------------------------------------------
    "dpo, as in the README": Attempt("""
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlhf_nb import DPOConfig, DPOTrainer
model = AutoModelForCausalLM.from_pretrained(model_id)
tokenizer = AutoTokenizer.from_pretrained(model_id)
training_args = DPOConfig(output_dir=out, logging_steps=10, beta=0.1, precompute_ref_log_probs=False)
trainer = DPOTrainer(model=model, ref_model=None, args=training_args, processing_class=tokenizer, train_dataset=pairs)
trainer.train()
"""),
    "dpo, several losses": Attempt("""
from rlhf_nb import DPOConfig, DPOTrainer
training_args = DPOConfig(output_dir=out, loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0], max_length=96)
trainer = DPOTrainer(model=model_id, args=training_args, train_dataset=pairs)
assert trainer.config.loss == {"sigmoid": 0.8, "bco_pair": 0.2} and trainer.config.nll_coef == 1.0
trainer.train()
"""),
    "dpo, everything by position": Attempt("""
from peft import LoraConfig
from rlhf_nb import DPOConfig, DPOTrainer
def make(steps):
    args = DPOConfig(output_dir=out, max_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=2, reference_free=False)
    return DPOTrainer(model_id, None, args, train_dataset=pairs, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
make(1)
""", r"after model and args, give what is left by name"),
    "dpo, resumed": Attempt("""
from rlhf_nb import DPOConfig, DPOTrainer
def make(steps):
    args = DPOConfig(output_dir=out, max_steps=steps, save_strategy="steps", save_steps=1, save_total_limit=2)
    return DPOTrainer(model=model_id, args=args, train_dataset=pairs)
make(1).train()
trainer = make(2)
trainer.train(resume_from_checkpoint=True)
assert [event["step"] for event in trainer.history] == [1, 2]
"""),
    "orpo": Attempt("""
from rlhf_nb import ORPOConfig, ORPOTrainer
""", r"DPOConfig\(loss='orpo'\)"),
    "cpo and simpo": Attempt("""
from rlhf_nb import CPOConfig, CPOTrainer
""", r"DPOConfig\(loss='cpo'\).*DPOConfig\(loss='simpo'\)"),
    "kto": Attempt("""
from rlhf_nb import KTOConfig, KTOTrainer
training_args = KTOConfig(output_dir=out, desirable_weight=1.33, undesirable_weight=1.0, beta=0.1, loss_type="kto", max_length=96)
trainer = KTOTrainer(model=model_id, args=training_args, train_dataset=thumbs)
trainer.train()
assert trainer.config.desirable_weight == 1.33
"""),
    "a reward model, its metrics, then the hub": Attempt("""
from rlhf_nb import RewardConfig, RewardTrainer
training_args = RewardConfig(output_dir=out, center_rewards_coefficient=0.01, max_length=96, disable_dropout=True)
trainer = RewardTrainer(model=model_id, args=training_args, train_dataset=pairs)
trainer.train()
trainer.push_to_hub()
""", r"rlhf_nb\.push_to_hub\(output_dir, 'owner/name'\)"),
    "a process reward model": Attempt("""
from rlhf_nb import PRMConfig, PRMTrainer
""", "ProcessConfig, where step_separator is boundary.separator"),
    "a process reward model, by our names": Attempt("""
from rlhf_nb import ProcessConfig, ProcessTrainer
training_args = ProcessConfig(output_dir=out, step_separator="\\n", max_length=96)
steps = [{"prompt": "Which is larger?", "completions": ["First.", "Then."], "labels": [True, False]}] * 8
trainer = ProcessTrainer(model=model_id, args=training_args, train_dataset=steps)
trainer.train()
assert trainer.config.boundary.separator == "\\n"
"""),
    # -- answers of its own --------------------------------------------------------------------------------------------
    "grpo, as in the README": Attempt(REWARD + """
from rlhf_nb import GRPOConfig, GRPOTrainer
trainer = GRPOTrainer(
    model=model_id, reward_funcs=reward_num_unique_chars, train_dataset=prompts, args=GRPOConfig(output_dir=out, max_completion_length=8),
)
trainer.train()
"""),
    "grpo, a function and a model, DAPO": Attempt(REWARD + """
from rlhf_nb import GRPOConfig, GRPOTrainer
training_args = GRPOConfig(
    output_dir=out, num_generations=4, max_completion_length=8, max_prompt_length=64, loss_type="dapo", epsilon=0.2, epsilon_high=0.28,
    beta=0.0, scale_rewards="batch", mask_truncated_completions=True, temperature=1.0, top_k=None, num_iterations=1, learning_rate=1e-6,
    remove_unused_columns=False, log_completions=False, importance_sampling_level="token",
)
trainer = GRPOTrainer(model=model_id, reward_funcs=[reward_num_unique_chars, reward_model_id], args=training_args, train_dataset=prompts)
trainer.train()
c = trainer.config
assert (c.switch("per"), c.switch("scale"), c.switch("clip_eps_high"), c.mask_truncated) == ("token", "batch", 0.28, True)
"""),
    "grpo, a reward of the library": Attempt("""
from rlhf_nb import GRPOTrainer
from rlhf_nb.rewards import accuracy_reward
""", r"GRPOConfig\(rewards=\[\{'verify': 'number'\}\]\)"),
    "rloo": Attempt(REWARD + """
from rlhf_nb import RLOOConfig, RLOOTrainer
training_args = RLOOConfig(output_dir=out, num_generations=2, max_completion_length=8, beta=0.05, normalize_advantages=True)
trainer = RLOOTrainer(model=model_id, reward_funcs=reward_num_unique_chars, args=training_args, train_dataset=prompts)
trainer.train()
assert trainer.config.whiten_advantages and trainer.config.kl_coef == 0.05
"""),
    "ppo, one model fewer": Attempt("""
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlhf_nb import PPOConfig, PPOTrainer
training_args = PPOConfig(output_dir=out, num_ppo_epochs=1, response_length=8, kl_coef=0.05, missing_eos_penalty=1.0, kl_estimator="k3")
trainer = PPOTrainer(
    args=training_args, processing_class=AutoTokenizer.from_pretrained(model_id), model=AutoModelForCausalLM.from_pretrained(model_id),
    ref_model=AutoModelForCausalLM.from_pretrained(model_id), reward_model=reward_model_id, train_dataset=prompts,
)
trainer.train()
"""),
    "a value head": Attempt("""
from rlhf_nb import AutoModelForCausalLMWithValueHead
""", "PPOTrainer makes the critic itself"),
    "online dpo with a judge": Attempt("""
from rlhf_nb import FunctionJudge, OnlineDPOConfig, OnlineDPOTrainer
judge = FunctionJudge(lambda prompts, completions: [len(c) for c in completions])
training_args = OnlineDPOConfig(output_dir=out, max_new_tokens=8, beta=0.1, temperature=0.9, missing_eos_penalty=0.2)
trainer = OnlineDPOTrainer(model=model_id, judge=judge, args=training_args, processing_class=tokenizer, train_dataset=prompts)
trainer.train()
"""),
    "nash-md and xpo": Attempt("""
from rlhf_nb import NashMDConfig, NashMDTrainer, XPOTrainer
""", r"OnlineDPOConfig\(opponent='reference'\)"),
    "gkd": Attempt("""
from rlhf_nb.train.distill import DistillConfig, DistillTrainer
trainer = DistillTrainer(
    model=model_id, teacher_model=teacher, args=DistillConfig(output_dir=out, max_new_tokens=8, temperature=0.9), train_dataset=prompts,
    processing_class=tokenizer,
)
trainer.train()
"""),
    # -- around them ---------------------------------------------------------------------------------------------------
    "callbacks": Attempt("""
from transformers import EarlyStoppingCallback
from rlhf_nb import SFTConfig, SFTTrainer
args = SFTConfig(output_dir=out, eval_strategy="steps", eval_steps=1, max_steps=2)
trainer = SFTTrainer(
    model=model_id, args=args, train_dataset=demonstrations, eval_dataset=demonstrations[:4], callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
trainer.train()
trainer.evaluate()
"""),
    "the model's settings": Attempt("""
from rlhf_nb import ModelConfig, SFTConfig, SFTTrainer
model_args = ModelConfig(model_name_or_path=model_id, attn_implementation="eager", torch_dtype="float32", lora_r=4, lora_alpha=8)
trainer = SFTTrainer(args=SFTConfig(output_dir=out, model=model_args, max_steps=1), train_dataset=demonstrations)
trainer.train()
assert trainer.config.model.lora.r == 4 and trainer.config.model.dtype == "fp32"
"""),
    "chat templates and prompts by hand": Attempt("""
from rlhf_nb import apply_chat_template, extract_prompt, unpair_preference_dataset
""", "every trainer applies the tokenizer's template"),
}  # fmt: skip


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the snippets talk about: a policy, a reward model, and rows of each kind."""
    from rlhf_nb.models.heads import RewardModel

    where, tokenizer = tmp_path_factory.mktemp("models"), set_chat_template(toy.build_tokenizer())
    model = toy.build_model(size="tiny")
    save_model(model, tokenizer, where / "policy", verify=False)
    RewardModel.from_policy(model).save(where / "reward", tokenizer)
    pairs = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in toy.preference_rows(16)]
    turns = [[{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["chosen"]}] for r in pairs]
    return {
        "model_id": str(where / "policy"), "reward_model_id": str(where / "reward"), "tokenizer": tokenizer, "teacher": model,
        "demonstrations": [{k: r[k] for k in ("prompt", "completion")} for r in toy.sft_rows(16)], "pairs": pairs,
        "chats": [{"messages": t} for t in turns], "thumbs": list(to_unpaired(pairs)), "prompts": toy.train_prompts(16),
    }  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
def test_it_trains_or_says_what_to_write(
    name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, scope = ATTEMPTS[name], names | {"out": str(tmp_path / "out")}
    monkeypatch.chdir(tmp_path)
    if attempt.said:
        with pytest.raises((RlhfError, ImportError, AttributeError)) as e:
            exec(attempt.code, scope)
        assert re.search(attempt.said, str(e.value), re.DOTALL), str(e.value)
        assert "rlhf_nb" in str(e.value) or isinstance(e.value, RlhfError | AttributeError)
        return
    exec(attempt.code, scope)
    history = scope["trainer"].history
    assert history and all(math.isfinite(event["loss"]) for event in history)


COMMANDS = {
    "sft": (
        "sft --model_name_or_path {model_id} --dataset_name {file} --output_dir {out} --learning_rate 2.0e-5 --num_train_epochs 1 --max_length 96 "
        "--gradient_checkpointing --eval_strategy no --report_to none --lora_r 4 --lora_target_modules q_proj v_proj --no_remove_unused_columns",
        "",
    ),
    "sft, batch sizes": (
        "sft --model_name_or_path {model_id} --dataset_name {file} --output_dir {out} --per_device_train_batch_size 8 --max_steps 1 --use_peft", "",
    ),
    "dpo": ("dpo --model_name_or_path={model_id} --dataset_name={pairs} --output_dir={out} --max_steps=1 --beta=0.2 --loss_type=ipo", ""),
    "grpo": ("grpo --model_name_or_path {model_id} --dataset_name {file} --reward_funcs accuracy_reward", r"here rewards=\[\{file: rewards.py"),
    "an option of nobody": ("sft --modell {model_id}", "No such option"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_words_of_its_command_line(name: str, names: dict[str, Any], tmp_path: Path) -> None:
    from rlhf_nb.run.log import read_metrics
    from rlhf_nb.train.rlaif import append_rows

    append_rows(tmp_path / "rows.jsonl", names["demonstrations"])
    append_rows(tmp_path / "pairs.jsonl", names["pairs"])
    words, said = COMMANDS[name]
    where = {"model_id": names["model_id"], "file": tmp_path / "rows.jsonl", "pairs": tmp_path / "pairs.jsonl"}
    typed = words.format(**where, out=tmp_path / "out").split()
    result = CliRunner().invoke(app, typed)
    assert (result.exit_code == 0) == (not said), result.output
    if said:
        assert re.search(said, re.sub(r"[\s│]+", " ", result.output)), result.output
    else:
        steps = [e for e in read_metrics(tmp_path / "out" / "metrics.jsonl") if e["type"] == "step"]
        assert steps and all(math.isfinite(e["loss"]) for e in steps)
