"""From `fit()` to the line with the formula, and from a config to the first update: what a reader passes, traced while a run trains."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest
import resume_harness
import torch
from resume_harness import CASES, Numbers, Points, Regression, regression_config
from test_layers import FLOORS

from rlhf_nb.losses.sft import sft_loss
from rlhf_nb.run.loop import Trainer
from rlhf_nb.train.ppo import PPOConfig
from rlhf_nb.train.stage import run_stage
from rlhf_nb.types import LossSum

MOST = 4
MOST_ADVANTAGE = 5
MOST_MODULES = 50  # above the ground: errors, core, types and settings are in every module's words
MOST_CLIMBS = 15
ONLINE = ["ppo", "grpo", "rloo", "online"]
METHODS = [n for n, place in CASES.items() if place.startswith("resume_harness:") and n != "regression"]


def paths_to_formulas(run: Trainer, below: tuple[str, str] = ("loss", "update")) -> set[tuple[str, ...]]:
    """The package's functions between `fit` and each function of `losses` that a step calls, outermost first.

    Args:
        run: to be fitted.
        below: the method's function that calls formulas, and the trainer's that leads to it.
    """
    found: set[tuple[str, ...]] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        code, names_there = frame.f_code, frame.f_globals
        named = inspect.unwrap(names_there[code.co_name]) if callable(names_there.get(code.co_name)) else None
        is_formula = getattr(named, "__code__", None) is code  # a function, not a method
        if event != "call" or not is_formula or not names_there.get("__name__", "").startswith("rlhf_nb.losses."):
            return
        names, learning = list[tuple[str, str]](), False
        at: FrameType | None = frame
        while at is not None:
            module = at.f_globals.get("__name__", "")
            learning |= at.f_code.co_name == below[0]
            if module.startswith("rlhf_nb"):
                names.append((module, at.f_code.co_name))
            at = at.f_back
        inner = sum(module.startswith("rlhf_nb.losses.") for module, _ in names)
        path = [name for _, name in reversed(names)]
        if inner == 1 and learning and {"fit", below[1]} <= set(path):  # not evaluation; and not what a formula calls
            found.add(tuple(path[path.index("fit") :]))

    sys.setprofile(look)
    try:
        run.fit()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("case", METHODS)
def test_at_most_four_from_fit_to_the_formula(case: str, tmp_path: Path) -> None:
    run = getattr(resume_harness, case)(tmp_path / "run")
    run.total_steps = 1
    paths = paths_to_formulas(run)
    assert paths, "no loss was seen: the trace looks at the wrong place"
    for path in paths:
        assert len(path) - 1 <= MOST, " → ".join(path)


@pytest.mark.parametrize("case", ONLINE)
def test_at_most_five_from_fit_to_an_advantage(case: str, tmp_path: Path) -> None:
    run = getattr(resume_harness, case)(tmp_path / "run")
    run.total_steps = 1
    paths = paths_to_formulas(run, ("advantages", "collect"))
    assert paths or case == "online", "no advantage was seen: the trace looks at the wrong place"  # it calls none
    for path in paths:
        assert len(path) - 1 <= MOST_ADVANTAGE, " → ".join(path)
    (file,) = {
        inspect.getsourcefile(inspect.unwrap(getattr(type(run.method), name)))
        for name in ("collect", "advantages", "loss")
    }
    assert file == inspect.getsourcefile(type(run.method)), "a method is one file that one reads from top to bottom"


def test_one_function_too_many_is_seen(tmp_path: Path) -> None:
    between = FunctionType(
        (lambda formula, *args: formula(*args)).__code__, {"__name__": "rlhf_nb.train.somewhere"}, "between"
    )

    class Indirect(Regression):
        def loss(self, micro: Points) -> dict[str, tuple[LossSum, float]]:
            logps = self.module(micro.x)
            return {"loss": (between(sft_loss, logps, torch.ones_like(logps, dtype=torch.bool)), 1.0)}

    run = Trainer(Indirect(), Numbers(), regression_config(steps=1), run_dir=tmp_path / "run")
    (path,) = paths_to_formulas(run)
    assert (
        len(path) == 5
    )  # fit, update, the engine's turn, between, sft_loss; Indirect.loss is no function of the package


def test_the_core_of_the_loop_can_be_recited() -> None:
    lines = 0
    for name in ("fit", "next_batch", "collect", "update", "finish_step"):
        source = textwrap.dedent(inspect.getsource(getattr(Trainer, name)))
        body = ast.parse(source).body[0]
        assert isinstance(body, ast.FunctionDef) and isinstance(body.body[0], ast.Expr)  # a docstring
        docstring = range(body.body[0].lineno, (body.body[0].end_lineno or 0) + 1)
        lines += sum(bool(x.strip()) and i not in docstring for i, x in enumerate(source.splitlines(), 1))
    assert lines <= 60


def floor_of(module: str) -> float:
    """The floor of the room that a module of the package is in."""
    return FLOORS.get(module.split(".")[1] if "." in module else module, 10.0)


class Arrived(Exception):
    """The first update begins."""


def way_to_the_first_update(config: PPOConfig) -> tuple[list[str], list[str]]:
    """What runs between a config and the first update.

    Returns:
        The modules whose functions are called, in the order of entering; and each place where a function calls one on
        a higher floor ("run.loop.collect calls train.ppo.collect"), which is called back to, and can't be read by
        following imports. What `import` does is neither.
    """
    entered, climbs = dict[str, None](), dict[str, None]()

    def look(frame: FrameType, event: str, _: Any) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event != "call" or name == "<module>" or not module.startswith("rlhf_nb"):
            return
        entered[module] = None
        if (module, name) == ("rlhf_nb.run.loop", "update"):
            sys.setprofile(None)
            raise Arrived
        above = frame.f_back
        while above is not None and not above.f_globals.get("__name__", "").startswith("rlhf_nb"):
            above = above.f_back
        if above is not None and above.f_code.co_name != "<module>":
            caller = above.f_globals["__name__"]
            if floor_of(module) > floor_of(caller):
                climbs[f"{caller[8:]}.{above.f_code.co_name} calls {module[8:]}.{name}"] = None

    sys.setprofile(look)
    try:
        with pytest.raises(Arrived):
            run_stage(config)
    finally:
        sys.setprofile(None)
    return list(entered), list(climbs)


def test_from_a_config_to_the_first_update(tmp_path: Path) -> None:
    sizes = {"steps": 1, "mini_batch_size": 8, "rollout_batch_size": 8, "sampling": {"max_new_tokens": 4}}
    config = PPOConfig.preset("toy", output_dir=str(tmp_path / "run"), reward="gold", console=False, **sizes)
    entered, climbs = way_to_the_first_update(config)
    above = [m for m in entered if floor_of(m) >= 1]
    assert {"rlhf_nb.train.ppo", "rlhf_nb.losses.advantages", "rlhf_nb.run.loop"} <= set(above)
    assert any("calls train.ppo.collect" in climb for climb in climbs)  # the loop calls its method: that must be seen
    assert len(above) <= MOST_MODULES, "\n".join(above)
    assert len(climbs) <= MOST_CLIMBS, "\n".join(climbs)
