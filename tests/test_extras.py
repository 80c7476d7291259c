"""A package that isn't installed is one sentence that names it, its pip line and its extra: for every extra and what needs it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from command import call

from rlhf_nb.data import toy
from rlhf_nb.feedback.store import Feedback, FeedbackStore
from rlhf_nb.models.load import save_model

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--toy", "model.name_or_path=tiny", "steps=1", "data.eval_size=4", "console=false"]
NEEDS = {  # extra: packages that are hidden, and command lines that need one of them
    "serve": (
        ["fastapi", "uvicorn", "prometheus_client"],
        ["serve tiny", "serve tiny --page"],
    ),
    "gguf": (["gguf"], ["sample some.gguf Hi"]),
    "constrain": (["llguidance"], ["sample tiny Hi --decoder constrained:(yes|no)"]),
    "pii": (["presidio_analyzer"], ["feedback said.jsonl --export pairs.jsonl --scrub"]),
    "trackers": (
        ["tensorboard", "tensorboardX", "wandb", "trackio"],
        [f"sft TINY trackers=[{name}]" for name in ("tensorboard", "wandb", "trackio")],
    ),
    "qlora": (["bitsandbytes"], ["sft TINY model.lora.quantize_4bit=true", "sft TINY optimizer.name=adamw_8bit"]),
    "deepspeed": (["deepspeed"], ["launch sft TINY -n 1 --strategy zero2"]),
    "verify": (
        ["jsonschema"],
        ["grpo TINY rollout_batch_size=4 mini_batch_size=4 num_generations=2 'rewards=[{verify: json, schema: {}}]'"],
    ),
    "ray": (["ray"], ["grpo TINY rollout_batch_size=4 mini_batch_size=4 num_generations=2 rollouts.ray=local"]),
    "games": (
        ["gymnasium", "reasoning_gym", "textarena"],
        [
            f"grpo TINY rollout_batch_size=4 mini_batch_size=4 num_generations=2 episodes.environment={name} episodes.options.{key}=x"
            for name, key in (("gymnasium", "game"), ("reasoning-gym", "dataset"), ("textarena", "game"))
        ],
    ),
    "math": (
        ["math_verify"],
        ["grpo TINY rollout_batch_size=4 mini_batch_size=4 num_generations=2 'rewards=[{verify: math}]'"],
    ),
}  # fmt: skip
OTHER = {
    "browser",
    "dev",
    "docs",
    "learn",
    "test",
}  # for those who work on the package, and a Jupyter to read lessons in


def test_every_extra_is_here_and_in_the_guide() -> None:
    extras = set(re.findall(r"(\w+)_requirements =", (ROOT / "settings.ini").read_text(encoding="utf-8")))
    assert extras - OTHER == set(NEEDS)
    guide = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert all(f"| `{extra}` |" in guide for extra in NEEDS)


@pytest.mark.parametrize(("extra", "line"), [(extra, line) for extra, (_, lines) in NEEDS.items() for line in lines])
def test_what_is_not_installed_is_one_sentence(
    extra: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(toy.build_model(0, "tiny"), toy.build_tokenizer(), tmp_path / "tiny")
    (tmp_path / "some.gguf").write_bytes(b"GGUF" + bytes(64))
    words_said = Feedback("rating", "up", "Hi", ("Hello.",), ("v1",), consent=True)
    FeedbackStore(tmp_path / "said.jsonl").add("ada", words_said)
    for name in [*sys.modules]:  # what has been imported with them is imported anew, without
        if name.startswith("rlhf_nb.serve") or name.split(".")[0] in NEEDS[extra][0]:
            monkeypatch.delitem(sys.modules, name)
    for package in NEEDS[extra][0]:
        monkeypatch.setitem(sys.modules, package, None)
    words = [w for word in re.findall(r"'[^']*'|\S+", line) for w in (TINY if word == "TINY" else [word.strip("'")])]
    shown = call(*words, code=1)
    assert "pip install " in shown and f"`{extra}`" in shown and "unexpected" not in shown
    assert len([text for text in shown.splitlines() if text.startswith("Error")]) == 1
