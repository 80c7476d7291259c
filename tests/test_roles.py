"""Frozen models on their own ranks: the numbers of one group, transfers counted, overlap, ranks that die, files that can't be."""

from __future__ import annotations

import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from process_cases import dpo, run_ranks
from safetensors.torch import load_file
from test_cli import call
from test_launch import case_on_ranks

from rlhf_nb.core import ConfigError, Precision, RunError, decide_precision
from rlhf_nb.data import toy
from rlhf_nb.models.adapters import Reference
from rlhf_nb.rewards.base import Ensemble, RewardModelFn, Rewards
from rlhf_nb.run import engine
from rlhf_nb.run.loop import Trainer
from rlhf_nb.run.roles import ClusterTopology, Roles
from rlhf_nb.scale.launch import launch
from rlhf_nb.scale.plan import placement_table
from rlhf_nb.scale.topology import job_of
from rlhf_nb.train import online_config
from rlhf_nb.train.grpo import GRPOConfig
from rlhf_nb.train.online_config import as_rewards
from rlhf_nb.train.rlaif import Labelling
from rlhf_nb.types import Completions

FP32 = Precision(torch.device("cpu"), torch.float32, torch.float32, torch.float32, False, "")


def topology(folder: Path, learn: int, frozen: int, host: str | None = None) -> str:
    """A file for so many learning and frozen ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = {"actor+critic": [f"0-{learn - 1}"], "reference+reward": [f"{learn}-{learn + frozen - 1}"]}
    path = folder / "cluster_topology.yaml"
    node = {"name": "here", "devices": learn + frozen, "host": host}
    path.write_text(yaml.safe_dump({"nodes": [node], "links": [], "placement": groups}))
    return str(path)


def events(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run's log."""
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [e for e in read if e["type"] == "step"]


def same(one: Path, other: Path) -> None:
    """Losses, norms and weights are the same bits."""
    assert (one / "steps.json").read_text() == (other / "steps.json").read_text()
    a, b = (load_file(x / "weights.safetensors") for x in (one, other))
    assert a.keys() == b.keys() and all(a[k].equal(b[k]) for k in a)


