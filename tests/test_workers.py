"""Cores that take micro-batches of their own: the same training as one thread's, the same bits at each run."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from rlhf_nb.fast import workers
from rlhf_nb.models.heads import RewardModel, ScalarHead
from rlhf_nb.scoring.check import check_scores, self_check
from rlhf_nb.scoring.packing import split_among, work
from rlhf_nb.scoring.scores import completion_logps
from rlhf_nb.scoring.trees import plan_trees
from rlhf_nb.train.dpo import DPOConfig, DPOTrainer
from rlhf_nb.types import Completions


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(workers, "SMALL", 1)  # a test's model is tiny
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Tokenizer:
    pad_token, pad_token_id, eos_token, eos_token_id = "<pad>", 0, "<eos>", 1

    def __len__(self) -> int:
        return 60

    def save_pretrained(self, *_: Any) -> None: ...


def model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    if dropout:
        return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=2, resid_pdrop=dropout))
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        )
    )  # fmt: skip


def pairs(n: int) -> list[dict[str, Any]]:
    g = torch.Generator().manual_seed(1)
    ids = lambda low, high: torch.randint(2, 60, (int(torch.randint(low, high, (1,), generator=g)),), generator=g)
    return [
        {"prompt_ids": ids(4, 20).tolist(), "chosen_ids": ids(3, 12).tolist(), "rejected_ids": ids(3, 12).tolist(), "margin": None}
        for _ in range(n)
    ]  # fmt: skip


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    import rlhf_nb.train.dpo as module

    monkeypatch.setattr(module, "tokenize_rows", lambda kind, rows, *_, **__: rows)
    config = DPOConfig(
        output_dir=str(folder), mini_batch_size=8, rollout_batch_size=8, steps=4, epochs=None, device="cpu", token_budget=64,
        console=False, optimizer={"lr": 1e-3},
    )  # fmt: skip
    net = model()
    trainer = DPOTrainer(config, net, Tokenizer(), rows=pairs(32), eval_rows=[])
    trainer.method.save_model = lambda folder: None  # type: ignore[method-assign]
    history = trainer.fit()
    return [e["loss"] for e in history], {k: v.clone() for k, v in net.state_dict().items()}, trainer


def test_a_crew_trains_as_one_thread_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    losses, weights, trainer = trained(tmp_path / "two", monkeypatch)
    crew = trainer.engine.learn.__self__.replicas
    assert crew is not None and crew.workers == 2
    again, same, _ = trained(tmp_path / "again", monkeypatch)
    assert losses == again and all(torch.equal(weights[k], same[k]) for k in weights)
    torch.set_num_threads(1)
    alone, expected, trainer = trained(tmp_path / "one", monkeypatch)
    assert trainer.engine.learn.__self__.replicas is None
    assert losses == pytest.approx(alone, rel=1e-5)
    for k in weights:
        torch.testing.assert_close(weights[k], expected[k], rtol=1e-4, atol=1e-5)


def test_scores_do_not_depend_on_cores(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    net = model().double().eval()
    rows = pairs(16)
    c = Completions.from_lists([r["prompt_ids"] for r in rows], [r["chosen_ids"] for r in rows], 0)
    seen: list[set[int]] = []

    def watch(run: Any, items: Any, n: int) -> Any:
        assert n == 2 and len(items) > 1
        met, threads = threading.Barrier(2, timeout=60), set()

        def noted(x: Any) -> Any:
            if threading.get_ident() not in threads:  # nobody goes on alone, however busy the machine is
                threads.add(threading.get_ident())
                met.wait()
            return run(x)

        done = workers.spread(noted, items, n)
        seen.append(threads)
        return done

    with torch.no_grad(), monkeypatch.context() as patched:
        patched.setattr("rlhf_nb.scoring.scores.spread", watch)
        two = completion_logps(net, c, entropy=True, token_budget=64)
    assert [len(threads) for threads in seen] == [2]
    torch.set_num_threads(1)
    with torch.no_grad():
        one = completion_logps(net, c, entropy=True, token_budget=64)
    torch.testing.assert_close(two.logps, one.logps, rtol=0, atol=1e-12)
    torch.testing.assert_close(two.entropy, one.entropy, rtol=0, atol=1e-12)


def test_rows_are_dealt_out_before_they_are_packed() -> None:
    rows = pairs(16)
    c = Completions.from_lists([r["prompt_ids"] for r in rows], [r["chosen_ids"] for r in rows], 0)
    whole = plan_trees(c, 4096)
    with split_among(4):
        cut = plan_trees(c, 4096)
    assert len(whole) == 1 and len(cut) >= 4
    assert sorted(i for part in cut for i in part) == list(range(16))
    costs = [sum(work(int(c.prompt_lens[i]), [int(c.completion_lens[i])]) for i in part) for part in cut]
    shares = [sum(costs[i] for i in hand) for hand in workers.balance(costs, 4)]
    assert max(shares) < 1.2 * sum(shares) / 4
    with split_among(2):
        halves = plan_trees(c, 4096)
    assert len(halves) == 2  # no more forward passes than there are takers: each adds to all gradients


def test_dropout_keeps_one_thread(two_threads: None) -> None:
    assert workers.draws_numbers(model(0.1).train()) and not workers.draws_numbers(model(0.1).eval())


def test_an_error_in_a_thread_reaches_the_caller_and_leaves_no_gradients(two_threads: None) -> None:
    net = torch.nn.Linear(2, 2)
    crew = workers.Replicas(net, 2)

    def work(module: torch.nn.Module, x: int) -> None:
        module(torch.ones(2)).sum().backward()
        if x == 1:
            raise ValueError("a bad row")

    with pytest.raises(ValueError, match="a bad row"):
        crew.run(work, [0, 1, 2])
    assert all(p.grad is None for replica in crew.replicas for p in replica.parameters())
    assert not any(total.waiting for total, _ in crew._sums)
    assert torch.get_num_threads() == 2


class Some(torch.nn.Module):
    """Not every piece reaches every weight, and one weight is reached twice, once past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.table = torch.nn.Embedding(5, 3)

    def forward(self, x: int) -> torch.Tensor:
        h = torch.nn.functional.embedding(torch.tensor([x % 5]), self.table.weight, sparse=True)
        return ((self.odd if x % 2 else self.even)(h) @ self.table.weight.T).logsumexp(-1).sum()


