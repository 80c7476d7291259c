"""What somebody who knows TRL types at first: it works, or one sentence says what to write."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import call

import rlhf_nb
from rlhf_nb import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOTrainer,
    OnlineDPOConfig,
    PPOConfig,
    PPOTrainer,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from rlhf_nb.aliases import BATCHES, CONVERTED, TrlNote, elsewhere, trl_words
from rlhf_nb.config import SamplingConfig
from rlhf_nb.core import ConfigError, DataError, ModelError, RlhfError
from rlhf_nb.data import toy
from rlhf_nb.data.convert import to_unpaired
from rlhf_nb.data.templates import set_chat_template
from rlhf_nb.decode.named import DecoderConfig
from rlhf_nb.models.load import save_model
from rlhf_nb.pipeline.stages import PipelineConfig

torch.set_num_threads(1)
SFT = toy.sft_rows(32)
PAIRS = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in toy.preference_rows(32)]
PROMPTS = toy.train_prompts(32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with its tokenizer, as `from_pretrained` reads it."""
    where = tmp_path_factory.mktemp("model")
    save_model(toy.build_model(size="tiny"), toy.build_tokenizer(), where, verify=False)
    return str(where)


@pytest.fixture
def words(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run of two steps, in TRL's words."""
    return {
        "output_dir": str(tmp_path / "run"), "max_steps": 2, "learning_rate": 1e-4, "logging_steps": 1, "report_to": "none",
        "gradient_checkpointing": False, "save_total_limit": 1, "lr_scheduler_type": "cosine", "seed": 1, "device": "cpu",
        "console": False, "mini_batch_size": 4,
    }  # fmt: skip


def online(words: dict[str, Any]) -> dict[str, Any]:
    """The same for a method that samples: there a step is no optimizer step."""
    rest = {k: v for k, v in words.items() if k != "max_steps"}
    return {**rest, "steps": 1, "num_generations": 2, "max_completion_length": 4, "max_prompt_length": 64}


def finite(history: list[dict[str, Any]]) -> bool:
    return bool(history) and all(torch.isfinite(torch.tensor(e["loss"])) for e in history)


# -- trainers ----------------------------------------------------------------------------------------------------------


def test_sft_of_a_folder(folder: str, words: dict[str, Any]) -> None:
    trainer = SFTTrainer(model=folder, args=SFTConfig(**words), train_dataset=SFT)
    assert finite(trainer.train())  # type: ignore[attr-defined]
    assert trainer.config.optimizer.lr == 1e-4 and trainer.config.model.name_or_path == folder


def test_sft_model_first(folder: str, words: dict[str, Any]) -> None:
    trainer = SFTTrainer(folder, SFTConfig(**words), train_dataset=SFT, eval_dataset=SFT[:4])  # type: ignore[arg-type]
    assert trainer.fit()[-1]["step"] == 2


def test_sft_with_a_model_and_a_dataset(words: dict[str, Any]) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{k: r[k] for k in ("prompt", "completion")} for r in SFT])
    trainer = SFTTrainer(
        model=toy.build_model(), args=SFTConfig(**words), train_dataset=data, processing_class=toy.build_tokenizer()
    )
    assert finite(trainer.train())  # type: ignore[attr-defined]


def test_sft_with_a_loaded_model_finds_its_tokenizer(folder: str, words: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    trainer = SFTTrainer(model=AutoModelForCausalLM.from_pretrained(folder), args=SFTConfig(**words), train_dataset=SFT)
    assert trainer.method.tokenizer.pad_token_id is not None


def test_sft_with_a_tokenizer_without_pad(folder: str, words: dict[str, Any]) -> None:
    tokenizer = toy.build_tokenizer()
    tokenizer.pad_token = None
    trainer = SFTTrainer(model=folder, processing_class=tokenizer, args=SFTConfig(**words), train_dataset=SFT)
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id) and finite(trainer.fit())


