"""`--toy` without a reward maximises the world's proxy and says so; what is missing is named at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhf_nb import PPOConfig
from rlhf_nb.cli.main import app
from rlhf_nb.cli.settings import load_config
from rlhf_nb.data.worlds import FIRST_WORLD
from rlhf_nb.pipeline.doctor import for_this_machine
from rlhf_nb.train.online import load_reward
from rlhf_nb.train.registry import methods
from rlhf_nb.train.stage import with_proxy

ONLINE = [name for name, m in methods().items() if m.online and m.config.has("reward")]


@pytest.mark.parametrize("name", ONLINE)
def test_the_proxy_is_taken_and_gold_watched(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = with_proxy(name, load_config(name, None, [], toy=True))
    assert config.reward == "proxy" and "the world's proxy is maximised (reward=proxy" in capsys.readouterr().err
    reward, watched = load_reward(config)
    assert reward.fns == [FIRST_WORLD.taste] and reward.names == ["proxy"] and watched == {"gold": FIRST_WORLD.gold}
    named = with_proxy(name, load_config(name, None, ["reward=check"], toy=True))
    entries = with_proxy(name, load_config(name, None, ["rewards=[{verify: number}]"], toy=True))
    assert load_config(name, None, [], toy=True).reward is None, "config and doctor show what was said"
    assert (named.reward, entries.reward) == ("check", None)
    if named.has("episodes"):  # an environment pays
        assert with_proxy(name, load_config(name, None, ["episodes.environment=toy"], toy=True)).reward is None
    assert not capsys.readouterr().err


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


@pytest.fixture
def large(tmp_path: Path) -> str:
    """A folder with the config of a model of 135 million parameters, and no weights."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    from rlhf_nb.data import toy

    LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    toy.build_tokenizer().save_pretrained(tmp_path / "model")
    save_file({}, tmp_path / "model" / "model.safetensors")
    return str(tmp_path / "model")


def test_what_was_not_said_fits_this_machine(large: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less memory, less of everything that nothing was said of; the file of the run says what, and is resumed with it."""
    out = ["device=cpu", f"output_dir={tmp_path / 'run'}", f"model={large}", "data=toy"]

    def on(free: float, *said: str, resume: bool = False) -> tuple[PPOConfig, str]:
        monkeypatch.setattr("rlhf_nb.pipeline.doctor.free_bytes", lambda device: free)
        return for_this_machine(PPOConfig.load(None, [*out, *said]), resume)  # type: ignore[no-any-return]

    much, told = on(1e12)
    assert (much.rollout_batch_size, much.mini_batch_size, much.model.lora, much.recompute) == (32, 32, None, False)
    assert "rollout_batch_size=32 mini_batch_size=32" in told and "(cpu, 1000.0 GB free)" in told
    little, told = on(1e9)
    assert little.token_budget == 1024 and little.recompute and little.model.lora is not None
    assert little.optimizer.lr == 3e-5 and told.endswith("token_budget=1024 recompute=true model.lora.r=16")
    said = ("token_budget=4096", "recompute=false", "model.lora=null", "rollout_batch_size=512", "mini_batch_size=64")
    assert on(1e9, *said) == (PPOConfig.load(None, [*out, *said]), "")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(little.to_yaml())
    assert on(1e12)[0] == much, "a run that is made anew isn't its predecessor"
    again, told = on(1e12, resume=True)
    assert again.to_dict() == little.to_dict() and not told, "a run that was begun keeps its sizes"
    assert for_this_machine(PPOConfig.load(None, ["model=toy"]))[1] == ""
