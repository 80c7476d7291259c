"""Tokens kept on disk: the same rows, made once, never taken for a run that would make others."""

from __future__ import annotations

import json
import multiprocessing
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from rlhf_nb import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from rlhf_nb.config import merge
from rlhf_nb.data import toy
from rlhf_nb.data.cache import default_folder, kept_tokens
from rlhf_nb.data.formats import DataWarning
from rlhf_nb.data.shapes import DataNote


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    path = tmp_path / "pairs.jsonl"
    rows = [{k: r[k] for k in ("prompt", "chosen", "rejected")} for r in toy.preference_rows(40, 3)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (SFTConfig, SFTTrainer, {}), "dpo": (DPOConfig, DPOTrainer, {}), "kto": (KTOConfig, KTOTrainer, {}), "reward": (RewardConfig, RewardTrainer, {}),
    "grpo": (GRPOConfig, GRPOTrainer, {"reward": "gold"}),
}  # fmt: skip


def start(kind: str, path: str, folder: Path, tokenizer: Any = None, **more: Any) -> tuple[Any, str]:
    """A trainer, and what became of the tokens."""
    config, trainer, own = KINDS[kind]
    data = {"path": path, "cache": str(folder), "eval_size": 8, "max_length": 128, "max_prompt_length": 64}
    values = merge(
        config.preset_values("toy"), merge({"output_dir": str(folder / "run"), "data": data, "console": False}, more)
    )
    options = {"reward": lambda prompts, completions, **_: [0.0] * len(completions)} if own else {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = trainer(config(**values), toy.build_model(0, "tiny"), tokenizer or toy.build_tokenizer(), **options)
    words = [str(w.message) for w in said if issubclass(w.category, DataNote) and "tokens of" in str(w.message)]
    return made, words[0] if words else ""


def plain_rows(trainer: Any) -> list[Any]:
    source = getattr(trainer.source, "source", trainer.source)
    return [*source.rows, *trainer.held_out]


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_start_has_the_same_rows(kind: str, pairs: str, tmp_path: Path) -> None:
    plain, said = start(kind, pairs, tmp_path / "cache", data={"cache": False})
    assert not said
    first, said = start(kind, pairs, tmp_path / "cache")
    assert " kept (" in said, said
    again, said = start(kind, pairs, tmp_path / "cache", optimizer={"lr": 3e-4}, mini_batch_size=8)
    assert " found (" in said, said
    assert plain_rows(plain) == plain_rows(first) == plain_rows(again) and len(plain_rows(again)) > 8
    assert plain.source.state_dict() == again.source.state_dict(), "a checkpoint of one fits the other"


def test_what_changes_tokens_changes_the_key(pairs: str, tmp_path: Path) -> None:
    def kept(path: str = pairs, kind: str = "dpo", tokenizer: Any = None, **more: Any) -> bool:
        return " kept (" in start(kind, path, tmp_path / "cache", tokenizer, **more)[1]

    assert kept() and not kept()
    other = toy.build_tokenizer()
    other.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for change in (
        {"tokenizer": other},
        {"data": {"max_length": 99}},
        {"data": {"eval_size": 9}},
        {"data": {"dedup": False}},
        {"kind": "reward"},
        {"seed": 3},
    ):
        assert kept(**change) and not kept(**change), change
    assert not kept(beta=0.3) and kept(kind="kto") and kept(kind="kto", loss="bco"), (
        "a method says which of its settings count"
    )
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(Path(pairs).read_bytes())
    assert not kept(str(moved)), "contents count, not names"
    moved.write_bytes(Path(pairs).read_bytes().replace(b"Pip", b"Pop", 1))
    assert kept(str(moved))
    assert (
        "not kept"
        in start("dpo", pairs, tmp_path / "cache", reference="cached", reference_cache=str(tmp_path / "ref"))[1]
    )


def test_a_method_of_a_notebook_is_not_cached(pairs: str, tmp_path: Path) -> None:
    from rlhf_nb.train.sft import SFT
    from rlhf_nb.train.tokens import token_key

    config = SFTConfig(data={"path": pairs})
    tok, model = toy.build_tokenizer(), toy.build_model(0, "tiny")
    mine = type("Mine", (SFT,), {"tokenize": lambda self, rows, warn=True: rows, "__module__": "no_such_module"})
    assert token_key(config, "sft", tok, SFT(model, tok, config)) is not None
    assert token_key(config, "sft", tok, mine(model, tok, config)) is None


def test_what_was_said_is_said_again(pairs: str, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Path(pairs).read_text().splitlines()]
    Path(pairs).write_text("\n".join(map(json.dumps, [*rows, rows[0], {**rows[1], "chosen": rows[1]["rejected"]}])))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            config = DPOConfig(
                **merge(
                    DPOConfig.preset_values("toy"),
                    {"data": {"path": pairs, "cache": str(tmp_path / "c")}, "output_dir": str(tmp_path)},
                )
            )
            DPOTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer())
        words = [str(w.message) for w in said if issubclass(w.category, DataWarning)]
        assert any("1 of 42 rows occur more than once" in w for w in words) and any(
            "identical chosen and rejected" in w for w in words
        )


def _slowly(folder: str, calls: Any, out: Any) -> None:
    def make() -> tuple[list[Any], list[str]]:
        calls.put(1)
        time.sleep(0.3)
        return [[{"ids": [i, i + 1]} for i in range(100)]], []

    sources, _, how = kept_tokens("k", Path(folder), make)
    out.put((how, sum(r["ids"][1] for r in sources[0])))


def test_ranks_that_start_together_make_tokens_once(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="this system has no file locks")
    context = multiprocessing.get_context("fork")
    calls, out = context.Queue(), context.Queue()
    ranks = [context.Process(target=_slowly, args=(str(tmp_path), calls, out)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    found = sorted(out.get(timeout=30) for _ in ranks)
    for rank in ranks:
        rank.join()
    assert found == [("found", 5050), ("found", 5050), ("kept", 5050)] and calls.get() == 1 and calls.empty()


def test_the_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "rlhf_nb" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "rlhf_nb" / "tokens"
