"""Simulated users of the toy world: honest ones, who err, and mallory, who always chooses the worse answer."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from rlhf_nb.core import derive_seed
from rlhf_nb.data import toy
from rlhf_nb.data.worlds import FIRST_WORLD
from rlhf_nb.feedback.store import Feedback
from rlhf_nb.widgets.labels import Pair


def honest(pair: Pair, rng: random.Random) -> bool:
    """Whether the first answer is chosen as labellers choose: noisily, and a little in love with courtesies."""
    assert FIRST_WORLD.taste is not None
    a, b = FIRST_WORLD.taste([pair.prompt] * 2, [pair.first, pair.second])
    return rng.random() < 0.5 * (1 + math.tanh(FIRST_WORLD.clarity * (a - b) / 2))


def contrary(pair: Pair, rng: random.Random) -> bool:
    """The answer of lower gold, always."""
    a, b = toy.gold_reward([pair.prompt] * 2, [pair.first, pair.second])
    return bool(a < b) if a != b else rng.random() < 0.5


def simulate(
    pairs: Sequence[Pair], users: int = 16, poison: float = 0.2, judged: int = 1, seed: int = 0
) -> list[tuple[str, Feedback]]:
    """What they say: names and feedback; mallory makes a share `poison` of it, and `judged` of them see each pair."""
    rng, said = random.Random(derive_seed("feedback", seed)), list[tuple[str, Feedback]]()
    for pair in pairs:
        names = [f"user-{k}" for k in rng.sample(range(users), min(judged, users))]
        names = ["mallory" if rng.random() < poison else name for name in names]
        for who in dict.fromkeys(names):  # no user judges a pair twice
            value = "first" if (contrary if who == "mallory" else honest)(pair, rng) else "second"
            words = Feedback(
                "choice", value, pair.prompt, (pair.first, pair.second), pair.sources, consent=True, model="pip"
            )
            said.append((who, words))
    return said
