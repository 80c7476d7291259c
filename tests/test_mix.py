"""A mix of files in a run: shares as asked for, logged, resumed to the same rows, held-out rows learnt from nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import call

from rlhf_nb import SFTConfig, SFTTrainer
from rlhf_nb.config import DataConfig
from rlhf_nb.core import ConfigError, DataError
from rlhf_nb.data import toy
from rlhf_nb.data.rows import held_out_of_stream, load_parts, load_rows
from rlhf_nb.data.sources import row_key
from rlhf_nb.run.log import read_metrics


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    rows = [{k: r[k] for k in ("prompt", "completion")} for r in toy.sft_rows(90, 3)]
    out = {}
    for name, part in (("big", rows[:60]), ("small", rows[60:])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(json.dumps(r) for r in part))
        out[name] = str(path)
    return out


def settings(files: dict[str, str], folder: Path, **data: Any) -> dict[str, Any]:
    mix = [{"path": files["big"], "weight": 0.75}, {"path": files["small"], "weight": 0.25}]
    return SFTConfig.preset_values("toy") | {
        "output_dir": str(folder), "data": {"mix": mix, "max_length": 128, "max_prompt_length": 64, "dedup": False, **data}, "steps": 6, "epochs": None,
        "mini_batch_size": 8, "save_every": 1, "console": False,
    }  # fmt: skip


def fail_at(trainer: Any, step: int) -> Any:
    """A trainer whose source breaks when it is asked for the rows of this step."""
    given = trainer.source.next_batch

    def next_batch(n: int) -> Any:
        if trainer.step == step:
            raise OSError("the disk is gone")
        return given(n)

    trainer.source.next_batch = next_batch
    return trainer


def told(folder: Path) -> list[dict[str, Any]]:
    return [e for e in read_metrics(folder) if e["type"] == "step"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_that_broke_goes_on_with_the_same_rows(files: dict[str, str], tmp_path: Path, streaming: bool) -> None:
    def trainer(folder: str) -> SFTTrainer:
        config = SFTConfig(**settings(files, tmp_path / folder, streaming=streaming, shuffle_buffer=16))
        return SFTTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer())

    trainer("straight").fit()
    with pytest.raises(OSError, match="the disk is gone"):
        fail_at(trainer("broken"), 3).fit()
    assert len(told(tmp_path / "broken")) == 3
    trainer("broken").fit(resume=True)
    straight, broken = told(tmp_path / "straight"), told(tmp_path / "broken")
    assert [e["loss"] for e in straight] == [e["loss"] for e in broken]
    assert [(e["data/big.jsonl"], e["data/small.jsonl"]) for e in straight] == [(6 * s, 2 * s) for s in range(1, 7)]
    assert straight[-1]["data/big.jsonl"] == broken[-1]["data/big.jsonl"] == 36
    (start,) = (e for e in read_metrics(tmp_path / "straight") if e["type"] == "start")
    size = {} if streaming else {"rows": 60}
    assert start["sources"]["big.jsonl"] == {"share": 0.75, **size}


def test_nothing_held_out_is_learnt_from_another_source(files: dict[str, str], tmp_path: Path) -> None:
    small = [json.loads(line) for line in Path(files["small"]).read_text().splitlines()]
    twice = tmp_path / "twice.jsonl"
    twice.write_text("\n".join(json.dumps(r) for r in [*small[-8:], *small[:2], *toy.sft_rows(5, 9)]))
    data = DataConfig(mix=[{"path": files["small"]}, {"path": str(twice)}], eval_size=6)
    (first, held), (second, other) = load_parts(data, "sft")
    keys = [{row_key(r) for r in rows} for rows in (first, second, [*held, *other])]
    assert len(held) + len(other) == 6 and held and other
    assert not keys[0] & keys[1] and not (keys[0] | keys[1]) & keys[2]
    assert [len(x) for x in load_rows(data, "sft")] == [len(first) + len(second), 6]
    streamed = data.replace(
        mix=[{"path": files["big"], "weight": 3.0}, {"path": files["small"], "weight": 1.0}],
        streaming=True,
        eval_size=8,
    )
    assert len(held_out_of_stream(streamed, "sft")) == 8
    with pytest.raises(DataError, match="small.jsonl: all of its 30 rows stand in other sources of data.mix"):
        load_rows(DataConfig(mix=[{"path": files["small"]}, {"path": files["small"]}]), "sft")


def test_a_source_may_have_columns_of_its_own(files: dict[str, str], tmp_path: Path) -> None:
    odd = tmp_path / "odd.jsonl"
    odd.write_text(json.dumps({"query": "Visitor: hi\nPip:", "reply": " Hello."}))
    mix = [{"path": files["small"]}, {"path": str(odd), "columns": {"query": "prompt", "reply": "completion"}}]
    assert load_rows(DataConfig(mix=mix), "sft")[0][-1] == {"prompt": "Visitor: hi\nPip:", "completion": " Hello."}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"mix": [{"path": "a"}], "path": "b"}, "mix names 1 sources, and path is 'b'"),
        ({"mix": [{"path": "a", "weight": 1.0}, {"path": "b"}]}, "give all of them one, or none"),
        ({"mix": [{"path": "a"}, {"path": "b"}], "streaming": True}, "give each source of mix a weight"),
        ({"mix": [{"path": "a", "wieght": 1.0}]}, r"Did you mean 'mix\[0\].weight'"),
        ({"mix": [{"path": "a", "weight": 0.0}]}, "> 0"),
        ({"mix": []}, "got 0 entries, expected at least 1"),
    ],
)  # fmt: skip
def test_a_mix_that_makes_no_sense(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DataConfig(**data)


def test_a_mix_on_the_command_line(files: dict[str, str], tmp_path: Path) -> None:
    mix = f"data.mix=[{{path: {files['big']}, weight: 3}}, {{path: {files['small']}, weight: 1}}]"
    words = [
        "sft",
        "model.name_or_path=toy",
        mix,
        "steps=1",
        "epochs=null",
        "mini_batch_size=4",
        "device=cpu",
        f"output_dir={tmp_path / 'run'}",
    ]
    call(*words)
    (step,) = told(tmp_path / "run")
    assert (step["data/big.jsonl"], step["data/small.jsonl"]) == (3, 1)
