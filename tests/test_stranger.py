"""What a stranger brings along: odd files, odd formats, settings that don't fit what is given."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from rlhf_nb.bench.evals import scorer
from rlhf_nb.cli.main import app
from rlhf_nb.config import DataConfig
from rlhf_nb.core import ConfigError, DataError, ModelError
from rlhf_nb.data import toy
from rlhf_nb.data.formats import DataWarning, to_rows
from rlhf_nb.data.rows import held_out_of_stream, load_rows
from rlhf_nb.data.shapes import DataNote
from rlhf_nb.data.sources import tokenize_preferences, tokenize_prompts, tokenize_sft
from rlhf_nb.data.templates import encode_pair, encode_pairs, set_chat_template, train_bpe
from rlhf_nb.decode.named import DecoderConfig
from rlhf_nb.fast.support import use_fast
from rlhf_nb.hub.card import _config_of
from rlhf_nb.models.adapters import add_lora
from rlhf_nb.models.heads import RewardModel
from rlhf_nb.pipeline.doctor import check_model
from rlhf_nb.rollout.sampler import draw, may_share
from rlhf_nb.scoring.check import self_check
from rlhf_nb.train.dpo import DPOConfig, DPOTrainer
from rlhf_nb.train.entries import RewardEntry
from rlhf_nb.train.kto import KTOConfig, KTOTrainer
from rlhf_nb.train.registry import get
from rlhf_nb.train.sft import SFTConfig, SFTTrainer
from rlhf_nb.types import Completions

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


def loud(dtype: torch.dtype, kind: str = "llama") -> Any:
    """A tiny model whose logits are as large as a trained model's, so that half precision rounds them by tenths."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=512, hidden_size=128, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.get_output_embeddings().weight.data *= 10
    return model.to(dtype).eval()


HALVES = {  # number format of weights, of products under autocast
    "bf16 weights": (torch.bfloat16, None),
    "bf16 products": (torch.float32, torch.bfloat16),
    "fp16 products": (torch.float32, torch.float16),
}


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
@pytest.mark.parametrize("half", HALVES)
def test_rounding_in_half_precision_is_no_wrong_cache(half: str, kind: str) -> None:
    """The check of `generate` knows what rounding does to large logits, instead of refusing every trained model in bf16 or
    under autocast; a cache that is wrong is still refused."""
    dtype, products = HALVES[half]
    short, long = torch.arange(5, 40), torch.arange(20, 100)
    rounded = torch.autocast("cpu", products, enabled=products is not None)
    with torch.inference_mode(), rounded:
        assert may_share(loud(dtype, kind), short, long, 0) == "all"
        if kind == "llama":  # as a run samples that may not take its fast paths
            with use_fast(False):
                draw(loud(dtype), [short.tolist(), long.tolist()], 4, seed=1)
    broken = loud(dtype, kind)
    plain = broken.forward

    def forward(*args: Any, past_key_values: Any = None, **more: Any) -> Any:
        found = plain(*args, past_key_values=past_key_values, **more)
        if past_key_values is not None and past_key_values.get_seq_length() > 40:
            found.logits = found.logits.roll(1, -1)
        return found

    broken.forward = forward
    with torch.inference_mode(), rounded, pytest.raises(ModelError, match="doesn't say what"):
        may_share(broken, short, long, 0)


def test_float32_is_held_to_float32() -> None:
    """What rounding to bf16 does would be a wrong cache where nothing is rounded to bf16."""
    model, short, long = loud(torch.float32), torch.arange(5, 40), torch.arange(20, 100)
    plain = model.forward

    def forward(*args: Any, past_key_values: Any = None, **more: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=past_key_values is not None):
            return plain(*args, past_key_values=past_key_values, **more)

    model.forward = forward
    with torch.inference_mode(), pytest.raises(ModelError, match="doesn't say what"):
        may_share(model, short, long, 0)


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
        load_rows(DataConfig(path=again, eval_size=4, eval_draw="end"), "sft")


