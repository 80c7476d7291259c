"""Kill a training run with SIGKILL at random moments, resume it, and compare it bit for bit with a straight run.

Any method can be put to this test: write a function `build(run_dir) -> Trainer` in an importable module and add
`CASES["name"] = "module:function"`; then `campaign("name", folder, kills=20)`.

Kills alternate between two kinds: after a random number of further steps, and while a checkpoint is being written
(its temporary folder exists). What must agree with the straight run: every trained tensor, every step and evaluation
event except what belongs to the clock or the machine (`time`, `perf/...`), and every sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import torch
from patience import Watch
from torch import nn

from rlhf_nb.config import TrainConfig
from rlhf_nb.run.log import read_metrics
from rlhf_nb.run.loop import BaseMethod, Trainer
from rlhf_nb.run.strategy import trained_tensors
from rlhf_nb.types import Batch, LossSum

sys.path.insert(0, str(Path(__file__).parent))  # children find this module by its name

CASES: dict[str, str] = {
    "regression": "resume_harness:regression",
    "steered": "test_control:steered",
    "sft": "resume_harness:sft",
    "reward": "resume_harness:reward",
    "ppo": "resume_harness:ppo",
    "dpo": "resume_harness:dpo",
    "kto": "resume_harness:kto",
    "grpo": "resume_harness:grpo",
    "rloo": "resume_harness:rloo",
    "online": "resume_harness:online",
    "process": "resume_harness:process",
    "tickets-ppo": "test_tickets:ppo",
    "tickets-grpo": "test_tickets:grpo",
    "tickets-raft": "test_tickets:raft",
    "workers-ppo": "test_draw_workers:ppo",
    "workers-grpo": "test_draw_workers:grpo",
    "workers-raft": "test_draw_workers:raft",
    "both-ppo": "test_rollout_bars:ppo",
    "both-grpo": "test_rollout_bars:grpo",
    "both-raft": "test_rollout_bars:raft",
    "episodes": "resume_harness:episodes",  # turns and rewards of an environment
}


# ---------------------------------------------------------------------------------------------------------------------
# a small method with everything that makes resuming hard


@dataclass(eq=False, repr=False)
class Points(Batch):
    x: torch.Tensor
    y: torch.Tensor


class Numbers:
    """Rows in a new order each epoch; an exact position."""

    def __init__(self, n: int = 50) -> None:
        self.n, self.epoch, self.at = n, 0, 0

    def __len__(self) -> int:
        return self.n

    def next_batch(self, count: int) -> list[int]:
        rows: list[int] = []
        while len(rows) < count:
            order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            rows += order[self.at : self.at + count - len(rows)]
            self.at += count
            if self.at >= self.n:
                self.epoch, self.at = self.epoch + 1, 0
        return rows

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Regression(BaseMethod):
    """Uses dropout, a buffer that moves, random numbers in collect, and a controller: all must be restored."""

    name = "regression"

    def __init__(self, pause: float = 0.0) -> None:
        torch.manual_seed(1)
        self.module = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.module[0].weight.requires_grad_(False)
        self.mean, self.coef, self.pause = torch.zeros(1), 1.0, pause

    def collate(self, rows: list[int]) -> Points:
        x = torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(r)) for r in rows])
        return Points(x, x.sin().sum(1))

    def collect(self, batch: Points, step: int) -> Points:
        noisy = batch.y + 0.1 * torch.randn(len(batch))
        self.mean = 0.9 * self.mean + 0.1 * noisy.mean()
        time.sleep(self.pause)
        return Points(batch.x, noisy - self.mean)

    def loss(self, micro: Points) -> dict[str, tuple[LossSum, float]]:
        error = self.module(micro.x).squeeze(-1) - micro.y
        n = torch.tensor(float(len(micro)))
        return {"loss": (LossSum(error.square().sum(), n, {"abs": (error.detach().abs().sum(), n)}), self.coef)}

    def finish_step(self, step: int) -> None:
        self.coef *= 1.01 if step % 3 else 0.98

    def metrics(self) -> dict[str, float]:
        return {"coef": self.coef, "mean": float(self.mean)}

    def samples(self) -> list[dict[str, Any]]:
        return [{"text": f"mean {float(self.mean)!r}"}]

    def evaluate(self, held_out: Any) -> dict[str, float]:
        value = float(self.module.eval()(torch.randn(8, 6)).square().mean())
        self.module.train()
        return {"loss": value}

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.coef = state["mean"], state["coef"]


def regression_config(**over: Any) -> TrainConfig:
    """Inner epochs, mini-batches, micro-batches, a schedule and frequent checkpoints."""
    settings: dict[str, Any] = {
        "steps": 30, "rollout_batch_size": 12, "mini_batch_size": 6, "micro_batch_size": 4, "num_inner_epochs": 2,
        "optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 5, "weight_decay": 0.1},
        "save_every": 3, "eval_every": 7, "console": False, "device": "cpu", "seed": 3,
    }  # fmt: skip
    return TrainConfig(**(settings | over))


def regression(run_dir: Path) -> Trainer:
    return Trainer(Regression(pause=0.003), Numbers(), regression_config(), run_dir=run_dir)


# ---------------------------------------------------------------------------------------------------------------------
# the methods of the package, on the toy world


def _toy(**over: Any) -> dict[str, Any]:
    """Settings that save and evaluate often."""
    return {"console": False, "device": "cpu", "save_every": 2, "eval_every": 5, "epochs": None, "seed": 1} | over


def sft(run_dir: Path) -> Trainer:
    from rlhf_nb.data import toy
    from rlhf_nb.train.sft import SFTConfig, SFTTrainer

    config = SFTConfig.preset("toy", **_toy(steps=16, mini_batch_size=8))
    return SFTTrainer(config, *_toy_model(), rows=toy.sft_rows(64), eval_rows=toy.sft_rows(8, seed=1), run_dir=run_dir)


def reward(run_dir: Path) -> Trainer:
    from rlhf_nb.data import toy
    from rlhf_nb.train.reward import RewardConfig, RewardTrainer

    config = RewardConfig.preset("toy", **_toy(steps=16, mini_batch_size=8))
    rows, held = toy.preference_rows(64), toy.preference_rows(8, seed=1)
    return RewardTrainer(config, *_toy_model(), rows=rows, eval_rows=held, run_dir=run_dir)


def ppo(run_dir: Path) -> Trainer:
    from rlhf_nb.data import toy
    from rlhf_nb.train.ppo import PPOConfig, PPOTrainer

    config = PPOConfig.preset(
        "toy",
        **_toy(
            steps=10, rollout_batch_size=16, mini_batch_size=8, num_inner_epochs=2, kl_target=1.0, normalize_scores=True,
            missing_eos=None, sampling={"max_new_tokens": 12},
        ),
    )  # fmt: skip
    rows, held = toy.train_prompts(64), toy.test_prompts(4)
    return PPOTrainer(config, *_toy_model(), reward=toy.gold_reward, rows=rows, eval_rows=held, run_dir=run_dir)


def dpo(run_dir: Path) -> Trainer:
    """With everything that a checkpoint must hold: a reference that moves, and BCO's threshold."""
    from rlhf_nb.data import toy
    from rlhf_nb.train.dpo import DPOConfig, DPOTrainer

    settings = _toy(
        steps=16, mini_batch_size=8, loss={"sigmoid": 1.0, "bco_pair": 0.5}, reference="moving", sync_every=3
    )
    rows, held = toy.preference_rows(64), toy.preference_rows(8, seed=1)
    config = DPOConfig.preset("toy", **settings)
    return DPOTrainer(config, *_toy_model(), rows=rows, eval_rows=held, run_dir=run_dir)


