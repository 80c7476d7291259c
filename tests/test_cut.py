"""What limits cut is counted, shown, and stops a run; offline methods have one limit."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest
import torch

from rlhf_nb import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
from rlhf_nb.core import DataError
from rlhf_nb.data import toy
from rlhf_nb.data.sources import row_lengths
from rlhf_nb.train.trainer import kept_length

torch.set_num_threads(1)


def rows(kind: str, words: int, answer: int, n: int = 8) -> list[dict[str, Any]]:
    """Rows with prompts and answers of so many tokens, and different ones."""
    said = [" ".join(["owls"] * (words - 1 - i % 2) + [["live", "where", "do", "owls"][i % 4]]) for i in range(n)]
    good, bad = " ".join(["owls"] * answer), " ".join(["live"] * answer)
    made = {
        "sft": {"completion": good},
        "pairs": {"chosen": good, "rejected": bad},
        "kto": {"completion": good, "label": True},
    }
    return [{"prompt": text, **made[kind]} for text in said]


TRAINERS: dict[str, tuple[Any, Any, str]] = {
    "sft": (SFTTrainer, SFTConfig, "sft"), "dpo": (DPOTrainer, DPOConfig, "pairs"), "reward": (RewardTrainer, RewardConfig, "pairs"),
    "kto": (KTOTrainer, KTOConfig, "kto"),
}  # fmt: skip


def make(name: str, words: int, answer: int, tmp_path: Any, **data: Any) -> Any:
    trainer, config, kind = TRAINERS[name]
    given = rows(kind, words, answer)
    if kind == "kto":
        given = [row | {"label": i % 2 == 0} for i, row in enumerate(given)]
    cfg = config(
        output_dir=str(tmp_path), steps=1, epochs=None, data=data, device="cpu", console=False, mini_batch_size=4
    )
    return trainer(cfg, toy.build_model(size="tiny"), toy.build_tokenizer(), given)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_long_prompt_with_a_short_answer_loses_nothing(name: str, tmp_path: Any) -> None:
    """90 and 5 tokens fit into 140, whatever half of 140 is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lose tokens.*")
        trainer = make(name, 90, 5, tmp_path, max_length=140)
    assert all(sum(row_lengths(row)) == kept_length(row) > 90 for row in trainer.source.rows)


@pytest.mark.parametrize("name", TRAINERS)
def test_more_than_a_tenth_cut_stops_the_run_unless_asked(name: str, tmp_path: Any) -> None:
    with pytest.raises(
        DataError,
        match=r"8 of 8 rows lose tokens to data.max_length=60.*row 1, say: \d+ tokens of prompt and \d+ of answer; its .*data.max_cut=1",
    ):
        make(name, 90, 5, tmp_path, max_length=60)
    with pytest.warns(
        UserWarning,
        match=r"([48]) of \1 rows \(100.0%\) are longer than the limits and lose tokens \(row 1, say: .*set max_length=",
    ):
        trainer = make(name, 90, 5, tmp_path, max_length=60, max_cut=1.0)
    assert all(kept_length(row) <= 60 < sum(row_lengths(row)) for row in trainer.source.rows)


def test_a_run_that_an_older_version_began_goes_on(tmp_path: Any) -> None:
    """A run of an older version, whose config has no data.max_cut, is resumed with the rows that it began with."""
    make("sft", 90, 5, tmp_path, max_length=60, max_cut=1.0).fit()
    with pytest.raises(DataError, match="max_cut"):
        make("sft", 90, 5, tmp_path, max_length=60)
    said = (tmp_path / "config.yaml").read_text()
    assert "max_cut" in said
    (tmp_path / "config.yaml").write_text("".join(line for line in said.splitlines(True) if "max_cut" not in line))
    trainer = make("sft", 90, 5, tmp_path, max_length=60)
    assert len(trainer.source.rows) == 8


@pytest.mark.parametrize("name", ("sft", "dpo"))
def test_a_stream_stops_when_more_is_cut_than_luck_explains(name: str, tmp_path: Any) -> None:
    """All rows cut: before the first update. A twelfth of them, with a tenth allowed: luck, and the run goes on."""
    trainer, config, kind = TRAINERS[name]
    file = tmp_path / "rows.jsonl"

    def train(given: list[dict[str, Any]], out: str) -> Any:
        file.write_text("".join(json.dumps(row) + "\n" for row in given))
        cfg = config(
            output_dir=str(tmp_path / out), steps=6, epochs=None, device="cpu", console=False, mini_batch_size=4,
            data={"path": str(file), "streaming": True, "max_length": 60, "shuffle_buffer": 4},
        )  # fmt: skip
        return trainer(cfg, toy.build_model(size="tiny"), toy.build_tokenizer()).fit()

    long, short = rows(kind, 90, 5, 24), rows(kind, 9, 5, 24)
    with pytest.raises(DataError, match=r"rows lose tokens to data.max_length=60.*data.max_cut=1"):
        train(long, "all")
    assert len(train([long[i] if i % 12 == 5 else short[i] for i in range(24)], "few")) == 6
