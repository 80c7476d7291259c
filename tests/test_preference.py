"""Preference optimisation from the outside: bad input, LoRA, the cache, models that plain transformers reads."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.config import LoraSettings, ModelConfig
from rlhf_nb.core import ConfigError, DataError, ModelError, decide_precision
from rlhf_nb.data import toy
from rlhf_nb.data.convert import to_unpaired
from rlhf_nb.data.templates import train_bpe
from rlhf_nb.models.load import load_causal_lm, save_model
from rlhf_nb.train.dpo import DPOConfig, DPOTrainer
from rlhf_nb.train.kto import KTOConfig, KTOTrainer

torch.set_num_threads(1)
runner = CliRunner()
PAIRS = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in toy.preference_rows(48)]


def write(path: Path, rows: list[Any]) -> Path:
    """Rows as a JSONL file."""
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def dpo(folder: Path, rows: list[Any] | None = None, model: Any = None, **over: Any) -> DPOTrainer:
    """A trainer on the tiny toy model."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "console": False,
        "steps": 4,
        "epochs": None,
        "mini_batch_size": 8,
    }
    config = DPOConfig.preset("toy", **(settings | over))
    model = toy.build_model(0, "tiny") if model is None else model
    return DPOTrainer(config, model, toy.build_tokenizer(), PAIRS if rows is None else rows)


def kto(folder: Path, rows: list[Any], **over: Any) -> KTOTrainer:
    """A KTO trainer on the tiny toy model."""
    settings: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "console": False,
        "steps": 4,
        "epochs": None,
        "mini_batch_size": 8,
    }
    config = KTOConfig.preset("toy", **(settings | over))
    return KTOTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), rows)


