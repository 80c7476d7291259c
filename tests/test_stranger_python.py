"""What a user of Python and of TRL brings along: reward functions, reward models of others, data in hand, odd arguments."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from rlhf_nb.core import ModelError
from rlhf_nb.data import toy
from rlhf_nb.data.templates import train_bpe
from rlhf_nb.models.heads import RewardModel
from rlhf_nb.rewards.base import RewardModelFn, Rewards
from rlhf_nb.rewards.classifier import load_classifier
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer
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
