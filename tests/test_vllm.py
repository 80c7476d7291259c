"""Answers that vLLM draws: what is refused, a stand-in's process, and the real one where `RLHF_NB_VLLM` names a Python that has it."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_tickets import make
from transformers import AutoTokenizer

from rlhf_nb.core import ConfigError, RewardError
from rlhf_nb.data import toy
from rlhf_nb.models.load import load_model
from rlhf_nb.rollout.episodes import Step
from rlhf_nb.rollout.vllm import _ENV
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.filterwarnings("ignore:rollouts.lag is:UserWarning")
REAL = os.environ.get("RLHF_NB_VLLM", "")
SMALL = Path.home() / ".cache/rlhf_nb/smollm2-135m-instruct"

STAND_IN = """
import os, sys
import torch
from types import SimpleNamespace as Made
from transformers import AutoConfig, AutoModelForCausalLM

SamplingParams = lambda **settings: Made(**settings)

class LLM:
    def __init__(self, model, worker_extension_cls, **options):
        self.model, (module, name) = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval(), worker_extension_cls.split(".")
        load = lambda worker, weights_iterator: self.model.load_state_dict({k: w.clone() for k, w in weights_iterator if k != os.environ.get("FORGETS")}, strict=False)
        self.worker = type("Worker", (getattr(sys.modules[module], name),), {"reload_weights": load})()

    def collective_rpc(self, name, args):
        return [getattr(self.worker, name)(*args)]

    def reset_prefix_cache(self):
        return True

    @torch.no_grad()
    def generate(self, texts, how, use_tqdm):
        out = []
        for text, s in zip(texts, how):
            ids, told = list(text["prompt_token_ids"]), []
            lines = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            read = [None, *({t: Made(logprob=float(x[t]))} for t, x in zip(ids[1:], lines))]
            draws = torch.Generator().manual_seed(getattr(s, "seed", 0))
            while len(told) < s.max_tokens and not (told and ids[-1] in getattr(s, "stop_token_ids", ())):
                line = (self.model(torch.tensor([ids])).logits[0, -1] / getattr(s, "temperature", 1.0)).log_softmax(-1)
                ids.append(int(torch.multinomial(line.exp(), 1, generator=draws)))
                told.append({ids[-1]: Made(logprob=float(line[ids[-1]]))})
            asked = hasattr(s, "logprobs"), hasattr(s, "prompt_logprobs")  # as the real one, it tells what it was asked
            done = Made(token_ids=ids[len(ids) - len(told) :], logprobs=told if asked[0] else None)
            out.append(Made(outputs=[done], prompt_token_ids=text["prompt_token_ids"], prompt_logprobs=read if asked[1] else None))
        return out
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python that has the stand-in."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "vllm.py").write_text(STAND_IN)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/lib OMP_NUM_THREADS=1 exec {sys.executable} "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def read_if_there(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def children(of: int) -> list[int]:
    """Processes that a process has started."""
    found = Path(f"/proc/{of}/task").glob("*/children")
    return [int(x) for f in found for x in f.read_text().split()]


@pytest.mark.slow  # a worker and the stand-in import PyTorch
def test_a_stand_in_trains(python: Path, tmp_path: Path) -> None:
    """It gets each version's weights, is started again when it is killed, and leaves no process."""
    t = make("grpo", tmp_path / "run", 1, rollouts={"lag": 1, "vllm": str(python)}, resample=0, old_logps="auto")
    killed, seen = list[int](), set[int]()

    def kill(step: int) -> None:
        workers = [p for _, p in sorted(t.method.actor.rollouts.workers.crew.workers.items())]
        there = [pid for p in workers for pid in children(p.pid)]
        seen.update(there)
        if step == 2:
            killed.extend(there)
            [os.kill(pid, signal.SIGKILL) for pid in there]

    t.method.finish_step = kill
    events = t.fit()
    assert len(killed) == 1 and events[-1]["perf/worker_deaths"] == 1
    assert all(e["rollout/engine_difference"] < 1e-4 and e["sampling/importance_mean"] > 0 for e in events)
    assert [e["rollout/lag"] for e in events] == [0, 1, 1, 1] and events[0]["sampling/logp_difference_max"] < 1e-3
    until = time.monotonic() + 120
    while any(b"serve_vllm" in read_if_there(Path(f"/proc/{pid}/cmdline")) for pid in seen):
        assert time.monotonic() < until, "vLLM outlives its worker"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_tensor_that_is_forgotten_is_found(python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGETS", "model.layers.0.mlp.up_proj.weight")
    with pytest.raises(
        RewardError, match="vLLM's log-probs differ from the policy's by up to .* A checkpoint of step 0"
    ):
        make("grpo", tmp_path / "run", 0, rollouts={"vllm": str(python)}).fit()


class Asks:
    """Asks on, once."""

    def reset(self, row: Any, seed: int) -> None:
        return None

    def step(self, turn: Any) -> Step:
        return Step("And?", float(len(turn.text)), turn.number == 2)


@pytest.mark.slow
def test_it_draws_the_turns_of_an_episode(python: Path, tmp_path: Path) -> None:
    plain: dict[str, Any] = {
        "num_generations": 4,
        "rollout_batch_size": 8,
        "mini_batch_size": 8,
        "steps": 1,
        "epochs": None,
    }
    config = GRPOConfig.preset(
        "toy", output_dir=str(tmp_path / "run"), console=False, rollouts={"vllm": str(python)}, sampling={"max_new_tokens": 24}, **plain
    )  # fmt: skip
    model = toy.build_model(0, "tiny")
    model.generation_config.eos_token_id = list(range(2, 400, 3))
    t = GRPOTrainer(config, model, toy.build_tokenizer(), rows=toy.train_prompts(8), environment=Asks)
    (event,) = t.fit()
    assert event["rollout/turns"] > 1.2 and event["sampling/logp_difference_max"] < 1e-3


@pytest.mark.skipif(not REAL, reason="RLHF_NB_VLLM names no Python with vLLM")
@pytest.mark.slow
def test_the_real_one(tmp_path: Path) -> None:
    """A tied head, too, follows each version."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tok, sizes = (
        toy.build_tokenizer(),
        {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2},
    )  # heads of 32
    own = LlamaConfig(
        vocab_size=len(tok), **sizes, intermediate_size=128, max_position_embeddings=256, tie_word_embeddings=True
    )
    how = {"vllm": REAL, "vllm_options": {"max_model_len": 128, "max_num_seqs": 8}, "lag": 1}
    plain: dict[str, Any] = {
        "num_generations": 4,
        "rollout_batch_size": 8,
        "mini_batch_size": 8,
        "steps": 4,
        "epochs": None,
    }
    config = GRPOConfig.preset("toy", output_dir=str(tmp_path / "run"), console=False, rollouts=how, **plain)
    parts: dict[str, Any] = {"rows": toy.train_prompts(16), "reward": toy.gold_reward}
    events = GRPOTrainer(config, LlamaForCausalLM(own), tok, **parts).fit()
    assert all(e["rollout/engine_difference"] < 1e-3 for e in events) and len(events) == 4


ALONE = """
import sys, vllm
llm = vllm.LLM(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=16)
how = vllm.SamplingParams(max_tokens=16, logprobs=0, detokenize=False, ignore_eos=True)
llm.generate([{"prompt_token_ids": [5] * 24}] * 8, how, use_tqdm=False)
print("kB", open("/proc/self/status").read().partition("VmRSS:")[2].split()[0])
"""


@pytest.mark.skipif(not (REAL and SMALL.is_dir()), reason="no Python with vLLM, or no SmolLM2")
@pytest.mark.slow
def test_twenty_updates_of_a_real_model(tmp_path: Path) -> None:
    """After each its log-probs are the policy's, and it takes the memory that vLLM takes alone."""
    said = subprocess.run(
        [REAL, "-c", ALONE, str(SMALL)], env=os.environ | _ENV | {"PYTHONPATH": ""}, capture_output=True, text=True
    )
    alone = int(said.stdout.split("kB")[1])
    how = {"vllm": REAL, "vllm_options": {"max_model_len": 256, "max_num_seqs": 16}}
    plain: dict[str, Any] = {"num_generations": 4, "rollout_batch_size": 8, "mini_batch_size": 8, "steps": 20}
    config = GRPOConfig.preset(
        "toy", output_dir=str(tmp_path / "run"), console=False, rollouts=how, epochs=None, save_every=None, resample=0,
        sampling={"max_new_tokens": 16}, optimizer={"lr": 1e-4}, precision="fp32", **plain,
    )  # fmt: skip
    rows = [{"prompt": f"What is {a}+{a + 3}?"} for a in range(2, 40)]
    reward = lambda prompts, completions, **columns: [float(len(x)) for x in completions]
    t = GRPOTrainer(config, load_model(str(SMALL))[0], AutoTokenizer.from_pretrained(SMALL), rows=rows, reward=reward)
    took = list[int]()

    def look(step: int) -> None:
        (worker,) = t.method.actor.rollouts.workers.crew.workers.values()
        (pid,) = children(worker.pid)
        took.append(int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0]))

    t.method.finish_step = look
    events = t.fit()
    worst = max(e["rollout/engine_difference"] for e in events)
    print(f"vLLM alone {alone >> 10} MiB, behind a run {took[0] >> 10} to {max(took) >> 10}; difference {worst:.2g}")
    assert len(events) == 20 and worst <= 1e-3 and max(took) <= 1.05 * alone


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"vllm": "no/such/python"}, "rollouts.vllm is 'no/such/python', and no Python that has vLLM: install it"),
    ({"vllm": sys.executable}, "and no Python that has vLLM"),
]


