"""Tasks of the lm-eval harness on a loaded model give what the harness gives for its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install lm-eval")

from rlhf_nb.bench.lm_eval import run_tasks
from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.models.load import save_model

CHOICE = """\
task: park_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
WRITTEN = """\
task: park_written
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TEXT = """\
task: park_text
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}{{choices[0]}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
TASKS = ["park_choice", "park_written", "park_text"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and three tasks."""
    folder = tmp_path_factory.mktemp("harness")
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    save_model(toy.build_model(0, "tiny"), toy.build_tokenizer(), folder / "model")
    rows = toy.preference_rows(12, labels="gold")
    lines = [
        json.dumps({"question": r["prompt"], "choices": [r["chosen"], r["rejected"]], "answer": i % 2})
        for i, r in enumerate(rows)
    ]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for name, text in zip(TASKS, (CHOICE, WRITTEN, TEXT)):
        (folder / f"{name}.yaml").write_text(text.replace("FILE", str(folder / "rows.jsonl")))
    return folder


def answers(found: dict[str, Any], task: str) -> list[Any]:
    """What the model said to each question."""
    rows = sorted(found["samples"][task], key=lambda s: s["doc_id"])
    return [s["resps"] for s in rows]


def flat(values: Any) -> list[float]:
    return [x for v in values for x in flat(v)] if isinstance(values, list | tuple) else [values]


def test_equal_to_its_own_model(place: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(place / "model"),
        AutoTokenizer.from_pretrained(place / "model"),
    )
    ours = run_tasks(model, tokenizer, TASKS, include=str(place))
    theirs = simple_evaluate(
        model="hf", model_args=f"pretrained={place / 'model'},dtype=float32,device=cpu", tasks=TASKS, task_manager=TaskManager(include_path=str(place)),
        batch_size=4, bootstrap_iters=0,
    )  # fmt: skip
    for task in TASKS:
        a, b = ours["results"][task], theirs["results"][task]
        for key in (k for k in b if isinstance(b[k], float) and "stderr" not in k):
            assert a[key] == pytest.approx(b[key], rel=1e-5), (task, key)
    assert answers(ours, "park_written") == answers(theirs, "park_written")
    for task in ("park_choice", "park_text"):
        assert [float(x) for x in flat(answers(ours, task))] == pytest.approx(
            [float(x) for x in flat(answers(theirs, task))], abs=2e-3
        ), task


def test_a_mistyped_task(place: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'park_choice'"):
        run_tasks(toy.build_model(0, "tiny"), toy.build_tokenizer(), ["park_choise"], include=str(place))