def test_held_out_rows_are_drawn_and_what_shares_a_prompt_stays_together(tmp_path: Path) -> None:
    """A file sorted by topic gives held-out rows of all topics, the same ones to every method and at every start; another seed draws others."""
    rows = [
        {"prompt": f"{topic} {i}?", "chosen": f"yes {k}", "rejected": f"no {k}"}
        for topic in ("owls", "cats") for i in range(30) for k in range(2)
    ]  # fmt: skip
    data = DataConfig(path=lines(tmp_path / "sorted.jsonl", rows), eval_size=24)

    def prompts(kind: Any, **settings: Any) -> set[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DataWarning)
            kept, held = load_rows(data.replace(**settings), kind)
        assert len(held) == settings.get("eval_size", 24) and not {r["prompt"] for r in kept} & {
            r["prompt"] for r in held
        }
        return {r["prompt"] for r in held}

    held = prompts("preference")
    assert {p.split()[0] for p in held} == {"owls", "cats"} and held == prompts("preference") == prompts("sft")
    assert held == prompts("unpaired", eval_size=48)  # two answers of each pair
    assert held != prompts("preference", eval_draw=1) == prompts("sft", eval_draw=1)
    assert {r["prompt"] for r in load_rows(data, "preference", seed=1)[1]} == prompts("preference", eval_draw=1)
    assert [r["prompt"] for r in load_rows(data.replace(eval_draw="end"), "preference")[1]] == [
        r["prompt"] for r in rows[-24:]
    ]
    one = lines(tmp_path / "one.jsonl", [{"prompt": "Why?", "completion": str(i)} for i in range(8)])
    with pytest.warns(
        DataWarning, match="4 rows were to be held out, and none are: rows that begin with the same prompt"
    ):
        assert load_rows(DataConfig(path=one, eval_size=4), "sft")[1] == []
    with pytest.warns(DataNote, match="the first 4 of the stream"):
        assert len(held_out_of_stream(DataConfig(path=one, eval_size=4, streaming=True), "sft")) == 4
    (tmp_path / "config.yaml").write_text(DPOConfig(data=data).to_yaml())
    assert _config_of(tmp_path, get("dpo")).data.eval_draw is None
    old = [x for x in (tmp_path / "config.yaml").read_text().splitlines() if "eval_draw" not in x]
    (tmp_path / "config.yaml").write_text("\n".join(old))  # as an earlier version wrote it
    assert _config_of(tmp_path, get("dpo")).data.eval_draw == "end"
    mixed = data.replace(path=None, mix=[{"path": data.path}, {"path": one}], eval_size=24)
    assert len(load_rows(mixed.replace(eval_draw="end"), "sft")[1]) == 24


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


CHAT = set_chat_template(toy.build_tokenizer())