def test_sft_with_peft(folder: str, words: dict[str, Any]) -> None:
    from peft import LoraConfig

    trainer = SFTTrainer(
        model=folder, args=SFTConfig(**words), train_dataset=SFT, peft_config=LoraConfig(r=4, task_type="CAUSAL_LM")
    )
    trained = [n for n, p in trainer.method.module.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained) and any("q_proj" in n for n in trained)
    assert trainer.config.model.lora is not None and trainer.config.model.lora.r == 4


def test_dpo(folder: str, words: dict[str, Any]) -> None:
    args = DPOConfig(**words, beta=0.2, loss_type="ipo", max_length=96, max_prompt_length=64)
    trainer = DPOTrainer(model=folder, ref_model=None, args=args, train_dataset=PAIRS, eval_dataset=PAIRS[:4])
    assert finite(trainer.train()) and trainer.config.loss == "ipo"  # type: ignore[attr-defined]


def test_dpo_with_a_reference_by_name(folder: str, words: dict[str, Any]) -> None:
    trainer = DPOTrainer(model=folder, ref_model=folder, args=DPOConfig(**words), train_dataset=PAIRS)
    assert trainer.config.reference_model == folder


def test_kto(folder: str, words: dict[str, Any]) -> None:
    args = rlhf_nb.KTOConfig(**words, desirable_weight=1.5)
    assert finite(KTOTrainer(model=folder, args=args, train_dataset=list(to_unpaired(PAIRS))).train())  # type: ignore[attr-defined]


def test_reward(folder: str, words: dict[str, Any]) -> None:
    args = rlhf_nb.RewardConfig(**words, center_rewards_coefficient=0.02)
    trainer = RewardTrainer(model=folder, args=args, train_dataset=PAIRS)
    assert trainer.config.center_coef == 0.02


def brevity(completions: list[str], **kwargs: Any) -> list[float]:
    """As in TRL's documentation: completions first, everything by keyword."""
    assert len(kwargs["prompts"]) == len(kwargs["completion_ids"]) == len(completions)
    return [-float(len(c)) for c in completions]


def test_grpo(folder: str, words: dict[str, Any]) -> None:
    args = GRPOConfig(**online(words), beta=0.04, epsilon=0.2, epsilon_high=0.28, num_iterations=1, scale_rewards=False)
    trainer = GRPOTrainer(model=folder, reward_funcs=[brevity], args=args, train_dataset=PROMPTS)
    assert finite(trainer.train())  # type: ignore[attr-defined]
    c = trainer.config
    assert (c.kl_coef, c.clip_eps_low, c.clip_eps_high, c.scale, c.sampling.max_new_tokens) == (
        0.04,
        0.2,
        0.28,
        "none",
        4,
    )


