"""Games of other packages, played for real where they are installed: seeded, whoever else plays; a run learns from one."""

from __future__ import annotations

import asyncio
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlhf_nb.core import ConfigError
from rlhf_nb.data import toy
from rlhf_nb.rollout.adapters import _PROGRAM, Gymnasium, ReasoningGym, TextArena, Verifiers
from rlhf_nb.rollout.episodes import Turn
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer


def play(game: Any, moves: list[str], seed: int = 3) -> list[Any]:
    """All that a game says."""
    heard: list[Any] = [game.reset({}, seed)]
    for i, move in enumerate(moves, 1):
        heard.append(game.step(Turn(move, [], None, i, 99)))
        if heard[-1].done:
            break
    if hasattr(game, "close"):
        game.close()
    return heard


@pytest.mark.parametrize(
    ("name", "moves", "shows", "pays"),
    [
        ("FrozenLake-v1", [*"?1122121", "2", "2"], "[S]FFF", None),
        ("Taxi-v4", ["0"] * 3, "+---------+", None),
        ("Blackjack-v1", ["0"], "State: (", None),
        ("CliffWalking-v1", ["0", *["1"] * 11, "2"], "State: 36", -1.0),
    ],
)
def test_gymnasium(name: str, moves: list[str], shows: str, pays: float | None) -> None:
    pytest.importorskip("gymnasium")
    one, two = (play(Gymnasium(name), moves) for _ in range(2))
    assert one == two and shows in one[0] and "Answer with a number from 0 to" in one[0]
    assert pays is None or (one[-1].done and one[-1].reward == pays and one[1].reward == -1)
    assert name != "FrozenLake-v1" or one[1].metrics == {"no_move": 1.0}


@pytest.mark.parametrize("name", ["basic_arithmetic", "chain_sum", "word_sorting", "sudoku"])
def test_reasoning_gym(name: str) -> None:
    pytest.importorskip("reasoning_gym")
    game = ReasoningGym(name)
    asked = game.reset({}, 5)
    right = str(game.puzzles[0]["answer"])
    assert asked == ReasoningGym(name).reset({}, 5) != game.reset({}, 6)
    game.reset({}, 5)
    marked = [game.step(Turn(text, [], None, 1, 9)) for text in (f"So: <answer>{right}</answer>.", right, "no idea")]
    assert [m.reward for m in marked[:2]] == [1.0, 1.0] and marked[2].reward < 0.5 and all(m.done for m in marked)


HOSTILE = [  # answers of a policy that has learnt Python; each makes the file where it is evaluated
    "open('{}', 'w')", "__import__('pathlib').Path('{}').touch()", "[open ('{}', 'w') for _ in [1]]", "(open\t('{}', 'w'))",
    "(open #+\n('{}', 'w'))", "sqrt(\"ope%c%c'{}', 'w'%c\" % (110, 40, 41))", "[sqrt(p) for sqrt in [open] for p in ['{}', 'w']]",
    "(exp:=open)('{}', 'w')", "x!*open('{}', 'w')", "f\"{{open('{}', 'w')}}\"",
]  # fmt: skip


def test_no_check_runs_a_policys_answer(tmp_path: Path) -> None:
    """Of all datasets; those whose own check does run it are found by what it does."""
    pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import DATASETS

    file, runs = tmp_path / "made", set()
    for name in DATASETS.keys() - {"composite"}:  # which is made of the others
        game = ReasoningGym(name)
        game.reset({}, 5)
        right = game.step(Turn(str(game.puzzles[0]["answer"]), [], None, 1, 9))
        assert not right.metrics, f"{name}: its own answer was refused"
        for answer in HOSTILE:
            game.step(Turn(answer.format(file), [], None, 1, 9))
            assert not file.exists(), f"{name}: {answer}"
        with suppress(Exception):
            game.puzzles.score_answer(HOSTILE[0].format(file), game.puzzles[0])
        if file.exists():
            runs.add(name)
            file.unlink()
    assert {"countdown", "n_queens", "simple_integration"} <= runs


GAMES = {
    "GuessTheNumber-v0": [f"[{i}]" for i in range(1, 21)], "TowerOfHanoi-v0": ["[A B]", "[A C]", "nonsense"],
    "Mastermind-v0": ["[1 2 3 4]", "[2 3 4 5]"], "FrozenLake-v0": ["[right]", "[down]"], "LightsOut-v0": ["[1]"],
}  # fmt: skip


@pytest.mark.parametrize("name", GAMES)
def test_textarena(name: str) -> None:
    pytest.importorskip("textarena")
    alone = play(TextArena(name), GAMES[name])
    others = [TextArena(name) for _ in range(3)]
    for i, other in enumerate(others):
        other.reset({}, i)
    assert play(TextArena(name), GAMES[name]) == alone and len(alone[0]) > 40
    assert all(s.says and alone[0] not in s.says for s in alone[1:] if not s.done), "rules are told once"