def turn(role: str, words: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": words}


def dialogues() -> list[dict[str, Any]]:
    """Pairs whose chosen side is an answer, a question and a second answer; the last one's ends in a question."""
    first, more, last = turn("user", "Where do owls live?"), turn("user", "What do owls eat?"), turn("user", "Where?")
    long = [turn("assistant", "In the forest."), more, turn("assistant", "Owls eat mice.")]
    return [
        {"prompt": [first], "chosen": long, "rejected": [turn("assistant", "In the sea.")]},
        {"prompt": [more], "chosen": [turn("assistant", "Owls eat mice.")], "rejected": [*long, last]},
    ]


def said(model: Any, row: dict[str, Any], side: str) -> torch.Tensor:
    """Naively, turn by turn: log-probs of what the assistant says."""
    found = []
    for k, message in enumerate(row[side]):
        if message["role"] == "assistant":
            head, tail = encode_pair(CHAT, row["prompt"] + row[side][:k], [message])
            logps = model(torch.tensor([head + tail])).logits[0, len(head) - 1 : -1].log_softmax(-1)
            found.append(logps[range(len(tail)), tail].detach())
    return torch.cat(found)


@pytest.mark.parametrize("reference", ["frozen", "cached"])
def test_what_the_user_says_in_between_is_no_answer(reference: str, tmp_path: Path) -> None:
    """Of answers of several turns only the assistant's tokens are summed, divided by, weighed and kept in the reference's cache."""
    torch.manual_seed(0)
    model, base, rows = toy.build_model(0, "tiny"), toy.build_model(1, "tiny"), dialogues()
    shape: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "console": False, "reference_cache": str(tmp_path)}
    shape["data"] = {"path": "toy", "turns": "all"}
    config = DPOConfig.preset("toy", **shape, reference=reference, loss="sigmoid", nll_coef=0.5)
    trainer = DPOTrainer(config, model, CHAT, rows, reference=base)
    method = trainer.method
    batch = method.collect(method.collate(trainer.source.rows), 0)  # type: ignore[attr-defined]
    with torch.no_grad():
        pair, _ = method.pair_logps(batch)
    for i, row in enumerate(rows):
        for side in ("chosen", "rejected"):
            each, theirs = said(model, row, side), said(base, row, side)
            assert float(getattr(pair, side)[i]) == pytest.approx(float(each.sum()), abs=1e-4)
            assert float(getattr(pair, f"ref_{side}")[i]) == pytest.approx(float(theirs.sum()), abs=1e-4)
            assert int(getattr(pair, f"{side}_lens")[i]) == len(each)
    assert int(method.denominators(batch)["nll"]) == sum(len(said(model, row, "chosen")) for row in rows)
    if reference == "frozen":
        config = DPOConfig.preset("toy", **shape, ld_alpha=0.5, wpo=True)
        method = DPOTrainer(config, model, CHAT, rows, reference=base).method
        with torch.no_grad():
            found, weights = method.pair_logps(method.collect(batch, 0))
        long, short = said(model, rows[0], "chosen"), said(model, rows[0], "rejected")
        want = long[: len(short)].sum() + 0.5 * long[len(short) :].sum()
        assert float(found.chosen[0]) == pytest.approx(float(want), abs=1e-4) and weights is not None
        plain = [{**r, "chosen": r["chosen"][:1], "rejected": r["rejected"][:1]} for r in rows]
        alone = method.pair_logps(method.collect(method.collate(method.tokenize(plain)), 0))[1]
        assert float(weights[0]) != pytest.approx(float(alone[0]), rel=1e-3)


def test_thumbs_for_a_dialogue_count_the_assistant(tmp_path: Path) -> None:
    """KTO sums what the assistant says, of its own answer and of the stranger's."""
    model, rows = toy.build_model(0, "tiny"), dialogues()
    shape: dict[str, Any] = {"output_dir": str(tmp_path / "run"), "console": False}
    config = KTOConfig.preset("toy", **shape, data={"path": "toy", "turns": "all"})
    labelled = [
        {"prompt": r["prompt"], "completion": r[side], "label": label}
        for r in rows
        for side, label in (("chosen", True), ("rejected", False))
    ]
    method = KTOTrainer(config, model, CHAT, labelled).method
    batch = method.collate(method.tokenize(labelled))
    sums = method.module(batch.plain()).logps.sum(1)
    want = sorted(float(said(model, r, side).sum()) for r in rows for side in ("chosen", "rejected"))
    assert sorted(sums.tolist()) == pytest.approx(want, abs=1e-4)
    counts = set(batch.completion_mask.sum(1).tolist())
    assert set(batch.other_mask.sum(1).tolist()) <= counts and max(counts) < int(batch.completion_lens.max())


