"""Twenty-six first scripts of people who come from TRL, with only the import changed: each runs as it stands."""

from __future__ import annotations

import math
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_nb.core import RlhfError
from rlhf_nb.data import toy
from rlhf_nb.data.convert import to_unpaired
from rlhf_nb.data.templates import set_chat_template
from rlhf_nb.models.load import save_model

torch.set_num_threads(1)

SCRIPTS: dict[str, str] = {
    # -- SFT -----------------------------------------------------------------------------------------------------------
    "sft, a plain data set": """
from datasets import Dataset
from rlhf_nb import SFTConfig, SFTTrainer
dataset = Dataset.from_list(demonstrations)
training_args = SFTConfig(
    output_dir=out, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1, learning_rate=2e-5,
    logging_steps=1, report_to="none", bf16=False, dataset_num_proc=2, dataloader_num_workers=0, seed=42,
)
trainer = SFTTrainer(model=model_id, args=training_args, train_dataset=dataset)
trainer.train()
assert (trainer.config.mini_batch_size, trainer.config.micro_batch_size, trainer.state.global_step) == (8, 4, 2)
""",
    "sft, a formatting function": """
from rlhf_nb import SFTConfig, SFTTrainer
def formatting_func(example):
    return f"### Question: {example['prompt']}\\n ### Answer: {example['completion']}"
trainer = SFTTrainer(
    model=model_id, args=SFTConfig(output_dir=out, max_steps=1, per_device_train_batch_size=4), train_dataset=demonstrations,
    formatting_func=formatting_func,
)
trainer.train()
assert trainer.source.rows[0]["completion_ids"]
""",
    "sft, what the assistant says": """
from rlhf_nb import SFTConfig, SFTTrainer
training_args = SFTConfig(output_dir=out, assistant_only_loss=True, max_length=128, max_steps=2, per_device_train_batch_size=2)
trainer = SFTTrainer(model=model_id, args=training_args, train_dataset=chats, processing_class=tokenizer)
trainer.train()
assert trainer.config.data.completion_only and trainer.config.steps == 2
""",
    "sft, completions and a text column": """
from rlhf_nb import SFTConfig, SFTTrainer
training_args = SFTConfig(
    output_dir=out, completion_only_loss=False, dataset_text_field="body", max_steps=1, per_device_train_batch_size=2,
)
trainer = SFTTrainer(model_id, training_args, train_dataset=[{"body": r["prompt"] + r["completion"]} for r in demonstrations])
trainer.train()
assert trainer.config.data.columns == {"body": "text"}
""",
    "sft, packed": """
from rlhf_nb import SFTConfig, SFTTrainer
training_args = SFTConfig(output_dir=out, packing=True, eval_packing=False, padding_free=True, max_length=128, max_steps=1,
    per_device_train_batch_size=2, use_liger_kernel=True, model_init_kwargs={"dtype": "float32"})
trainer = SFTTrainer(model=model_id, args=training_args, train_dataset=demonstrations)
trainer.train()
assert trainer.config.model.dtype == "fp32"
""",
    "sft, an adapter": """
from peft import LoraConfig
from rlhf_nb import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    model_id, train_dataset=demonstrations, peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear"),
    args=SFTConfig(output_dir=out, max_steps=1, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}),
)
trainer.train()
assert trainer.config.model.lora.r == 8
""",
    # -- reward, DPO, KTO ----------------------------------------------------------------------------------------------
    "reward, its metrics": """
from rlhf_nb import RewardConfig, RewardTrainer
def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    return {"accuracy": float((predictions[:, 0] > predictions[:, 1]).mean()), "rows": float(len(labels))}
training_args = RewardConfig(
    output_dir=out, per_device_train_batch_size=8, per_device_eval_batch_size=8, eval_strategy="steps", eval_steps=1, max_steps=2,
    center_rewards_coefficient=0.01, max_length=128,
)
trainer = RewardTrainer(model=model_id, args=training_args, train_dataset=pairs, eval_dataset=pairs[:6], compute_metrics=compute_metrics)
trainer.train()
metrics = trainer.evaluate()
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
assert metrics["eval_rows"] == 6 and 0 <= metrics["eval_accuracy"] <= 1 and math.isfinite(metrics["eval_loss"])
assert trainer.predict(pairs[:3]).predictions.shape == (3, 2)
""",
    "dpo, a reference of one's own": """
from transformers import AutoModelForCausalLM, AutoTokenizer
from rlhf_nb import DPOConfig, DPOTrainer
model, ref_model = (AutoModelForCausalLM.from_pretrained(model_id) for _ in range(2))
training_args = DPOConfig(output_dir=out, per_device_train_batch_size=2, gradient_accumulation_steps=4, beta=0.1, max_length=128,
    max_prompt_length=64, logging_steps=10, remove_unused_columns=False, num_train_epochs=1)
trainer = DPOTrainer(model=model, ref_model=ref_model, args=training_args, processing_class=AutoTokenizer.from_pretrained(model_id),
    train_dataset=pairs, eval_dataset=pairs[:4])
trainer.train()
assert "eval_loss" in trainer.evaluate() and trainer.config.mini_batch_size == 8
""",
    "dpo, without a reference": """
from rlhf_nb import DPOConfig, DPOTrainer
training_args = DPOConfig(output_dir=out, max_steps=1, per_device_train_batch_size=4, warmup_ratio=0.1, lr_scheduler_type="cosine")
trainer = DPOTrainer(model=model_id, ref_model=None, args=training_args, train_dataset=pairs)
result = trainer.train()
assert result.global_step == 1 and math.isfinite(result.training_loss) and "train_runtime" in result.metrics
""",
    "dpo, another loss": """
from rlhf_nb import DPOConfig, DPOTrainer
training_args = DPOConfig(output_dir=out, loss_type=["ipo"], beta=0.2, label_smoothing=0.0, max_steps=1, per_device_train_batch_size=4)
trainer = DPOTrainer(model=model_id, args=training_args, train_dataset=pairs)
trainer.train()
assert trainer.config.loss == "ipo"
""",
    "dpo, an adapter": """
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from rlhf_nb import DPOConfig, DPOTrainer
trainer = DPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(model_id), train_dataset=pairs, peft_config=LoraConfig(r=4, task_type="CAUSAL_LM"),
    args=DPOConfig(output_dir=out, max_steps=1, per_device_train_batch_size=4, learning_rate=5e-6, optim="adamw_torch_fused"),
)
trainer.train()
""",
    "kto": """
from rlhf_nb import KTOConfig, KTOTrainer
training_args = KTOConfig(output_dir=out, desirable_weight=1.0, undesirable_weight=1.33, beta=0.1, max_steps=1, per_device_train_batch_size=8)
trainer = KTOTrainer(model=model_id, args=training_args, train_dataset=thumbs)
trainer.train()
""",
    # -- answers of its own --------------------------------------------------------------------------------------------
    "grpo, two rewards with weights": """
from rlhf_nb import GRPOConfig, GRPOTrainer
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]
def reward_unique(completions, **kwargs):
    return [float(len(set(c))) for c in completions]
training_args = GRPOConfig(output_dir=out, per_device_train_batch_size=8, num_generations=4, max_completion_length=8, max_steps=2,
    reward_weights=[0.5, 1.0], logging_steps=1, use_vllm=False)
trainer = GRPOTrainer(model=model_id, reward_funcs=[reward_len, reward_unique], args=training_args, train_dataset=prompts)
trainer.train()
assert trainer.method.rewards.weights == [0.5, 1.0] and trainer.state.global_step == 2
assert trainer.config.mini_batch_size == trainer.config.rollout_batch_size == 8
""",
    "grpo, a column of the data": """
from rlhf_nb import GRPOConfig, GRPOTrainer
def correct(prompts, completions, answer, **kwargs):
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answer)]
training_args = GRPOConfig(output_dir=out, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_generations=4,
    steps_per_generation=4, max_completion_length=8, num_iterations=2, max_steps=4, mask_truncated_completions=False)
trainer = GRPOTrainer(model=model_id, reward_funcs=correct, args=training_args, train_dataset=[p | {"answer": "owl"} for p in prompts])
trainer.train()
c = trainer.config
assert (c.mini_batch_size, c.rollout_batch_size, c.num_inner_epochs, c.steps) == (8, 16, 2, 1)
""",
    "grpo, vllm": """
from rlhf_nb import GRPOConfig, GRPOTrainer
def reward_len(completions, **kwargs):
    return [float(len(c)) for c in completions]
training_args = GRPOConfig(output_dir=out, use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=0.3, num_generations=2,
    generation_batch_size=8, per_device_train_batch_size=4, max_completion_length=8, max_steps=2, log_completions=True)
trainer = GRPOTrainer(model=model_id, reward_funcs=reward_len, args=training_args, train_dataset=prompts)
trainer.train()
assert trainer.config.sampling.sampler == "auto"
""",
    "rloo": """
from rlhf_nb import RLOOConfig, RLOOTrainer
def reward_len(completions, **kwargs):
    return [float(len(c)) for c in completions]
training_args = RLOOConfig(output_dir=out, per_device_train_batch_size=4, num_generations=2, max_completion_length=8, beta=0.05, max_steps=1)
trainer = RLOOTrainer(model=model_id, reward_funcs=reward_len, args=training_args, train_dataset=prompts)
trainer.train()
""",
    "online dpo": """
from rlhf_nb import OnlineDPOConfig, OnlineDPOTrainer
def reward_len(completions, **kwargs):
    return [float(len(c)) for c in completions]
training_args = OnlineDPOConfig(output_dir=out, max_new_tokens=8, per_device_train_batch_size=2, beta=0.1, max_steps=1, missing_eos_penalty=1.0)
trainer = OnlineDPOTrainer(model=model_id, reward_funcs=reward_len, args=training_args, processing_class=tokenizer, train_dataset=prompts)
trainer.train()
assert trainer.config.mini_batch_size == 4
""",
    "ppo, four models": """
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from rlhf_nb import PPOConfig, PPOTrainer
tokenizer = AutoTokenizer.from_pretrained(model_id, padding_side="left")
value_model = AutoModelForSequenceClassification.from_pretrained(reward_model_id, num_labels=1)
reward_model = AutoModelForSequenceClassification.from_pretrained(reward_model_id, num_labels=1)
ref_policy, policy = (AutoModelForCausalLM.from_pretrained(model_id) for _ in range(2))
training_args = PPOConfig(output_dir=out, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_mini_batches=2, num_ppo_epochs=1,
    total_episodes=16, response_length=8, kl_coef=0.05, missing_eos_penalty=1.0, local_rollout_forward_batch_size=4, stop_token="eos",
    num_sample_generations=0)
trainer = PPOTrainer(
    args=training_args, processing_class=tokenizer, model=policy, ref_model=ref_policy, reward_model=reward_model,
    value_model=value_model, train_dataset=prompts, eval_dataset=prompts[:4],
)
trainer.train()
c = trainer.config
assert (c.mini_batch_size, c.rollout_batch_size, c.steps, trainer.state.global_step) == (4, 8, 2, 2)
assert trainer.method.net.value_model is not reward_model
""",
    "ppo, as its script has it": """
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from rlhf_nb import ModelConfig, PPOConfig, PPOTrainer, ScriptArguments, get_kbit_device_map, get_peft_config, get_quantization_config
script_args, model_args = ScriptArguments(dataset_name=file), ModelConfig(model_name_or_path=model_id, dtype="float32")
training_args = PPOConfig(output_dir=out, sft_model_path=model_id, reward_model_path=reward_model_id, per_device_train_batch_size=2,
    total_episodes=4, num_mini_batches=1, response_length=8, num_ppo_epochs=1)
tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, trust_remote_code=model_args.trust_remote_code)
value_model, reward_model = (AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1) for _ in "ab")
policy = AutoModelForCausalLM.from_pretrained(training_args.sft_model_path, trust_remote_code=model_args.trust_remote_code)
assert get_quantization_config(model_args) is None and get_peft_config(model_args) is None
trainer = PPOTrainer(args=training_args, processing_class=tokenizer, model=policy, ref_model=None, reward_model=reward_model,
    value_model=value_model, train_dataset=prompts, peft_config=get_peft_config(model_args))
trainer.train()
trainer.save_model(training_args.output_dir + "/final")
if training_args.push_to_hub:
    trainer.push_to_hub(dataset_name=script_args.dataset_name)
""",
    # -- around them ---------------------------------------------------------------------------------------------------
    "the parser of a script": """
import sys
from datasets import load_dataset
from rlhf_nb import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config
sys.argv = ["sft.py", "--model_name_or_path", model_id, "--dataset_name", "json", "--learning_rate", "2.0e-4", "--max_steps", "1",
    "--per_device_train_batch_size", "2", "--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj", "--output_dir", out,
    "--eval_strategy", "steps", "--eval_steps", "1"]
parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
dataset = load_dataset(script_args.dataset_name, data_files={"train": file, "test": file})
trainer = SFTTrainer(
    model=model_args.model_name_or_path, args=training_args, train_dataset=dataset[script_args.dataset_train_split],
    eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != "no" else None,
    peft_config=get_peft_config(model_args),
)
trainer.train()
trainer.save_model(training_args.output_dir)
if training_args.push_to_hub:
    trainer.push_to_hub(dataset_name=script_args.dataset_name)
assert trainer.config.model.lora.r == 4 and trainer.held_out
""",
    "settings of transformers": """
from transformers import TrainingArguments
from rlhf_nb import SFTTrainer
args = TrainingArguments(output_dir=out, per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1,
    learning_rate=1e-4, logging_steps=1, save_strategy="no", report_to="none")
trainer = SFTTrainer(model=model_id, args=args, train_dataset=demonstrations)
trainer.train()
c = trainer.config
assert (c.mini_batch_size, c.epochs, c.optimizer.lr, c.save_every) == (8, 1.0, 1e-4, None)
""",
    "callbacks and the best model": """
from transformers import EarlyStoppingCallback, TrainerCallback
from rlhf_nb import SFTConfig, SFTTrainer
class Printer(TrainerCallback):
    seen = []
    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append((state.global_step, logs["loss"], args.per_device_train_batch_size))
training_args = SFTConfig(output_dir=out, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, max_steps=3,
    load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False, save_total_limit=2,
    per_device_train_batch_size=2, learning_rate=5.0)
trainer = SFTTrainer(model=model_id, args=training_args, train_dataset=demonstrations, eval_dataset=demonstrations[:4],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=5), Printer()])
trainer.train()
losses = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
assert len(losses) == 3 and Printer.seen[0][2] == 2
assert abs(trainer.evaluate()["eval_loss"] - min(losses)) < 1e-5 < max(losses) - min(losses)
""",
    "metrics of one's own": """
import numpy as np
from rlhf_nb import SFTConfig, SFTTrainer
def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(dim=-1)
def compute_metrics(eval_preds):
    predictions, labels = eval_preds
    predictions, labels = predictions[:, :-1], labels[:, 1:]
    counted = labels != -100
    return {"token_accuracy": float((predictions == labels)[counted].mean()), "tokens": int(counted.sum())}
trainer = SFTTrainer(model=model_id, args=SFTConfig(output_dir=out, max_steps=1, per_device_train_batch_size=4), train_dataset=demonstrations,
    eval_dataset=demonstrations[:5], compute_metrics=compute_metrics, preprocess_logits_for_metrics=preprocess_logits_for_metrics)
trainer.train()
metrics = trainer.evaluate()
assert 0 <= metrics["eval_token_accuracy"] <= 1 and metrics["eval_tokens"] == sum(len(r["completion_ids"]) for r in trainer.held_out)
""",
    "evaluation and saving by epoch": """
from rlhf_nb import DPOConfig, DPOTrainer
training_args = DPOConfig(output_dir=out, num_train_epochs=2, per_device_train_batch_size=8, eval_strategy="epoch", save_strategy="epoch",
    logging_strategy="steps", logging_steps=1, report_to="all", disable_tqdm=True)
trainer = DPOTrainer(model=model_id, args=training_args, train_dataset=pairs, eval_dataset=pairs[:4])
trainer.train()
assert [e["step"] for e in trainer.state.log_history if "eval_loss" in e] == [2, 4]
assert trainer.evaluate(eval_dataset=pairs[4:6], metric_key_prefix="test")["test_loss"] > 0
""",
    "what the trainer knows afterwards": """
from rlhf_nb import SFTConfig, SFTTrainer
training_args = SFTConfig(output_dir=out, max_steps=2, per_device_train_batch_size=2, logging_steps=1, save_steps=1, save_strategy="steps")
trainer = SFTTrainer(model=model_id, args=training_args, train_dataset=demonstrations)
train_result = trainer.train()
metrics = train_result.metrics
metrics["train_samples"] = len(demonstrations)
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
trainer.save_state()
trainer.save_model()
assert trainer.state.global_step == 2 and trainer.state.max_steps == 2
logged = [entry for entry in trainer.state.log_history if "loss" in entry]
assert [entry["step"] for entry in logged] == [1, 2] and all("learning_rate" in entry and "epoch" in entry for entry in logged)
assert trainer.args.learning_rate == trainer.config.optimizer.lr and trainer.processing_class is trainer.method.tokenizer
""",
    "resumed and uploaded": """
from rlhf_nb import DPOConfig, DPOTrainer
def make(steps):
    args = DPOConfig(output_dir=out, max_steps=steps, per_device_train_batch_size=4, save_strategy="steps", save_steps=1, push_to_hub=True,
        hub_model_id="me/tiny-dpo", hub_strategy="every_save", save_total_limit=2)
    return DPOTrainer(model=model_id, args=args, train_dataset=pairs)
make(1).train()
trainer = make(2)
trainer.train(resume_from_checkpoint=True)
assert trainer.state.global_step == 2
trainer.push_to_hub()
""",
}  # fmt: skip

