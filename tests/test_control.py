"""The control file: asked from outside, obeyed or refused between two steps, remembered over kills."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from process_cases import run_ranks
from resume_harness import Numbers, Regression, outcome, regression_config, run_to_end, spawn

from rlhf_nb.config import TrainConfig
from rlhf_nb.core import RunError
from rlhf_nb.run.callbacks import Callback
from rlhf_nb.run.checkpoint import checkpoints_in
from rlhf_nb.run.control import Control
from rlhf_nb.run.log import ControlRequests, EventLog, RunDir, append_line, read_metrics
from rlhf_nb.run.loop import Trainer


class Steered(Regression):
    """The harness's method, with its coefficient as a control."""

    def controls(self) -> dict[str, Control]:
        return {"coef": Control(lambda: self.coef, lambda v: setattr(self, "coef", v), 0.1, 10.0)}


class Person(Callback):
    """Makes requests at given steps; each only once in the life of the folder, like a person."""

    def __init__(self, when: dict[int, list[tuple[Any, ...]]], while_paused: list[tuple[Any, ...]] = ()) -> None:  # type: ignore[assignment]
        self.when, self.while_paused, self.waits = when, list(while_paused), 0

    def on_step(self, run: Any, event: dict[str, Any]) -> None:
        for i, request in enumerate(self.when.get(run.step, ())):
            once = run.run_dir.path / f"asked-{run.step}-{i}"
            if not once.exists():
                once.touch()
                run.run_dir.request(*request)

    def on_wait(self, run: Any) -> None:
        self.waits += 1
        if self.while_paused:
            run.run_dir.request(*self.while_paused.pop(0))


def trainer(path: Path, person: Callback | None = None, **over: Any) -> Trainer:
    return Trainer(Steered(), Numbers(), regression_config(**over), run_dir=path, callbacks=[person] if person else [])


def controls(path: Path) -> list[dict[str, Any]]:
    return [e for e in read_metrics(path) if e["type"] == "control"]


PERSON: dict[int, list[tuple[Any, ...]]] = {
    4: [("set", "coef", 0.5)], 8: [("set", "lr", 1e-3), ("save",)], 14: [("set", "coef", 2.0)], 17: [("evaluate",)],
}  # fmt: skip


def steered(run_dir: Path) -> Trainer:
    """A case of the kill harness."""
    return Trainer(
        Steered(pause=0.003), Numbers(), regression_config(), run_dir=run_dir, callbacks=[Person({k: list(v) for k, v in PERSON.items()})]
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# obeying and refusing


def test_requests_are_served_at_the_next_boundary(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain").fit()
    run = trainer(tmp_path / "run", Person({4: [("set", "coef", 0.5), ("set", "lr", 1e-3), ("save",)]}))
    history = run.fit()
    assert history.series("loss")[:4] == plain.series("loss")[:4] and history[4]["loss"] != plain[4]["loss"]
    done = controls(tmp_path / "run")
    assert [(e["step"], e["request"], e.get("key"), e["ok"]) for e in done] == [
        (4, "set", "coef", True),
        (4, "set", "lr", True),
        (4, "save", None, True),
    ]
    assert done[0]["new"] == 0.5 and abs(done[1]["new"] - 1e-3) < 1e-12
    scheduled = plain.series("lr")
    scale = history[4]["lr"] / scheduled[4]
    assert abs(history[4]["lr"] - 1e-3) < 0.2e-3  # the schedule has moved on by one step
    for a, b in zip(history.series("lr")[4:], scheduled[4:]):
        assert a == pytest.approx(b * scale)  # the schedule goes on, scaled
    assert any(e["type"] == "save" and e["step"] == 4 for e in read_metrics(tmp_path / "run"))


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        (("set", "coef", 99), "coef must be a number from 0.1 to 10, not 99; it stays"),
        (("set", "coef", float("nan")), "coef must be a number"),
        (("set", "coef", "high"), "not 'high'"),
        (("set", "coef", True), "not True"),
        (("set", "coeff", 1.0), "Did you mean 'coef'"),
        (("set", "momentum", 1.0), "This run can set coef, lr"),
        (("set", "lr", -1.0), "lr must be a number from 0 to 1"),
    ],
)
def test_what_cannot_be_done_is_refused_and_training_goes_on(tmp_path: Path, request_: Any, word: str) -> None:
    plain = trainer(tmp_path / "plain", steps=6).fit()
    run = trainer(tmp_path / "run", Person({3: [request_]}), steps=6).fit()
    (event,) = controls(tmp_path / "run")
    assert not event["ok"] and word in event["why"]
    assert run.series("loss") == plain.series("loss") and run.stopped is None


