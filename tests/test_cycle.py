"""The circle: a turn that is killed goes on without losing or repeating anything; a trial is decided by what a server's users say."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from crowd import simulate
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.core import ConfigError, RunError
from rlhf_nb.data import toy
from rlhf_nb.feedback.store import Feedback, FeedbackStore
from rlhf_nb.feedback.versions import Versions, promote_version
from rlhf_nb.models.load import save_model
from rlhf_nb.pipeline import cycle
from rlhf_nb.pipeline.cycle import CycleConfig, run_cycle
from rlhf_nb.serve.site import version_of
from rlhf_nb.train.sft import SFTConfig
from rlhf_nb.train.stage import run_stage
from rlhf_nb.widgets.labels import make_pairs

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.filterwarnings("ignore")


def ask(store: FeedbackStore, prompts: int, seed: int = 7) -> None:
    """Let users of the toy world choose between answers of its guides."""
    rows = [row["prompt"] for row in toy.train_prompts(prompts, seed=seed)]
    speakers = {name: [toy.speak(p, name, random.Random(i)) for i, p in enumerate(rows)] for name in toy.PERSONAS}
    for who, x in simulate(make_pairs(rows, speakers), users=8, poison=0.0, seed=seed):
        store.add(who, x)


def settings(folder: Path, **more: Any) -> CycleConfig:
    """Of a cycle whose first model is tiny and whose store has feedback."""
    store = FeedbackStore(folder / "feedback.jsonl")
    if not store.path.exists():
        ask(store, 30)
        save_model(toy.build_model(0, "tiny"), toy.build_tokenizer(), folder / "start")
    return CycleConfig(
        feedback=str(store.path), models=str(folder / "models"), start=str(folder / "start"), least_pairs=20, console=False, **more
    )  # fmt: skip


class Killed(BaseException):
    """Ends a turn where a kill would: no handler of the code under test catches it."""


def killed(config: CycleConfig, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that ends just before `where`."""
    owner, name = (Versions, where) if hasattr(Versions, where) else (cycle, where)
    old = getattr(owner, name)

    def die(*args: Any, **kwargs: Any) -> Any:
        last = Path(args[0]).name == "cycle.json" if where == "write_json" else (Path(config.models) / "v2").exists()
        if last:
            raise Killed
        return old(*args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(owner, name, die)
        run_cycle(config)


@pytest.mark.parametrize("ends", ["promoted", "canary", "refused"])
@pytest.mark.parametrize("where", ["decision", "_place", "write_json"])
def test_a_turn_that_is_killed_at_its_end_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, where: str
) -> None:
    """Killed before the decision, between history and link, and before the turn is closed: the same history, and one new version."""
    if ends == "refused" and where != "write_json":
        pytest.skip("a refusal moves no link")
    times = []

    def learn(*args: Any) -> tuple[Path | None, str]:
        times.append(1)
        return (None if ends == "refused" else Path(config.start or "")), "it won"

    monkeypatch.setattr(cycle, "learn", learn)
    config = settings(tmp_path, canary=0.1 if ends == "canary" else 0.0)
    killed(
        config,
        {"promoted": "promote_version", "canary": "start_canary"}[ends] if where == "decision" else where,
        monkeypatch,
    )
    assert run_cycle(config).event == ends
    versions = Versions(config.models)
    last = [] if ends == "refused" else ["made"]
    assert [e["type"] for e in versions.history()] == ["made", "promoted", *last, ends]
    assert versions.names() == (["v1"] if ends == "refused" else ["v1", "v2"])
    assert (versions.current, versions.canary) == {
        "promoted": ("v2", None),
        "canary": ("v1", "v2"),
        "refused": ("v1", None),
    }[ends]
    assert len(times) == (2 if ends == "refused" else 1)  # a version that was made isn't learnt again
    assert not list(versions.folder.glob(".*")) and (versions.folder / "cycles" / "1" / "cycle.json").is_file()
    assert run_cycle(config).event == ("waits" if ends == "canary" else "nothing new")


