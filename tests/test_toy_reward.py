"""`--toy` without a reward maximises the world's proxy and says so; what is missing is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.cli.settings import load_config
from rlhf_nb.data.worlds import FIRST_WORLD
from rlhf_nb.train.online import load_reward
from rlhf_nb.train.registry import methods

ONLINE = [name for name, m in methods().items() if m.online and m.config.has("reward")]


@pytest.mark.parametrize("name", ONLINE)
def test_the_proxy_is_taken_and_gold_watched(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(name, None, [], toy=True)
    assert config.reward == "proxy" and "the world's proxy is maximised (reward=proxy" in capsys.readouterr().err
    reward, watched = load_reward(config)
    assert reward.fns == [FIRST_WORLD.taste] and reward.names == ["proxy"] and watched == {"gold": FIRST_WORLD.gold}
    named = load_config(name, None, ["reward=check"], toy=True)
    entries = load_config(name, None, ["rewards=[{verify: number}]"], toy=True)
    assert (named.reward, entries.reward) == ("check", None) and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "missing"),
    [
        ("grpo", "model.name_or_path, data.path, reward"), ("grpo data.path=x.jsonl", "model.name_or_path, reward"),
        ("ppo model.name_or_path=toy data.path=toy", "reward"), ("distill data.path=x", "model.name_or_path, teacher"),
        ("sweep grpo kl_coef=0,0.1", "model.name_or_path, data.path, reward"), ("dpo", "model.name_or_path, data.path"),
    ],
)  # fmt: skip
def test_all_that_is_missing_is_named_at_once(typed: str, missing: str) -> None:
    said = CliRunner().invoke(app, typed.split())
    assert said.exit_code == 1 and f"not set: {missing}." in said.output, said.output
    line = next(x for x in said.output.splitlines() if x.startswith("  rlhf-nb"))
    assert all(f"{key}=" in line for key in missing.split(", "))


def test_toy_grpo_without_a_reward_trains(tmp_path: Path) -> None:
    said = CliRunner().invoke(
        app, f"grpo --toy steps=1 mini_batch_size=8 data.eval_size=null output_dir={tmp_path}/r".split()
    )
    assert said.exit_code == 0 and "rewards/proxy" in (tmp_path / "r" / "metrics.jsonl").read_text(), said.output