def test_a_template_that_rewrites_earlier_turns_weighs_the_last() -> None:
    """Where the template shows the last answer only, that one counts; all turns together can't be weighed, and that is said."""
    strict = copy.deepcopy(CHAT)
    strict.chat_template = (
        "{% for m in messages %}{% if loop.last or m['role'] == 'user' %}{{ m['role'] }}: {{ m['content'] }} {% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (row,) = tokenize_preferences(dialogues()[:1], strict)
    asked = strict.apply_chat_template([*dialogues()[0]["prompt"], *dialogues()[0]["chosen"][:2]], tokenize=False)
    chosen = [i for i, counts in zip(row["chosen_ids"], row["chosen_mask"], strict=True) if counts]
    assert "eat mice." in strict.decode(chosen) and len(chosen) <= 6 and row["chosen_mask"][0] is False
    assert strict.decode(row["prompt_ids"] + row["chosen_ids"]).startswith(
        strict.decode(strict(asked, add_special_tokens=False)["input_ids"])
    )
    with pytest.raises(DataError, match=r"pair 0 has 2 turns.*can't be weighed as one answer. data.turns=last"):
        tokenize_preferences(dialogues()[:1], strict, turns="together")
    single = {"prompt": "Visitor: Hi?\nPip:", "chosen": " In the forest.", "rejected": " In the sea."}
    assert tokenize_preferences([single], strict)[0]["chosen_mask"] is None


@pytest.mark.parametrize("turns", ["auto", "last", "all"])
def test_which_turns_count(turns: str, tmp_path: Path) -> None:
    """The last turn of each side, unless all are asked for; demonstrations count all, unless the last is."""
    shape: dict[str, Any] = {"output_dir": str(tmp_path), "console": False, "data": {"path": "toy", "turns": turns}}
    (row, _) = DPOTrainer(
        DPOConfig.preset("toy", **shape), toy.build_model(0, "tiny"), CHAT, dialogues()
    ).method.tokenize(dialogues())
    both = len(said(toy.build_model(0, "tiny"), dialogues()[0], "chosen"))
    last = len(
        encode_pair(CHAT, [*dialogues()[0]["prompt"], *dialogues()[0]["chosen"][:2]], dialogues()[0]["chosen"][2:])[1]
    )
    assert sum(row["chosen_mask"]) == (both if turns == "all" else last) and last < both
    trainer = SFTTrainer(
        SFTConfig.preset("toy", **shape),
        toy.build_model(0, "tiny"),
        CHAT,
        [{"prompt": r["prompt"], "completion": r["chosen"]} for r in dialogues()],
    )
    (told, _) = trainer.method.tokenize([{"prompt": r["prompt"], "completion": r["chosen"]} for r in dialogues()])
    assert sum(told["completion_mask"]) == (last if turns == "last" else both)


def test_dropout_of_adapters_is_had_or_said_to_be_left_out(tmp_path: Path) -> None:
    """SFT learns with it; preference training doesn't, and says so, at its start and in the doctor's look."""
    lora = {"lora": {"r": 2, "dropout": 0.5}}
    shape: dict[str, Any] = {"output_dir": str(tmp_path), "console": False, "model": {"name_or_path": "toy"} | lora}
    with pytest.warns(UserWarning, match=r"model\.lora\.dropout is 0\.5, and this method learns without"):
        DPOTrainer(DPOConfig.preset("toy", **shape), rows=toy.preference_rows(8, 0))
    assert any("LoRA dropout is 0.5" in f.what for f in check_model(GPT2Config(), DPOConfig.preset("toy", **shape)))
    config = SFTConfig.preset("toy", **shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sft = SFTTrainer(config, rows=toy.sft_rows(8, 0))
    assert not [f for f in check_model(GPT2Config(), config) if "LoRA" in f.what]
    for name, p in sft.method.module.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(p)
    batch = sft.method.collate(sft.source.rows[:4])  # type: ignore[attr-defined]
    sft.method.module.train()
    first, second = (sft.method.module(batch).logps for _ in range(2))
    assert not torch.allclose(first, second)


def test_judgements_that_contradict_each_other_are_counted(tmp_path: Path) -> None:
    """`rlhf-nb data` counts turned pairs, pairs without a difference, turned thumbs, and pairs of the evaluation file that training turns round; one of each is shown."""
    pair = {"prompt": "Do owls fly?", "chosen": "They do.", "rejected": "They do not."}
    turned = pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]}
    other = {"prompt": "Do bears fly?", "chosen": "No.", "rejected": "Yes."}
    rows = [pair, other, turned, pair | {"rejected": "They do. "}]
    file = lines(tmp_path / "pairs.jsonl", rows)
    held = lines(tmp_path / "held.jsonl", [other | {"chosen": "Yes.", "rejected": "No."}])
    found = look(file, "--eval", held)
    assert (
        "1 of 4 judgements contradict an earlier one (row 2 turns row 0 round: prompt 'Do owls fly?', chosen 'They do not.'"
        in found
    )
    assert "1 row is" not in found and "1 pair has no difference (row 3:" in found
    assert "1 of its 1 judgements are here the other way round (its row 0 is row 1, turned:" in found
    clean = look(lines(tmp_path / "clean.jsonl", rows[:2]))
    assert "contradict" not in clean and "no difference" not in clean
    thumbs = [{"prompt": "Hi", "completion": "Hello.", "label": up} for up in (1, 0)]
    assert "(row 1 turns row 0 round: prompt 'Hi', completion 'Hello.', label False)" in look(
        lines(tmp_path / "t.jsonl", thumbs)
    )


