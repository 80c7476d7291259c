"""How a run ends on the command line: what went wrong is named, and the commands that are suggested run."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from command import call

from rlhf_nb.data import toy
from rlhf_nb.models.heads import RewardModel
from rlhf_nb.models.load import save_model
from rlhf_nb.pipeline.results import show_results
from rlhf_nb.run.health import CHECKS
from rlhf_nb.sequential import ALPHA

TOK = toy.build_tokenizer()
TINY = "--toy model.name_or_path=tiny data.eval_size=8 rollout_batch_size=16 mini_batch_size=16 log_every=100".split()
GROUPS = [*TINY, "num_generations=4"]
REWARDS = """\
def brief(prompts, completions):
    return [-float(len(text.split())) for text in completions]

def blind(prompts, completions):
    return [1.0 for text in completions]
"""
PLANTED = {  # command, settings, and what must be named at the end
    "length collapse": (
        ["grpo", *GROUPS, "rewards=[{file: rewards.py, fn: brief}]", "steps=24", "optimizer.lr=0.01"],
        {"length": "bad"},
    ),
    "dead groups, cut answers": (
        ["grpo", *GROUPS, "rewards=[{file: rewards.py, fn: blind}]", "steps=3", "sampling.max_new_tokens=3"],
        {"groups": "bad", "cut answers": "bad"},
    ),
    "no KL, dead critic": (
        ["ppo", *TINY, "reward=rm", "kl_coef=0", "vf_coef=0", "num_inner_epochs=1", "steps=10"],
        {"KL": "bad", "value": "bad"},
    ),
    "healthy": (["sft", "--toy", "model.name_or_path=tiny", "steps=4", "data.eval_size=8", "log_every=100"], {}),
}


def lights(shown: str) -> dict[str, str]:
    """Name and state of each light that has a sentence."""
    said = shown.split("health:\n", 1)[1].split("Done in", 1)[0]
    rows = [line.split(None, 1) for line in said.splitlines() if line.startswith("  ")]
    return {rest.split(":")[0]: state for state, rest in rows if state != "ok"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an untrained policy and a reward model of its size."""
    folder = tmp_path_factory.mktemp("models")
    save_model(toy.build_model(0, "tiny"), TOK, folder / "tiny")
    RewardModel.from_policy(toy.build_model(1, "tiny"), seed=1).save(folder / "rm", TOK)
    return folder


@pytest.mark.parametrize("disease", PLANTED)
def test_what_went_wrong_is_named_at_the_end_and_the_next_lines_run(
    disease: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    for name in ("tiny", "rm"):
        (tmp_path / name).symlink_to(models / name)
    words, wanted = PLANTED[disease]
    shown = call(*words)
    found = lights(shown)
    assert wanted.items() <= found.items(), shown
    if not wanted:
        assert "bad" not in found.values() and "watch" not in found.values()
    following = shown.split("Next:\n")[1].strip().splitlines()
    assert following and all(line.strip().startswith("rlhf-nb ") for line in following)
    if disease == "healthy":
        for line in following:
            call(*shlex.split(line)[1:])


def test_a_pipeline_ends_with_a_question_of_its_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What to type next is said of the last run as its own end says it: by its data and the model it began with."""
    save_model(toy.build_model(0, "tiny"), TOK, tmp_path / "ppo" / "model")
    (tmp_path / "ppo" / "config.yaml").write_text("model: {name_or_path: runs/sft/model}\ndata: {path: toy}\n")
    show_results(
        {"samples": [], "policies": {"ppo": {"gold": 1.0, "gold_std": 0.1, "length": 3.0}}, "stages": {}}, tmp_path
    )
    assert f"sample {tmp_path}/ppo/model 'Visitor:" in capsys.readouterr().out


def test_the_light_of_lengths_is_seldom_wrong_and_sees_a_collapse() -> None:
    """Lengths that only jump about get no light however often one looks; those that shrink or swell get one."""
    rng, wrong, runs, t = np.random.default_rng(0), 0, 40, np.arange(1.0, 61)
    for _ in range(runs):
        flat = 20 * np.exp(0.6 * rng.normal(size=60))  # many are more than twice others
        looks = (CHECKS["length"]({"completions/mean_length": (t[:n], flat[:n])}, {}) for n in range(6, 61, 6))
        wrong += any(said is not None and said[0] != "ok" for said in looks)
    assert wrong <= (ALPHA + 2 * (ALPHA * (1 - ALPHA) / runs) ** 0.5) * runs
    for last, state, word in ((1.1, "bad", "shrank"), (300.0, "watch", "swelled")):
        curve = np.geomspace(27, last, 60) * np.exp(0.1 * rng.normal(size=60))
        said = CHECKS["length"]({"completions/mean_length": (t, curve)}, {})
        assert said is not None and said[0] == state and word in said[1]