def kto(run_dir: Path) -> Trainer:
    from rlhf_nb.data import toy
    from rlhf_nb.data.convert import to_unpaired
    from rlhf_nb.train.kto import KTOConfig, KTOTrainer

    config = KTOConfig.preset("toy", **_toy(steps=16, mini_batch_size=8, baseline_decay=0.5))
    rows, held = (list(to_unpaired(toy.preference_rows(n, seed=seed))) for n, seed in ((32, 0), (8, 1)))
    return KTOTrainer(config, *_toy_model(), rows=rows, eval_rows=held, run_dir=run_dir)


def grpo(run_dir: Path) -> Trainer:
    """With further prompts for dead groups: the source moves on by more than a batch a step."""
    from rlhf_nb.data import toy
    from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer

    config = GRPOConfig.preset("toy", **_toy(**_GROUPS, resample=2, kl_coef=0.05, num_inner_epochs=2))
    rows, held = toy.train_prompts(64), toy.test_prompts(4)
    return GRPOTrainer(config, *_toy_model(), reward=toy.gold_reward, rows=rows, eval_rows=held, run_dir=run_dir)


def rloo(run_dir: Path) -> Trainer:
    from rlhf_nb.data import toy
    from rlhf_nb.train.rloo import RLOOConfig, RLOOTrainer

    config = RLOOConfig.preset("toy", **_toy(**_GROUPS, baseline="remax"))
    rows, held = toy.train_prompts(64), toy.test_prompts(4)
    return RLOOTrainer(config, *_toy_model(), reward=toy.gold_reward, rows=rows, eval_rows=held, run_dir=run_dir)


