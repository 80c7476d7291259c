"""Decoders where people meet them: on the command line, in an evaluation, in a chat, in a run's rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rlhf_nb.bench.talk import Manner, Partner
from rlhf_nb.cli.main import app
from rlhf_nb.config import SamplingConfig
from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.decode.choose import best_of_n
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer
from rlhf_nb.train.raft import RAFTConfig, RAFTTrainer

PROMPT = "Visitor: Where do owls live?\nPip:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("toy")
    toy.build_model(0, "tiny").save_pretrained(place)
    toy.build_tokenizer().save_pretrained(place)
    return str(place)


def said(*words: str) -> str:
    """What a command line prints."""
    done = CliRunner().invoke(app, list(words))
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    return str(done.output)


def test_sample_prints_the_bill(folder: str) -> None:
    how = ["sample", folder, PROMPT, "--max-new-tokens", "8"]
    out = said(*how, "--decoder", "best_of_n:4", "--reward", "gold")
    assert "for each that is kept" in out and "score of a draw" in out
    assert "nats per answer" in out and "decoder best_of_n:4" in out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--decoder", "bestofn:4"], "Did you mean 'best_of_n'"),
        (["--decoder", "best_of_n:4"], "--reward"),
        (["--decoder", "vote:x"], "'x' is no number"),
        (["--decoder", "vote:4", "--set", "vot=text"], "Did you mean 'vote'"),
        (["--decoder", "vote:4", "--greedy"], "contradict"),
        (["--set", "n=3"], "--decoder"),
        (["--decoder", "mixture:0.5"], "there is no decoder 'mixture'"),
        (["--decoder", "speculative:8"], "serve does it, ahead={MODEL: 8}"),
        (["--decoder", "mcts"], "there is no decoder 'mcts'"),
    ],
)
def test_mistakes_get_a_sentence(folder: str, words: list[str], hint: str) -> None:
    assert hint in " ".join(said("sample", folder, PROMPT, *words).split())


def test_chat_gives_whole_answers() -> None:
    tok, model = toy.build_tokenizer(), toy.build_model(0, "tiny")
    tok.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    manner = Manner(True, SamplingConfig(max_new_tokens=6), False, [tok.eos_token_id])
    decoder = best_of_n(lambda prompts, completions: [float(len(c)) for c in completions], 4)
    pieces: list[str] = []
    partner = Partner(model, tok, manner, "toy", decoder=decoder)
    text = partner.answer("Where do owls live?", pieces.append)
    assert pieces == [text] and partner.history[-1]["content"] == text and decoder.cost is not None
    again = Partner(model, tok, manner, "toy", decoder=decoder)
    assert again.answer("Where do owls live?") == text


def run(config: Any, trainer: Any, tmp_path: Path, decoder: str) -> Any:
    """A trainer of the toy world whose rollouts come from a decoder."""
    made = config.preset(
        "toy", output_dir=str(tmp_path / "run"), steps=1, epochs=None, rollout_batch_size=8, mini_batch_size=8, num_generations=4, console=False,
        decoder=decoder,
    )  # fmt: skip
    return trainer(
        made, toy.build_model(0, "tiny"), toy.build_tokenizer(), reward=toy.gold_reward, rows=toy.train_prompts(4)
    )


def test_rollouts_from_a_decoder(tmp_path: Path) -> None:
    raft = run(RAFTConfig, RAFTTrainer, tmp_path, "best_of_n:4")
    raft.fit()
    decoder = raft.method.sampler
    assert decoder.cost.answers == 8 and decoder.cost.tokens > 2 * decoder.cost.kept
    chosen, drawn = decoder.cost.gains["score of what is kept"], decoder.cost.gains["score of a draw"]
    assert chosen > drawn


def test_a_policy_gradient_needs_the_policys_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"decoder=best_of_n:4.*raft"):
        run(GRPOConfig, GRPOTrainer, tmp_path, "best_of_n:4")