def test_garbage_in_the_control_file(tmp_path: Path) -> None:
    class Vandal(Callback):
        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            if run.step == 2:
                with open(run.run_dir.control_path, "ab") as f:
                    f.write(
                        b'please stop\n[1, 2]\n{"request": "set"}\n\xff\xfe\n{"request": "set", "key": {"a": 1}, "value": []}\n{"torn'
                    )

    run = trainer(tmp_path / "run", Vandal(), steps=5).fit()
    assert len(run) == 5 and run.stopped is None
    assert len(controls(tmp_path / "run")) == 6 and not any(e["ok"] for e in controls(tmp_path / "run"))


def test_requests_by_hand_and_by_several_writers(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    threads = [
        threading.Thread(target=lambda: [run_dir.request("set", "coef", 1.0) for _ in range(50)]) for _ in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    seen = ControlRequests(run_dir.control_path).new()
    assert len(seen) == 400 == len({r["id"] for r in seen})
    with pytest.raises(RunError, match="Did you mean 'pause'"):
        run_dir.request("pauze")
    with pytest.raises(RunError, match="there is no run in"):
        RunDir(tmp_path / "nowhere").request("stop")


def test_stop_within_one_step_leaves_a_checkpoint(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain").fit()
    run = trainer(tmp_path / "run", Person({5: [("stop",)]}))
    history = run.fit()
    assert len(history) == 5 and history.stopped == "asked to stop from outside"
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())[-1:] == ["step-0000000005"]
    assert run.fit().series("loss") == plain.series("loss")  # the stop is not obeyed twice


# ---------------------------------------------------------------------------------------------------------------------
# what was asked before nobody wants now


def test_stale_requests_do_not_stop_a_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    RunDir(path).request("stop")  # before anything ran here
    assert len(trainer(path, steps=6).fit()) == 6
    RunDir(path).request("stop")  # after the end
    again = trainer(path, steps=9)
    assert len(again.fit(resume=True)) == 9
    late = [e for e in controls(path) if not e["ok"]]
    assert len(late) == 2 and all("while the run was not running" in e["why"] for e in late)
    third = trainer(path, steps=4)
    third.run_dir.request("stop")
    assert len(third.fit(overwrite=True)) == 4 and not controls(path)


def test_settings_survive_a_checkpoint(tmp_path: Path) -> None:
    straight = trainer(tmp_path / "a", Person({4: [("set", "coef", 0.5), ("set", "lr", 2e-3)]})).fit()
    trainer(tmp_path / "b", Person({4: [("set", "coef", 0.5), ("set", "lr", 2e-3)], 11: [("stop",)]})).fit()
    resumed = trainer(tmp_path / "b").fit(resume=True)
    assert resumed.series("loss") == straight.series("loss") and resumed.series("lr") == straight.series("lr")
    event = next(e for e in read_metrics(tmp_path / "b") if e["type"] == "resume")
    assert event["controls"]["lr"]["value"] == pytest.approx(resumed[11]["lr"])


def test_a_checkpoint_holds_what_was_set_before_it(tmp_path: Path) -> None:
    """It is written in the background, while the run goes on and is steered."""
    run = trainer(tmp_path / "run", Person({3: [("set", "coef", 0.5)]}), steps=4)
    run.start()
    state = run.control.state_dict()
    run.fit()
    assert state["values"] == {} and run.control.values == {"coef": 0.5}


@pytest.mark.slow  # 15 CPU seconds; one kill in a pause is fast, below
def test_steered_run_survives_kills_bit_for_bit(tmp_path: Path) -> None:
    """A number that was set after the last checkpoint is set again at its step, by itself; nothing else is obeyed twice."""
    straight = run_to_end("steered", tmp_path / "straight")
    for kill_at in (6, 10, 16):
        path = tmp_path / f"killed-{kill_at}"
        process = spawn("steered", path)
        metrics = path / "metrics.jsonl"
        # saves are written in the background: without a whole one the run would begin anew, and with it what was asked
        while process.is_alive() and not (
            metrics.exists()
            and metrics.read_bytes().count(b'"type": "step"') >= kill_at
            and checkpoints_in(path / "checkpoints")
        ):
            time.sleep(0.0005)
        process.kill()
        process.join()
        after = outcome(path) if (path / "done.json").exists() else run_to_end("steered", path)
        assert after == straight
        asked = [json.loads(x) for x in (path / "control.jsonl").read_text().splitlines()]
        ids = [r["served"] for r in asked if "served" in r]
        assert len(ids) == len(set(ids))  # served once each


def test_old_checkpoints_without_control_state(tmp_path: Path) -> None:
    import rlhf_nb.run.state as state

    run = trainer(tmp_path / "run", steps=4)
    run.fit()
    tensors, meta = state.run_state(run)
    del meta["control"]
    fresh = trainer(tmp_path / "other", steps=4)
    assert state.restore(fresh, tensors, meta) == 0 and fresh.engine.lr_scale == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# pausing


def test_pause_serves_and_is_not_counted(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", steps=10).fit()
    wishes = [("save",), ("set", "coef", 0.5), ("set", "coef", -3), ("evaluate",), ("resume",)]
    person = Person({3: [("pause",)]}, wishes)
    run = trainer(tmp_path / "run", person, steps=10)
    begin = time.perf_counter()
    history = run.fit()
    assert time.perf_counter() - begin > 0.8 and person.waits >= 5
    assert max(history.series("perf/step_s")) < 0.5  # five looks of 0.2 s are in none of the steps
    assert [e["request"] for e in controls(tmp_path / "run")] == ["pause", "save", "set", "set", "evaluate", "resume"]
    assert [e["ok"] for e in controls(tmp_path / "run")] == [True, True, True, False, True, True]
    assert history.series("loss")[:3] == plain.series("loss")[:3] and history[3]["loss"] != plain[3]["loss"]
    steps = [e["step"] for e in read_metrics(tmp_path / "run") if e["type"] == "save"]
    assert 3 in steps and any(e["type"] == "eval" and e["step"] == 3 for e in read_metrics(tmp_path / "run"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """All runs of a test add in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")  # a forked child has one
def test_set_in_a_pause_after_a_save_survives_a_kill(tmp_path: Path) -> None:
    """The checkpoint of step 3 was written before the number was set, at the same step."""
    wishes = [("save",), ("set", "coef", 0.5), ("resume",)]
    straight = trainer(tmp_path / "a", Person({3: [("pause",)]}, list(wishes)), save_every=None).fit()

    class Dies(Person):
        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            super().on_step(run, event)
            if run.step == 6:
                run.writer.wait()
                os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        trainer(tmp_path / "b", Dies({3: [("pause",)]}, list(wishes)), save_every=None).fit()
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    resumed = trainer(tmp_path / "b", save_every=None).fit(resume=True)
    assert resumed.series("loss") == straight.series("loss")


@pytest.mark.parametrize("how", ["stop", "ctrl-c"])
def test_a_paused_run_can_be_ended(tmp_path: Path, how: str) -> None:
    class CtrlC(Person):
        def on_wait(self, run: Any) -> None:
            super().on_wait(run)
            if how == "ctrl-c" and self.waits == 2:
                signal.raise_signal(signal.SIGINT)

    person = CtrlC({3: [("pause",)]}, [("stop",)] if how == "stop" else [])
    history = trainer(tmp_path / "run", person).fit()
    assert len(history) == 3 and history.stopped in ("asked to stop from outside", "interrupted (SIGINT)")
    assert (tmp_path / "run" / "checkpoints" / "step-0000000003").is_dir()


# ---------------------------------------------------------------------------------------------------------------------
# the methods of the package, and the cost


def _toy(case: str, path: Path, person: Person, **over: Any) -> Trainer:
    from rlhf_nb.data import toy

    model = toy.build_model(0), toy.build_tokenizer()
    common: dict[str, Any] = {
        "console": False,
        "device": "cpu",
        "steps": 4,
        "epochs": None,
        "sampling": {"max_new_tokens": 6},
    }
    data: dict[str, Any] = {
        "reward": toy.gold_reward,
        "rows": toy.train_prompts(16),
        "run_dir": path,
        "callbacks": [person],
    }
    if case == "ppo":
        from rlhf_nb.train.ppo import PPOConfig, PPOTrainer

        return PPOTrainer(
            PPOConfig.preset("toy", **common, rollout_batch_size=8, mini_batch_size=8, **over), *model, **data
        )
    from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer

    sizes = {"rollout_batch_size": 8, "mini_batch_size": 8, "num_generations": 4}
    return GRPOTrainer(GRPOConfig.preset("toy", **common, **sizes, **over), *model, **data)


def test_ppo_offers_its_numbers_and_resumes_with_them(tmp_path: Path) -> None:
    wishes = [
        ("set", "kl_coef", 0.7),
        ("set", "kl_target", 2.5),
        ("set", "temperature", 0.6),
        ("set", "temperature", 9.0),
    ]
    over = {"kl_target": 6.0, "kl_horizon": 1000.0}
    run = _toy("ppo", tmp_path / "run", Person({2: wishes}), **over)
    history = run.fit()
    assert [e["ok"] for e in controls(tmp_path / "run")] == [True, True, True, False]
    assert abs(history[2]["objective/kl_coef"] - 0.7) < 1e-9 and run.method.config.sampling.temperature == 0.6
    assert (
        run.config.sampling.temperature == 1.0 and run.method.kl.target == 2.5
    )  # the run's configuration is as it was
    again = _toy("ppo", tmp_path / "run", Person({}), **over)
    again.start(resume=True)
    assert again.method.kl.target == 2.5 and again.method.kl.coef == run.method.kl.coef
    assert again.method.config.sampling.temperature == 0.6
    fixed = _toy("ppo", tmp_path / "fixed", Person({1: [("set", "kl_target", 3.0)]}))
    fixed.fit()
    assert "'kl_target' can't be set" in controls(tmp_path / "fixed")[0]["why"]


def test_grpo_offers_its_numbers(tmp_path: Path) -> None:
    run = _toy(
        "grpo", tmp_path / "run", Person({1: [("set", "kl_coef", 0.3), ("set", "temperature", 0.7)]}), kl_coef=0.1
    )
    run.fit()
    assert run.method.kl_coef == 0.3 and run.method.config.sampling.temperature == 0.7
    free = _toy("grpo", tmp_path / "free", Person({}))
    assert set(free.control.controls()) == {"lr", "temperature"}  # without a reference nothing is paid for drift
    free.fit()
    start = next(e for e in read_metrics(tmp_path / "free") if e["type"] == "start")
    assert start["controls"]["temperature"] == {"value": 1.0, "low": 0.1, "high": 2.0} and start["format"] == 1


def two_ranks(run_dir: str) -> None:
    """Body of each rank, and of the single process: steered, paused, and stopped before its end."""
    from test_loop import Uneven

    class Weighted(Uneven):
        weight = 1.0

        def loss(self, micro: Any) -> dict[str, Any]:
            return {"loss": (super().loss(micro)["loss"][0], self.weight)}

        def controls(self) -> dict[str, Control]:
            return {"weight": Control(lambda: self.weight, lambda v: setattr(self, "weight", v), 0.1, 10.0)}

    class Asks(Person):
        def on_step(self, run: Any, event: dict[str, Any]) -> None:
            if run.engine.is_main:
                super().on_step(run, event)

        def on_wait(self, run: Any) -> None:
            if run.engine.is_main:
                super().on_wait(run)

    person = Asks({2: [("set", "weight", 3.0)], 3: [("pause",)], 6: [("stop",)]}, [("set", "lr", 0.01), ("resume",)])
    config = TrainConfig(
        steps=20, mini_batch_size=8, micro_batch_size=3, console=False, device="cpu", optimizer={"lr": 0.05, "schedule": "constant"}
    )  # fmt: skip
    t = Trainer(Weighted(), Numbers(24), config, run_dir=run_dir, callbacks=[person])
    t.fit()
    if t.engine.is_main:
        torch.save([p.detach() for p in t.engine.unwrap(t.method.module).parameters()], Path(run_dir) / "weights.pt")


def test_two_ranks_obey_alike(tmp_path: Path) -> None:
    run_ranks("test_control:two_ranks", tmp_path / "one")
    run_ranks("test_control:two_ranks", tmp_path / "two", 2)
    one, two = (torch.load(tmp_path / f / "weights.pt", weights_only=True) for f in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)
    for f in ("one", "two"):
        assert [(e["step"], e["request"], e["ok"]) for e in controls(tmp_path / f)] == [
            (2, "set", True), (3, "pause", True), (3, "set", True), (3, "resume", True), (6, "stop", True),
        ]  # fmt: skip


def test_looking_costs_microseconds(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", steps=2)
    run.fit()
    append_line(run.run_dir.control_path, {"id": "x", "request": "save"})
    run.control.listen()
    begin = time.process_time()
    for _ in range(1000):
        assert not run.control.waiting()
    assert (time.process_time() - begin) / 1000 < 2e-4


def test_event_log_of_a_refusal_is_strict_json(tmp_path: Path) -> None:
    trainer(tmp_path / "run", Person({1: [("set", "coef", float("inf"))]}), steps=3).fit()
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert EventLog(None).append("x", 0)["step"] == 0
