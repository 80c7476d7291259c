"""A reward head that is fitted before training: exact resume without a second pass, ensembles, adapters, settings that contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from resume_harness import leave_off

import rlhf_nb.train.fit_head as fit_head
import rlhf_nb.train.reward as reward
from rlhf_nb import RewardConfig, RewardTrainer
from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.models.heads import RewardModel
from rlhf_nb.run.log import read_metrics

AUTO: dict[str, Any] = {"fit_head_pairs": 64, "body_layers": "auto"}
SEVERAL: dict[str, Any] = {"fit_head_pairs": 64, "head_layers": "auto", "pooling": "both", "train_body": False}


def trainer(folder: Path, **more: Any) -> RewardTrainer:
    common = {"steps": 4, "epochs": None, "mini_batch_size": 8, "console": False, "baseline_pairs": 0}
    config = RewardConfig.preset("toy", output_dir=str(folder), **{**common, **more})
    return RewardTrainer(
        config, toy.build_model(0, "tiny"), toy.build_tokenizer(), rows=toy.preference_rows(64), eval_rows=[]
    )


def weights(run: RewardTrainer) -> dict[str, torch.Tensor]:
    return run.method.module.state_dict()


@pytest.mark.filterwarnings("ignore:head fitted")
@pytest.mark.parametrize(
    "more",
    [AUTO, {**AUTO, "ensemble_size": 2}, {"fit_head_pairs": 64, "train_body": False}, {**SEVERAL, "ensemble_size": 2}],
)
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
def test_a_fit_that_is_stopped_goes_on_behind_the_last_piece_and_tells_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = trainer(tmp_path / "a", **SEVERAL)
    read, calls = reward.difference_states, list[int]()

    def stops(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[1]))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return read(*args, **kwargs)

    class Talks(fit_head.FitPace):
        def __init__(self, tell: Any) -> None:
            super().__init__(tell, every=0.0)

    monkeypatch.setattr(reward, "difference_states", stops)
    monkeypatch.setattr(reward, "FitPace", Talks)
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "b", **SEVERAL)
    assert len(list((tmp_path / "b" / "fitting").glob("*/piece-*.safetensors"))) == 1
    again = trainer(tmp_path / "b", **SEVERAL, console=True)
    assert calls == [32, 32, 32]  # the first piece, the one that was stopped, and that one again
    assert "layers tried for the head" in capsys.readouterr().err
    ours, theirs = weights(again), weights(whole)
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    again.start()
    assert not (tmp_path / "b" / "fitting").exists() and (tmp_path / "b" / fit_head.HEAD_FILE).exists()


@pytest.mark.filterwarnings("ignore:head fitted")
def test_a_head_on_several_layers_is_saved_and_loaded(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", **SEVERAL)
    run.fit()
    run.method.save_model(tmp_path / "model")
    again = RewardModel.load(tmp_path / "model")
    batch = run.method.collate(run.method.tokenize(toy.preference_rows(4, seed=5))).completions()
    torch.testing.assert_close(again.score(batch), run.members[0].score(batch), rtol=1e-4, atol=1e-5)
    assert again.decoder.layers == tuple(run.method.fitted[1].about["layers"])  # type: ignore[index]
    chosen = trainer(tmp_path / "by-hand", head_layers=[1, 2], steps=1)
    assert chosen.members[0].head.last.in_features == 2 * chosen.members[0].config.hidden_size


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
        ({"head_layers": "auto"}, "fit_head_pairs=5000"),
        ({"head_layers": [1], "body_layers": 1}, "Leave one"),
        ({"head_layers": [1, 2], "head": "mlp"}, "only a linear head"),
        ({"head_layers": [2, 1]}, "in order"),
        ({"head_layers": [1], "model": {"name_or_path": "toy", "lora": {"r": 2}}}, "adapter"),
        ({"body_layers": 9}, "1 to 2"),
        ({"fit_head_pairs": 4}, "too few"),
    ],
)
def test_what_cannot_be_done_is_said(more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        trainer(tmp_path / "run", **more)
