"""GRPO: completions per second of whole training steps against TRL's GRPOTrainer; and decoding alone against `generate`.

    python benchmarks/bench_grpo.py [--quick] [--steps 8] [--threads 1] [--task toy hh] [--against full group continuous] [--data FILE]
    python benchmarks/bench_grpo.py --decode [--threads 1] [--prompts 8 32]
    python benchmarks/bench_grpo.py --task smollm2 --threads 2 [--precision bf16] [--against full ours] [--new-tokens 24]   # after `rlhf-nb get smollm2`
    python benchmarks/bench_grpo.py --task smollm2 --threads 2 --precision bf16 --against full --run 30
    python benchmarks/bench_grpo.py --floor --threads 2 --precision bf16

Both sides: the same policy, 8 answers to each of the same 8 prompts a step, one update per step, the same cheap reward function, group advantages, no
reference model (the default of both), fp32 (or bf16 products on both sides), AdamW (fused), gradients cut to norm 1, no dropout, no gradient
checkpointing. A tiny learning rate keeps the lengths of the answers equal throughout. Tasks:

    toy     the toy world's policy (fine-tuned for a moment), at most 48 new tokens
    smollm2 SmolLM2-135M-Instruct as it is, on the package's word problems (prompts of about 60 tokens), at most 24 new tokens
    hh      a Qwen2 of 12M parameters, fine-tuned for a moment on HH-RLHF so that answers end; prompts of about 125 tokens, at most 64 new ones

TRL generates with transformers (vLLM needs a GPU), 64 answers in a forward (`full`), 8 in a forward and 8 accumulated (`group`), or with transformers'
continuous batching (`continuous`); `ours` is this package in fp32 instead, to show what bf16 is worth.

The samplers draw different random numbers, so losses can't simply be compared. Instead TRL's first batch is computed again by our functions: log-probs of
all answers, advantages, the loss, and the norm of its gradient. `--run N` is a run that learns: N steps at a rate of 5e-6, with
a reward of 1 for the right number and 0 else, all steps counted; groups that are all right or all wrong have no gradient, and ours leaves them out of the update.
`--floor` measures a step of decoding at 1, 4, 16 and 64 rows beside the machine's floor: the longer of reading all weights, keys and values once and
of all its products alone, both measured, in CPU time. `--decode` lets a quarter of the rows end early (and then most), checks that both write
the same tokens when greedy, and counts how many decoding slots work on a token that is kept. At most 64 rows decode at the same time.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import harness

WAYS = ("full", "group", "continuous", "ours")
GROUP, PROMPTS = 8, 8
NEW_TOKENS = {"toy": 48, "hh": 64, "smollm2": 24}
DECODED = {"toy": (48, 96), "hh": (64, 128), "smollm2": (24, 64)}
BUDGET = {"toy": 2048, "hh": 1024, "smollm2": 1024}


def reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Different letters, less a little for each repeated word: cheap, deterministic, different within a group."""
    out = []
    for text in completions:
        words = text.split()
        out.append(len(set(text)) / 10 - 0.05 * (len(words) - len(set(words))))
    return out


def right(prompts: list[Any], completions: list[str], answer: list[int], **columns: Any) -> list[float]:
    """1 where the last number is the answer."""
    found = [re.findall(r"\d+", text.replace(",", "")) for text in completions]
    return [float(bool(numbers) and int(numbers[-1]) == want) for numbers, want in zip(found, answer)]


