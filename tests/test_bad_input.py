"""Whatever goes wrong ends in one clear sentence, and nothing that was done is lost."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import DataError, RewardError
from rlhf_nb.data import toy
from rlhf_nb.data.formats import to_format
from rlhf_nb.models.load import load_tokenizer, save_model
from rlhf_nb.run import checkpoint
from rlhf_nb.run.checkpoint import latest_complete
from rlhf_nb.run.log import read_metrics
from rlhf_nb.train.ppo import PPOConfig, PPOTrainer
from rlhf_nb.train.sft import SFTConfig, SFTTrainer

torch.set_num_threads(1)  # small models, and other tests beside these
runner = CliRunner()
ROWS = [{k: r[k] for k in ("prompt", "completion")} for r in toy.sft_rows(48)]


def write(path: Path, rows: list[Any]) -> Path:
    """Rows as a JSONL file."""
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Settings of a tiny SFT run of six steps, with a checkpoint after each."""
    data = write(tmp_path / "rows.jsonl", ROWS)
    return [
        f"data.path={data}",
        f"output_dir={tmp_path / 'run'}",
        "steps=6",
        "mini_batch_size=4",
        "save_every=1",
        "console=false",
        "async_save=false",
    ]


def fails(*args: str, says: tuple[str, ...], code: int = 1) -> str:
    """Run a command that must fail with one sentence on standard error that holds these words; returns it."""
    result = runner.invoke(app, list(args))
    assert result.exit_code == code, result.output
    lines = [line for line in result.stderr.strip().splitlines() if not line.startswith("Note:")]
    assert len(lines) == 1 and "Traceback" not in result.output, result.output
    assert lines[0].endswith((".", "?", "!")) or code == 130
    for word in says:
        assert word in lines[0], (word, lines[0])
    return lines[0]


def works(*args: str) -> Any:
    """Run a command that must end well."""
    result = runner.invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result


def steps(run: Path) -> list[int]:
    """The steps in a run's log."""
    return [e["step"] for e in read_metrics(run) if e["type"] == "step"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("optimizer.lrr=1e-3", ("optimizer.lrr", "Did you mean 'optimizer.lr'?")),
        ("optimizer.lr=fast", ("optimizer.lr", "'fast'", "a number")),
        ("steps=many", ("steps", "'many'", "a whole number")),
        ("seed", ("'seed'", "key=value")),
        ("mini_batch_size=0", ("mini_batch_size", "≥ 1")),
        ("data.max_prompt_length=5000", ("max_prompt_length", "5000", "no room is left")),
    ],
)
def test_wrong_key_and_wrong_type(setting: str, says: tuple[str, ...]) -> None:
    fails("sft", "--toy", setting, says=says)


def test_wrong_config_file(tmp_path: Path) -> None:
    fails("sft", "--config", str(tmp_path / "none.yaml"), says=("none.yaml", "doesn't exist"))
    (tmp_path / "bad.yaml").write_text("seed: [1\n")
    fails("sft", "--config", str(tmp_path / "bad.yaml"), says=("bad.yaml", "line"))
    fails("run", "--config", "hh_smal", says=("Did you mean 'hh_small'?",))
    fails("config", "show", "stf", says=("Did you mean 'sft'?",))
    result = runner.invoke(app, ["ppo"])
    assert result.exit_code == 1 and "not set: model.name_or_path, data.path, reward" in result.stderr
    assert result.stderr.splitlines()[-1].strip() == "rlhf-nb ppo --toy"


def test_debug_shows_the_traceback() -> None:
    result = runner.invoke(app, ["sft", "--toy", "sed=1", "--debug"])
    assert result.exit_code == 1 and type(result.exception).__name__ == "ConfigError"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"quest": "hi", "answ": "ho"}], ("row 0", "quest")),
        ([], ("empty", "rows.jsonl")),
        ([{"prompt": "Visitor: hi\nPip:", "completion": ""}] * 3, ("empty completion", "nothing to learn from")),
        ([{"prompt": 7, "completion": "ho"}], ("row 0", "prompt")),
    ],
    ids=["missing column", "empty dataset", "only empty completions", "not a text"],
)
def test_bad_rows(rows: list[Any], says: tuple[str, ...], options: list[str], tmp_path: Path) -> None:
    data = write(tmp_path / "rows.jsonl", rows)
    line = fails("sft", "--toy", *options, f"data.path={data}", "data.dedup=false", says=())
    assert any(word in line for word in says), line
    assert not (tmp_path / "run").exists()


