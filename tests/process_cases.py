"""Small runs of every method, to be compared between one process, several, and the ways of sharing a model among them.

`python tests/process_cases.py CASE FOLDER JSON` runs one rank of one case (or of several, `a,b`, or of a function of a test module, `test_loop:two_ranks`);
`run_ranks` starts all of them.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import forked
import patience

ROOT = Path(__file__).resolve().parent.parent
SHARD_ALL = '{"stage3_param_persistence_threshold": 0}'  # at toy size DeepSpeed would leave every parameter whole


def common(**over: Any) -> dict[str, Any]:
    plain = {
        "console": False,
        "device": "cpu",
        "epochs": None,
        "seed": 1,
        "steps": 10,
        "mini_batch_size": 8,
        "token_budget": 160,
    }
    return plain | {"optimizer": {"lr": 1e-3, "schedule": "constant", "weight_decay": 0.01}} | over


def toy_model(lora: bool = False) -> tuple[Any, Any]:
    from rlhf_nb.config import LoraSettings
    from rlhf_nb.data import toy
    from rlhf_nb.models.adapters import add_lora

    model = toy.build_model(0)
    return (add_lora(model, LoraSettings(r=4), seed=0) if lora else model), toy.build_tokenizer()


def sft(lora: bool = False, **over: Any) -> Any:
    from rlhf_nb.data import toy
    from rlhf_nb.train.sft import SFTConfig, SFTTrainer

    return SFTTrainer(SFTConfig.preset("toy", **common(**over)), *toy_model(lora), rows=toy.sft_rows(80))


def qwen3(lora: bool = False, **over: Any) -> Any:
    """Norms of single heads, and fewer heads of keys than of queries."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlhf_nb.config import LoraSettings
    from rlhf_nb.data import toy
    from rlhf_nb.models.adapters import add_lora
    from rlhf_nb.train.sft import SFTConfig, SFTTrainer

    tokenizer = toy.build_tokenizer()
    sizes = {"hidden_size": 24, "intermediate_size": 54, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": len(tokenizer)}
    torch.manual_seed(3)
    more = {"num_key_value_heads": 2, "head_dim": 10, "initializer_range": 0.05, "tie_word_embeddings": False}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **ids, **more)).eval()
    model = add_lora(model, LoraSettings(r=4), seed=0) if lora else model
    return SFTTrainer(SFTConfig.preset("toy", **common(**over)), model, tokenizer, rows=toy.sft_rows(80))


def reward(lora: bool = False, **over: Any) -> Any:
    from rlhf_nb.data import toy
    from rlhf_nb.train.reward import RewardConfig, RewardTrainer

    return RewardTrainer(RewardConfig.preset("toy", **common(**over)), *toy_model(lora), rows=toy.preference_rows(80))


def process(lora: bool = False, **over: Any) -> Any:
    from rlhf_nb.config import LoraSettings
    from rlhf_nb.data import legs
    from rlhf_nb.models.adapters import add_lora
    from rlhf_nb.train.process import ProcessConfig, ProcessTrainer

    model = add_lora(legs.build_model(0), LoraSettings(r=4), seed=0) if lora else legs.build_model(0)
    config = ProcessConfig.preset("toy", **common(**over))
    return ProcessTrainer(config, model, legs.build_tokenizer(), legs.legs_steps(80))


def dpo(lora: bool = False, **over: Any) -> Any:
    from rlhf_nb.data import toy
    from rlhf_nb.train.dpo import DPOConfig, DPOTrainer

    return DPOTrainer(DPOConfig.preset("toy", **common(**over)), *toy_model(lora), rows=toy.preference_rows(80))


def tr_dpo(**over: Any) -> Any:
    """DPO whose reference follows the policy."""
    return dpo(reference="moving", sync_every=3, sync_mixup=0.5, **over)


def kto(lora: bool = False, **over: Any) -> Any:
    from rlhf_nb.data import toy
    from rlhf_nb.data.convert import to_unpaired
    from rlhf_nb.train.kto import KTOConfig, KTOTrainer

    rows = list(to_unpaired(toy.preference_rows(40)))
    return KTOTrainer(KTOConfig.preset("toy", **common(**over)), *toy_model(lora), rows=rows)


def ppo(lora: bool = False, **over: Any) -> Any:
    """With a reward model, a moving KL price, normalised scores, and two mini-batches of each rollout, twice."""
    from rlhf_nb.data import toy
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.train.ppo import PPOConfig, PPOTrainer

    settings = common(
        rollout_batch_size=16, num_inner_epochs=2, kl_target=1.0, normalize_scores=True, missing_eos=None, samples_per_step=16,
        sampling={"max_new_tokens": 10}, optimizer={"lr": 3e-4, "schedule": "constant"},
    )  # fmt: skip
    rm = RewardModel.from_policy(toy_model()[0], seed=5)
    config = PPOConfig.preset("toy", **(settings | over))
    return PPOTrainer(config, *toy_model(lora), reward=rm, rows=toy.train_prompts(64))