def timed(owner: Any, name: str, seconds: Counter[str], label: str) -> None:
    """Add the time spent in a method to `seconds`."""
    inner = getattr(owner, name)

    def outer(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        out = inner(*args, **options)
        seconds[label] += time.perf_counter() - begin
        return out

    setattr(owner, name, outer)


def run_ours(job: dict[str, Any]) -> None:
    """GRPO with rlhf_nb."""
    from rlhf_nb.data.sources import MemorySource
    from rlhf_nb.rewards.base import Rewards
    from rlhf_nb.train.grpo import GRPO, GRPOConfig

    seconds = Counter[str]()

    def report(run: Any, event: dict[str, Any]) -> dict[str, Any]:
        parts = {**seconds, "update": event["perf/update_s"]}
        seconds.clear()
        said = {"length": event["completions/mean_length"], "reward": event["reward"], "parts": parts}
        return {"completions": job["batch"], **said}

    optimizer = {"lr": job["lr"], "eps": 1e-8, "schedule": "constant", "max_grad_norm": 1.0}
    sampling = {"max_new_tokens": job["new_tokens"]}
    config = GRPOConfig(**harness.settings(job, num_generations=GROUP, optimizer=optimizer, sampling=sampling))
    tokenizer, model = harness.load(job)
    method = GRPO(model, tokenizer, Rewards(right if job["run"] else reward), config)
    timed(method, "rollout", seconds, "generate")
    timed(method, "score", seconds, "score")
    harness.fit(method, MemorySource(job["rows"], shuffle=False), config, report)


def record_first_batch(trainer: Any, path: str) -> None:
    """Keep what TRL computes in its first step; the norm of its gradient is in its log."""
    import torch

    seen: dict[str, Any] = {"parts": []}
    generate, rewards = trainer._generate_and_score_completions, trainer._calculate_rewards
    loss, logps = trainer._compute_loss, trainer._get_per_token_logps_and_entropies
    names = ("generate_and_score_completions", "calculate_rewards", "compute_loss", "get_per_token_logps_and_entropies")

    def generated(*args: Any) -> Any:
        out = generate(*args)
        seen["advantages"] = out["advantages"].clone()
        return out

    def scored(*args: Any) -> Any:
        out = rewards(*args)
        seen["scores"] = out.sum(1).clone()
        return out

    def scoring(*args: Any, **options: Any) -> Any:
        out = logps(*args, **options)
        seen["logps"] = out[0].detach().clone()
        return out

    def lost(model: Any, inputs: dict[str, Any]) -> Any:
        out = loss(model, inputs)
        keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        seen["parts"].append(
            {"loss": out.detach().clone(), "logps": seen["logps"], **{k: inputs[k].clone() for k in keys}}
        )
        if len(seen["parts"]) == trainer.args.gradient_accumulation_steps:
            torch.save({k: seen[k] for k in ("advantages", "scores", "parts")}, path)
            for name in names:
                delattr(trainer, f"_{name}")
        return out

    for name, function in zip(names, (generated, scored, lost, scoring)):
        setattr(trainer, f"_{name}", function)


def run_trl(job: dict[str, Any]) -> None:
    """GRPO with TRL, a step at each turn."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    gate, seconds, logged = harness.Gate(), Counter[str](), []

    class Turns(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gate.ready()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "completions/mean_length" not in logs:
                return
            logged.append(logs)
            parts = dict(seconds)
            seconds.clear()
            gate.step_done(
                completions=job["batch"], length=logs["completions/mean_length"], reward=logs["reward"],
                grad_norm=logs["grad_norm"], parts=parts,
            )  # fmt: skip

    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    tokens = {r["prompt"]: r["prompt_ids"] for r in job["rows"]}
    accumulate = PROMPTS if job["way"] == "group" else 1
    more: dict[str, Any] = {
        "per_device_train_batch_size": job["batch"] // accumulate, "gradient_accumulation_steps": accumulate, "num_generations": GROUP,
        "max_completion_length": job["new_tokens"], "temperature": 1.0, "top_p": 1.0, "top_k": 0, "beta": 0.0, "loss_type": "grpo",
        "max_grad_norm": 1.0, "shuffle_dataset": False, "logging_strategy": "steps", "logging_steps": 1,
    }  # fmt: skip
    if job["way"] == "continuous":
        blocks = {"num_blocks": 256, "page_size": 32, "max_batch_tokens": 1024, "max_requests_per_batch": job["batch"]}
        more |= {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": blocks,
        }
    args = GRPOConfig(**harness.trl_settings(job, **more))
    rows = Dataset.from_list([{"prompt": r["prompt"]} | r["columns"] for r in job["rows"]])
    trainer = GRPOTrainer(
        model=model,
        args=args,
        reward_funcs=right if job["run"] else reward,
        processing_class=tokenizer,
        train_dataset=rows,
        callbacks=[Turns()],
    )
    trainer._tokenize_prompts = lambda prompts: (
        [tokens[p] for p in prompts],
        None,
        {},
    )  # the same tokens on both sides
    timed(trainer, "_generate_single_turn", seconds, "generate")
    record_first_batch(trainer, job["record"])
    trainer.train()


def check(job: dict[str, Any], grad_norm: float, tolerance: float = 1e-4) -> None:
    """Compute TRL's first batch again with our functions.

    Raises:
        SystemExit: something differs.
    """
    import torch

    from rlhf_nb.losses.advantages import group_advantages
    from rlhf_nb.losses.group import group_surrogate
    from rlhf_nb.scoring.scores import completion_logps
    from rlhf_nb.types import Completions

    trl = torch.load(job["record"], weights_only=True)
    tokenizer, model = harness.load(job)
    worst = {"advantages": float((group_advantages(trl["scores"], GROUP) - trl["advantages"]).abs().max())}
    worst |= {"log-probs": 0.0, "loss": 0.0}

    def gradient_norm(shift: int) -> float:
        """Norm of the step's gradient, with each answer given the advantage of another; 0: its own."""
        model.zero_grad()
        for part in trl["parts"]:
            pairs = [zip(part[f"{k}_ids"], part[f"{k}_mask"].bool()) for k in ("prompt", "completion")]
            lists = [[row[mask].tolist() for row, mask in pair] for pair in pairs]
            c = Completions.from_lists(*lists, tokenizer.pad_token_id)
            logps = completion_logps(model, c, token_budget=job["token_budget"]).logps
            loss = group_surrogate(logps, logps.detach(), part["advantages"].roll(shift), c.completion_mask)
            mean = loss.total / loss.count / len(trl["parts"])
            mean.backward()
            if not shift:
                theirs = torch.where(c.completion_mask, part["logps"][:, : logps.shape[1]], 0.0)
                worst["log-probs"] = max(worst["log-probs"], float((logps.detach() - theirs).abs().max()))
                worst["loss"] = max(worst["loss"], abs(float(mean.detach() - part["loss"])))
        return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())

    worst["gradient norm (relative)"] = abs(gradient_norm(0) / grad_norm - 1)
    exchanged = abs(gradient_norm(1) / grad_norm - 1)
    shown = ", ".join(f"{k} {x:.0e}" for k, x in worst.items())
    print(
        f"  TRL's first batch computed again, largest differences: {shown} (with advantages exchanged: {exchanged:.0e})"
    )
    if not max(worst.values()) <= tolerance < exchanged:
        raise SystemExit(
            f"the two sides don't compute the same thing: a difference above {tolerance:.0e}, or none where one is due"
        )


