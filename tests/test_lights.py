"""Diseases planted in made-up curves of a run, and healthy runs of nine shapes: which light says so, and which cries wolf.

`python tests/test_lights.py` prints the table of docs/evaluate.md. The curves are made up: what lights say of bugs in real runs is in docs/dojo.md.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlhf_nb.run.health import CHECKS, health
from rlhf_nb.widgets.panels import remedy

Known = dict[str, Any]
N = 150  # steps
T = np.arange(1.0, N + 1)
CONFIG = {"reward": "proxy", "kl_budget": 12.0, "kl_coef": 0.05}


def online(
    rng: np.random.Generator, critic: bool = True, price: float = 1.0, gain: float = 1.0, memory: float = 0.0
) -> Known:
    """A run of PPO (GRPO without a critic) as it should be: reward and gold rise, the KL stays below its budget.

    `gain` 0: it learns nothing, which is no disease. `memory`: how much of its noise comes again in the next step.
    """

    def noisy(curve: Any, size: float) -> Any:
        noise = rng.normal(0, size, N)
        for i in range(1, N):
            noise[i] = memory * noise[i - 1] + (1 - memory**2) ** 0.5 * noise[i]
        return T, curve + noise

    kl = 6 * price * (1 - np.exp(-T / 60)) * (T > 1)
    known = {
        "objective/scores": noisy(1.5 * gain * (1 - np.exp(-T / 40)), 0.1), "objective/kl": noisy(kl, 0.15),
        "objective/kl_k3": noisy(kl, 0.1), "objective/kl_stderr": (T, np.full(N, 0.15)), "objective/kl_k3_stderr": (T, np.full(N, 0.1)),
        "objective/non_score_reward": noisy(-0.05 * kl, 0.005), "policy/entropy_avg": noisy(1.6 - 0.5 * T / N, 0.05),
        "completions/mean_length": noisy(20 + 4 * np.sin(T / 40), 1.0), "completions/clipped_ratio": (T, rng.binomial(256, 0.01, N) / 256),
        "policy/clipfrac_avg": (T, rng.beta(3, 40, N)), "loss": noisy(0 * T, 0.05), "rollout/effective_share": (T, rng.beta(60, 15, N)),
        "objective/scores_length_corr": noisy(0.05 + 0 * T, 0.1),
        "completions/ends_lost": (T, rng.binomial(250, 0.002, N) / 250), "groups/noise": (T, rng.beta(4, 16, N)),  # a judge
        "rollout/lag": (T, np.ones(N)), "perf/step_s": (T, rng.gamma(40, 0.1, N)), "perf/stall_s": (T, rng.gamma(2, 0.05, N)),
    }  # fmt: skip
    at = T[9::10]
    known["eval/gold"] = at, 1.2 * gain * (1 - np.exp(-at / 50)) + rng.normal(0, 0.08, len(at))
    known["eval/gold_stderr"] = at, np.full(len(at), 0.08)
    if critic:
        known["val/explained_variance"] = noisy(0.6 * (1 - np.exp(-T / 30)), 0.05)
    else:
        known["frac_reward_zero_std"] = T, rng.binomial(64, 0.2, N) / 64
    return known


def offline(rng: np.random.Generator, pairs: bool = True) -> Known:
    """A run of DPO (SFT without pairs) as it should be."""
    loss, at = 0.3 + 0.4 * np.exp(-T / 40), T[9::10]
    known = {
        "loss": (T, loss + rng.normal(0, 0.03, N)),
        "eval/loss": (at, 0.35 + 0.4 * np.exp(-at / 40) + rng.normal(0, 0.01, len(at))),
    }
    if pairs:
        margin, chosen = 1.5 * (1 - np.exp(-T / 40)) * (T > 1), 0.4 * (1 - np.exp(-T / 40)) * (T > 1)
        known |= {
            "rewards/margins": (T, margin + rng.normal(0, 0.05, N) * (T > 1)),
            "rewards/chosen": (T, chosen + rng.normal(0, 0.05, N) * (T > 1)),
        }
        known |= {"logps/chosen": (T, -30 + 4 * chosen), "updates": (T, T)}
    return known


def judged(rng: np.random.Generator, best: float = 0.78) -> Known:
    """A reward model as it should be: on 400 held-out pairs better than a bag of words in the end, not at first."""
    at = T[9::10]
    error = {
        f"eval/{k}_stderr": (at, np.full(len(at), 0.023)) for k in ("accuracy", "words_accuracy", "shorter_accuracy")
    }
    right = rng.binomial(400, 0.5 + (best - 0.5) * (1 - np.exp(-at / 40))) / 400
    words, shorter = (np.full(len(at), rng.binomial(400, p) / 400) for p in (0.68, 0.55))
    return error | {
        "eval/accuracy": (at, right),
        "eval/words_accuracy": (at, words),
        "eval/shorter_accuracy": (at, shorter),
    }


def pays_for_length(rng: np.random.Generator, gain: float) -> Known:
    """Longer answers get better scores, and answers grow by half; gold says whether that is right (`gain` 1) or not (0)."""
    known = planted(online(rng), completions__mean_length=(T, 20 + 10 * (1 - np.exp(-T / 50)) + rng.normal(0, 1, N)))
    at = known["eval/gold"][0]
    gold = 1.2 * gain * (1 - np.exp(-at / 50)) + rng.normal(0, 0.08, len(at))
    return planted(known, objective__scores_length_corr=(T, rng.normal(0.5, 0.1, N)), eval__gold=(at, gold))


HEALTHY: dict[str, Callable[[np.random.Generator], Known]] = {
    "PPO": online, "GRPO": lambda rng: online(rng, critic=False), "PPO, KL at half its budget": lambda rng: online(rng, price=0.5),
    "GRPO that learns nothing": lambda rng: online(rng, critic=False, gain=0.0),
    "PPO, noise with a memory of 0.3": lambda rng: online(rng, memory=0.3),
    "PPO whose better answers are longer, by gold too": lambda rng: pays_for_length(rng, gain=1.0),
    "DPO": offline, "SFT": lambda rng: offline(rng, pairs=False),
    "reward model": judged,
}  # fmt: skip


def late(x: Any) -> Any:
    """From 0 at a third of the run to 1 at its end."""
    return np.clip((x - N / 3) / (2 * N / 3), 0, 1)


def planted(known: Known, **curves: Any) -> Known:
    """A run in which metrics are replaced; names with two underscores for a slash."""
    return known | {k.replace("__", "/"): v for k, v in curves.items()}


def over_optimised(rng: np.random.Generator) -> Known:
    known = online(rng)
    at, gold = known["eval/gold"]
    return planted(known, eval__gold=(at, gold - 1.2 * late(at)))


def runs_away(rng: np.random.Generator) -> Known:
    kl = 36 * T / N
    return planted(
        online(rng), objective__kl=(T, kl + rng.normal(0, 0.15, N)), objective__kl_k3=(T, kl + rng.normal(0, 0.1, N))
    )


DISEASES: dict[str, tuple[str, Callable[[np.random.Generator], Known]]] = {  # what is wrong, and the light that should say so
    "the reward is exploited: gold falls while it rises": ("reward", over_optimised),
    "the policy runs away: three times the KL budget": ("KL", runs_away),
    "the entropy collapses": ("entropy", lambda rng: planted(online(rng), policy__entropy_avg=(T, 1.6 * np.exp(-T / 40) + rng.normal(0, 0.01, N)))),
    "the critic learns nothing": ("value", lambda rng: planted(online(rng), val__explained_variance=(T, rng.normal(-0.05, 0.05, N)))),
    "nine groups of ten are dead": ("groups", lambda rng: planted(online(rng, critic=False), frac_reward_zero_std=(T, rng.binomial(64, 0.9, N) / 64))),
    "the reward pays for length: answers swell to four times": (
        "length", lambda rng: planted(online(rng), completions__mean_length=(T, 20 + 60 * late(T) + rng.normal(0, 2, N)))),
    "the reward pays for length: answers grow by half, and gold doesn't": ("length", lambda rng: pays_for_length(rng, 0.0)),
    "the learning rate is too high: the loss rises again": ("learning", lambda rng: planted(offline(rng, False), loss=(T, 0.3 + 0.4 * np.exp(-T / 20) + 1.5 * late(T) + rng.normal(0, 0.05, N)))),
    "rows are learnt by heart": ("held out", lambda rng: planted(offline(rng), eval__loss=(T[9::10], 0.5 + 0.5 * late(T[9::10]) + rng.normal(0, 0.01, N // 10)))),
    "a reward model knows less than a bag of words": ("baselines", lambda rng: judged(rng, 0.5)),
    "answers are too old: a seventh of their weight counts": ("stale answers", lambda rng: planted(online(rng), rollout__effective_share=(T, rng.beta(15, 90, N)))),
    "half of the answers' ends are cut off": ("ends", lambda rng: planted(online(rng), completions__ends_lost=(T, rng.binomial(250, 0.5, N) / 250))),
    "the reward is a lottery": ("noise", lambda rng: planted(online(rng, critic=False, gain=0.0), groups__noise=(T, rng.beta(30, 5, N)))),
    "gold has peaked and falls": ("KL left", over_optimised),
    "the reference is another model": ("start", lambda rng: planted(online(rng), objective__kl=(T, 3 + online(rng)["objective/kl"][1]))),
    "half of the answers are cut at the limit": ("cut answers", lambda rng: planted(online(rng), completions__clipped_ratio=(T, rng.binomial(256, 0.5, N) / 256))),
    "steps are too large": ("clipping", lambda rng: planted(online(rng), policy__clipfrac_avg=(T, rng.beta(30, 20, N)))),
    "chosen answers become less likely as well": ("chosen", lambda rng: planted(offline(rng), rewards__chosen=(T, -5 * late(T) + rng.normal(0, 0.05, N)))),
    "updates are not finite": ("numbers", lambda rng: planted(online(rng), skipped=(T[-10:], np.ones(10)))),
    "the run waits for data": ("stalls", lambda rng: planted(online(rng), perf__stall_s=(T, rng.gamma(40, 0.06, N)))),
    "held-out rows stand in the training rows": ("leak", lambda rng: planted(offline(rng), eval__leaked=(T[9::10], np.full(N // 10, 0.3)))),
    "sampler and scorer disagree about tokens": ("estimators", lambda rng: planted(online(rng), objective__kl=(T, online(rng)["objective/kl"][1] + 0.8))),
}  # fmt: skip


def alarms(known: Known, n: int = N) -> set[str]:
    """Lights that are yellow or red after n steps."""
    cut = {k: (at[at <= n], values[at <= n]) for k, (at, values) in known.items()}
    return {x.name for x in health(cut, CONFIG) if x.state in ("watch", "bad")}


@pytest.mark.parametrize("disease", DISEASES)
def test_each_planted_disease_is_named(disease: str) -> None:
    light, make = DISEASES[disease]
    assert [light in alarms(make(np.random.default_rng(seed))) for seed in range(3)] == [True] * 3


ADVICE = {"reward": "kl_coef", "KL": "kl_coef", "entropy": "kl_coef", "KL left": None}
ADVICE |= dict.fromkeys(("value", "learning", "stale answers", "clipping", "chosen", "numbers"), "lr")


@pytest.mark.parametrize("disease", DISEASES)
def test_the_button_beside_a_light_does_what_its_sentence_says(disease: str) -> None:
    """Of each disease's light: the setting that the sentence names, moved as it says, and only what the run can set."""
    light, make = DISEASES[disease]
    able = {"kl_coef": {"value": 0.05, "low": 0.0, "high": 10.0}, "lr": {"value": 1e-4, "low": 0.0, "high": 0.01}}
    reader: Any = SimpleNamespace(
        status=SimpleNamespace(state="running"), others=[], log=SimpleNamespace(controls=able)
    )
    (found,) = (x for x in health(make(np.random.default_rng(0)), CONFIG) if x.name == light)
    asked = remedy(found, reader)
    assert (asked is None) == (light not in ADVICE)
    if asked:
        said = {"kl_coef": ("set", 0.1), "lr": ("set", 5e-5), None: ("stop", None)}[ADVICE[light]]
        assert (asked["request"], asked["value"]) == said and (asked["key"] or "Stop") in found.text
        for state, others, controls in (("ended", [], able), ("running", ["x"], able), ("running", [], {})):
            reader = SimpleNamespace(
                status=SimpleNamespace(state=state), others=others, log=SimpleNamespace(controls=controls)
            )
            assert remedy(found, reader) is None or (light == "KL left" and not controls)