def test_grpo_hands_messages_to_a_function_of_trl(folder: str, words: dict[str, Any]) -> None:
    seen: list[Any] = []

    def look(prompts: Any, completions: Any, completion_ids: Any, **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return [float(len(ids)) for ids in completion_ids]

    chats = [{"prompt": [{"role": "user", "content": r["prompt"]}]} for r in PROMPTS[:8]]
    tokenizer = set_chat_template(toy.build_tokenizer())
    args = GRPOConfig(**online(words))
    GRPOTrainer(model=folder, processing_class=tokenizer, reward_funcs=look, args=args, train_dataset=chats).train()  # type: ignore[attr-defined]
    assert seen and all(c[0]["role"] == "assistant" and isinstance(c[0]["content"], str) for c in seen)


def test_rloo(folder: str, words: dict[str, Any]) -> None:
    args = RLOOConfig(**online(words), beta=0.05)
    trainer = RLOOTrainer(model=folder, reward_funcs=brevity, args=args, train_dataset=PROMPTS)
    assert trainer.config.kl_coef == 0.05


def test_ppo_takes_a_reward_function(folder: str, words: dict[str, Any]) -> None:
    rest = {k: v for k, v in online(words).items() if k != "num_generations"}
    args = PPOConfig(**rest, num_ppo_epochs=1, cliprange=0.1, cliprange_value=0.3, vf_coef=0.2)
    trainer = PPOTrainer(model=folder, args=args, reward_model=brevity, train_dataset=PROMPTS)
    c = trainer.config
    assert (c.num_inner_epochs, c.clip_eps_low, c.clip_eps_high, c.value_clip_eps) == (1, 0.1, 0.1, 0.3)


def test_a_callback_of_transformers_stops_the_run(folder: str, words: dict[str, Any]) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        steps: list[int] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.steps.append(state.global_step)
            control.should_training_stop = True
            return control

    history = SFTTrainer(model=folder, args=SFTConfig(**words), train_dataset=SFT, callbacks=[Stop]).train()  # type: ignore[attr-defined,list-item]
    assert Stop.steps == [1] and len(history) == 1 and "should_training_stop" in history.stopped


def test_train_resumes(folder: str, words: dict[str, Any]) -> None:
    SFTTrainer(model=folder, args=SFTConfig(**words), train_dataset=SFT).fit()
    again = SFTTrainer(model=folder, args=SFTConfig(**words | {"max_steps": 3}), train_dataset=SFT)
    assert again.train(resume_from_checkpoint=True)[-1]["step"] == 3  # type: ignore[attr-defined]


# -- one sentence ------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[..., Any], type[RlhfError], str]] = {
    "batch words and ours": (
        lambda: SFTConfig(per_device_train_batch_size=4, mini_batch_size=8), ConfigError, "make mini_batch_size 4, and mini_batch_size is 8",
    ),
    "groups that would be torn": (
        lambda: GRPOConfig(per_device_train_batch_size=4, num_generations=8), ConfigError, "not a multiple of num_generations 8.*Use 8",
    ),
    "a share of a batch": (lambda: SFTConfig(per_device_train_batch_size=0.5), ConfigError, "here micro_batch_size"),
    "in a file": (lambda: SFTConfig.load(overrides=["delta=2"]), ConfigError, "the clipping has none"),
    "optim": (lambda: SFTConfig(optim="galore_adamw"), ConfigError, "here optimizer.name"),
    "loss_weights": (lambda: DPOConfig(loss_weights=[1.0]), ConfigError, r"here loss=\{'sigmoid': 1.0, 'bco_pair': 0.5\}"),
    "delta": (lambda: GRPOConfig(delta=4.0), ConfigError, "the clipping has none"),
    "twice": (lambda: SFTConfig(learning_rate=1e-4, optimizer={"lr": 1e-5}), ConfigError, "two names of one setting"),
    "data_collator": (lambda: SFTTrainer(model="toy", data_collator=print), ConfigError, "batches are made by the method"),
    "reward for SFT": (lambda: SFTTrainer(model="toy", reward_funcs=len), ConfigError, "this method has no reward"),
    "splits": (lambda: SFTTrainer(model="toy", train_dataset={"train": SFT}), DataError, r"train_dataset=data\['train'\]"),
    "stream": (lambda: SFTTrainer(model="toy", train_dataset=iter(SFT)), DataError, "streaming=true"),
    "wrong path": (lambda: SFTTrainer(model="./nowhere", train_dataset=SFT), ModelError, "doesn't exist"),
    "judge": (lambda: GRPOTrainer(model="toy", judge=print), ConfigError, "reward=FunctionJudge"),
    "trainer_state": (
        lambda: rlhf_nb.Rewards(lambda completions, trainer_state, **k: [0.0]), ConfigError, "which only TRL has",
    ),
    "callback": (lambda: SFTTrainer(model="toy", train_dataset=SFT, callbacks=[print]), ConfigError, "is no callback"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_one_sentence_says_what_to_write(name: str) -> None:
    call, error, said = REFUSED[name]
    with pytest.raises(error, match=said) as e:
        call()
    assert "Traceback" not in str(e.value) and len(str(e.value).splitlines()) == 1


def test_a_config_of_another_kind_is_named() -> None:
    class Seq2SeqSettings:
        pass

    Seq2SeqSettings.__module__ = "transformers.training_args"
    with pytest.raises(ConfigError, match=r"write SFTConfig\(...\) of rlhf_nb"):
        SFTTrainer(model="toy", args=Seq2SeqSettings())  # type: ignore[arg-type]


def test_words_in_a_file_and_on_a_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("num_train_epochs: 2\nlearning_rate: 1e-5\noptimizer: {schedule: cosine}\nbf16: true\n")
    cfg = SFTConfig.load(file, ["weight_decay=0.1", "logging_steps=10"], preset="toy")
    assert (cfg.epochs, cfg.optimizer.lr, cfg.optimizer.schedule, cfg.optimizer.weight_decay) == (
        2.0,
        1e-5,
        "cosine",
        0.1,
    )
    assert (
        cfg.precision == "bf16"
        and cfg.log_every == 10
        and cfg.optimizer.warmup_steps == SFTConfig.preset("toy").optimizer.warmup_steps
    )
    assert SFTConfig.load(cfg.save(tmp_path / "again.yaml")) == cfg


def test_every_trainer_keeps_its_own_signature() -> None:
    for method in ("SFT", "Reward", "PPO", "DPO", "KTO", "GRPO", "RLOO", "OnlineDPO"):
        trainer = getattr(rlhf_nb, f"{method}Trainer")
        assert list(inspect.signature(trainer).parameters)[:1] == ["config"] and callable(trainer.train)


def test_a_mistyped_word_of_trl_is_guessed() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'recompute'"):
        SFTConfig(gradient_checkpoint=True)


def test_a_typo_is_guessed_by_its_letters_among_our_words_and_those_of_trl() -> None:
    """A letter less in any word of either: the word is named, or what it is called here."""
    for word in (
        "max_steps",
        "per_device_train_batch_size",
        "learning_rate",
        "num_train_epochs",
        "eval_strategy",
        "output_dir",
        "mini_batch_size",
    ):
        for typo in (word[:-1], word[:2] + word[3:], word[:3] + word[4] + word[3] + word[5:]):
            with pytest.raises(ConfigError) as e:
                SFTConfig(**{typo: 1})
            named = re.search(r"Did you mean '([^']+)'", str(e.value))
            assert named and named[1] in (word, trl_words("same").get(word)), (typo, str(e.value))


def test_every_word_that_changes_has_a_sentence() -> None:
    """What is translated or free is explained in the table, from which the page in docs is made."""
    explained = trl_words("explained")
    assert {*BATCHES, *CONVERTED, *trl_words("free")} <= {*explained, *trl_words("same")}
    assert all(": here " in text for text in explained.values())


def test_the_page_in_docs_is_the_table() -> None:
    """`python .ci/trl_page.py` writes it."""
    root = Path(__file__).parent.parent
    spec = importlib.util.spec_from_file_location("trl_page", root / ".ci" / "trl_page.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (root / "docs" / "trl.md").read_text(encoding="utf-8") == made.page()


@pytest.mark.parametrize("devices", [1, 4])
def test_batches_count_all_devices(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(devices))
    words = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    with pytest.warns(TrlNote, match=f"mini_batch_size={8 * devices}"):
        assert SFTConfig(**words).mini_batch_size == 8 * devices
    with pytest.warns(TrlNote):
        c = GRPOConfig(**words, num_generations=2, steps_per_generation=8, max_steps=7, save_steps=4, num_iterations=3)
    # 16 × devices answers a generation, two optimizer steps of it, three times
    assert (c.mini_batch_size, c.rollout_batch_size, c.steps, c.save_every) == (8 * devices, 16 * devices, 2, 1)
    with pytest.warns(TrlNote):
        p = PPOConfig(**words, num_mini_batches=2, total_episodes=100)
    assert (p.mini_batch_size, p.rollout_batch_size, p.steps) == (8 * devices, 16 * devices, -(-100 // (16 * devices)))
    with pytest.warns(TrlNote):
        assert rlhf_nb.OnlineDPOConfig(**words).mini_batch_size == 16 * devices  # it counts prompts, and we answers


def test_no_word_stands_twice_in_the_table() -> None:
    """YAML would take the last one without a word."""
    text = (Path(rlhf_nb.__file__).parent / "trl.yaml").read_text(encoding="utf-8")
    for part in text.split("\n\n")[1:]:
        if part.startswith("free:"):
            listed = part.splitlines()[1].strip().split(", ")
            assert len(listed) == len(set(listed)) and set(listed) == set(trl_words("free"))
            continue
        lines = [line for line in part.splitlines()[1:] if line.startswith("  ")]
        listed = [word for line in lines for word in line.strip().partition(":")[0].split(", ")]
        assert len(listed) == len(set(listed)) > 0
        assert set(listed) == set(trl_words(part.partition(":")[0]))


@pytest.mark.parametrize("group", ["sampling", "data", "optimizer", "episodes"])
def test_a_suggestion_is_another_key_and_there_is_one(group: str) -> None:
    """In a group a word of the whole run is said to be the run's; a group by itself suggests no word of a run."""
    inside = type(getattr(GRPOConfig(), group))
    for word in set(GRPOConfig.model_fields) - set(inside.model_fields):
        with pytest.raises(ConfigError) as error:
            GRPOConfig(**{group: {word: 1}})
        assert f"Did you mean '{word}'" not in str(error.value), error.value
        with pytest.raises(ConfigError) as alone:
            inside(**{word: 1})
        meant = re.search(r"Did you mean '(.*?)'", str(alone.value))
        assert meant is None or meant[1].split(".")[0] in inside.model_fields, alone.value


def test_a_setting_of_an_earlier_version() -> None:
    """A file of then opens where the setting changed nothing, in groups too; another value is told what to use."""
    earlier = trl_words("earlier")
    for word, row in earlier.items():
        group, _, key = word.rpartition(".")
        kind: Any = {
            "": DPOConfig,
            "data": DPOConfig,
            "decoder": PPOConfig,
            "gates": PipelineConfig,
            "episodes": PPOConfig,
        }[group]
        without = {group: {}} if group else {}
        said = [{group: {key: value}} if group else {key: value} for value in ("something", row.get("off"))]
        if "off" not in row:  # any value changes nothing
            assert kind.model_validate(said[0]) == kind.model_validate(without)
            continue
        assert kind.model_validate(said[1]) == kind.model_validate(without)
        with pytest.raises(ConfigError, match=re.escape(f"In earlier versions that was {row['was']}.")):
            kind.model_validate(said[0])
    assert PPOConfig.model_validate({"critic": "hydra", "data": {"replay": None}}).critic == "hydra"
    assert set(earlier) >= {"replay", "merge_method", "decoder.critic"} and all(
        ": here " in row["was"] for row in earlier.values()
    )


def test_an_option_or_kind_of_an_earlier_version() -> None:
    """Each is refused by one sentence that says what does it now, and no other option is guessed beside it."""
    for word, row in trl_words("gone").items():
        of, _, said = word.partition(" ")
        if of == "decoder":
            for given in ({"kind": said}, f"{said}:4"):
                with pytest.raises(ConfigError, match=re.escape(row["was"])):
                    GRPOConfig(decoder=given)
            continue
        if of in ("suite", "rule"):  # of an evaluation
            assert row["was"] in elsewhere(word)
            continue
        if of in ("loss", "opponent"):
            with pytest.raises(ConfigError, match=re.escape(row["was"])):
                OnlineDPOConfig(**{of: said})
            continue
        if of == "sampler":
            with pytest.raises(ConfigError, match=re.escape(row["was"])):
                GRPOConfig(sampling={of: said})
            with pytest.raises(ConfigError, match=re.escape(row["was"])):
                SamplingConfig(sampler=said)
            continue
        typed = [of, "a", "--method", said, "-o", "x"] if said[0] != "-" else [of, "a", said, "x"]
        told = " ".join(call(*typed, code=2 if said[0] == "-" else 1).replace("│", " ").split())
        assert row["was"] in told and "Possible options" not in told and ": here " in row["was"], told
    assert "plain sum" in call("merge", "a", "--no-normalize", code=2)
    with pytest.raises(ConfigError, match="a setting of speculative decoding: here serve does it"):
        DecoderConfig.model_validate({"draft": "some-model"})  # alone as well as in a run's settings