def test_turns_behind_a_prompt_in_hh_notation_are_turns() -> None:
    """An answer that goes on with the user's next question, in the notation of its prompt, is a dialogue; without such a prompt it is text."""
    start = "\n\nHuman: Do owls fly?\n\nAssistant:"
    row = {"prompt": start, "chosen": " They do.\n\nHuman: Why?\n\nAssistant: Wings.", "rejected": " No."}
    said = [turn("assistant", "They do."), turn("user", "Why?"), turn("assistant", "Wings.")]
    for kind, key in (("preference", "chosen"), ("sft", "completion")):
        assert list(to_rows([row], kind))[0][key] == said
    one = list(to_rows([row | {"chosen": "\n\nAssistant: They do."}], "preference"))[0]
    assert one["chosen"] == said[:1] and one["rejected"] == [turn("assistant", "No.")]
    assert list(to_rows([row | {"prompt": "Owls?"}], "preference"))[0]["chosen"] == row["chosen"]


def test_scores_of_two_versions_are_not_mixed(tmp_path: Path) -> None:
    """A folder begun when reward models read two ends of an answer is refused with a sentence; one without such scores goes on."""
    toy.build_model(0, "tiny").save_pretrained(tmp_path / "model")
    CHAT.save_pretrained(tmp_path / "model")

    def evaluated(folder: str, *more: str) -> tuple[int, str]:
        words = [
            "eval",
            str(tmp_path / "model"),
            "--suite",
            "sums",
            "--limit",
            "1",
            "max_new_tokens=2",
            f"output_dir={tmp_path / folder}",
        ]
        done = CliRunner().invoke(app, [*words, *more])
        asked = tmp_path / folder / "asked.json"  # as an earlier version wrote it
        settings = json.loads(asked.read_text())
        settings["rules"].pop("token ids", None)
        asked.write_text(json.dumps(settings))
        return done.exit_code, " ".join(done.output.split())

    tokens = "measures=[{verify: length, target: 3}]"
    assert evaluated("a", tokens)[0] == 0
    code, told = evaluated("a", tokens)
    assert code == 1 and "old and new scores can't be mixed. --overwrite evaluates anew" in told
    assert evaluated("a", tokens, "--overwrite")[0] == 0
    assert evaluated("b", "measures=[{verify: length, target: 3, unit: words}]")[0] == 0
    assert evaluated("b", "measures=[{verify: length, target: 3, unit: words}]")[0] == 0