def fine_tune(model: Any, tokenizer: Any, pairs: list[dict[str, str]], steps: int = 30, batch: int = 16) -> float:
    """A moment of training on the chosen answers, so that answers end; returns the last loss."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model.train()
    for i in range(steps):
        rows = [
            tokenizer(p["prompt"][-200:] + p["chosen"])["input_ids"][:160] + [1]
            for p in pairs[i * batch : (i + 1) * batch]
        ]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True)
        loss = model(ids, labels=ids.masked_fill(ids == 0, -100)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def prepare(task: str, folder: Path, steps: int, data: Path) -> list[dict[str, Any]]:
    """Write the policy unless it is there; return tokenized prompts in the order of the steps."""
    import torch

    from rlhf_nb.data import toy
    from rlhf_nb.data.sources import tokenize_prompts
    from rlhf_nb.train.sft import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    need, new = PROMPTS * steps, not (folder / "model").exists()
    columns: dict[str, dict[str, Any]] = {}
    if task == "toy":
        tokenizer, model = toy.build_tokenizer(), toy.build_model(0, "small")
        asked = {r["prompt"]: r for r in toy.train_prompts(2 * need, 0)}.values()
        kept = {r["prompt"]: r["prompt_ids"] for r in tokenize_prompts(asked, tokenizer, 64)}
        if new:
            config = SFTConfig.preset("toy", output_dir=str(folder / "sft"), epochs=1.0, console=False)
            trainer = SFTTrainer(config, model, tokenizer, toy.sft_rows(4000, 0))
            loss = trainer.fit()[-1]["loss"]
            trainer.method.save_model(folder / "model")
    elif task == "smollm2":
        from rlhf_nb.data.sums import sums_prompts

        tokenizer, model = harness.smollm2()
        loss = math.nan
        tokens = tokenize_prompts(sums_prompts(need, 0), tokenizer, 128)
        kept = {tokenizer.decode(r["prompt_ids"]): r["prompt_ids"] for r in tokens}
        columns = {tokenizer.decode(r["prompt_ids"]): r["columns"] for r in tokens}
        if new:
            model.save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
    else:
        pairs = harness.hh_pairs(data)
        tokenizer = harness.hh_tokenizer([p["prompt"] + p["chosen"] for p in pairs])
        model = harness.qwen2(tokenizer)
        kept = {p["prompt"]: tokenizer(p["prompt"])["input_ids"] for p in pairs}
        kept = {k: ids for k, ids in kept.items() if 64 <= len(ids) <= 256}
        if new:
            loss = fine_tune(model, tokenizer, pairs)
            model.save_pretrained(folder / "model")
            tokenizer.save_pretrained(folder / "model")
    if new:
        print(
            f"{task}: policy of {sum(p.numel() for p in model.parameters()):,} parameters"
            + ("" if math.isnan(loss) else f", fine-tuned to loss {loss:.2f}"),
            flush=True,
        )
    kept = dict(list(kept.items())[:need])
    print(
        f"{task}: {len(kept)} prompts of {sum(map(len, kept.values())) / len(kept):.0f} tokens on average", flush=True
    )
    return [{"prompt_ids": ids, "prompt": prompt, "columns": columns.get(prompt, {})} for prompt, ids in kept.items()]


def shares(worker: harness.Worker, warmup: int) -> str:
    """Where a step's time goes."""
    steps = worker.steps[warmup:]
    total = sum(s["seconds"] for s in steps)
    spent = {k: sum(s["parts"].get(k, 0.0) for s in steps) / total for k in steps[0]["parts"]}
    rest = 1 - sum(spent.values())
    return ", ".join(f"{k} {v:.0%}" for k, v in {**spent, "rest": rest}.items())