def test_missing_file_and_torn_line(options: list[str], tmp_path: Path) -> None:
    fails("sft", "--toy", *options, f"data.path={tmp_path / 'row.jsonl'}", says=("row.jsonl", "rows.jsonl"))
    (tmp_path / "torn.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"prompt": "Visi')
    fails("sft", "--toy", *options, f"data.path={tmp_path / 'torn.jsonl'}", says=("torn.jsonl", "2"))


def test_some_empty_completions_are_counted_and_dropped(options: list[str], tmp_path: Path) -> None:
    data = write(tmp_path / "some.jsonl", [*ROWS, *({**r, "completion": " "} for r in ROWS[:5])])
    result = works("sft", "--toy", *options, f"data.path={data}", "data.dedup=false")
    assert "Note: 5 of 53 rows are dropped: 5 with an empty completion." in result.stderr


def test_label_outside_0_and_1() -> None:
    with pytest.raises(DataError, match=r"row 3.*label.*2"):
        to_format({"prompt": "hi", "completion": "ho", "label": 2}, where="row 3")


def test_prompt_longer_than_the_window(tmp_path: Path) -> None:
    """The toy model sees 128 tokens; a prompt and its answer of more can't be sampled."""
    rows = write(tmp_path / "long.jsonl", [{"prompt": "Visitor: " + "owls " * 200 + "\nPip:"}])
    reward = tmp_path / "rm"
    from rlhf_nb.models.heads import RewardModel

    RewardModel.from_policy(toy.build_model(0, "tiny")).save(reward, toy.build_tokenizer())
    tiny = save_model(toy.build_model(0, "tiny"), toy.build_tokenizer(), tmp_path / "tiny")
    common = [
        f"data.path={rows}",
        f"output_dir={tmp_path / 'run'}",
        "steps=1",
        "rollout_batch_size=1",
        "mini_batch_size=1",
        "console=false",
    ]
    line = fails(
        "ppo",
        "--toy",
        f"reward={reward}",
        f"model.name_or_path={tiny}",
        "data.max_prompt_length=300",
        *common,
        says=("128",),
    )
    assert "max_prompt_length" in line or "window" in line or "positions" in line
    # with the limit that fits, the prompt loses its beginning, and that is said
    shorter = ["ppo", "--toy", f"reward={reward}", f"model.name_or_path={tiny}", "data.max_prompt_length=64", *common]
    result = works(*shorter, "data.max_cut=1", "--overwrite")
    assert "Note: 1 of 1 rows (100.0%) are longer than the limits" in result.stderr
    fails(*shorter, "--overwrite", says=("1 of 1 rows lose tokens", "data.max_cut=1"))


def test_pad_equal_to_eos_still_learns_to_stop(options: list[str], tmp_path: Path) -> None:
    tokenizer = toy.build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    model = save_model(toy.build_model(0, "tiny"), tokenizer, tmp_path / "model")
    works("sft", "--toy", *options, f"model.name_or_path={model}")
    from rlhf_nb.config import ModelConfig

    saved = load_tokenizer(ModelConfig(name_or_path=str(tmp_path / "run/model")))
    assert saved.pad_token_id != saved.eos_token_id


def moody(after: int, then: Callable[[int], Any]) -> Callable[..., list[Any]]:
    """A reward function that is fine for some calls, and then is not."""
    calls = 0

    def reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        return [0.5] * len(prompts) if calls <= after else then(len(prompts))

    return reward


def broken(n: int) -> list[Any]:
    """Raises."""
    raise ValueError("the judge is out for lunch")


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (lambda n: [math.nan] * n, "nan"),
        (lambda n: [None] * n, "no reward function has an opinion"),
        (lambda n: ["good"] * n, "good"),
        (lambda n: [1.0] * (n - 1), "numbers for"),
        (broken, "the judge is out for lunch"),
    ],
    ids=["nan", "none", "text", "too few", "exception"],
)
def test_bad_reward_function_loses_nothing(then: Callable[[int], Any], says: str, tmp_path: Path) -> None:
    def trainer(reward: Any) -> PPOTrainer:
        config = PPOConfig.preset(
            "toy", output_dir=str(tmp_path / "run"), steps=4, rollout_batch_size=8, mini_batch_size=8, save_every=1, console=False,
            sampling={"max_new_tokens": 8},
        )  # fmt: skip
        return PPOTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer(), reward, toy.train_prompts(32))

    with pytest.raises(RewardError) as caught:
        trainer(moody(2, then)).fit()
    message = str(caught.value)
    assert says in message and "reward" in message
    assert steps(tmp_path / "run") == [1, 2]
    history = trainer(moody(100, then)).fit(resume=True)
    assert history.stopped is None and steps(tmp_path / "run") == [1, 2, 3, 4]