@pytest.mark.slow  # 30 CPU seconds each
@pytest.mark.parametrize("case", ["dpo", "dpo_lora", "kto", "grpo", "lagged", "lagged_scored", "ppo"])
@pytest.mark.parametrize(("learn", "frozen"), [(2, 2), (3, 1)])
def test_apart_is_together(case: str, learn: int, frozen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {} if learn == 2 else {"mini_batch_size": 12}
    if learn == 3 and case in ("grpo", "lagged", "lagged_scored", "ppo"):
        sizes["rollout_batch_size"] = 24
    if case == "lagged_scored":
        case, sizes["scored"] = "lagged", True
    run_ranks(case, tmp_path / "together", learn, **sizes)
    monkeypatch.setenv("RLHF_NB_TOPOLOGY", topology(tmp_path, learn, frozen))
    run_ranks(case, tmp_path / "apart", learn + frozen, **sizes)
    same(tmp_path / "together", tmp_path / "apart")
    told = events(tmp_path / "apart")
    assert len(told) == 10 and all(e["perf/transfer_mb"] > 0 for e in told)
    asked = 16 if case == "ppo" else 8  # a header and five tensors there, a header and the answer back; of each model
    if case in ("dpo", "dpo_lora", "kto"):  # two questions before the first update, none before the last
        assert [e["perf/transfers"] for e in told] == [14, *[8] * 8, 2]
    elif not case.startswith("lagged"):
        assert [e["perf/transfers"] for e in told] == [asked] * 10


@pytest.mark.slow  # 30 CPU seconds each
@pytest.mark.parametrize("case", ["dpo", "grpo"])
@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2"])
def test_learners_that_share_out_weights_are_as_together(
    case: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(case, tmp_path / "together", 2, strategy, steps=4)
    monkeypatch.setenv("RLHF_NB_TOPOLOGY", topology(tmp_path, 2, 2))
    run_ranks(case, tmp_path / "apart", 4, strategy, steps=4)
    same(tmp_path / "together", tmp_path / "apart")
    assert len(events(tmp_path / "apart")) == 4


def both(frozen_rank: Callable[[Roles], None], learner: Callable[[Roles], None]) -> None:
    """Two threads play a learning and a frozen rank."""
    store = torch.distributed.HashStore()
    pair = ClusterTopology(nodes=[{"devices": 2}], links=[], placement={"actor": [0], "reference+reward": [1]})
    wrong: list[BaseException] = []

    def other() -> None:
        try:
            frozen_rank(Roles(pair, store, 1, 2))
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    learner(Roles(pair, store, 0, 2))
    thread.join()
    assert not wrong


def test_messages_are_typed_and_counted_and_faults_are_told() -> None:
    reference = Reference(toy.build_model(0))
    c = Completions.from_lists([[5, 6, 7], [8, 9]], [[10, 11], [12, 13, 14]])
    bad = Completions.from_lists([[5, 6]], [[10**6]])  # no such token

    def frozen_rank(roles: Roles) -> None:
        roles.place("reference", lambda: reference)
        roles.serve(FP32)

    def learner(roles: Roles) -> None:
        remote: Any = roles.place("reference", lambda: reference)
        with pytest.raises(RunError, match=r"inside fit\(\) only"):
            remote.logps(c)
        with roles.asking(FP32):
            remote.begin(c, temperature=0.7)
            remote.begin(c)
            assert torch.equal(remote.logps(c), reference.logps(c))
            assert torch.equal(remote.logps(c, temperature=0.7), reference.logps(c, temperature=0.7))
            found = roles.wire.report()
            there, back = 32 * 8 + 9 * (c.prompt_ids.numel() + c.completion_ids.numel()) + 8 * 2, 3 * 8 + 4 * 6
            assert found["perf/transfers"] == 2 * (1 + 5 + 2) and found["perf/transfer_mb"] * 2**20 == 2 * (
                there + back
            )
            with pytest.raises(RunError, match="rank 1 could not answer: DataError"):
                remote.logps(bad)
            assert torch.equal(remote.logps(c), reference.logps(c))  # it goes on
            remote.begin(c)  # and is never asked for: drained

    both(frozen_rank, learner)


class Doubles:
    """Answers a reference's questions and a reward model's, and can't answer about a token 13."""

    def logps(self, c: Completions, **_: Any) -> torch.Tensor:
        if (c.completion_ids == 13).any():
            raise ValueError("thirteen")
        return c.completion_ids.float() * 2

    def score(self, c: Completions, **_: Any) -> torch.Tensor:
        return c.completion_lens.float() * 3


def serves(roles: Roles) -> None:
    """A frozen rank with both models."""
    roles.place("reference", Doubles)
    roles.place("reward", Doubles)
    roles.serve(FP32)


def test_threads_share_a_wire() -> None:
    def batch(i: int) -> Completions:
        n = 2 + i % 5
        return Completions.from_lists([[1, 2, 3]] * n, [[20 + i + j] * (1 + (i + j) % 6) for j in range(n)])

    def learner(roles: Roles) -> None:
        reference: Any = roles.place("reference", Doubles)
        reward: Any = roles.place("reward", Doubles)
        right: list[bool] = []
        send = roles.wire.group.send
        late = lambda *told: (time.sleep(0.001), send(*told))[1]  # another thread's turn
        roles.wire.group = SimpleNamespace(send=late, recv=roles.wire.group.recv)

        def score(first: int) -> None:
            for i in range(first, first + 20):
                right.append(torch.equal(reward.score(batch(i)), batch(i).completion_lens.float() * 3))

        with roles.asking(FP32):
            threads = [threading.Thread(target=score, args=(k,), daemon=True) for k in (0, 1)]
            for thread in threads:
                thread.start()
            for i in range(20):
                right.append(torch.equal(reference.logps(batch(i)), batch(i).completion_ids.float() * 2))
            for thread in threads:
                thread.join(60)
        assert len(right) == 60 and all(right)

    both(serves, learner)


def test_an_error_is_told_while_another_question_is_open() -> None:
    def learner(roles: Roles) -> None:
        reference: Any = roles.place("reference", Doubles)
        roles.place("reward", Doubles)
        bad, good = (Completions.from_lists([[1, 2]], [[token, 5]]) for token in (13, 7))
        with roles.asking(FP32):
            reference.begin(bad)
            reference.begin(good)
            time.sleep(0.2)  # both answers are under way
            with pytest.raises(RunError, match="rank 1 could not answer: ValueError: thirteen"):
                reference.logps(bad)
            assert torch.equal(reference.logps(good), torch.tensor([[14.0, 10.0]]))

    both(serves, learner)


def test_a_learner_that_dies_during_an_answer_is_named_as_one_that_learns() -> None:
    def frozen_rank(roles: Roles) -> None:
        def broken(*_: Any) -> None:
            raise RuntimeError("Connection closed by peer")

        roles.place("reference", Doubles)
        roles.wire.give = broken  # type: ignore[method-assign]
        with pytest.raises(RunError, match="rank 0, which learns, has failed or was ended"):
            roles._answer(0, "reference", Completions.from_lists([[1]], [[2]]), 1.0, 100)

    both(frozen_rank, lambda roles: None)


def test_ctrl_c_leaves_a_frozen_rank_answering_until_the_learners_are_done() -> None:
    answered: list[str] = []

    def answer_others(module: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        answered.append("the learner's last question")

    engine = SimpleNamespace(answers=True, answer_others=answer_others)
    run: Any = SimpleNamespace(engine=engine, method=SimpleNamespace(module=None), history="history")
    assert Trainer.fit(run) == "history" and answered


def test_formats_that_differ_are_refused() -> None:
    def frozen_rank(roles: Roles) -> None:
        roles.place("reference", lambda: None)
        with pytest.raises(ConfigError, match="rank 0 computes in float32 and rank 1 in bfloat16"):
            roles.serve(FP32._replace(compute_dtype=torch.bfloat16))

    def learner(roles: Roles) -> None:
        roles.place("reference", lambda: None)
        with pytest.raises(ConfigError, match="set precision=fp32"), roles.asking(FP32):
            raise AssertionError

    both(frozen_rank, learner)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placement": {"actor": ["0-2"], "reference": ["2-3"]}}, "rank 2 to actor and to reference"),
        ({"placement": {"actor": ["0-1"], "reference": ["2-9"]}}, "nodes have devices for 0-3"),
        ({"placement": {"actor": ["2-3"], "reference": ["0-1"]}}, "the first ranks learn"),
        ({"placement": {"actor": ["0-1"], "critic": ["2-3"]}}, "write actor"),
        ({"placement": {"actor": ["0-1"], "refrence": ["2-3"]}}, "role 'refrence'"),
        ({"placement": {"actor": ["0-1"], "reference": ["3-2"]}}, "are no ranks"),
        ({"placement": {"actor": ["0-2"]}}, "leaves out rank 3"),
        ({"links": [{"between": ["here", "here"], "gigabytes_per_s": 0.0}]}, "has no bandwidth"),
        ({"links": [{"between": ["here", "there"], "gigabytes_per_s": 1.0}]}, "a node 'there'"),
    ],
)  # fmt: skip
def test_files_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    usual = {"nodes": [{"name": "here", "devices": 4}], "links": []}
    with pytest.raises(ConfigError, match=words):
        ClusterTopology(**usual | changes)


@pytest.mark.parametrize(
    ("case", "host", "over", "words"),
    [
        ("sft", None, {}, "this run keeps no such frozen model"),
        ("tr_dpo", None, {}, "this run keeps no such frozen model"),
        ("dpo", "elsewhere", {}, "rank 0 came up on host"),
    ],
)
def test_what_came_up_is_compared(
    case: str, host: str | None, over: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_NB_TOPOLOGY", topology(tmp_path, 1, 1, host))
    with pytest.raises(AssertionError, match=words):
        run_ranks(case, tmp_path / "run", 2, steps=1, **over)
    assert not (tmp_path / "run" / "steps.json").exists()


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    path = topology(tmp_path, 2, 2)
    with pytest.raises(ConfigError, match=r"has 4 devices, but 3 processes come up"):
        launch(case_on_ranks, num_processes=3, run_dir=tmp_path / "run", device="cpu", topology=path)


APART = ClusterTopology(nodes=[{"devices": 2}], links=[], placement={"actor": [0], "reference+reward": [1]})


def test_rewards_that_would_not_be_placed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_config, "roles_here", lambda: SimpleNamespace(topology=APART))
    words = r"reward the ranks \[1\], which is built for one reward model,"
    config = GRPOConfig(kl_coef=0.05)
    for reward in (Ensemble([Doubles(), Doubles()]), Rewards([RewardModelFn(Doubles()), RewardModelFn(Doubles())])):
        with pytest.raises(ConfigError, match=words):
            as_rewards(reward, config)
    assert as_rewards(toy.gold_reward, config).fns == [toy.gold_reward]  # a function stays where it is
    several = {"rewards": [{"model": "a"}, {"model": "b"}]}, {"rewards": [{"model": "a"}], "watch": [{"model": "b"}]}
    for job in [job_of(config.replace(**more), decide_precision("cpu", "fp32")) for more in several]:
        with pytest.raises(ConfigError, match=words):
            placement_table(toy.build_model(0).config, job, APART)


@pytest.mark.parametrize("more", [{"rewards": [{"model": "a"}]}, {"reward": None, "watch": [{"model": "a"}]}])
def test_one_entry_with_a_model_is_placed_as_a_folder_is(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, model, far = list[Any](), Doubles(), Doubles()
    place = lambda role, make: asked.append((role, make())) or far  # type: ignore[func-returns-value]
    for module in (online_config, engine):
        monkeypatch.setattr(module, "roles_here", lambda: SimpleNamespace(topology=APART, place=place))
    config = GRPOConfig(kl_coef=0.05)
    if "watch" in more:
        entries = lambda found, config, key: Rewards([RewardModelFn(model)])
        monkeypatch.setattr(online_config, "entries_as_rewards", entries)
        made = as_rewards(toy.gold_reward, config.replace(watch=more["watch"]))
    else:
        made = as_rewards(Rewards([given := RewardModelFn(model), toy.gold_reward]), config)
        assert given.model is model  # the caller's own stays as it was
    assert asked == [("reward", model)] and far in [getattr(f, "model", None) for f in made.fns]
    assert "| 1 | reference+reward |" in placement_table(
        toy.build_model(0).config,
        job_of(config.replace(rewards=[{"model": "a"}]), decide_precision("cpu", "fp32")),
        APART,
    )


def broken(folder: Path, **changes: Any) -> str:
    """A file for one rank that learns and one that answers, with something wrong."""
    usual: dict[str, Any] = {"nodes": [{"name": "here", "devices": 2}], "links": []}
    usual["placement"] = {"actor": [0], "reference": [1]}
    (folder / "t.yaml").write_text(yaml.safe_dump(usual | changes))
    return str(folder / "t.yaml")


@pytest.mark.parametrize(
    ("changes", "words", "plans"),
    [
        ({"placement": {"actor": ["0-1"], "reference": [1]}}, "groups can't overlap", True),
        ({"placement": {"actor": ["0-1"]}}, "gives no ranks to reference", True),
        ({"placement": {"actor+reference": [0], "reward": [1]}}, "keeps no such frozen model", True),
        ({"links": [{"between": ["here", "here"], "gigabytes_per_s": 0}]}, "no bandwidth", True),
        ({"nodes": [{"name": "a", "hardware": "cpu"}, {"name": "b", "hardware": "H100"}]}, "precision=fp32", True),
        ({"nodes": [{"name": "here", "devices": 2, "host": "elsewhere"}]}, "rank 0 came up on host", False),
        ({"nodes": [{"name": "here", "devices": 2, "hardware": "H100"}]}, "rank 0 came up on 'cpu'", False),
    ],
)  # fmt: skip
def test_each_door_says_the_same_of_a_bad_file(
    changes: dict[str, Any], words: str, plans: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, run = broken(tmp_path, **changes), f"output_dir={tmp_path / 'run'}"
    given = ["dpo", "--toy", "device=cpu", run]
    plain = lambda text: " ".join(text.replace("│", " ").split())  # a table's cells as sentences
    assert words in plain(call("launch", *given, "-n", "2", "--topology", path, code=1))
    assert (
        words in plain(call("plan", *given, "--topology", path, code=int(plans)))
    ) is plans  # for other machines, too
    monkeypatch.setenv("RLHF_NB_TOPOLOGY", path)
    assert words in plain(call("doctor", *given, code=1))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_other_hardware_than_stated_is_refused_by_the_rank() -> None:
    stated = ClusterTopology(
        nodes=[{"name": "a", "hardware": "cpu"}, {"name": "b", "hardware": "A100"}], links=[],
        placement={"actor": [0], "reference": [1]},
    )  # fmt: skip
    gpu = {"host": "h", "hardware": "NVIDIA A100-SXM4-80GB", "format": "float32"}
    stated.check_came_up([gpu | {"hardware": "cpu"}, gpu])
    with pytest.raises(
        ConfigError, match="rank 1 came up on 'NVIDIA L4', but the topology says that node b has 'A100'"
    ):
        stated.check_came_up([gpu | {"hardware": "cpu"}, gpu | {"hardware": "NVIDIA L4"}])
    with pytest.raises(ConfigError, match="rank 0 computes in float32 and rank 1 in bfloat16"):
        stated.check_came_up([gpu | {"hardware": "cpu"}, gpu | {"format": "bfloat16"}])


def test_counters_of_a_wire_miss_nothing_when_threads_ask() -> None:
    import sys

    from rlhf_nb.run.roles import Wire

    wire, before = Wire(None), sys.getswitchinterval()
    tensor = torch.zeros(1)
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=lambda: [wire._count(tensor) for _ in range(20_000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert (wire.messages, wire.bytes) == (80_000, 320_000)


def test_options_that_a_topology_leaves_without_effect_are_refused(tmp_path: Path) -> None:
    path = topology(tmp_path, 1, 1)
    for more in (["--slurm"], ["--k8s", "image"]):
        assert "RLHF_NB_TOPOLOGY" in call("launch", "dpo", "--toy", "--topology", path, *more, code=1)
    for more in (["--gpus", "2"], ["--price", "2"], ["--memory", "40"], ["--on", "h100"]):
        assert "leave them out" in call("plan", "dpo", "--toy", "--topology", path, *more, code=1)
    assert "| 0 | actor+critic |" in call("plan", "dpo", "--toy", "--topology", path)


def test_labelling_places_nothing() -> None:
    job: Any = SimpleNamespace(engine=SimpleNamespace(roles=object()))
    with pytest.raises(ConfigError, match="leave the topology out"):
        Labelling.run(job)


def dies(root: str) -> None:
    """A run of which one rank is killed: one that learns before its sixth update, one that answers at its sixth question."""
    count = iter(range(1, 100))

    def mortal(f: Any) -> Any:
        def either(*args: Any, **options: Any) -> Any:
            if next(count) == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return f(*args, **options)

        return either

    rank, dying = int(os.environ["RANK"]), int(os.environ["TEST_DIES"])
    trainer = dpo(steps=12, save_every=2, output_dir=root)
    if rank == dying and rank < 2:
        trainer.method.look_ahead = mortal(trainer.method.look_ahead)
    elif rank == dying:
        Reference.logps = mortal(Reference.logps)  # type: ignore[method-assign]
    trainer.fit()


@pytest.mark.slow  # 60 CPU seconds
@pytest.mark.parametrize(
    ("rank", "words"), [(1, "rank 1, which learns, has failed"), (3, "rank 3, which holds the reference, has ended")]
)
def test_a_rank_that_dies_is_named_and_the_run_goes_on(
    rank: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_NB_TOPOLOGY", topology(tmp_path, 2, 2))
    monkeypatch.setenv("TEST_DIES", str(rank))
    over = {"steps": 12, "save_every": 2}
    one, other = tmp_path / "straight", tmp_path / "killed"
    run_ranks("dpo", one, 4, **over)
    with pytest.raises(AssertionError, match=words):
        run_ranks("test_roles:dies", other, 4)
    assert 4 <= len(events(other)) < 12
    run_ranks("dpo", other, 4, resume=True, **over)
    a, b = (load_file(x / "weights.safetensors") for x in (one, other))
    assert all(a[k].equal(b[k]) for k in a)
    keep = ("step", "loss", "grad_norm")
    assert [[e[k] for k in keep] for e in events(one)] == [[e[k] for k in keep] for e in events(other)]


def timed(root: str) -> None:
    """Two runs of a rank, one that looks ahead and one that doesn't; the reference and the update each take a second."""
    asked = Reference.logps

    def slow(self: Reference, *args: Any, **options: Any) -> Any:
        time.sleep(1.0)
        return asked(self, *args, **options)

    Reference.logps = slow  # type: ignore[method-assign]
    for name in ("ahead", "in_turn"):
        trainer = dpo(steps=8, token_budget=4096, output_dir=str(Path(root) / name))
        learnt = trainer.method.loss
        trainer.method.loss = lambda micro, learnt=learnt: (time.sleep(1.0), learnt(micro))[1]
        if name == "in_turn":
            trainer.method.look_ahead = lambda peek: None
        trainer.fit()


@pytest.mark.slow  # 40 seconds, most of them asleep
def test_a_slow_reference_overlaps_with_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_NB_TOPOLOGY", topology(tmp_path, 2, 2))
    run_ranks("test_roles:timed", tmp_path / "run", 4)
    seconds = {n: [e["perf/step_s"] for e in events(tmp_path / "run" / n)][1:-1] for n in ("ahead", "in_turn")}
    ratio = statistics.median(seconds["in_turn"]) / statistics.median(seconds["ahead"])
    print(f"in turn / ahead: {ratio:.2f}", seconds)
    assert ratio >= 1.4