def compare(task: str, way: str, args: argparse.Namespace, folder: Path, rows: list[dict[str, Any]]) -> None:
    """One way of TRL against ours."""
    new, record = args.new_tokens or NEW_TOKENS[task], folder / f"record-{way}.pt"
    job = {
        "model": str(folder / "model"), "record": str(record), "rows": rows, "batch": GROUP * PROMPTS, "way": way, "new_tokens": new, "lr": 5e-6 if args.run else 1e-9, "run": args.run,
        "steps": args.warmup + args.steps + 1, "token_budget": args.token_budget or BUDGET[task], "precision": args.precision, "output": str(folder / way),
    }  # fmt: skip

    def same(ours: harness.Worker, trl: harness.Worker) -> None:
        if way != "ours" and args.precision == "fp32":
            check(job, trl.steps[0]["grad_norm"])
        for worker in (ours, trl):
            length, mean = (sum(s[k] for s in worker.steps) / len(worker.steps) for k in ("length", "reward"))
            spent = shares(worker, args.warmup)
            print(f"  {worker.name}: answers of {length:.2f} tokens, reward {mean:.3f} on average; time: {spent}")
            if args.run:
                print("    reward by step:", *(f"{s['reward']:.2f}" for s in worker.steps))

    learns = f", a run of {args.run} steps" if args.run else ""
    title = f"GRPO on {task}{learns}, {args.precision}, {PROMPTS} prompts × {GROUP}, at most {new} new tokens, against {way}"
    theirs = {"precision": "fp32"} if way == "ours" else None
    peer = "ours" if way == "ours" else "trl-1.16"
    harness.compare(__file__, title, job, args, "completions", same, peer, theirs)