TASKSET = """
import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum]):
    NEEDS_CONTAINER = NEEDS

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_message.content.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, task, trace) -> float:
        return float(len(trace.assistant_messages[-1].content) < 20)

    @vf.metric
    async def turns(self, trace) -> float:
        return float(trace.num_turns)


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for i in range(50):
            yield SumTask(Sum(prompt=f"What is {i} + {i}?", system_prompt="Only the number.", answer=str(2 * i)), self.config.task)
"""


def test_verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, needs in (("some_sums", "False"), ("boxed_sums", "True")):
        (tmp_path / f"{name}.py").write_text(TASKSET.replace("NEEDS\n", f"{needs}\n"))
    game = Verifiers("some-sums")
    asked = game.reset({}, 4)
    assert asked == Verifiers("some-sums").reset({}, 4) != game.reset({}, 5) and asked[0]["role"] == "system"
    assert game.reset({"task": 7}, 5)[1] == {"role": "user", "content": "What is 7 + 7?"}
    steps = [asyncio.run(game.step(Turn(text, [], None, 1, 9))) for text in ("14", "15", "the answer is " * 3)]
    assert [s.reward for s in steps] == [1.5, 0.5, 0.0] and all(s.done for s in steps)
    assert steps[0].metrics == {"right": 1.0, "short": 1.0, "turns": 1.0}
    with pytest.raises(ConfigError, match="boxed-sums' needs a container; answers of one turn"):
        Verifiers("boxed-sums")
    with pytest.raises(
        ConfigError, match="taskset is 'no_such', and verifiers can't load it: taskset 'no_such' not found"
    ):
        Verifiers("no_such")


MIXED = (
    TASKSET.replace("NEEDS\n", "False\n")
    + """
class Boxed(SumTask):
    NEEDS_CONTAINER = True


class Mixed(Sums):
    def load(self):
        LOADED.append(self)
        yield from super().load()
        if self.config.id == "last-boxed":
            yield Boxed(Sum(prompt="?", answer="0"), self.config.task)
"""
)


def test_verifiers_reads_a_taskset_once_and_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many episodes begin at the same time."""
    pytest.importorskip("verifiers")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("once_read", "last_boxed"):
        text = MIXED.replace('__all__ = ["Sums"]', '__all__ = ["Mixed"]\nLOADED = []')
        (tmp_path / f"{name}.py").write_text(text)
    with ThreadPoolExecutor(8) as pool:
        games = list(pool.map(lambda _: Verifiers("once-read"), range(16)))
    assert len(sys.modules["once_read"].LOADED) == 1 and Verifiers("once-read", most=3).tasks != games[0].tasks
    for task in (-1, 50):
        with pytest.raises(ConfigError, match=f"column task is {task}, and the taskset has the tasks 0 to 49"):
            games[0].reset({"task": task}, 5)
    with pytest.raises(ConfigError, match="needs a container"):
        Verifiers("last-boxed")


def test_a_run_learns_from_a_game(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    how = {"environment": "gymnasium", "options": {"game": "FrozenLake-v1"}, "max_turns": 3}
    config = GRPOConfig.preset(
        "toy", output_dir=str(tmp_path), steps=1, num_generations=4, mini_batch_size=8, console=False, episodes=how
    )
    model = toy.build_model(0, "tiny")
    model.config.max_position_embeddings = 1024
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        event = GRPOTrainer(config, model, toy.build_tokenizer(), rows=[{"prompt": "Play."}] * 8).fit()[-1]
    assert event["rollout/no_move"] + event["rollout/turns"] > 1 and "rewards/environment" in event


def test_what_counts_as_a_program() -> None:
    """Powers that take for ever among them, however they are written; formulas pass."""
    bombs = [
        "10**(9*9*9*9*9)",
        "2**(99-1+99999999)",
        "9**9**9",
        "2**1000",
        "a.b",
        "f(1)",
        "[x for x in y]",
        "__import__('os')",
    ]
    assert all(_PROGRAM.search(x) for x in bombs), [x for x in bombs if not _PROGRAM.search(x)]
    formulas = ["x**(3/2)", "x**(-1)", "x**2/2", "x**-2", "3*(4+5)", "-7/3", "[[1, 2], [3, 4]]"]
    assert not any(_PROGRAM.search(x) for x in formulas), [x for x in formulas if _PROGRAM.search(x)]


def test_a_composite_is_as_careful_as_its_parts(tmp_path: Path) -> None:
    """Its own module runs nothing; the check of a part does."""
    composite = pytest.importorskip("reasoning_gym.composite")
    puzzle = ReasoningGym("composite", datasets=[composite.DatasetSpec("n_queens", 1, {})])
    puzzle.reset({}, 3)
    mark = tmp_path / "ran"
    step = puzzle.step(Turn(f"[open({str(mark)!r}, 'w')]", [], None, 1, 9))
    assert not mark.exists() and step.metrics == {"refused": 1.0}