@pytest.mark.parametrize(("event", "code"), [("promoted", 0), ("refused", 3), ("nothing new", 0)])
def test_scripts_see_how_a_turn_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, code: int) -> None:
    """Exit code 3 says that the new version was refused, 0 that there is nothing to look after, 1 that it could not be done."""
    config = settings(tmp_path)
    monkeypatch.setattr(cycle, "learn", lambda *args: (None if event == "refused" else tmp_path / "start", "said so"))
    if event == "nothing new":
        run_cycle(config)
    words = ["cycle", str(config.feedback), "--models", config.models, f"start={config.start}", "least_pairs=20"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code and done.output.lstrip().splitlines()[-2].startswith(event), done.output
    monkeypatch.setattr(cycle, "run_cycle", lambda *args: cycle.CycleTurn("rolled back", "v1", "users complain"))
    assert CliRunner().invoke(app, words).exit_code == 3
    assert CliRunner().invoke(app, [*words, "canari=1"]).exit_code == 1


def test_a_trial_is_decided_by_what_a_servers_users_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server names versions by their weights, the cycle by v1, v2: both count, and thumbs alone teach nothing new."""
    config = settings(tmp_path, canary=0.2, canary_votes=20)
    torch.manual_seed(1)
    save_model(toy.build_model(1, "tiny"), toy.build_tokenizer(), tmp_path / "better")
    monkeypatch.setattr(cycle, "learn", lambda *args: (tmp_path / "better", "it won"))
    assert run_cycle(config).event == "canary"
    store, versions = FeedbackStore(config.feedback or ""), Versions(config.models)
    served = {n: version_of(str(versions.folder / link)) for n, link in (("v1", "current"), ("v2", "canary"))}
    for i in range(30):
        store.add(
            f"user-{i % 8}", Feedback("rating", "up" if i % 3 else "down", versions=(served["v1"] if i % 2 else "v1",))
        )
        store.add(f"user-{i % 8}", Feedback("rating", "up", versions=(served["v2"],)))
    done = run_cycle(config)
    assert done.event == "promoted" and "100% of 30 thumbs" in done.reason and versions.current == "v2"
    assert run_cycle(config).event == "nothing new"
    ask(store, 5, seed=8)
    assert run_cycle(config).event == "canary" and versions.canary == "v3"


def test_what_is_wrong_is_said_before_anything_is_made(tmp_path: Path) -> None:
    config = settings(tmp_path, learn="ppo", ppo={"kl_coeff": 0.2})
    with pytest.raises(ConfigError, match="kl_coef'"):
        run_cycle(config)
    assert not Path(config.models).exists()


def test_a_turn_that_was_begun_with_another_model_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody promotes another version while a turn is interrupted: rows and stages of the old model aren't used."""
    config, heard = settings(tmp_path), list[str]()

    def stop(*args: Any) -> Any:
        raise RunError("stopped")

    monkeypatch.setattr(cycle, "learn", stop)
    with pytest.raises(RunError, match="stopped"):
        run_cycle(config)
    versions = Versions(config.models)
    promote_version(versions, cycle.add_version(versions, tmp_path / "start", "by hand"), "by hand")
    monkeypatch.setattr(cycle, "learn", lambda *args: (tmp_path / "start", f"learnt from {Path(args[2]).name}"))
    done = run_cycle(config, heard.append)
    assert done.version == "v3" and done.reason == "learnt from v2" and "begins anew" in heard[0]


@pytest.mark.slow
def test_a_turn_with_ppo_goes_on_after_kills_and_gives_the_same_model(tmp_path: Path) -> None:
    """The command, killed while the judge is trained and while PPO is, typed again: the weights of a turn that nobody disturbed."""
    save_model(toy.build_model(0), toy.build_tokenizer(), tmp_path / "untrained")
    begin = {"output_dir": str(tmp_path / "sft"), "model": {"name_or_path": str(tmp_path / "untrained")}}
    start = run_stage(SFTConfig.preset("toy", console=False, device="cpu", **begin)).model
    ask(FeedbackStore(tmp_path / "feedback.jsonl"), 600)
    base = [sys.executable, "-m", "rlhf_nb", "cycle", str(tmp_path / "feedback.jsonl"), f"start={start}", "--toy", "learn=ppo", "device=cpu"]  # fmt: skip
    words = ["reward.epochs=4", "gates.reward_accuracy=0.3", "gates.margin=0.5", "ppo.save_every=4"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}

    def turn(models: Path) -> str:
        return subprocess.run(
            [*base, *words, "--models", str(models)], env=env, capture_output=True, text=True, check=True
        ).stdout

    def killed_at(models: Path, stage: str, lines: int) -> None:
        log = models / "cycles" / "1" / stage / "metrics.jsonl"
        child = subprocess.Popen([*base, *words, "--models", str(models)], env=env, stdout=subprocess.DEVNULL)
        while child.poll() is None and not (log.exists() and len(log.read_bytes().splitlines()) >= lines):
            time.sleep(0.02)
        assert child.poll() is None, f"it ended before {lines} lines of {stage}"
        child.kill()
        child.wait()

    assert "promoted: v2" in turn(tmp_path / "plain")
    for stage, lines in (("judge/reward", 3), ("policy/ppo", 3), ("policy/ppo", 12)):
        killed_at(tmp_path / "killed", stage, lines)
    assert "promoted: v2" in turn(tmp_path / "killed")
    one, two = (Versions(tmp_path / m) for m in ("plain", "killed"))
    weights = [v.folder / "current" / "model.safetensors" for v in (one, two)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [(e["type"], e["reason"]) for e in one.history()] == [(e["type"], e["reason"]) for e in two.history()]


def test_the_older_name_of_a_turn_is_known_for_one_version() -> None:
    with pytest.warns(FutureWarning, match="CycleTurn"):
        assert cycle.Turn is cycle.CycleTurn