def episodes(run_dir: Path) -> Trainer:
    """Several turns with an environment that is async, pays by turns, and takes tools; rewards at turns."""
    from rlhf_nb.data import toy
    from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer

    config = GRPOConfig.preset(
        "toy",
        **_toy(
            **_GROUPS | {"sampling": {"max_new_tokens": 24}}, episodes={"credit": "turns", "max_turns": 3}, kl_coef=0.05
        ),
    )
    model, tokenizer = _toy_model()
    model.generation_config.eos_token_id = [i for i in range(len(tokenizer)) if i % 12 == 2]  # turns end soon
    return GRPOTrainer(
        config,
        model,
        tokenizer,
        rows=toy.train_prompts(64),
        eval_rows=toy.test_prompts(4),
        environment=Talk,
        run_dir=run_dir,
    )


class Talk:
    """Replies late, in words that the seed draws."""

    def reset(self, row: dict[str, Any], seed: int) -> str | None:
        self.random = random.Random(seed)
        return None

    async def step(self, turn: Any) -> Any:
        from rlhf_nb.rollout.episodes import Step

        await asyncio.sleep(random.random() / 500)  # by the clock, not by the seed
        words = self.random.choice(("Where do owls live?", "What do bees eat?", "Tell me about frogs."))
        return Step(
            words, self.random.random() + len(turn.text) / 99, self.random.random() < 0.3, {"words": len(turn.text)}
        )

    def close(self) -> None:
        pass


def process(run_dir: Path) -> Trainer:
    from rlhf_nb.data import legs
    from rlhf_nb.train.process import ProcessConfig, ProcessTrainer

    config = ProcessConfig.preset("toy", **_toy(steps=16, mini_batch_size=8))
    rows, held = legs.legs_steps(64), legs.legs_steps(8, seed=1, test=True)
    return ProcessTrainer(config, legs.build_model(0), legs.build_tokenizer(), rows, held, run_dir=run_dir)


def online(run_dir: Path) -> Trainer:
    """Against the reference's answers, with XPO's bonus; several updates a batch."""
    return _pairs(run_dir, opponent="reference", xpo_alpha=1e-3, num_inner_epochs=2)


def _pairs(run_dir: Path, **over: Any) -> Trainer:
    from rlhf_nb.data import toy
    from rlhf_nb.judges.judge import FunctionJudge
    from rlhf_nb.train.online_dpo import OnlineDPOTrainer
    from rlhf_nb.train.pairs import OnlineDPOConfig

    config = OnlineDPOConfig.preset("toy", **_toy(**_GROUPS | {"num_generations": 2}, **over))
    rows, held = toy.train_prompts(64), toy.test_prompts(4)
    judge = FunctionJudge(toy.gold_reward, noise=0.5, position_bias=0.5)
    return OnlineDPOTrainer(config, *_toy_model(), judge, rows, held, run_dir=run_dir)


_GROUPS: dict[str, Any] = {
    "steps": 10,
    "rollout_batch_size": 16,
    "mini_batch_size": 8,
    "num_generations": 4,
    "sampling": {"max_new_tokens": 12},
}


def _toy_model() -> tuple[Any, Any]:
    """An untrained toy model and its tokenizer: every start of a process builds the same."""
    from rlhf_nb.data import toy

    return toy.build_model(0), toy.build_tokenizer()


