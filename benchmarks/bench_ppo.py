"""PPO: episodes per second against TRL 1.12.0's `trl.experimental.ppo`, the last one there was.

    python benchmarks/bench_ppo.py [--quick] [--steps 12] [--threads 1] [--size small] [--fixed-length]
    python benchmarks/bench_ppo.py --task smollm2 --threads 2 [--precision bf16] [--train all adapters] --steps 2    # after `rlhf-nb get smollm2`

Both sides: the same toy policy (fine-tuned for a moment, so that answers end where they should), critic and reward model of the
same shape with the same weights, the same 128 prompts in each rollout, at most 32 new tokens, 2 passes over a rollout in mini-batches
of 32, fp32, Adam without clipping of gradients. A tiny learning rate keeps the lengths of the answers equal throughout.

The samplers draw different random numbers, so losses can't simply be compared. Instead TRL's first rollout is computed again by our
functions: log-probs of policy and reference, values, scores, advantages, and both losses of the first mini-batch. One definition
differs: TRL pays the score one position after the end-of-text token (where there is room), and so has one more
value per answer; ours pays it at that token. The comparison uses TRL's layout, the timing each side's own.

`--task smollm2`: SmolLM2-135M-Instruct on the package's word problems, 8 prompts × 8 answers of at most 24 tokens in a rollout, two passes with one
update each, a critic on a body of its own, a reference, and for a reward a function of the text (what a verifier costs), fp32 or bf16 products over
fp32 weights. TRL takes 16 answers in a forward pass of its update (`--micro`): the logits of 64 answers don't fit beside two trained models. With `--train adapters` each
side trains as lightly as it can: ours adapters and a value head on one backbone (recipe `smollm2_ppo`), TRL adapters in the policy, whose reference is the
policy without them, and all weights of the critic.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness

GROUP = {"toy": 1, "smollm2": 8}
KL_COEF, GAMMA, LAM, CLIP, VF_COEF = 0.1, 1.0, 0.95, 0.2, 0.1


def verify(texts: list[str]) -> list[float]:
    """A cheap, deterministic score: different letters, less a little for each repeated word."""
    return [len(set(t)) / 10 - 0.05 * (len(t.split()) - len(set(t.split()))) for t in texts]


def run_ours(job: dict[str, Any]) -> None:
    """PPO with rlhf_nb, a rollout and its updates at each turn."""
    from rlhf_nb.config import LoraSettings
    from rlhf_nb.data.sources import MemorySource
    from rlhf_nb.models.adapters import add_lora, separate, shared
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.rewards.base import RewardModelFn, Rewards
    from rlhf_nb.train.ppo import PPO, PPOConfig

    def report(run: Any, event: dict[str, Any]) -> dict[str, Any]:
        score, length = event["objective/scores"], event["completions/mean_length"]
        return {"episodes": job["batch"], "length": length, "score": score}

    group = GROUP[job["task"]]
    config = PPOConfig(**harness.settings(
        job, rollout_batch_size=job["batch"], mini_batch_size=job["mini"], num_inner_epochs=job["epochs"], num_generations=group,
        sampling={"max_new_tokens": job["new_tokens"], "min_new_tokens": job["new_tokens"] if job["fixed"] else 0},
        optimizer={"lr": job["lr"], "eps": 1e-5, "schedule": "constant", "max_grad_norm": None},
        kl_coef=KL_COEF, gamma=GAMMA, lam=LAM, clip_eps_low=CLIP, clip_eps_high=CLIP, value_clip_eps=CLIP, vf_coef=VF_COEF, missing_eos=None,
    ))  # fmt: skip
    tokenizer, policy = harness.load(job)
    reward = RewardModel.load(job["reward"])
    adapters = job["train"] == "adapters"
    net = shared(add_lora(policy, LoraSettings(r=16, alpha=32)), None) if adapters else separate(policy, reward)
    judged: Any = lambda prompts, completions, **columns: verify(completions)
    if job["task"] == "toy":
        judged = RewardModelFn(reward, token_budget=job["token_budget"])
    source = MemorySource(job["rows"][::group], shuffle=False)
    harness.fit(PPO(net, tokenizer, Rewards(judged), config), source, config, report)


def record_first_rollout(module: Any, numpy: Any, path: str) -> None:
    """Keep what TRL computes in its first step, up to the losses of its first mini-batch; then everything is as it was."""
    import torch

    originals = {
        k: getattr(module, k)
        for k in ("batch_generation", "get_reward", "selective_log_softmax", "masked_whiten", "masked_mean")
    }
    permutation = numpy.random.permutation
    seen: dict[str, list[Any]] = {k: [] for k in ("generated", "rewards", "logps", "advantages", "means", "order")}

    def finish() -> None:
        for name, function in originals.items():
            setattr(module, name, function)
        numpy.random.permutation = permutation
        policy_loss, value_loss = seen["means"][2], 0.5 * seen["means"][0]
        torch.save(
            {
                "context": seen["generated"][0][0], "tokens": seen["generated"][0][1], "old": seen["logps"][0], "ref": seen["logps"][1],
                "values": seen["rewards"][0][0].squeeze(-1), "scores": seen["rewards"][1][1], "advantages": seen["advantages"][0],
                "policy_loss": policy_loss, "value_loss": value_loss, "order": seen["order"][0],
            },
            path,
        )  # fmt: skip

    def generation(model: Any, queries: Any, *rest: Any) -> Any:
        out = originals["batch_generation"](model, queries, *rest)
        seen["generated"].append((queries.shape[1], out[0].clone()))
        return out

    def reward(*args: Any) -> Any:
        out = originals["get_reward"](*args)
        seen["rewards"].append([x.clone() for x in out])
        return out

    def softmax(*args: Any) -> Any:
        out = originals["selective_log_softmax"](*args)
        seen["logps"].append(out.detach().clone())
        return out

    def whiten(values: Any, *rest: Any, **options: Any) -> Any:
        out = originals["masked_whiten"](values, *rest, **options)
        seen["advantages"].append(values.clone())
        seen["means"].clear()
        return out

    def mean(*args: Any) -> Any:
        out = originals["masked_mean"](*args)
        seen["means"].append(out.detach().clone())
        if seen["advantages"] and len(seen["means"]) == 3:
            finish()
        return out

    def shuffled(n: int) -> Any:
        out = permutation(n)
        seen["order"].append(torch.as_tensor(out))
        return out

    for name, function in zip(originals, (generation, reward, softmax, whiten, mean)):
        setattr(module, name, function)
    numpy.random.permutation = shuffled


def run_trl(job: dict[str, Any]) -> None:
    """PPO with TRL, a rollout and its updates at each turn."""
    import numpy
    import torch
    from datasets import Dataset
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    gate, lengths = harness.Gate(), []

    class Turns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.ready()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            lengths.append(logs)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.step_done(episodes=job["batch"], length=answer_length(), score=lengths[-1]["objective/scores"])

    def answer_length() -> float:
        """Mean length of the last rollout's answers, end-of-text included."""
        return float(sum(last_lengths) / len(last_lengths))

    last_lengths: list[float] = []
    truncate = ppo_trainer.truncate_response

    def measured(stop: int, pad: int, responses: Any) -> Any:
        out = truncate(stop, pad, responses)
        last_lengths[:] = (out != pad).sum(1).tolist()
        return out

    ppo_trainer.truncate_response = measured
    if job["fixed"]:
        last_lengths.append(job["new_tokens"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(job["model"], dtype="float32")
    policy.generation_config.eos_token_id = tokenizer.eos_token_id
    if job["fixed"]:
        policy.generation_config.eos_token_id = None
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(job["reward"], num_labels=1, dtype="float32")
        for _ in range(2)
    )
    if job["task"] != "toy":
        reward = torch.nn.Identity()
        by_model = ppo_trainer.get_reward

        def by_text(model: Any, tokens: Any, pad: int, context: int) -> Any:
            if model is not reward:
                return by_model(model, tokens, pad, context)
            texts = tokenizer.batch_decode(tokens[:, context:], skip_special_tokens=True)
            return tokens, torch.tensor(verify(texts)), tokens

        ppo_trainer.get_reward = by_text
    adapters = None
    if job["train"] == "adapters":
        from peft import LoraConfig

        adapters = LoraConfig(r=16, lora_alpha=32, target_modules=job["targets"], task_type="CAUSAL_LM")
    rows = Dataset.from_list([{"input_ids": r["prompt_ids"]} for r in job["rows"]])
    more = {
        "total_episodes": job["batch"] * job["steps"], "per_device_train_batch_size": job["micro"], "gradient_accumulation_steps": job["batch"] // job["micro"],
        "num_mini_batches": job["batch"] // job["mini"], "num_ppo_epochs": job["epochs"], "local_rollout_forward_batch_size": job["batch"],
        "response_length": job["new_tokens"], "temperature": 1.0, "stop_token": None if job["fixed"] else "eos", "adam_epsilon": 1e-5,
        "kl_coef": KL_COEF, "gamma": GAMMA, "lam": LAM, "cliprange": CLIP, "cliprange_value": CLIP, "vf_coef": VF_COEF, "num_sample_generations": 0,
    }  # fmt: skip
    given = {
        k: v
        for k, v in harness.trl_settings(job, **more).items()
        if k not in ("max_steps", "logging_strategy", "disable_tqdm")
    }
    args = PPOConfig(**given)
    trainer = PPOTrainer(
        args=args, processing_class=tokenizer, model=policy, ref_model=None, reward_model=reward.eval(), value_model=value,
        train_dataset=rows, eval_dataset=rows.select(range(args.per_device_eval_batch_size)), callbacks=[Turns()], peft_config=adapters,
    )  # fmt: skip
    loader = DataLoader(rows, batch_size=job["batch"], shuffle=False, collate_fn=trainer.data_collator, drop_last=True)
    trainer.dataloader = trainer.accelerator.prepare(loader)
    if checked(job):
        record_first_rollout(ppo_trainer, numpy, job["record"])
    trainer.train()


def checked(job: dict[str, Any]) -> bool:
    """Whether both sides compute the same, to be compared number by number."""
    return job["precision"] == "fp32" and job["train"] == "all"


def check(job: dict[str, Any], tolerance: float = 1e-3) -> None:
    """Compute TRL's first rollout again with our functions.

    Raises:
        SystemExit: something differs.
    """
    import torch

    from rlhf_nb.losses.advantages import gae, whiten
    from rlhf_nb.losses.kl import kl_estimate
    from rlhf_nb.losses.policy import clipped_surrogate, clipped_value
    from rlhf_nb.models.adapters import separate
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.types import Completions

    trl = torch.load(job["record"], weights_only=True)
    tokenizer, policy = harness.load(job)
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    reward = RewardModel.load(job["reward"])
    net = separate(policy, reward)
    context, answers = trl["context"], trl["tokens"][:, trl["context"] :]
    width = answers.shape[1]
    prompts = [[t for t in row if t != pad] for row in trl["tokens"][:, :context].tolist()]
    completions = []
    for row in answers.tolist():  # an answer ends with EOS, and for TRL also before a sampled PAD
        row = row if job["fixed"] or eos not in row else row[: row.index(eos) + 1]
        completions.append(row[: row.index(pad)] if pad in row else row)
    c = Completions.from_lists(prompts, completions, pad)
    lens = c.completion_lens
    place = torch.arange(width)
    mask, longer = (
        place < lens[:, None],
        place <= lens[:, None],
    )  # TRL's two masks: up to the last token, and one further

    def wide(x: Any) -> Any:
        return torch.nn.functional.pad(x, (0, width - x.shape[1]))

    with torch.no_grad():
        out, ref = net(c), wide(net.reference.logps(c))
        scores = reward.score(c)
        if job["task"] != "toy":
            scores = torch.tensor(verify(tokenizer.batch_decode(completions, skip_special_tokens=True)))
        plus = Completions.from_lists(prompts, [x + [eos] for x in completions], pad)
        values = torch.where(longer, wide(net.values(plus)[:, :width]), 0.0)
    logps = wide(out.logps)
    rewards = torch.where(mask, -KL_COEF * kl_estimate(logps, ref, "k1"), 0.0)
    rewards[torch.arange(len(lens)), lens.clamp(max=width - 1)] += scores
    advantages, returns = gae(rewards, values, longer, GAMMA, LAM)
    rows = trl["order"][: min(job["mini"], job["micro"])]
    white = whiten(advantages, mask)
    surrogate = clipped_surrogate(logps[rows], logps[rows], white[rows], mask[rows], CLIP, CLIP)
    value_loss = clipped_value(values[rows], values[rows], returns[rows], longer[rows], CLIP)
    theirs = torch.where(longer, trl["values"][:, context - 1 : -1], 0.0)
    pairs = {
        "log-probs": (logps[mask], trl["old"][mask]),
        "reference log-probs": (ref[mask], trl["ref"][mask]),
        "values": (values, theirs),
        "scores": (scores, trl["scores"]),
        "advantages": (advantages[mask], trl["advantages"][mask]),
        "policy loss": (surrogate.total / surrogate.count, trl["policy_loss"]),
        "value loss": (value_loss.total / value_loss.count, trl["value_loss"]),
    }
    worst = {name: float((x - y).abs().max()) for name, (x, y) in pairs.items()}
    print(
        f"  TRL's first rollout ({len(lens)} answers, {lens.float().mean():.1f} tokens on average) computed again, largest differences:"
    )
    print("    " + ", ".join(f"{name} {x:.0e}" for name, x in worst.items()))
    if not max(worst.values()) <= tolerance:
        raise SystemExit(f"the two sides don't compute the same thing: a difference above {tolerance:.0e}")


def prepare(folder: Path, rollout: int, steps: int, size: str, sft_epochs: float) -> list[dict[str, Any]]:
    """Write policy and reward model; return tokenized prompts in the order of the rollouts."""
    import torch

    from rlhf_nb.data import toy
    from rlhf_nb.data.sources import tokenize_prompts
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.train.sft import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    tokenizer, model = toy.build_tokenizer(), toy.build_model(0, size)
    config = SFTConfig.preset("toy", output_dir=str(folder / "sft"), epochs=sft_epochs, console=False)
    trainer = SFTTrainer(config, model, tokenizer, toy.sft_rows(4000, 0))
    trainer.fit()
    trainer.method.save_model(folder / "policy")
    RewardModel.from_policy(model, seed=0).save(folder / "reward", tokenizer)
    print(
        f"toy policy, {sum(p.numel() for p in model.parameters()):,} parameters, fine-tuned to loss {trainer.history[-1]['loss']:.2f}"
    )
    rows = tokenize_prompts(toy.train_prompts(rollout * steps, 0), tokenizer, 64)
    return [{"prompt_ids": r["prompt_ids"], "prompt": r["prompt"], "columns": {}} for r in rows]


def prepare_smollm2(folder: Path, rollout: int, steps: int) -> list[dict[str, Any]]:
    """Write SmolLM2 and a critic on a body of its own; return tokenized prompts, each as often as it is answered."""
    from rlhf_nb.data.sources import tokenize_prompts
    from rlhf_nb.data.sums import sums_prompts
    from rlhf_nb.models.heads import RewardModel

    tokenizer, model = harness.smollm2()
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    RewardModel.from_policy(model, seed=0).save(folder / "reward", tokenizer)
    rows = tokenize_prompts(sums_prompts(rollout // GROUP["smollm2"] * steps, 0), tokenizer, 128)
    return [
        {"prompt_ids": r["prompt_ids"], "prompt": tokenizer.decode(r["prompt_ids"]), "columns": {}}
        for r in rows
        for _ in range(GROUP["smollm2"])
    ]


def targets() -> list[str]:
    """The layers that get adapters in this package by default."""
    from rlhf_nb.config import LoraSettings

    found: Any = LoraSettings().target_modules
    return found


def main() -> None:
    parser = harness.arguments(__doc__, steps=12, threads=1)  # models this small lose by a second thread, on both sides
    parser.add_argument("--task", choices=tuple(GROUP), default="toy")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of matrix products, both sides")
    parser.add_argument("--train", choices=("all", "adapters"), default="all", help="what trains (smollm2)")
    parser.add_argument("--rollout", type=int, help="episodes a step (default: 128, smollm2: 64)")
    parser.add_argument("--mini", type=int, help="episodes an update (default: 32, smollm2: 64)")
    parser.add_argument("--micro", type=int, help="TRL: episodes in a forward of an update (default: all, smollm2: 16)")
    parser.add_argument("--epochs", type=int, default=2, help="passes over a rollout")
    parser.add_argument("--new-tokens", type=int, help="most new tokens (default: 32, smollm2: 24)")
    parser.add_argument("--size", default="small", help="of the toy model")
    parser.add_argument("--fixed-length", action="store_true", help="nothing ends before --new-tokens")
    args = parser.parse_args()
    if harness.worked(args, run_ours, run_trl):
        return
    large, total = args.task == "smollm2", args.warmup + args.steps + 1
    rollout, mini = args.rollout or (64 if large else 128), args.mini or (64 if large else 32)
    new = args.new_tokens or (24 if large else 32)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if large:
            rows = prepare_smollm2(folder, rollout, total)
        else:
            rows = prepare(folder, rollout, total, args.size, 0.5 if args.quick else 2.0)
        job = {
            "task": args.task, "train": args.train, "precision": args.precision, "model": str(folder / "policy"), "reward": str(folder / "reward"),
            "record": str(folder / "record.pt"), "rows": rows, "batch": rollout, "mini": mini, "micro": args.micro or (16 if large else rollout),
            "epochs": args.epochs, "new_tokens": new, "fixed": args.fixed_length, "steps": total, "lr": 1e-9 if large else 1e-6, "targets": targets(),
            "token_budget": args.token_budget or (1024 if large else 2048), "output": str(folder / "run"),
        }  # fmt: skip

        def same(ours: harness.Worker, trl: harness.Worker) -> None:
            if checked(job):
                check(job)
            for worker in (ours, trl):
                length, mean = (sum(s[k] for s in worker.steps) / len(worker.steps) for k in ("length", "score"))
                print(f"  {worker.name}: answers of {length:.2f} tokens, score {mean:.3f} on average over all steps")

        title = f"PPO on {args.task}, {args.precision}, {args.train} trained, {rollout} answers, at most {new} new tokens, {args.epochs} passes"
        harness.compare(__file__, title, job, args, "episodes", same, "trl-1.12")


if __name__ == "__main__":
    main()
