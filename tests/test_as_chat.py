"""Plain prompts of a data set and a model that speaks in messages: `data.as_chat`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import DataError
from rlhf_nb.data import toy
from rlhf_nb.data.convert import to_unpaired
from rlhf_nb.data.shapes import DataNote
from rlhf_nb.data.templates import make_chat_template, set_chat_template
from rlhf_nb.models.load import save_model
from rlhf_nb.train.registry import get

torch.set_num_threads(1)
PLAIN = [
    {"prompt": f"Where do {a} live?", "chosen": "In the river.", "rejected": "In a tree."}
    for a in ("otters", "owls", "bats")
]
MARKS = make_chat_template("Visitor:", "\nPip:")


def _as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """A plain row as it would be written for a chat model."""
    out = dict(row)
    for name in ("prompt", "chosen", "rejected", "completion"):
        if name in row:
            role = "user" if name == "prompt" else "assistant"
            out[name] = [{"role": role, "content": row[name]}]
    return out


ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [{"prompt": r["prompt"], "completion": r["chosen"]} for r in PLAIN],
    "dpo": PLAIN, "reward": PLAIN, "kto": list(to_unpaired(PLAIN)), "grpo": [{"prompt": r["prompt"]} for r in PLAIN], "distill": [{"prompt": r["prompt"]} for r in PLAIN],
}  # fmt: skip
IDS = ("prompt_ids", "completion_ids", "completion_mask", "chosen_ids", "rejected_ids")


def tokens(
    method: str, rows: list[dict[str, Any]], tmp_path: Path, template: str | None, **data: Any
) -> tuple[list[Any], list[str]]:
    """What a trainer makes of rows, and the notes it gives."""
    tokenizer = toy.build_tokenizer()
    tokenizer = set_chat_template(tokenizer, template) if template else tokenizer
    config = get(method).config.preset(
        "toy",
        output_dir=str(tmp_path / "run"),
        data={"path": "toy", **data},
        console=False,
        mini_batch_size=8,
        steps=1,
        epochs=None,
    )
    more = {"grpo": {"reward": toy.gold_reward}, "distill": {"teacher": toy.build_model(1, "tiny")}}.get(method, {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer: Any = get(method).trainer(config, toy.build_model(0, "tiny"), tokenizer, rows=rows, **more)
    source = getattr(trainer.source, "source", trainer.source)
    notes = [str(w.message) for w in caught if issubclass(w.category, DataNote)]
    return [{k: row[k] for k in IDS if k in row} for row in source.rows], notes


@pytest.mark.parametrize("method", ROWS)
def test_every_method_sends_plain_rows_through_the_template(method: str, tmp_path: Path) -> None:
    rows, written = ROWS[method], [_as_messages(r) for r in ROWS[method]]
    plain, said = tokens(method, rows, tmp_path, MARKS)
    messages, silent = tokens(method, written, tmp_path, MARKS)
    assert plain == messages and not silent
    assert said and all("data.as_chat=false takes them as they are" in s for s in said)
    bare, said = tokens(method, rows, tmp_path, MARKS, as_chat=False)
    without, silent = tokens(method, rows, tmp_path, None)
    assert bare == without != plain and not silent
    assert said and all("data.as_chat=true sends them through it" in s for s in said)


def test_rewards_see_the_prompts_as_they_were_written(tmp_path: Path) -> None:
    from rlhf_nb import GRPOConfig, GRPOTrainer

    seen: list[Any] = []

    def look(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
        seen.extend([*prompts, *completions])
        return [float(len(c)) for c in completions]

    config = GRPOConfig.preset(
        "toy",
        output_dir=str(tmp_path / "run"),
        data={"path": "toy"},
        console=False,
        mini_batch_size=4,
        num_generations=2,
        steps=1,
    )
    GRPOTrainer(
        config,
        toy.build_model(0, "tiny"),
        set_chat_template(toy.build_tokenizer(), MARKS),
        reward=look,
        rows=ROWS["grpo"],
    ).fit()
    assert seen and all(isinstance(x, str) for x in seen)


def test_asked_for_without_a_template(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="data.as_chat is true, but the tokenizer has no chat template.*model.chat_template=chatml"
    ):
        tokens("sft", ROWS["sft"], tmp_path, None, as_chat=True)


def test_a_template_that_rewrites_answers_is_left_alone(tmp_path: Path) -> None:
    upper = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | upper if loop.last else m['content'] }}{% endfor %}{% if add_generation_prompt %}say{% endif %}"
    plain, said = tokens("sft", ROWS["sft"], tmp_path, upper)
    assert plain == tokens("sft", ROWS["sft"], tmp_path, None)[0] and "data.as_chat=true" in said[0]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model that has a chat template."""
    where = tmp_path_factory.mktemp("chat")
    save_model(toy.build_model(0, "tiny"), set_chat_template(toy.build_tokenizer(), MARKS), where, verify=False)
    return str(where)


@pytest.mark.parametrize("command", ["data", "doctor", "sft"])
def test_the_commands_say_so_in_one_line(command: str, chat_model: str, tmp_path: Path) -> None:
    from rlhf_nb.train.rlaif import append_rows

    append_rows(tmp_path / "rows.jsonl", ROWS["sft"])
    model, file = f"model.name_or_path={chat_model}", str(tmp_path / "rows.jsonl")
    words = {
        "data": ["data", file, "--model", chat_model],
        "doctor": ["doctor", "sft", model, f"data.path={file}"],
        "sft": [
            "sft",
            model,
            f"data.path={file}",
            f"output_dir={tmp_path / 'run'}",
            "device=cpu",
            "mini_batch_size=2",
            "steps=1",
        ],
    }[command]
    said = {
        setting: " ".join(
            CliRunner().invoke(app, [*words, f"data.as_chat={setting}"], env={"COLUMNS": "500"}).output.split()
        )
        for setting in ("auto", "false")
    }
    if command == "data":  # rows are shown as the model will see them
        assert "Visitor: Where do otters live?" in said["auto"] and "Visitor:" not in said["false"]
    assert "as a user's message" in said["auto"] and "as a user's message" not in said["false"]
    assert "data.as_chat=true" in said["false"]