@pytest.mark.parametrize(("how", "sentence"), REFUSED)
def test_refused_before_the_first_step(how: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make("raft", tmp_path, 0, rollouts=how)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hf_overrides": {"vocab_size": 7}}, "asks for a vocabulary of 7 tokens, but .* with [0-9]+ tokens"),
        ({"tokenizer": "gpt2"}, "asks for tokenizer=gpt2, but vLLM gets the policy's own model"),
        ({"model": "gpt2"}, "asks for model=gpt2, but vLLM gets the policy's own model"),
    ],
)
def test_another_vocabulary_is_refused(options: dict[str, Any], sentence: str, python: Path, tmp_path: Path) -> None:
    """Before the first step: its ids would be other words."""
    with pytest.raises(ConfigError, match=f"rollouts.vllm_options {sentence}"):
        make("raft", tmp_path, 0, rollouts={"vllm": str(python), "vllm_options": options})


def test_adapters_and_decoders_are_refused(python: Path, tmp_path: Path) -> None:
    from rlhf_nb.config import LoraSettings
    from rlhf_nb.models.adapters import add_lora

    config = GRPOConfig.preset("toy", output_dir=str(tmp_path / "run"), console=False, rollouts={"vllm": str(python)})
    model = add_lora(toy.build_model(0, "tiny"), LoraSettings(r=2))
    with pytest.raises(ConfigError, match="whole weights, and the policy has adapters"):
        GRPOTrainer(config, model, toy.build_tokenizer(), rows=toy.train_prompts(8), reward=toy.gold_reward)
    with pytest.raises(
        ConfigError, match="rollouts.vllm is .*python, but decoder draws in more ways than one: set rollouts.vllm=null"
    ):
        make("raft", tmp_path / "more", 0, rollouts={"vllm": str(python)}, decoder={"kind": "best_of_n", "n": 2})