def _group(module: str, name: str, lora: bool, reward: Any = None, **settings: Any) -> Any:
    """A method that compares answers to the same prompt."""
    from rlhf_nb.data import toy

    found = import_module(f"rlhf_nb.train.{module}")
    plain = {
        "rollout_batch_size": 16,
        "num_inner_epochs": 2,
        "samples_per_step": 16,
        "sampling": {"max_new_tokens": 10},
    }
    config = getattr(found, f"{name}Config").preset("toy", **common(**(plain | settings)))
    rows = toy.train_prompts(64)
    return getattr(found, f"{name}Trainer")(config, *toy_model(lora), reward=reward or toy.gold_reward, rows=rows)


def grpo(lora: bool = False, **over: Any) -> Any:
    return _group("grpo", "GRPO", lora, **{"num_generations": 4, "kl_coef": 0.05, **over})


def grpo_dead(**over: Any) -> Any:
    """Most groups are dead, and ranks have different numbers of rows to compute, none among them."""

    def short(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [float(len(p) % 3 == 0 and len(c) % 2 == 0) for p, c in zip(map(str, prompts), completions)]

    return _group("grpo", "GRPO", False, short, **{"num_generations": 4, "kl_coef": 0.0, **over})


def rloo(lora: bool = False, **over: Any) -> Any:
    return _group("rloo", "RLOO", lora, **{"num_generations": 4, "kl_coef": 0.05, **over})


def online_dpo(lora: bool = False, **over: Any) -> Any:
    return _group("online_dpo", "OnlineDPO", lora, **over)


def xpo(**over: Any) -> Any:
    """The reference writes the second answers."""
    return online_dpo(**{"opponent": "reference", "xpo_alpha": 0.01, **over})


def episodes(**over: Any) -> Any:
    """Several turns, whose rewards an environment pays by turns, and a tool's replies are random in time."""
    from resume_harness import Talk

    from rlhf_nb.data import toy
    from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer

    plain = {
        "rollout_batch_size": 16,
        "num_inner_epochs": 2,
        "samples_per_step": 16,
        "sampling": {"max_new_tokens": 24},
    }
    plain |= {"num_generations": 4, "kl_coef": 0.05, "episodes": {"credit": "turns", "max_turns": 3}}
    model, tokenizer = toy_model()
    model.generation_config.eos_token_id = [i for i in range(len(tokenizer)) if i % 12 == 2]  # turns end soon
    config = GRPOConfig.preset("toy", **common(**(plain | over)))
    return GRPOTrainer(config, model, tokenizer, rows=toy.train_prompts(64), environment=Talk)


def lagged(scored: bool = False, **over: Any) -> Any:
    """Each rank draws its share of three steps ahead, and asks for its rewards in threads; a reward model's, if scored."""
    from rlhf_nb.models.heads import RewardModel

    rm = RewardModel.from_policy(toy_model()[0], seed=5) if scored else None
    return _group("grpo", "GRPO", False, rm, **{"num_generations": 4, "kl_coef": 0.05, "rollouts": {"lag": 2}, **over})


def evaluations(root: Path, held: int = 7) -> dict[str, dict[str, float]]:
    """What every kind of method measures on held-out rows before it learns anything; one row stands there twice.

    Args:
        root: of the runs.
        held: rows that are held out.
    """
    from rlhf_nb.data import toy
    from rlhf_nb.data.convert import to_unpaired
    from rlhf_nb.train.distill import DistillConfig, DistillTrainer
    from rlhf_nb.train.dpo import DPOConfig, DPOTrainer
    from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer
    from rlhf_nb.train.kto import KTOConfig, KTOTrainer
    from rlhf_nb.train.reward import RewardConfig, RewardTrainer
    from rlhf_nb.train.sft import SFTConfig, SFTTrainer

    pairs = toy.preference_rows(held, 9)
    asked = toy.test_prompts(held, 9)
    said = toy.sft_rows(held, 9)
    for rows in (pairs, asked, said):
        rows[-1] = rows[0]
    short = {"sampling": {"max_new_tokens": 10}}
    learnt, prompts = toy.preference_rows(16), {"rows": toy.train_prompts(16), "eval_rows": asked}
    unpaired = {"rows": list(to_unpaired(learnt)), "eval_rows": list(to_unpaired(pairs[: held // 2 + 1]))[:held]}
    todo: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
        "sft": (SFTConfig, SFTTrainer, {}, {"rows": toy.sft_rows(16), "eval_rows": said}),
        "reward": (RewardConfig, RewardTrainer, {"ensemble_size": 2}, {"rows": learnt, "eval_rows": pairs}),
        "dpo": (DPOConfig, DPOTrainer, {}, {"rows": learnt, "eval_rows": pairs}),
        "kto": (KTOConfig, KTOTrainer, {}, unpaired),
        "grpo": (GRPOConfig, GRPOTrainer, {"kl_coef": 0.05, "num_generations": 4, **short}, {"reward": toy.gold_reward, **prompts}),
        "distill": (DistillConfig, DistillTrainer, short, {"teacher": toy.build_model(1), **prompts}),
    }  # fmt: skip
    if held == 1:  # one prompt, and it needs two
        del todo["kto"]
    out = {}
    for name, (config, trainer, settings, parts) in todo.items():
        run = trainer(config.preset("toy", **common(output_dir=str(root / name), **settings)), *toy_model(), **parts)
        if name in ("dpo", "kto", "grpo"):  # a policy that is no longer its reference
            with run.engine.generation_mode():
                named = run.engine.unwrap(run.method.module).named_parameters()
                moved = {n: 1.05 * p.detach() for n, p in named if p.requires_grad}
            run.engine.strategy.restore(moved, {})
        out[name] = run.evaluate()
    return out


LAYERS = {"qwen3": qwen3}  # cases of `test_tensor.py` alone
CASES = {
    f.__name__: f
    for f in (
        sft,
        reward,
        process,
        dpo,
        tr_dpo,
        kto,
        ppo,
        grpo,
        grpo_dead,
        rloo,
        online_dpo,
        xpo,
        episodes,
        lagged,
    )
}
LORA = ("sft", "reward", "process", "dpo", "kto", "ppo", "grpo", "rloo", "online_dpo")  # `sft_lora` and so on


def make(case: str, **over: Any) -> Any:
    """The trainer of a case."""
    lora = {"lora": True} if case.endswith("_lora") else {}
    return (CASES | LAYERS)[case.removesuffix("_lora")](**lora, **over)


def rank_main(case: str, folder: Path, resume: bool, **over: Any) -> None:
    """One rank: train, then leave losses, weights and rollouts."""
    import torch

    torch.set_num_threads(1)
    trainer = make(case, output_dir=str(folder), **over)
    trainer.fit(resume=resume)
    engine = trainer.engine
    with engine.generation_mode():
        weights = {
            k: v.detach().clone() for k, v in engine.unwrap(trainer.method.module).named_parameters() if v.requires_grad
        }
        if engine.is_main:
            trainer.method.save_model(folder / "model")
    engine.barrier()
    if engine.is_main:
        from safetensors.torch import save_file

        save_file(weights, str(folder / "weights.safetensors"))
        keep = ("step", "loss", "grad_norm", "objective/kl", "objective/scores", "reward", "objective/kl_coef")
        steps = [{k: e[k] for k in keep if k in e} for e in trainer.history]
        (folder / "steps.json").write_text(json.dumps(steps))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(case: str, folder: Path, world: int = 1, strategy: str = "", cpu: float = 600, **over: Any) -> None:
    """Start all ranks of a case (or of several, `a,b`, each in a folder inside) and wait; what a failing one says is in the error.

    cpu: seconds that all ranks may use together; ranks that use none for two minutes hang, and the error shows where each stands.
    """
    env = {
        **os.environ,
        "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT)),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    env["RLHF_NB_DEEPSPEED"] = SHARD_ALL
    if strategy:
        env["RLHF_NB_STRATEGY"] = strategy
    if world > 1:
        env |= {
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        env |= {"ACCELERATE_USE_CPU": "true"} if not strategy.startswith("zero") else {}
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, case, str(folder), json.dumps(over)]
    ranks = []
    for rank in range(world):
        own = env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {})
        with open(folder / f"out-{rank}.txt", "w") as out:
            ranks.append(forked.Forked(command, env=own, stdout=out, stderr=subprocess.STDOUT))
    outs = [folder / f"out-{rank}.txt" for rank in range(world)]
    try:
        codes = patience.wait(ranks, cpu)
        wrong = [rank for rank, code in enumerate(codes) if code]
        assert not wrong, f"{case}, {strategy}, ranks {wrong}: " + "\n".join(outs[r].read_text()[-3000:] for r in wrong)
    except patience.Stuck as stuck:
        raise AssertionError(f"{case}, {strategy}: {stuck}\n{patience.stacks(ranks, outs)}") from None
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def main(cases: str, root: Path, over: dict[str, Any]) -> None:
    """What a started rank does: one case after the other."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    if ":" in cases:  # a test's own function
        module, _, function = cases.partition(":")
        getattr(import_module(module), function)(str(root))
        return
    resume = over.pop("resume", False)
    if cases == "hang":
        torch.distributed.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            signal.pause()  # and never comes to what the others wait for
        torch.distributed.all_reduce(torch.ones(1))
    if cases.startswith("evaluations"):
        torch.set_num_threads(1)
        found = [evaluations(root, held, **over) for held in (7, 1)]
        (root / f"evaluations-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
        cases = ""
    for case in filter(None, cases.split(",")):
        rank_main(case, root / case if "," in cases else root, resume, **over)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