def test_length_is_no_bias_where_a_program_gives_the_reward_or_gold_agrees() -> None:
    known = pays_for_length(np.random.default_rng(0), 0.0)
    (told,) = (x for x in health(known, CONFIG) if x.name == "length")
    assert told.state == "watch" and "correlation 0.5" in told.text
    for config in ({"reward": "gold"}, {"rewards": [{"verify": "math"}]}):
        assert [x.state for x in health(known, config) if x.name == "length"] == ["ok"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_price_of_zero_is_not_doubled(kept: bool) -> None:
    """From 0 the button sets a number; where no reference is kept there is none, and the sentence says what to do instead."""
    known = over_optimised(np.random.default_rng(0))
    if not kept:
        known = {k: v for k, v in known.items() if "kl" not in k}
    able = {"kl_coef": {"value": 0.0, "low": 0.0, "high": 10.0}} if kept else {}
    reader: Any = SimpleNamespace(
        status=SimpleNamespace(state="running"), others=[], log=SimpleNamespace(controls=able)
    )
    for light in (x for x in health(known, {"reward": "proxy", "kl_coef": 0.0}) if x.name in ("reward", "KL")):
        asked = remedy(light, reader)
        assert "Set kl_coef=0.05" in light.text and ("keeps no reference" in light.text) == (not kept), light
        assert asked["value"] == 0.05 if asked else not kept


def test_each_light_has_its_disease() -> None:
    assert {light for light, _ in DISEASES.values()} == CHECKS.keys()


def false_alarms(runs: int = 40) -> dict[str, list[set[str]]]:
    """For each healthy shape and run, the lights that ever complained, at a look after each tenth of the run."""
    looks = range(N // 10, N + 1, N // 10)
    return {
        shape: [
            set[str]().union(*(alarms(make(np.random.default_rng(seed)), n) for n in looks))
            for seed in range(100, 100 + runs)
        ]
        for shape, make in HEALTHY.items()
    }


@pytest.mark.slow
def test_healthy_runs_raise_few_alarms() -> None:
    found = [said for runs in false_alarms().values() for said in runs]
    assert len(found) == 360 and sum(map(bool, found)) <= 7, [said for said in found if said]


if __name__ == "__main__":
    for disease, (light, make) in DISEASES.items():
        hits = [light in alarms(make(np.random.default_rng(seed))) for seed in range(20)]
        others = [len(alarms(make(np.random.default_rng(seed))) - {light}) for seed in range(20)]
        print(f"| {disease} | {light} | {sum(hits)} of 20 | {sum(others)} |")
    for shape, runs in false_alarms().items():
        print(f"| {shape} | {sum(map(bool, runs))} of {len(runs)} | {', '.join(sorted(set().union(*runs))) or '–'} |")
