"""A reward head that is fitted before training: exact resume without a second pass, ensembles, adapters, settings that contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resume_harness import leave_off

import rlhf_nb.train.reward as reward
from rlhf_nb import RewardConfig, RewardTrainer
from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.run.log import read_metrics

AUTO: dict[str, Any] = {"fit_head_pairs": 64, "body_layers": "auto"}


def trainer(folder: Path, **more: Any) -> RewardTrainer:
    common = {"steps": 4, "epochs": None, "mini_batch_size": 8, "console": False, "baseline_pairs": 0}
    config = RewardConfig.preset("toy", output_dir=str(folder), **{**common, **more})
    return RewardTrainer(
        config, toy.build_model(0, "tiny"), toy.build_tokenizer(), rows=toy.preference_rows(64), eval_rows=[]
    )


def weights(run: RewardTrainer) -> dict[str, torch.Tensor]:
    return run.method.module.state_dict()


@pytest.mark.filterwarnings("ignore:head fitted")
@pytest.mark.parametrize("more", [AUTO, {**AUTO, "ensemble_size": 2}, {"fit_head_pairs": 64, "train_body": False}])
def test_goes_on_bit_by_bit_and_fits_once(
    more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, first = trainer(tmp_path / "a", **more), trainer(tmp_path / "b", **more)
    body = [p.clone() for p in straight.members[0].decoder.parameters()]
    straight.fit()
    same = [torch.equal(a, b) for a, b in zip(body, straight.members[0].decoder.parameters(), strict=True)]
    assert all(same) == (not more.get("train_body", True))
    leave_off(first)

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("fitted again")

    monkeypatch.setattr(reward, "difference_states", never)
    again = trainer(tmp_path / "b", **more)
    again.fit(resume=True)
    ours, theirs = weights(again), weights(straight)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    told = [e for e in read_metrics(tmp_path / "b") if e["type"] == "fit"]
    assert len(told) == 1 and told[0]["pairs"] == 64
    with pytest.raises(AssertionError, match="again"):  # another seed draws other pairs for members, other rows ...
        trainer(tmp_path / "b", **{**more, "seed": 1})


@pytest.mark.filterwarnings("ignore:head fitted")
def test_members_differ_and_an_adapter_may_follow(tmp_path: Path) -> None:
    both = trainer(tmp_path / "two", **AUTO, ensemble_size=2)
    a, b = (m.head.last.weight for m in both.members)
    assert (
        not torch.equal(a, b) and both.members[0].config.num_hidden_layers == both.members[1].config.num_hidden_layers
    )
    with pytest.raises(ConfigError, match="adapter"):
        trainer(tmp_path / "no", **AUTO, model={"name_or_path": "toy", "lora": {"r": 2}})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"fit_head_pairs": 64, "head": "mlp"}, "only a linear head"),
        ({"body_layers": "auto"}, "fit_head_pairs=5000"),
        ({"body_layers": 9}, "1 to 2"),
        ({"fit_head_pairs": 4}, "too few"),
    ],
)
def test_what_cannot_be_done_is_said(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path / "run", **more)
