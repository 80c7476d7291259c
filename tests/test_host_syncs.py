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
from rlhf_nb.types import sent_together

MOST = {"sft": 1, "dpo": 1, "reward": 1, "kto": 2, "ppo": 2, "grpo": 2, "rloo": 2}  # waits of a step with one update
BUDGETS = {"sft": 96, "dpo": 96, "reward": 96, "kto": 96, "ppo": 80, "grpo": 44, "rloo": 26}  # at least 3 micro-batches
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


def quiet(own: Any, waits: Waits) -> Any:
    """A function that may wait."""

    def through(*args: Any, **kwargs: Any) -> Any:
        with waits.paused():
            return own(*args, **kwargs)

    return through


def steps(run: Any, waits: Waits | None, n: int = 3) -> tuple[list[dict[str, Any]], list[str]]:
    """Events of a few steps; and where the host waited in the last one, beside sampling."""
    if waits is not None and hasattr(run.method, "sampler"):
        run.method.sampler.generate = quiet(run.method.sampler.generate, waits)
    run.start()
    events = [run.train_step() for _ in range(n - 1)]
    if waits is not None:
        waits.places.clear()
    events.append(run.train_step())
    run.lock.release()
    return events, [] if waits is None else list(waits.places)


@pytest.mark.parametrize("method", METHODS)
def test_the_host_waits_at_most_twice_a_step(method: str, tmp_path: Path) -> None:
    plain, _ = steps(trainer(method, tmp_path / "cpu", torch.device("cpu"), token_budget=BUDGETS[method]), None, 2)
    pieces: list[int] = []
    with pretend() as waits:
        run = trainer(method, tmp_path / "gpu", CUDA, token_budget=BUDGETS[method])
        cut = run.method.micro_batches
        run.method.micro_batches = lambda mini: pieces.append(len(cut(mini))) or cut(mini)
        found, places = steps(run, waits, 2)
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in plain], rel=1e-4, abs=1e-6)
    assert [e["updates"] for e in found] == [1] * len(found) and pieces[-1] >= 3  # several micro-batches add none
    assert len(places) <= MOST[method], "\n".join(places)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "DPO with an anchor": ("dpo", {"nll_coef": 0.1}),
    "KTO of single answers": ("kto", {"loss": "bco"}),
    "PPO with all that it may measure": ("ppo", {"missing_eos_penalty": 1.0, "normalize_scores": True}),
    "GRPO per token, dead groups replaced": ("grpo", {"variant": "dapo", "resample": 1}),
}


@pytest.mark.parametrize("about", OPTIONS)
def test_nothing_is_sent_while_the_host_waits(about: str, tmp_path: Path) -> None:
    """Whatever else an option reads: what goes to the GPU goes from pinned memory, or with a kernel."""
    method, over = OPTIONS[about]
    with pretend() as waits:
        found, places = steps(trainer(method, tmp_path, CUDA, **over), waits, 2)
    assert found[-1]["updates"] == 1
    assert waits.sent and not [p for p in places if "from the host" in p], "\n".join(places)


OTHERS = {"online": 3, "raft": 3, "distill": 2, "process": 1}  # how often the host may wait, beside sampling


@pytest.mark.parametrize("method", OTHERS)
def test_every_other_method_stays_on_one_device(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for the methods that few use."""
    from rlhf_nb.data import legs

    info = get(method)
    over = {"raft": {"num_generations": 4}}.get(method, {}) | ONLINE
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
    with pretend() as waits:
        found, places = steps(run(CUDA), waits, 2)
    assert [e["loss"] for e in found] == pytest.approx([e["loss"] for e in plain], rel=1e-4, abs=1e-6)
    assert len(places) <= OTHERS[method], "\n".join(places)


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
    assert used and len(places) <= MOST[method], "\n".join(places)


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


COPIES: dict[str, tuple[Any, bool]] = {  # what is done with a tensor on the GPU and one on the host; whether the host waits
    "to": (lambda gpu, cpu: cpu.to("cuda"), True),
    "to another's place": (lambda gpu, cpu: cpu.to(gpu), True),
    "to, as another format": (lambda gpu, cpu: cpu.to("cuda", torch.float64), True),
    "to, without waiting": (lambda gpu, cpu: cpu.to("cuda", non_blocking=True), False),
    "to, where it is": (lambda gpu, cpu: gpu.to("cuda"), False),
    "cuda": (lambda gpu, cpu: cpu.cuda(), True),
    "cuda, without waiting": (lambda gpu, cpu: cpu.cuda(non_blocking=True), False),
    "tensor": (lambda gpu, cpu: torch.tensor(3.0, device="cuda"), True),
    "as_tensor of a number": (lambda gpu, cpu: torch.as_tensor(3, device="cuda"), True),
    "as_tensor of what is there": (lambda gpu, cpu: torch.as_tensor(gpu, device="cuda"), False),
    "new_tensor": (lambda gpu, cpu: gpu.new_tensor([1.0, 2.0]), True),
    "copy_": (lambda gpu, cpu: gpu.copy_(cpu), True),
    "copy_, without waiting": (lambda gpu, cpu: gpu.copy_(cpu, non_blocking=True), False),
    "copy_ to the host": (lambda gpu, cpu: cpu.copy_(gpu), True),
    "an index of the host's": (lambda gpu, cpu: gpu[torch.tensor([0, 2])], True),
    "a list as index": (lambda gpu, cpu: gpu[[0, 2]], True),
    "an index that is there": (lambda gpu, cpu: gpu[torch.arange(2, device="cuda")], False),
    "values of the host's": (lambda gpu, cpu: gpu.__setitem__(slice(0, 2), cpu[:2]), True),
    "one value of the host's": (lambda gpu, cpu: gpu.__setitem__(0, cpu[0]), True),
    "a choice with a value of the host's": (lambda gpu, cpu: torch.where(gpu > 0, gpu, cpu[0]), True),
    "a choice with a number": (lambda gpu, cpu: torch.where(gpu > 0, gpu, 2.0) + gpu.where(gpu > 0, 1.0), False),
    "a number": (lambda gpu, cpu: gpu.__setitem__(0, 5.0), False),
    "full": (lambda gpu, cpu: torch.full((), 3.0, device="cuda") + gpu.new_full((), 2.0), False),
    "arithmetic with a number of the host's": (lambda gpu, cpu: gpu * cpu[0] + 1, False),
    "sent": (lambda gpu, cpu: sent_together([cpu, cpu[0]], "cuda"), False),
}  # fmt: skip


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_that_waits_is_noticed(how: str) -> None:
    """As `torch.cuda.set_sync_debug_mode` counts them on a real GPU."""
    act, waiting = COPIES[how]
    with pretend() as waits:
        gpu, cpu = torch.zeros(3, device="cuda"), torch.arange(3.0)
        act(gpu, cpu)
        assert len(waits.places) == waiting, waits.places
