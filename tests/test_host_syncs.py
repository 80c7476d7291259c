"""Training on a GPU that is only pretended: nothing is left on the wrong device, the numbers are the CPU's, and the host waits at most twice a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_gpu import CUDA, Waits, move_module, pretend

from rlhf_nb.core import Precision
from rlhf_nb.data import toy
from rlhf_nb.run.engine import Engine
from rlhf_nb.train.registry import get

MOST = 2
SETTINGS: dict[str, Any] = {
    "console": False, "epochs": None, "seed": 1, "steps": 4, "mini_batch_size": 8, "rollout_batch_size": 8, "token_budget": 160, "num_inner_epochs": 1,
    "optimizer": {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.01}, "save_every": None,
}  # fmt: skip
ONLINE = {"sampling": {"max_new_tokens": 10}}
METHODS: dict[str, dict[str, Any]] = {
    "sft": {}, "kto": {}, "dpo": {}, "ppo": ONLINE, "grpo": ONLINE | {"num_generations": 4, "kl_coef": 0.05}, "reward": {},
    "rloo": ONLINE | {"num_generations": 4, "kl_coef": 0.05},
}  # fmt: skip


def model() -> Any:
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    tokenizer = toy.build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def rows(method: str) -> list[dict[str, Any]]:
    if method == "sft":
        return toy.sft_rows(40)
    if method == "kto":
        from rlhf_nb.data.convert import to_unpaired

        return list(to_unpaired(toy.preference_rows(20)))
    return toy.preference_rows(40) if method in ("dpo", "reward") else toy.train_prompts(40)


def trainer(method: str, folder: Path, device: torch.device, given_on_cpu: bool = False, **over: Any) -> Any:
    info = get(method)
    config = info.config.preset("toy", **(SETTINGS | METHODS[method] | over), output_dir=str(folder))
    net = model() if device.type == "cpu" or given_on_cpu else move_module(model())
    precision = Precision(device, torch.float32, torch.float32, torch.float32, False, "for a test")
    given = {"reward": toy.gold_reward} if info.online else {}
    make: Any = info.trainer
    return make(config, net, toy.build_tokenizer(), rows=rows(method), eval_rows=[], engine=Engine(precision), **given)


def steps(run: Any, waits: Waits | None, n: int = 3) -> tuple[list[dict[str, Any]], list[str]]:
    """Events of a few steps; and where the host waited in the last one, beside sampling."""
    if waits is not None and hasattr(run.method, "sampler"):
        own = run.method.sampler.generate

        def quietly(*args: Any, **kwargs: Any) -> Any:
            with waits.paused():
                return own(*args, **kwargs)

        run.method.sampler.generate = quietly
    run.start()
    events = [run.train_step() for _ in range(n - 1)]
    if waits is not None:
        waits.places.clear()
    events.append(run.train_step())
    run.lock.release()
    return events, [] if waits is None else list(waits.places)


@pytest.mark.parametrize("method", METHODS)
def test_the_host_waits_at_most_twice_a_step(method: str, tmp_path: Path) -> None:
    plain, _ = steps(trainer(method, tmp_path / "cpu", torch.device("cpu")), None)
    with pretend() as waits:
        found, places = steps(trainer(method, tmp_path / "gpu", CUDA), waits)
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in plain], rel=1e-4, abs=1e-6)
    assert len(places) <= MOST, "\n".join(places)


OTHERS = {"online": 3, "nash": 3, "raft": 3, "distill": 2, "process": 1}  # how often the host may wait, beside sampling


@pytest.mark.parametrize("method", OTHERS)
def test_every_other_method_stays_on_one_device(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for the methods that few use."""
    from rlhf_nb.data import legs
    from rlhf_nb.train import pairs

    info = get("online" if method == "nash" else method)
    over = {"nash": {"loss": "nash_md"}, "raft": {"num_generations": 4}}.get(method, {}) | ONLINE
    known = {k: v for k, v in (SETTINGS | over).items() if k in info.config.model_fields}

    def run(device: torch.device) -> Any:
        def net() -> Any:
            made = legs.build_model(0) if method == "process" else model()
            return made if device.type == "cpu" else move_module(made)

        config = info.config.preset("toy", **known, output_dir=str(tmp_path / device.type))
        given = {"reward": toy.gold_reward} if info.online else {"teacher": net()} if method == "distill" else {}
        data = legs.legs_steps(24) if method == "process" else toy.train_prompts(40)
        words = legs.build_tokenizer() if method == "process" else toy.build_tokenizer()
        precision = Precision(device, torch.float32, torch.float32, torch.float32, False, "for a test")
        make: Any = info.trainer
        return make(config, net(), words, rows=data, eval_rows=[], engine=Engine(precision), **given)

    plain, _ = steps(run(torch.device("cpu")), None, 2)
    mixed, looks = pairs.sample_mixture, []  # Nash-MD's own sampler
    with pretend() as waits:

        def quietly(*args: Any, **kwargs: Any) -> Any:
            before, waits.places = waits.places, []
            try:
                return mixed(*args, **kwargs)
            finally:
                looks.append(len(waits.places))
                waits.places = before

        monkeypatch.setattr(pairs, "sample_mixture", quietly)
        found, places = steps(run(CUDA), waits, 2)
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in plain], rel=1e-4, abs=1e-6)
    assert len(places) <= OTHERS[method], "\n".join(places)
    assert bool(looks) == (method == "nash")


