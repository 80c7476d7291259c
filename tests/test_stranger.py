"""What a stranger brings along: odd files, odd formats, settings that don't fit what is given."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from typer.testing import CliRunner

from rlhf_nb.app.cli import app
from rlhf_nb.app.evals import scorer
from rlhf_nb.config import DataConfig
from rlhf_nb.core import ConfigError, DataError, ModelError
from rlhf_nb.data import toy
from rlhf_nb.data.formats import DataWarning, to_rows
from rlhf_nb.data.sources import tokenize_preferences, tokenize_prompts, tokenize_sft
from rlhf_nb.data.templates import encode_pairs, set_chat_template, train_bpe
from rlhf_nb.decode.named import DecoderConfig
from rlhf_nb.models.adapters import add_lora
from rlhf_nb.models.heads import RewardModel
from rlhf_nb.rewards.base import RewardModelFn, Rewards
from rlhf_nb.rewards.classifier import load_classifier
from rlhf_nb.rollout.sampler import may_share
from rlhf_nb.scoring.check import self_check
from rlhf_nb.train.entries import RewardEntry
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer
from rlhf_nb.train.setup import load_rows
from rlhf_nb.train.sft import SFTConfig, SFTTrainer
from rlhf_nb.types import Completions, Rollout

TOK = toy.build_tokenizer()


def lines(path: Path, rows: list[Any]) -> str:
    """A file of rows."""
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_a_reward_model_in_an_evaluation_reads_what_it_reads_in_training(tmp_path: Path) -> None:
    """An answer ends in one EOS, not two: the reward is read at the last token."""
    torch.manual_seed(0)
    RewardModel.from_policy(toy.build_model(0), seed=1).save(tmp_path / "rm", TOK)
    model = RewardModel.load(tmp_path / "rm")
    row = toy.sft_rows(1, 0)[0]
    prompt, answer, _ = encode_pairs(TOK, [row["prompt"]], [row["completion"]])[0]
    with torch.no_grad():
        want = float(model.score(Completions.from_lists([prompt], [answer])))
    said = scorer([RewardEntry(model=str(tmp_path / "rm"))], TOK, "rule")([row["prompt"]], [row["completion"]], {})
    assert said["reward_model"][0] == pytest.approx(want, abs=1e-5)
    entry = RewardEntry(verify="length", target=len(answer), width=1, unit="tokens", name="long")
    assert scorer([entry], TOK, "rule")([row["prompt"]], [row["completion"]], {}) == {"long": [1.0]}


def loud(dtype: torch.dtype) -> LlamaForCausalLM:
    """A tiny model whose logits are as large as a trained model's, so that half precision rounds them by tenths."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data *= 10
    return model.to(dtype).eval()


def test_rounding_in_half_precision_is_no_wrong_cache() -> None:
    """The check of `generate` knows what rounding does to large logits, instead of refusing every trained model in bf16; a cache that is wrong is still refused."""
    model, short, long = loud(torch.bfloat16), torch.arange(5, 40), torch.arange(20, 100)
    with torch.inference_mode():
        assert may_share(model, short, long, 0) == "all"
    broken = loud(torch.bfloat16)
    plain = broken.forward

    def forward(*args: Any, past_key_values: Any = None, **more: Any) -> Any:
        found = plain(*args, past_key_values=past_key_values, **more)
        if past_key_values is not None and past_key_values.get_seq_length() > 40:
            found.logits = found.logits.roll(1, -1)
        return found

    broken.forward = forward  # type: ignore[method-assign]
    with torch.inference_mode(), pytest.raises(ModelError, match="doesn't say what"):
        may_share(broken, short, long, 0)


def test_the_bound_of_the_self_check_knows_the_temperature() -> None:
    """Dividing logits by a tenth makes ten times as much of their rounding."""
    c = Completions.from_lists([[5, 6, 7]], [[8, 9, 1]])
    model = loud(torch.float32)
    assert self_check(model, c, 0.1).bound == pytest.approx(10 * self_check(model, c, 1.0).bound)
    assert self_check(model, c, 2.0).bound == self_check(model, c, 1.0).bound


