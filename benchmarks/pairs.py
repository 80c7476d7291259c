"""What the benchmarks of reward models, DPO and KTO share: pairs of HH-RLHF as token ids, and the comparison of both sides' numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import harness


def prepare(data: Path, folder: Path, batch: int, task: str = "hh") -> dict[str, list[dict[str, Any]]]:
    """Write the model, and return tokenized pairs at random and grouped by length.

    Args:
        data: HH pairs.
        folder: for the model.
        batch: pairs a step.
        task: "hh": a Qwen2 of 12M parameters; "smollm2": SmolLM2-135M-Instruct, as `rlhf-nb get smollm2` left it.
    """
    pairs = harness.hh_pairs(data)
    if task == "smollm2":
        tokenizer, model = harness.smollm2()
    else:
        tokenizer = harness.hh_tokenizer([p["prompt"] + p["chosen"] for p in pairs])
        model = harness.qwen2(tokenizer)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return in_both_orders(pairs, tokenizer, model, batch)


def in_both_orders(
    pairs: list[dict[str, str]], tokenizer: Any, model: Any, batch: int
) -> dict[str, list[dict[str, Any]]]:
    """Tokenized pairs at random and grouped by length; says how many there are.

    Args:
        pairs: prompt, chosen and rejected.
        tokenizer: of the model.
        model: for its size.
        batch: pairs a step.
    """
    import random

    columns = {
        k: tokenizer([p[k] for p in pairs], add_special_tokens=False)["input_ids"]
        for k in ("prompt", "chosen", "rejected")
    }
    end = [tokenizer.eos_token_id]
    rows = [
        {"prompt_ids": p, "chosen_ids": a + end, "rejected_ids": b + end, "margin": None}
        for p, a, b in zip(columns["prompt"], columns["chosen"], columns["rejected"])
        if len(p) + max(len(a), len(b)) < 1024
    ]
    random.Random(0).shuffle(rows)
    lengths = [len(r["prompt_ids"]) + max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in rows]
    size = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"{size:.1f}M parameters, {len(rows)} pairs, {sum(lengths) / len(rows):.0f} tokens in the longer side on average, {batch} a step"
    )
    order = harness.grouped(lengths, batch)
    batches = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
    random.Random(1).shuffle(batches)
    return {"random": rows, "grouped": [rows[i] for b in batches for i in b]}


def near(ours: harness.Worker, theirs: harness.Worker, keys: tuple[str, ...], tolerance: float) -> dict[str, float]:
    """Largest difference of each number over all steps, relative to the larger of the two, and for margins to what fp32 can know.

    Margins start at 0 and are β (0.1) times differences of log-probs of hundreds of nats: below 1e-3 of these, differences count absolutely.

    Raises:
        SystemExit: it is above the tolerance, so the two sides don't compute the same thing.
    """
    out = dict.fromkeys(keys, 0.0)
    for a, b in zip(ours.steps, theirs.steps, strict=True):
        for k in keys:
            floor = max(0.1, 1e-3 * abs(a.get("chosen", 0.0))) if k == "margin" else 0.1
            out[k] = max(out[k], abs(a[k] - b[k]) / max(abs(a[k]), abs(b[k]), floor))
    print(f"  {len(ours.steps)} steps agree to " + ", ".join(f"{k} {v:.1e}" for k, v in out.items()), flush=True)
    if not all(v <= tolerance for v in out.values()):
        raise SystemExit(
            f"{ours.name} and {theirs.name} don't compute the same thing: {out}, tolerance {tolerance:.0e}"
        )
    return out


def job_of(folder: Path, rows: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """What a worker is told, on both sides alike."""
    usual = {"batch": 8, "lr": 1e-4, "beta": 0.1, "threads": 2, "token_budget": 1024, "cached": False, "accumulate": 1}
    usual |= {"checkpointing": False, "precision": "fp32"}  # the first: of TRL
    return {"model": str(folder / "model"), "rows": rows, **usual, **fields}


def source_of(rows: list[dict[str, Any]], config: Any, model: Any, tokenizer: Any, columns: Any) -> tuple[Any, Any]:
    """Our rows and the reference beside the policy; with `reference="cached"` its sums stand in the rows instead."""
    from rlhf_nb.data.sources import MemorySource
    from rlhf_nb.train.offline import make_reference, with_reference

    reference = make_reference(config, model, tokenizer)
    if config.reference == "cached":
        assert reference is not None
        rows, reference = with_reference(rows, reference, config, columns), None
    return MemorySource(rows, shuffle=False), reference


def strangers(rows: list[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """Each row with the answer of the row before it in its batch, as TRL pairs them to measure the reference point."""
    before = [i - 1 if i % batch else i + batch - 1 for i in range(len(rows))]
    return [row | {"other_ids": rows[j]["completion_ids"]} for row, j in zip(rows, before, strict=True)]


def labelled(pairs: list[dict[str, Any]], batch: int) -> list[dict[str, Any]]:
    """One answer of each pair, good and bad in turn, so that every batch has both."""
    return [
        {
            "prompt_ids": r["prompt_ids"],
            "completion_ids": r["rejected_ids" if i % 2 else "chosen_ids"],
            "label": i % 2 == 0,
        }
        for i, r in enumerate(pairs[: len(pairs) // batch * batch])
    ]