BAD = {
    "rejected": ({"prompt": "Hi?", "chosen": " Yes."}, "rejected"),
    "dialogues": (
        {
            "chosen": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes."}],
            "rejected": [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "No."}],
        },
        "aren't answers to one prompt",
    ),
    "kinds": ({"prompt": "Hi?", "chosen": " Yes.", "rejected": [{"role": "assistant", "content": "No."}]}, "text"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_rows_that_cannot_be_meant(case: str, tmp_path: Path) -> None:
    row, says = BAD[case]
    with pytest.raises(DataError, match=says) as error:
        dpo(tmp_path, [*PAIRS[:5], row])
    assert "row 5" in str(error.value) or "row 6" in str(error.value)  # which one


def test_texts_without_a_common_prompt_are_counted(tmp_path: Path) -> None:
    rows = [{"chosen": f"{w} is one text.", "rejected": f"But another is {w}."} for w in ("This", "That", "It")]
    with pytest.warns(UserWarning, match="3 of 3 pairs have no prompt"):
        dpo(tmp_path, rows)


def test_pairs_that_say_nothing_are_dropped_with_one_warning(tmp_path: Path) -> None:
    rows = [
        *PAIRS,
        {"prompt": "Hi?", "chosen": " A.", "rejected": " A."},
        {"prompt": "Hi?", "chosen": " A.", "rejected": " "},
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = dpo(tmp_path, rows)
    told = [str(w.message) for w in caught if "dropped" in str(w.message) or "identical" in str(w.message)]
    assert len(told) == 1 and "1" in told[0] and "identical" in told[0] and "empty" in told[0]
    assert len(trainer.source) == len(PAIRS)  # type: ignore[arg-type]


def test_labels_of_one_kind(tmp_path: Path) -> None:
    rows = [r for r in to_unpaired(PAIRS) if r["label"]]
    with pytest.raises(DataError, match="Both are needed"):
        kto(tmp_path, rows)


def test_kto_takes_pairs_apart(tmp_path: Path) -> None:
    assert len(kto(tmp_path, PAIRS).source) == 2 * len(PAIRS)  # type: ignore[arg-type]


def test_reference_with_another_tokenizer(tmp_path: Path) -> None:
    tokenizer = train_bpe(["Visitor: Where do owls live? Pip: In the forest."] * 20, 300)
    model = toy.build_model(0, "tiny")
    model.resize_token_embeddings(len(tokenizer))
    save_model(model, tokenizer, tmp_path / "other")
    with pytest.raises(ModelError, match="another tokenizer"):
        dpo(tmp_path, reference_model=str(tmp_path / "other"))


def test_reference_that_is_another_model(tmp_path: Path) -> None:
    save_model(toy.build_model(1, "tiny"), toy.build_tokenizer(), tmp_path / "other")
    trainer = dpo(tmp_path, reference_model=str(tmp_path / "other"))
    first = trainer.train_step()
    assert abs(first["loss"] - 0.6931) > 1e-4  # policy and reference differ from the start


def test_cache_of_another_model(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    dpo(tmp_path, reference="cached", reference_cache=str(cache))
    dpo(tmp_path, model=toy.build_model(1, "tiny"), reference="cached", reference_cache=str(cache))
    one, other = sorted(cache.iterdir())
    one.write_bytes(other.read_bytes())
    other.write_bytes(b"torn")
    for seed in (0, 1):
        with pytest.raises(DataError, match="another model|damaged"):
            dpo(tmp_path, model=toy.build_model(seed, "tiny"), reference="cached", reference_cache=str(cache))


def test_cached_run_is_the_same_run(tmp_path: Path) -> None:
    plain = [e["loss"] for e in dpo(tmp_path / "a").fit()]
    for _ in range(2):  # written, then read
        trainer = dpo(tmp_path / "b", reference="cached", reference_cache=str(tmp_path / "cache"))
        assert [e["loss"] for e in trainer.fit(overwrite=True)] == pytest.approx(plain, rel=1e-5)
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_lora_reference_is_the_base_model_and_saves_plain(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_model(toy.build_model(0, "tiny"), toy.build_tokenizer(), tmp_path / "base")
    place = ModelConfig(name_or_path=str(tmp_path / "base"), lora=LoraSettings(r=4))
    config = DPOConfig.preset(
        "toy", output_dir=str(tmp_path / "run"), console=False, steps=6, epochs=None, mini_batch_size=8,
        model=place.to_dict(), optimizer={"lr": 1e-2},
    )  # fmt: skip
    trainer = DPOTrainer(config, rows=PAIRS)
    history = trainer.fit()
    assert history[0]["loss"] == pytest.approx(0.6931, abs=1e-4)  # both are the base model
    assert abs(history[-1]["loss"] - 0.6931) > 1e-3  # the policy has moved, the reference hasn't
    trainer.method.save_model(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, trainer.method.model.eval()(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("loss", ["sigmoid", "simpo", "orpo"])
def test_micro_batches_change_nothing(loss: str, tmp_path: Path) -> None:
    whole = [e["loss"] for e in dpo(tmp_path / "a", loss=loss).fit()]
    split = [e["loss"] for e in dpo(tmp_path / "b", loss=loss, micro_batch_size=1, token_budget=64).fit()]
    assert split == pytest.approx(whole, rel=1e-4)


def test_sorting_losses_see_the_whole_batch(tmp_path: Path) -> None:
    whole = [e["loss"] for e in dpo(tmp_path / "a", loss="aot").fit()]
    split = [e["loss"] for e in dpo(tmp_path / "b", loss="aot", micro_batch_size=2).fit()]
    assert split == pytest.approx(whole, rel=1e-4)


def test_wrong_settings_are_said_at_once() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"loss": "simgoid"}, "sigmoid"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
        ({"beta": 0.0}, "beta"),
        ({"reference": "none"}, "compares the policy"),
        ({"reference": "cached", "data": {"streaming": True}}, "streamed"),
        ({"reference": "cached", "ld_alpha": 0.5}, "ld_alpha"),
    ]
    for over, says in cases:
        with pytest.raises(ConfigError, match=says):
            DPOConfig(**over)


@pytest.mark.parametrize("command", ["dpo", "kto"])
def test_commands(command: str, tmp_path: Path) -> None:
    data, run = write(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "run"
    base = tmp_path / "base"
    save_model(toy.build_model(0, "tiny"), toy.build_tokenizer(), base)
    words = [
        command,
        "--toy",
        f"data.path={data}",
        "data.eval_size=8",
        f"model.name_or_path={base}",
        f"output_dir={run}",
        "steps=3",
        "console=false",
    ]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Model:" in result.output
    load_causal_lm(ModelConfig(name_or_path=str(run / "model")), decide_precision("cpu"))
    wrong = runner.invoke(app, [*words[:-2], "loss=ktoo"])
    assert wrong.exit_code == 1 and "ktoo" in wrong.stderr and len(wrong.stderr.strip().splitlines()) == 1