def test_adapters_that_nobody_would_make_are_refused(tmp_path: Path) -> None:
    """A config with adapters and a model without any doesn't silently train all weights."""
    config = SFTConfig.preset(
        "toy", output_dir=str(tmp_path / "a"), steps=1, epochs=None, console=False, model={"lora": {"r": 2}}
    )
    with pytest.raises(ConfigError, match="all of its weights would be trained"):
        SFTTrainer(config, toy.build_model(0), TOK, toy.sft_rows(4))
    net = add_lora(toy.build_model(0), config.model.lora)
    trained = SFTTrainer(config, net, TOK, toy.sft_rows(4)).method.module
    assert all(".lora_" in n for n, p in trained.named_parameters() if p.requires_grad)


def look(*words: str) -> str:
    """What `rlhf-nb data` prints."""
    return CliRunner().invoke(app, ["data", *words, "--rows", "1"]).output


def test_files_as_they_are_saved_by_others(tmp_path: Path) -> None:
    """Steps are shown, a conversation that begins with an answer is read from its question on, and a refused row is named, not the end of the look."""
    steps = [{"prompt": f"Q{i}", "completions": ["First.", "Second."], "labels": [True, False]} for i in range(3)]
    found = look(lines(tmp_path / "steps.jsonl", steps))
    assert "labels       → labels" in found and "«First." in found and "‹Second." in found
    assert (
        "«First.\n\n»‹Second.<|eos|>›" in look(lines(tmp_path / "steps.jsonl", steps), "--model", "toy") or "›" in found
    )
    turns = [
        {"from": "gpt", "value": "Hello."},
        {"from": "human", "value": "Do owls fly?"},
        {"from": "gpt", "value": "They do."},
    ]
    with pytest.warns(DataWarning, match="1 of 2 conversations begin with an answer"):
        rows = list(to_rows([{"conversations": turns}, {"conversations": turns[1:]}], "sft"))
    assert rows[0] == rows[1]
    template = "{{ raise_exception('no questions about owls') if 'owls' in messages[0]['content'] }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (tmp_path / "strict.jinja").write_text(template)
    talks = [
        [{"role": "user", "content": w}, {"role": "assistant", "content": "Yes."}] for w in ("Do bears?", "Do owls?")
    ]
    chats = lines(tmp_path / "chats.jsonl", [{"messages": t} for t in talks])
    found = look(chats, "--model", "toy", f"model.chat_template={tmp_path / 'strict.jinja'}")
    assert (
        "1 row is wrong" in found
        and "row 1: The chat template refuses" in found
        and "row 0\n" in found
        and "— row 1" not in found
    )
    found = look(lines(tmp_path / "a.jsonl", [{"prompt": "Q", "completion": "A"}]), "data.columns={prompt:question}")
    assert "data.columns={prompt: question}" in found