def test_labels_are_made_on_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`rlaif` makes no updates: a model answers, and another one judges; the labels are those of a CPU."""
    from rlhf_nb.judges.model import ModelJudge
    from rlhf_nb.train import rlaif

    def labels(device: torch.device) -> list[dict[str, Any]]:
        precision = Precision(device, torch.float32, torch.float32, torch.float32, False, "for a test")
        monkeypatch.setattr(rlaif, "decide_precision", lambda *_, **__: precision)
        nets = [model() if device.type == "cpu" else move_module(model()) for _ in range(2)]
        words = toy.build_tokenizer()
        config = rlaif.RLAIFConfig.preset("toy", output_dir=str(tmp_path / device.type), prompts=8, chunk=8, check_pairs=0, console=False, **ONLINE)  # fmt: skip
        job = rlaif.Labelling(
            config,
            nets[0],
            words,
            ModelJudge(nets[1], words, labels=("goat", "otter"), ratings=("ten", "thirty")),
            toy.train_prompts(8),
        )
        job.run()
        return [json.loads(line) for line in job.path.read_text(encoding="utf-8").splitlines()]

    plain = labels(torch.device("cpu"))
    with pretend():
        found = labels(CUDA)
    assert len(plain) > 2 and [(r["row"], r["chosen"], r["rejected"]) for r in found] == [
        (r["row"], r["chosen"], r["rejected"]) for r in plain
    ]


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_rows_without_padding_make_nobody_wait(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each row begins is sent from the host, which knows it, for rows (SFT) and trees (DPO's pairs)."""
    from rlhf_nb.fast import attention

    plain, _ = steps(trainer(method, tmp_path / "cpu", torch.device("cpu")), None)
    used: list[int] = []
    kernel = attention.KERNELS["loop"]
    counting = kernel._replace(attend=lambda *a: used.append(len(a[0])) or kernel.attend(*a))
    monkeypatch.setitem(attention.KERNELS, "loop", counting)
    monkeypatch.setattr(attention, "AUTO", ("loop",))
    monkeypatch.setattr(attention, "_refused", {})
    with pretend() as waits:
        found, places = steps(trainer(method, tmp_path / "gpu", CUDA), waits)
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in plain], rel=1e-4, abs=1e-6)
    assert used and len(places) <= MOST, "\n".join(places)


@pytest.mark.parametrize("method", ["dpo", "ppo", "grpo"])
def test_a_model_given_on_the_cpu_is_trained_on_the_gpu(method: str, tmp_path: Path) -> None:
    """As `AutoModelForCausalLM.from_pretrained` gives it; its frozen copy, too, must get there."""
    with pretend() as waits:
        found, _ = steps(trainer(method, tmp_path, CUDA, given_on_cpu=True), waits, 1)
    assert found[-1]["updates"] == 1


def test_a_mixture_of_devices_is_noticed() -> None:
    with pretend() as waits:
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        assert not waits.places
        assert float((x * 2).sum()) == 6 and x[x > 0].tolist() == [1, 1, 1]
        assert [p.split(" ", 1)[1] for p in waits.places] == ["_local_scalar_dense", "index by a mask", "tolist"]