def test_nonfinite_loss_stops_and_keeps_the_weights(options: list[str], tmp_path: Path) -> None:
    fails(
        "sft",
        "--toy",
        *options,
        "optimizer.lr=1e30",
        "optimizer.warmup_steps=0",
        "max_nonfinite=1",
        says=("not finite", "step"),
    )
    assert latest_complete(tmp_path / "run/checkpoints") is not None
    assert any(e["type"] == "nonfinite" for e in read_metrics(tmp_path / "run"))


def test_full_disk_keeps_the_last_checkpoint(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = checkpoint.save_file, [8]

    def save(*args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", save)
        fails("sft", "--toy", *options, says=("disk is full", "intact"))
    kept = latest_complete(tmp_path / "run/checkpoints")
    assert kept is not None
    works("sft", "--toy", *options, "--resume")
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6] and (tmp_path / "run/model/config.json").exists()


def test_unwritable_folder(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    fails("sft", "--toy", *options, f"output_dir={tmp_path / 'file' / 'run'}", says=("cannot write", "output_dir"))


def test_folder_with_another_run_is_refused(options: list[str], tmp_path: Path) -> None:
    works("sft", "--toy", *options)
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    fails("sft", "--toy", *options, "seed=1", says=("already holds a run", "seed: 0 -> 1", "resume"))
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before
    works("sft", "--toy", *options, "seed=1", "--overwrite")
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "no manifest"])
def test_corrupt_checkpoint_is_passed_over(damage: str, options: list[str], tmp_path: Path) -> None:
    works("sft", "--toy", *options)
    newest = sorted((tmp_path / "run/checkpoints").glob("step-*"))[-1]
    largest = max(newest.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    if damage == "truncated":
        os.truncate(largest, largest.stat().st_size // 2)
    elif damage == "flipped":
        content = bytearray(largest.read_bytes())
        content[-1] ^= 1
        largest.write_bytes(bytes(content))
    else:
        (newest / "manifest.json").unlink()
    result = works("sft", "--toy", *options, "--resume")
    assert "Note:" in result.stderr and newest.name in result.stderr and "passed over" in result.stderr
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6]


def test_corrupt_model_file(options: list[str], tmp_path: Path) -> None:
    works("sft", "--toy", *options)
    weights = tmp_path / "run/model/model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    fails("sample", str(tmp_path / "run/model"), "Visitor: Where do owls live?\nPip:", says=("can't be loaded",))


def test_a_log_is_read_while_its_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, real = tmp_path / "run", Path.is_dir

    def is_dir(path: Path) -> bool:
        known = real(path)
        if path == run:
            path.mkdir(exist_ok=True)  # by the run, just after the question
        return known

    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert read_metrics(run) == read_metrics(run) == []


def test_ctrl_c_saves_and_says_how_to_go_on(options: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"

    def press() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not steps(run):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    many = [*options, "steps=400", "save_every=null"]
    thread = threading.Thread(target=press)
    thread.start()
    try:
        line = fails("sft", "--toy", *many, code=130, says=("Interrupted", "checkpoint is saved", "--resume"))
    finally:
        thread.join()
    done = steps(run)
    kept = latest_complete(run / "checkpoints")
    assert kept is not None and kept.name == f"step-{done[-1]:010d}" and f"step {done[-1]} of 400" in line
    works("sft", "--toy", *many, f"steps={done[-1] + 2}", "--resume")
    assert steps(run) == list(range(1, done[-1] + 3))


def test_a_file_without_an_end_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    """A terabyte of zeros: the first line is too long, which is said before the file's contents are hashed."""
    fuzz.sparse(tmp_path / "rows.jsonl")
    config = SFTConfig.preset(
        "toy", data={"path": str(tmp_path / "rows.jsonl")}, output_dir=str(tmp_path / "run"), steps=1
    )
    begun = time.process_time()
    with pytest.raises(DataError, match=r"line 1: .* bytes, and at most .* are read"):
        SFTTrainer(config, toy.build_model(0, "tiny"), toy.build_tokenizer())
    assert time.process_time() - begun < 5
