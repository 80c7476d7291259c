"""What a user of Python and of TRL brings along: reward functions, reward models of others, data in hand, odd arguments."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from rlhf_nb.config import ModelConfig
from rlhf_nb.core import ConfigError, DataError, ModelError, decide_precision
from rlhf_nb.data import toy
from rlhf_nb.data.templates import train_bpe
from rlhf_nb.models.heads import RewardModel
from rlhf_nb.models.load import load_causal_lm
from rlhf_nb.rewards.base import RewardModelFn, Rewards
from rlhf_nb.rewards.classifier import load_classifier
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer
from rlhf_nb.train.reward import RewardConfig, RewardTrainer
from rlhf_nb.train.sft import SFTConfig, SFTTrainer
from rlhf_nb.types import Completions, Rollout

TOK = toy.build_tokenizer()
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token + '\n' }}{% endfor %}"


def said(prompts: list[Any], texts: list[str], tokenizer: Any = TOK) -> Rollout:
    """Answers as a rollout."""
    ids = [tokenizer.encode(t, add_special_tokens=False) + [tokenizer.eos_token_id] for t in texts]
    c = Completions.from_lists([[5, 6]] * len(texts), ids)
    n = len(texts)
    return Rollout(**c.columns_dict(), uid=torch.arange(n), finished=torch.ones(n, dtype=torch.bool), prompts=prompts, texts=texts, columns={"answer": ["owl", "bee"]}).check()  # fmt: skip


def test_a_reward_of_trl_that_names_prompts_first_gets_messages() -> None:
    """`f(prompts, completions, answer, **kwargs)` could be anybody's; with messages TRL's `completion[0]["content"]` finds the answer, and a text is still a text."""

    def theirs(prompts: Any, completions: Any, answer: Any, **kwargs: Any) -> list[float]:
        found = []
        for c, a in zip(completions, answer):
            try:  # what many do, and what made every reward 0
                found.append(float(a in c[0]["content"]) + 2 * float(c[-1]["role"] == "assistant"))
            except Exception:
                found.append(0.0)
        return found

    def ours(prompts: Any, completions: Any, answer: Any) -> list[float]:
        return [float(c.startswith("An ") and c[0] == "A" and c[-1] == "." and len(c) == 7) for c in completions]

    chat = [[{"role": "user", "content": "Who?"}]] * 2
    assert Rewards(theirs)(said(chat, ["An owl.", "No."]))[0].tolist() == [3.0, 2.0]
    assert Rewards(theirs)(said(["Who?"] * 2, ["An owl.", "No."]))[0].tolist() == [0.0, 0.0]  # texts, as in TRL
    assert Rewards(ours)(said(chat, ["An owl.", "No."]))[0].tolist() == [1.0, 0.0]


def foreign(folder: Path, tokenizer: Any) -> LlamaForSequenceClassification:
    """A reward model that plain transformers saved."""
    torch.manual_seed(0)
    small: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3, num_labels=1, pad_token_id=tokenizer.pad_token_id, initializer_range=0.5, **small
    )
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def test_a_reward_model_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """It is given the policy's tokens: with other words behind the same numbers its scores would be noise."""
    other = train_bpe(["Owls hunt at night.", "Bees make honey."], 300)
    foreign(tmp_path / "other", other)
    foreign(tmp_path / "same", toy.build_tokenizer())
    config = GRPOConfig.preset("toy", output_dir=str(tmp_path / "run"), steps=1, epochs=None, console=False)
    for rewards in (
        {"reward": str(tmp_path / "other")},
        {"rewards": [{"model": str(tmp_path / "other")}, {"verify": "number"}]},
    ):
        with pytest.raises(ModelError, match="has another tokenizer: token .* is .* here and .*reads: both"):
            GRPOTrainer(config.replace(**rewards), toy.build_model(0), TOK, rows=toy.sft_rows(8))
    GRPOTrainer(config.replace(reward=str(tmp_path / "same")), toy.build_model(0), TOK, rows=toy.sft_rows(8))