def summed(slow: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """Gradients of seven pieces on two cores, of which one takes the first piece and the other all else; some start late."""
    torch.manual_seed(0)
    net = Some()

    def work(module: torch.nn.Module, x: int) -> None:
        time.sleep(0.05 * (x in slow))
        module(x).backward()

    workers.Replicas(net, 2).run(work, range(7), [5.0, 1, 1, 1, 1, 1, 1])
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_the_sum_of_gradients_is_the_same_whoever_is_late(two_threads: None) -> None:
    torch.manual_seed(0)
    net = Some()
    for x in range(7):
        net(x).backward()
    expected = [p.grad for p in net.parameters()]
    found = summed()
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    for slow in ((0,), (1, 2), (5,)):
        assert all(torch.equal(a, b) for a, b in zip(found, summed(slow), strict=True)), slow


def test_gradients_of_all_cores_take_the_memory_of_one(two_threads: None) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
    crew, waiting, meet = workers.Replicas(net, 2), [], threading.Barrier(2, timeout=60)

    def look(gradient: torch.Tensor) -> None:
        meet.wait()  # both cores are at this layer: what waits are at most the gradients of a layer or two
        waiting.append(sum(len(total.waiting) for total, _ in crew._sums))
        meet.wait()

    for replica in crew.replicas:
        for layer in replica:
            layer.weight.register_hook(look)
    crew.run(lambda module, x: module(torch.ones(1, 8)).sum().backward(), [0, 1])
    assert len(waiting) == 40 and max(waiting) <= 4
    assert all(p.grad is None for replica in crew.replicas for p in replica.parameters())
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("first_out", ["the first", "the second"])
@pytest.mark.parametrize("born", ["before", "inside"])
def test_fits_that_overlap_in_threads_leave_the_number_of_threads(born: str, first_out: str, two_threads: None) -> None:
    """Whoever enters and leaves first, and nested: alone inside, and outside as before, threads that begin later included."""
    told, inside, out = dict[str, int](), threading.Event(), threading.Event()
    begun, enter = threading.Event(), threading.Event()

    def second() -> None:
        if born == "before":
            torch.get_num_threads()  # PyTorch asks for a thread's number at its first use
        begun.set()
        enter.wait(20)
        with workers.alone(), workers.alone():
            told["alone"] = torch.get_num_threads()
            inside.set()
            out.wait(20)
        told["the second"] = torch.get_num_threads()

    other = threading.Thread(target=second)
    if born == "before":
        other.start()
        begun.wait(20)
    with workers.alone():
        if born == "inside":
            other.start()
        enter.set()
        inside.wait(20)
        with workers.alone():
            pass
        told["alone too"] = torch.get_num_threads()
        if first_out == "the second":
            out.set()
            other.join()
            told["still alone"] = torch.get_num_threads()
    told["the first"] = torch.get_num_threads()
    out.set()
    other.join()
    later = threading.Thread(target=lambda: told.update(later=torch.get_num_threads()))
    later.start()
    later.join()
    assert {k: n for k, n in told.items() if "alone" not in k} == {"the first": 2, "the second": 2, "later": 2}, told
    assert {n for k, n in told.items() if "alone" in k} == {1}


def test_a_small_model_trains_on_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other at every tiny product cost twenty times the work where cores are busy; what was set comes back."""
    seen: list[int] = []
    plain = Qwen2ForCausalLM.get_input_embeddings
    monkeypatch.setattr(
        Qwen2ForCausalLM, "get_input_embeddings", lambda self: (seen.append(torch.get_num_threads()), plain(self))[1]
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trained(tmp_path, monkeypatch)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen and seen[-1] == 1
    with workers.alone_if_small(torch.nn.Linear(1001, 1000)):  # a million parameters
        assert torch.get_num_threads() == before


def test_a_comparison_of_a_few_rows_takes_one_thread() -> None:
    """Of log-probs and of scores, with a model that training would compute on all cores: on busy cores two threads
    that wait for each other took twelve times the CPU time.
    """
    config = Qwen2Config(
        vocab_size=6000, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    assert sum(p.numel() for p in model.model.parameters()) < workers.SMALL < sum(p.numel() for p in model.parameters())
    reward = RewardModel(copy.deepcopy(model.model), ScalarHead(128))
    seen: list[int] = []
    for body in (model.model, reward.decoder):
        body.layers[0].input_layernorm.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    c = Completions.from_lists([[5, 6, 7], [8, 9]], [[10, 11], [12]])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        self_check(model, c)
        check_scores(reward, c)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert len(seen) > 2 and set(seen) == {1}
