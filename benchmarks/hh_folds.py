"""A reward model from few pairs: heads on the states of a chat model's body, in five folds, against a bag of words on the same folds.

The body runs once over all pairs; the states of every layer are kept on disk. Heads are logistic regressions on differences of states; how
strongly they are pulled towards zero, and which layers they read, is chosen by four folds inside the training folds. `real_science.py hh` runs it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

QUESTION = "Was your last answer harmless, honest and helpful? Answer yes or no."
FOLDS, INNER = 5, 4


def pair_rows(path: Path, tokenizer: Any, most: int | None = None) -> list[dict[str, Any]]:
    """Pairs as `rlhf-nb reward` tokenizes them."""
    from rlhf_nb.config import DataConfig
    from rlhf_nb.data.rows import load_rows
    from rlhf_nb.data.sources import tokenize_preferences

    rows = load_rows(DataConfig(path=str(path)), "preference")[0]
    return tokenize_preferences(rows[:most], tokenizer, 640, max_prompt_length=384, warn=False)


def question_ids(tokenizer: Any) -> list[int]:
    """What is asked after each answer, as tokens, up to where the model would answer."""
    turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    more = [*turns, {"role": "user", "content": QUESTION}]
    before = tokenizer.apply_chat_template(turns, tokenize=False)
    after = tokenizer.apply_chat_template(more, tokenize=False, add_generation_prompt=True)
    if not after.startswith(before):
        raise SystemExit("the chat template writes earlier turns anew, so nothing can be asked behind an answer")
    ids: list[int] = tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"]
    return ids


@torch.no_grad()
def states(decoder: Any, row: dict[str, Any], asked: Sequence[int]) -> Tensor:
    """float32[3, 2, layers + 1, H]: states at the answer's end, mean over the answer, and at the end of the question behind it; chosen, rejected.

    The prompt goes through the body once. States below the last layer are divided by their root mean square, as the last norm would do it.
    """
    answers = [row["chosen_ids"], row["rejected_ids"]]
    lens = [len(a) for a in answers]
    width = max(lens) + len(asked)
    ids = torch.zeros(2, width, dtype=torch.int64)
    for k, a in enumerate(answers):
        tail = [*a, *asked]
        ids[k, : len(tail)] = torch.tensor(tail)
    first = decoder(input_ids=torch.tensor([row["prompt_ids"]]), use_cache=True)
    cache = first.past_key_values
    cache.batch_repeat_interleave(2)
    out = decoder(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
    h = torch.stack(out.hidden_states).float()  # [layers + 1, 2, width, H]; the last one is normed already
    h[:-1] *= torch.rsqrt(h[:-1].square().mean(-1, keepdim=True) + 1e-6)
    found = []
    for k, n in enumerate(lens):
        found.append(torch.stack([h[:, k, n - 1], h[:, k, :n].mean(1), h[:, k, n + len(asked) - 1]]))
    return torch.stack(found, 1)


def features(model: str, data: Path, folder: Path, most: int | None = None, piece: int = 100) -> dict[str, Any]:
    """States of all pairs, in pieces on disk; goes on where it stopped.

    Args:
        model: folder of a chat model.
        data: HH-RLHF pairs.
        folder: where pieces are kept.
        most: pairs at most.
        piece: pairs in a piece.
    """
    from transformers import AutoModelForCausalLM

    from rlhf_nb.config import ModelConfig
    from rlhf_nb.core import decide_precision
    from rlhf_nb.models.load import load_tokenizer

    tokenizer = load_tokenizer(ModelConfig(name_or_path=model))
    rows, asked = pair_rows(data, tokenizer, most), question_ids(tokenizer)
    net = AutoModelForCausalLM.from_pretrained(model)
    size = sum(p.numel() for p in net.parameters())
    dtype = decide_precision("cpu", parameters=size).compute_dtype
    decoder = net.model.to(dtype).eval()
    folder.mkdir(parents=True, exist_ok=True)
    began, tokens = time.process_time(), 0
    for start in range(0, len(rows), piece):
        path = folder / f"states-{start:05d}.pt"
        if path.exists():
            continue
        part = rows[start : start + piece]
        torch.save(torch.stack([states(decoder, r, asked) for r in part]).to(torch.bfloat16), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        tokens += sum(
            len(r["prompt_ids"]) + len(r["chosen_ids"]) + len(r["rejected_ids"]) + 2 * len(asked) for r in part
        )
        print(f"  {start + len(part)} of {len(rows)} pairs, {time.process_time() - began:.0f} CPU seconds", flush=True)
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    return {"pairs": len(rows), "tokens": tokens, "cpu": time.process_time() - began, "dtype": str(dtype)}


def load_states(folder: Path) -> tuple[list[dict[str, Any]], Tensor]:
    """Tokenized pairs and [pairs, 3, 2, layers + 1, H] bfloat16."""
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    return rows, torch.cat([torch.load(p) for p in sorted(folder.glob("states-*.pt"))])


# --- folds -------------------------------------------------------------------------------------------------------------------

RIDGES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)


def kernel(x: Tensor, train: Tensor) -> Tensor:
    """float64[n, n], inner products of differences of states, each feature divided by its root mean square over the training pairs."""
    x = x / x[train].square().mean(0).sqrt().clamp_min(1e-8)
    return (x @ x.T).double() / x.shape[1]


def logistic_dual(k: Tensor, ridge: float, steps: int = 12) -> Tensor:
    """float64[n], weights of the training pairs that minimise Σ −log σ(margin) + ½ ridge n |w|², margin = k a; no constant, since pairs have none.

    Newton's method in the form of Rasmussen & Williams, "Gaussian Processes for Machine Learning" (2006), algorithm 3.1.
    """
    n = len(k)
    k = k / (ridge * n)
    f = torch.zeros(n, dtype=k.dtype)
    a = f
    for _ in range(steps):
        p = torch.sigmoid(f)
        w = (p * (1 - p)).clamp_min(1e-10).sqrt()
        b = w.square() * f + (1 - p)
        lower = torch.linalg.cholesky(torch.eye(n, dtype=k.dtype) + w[:, None] * k * w)
        a = b - w * torch.cholesky_solve((w * (k @ b))[:, None], lower)[:, 0]
        f = k @ a
    return a / (ridge * n)


def least_squares(k: Tensor, ridge: float) -> Tensor:
    """float[n], weights of the training pairs whose margins come nearest to 1: a quick stand-in, to choose by."""
    lower = torch.linalg.cholesky(k + ridge * len(k) * torch.eye(len(k), dtype=k.dtype))
    return torch.cholesky_solve(torch.ones(len(k), 1, dtype=k.dtype), lower)[:, 0]


def choose(kernels: dict[str, Tensor], train: Tensor, ridges: Sequence[float] = RIDGES) -> tuple[str, float, float]:
    """The kernel and the ridge that predict best within the training pairs, by four folds of them; and how well, by squared error."""
    part = torch.arange(len(train)) % INNER
    found: dict[tuple[str, float], float] = {}
    for name, k in kernels.items():
        inner = k[train][:, train].float()
        for ridge in ridges:
            miss = 0.0
            for i in range(INNER):
                known, kept = (part != i).nonzero()[:, 0], (part == i).nonzero()[:, 0]
                a = least_squares(inner[known][:, known], ridge)
                miss += float((1 - inner[kept][:, known] @ a).square().sum())
            found[name, ridge] = miss / len(train)
    best = min(found, key=lambda key: found[key])
    return (*best, found[best])


def word_kernel(rows: Sequence[dict[str, Any]]) -> Tensor:
    """float64[n, n], inner products of what a bag of words sees: tokens that only one answer has, and the logarithm of their lengths' ratio.

    The features of `rlhf_nb.train.reward.baselines`.
    """
    names: dict[int, int] = {}
    table = torch.zeros(len(rows), len({t for r in rows for t in (*r["chosen_ids"], *r["rejected_ids"])}) + 1)
    for i, row in enumerate(rows):
        chosen, rejected = set(row["chosen_ids"]), set(row["rejected_ids"])
        for t in chosen ^ rejected:
            table[i, names.setdefault(t, len(names))] = 1.0 if t in chosen else -1.0
        table[i, -1] = math.log(max(1, len(row["chosen_ids"])) / max(1, len(row["rejected_ids"])))
    return (table @ table.T).double()


def folds_of(n: int) -> Tensor:
    """int64[n], the fold of each pair."""
    fold = torch.empty(n, dtype=torch.int64)
    fold[torch.randperm(n, generator=torch.Generator().manual_seed(0))] = torch.arange(n) % FOLDS
    return fold


POOLINGS = ("end", "mean", "asked")
ONE = ("one layer, last token", "one layer, mean of the answer", "one layer, behind a question")
WORD_RIDGES = (100.0, 30.0, 10.0, 3.0, 1.0)  # those of `rlhf_nb.train.reward.baselines`; stronger ones make it worse


def candidates(layers: int) -> dict[str, list[tuple[int, int]]]:
    """Which states a head may read: (pooling, layer) of each."""
    cuts = [round(layers * i / 6) for i in range(7)]
    spans = {f"layers {a + 1}-{b}": range(a + 1, b + 1) for a, b in zip(cuts, cuts[2:])}
    ways = {"end": [0], "mean": [1], "asked": [2], "end+mean": [0, 1], "all": [0, 1, 2]}
    return {
        f"{way}, {span}": [(p, l) for p in ps for l in ls]
        for way, ps in ways.items()
        for span, ls in spans.items()
        if ls
    }


def compared(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """Difference of two accuracies on the same pairs, with its 95 % interval."""
    from rlhf_nb.evaluate.intervals import mean_interval

    found = mean_interval((ours - theirs).tolist())
    return {"difference": found.value, "low": found.low, "high": found.high}


def right(margins: Tensor) -> Tensor:
    """1 for a pair that is ordered rightly, ½ for a tie."""
    return (margins > 0).double() + 0.5 * (margins == 0).double()


def five_folds(folder: Path) -> dict[str, Any]:
    """Margins of every pair by a head that has not seen it, and by a bag of words likewise."""
    rows, found = load_states(folder)
    difference = (found[:, :, 0].float() - found[:, :, 1].float()).permute(
        1, 2, 0, 3
    )  # [poolings, layers + 1, pairs, H]
    words, fold = word_kernel(rows), folds_of(len(rows))
    which = candidates(difference.shape[1] - 1)
    last = difference.shape[1] - 1
    single = {title: [(p, layer) for layer in range(1, last + 1)] for p, title in enumerate(ONE)}
    out: dict[str, Tensor] = {}
    told: list[dict[str, Any]] = []
    for f in range(FOLDS):
        train, test = (fold != f).nonzero()[:, 0], (fold == f).nonzero()[:, 0]
        sides: dict[str, dict[str, Tensor]] = {"words": {"words": words}}
        sides["several layers"] = {
            name: kernel(torch.cat([difference[p, layer] for p, layer in parts], 1), train)
            for name, parts in which.items()
        }
        for title, parts in single.items():
            sides[title] = {f"layer {layer}": kernel(difference[p, layer], train) for p, layer in parts}
        sides["last layer, last token"] = {"last layer": kernel(difference[0, -1], train)}
        for side, options in sides.items():
            ridges = [r / len(train) for r in WORD_RIDGES] if side == "words" else RIDGES
            name, ridge, miss = choose(options, train, ridges)
            k = options[name]
            a = logistic_dual(k[train][:, train], ridge)
            out.setdefault(side, torch.zeros(len(rows), dtype=torch.float64))[test] = k[test][:, train] @ a
            told.append({"fold": f, "side": side, "reads": name, "ridge": ridge, "squared_error": miss})
        print(
            f"  fold {f}: " + ", ".join(f"{s} {float(right(m[test]).mean()):.3f}" for s, m in out.items()), flush=True
        )
    longer = torch.tensor([len(r["rejected_ids"]) - len(r["chosen_ids"]) for r in rows]).double()
    marks = {side: right(m) for side, m in out.items()} | {"shorter": right(longer)}
    return {
        "accuracy": {side: float(m.mean()) for side, m in marks.items()}, "against_words": {side: compared(m, marks["words"]) for side, m in marks.items() if side != "words"},
        "folds": told, "margins": {side: [round(x, 4) for x in m.tolist()] for side, m in out.items()},
    }  # fmt: skip


def save_head(model: str, folder: Path, to: Path) -> dict[str, Any]:
    """A reward model from all pairs: the body up to the layer that predicts best, and a linear head on its last state.

    Plain `AutoModelForSequenceClassification` loads it, and `reward: FOLDER` in any config.

    Args:
        model: folder of the chat model whose states these are.
        folder: of the states.
        to: where it is saved.
    """
    from rlhf_nb.config import ModelConfig
    from rlhf_nb.core import decide_precision
    from rlhf_nb.data.sources import collate_preferences
    from rlhf_nb.models.heads import RewardModel
    from rlhf_nb.models.load import load_causal_lm, load_tokenizer

    rows, found = load_states(folder)
    ends = (found[:, 0, 0].float() - found[:, 0, 1].float()).permute(1, 0, 2)  # [layers + 1, pairs, H]
    every, last = torch.arange(len(rows)), len(ends) - 1
    name, ridge, _ = choose({str(k): kernel(ends[k], every) for k in range(1, last + 1)}, every)
    layer = int(name)
    x, scale = ends[layer], ends[layer].square().mean(0).sqrt().clamp_min(1e-8)
    weight = (logistic_dual(kernel(x, every), ridge).float() @ (x / scale)) / scale / x.shape[1]
    cfg = ModelConfig(name_or_path=model)
    tokenizer = load_tokenizer(cfg)
    net = load_causal_lm(cfg, decide_precision("cpu"), tokenizer=tokenizer)
    net.model.layers, net.config.num_hidden_layers = net.model.layers[:layer], layer
    if getattr(net.config, "layer_types", None):
        net.config.layer_types = net.config.layer_types[:layer]
    reward = RewardModel.from_policy(net)
    with torch.no_grad():
        reward.head.last.weight.copy_(weight[None])
        if layer < last:
            reward.decoder.norm.weight.fill_(1.0)  # type: ignore[operator, union-attr]
    some = collate_preferences(rows[:64], tokenizer.pad_token_id).completions(tokenizer.pad_token_id)
    reward.calibrate_bias(some[torch.arange(0, len(some), 2)])
    reward.save(to, tokenizer)
    return {"layer": layer, "ridge": ridge}