def test_a_chat_reward_model_of_others_says_what_transformers_says(tmp_path: Path) -> None:
    """As a classifier it reads what its template writes; as a reward model it is read at EOS, which is told where that is another place."""
    tokenizer = toy.build_tokenizer()
    tokenizer.chat_template = CHAT
    foreign(tmp_path / "rm", tokenizer)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").eval()
    prompt, answer = [{"role": "user", "content": "owls"}], "Owls hunt at night"
    text = tokenizer.apply_chat_template([*prompt, {"role": "assistant", "content": answer}], tokenize=False)
    with torch.no_grad():
        want = model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item()
        bare = model(**tokenizer(answer, return_tensors="pt")).logits.item()
    assert load_classifier(tmp_path / "rm", reads="both")([prompt], [answer]) == [pytest.approx(want, abs=1e-5)]
    assert load_classifier(tmp_path / "rm")([prompt], [answer]) == [pytest.approx(bare, abs=1e-5)]
    own = RewardModel.load(tmp_path / "rm")
    assert own.foreign
    with pytest.warns(UserWarning, match="read at the '<eos>' that ends an answer; its template ends an answer by"):
        Rewards([RewardModelFn(own)]).check_tokens(tokenizer)
    own.save(tmp_path / "ours", tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Rewards([RewardModelFn(RewardModel.load(tmp_path / "ours"))]).check_tokens(tokenizer)


def short_sft(tmp_path: Path, model: Any = None, tokenizer: Any = None, **given: Any) -> SFTTrainer:
    """A trainer of one step."""
    config = SFTConfig.preset("toy", output_dir=str(tmp_path / "run"), steps=1, epochs=None, console=False)
    return SFTTrainer(config, model or toy.build_model(0), tokenizer or toy.build_tokenizer(), **given)


def test_tables_and_columns_are_rows(tmp_path: Path) -> None:
    """pandas, a dict of columns, and columns that are None because other rows of the file have them, give the rows of a list."""
    pandas = pytest.importorskip("pandas")
    rows = [{"prompt": r["prompt"], "completion": r["completion"]} for r in toy.sft_rows(6)]
    want = short_sft(tmp_path, rows=rows).source.rows
    void = [{**r, "messages": None, "text": None} for r in rows]
    columns = {k: [r[k] for r in rows] for k in rows[0]}
    for given in (pandas.DataFrame(rows), pandas.DataFrame(void), columns, void):
        found = short_sft(tmp_path, rows=given).source.rows
        assert [r["completion_ids"] for r in found] == [r["completion_ids"] for r in want]
    with pytest.raises(DataError, match="splits or sets train"):
        short_sft(tmp_path, rows={"train": rows})
    with pytest.raises(DataError, match=r"list\(...\) makes one"):
        short_sft(tmp_path, rows=(r for r in rows))


def test_arguments_of_another_kind_are_named(tmp_path: Path) -> None:
    """A config of another method, a number as a model, a tokenizer without EOS: sentences, not AttributeErrors."""
    rows = toy.sft_rows(4)
    with pytest.raises(ConfigError, match=r"is a GRPOConfig, which says nothing of .*: write SFTConfig"):
        SFTTrainer(GRPOConfig.preset("toy"), toy.build_model(0), TOK, rows=rows)
    with pytest.raises(ConfigError, match="model is a int"):
        SFTTrainer(SFTConfig.preset("toy"), 3, TOK, rows=rows)  # type: ignore[arg-type]
    endless = toy.build_tokenizer()
    endless.eos_token = None
    with pytest.raises(ModelError, match="has no EOS token"):
        short_sft(tmp_path, tokenizer=endless, rows=rows)
    assert short_sft(tmp_path, tokenizer="toy", rows=rows).method.tokenizer.eos_token == TOK.eos_token
    with pytest.warns(UserWarning, match="and the model knew 200: 201 were added"):
        other = toy.build_tokenizer()
        other.add_tokens([f"word{i}" for i in range(401 - len(other))])
        short_sft(tmp_path, tokenizer=other, rows=rows)


def test_rows_beyond_the_window_are_told(tmp_path: Path) -> None:
    """A model with learnt positions ended in an IndexError; one with rotary positions trained on where it never was."""
    rows = [{"prompt": "Hi.", "completion": toy.sft_rows(1)[0]["completion"] * 30}]
    small: dict[str, Any] = {"vocab_size": len(TOK), "bos_token_id": None, "eos_token_id": TOK.eos_token_id}
    learnt = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=64, **small))
    with pytest.raises(
        ModelError, match="the model's window is 64: it has no position for the rest. data.max_length=64"
    ):
        short_sft(tmp_path, learnt, rows=rows)
    rotary = toy.build_model(0)
    rotary.config.max_position_embeddings = 64
    rows[0]["completion"] = toy.sft_rows(1)[0]["completion"] * 12  # more than the window, less than data.max_length
    with pytest.warns(UserWarning, match="beyond it, it was never trained"):
        short_sft(tmp_path, rotary, rows=rows)