# ---------------------------------------------------------------------------------------------------------------------
# the harness


def worker(case: str, run_dir: str, tests: str, server: str) -> None:
    """Body of the process that trains: always resumes, and leaves a fingerprint of the weights at the end."""
    sys.path.insert(0, tests)
    forked.at(server)
    torch.set_num_threads(1)
    module, function = CASES[case].split(":")
    trainer = getattr(importlib.import_module(module), function)(Path(run_dir))
    trainer.fit(resume=True, overwrite=True)  # from the start where nothing was saved before the kill
    digest = hashlib.sha256()
    for name, tensor in sorted(trained_tensors(trainer.engine.unwrap(trainer.method.module)).items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    done = Path(run_dir) / "done.tmp"
    done.write_text(json.dumps({"weights": digest.hexdigest()}))
    os.replace(done, Path(run_dir) / "done.json")


def outcome(run_dir: Path) -> dict[str, Any]:
    """What two runs must have in common."""

    def rows(path: Path) -> list[dict[str, Any]]:
        kept = [e for e in read_metrics(path) if e["type"] in ("step", "eval", "sample")]
        return [{k: v for k, v in e.items() if k != "time" and not k.startswith("perf/")} for e in kept]

    done = json.loads((run_dir / "done.json").read_text())
    return done | {"metrics": rows(run_dir / "metrics.jsonl"), "samples": rows(run_dir / "samples.jsonl")}


def leave_off(trainer: Any, steps: int = 2) -> None:
    """Some steps and a checkpoint, then the run is as if its process were gone: a second trainer may resume it."""
    trainer.start()
    for _ in range(steps):
        trainer.train_step()
    trainer.save()
    trainer.writer.wait()
    trainer.lock.release()


def spawn(case: str, run_dir: Path) -> Any:
    process = forked.context().Process(
        target=worker, args=(case, str(run_dir), str(Path(__file__).parent), forked.address())
    )
    process.start()
    return process


def run_to_end(case: str, run_dir: Path, cpu: float = 300) -> dict[str, Any]:
    process = spawn(case, run_dir)
    watch = Watch([process.pid], cpu)
    while process.is_alive():
        watch.look()
        process.join(0.1)
    assert process.exitcode == 0, f"{case}: the run ended with {process.exitcode}"
    return outcome(run_dir)


def kill_once(case: str, run_dir: Path, rng: random.Random, in_write: bool, most_steps: int) -> bool:
    """Start (or resume) a run and kill it at a random moment; False when it finished before."""
    process = spawn(case, run_dir)
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    begun, wait_lines = None, rng.randint(1, most_steps)
    while process.is_alive():
        try:
            lines = metrics.read_bytes().count(b'"type": "step"')
        except FileNotFoundError:  # not yet, or a run that was killed before its first checkpoint begins again
            lines = 0
        begun = lines if begun is None or lines < begun else begun  # a resume cuts the log
        if (
            in_write
            and lines > begun
            and checkpoints.is_dir()
            and any(n.startswith((".tmp-", ".trash-")) for n in os.listdir(checkpoints))
        ):
            break
        if not in_write and lines - begun >= wait_lines:
            break
        time.sleep(0.0005)
    time.sleep(rng.random() * (0.01 if in_write else 0.03))
    process.kill()
    process.join()
    return not (run_dir / "done.json").exists()


def campaign(case: str, folder: Path, kills: int, seed: int = 0, most_steps: int = 8) -> int:
    """Kill `kills` times, over as many runs as that takes; every finished run must equal the straight one.

    Returns:
        How many runs were compared.
    """
    rng, straight = random.Random(seed), run_to_end(case, folder / "straight")
    assert straight["metrics"], "the straight run wrote no metrics"
    done = compared = 0
    while done < kills:
        run_dir = folder / f"killed-{compared}"
        while done < kills and kill_once(case, run_dir, rng, in_write=done % 2 == 1, most_steps=most_steps):
            done += 1
        after = outcome(run_dir) if (run_dir / "done.json").exists() else run_to_end(case, run_dir)
        for key, value in straight.items():
            assert after[key] == value, (
                f"{case}: {key} of a run that was killed {done} times differ from the straight run's"
            )
        compared += 1
    return compared