# scripts that end in a sentence here, and what it has to say
SAID: dict[str, str] = {"resumed and uploaded": r"rlhf_nb.push_to_hub\(output_dir, 'owner/name'\)"}


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the scripts talk about: a policy, a reward model, and rows of each kind."""
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.train.rlaif import append_rows

    where, tokenizer = tmp_path_factory.mktemp("models"), set_chat_template(toy.build_tokenizer())
    model = toy.build_model(size="tiny")
    save_model(model, tokenizer, where / "policy", verify=False)
    RewardModel.from_policy(model).save(where / "reward", tokenizer)
    pairs = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in toy.preference_rows(16)]
    turns = [[{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["chosen"]}] for r in pairs]
    demonstrations = [{k: r[k] for k in ("prompt", "completion")} for r in toy.sft_rows(16)]
    append_rows(where / "rows.jsonl", demonstrations)
    return {
        "model_id": str(where / "policy"), "reward_model_id": str(where / "reward"), "tokenizer": tokenizer, "math": math,
        "demonstrations": demonstrations, "pairs": pairs, "chats": [{"messages": t} for t in turns], "file": str(where / "rows.jsonl"),
        "thumbs": list(to_unpaired(pairs)), "prompts": toy.train_prompts(16),
    }  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_runs(name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    scope = names | {"out": str(tmp_path / "out")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name in SAID:
            with pytest.raises((RlhfError, AttributeError), match=SAID[name]) as e:
                exec(SCRIPTS[name], scope)
            assert len(str(e.value).splitlines()) == 1
        else:
            exec(SCRIPTS[name], scope)
    history = scope["trainer"].history
    assert history and all(math.isfinite(event["loss"]) for event in history)


def test_there_are_twenty_six_and_at_most_two_are_refused() -> None:
    assert len(SCRIPTS) == 26 and len(SAID) <= 2 and not re.search(r"from trl\b", "".join(SCRIPTS.values()))