def test_the_home_folder_is_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`output_dir: ~/run` in YAML: checkpoints went into a folder named ~, and the model home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = SFTConfig.preset("toy", output_dir="~/run", steps=1, epochs=None, console=False)
    assert config.output_dir == str(tmp_path / "home" / "run")
    assert ModelConfig(name_or_path="~nobody/x").name_or_path == "~nobody/x"


def test_a_reward_model_whose_pad_is_its_eos_can_be_saved(tmp_path: Path) -> None:
    """`tokenizer.pad_token = tokenizer.eos_token` is a habit; the model was trained, and then couldn't be saved."""
    tokenizer = toy.build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    config = RewardConfig.preset(
        "toy", output_dir=str(tmp_path / "run"), steps=1, epochs=None, mini_batch_size=4, console=False
    )
    trainer = RewardTrainer(config, toy.build_model(0), tokenizer, rows=toy.preference_rows(4))
    trainer.fit()
    trainer.save_model(tmp_path / "model")
    assert RewardModel.load(tmp_path / "model").config.pad_token_id != tokenizer.eos_token_id


def test_an_adapter_that_peft_saved_is_a_model(tmp_path: Path) -> None:
    """Its tokenizer is its base model's, and merged it can be trained in full; before, it was refused, and frozen."""
    torch.manual_seed(0)
    toy.build_model(0).save_pretrained(tmp_path / "base")
    toy.build_tokenizer().save_pretrained(tmp_path / "base")
    net: Any = get_peft_model(
        LlamaForCausalLM.from_pretrained(tmp_path / "base"),
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    net.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        want = net.eval()(input_ids=ids).logits
    config = SFTConfig.preset(
        "toy",
        output_dir=str(tmp_path / "run"),
        steps=1,
        epochs=None,
        console=False,
        model={"name_or_path": str(tmp_path / "adapter")},
    )
    trainer = SFTTrainer(config, rows=toy.sft_rows(4))
    with torch.no_grad():
        torch.testing.assert_close(trainer.method.model.eval()(input_ids=ids).logits, want, atol=1e-5, rtol=1e-5)
    assert all(p.requires_grad for p in trainer.method.model.parameters())


def test_new_tokens_that_adapters_do_not_train_are_told(tmp_path: Path) -> None:
    """Their rows are all the mean of the others: nothing that isn't trained tells `<think>` from `</think>`."""
    toy.build_model(0).save_pretrained(tmp_path / "base")
    tokenizer = toy.build_tokenizer()
    tokenizer.save_pretrained(tmp_path / "base")
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    tokenizer.save_pretrained(tmp_path / "more")
    where: dict[str, Any] = {"name_or_path": str(tmp_path / "base"), "tokenizer": str(tmp_path / "more")}
    fp32 = decide_precision("cpu", "fp32")
    with pytest.warns(UserWarning, match="2 tokens are new to the model .<think>, </think>.: their weights are alike"):
        load_causal_lm(ModelConfig(**where, lora={"r": 2}), fp32, tokenizer=tokenizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_causal_lm(ModelConfig(**where), fp32, tokenizer=tokenizer)
        load_causal_lm(
            ModelConfig(**where, lora={"r": 2, "target_modules": ["q_proj", "embed_tokens"]}), fp32, tokenizer=tokenizer
        )