def test_what_a_tokenizer_makes_of_foreign_words_is_said(tmp_path: Path) -> None:
    """Special tokens that somebody spells, words that a tokenizer doesn't know, and fewer held-out rows than were asked for: a counted sentence each."""
    bpe = train_bpe(["Do owls fly? They do."], 300)
    bad = "Fly.<|eos|>\n\nHuman: And bears?"
    rows = [{"prompt": "Do owls fly?", "completion": bad}, {"prompt": "Do owls fly?", "completion": "They do.<|eos|>"}]
    with pytest.warns(DataWarning, match=r"1 prompts or answers spell a special token .*'<\|eos\|>'"):
        tokenize_sft(rows, bpe, chat=True)
    with pytest.warns(DataWarning, match="1 prompts or answers spell"):
        tokenize_preferences([{"prompt": "Do owls fly?", "chosen": "They do.", "rejected": bad}], bpe, chat=True)
    with pytest.warns(DataWarning, match="1 prompts or answers spell"):
        tokenize_prompts([{"prompt": bad}], bpe, chat=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        tokenize_sft(rows[1:], bpe, chat=True)
        tokenize_sft(rows, bpe, chat=False)  # text as it is: a template may have been written out
        tokenize_sft(toy.sft_rows(20, 0), TOK)
    with pytest.warns(DataWarning, match="of the tokens are '<unk>': the tokenizer doesn't know these words"):
        tokenize_sft([{"prompt": "Was ist ein Uhu?", "completion": "Ein Vogel."}], TOK)
    with pytest.raises(DataError, match="1 with answers that are the same tokens"):
        tokenize_preferences([{"prompt": "Was?", "chosen": "Ja", "rejected": "Nein"}], TOK)
    file = lines(tmp_path / "few.jsonl", [{"prompt": f"Q{i}", "completion": "A"} for i in range(5)])
    with pytest.warns(DataWarning, match="eval_size is 9, but .* has 5 rows, .*: 2 are held out"):
        assert [len(part) for part in load_rows(DataConfig(path=file, eval_size=9), "sft")] == [3, 2]
    again = lines(tmp_path / "again.jsonl", [{"prompt": f"Q{i % 3}", "completion": str(i)} for i in range(12)])
    with pytest.warns(DataWarning, match="4 of 4 held-out rows of .* have prompts that are trained on, too"):
        load_rows(DataConfig(path=again, eval_size=4), "sft")


def test_a_tuned_model_is_merged_with_its_base_from_elsewhere(tmp_path: Path) -> None:
    """Dropout, which training switches off, and the notes that other tools leave in a config make no other model."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": len(TOK), "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    base = GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))
    base.config._model_name_or_path = "somewhere"
    base.save_pretrained(tmp_path / "base")
    TOK.save_pretrained(tmp_path / "base")
    assert json.loads((tmp_path / "base" / "config.json").read_text())["resid_pdrop"] > 0
    model = {"name_or_path": str(tmp_path / "base")}
    sft = SFTTrainer(
        SFTConfig.preset(
            "toy", output_dir=str(tmp_path / "run"), model=model, data={"max_length": 48, "max_prompt_length": 32}
        ),
        rows=toy.sft_rows(8),
    )
    sft.method.save_model(tmp_path / "tuned")
    words = ["merge", str(tmp_path / "tuned"), str(tmp_path / "base"), "-o", str(tmp_path / "soup")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def test_an_evaluation_says_what_it_leaves_out_of_the_models_settings(tmp_path: Path) -> None:
    """A penalty that the model's makers set isn't dropped without a word."""
    model = toy.build_model(0, "tiny")
    model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(tmp_path / "model")
    set_chat_template(toy.build_tokenizer()).save_pretrained(tmp_path / "model")
    words = [
        "eval",
        str(tmp_path / "model"),
        "--suite",
        "sums",
        "--limit",
        "1",
        "max_new_tokens=2",
        f"output_dir={tmp_path / 'out'}",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "repetition_penalty=1.3; answers were made without" in " ".join(
        done.output.split()
    ), done.output
    assert any(
        "repetition_penalty=1.3" in note
        for note in json.loads((tmp_path / "out" / "results.json").read_text())["notes"]
    )


def test_what_can_be_said_before_anything_is_computed_is_said_then(tmp_path: Path) -> None:
    """A column that isn't there, before a suite is asked; an empty pattern; a policy where a reward model belongs."""
    words = ["eval", "toy", "--suite", "sums", "slice=country", f"output_dir={tmp_path / 'out'}"]
    done = CliRunner().invoke(app, words)
    assert (
        done.exit_code == 1
        and "has no such column" in done.output
        and not (tmp_path / "out" / "answers.jsonl").exists()
    )
    with pytest.raises(ConfigError, match="needs a form"):
        DecoderConfig.model_validate({"kind": "constrained", "regex": ""})
    toy.build_model(0, "tiny").save_pretrained(tmp_path / "policy")
    with pytest.raises(ModelError, match="it is a LlamaForCausalLM"):
        RewardModel.load(tmp_path / "policy")


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