def floors(args: argparse.Namespace) -> None:
    """A step of decoding on SmolLM2 at 1, 4, 16 and 64 rows, beside the machine's floor; CPU time of all threads."""
    import torch

    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.fast.engine import decoder_for
    from rlhf_nb.rollout.sampler import sample_tokens
    from rlhf_nb.types import PromptBatch

    torch.set_num_threads(args.threads)
    model, found, halves = harness.smollm2()[1].eval(), [], args.precision == "bf16"
    prompt = PromptBatch.from_lists([list(range(100, 132))])

    def spent(work: Any) -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    def write(rows: int, new: int) -> None:
        sampling = SamplingConfig(max_new_tokens=new)
        sample_tokens(model, prompt, sampling, eos=[], pad=0, seed=0, num_samples=rows)

    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=halves):
        decoder, many = decoder_for(model, 96), torch.ones(1 << 27)
        parts = [p for x in decoder.layers for p in (x.qkv, x.out, x.up, x.down)] + [decoder.head]
        size = sum(m.weight.numel() for p in parts for m in p.modules) * decoder.dtype.itemsize
        for rows in (1, 4, 16, 64):
            inputs = [torch.randn(rows, p.modules[0].in_features).to(p.dtype) for p in parts]
            steps, reads, products = [], [], []
            for _ in range(args.repeats or 3):
                steps.append((spent(lambda: write(rows, 64)) - spent(lambda: write(rows, 16))) / 48)  # noqa: B023
                speed = many.nbytes / min(spent(many.sum) for _ in range(3))
                reads.append((size + rows * 72 * decoder.token_bytes) / speed)
                products.append(min(spent(lambda: [p(x) for p, x in zip(parts, inputs)]) for _ in range(3)))  # noqa: B023
            step, read, product = (1000 * statistics.median(x) for x in (steps, reads, products))
            share = [max(read, product) / 1000 / s for s in sorted(steps, reverse=True)]
            print(
                f"  {rows} rows: a step {step:.1f} CPU ms, reading {read:.1f}, products {product:.1f}; share {share[0]:.2f}-{share[-1]:.2f}",
                flush=True,
            )
            found.append([rows, round(step, 1), round(read, 1), round(product, 1), round(share[len(share) // 2], 2)])
    harness.keep(args.json, f"a step of decoding, {args.precision}", args.threads, "rows", {"steps": found})


# --- decoding alone ---------------------------------------------------------------------------------------------------------


def with_bias(model: Any) -> Any:
    """The model with a head that has a bias, so that EOS can be made likelier."""
    import torch

    head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
    model.lm_head = head
    return model.eval().requires_grad_(False)


def decode_case(
    task: str, share: float, rows: list[dict[str, Any]], model: Any, tokenizer: Any, new: int, repeats: int
) -> dict[str, float]:
    """Time sampling against `generate` where about `share` of the rows end early; the ratios."""
    import torch
    from transformers import GenerationConfig

    from rlhf_nb.config import SamplingConfig
    from rlhf_nb.rollout.sampler import sample_tokens
    from rlhf_nb.types import PromptBatch

    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    prompts = PromptBatch.from_lists([r["prompt_ids"] for r in rows], prompts=[r["prompt"] for r in rows])
    settings, used = SamplingConfig(max_new_tokens=new), []

    def ours(seed: int, greedy: bool = False) -> Any:
        return sample_tokens(
            model, prompts, settings, eos=[eos], pad=pad, seed=seed, num_samples=GROUP, greedy=greedy,
            batch_size=GROUP * PROMPTS, used=used,
        )  # fmt: skip

    for seed in range(5):  # make EOS as likely as it must be
        lens, done = ours(seed)[2:]
        rate = float(done.sum() / lens.sum())
        with torch.no_grad():
            model.lm_head.bias[eos] += math.log((1 - (1 - share) ** (1 / new)) / max(rate, 1e-4))

    def theirs(greedy: bool = False) -> list[Any]:
        how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(max_new_tokens=new, eos_token_id=eos, pad_token_id=pad, **how)
        out = []
        for i in range(0, len(prompts), PROMPTS):
            part = PromptBatch.from_lists([r["prompt_ids"] for r in rows[i : i + PROMPTS]])
            ids, mask = (x.repeat_interleave(GROUP, 0) for x in (part.prompt_ids, part.prompt_mask.long()))
            out.append(model.generate(ids, attention_mask=mask, generation_config=config)[:, ids.shape[1] :])
        return out

    same, a = ours(0, greedy=True)[0], theirs(greedy=True)
    wide = [torch.nn.functional.pad(x, (0, same.shape[1] - x.shape[1]), value=pad) for x in a]
    if not torch.equal(torch.cat(wide), same):
        raise SystemExit(f"{task}: greedy answers differ from generate's, so the times would mean nothing.")
    speeds, fill, ended = ([], []), ([], []), []
    for seed in range(repeats + 1):
        used.clear()
        begin = time.process_time(), time.perf_counter()
        out = ours(seed)
        middle = time.process_time(), time.perf_counter()
        answers = theirs()
        end = time.process_time(), time.perf_counter()
        tokens = [int(out[2].sum()), sum(int((x != pad).sum()) for x in answers)]
        if not seed:
            continue
        speeds[0].append([tokens[0] / (m - x) for x, m in zip(begin, middle)])
        speeds[1].append([tokens[1] / (e - m) for m, e in zip(middle, end)])
        fill[0].append(tokens[0] / sum(used))
        fill[1].append(tokens[1] / sum(x.numel() for x in answers))
        ended.append(float((out[2] < new).float().mean()))
    cpu, wall = (
        statistics.median(s[i] for s in speeds[0]) / statistics.median(s[i] for s in speeds[1]) for i in (0, 1)
    )
    ratios = sorted(x[1] / y[1] for x, y in zip(*speeds))
    print(
        f"  {task}, {len(prompts)} prompts × {GROUP}, {new} new tokens, {statistics.mean(ended):.0%} end early: {statistics.median(s[1] for s in speeds[0]):.0f} / {statistics.median(s[1] for s in speeds[1]):.0f} tokens/s "
        f"= {wall:.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f}; by CPU time {cpu:.2f}x); slots in use {statistics.mean(fill[0]):.1%} / {statistics.mean(fill[1]):.1%}",
        flush=True,
    )
    return {"ratio": wall, "low": ratios[0], "high": ratios[-1], "cpu": cpu}


def decoding(task: str, args: argparse.Namespace, folder: Path, rows: list[dict[str, Any]]) -> None:
    """Decoding alone, in this process."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    print(f"{task}: decoding alone, ours / generate, {args.threads} threads, in turn", flush=True)
    for prompts in args.prompts:
        for share in args.ended:
            for new in [args.new_tokens] if args.new_tokens else DECODED[task]:
                model = with_bias(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32))
                torch.manual_seed(0)
                repeats = args.repeats or (3 if args.quick else 5)
                found = decode_case(task, share, rows[:prompts], model, tokenizer, new, repeats)
                harness.keep(args.json, f"decoding, {task}", args.threads, "tokens", found)


def main() -> None:
    parser = harness.arguments(__doc__, steps=8, threads=1, ways=WAYS)
    parser.add_argument("--task", nargs="+", choices=tuple(NEW_TOKENS), default=["toy", "hh"])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of matrix products, both sides")
    parser.add_argument("--new-tokens", type=int, help="most new tokens (default: the task's)")
    parser.add_argument("--decode", action="store_true", help="decoding alone")
    parser.add_argument("--ended", type=float, nargs="+", default=[0.25, 0.8], help="rows that end early, --decode")
    parser.add_argument("--prompts", type=int, nargs="+", default=[PROMPTS], help="for --decode")
    parser.add_argument("--repeats", type=int, help="measured calls, for --decode")
    parser.add_argument("--run", type=int, help="a run of so many steps that learns")
    parser.add_argument("--floor", action="store_true", help="a step of decoding beside the machine's floor")
    args = parser.parse_args()
    args.steps, args.warmup = (args.run, 0) if args.run else (args.steps, args.warmup)
    if args.floor:
        return floors(args)
    if harness.worked(args, run_ours, run_trl):
        return
    for task in args.task:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            steps = max(args.prompts) // PROMPTS if args.decode else args.warmup + args.steps + 1
            rows = prepare(task, folder, steps, args.data)
            if args.decode:
                decoding(task, args, folder, rows)
                continue
            for way in args.against or ("full", "group"):
                compare(task, way, args, folder, rows)


if __name__ == "__main__":
    main()
