"""TRL's preference losses on fixed numbers, as a fixture that `tests/test_losses_preference.py` compares ours with.

    python benchmarks/check_losses.py [--check]

Runs the loss code of TRL's own trainers (1.16: DPO, KTO, CPO/SimPO/AlphaPO, ORPO; 1.12, the last one that has it: BCO) in the
environments of `peers.py`: the real methods, in float64, with a stand-in for the model that returns given log-probs. Writes
`tests/data/preference_losses.json`: the numbers put in, and per case every pair's loss, the mean, and the gradients.
`--check` writes nothing and says whether the stored fixture is what TRL computes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
FIXTURE = HERE.parent / "tests" / "data" / "preference_losses.json"
PAIRS, WIDTH, PROMPT = 6, 5, 2
Numbers = dict[str, Any]


def inputs() -> Numbers:
    """Per-token log-probs of pairs and of single answers, seeded, as nested lists."""
    g = torch.Generator().manual_seed(16)
    draw = lambda *shape: torch.rand(*shape, generator=g, dtype=torch.float64)
    out: Numbers = {}
    for side in ("chosen", "rejected"):
        lens = torch.randint(1, WIDTH + 1, (PAIRS,), generator=g)
        inside = torch.arange(WIDTH) < lens[:, None]
        ref = -0.05 - 2 * draw(PAIRS, WIDTH)
        logps = (ref + 1.6 * (draw(PAIRS, WIDTH) - 0.5)).clamp(max=-1e-3)
        keep = lambda x, inside=inside: torch.where(inside, x, 0.0).tolist()
        out[side] = {"lens": lens.tolist(), "logps": keep(logps), "ref": keep(ref)}
        out[side]["log_sum_sq"] = keep(-0.5 - draw(PAIRS, WIDTH))
    ref = -1 - 6 * draw(8)
    logps, kl_ref = ref + 4 * (draw(8) - 0.4), -1 - 6 * draw(8)
    shift = 3 * (draw(8) - 0.3)
    return out | {
        "single": {
            "logps": logps.tolist(),
            "ref": ref.tolist(),
            "labels": [True, False, True, True, False, True, False, True],
            "kl_logps": (kl_ref + shift).tolist(),
            "kl_ref": kl_ref.tolist(),
        }
    }


# name, TRL's settings, ours
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *[
        (name, {"loss_types": [name], "beta": beta}, {"losses": {name: 1.0}, "beta": beta})
        for name in (
            *("sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
            *("apo_zero", "apo_down", "discopop", "sigmoid_norm"),
        )
        for beta in (0.1, 0.7)
    ],
    *[
        (
            f"{name}, smoothing {eps}",
            {"loss_types": [name], "beta": 0.3, "label_smoothing": eps},
            {"losses": {name: 1.0}, "beta": 0.3, "options": {"label_smoothing": eps}},
        )
        for name, eps in (("exo_pair", 1e-3), ("exo_pair", 0.2), ("robust", 0.1), ("aot", 0.2), ("aot_unpaired", 0.2))
    ],
    *[
        (
            f"{name}, {divergence}",
            {"loss_types": [name], "beta": 0.5, "label_smoothing": 0.1, "f_divergence_type": divergence},
            {
                "losses": {name: 1.0},
                "beta": 0.5,
                "options": {"divergence": divergence} | ({"label_smoothing": 0.1} if name in ("exo_pair", "robust") else {}),
            },
        )
        for divergence in ("forward_kl", "js_divergence")
        for name in ("sigmoid", "hinge", "ipo", "exo_pair", "robust", "discopop", "sigmoid_norm")
    ],
    *[
        (
            f"sigmoid, alpha_divergence {alpha}",
            {"beta": 0.5, "f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1 - alpha, "float32": True},
            {"losses": {"sigmoid": 1.0}, "beta": 0.5, "options": {"divergence": "alpha_divergence", "alpha": alpha}},
        )
        for alpha in (0.25, 1.0)
    ],
    ("discopop, tau 0.5", {"loss_types": ["discopop"], "beta": 0.5, "discopop_tau": 0.5}, {"losses": {"discopop": 1.0}, "beta": 0.5, "options": {"tau": 0.5}}),
    ("LD-DPO 0.3", {"beta": 0.4, "ld_alpha": 0.3}, {"losses": {"sigmoid": 1.0}, "beta": 0.4, "ld_alpha": 0.3}),
    ("WPO", {"beta": 0.4, "use_weighting": True}, {"losses": {"sigmoid": 1.0}, "beta": 0.4, "wpo": True}),
    (
        "sigmoid + bco_pair + sft",
        {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "beta": 0.2},
        {"losses": {"sigmoid": 0.8, "bco_pair": 0.2}, "beta": 0.2, "nll": 1.0},
    ),
]  # fmt: skip
FREE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("simpo", {"loss_type": "simpo", "simpo_gamma": 0.5, "beta": 2.0}, {"losses": {"simpo": 1.0}, "beta": 2.0, "options": {"gamma": 0.5}}),
    ("alphapo", {"loss_type": "simpo", "simpo_gamma": 0.8, "beta": 2.5, "alpha": 0.25}, {"losses": {"alphapo": 1.0}, "beta": 2.5, "options": {"gamma": 0.8, "alpha": 0.25}}),
    ("cpo", {"loss_type": "sigmoid", "beta": 0.3}, {"losses": {"cpo": 1.0}, "beta": 0.3}),
    ("cpo, smoothing 0.1", {"loss_type": "sigmoid", "beta": 0.3, "label_smoothing": 0.1}, {"losses": {"cpo": 1.0}, "beta": 0.3, "options": {"label_smoothing": 0.1}}),
    ("orpo", {"beta": 0.2}, {"losses": {"orpo": 1.0}, "beta": 0.2}),
]  # fmt: skip


# The rest runs in a peer's environment.
class Model(torch.nn.Module):
    """Stands in for a language model: returns the log-probs that belong to the rows asked for."""

    is_gradient_checkpointing = False

    def __init__(self, per_token: dict[int, Tensor], log_sum_sq: Tensor | None = None) -> None:
        super().__init__()
        self.per_token, self.log_sum_sq = per_token, log_sum_sq

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        logps = self.per_token[int(input_ids[0, 0])]
        blank = torch.zeros_like(logps)
        return SimpleNamespace(
            log_probs=logps, entropy=blank, mean_logits=blank, is_top1=blank.bool(), log_sum_sq_probs=self.log_sum_sq
        )


def bare(trainer: type, **settings: Any) -> Any:
    """A trainer without its constructor, with the attributes that its loss reads."""
    same = lambda x: x
    self = object.__new__(trainer)
    self.accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=same, gather_for_metrics=same, unwrap_model=same, use_distributed=False
    )
    self._metrics = {"eval": defaultdict(list), "train": defaultdict(list)}
    self._total_train_tokens, self._tp_size, self.aux_loss_enabled = 0, 1, False
    for name, value in settings.items():
        setattr(self, name, value)
    return self


def left_pad(x: Tensor) -> Tensor:
    """Room for the prompt's tokens, whose log-probs TRL's model returns as 0."""
    return torch.nn.functional.pad(x, (PROMPT - 1, 0))


def dpo_call(x: Numbers, rows: slice, settings: dict[str, Any]) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """DPOTrainer's loss on some pairs: its mean, its gradient in the per-token log-probs of either side, its metrics."""
    from trl.trainer.dpo_trainer import DPOTrainer

    dtype = torch.float32 if settings.get("float32") else torch.float64
    tensor = lambda side, name: torch.tensor(x[side][name], dtype=dtype)[rows]
    leaves = [tensor(side, "logps").requires_grad_() for side in ("chosen", "rejected")]
    both = lambda name: left_pad(torch.cat([tensor(side, name) for side in ("chosen", "rejected")]))
    lens = torch.tensor(x["chosen"]["lens"][rows] + x["rejected"]["lens"][rows])
    mask = torch.nn.functional.pad((torch.arange(WIDTH) < lens[:, None]).long(), (PROMPT, 0))
    model = Model({1: left_pad(torch.cat(leaves))}, both("log_sum_sq")).eval()
    base = {
        "loss_types": ["sigmoid"], "loss_weights": None, "beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None,
        "f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5, "use_weighting": False,
        "precompute_ref_logps": False, "discopop_tau": 0.05,
    }  # fmt: skip
    base |= settings
    base["loss_weights"] = base["loss_weights"] or [1.0] * len(base["loss_types"])
    args = SimpleNamespace(discopop_tau=base["discopop_tau"], gradient_checkpointing_kwargs=None)
    trainer = bare(DPOTrainer, model=model, ref_model=Model({1: both("ref")}).eval(), args=args, **base)
    ids = torch.ones_like(mask)
    batch = {"input_ids": ids, "attention_mask": ids, "completion_mask": mask}
    torch.set_default_dtype(dtype)  # EXO makes a tensor of its smoothing, float32 otherwise
    loss = trainer._compute_loss(model, batch, return_outputs=False)
    torch.set_default_dtype(torch.float32)
    grads = list(torch.autograd.grad(loss, leaves))
    return loss.detach(), grads, {k: v[-1] for k, v in trainer._metrics["eval"].items()}


def same_for_all_tokens(grad: Tensor, lens: list[int]) -> bool:
    """Whether a row's tokens all have the gradient of its first: then that one is stored for all."""
    return all(bool((row[:n] == row[0]).all()) for row, n in zip(grad, lens))


def of_pairs(x: Numbers, call: Any) -> Numbers:
    """One call per pair and one on all of them; `call(rows)` returns loss, gradients, metrics."""
    one_by_one = [call(slice(i, i + 1)) for i in range(PAIRS)]
    loss, grads, metrics = call(slice(None))
    return {
        "values": [float(out[0]) for out in one_by_one],
        "mean": float(loss),
        "grads": [(g[:, 0] if same_for_all_tokens(g, x[side]["lens"]) else g).tolist() for side, g in zip(x, grads)],
        "metrics": {k: v for k, v in metrics.items() if k.startswith(("rewards/", "logps/"))},
    }


@contextlib.contextmanager
def float_is_double() -> Iterator[None]:
    """ORPOTrainer casts to float32; here its `.float()` keeps float64, so that eight digits can be compared."""
    kept = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = kept  # type: ignore[method-assign]


def free_call(
    x: Numbers, rows: slice, name: str, settings: dict[str, Any]
) -> tuple[Tensor, list[Tensor], dict[str, float]]:
    """CPOTrainer's or ORPOTrainer's preference term on some pairs."""
    from trl.experimental.cpo.cpo_trainer import CPOTrainer
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    leaves = [
        torch.tensor(x[side]["logps"], dtype=torch.float64)[rows].requires_grad_() for side in ("chosen", "rejected")
    ]
    sums = [leaf.sum(1) for leaf in leaves]
    lens = [torch.tensor(x[side]["lens"])[rows] for side in ("chosen", "rejected")]
    means = [s / n for s, n in zip(sums, lens)]  # what both trainers' forward passes hand over, except for CPO proper
    if name == "orpo":
        with float_is_double():
            losses = -ORPOTrainer.odds_ratio_loss(bare(ORPOTrainer, **settings), *means)[
                0
            ]  # subtracted from the NLL there
    else:
        base = {"alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.0} | settings
        losses = CPOTrainer.cpo_loss(bare(CPOTrainer, **base), *(means if settings["loss_type"] == "simpo" else sums))[
            0
        ]
    loss = losses.mean()
    return loss.detach(), list(torch.autograd.grad(loss, leaves)), {}


def kto_call(x: Numbers, settings: dict[str, Any]) -> Numbers:
    """KTOTrainer's loss on the single answers."""
    from trl.trainer.kto_trainer import KTOTrainer

    s = {k: torch.tensor(v, dtype=torch.bool if k == "labels" else torch.float64) for k, v in x["single"].items()}
    leaf = s["logps"].clone().requires_grad_()
    model = Model({1: leaf[:, None], 2: s["kl_logps"][:, None]}).eval()
    ref = Model({1: s["ref"][:, None], 2: s["kl_ref"][:, None]}).eval()
    ones = torch.ones(len(leaf), 2, dtype=torch.long)
    mask = torch.tensor([0, 1]).expand(len(leaf), 2)
    batch = {"label": s["labels"], "input_ids": ones, "attention_mask": ones, "completion_mask": mask}
    batch |= {"KL_input_ids": 2 * ones, "KL_attention_mask": ones, "KL_completion_mask": mask}
    args = SimpleNamespace(gradient_checkpointing_kwargs=None)
    base = {"precompute_ref_logps": False, "model": model, "ref_model": ref, "args": args}
    base["calculate_KL"] = settings["loss_type"] == "kto"
    trainer = bare(KTOTrainer, **base, **settings)
    loss = trainer._compute_loss(model, batch, return_outputs=False)
    metrics = {k: v[-1] for k, v in trainer._metrics["eval"].items() if k.startswith(("rewards/", "logps/", "kl"))}
    return {"mean": float(loss.detach()), "grad": torch.autograd.grad(loss, leaf)[0].tolist(), "metrics": metrics}


def bco_call(x: Numbers, beta: float) -> Numbers:
    """BCOTrainer's loss (TRL 1.12) on the single answers, the second of two batches, so that its shift is a running one."""
    from trl.experimental.bco.bco_trainer import BCOTrainer, RunningMoments

    s = {k: torch.tensor(v, dtype=torch.bool if k == "labels" else torch.float64) for k, v in x["single"].items()}
    trainer = bare(BCOTrainer, beta=beta, embedding_func=None, embedding_tokenizer=None)
    trainer.running = RunningMoments(trainer.accelerator)
    parts = [s[name][m] for name in ("kl_logps", "kl_ref") for m in (s["labels"], ~s["labels"])]
    trainer.bco_loss(*parts, None, None)
    leaf = s["logps"].clone().requires_grad_()
    parts = [v[m] for v in (leaf, s["ref"]) for m in (s["labels"], ~s["labels"])]
    losses, _, _, delta = trainer.bco_loss(*parts, None, None)
    loss = losses.mean()
    grad = torch.autograd.grad(loss, leaf)[0].tolist()
    return {"mean": float(loss.detach()), "grad": grad, "metrics": {"delta": float(delta)}}


def work(x: Numbers) -> list[Numbers]:
    """All cases that this environment's TRL has."""
    import importlib.util

    if importlib.util.find_spec("trl.experimental.bco"):
        return [
            {"name": f"bco {b}", "kind": "single", "ours": {"loss": "bco", "beta": b}, **bco_call(x, b)}
            for b in (0.1, 0.6)
        ]
    out: list[Numbers] = []
    for name, trl, ours in CASES:
        got = of_pairs(x, lambda rows, trl=trl: dpo_call(x, rows, trl))
        out.append({"name": name, "kind": "pairs", "ours": ours, "float32": bool(trl.get("float32")), **got})
    for name, trl, ours in FREE:
        got = of_pairs(x, lambda rows, name=name, trl=trl: free_call(x, rows, name, trl))
        out.append({"name": name, "kind": "pairs", "ours": ours, "float32": False, **got})
    for loss in ("kto", "apo_zero_unpaired"):
        for beta, good, bad in ((0.1, 1.0, 1.0), (0.5, 1.5, 0.7)):
            own = {"beta": beta, "desirable_weight": good, "undesirable_weight": bad}
            got = kto_call(x, {"loss_type": loss, **own})
            out.append({"name": f"{loss} {beta}", "kind": "single", "ours": {"loss": loss, **own}, **got})
    return out


def ask(peer: str, x: Numbers, script: str = __file__) -> list[Numbers]:
    """Run a file's `work` in a peer's environment."""
    import peers

    env = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [str(peers.ensure(peer)), str(Path(script).resolve()), "--worker"]
    done = subprocess.run(command, input=json.dumps(x), env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{peer}: {done.stderr[-3000:]}")
    return [case | {"trl": peer.removeprefix("trl-")} for case in json.loads(done.stdout.splitlines()[-1])]


def main(
    doc: str | None,
    numbers: Callable[[], Numbers],
    script: str,
    here: Callable[[Numbers], list[Numbers]],
    names: tuple[str, ...],
    fixture: Path,
) -> None:
    """Write a fixture, or with `--check` compare it.

    Args:
        doc: of the script.
        numbers: what is put in.
        script: whose `here` is called in each peer's environment.
        here: all cases that this environment's TRL has.
        names: of the peers.
        fixture: the file.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the stored fixture instead of writing it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(here(json.load(sys.stdin))))
        return
    x = numbers()
    cases = [case for peer in names for case in ask(peer, x, script)]
    if len(names) == 1:
        for case in cases:
            del case["trl"]
    text = json.dumps({"inputs": x, "cases": cases}, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n"
    if not args.check:
        fixture.write_text(text, encoding="utf-8")
        print(f"{len(cases)} cases, {len(text) / 1e3:.0f} kB -> {fixture.relative_to(HERE.parent)}")
    elif not fixture.exists() or fixture.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{fixture.name} is not what TRL computes here: run without --check and look at the diff")


if __name__ == "__main__":
    main(__doc__, inputs, __file__, work, ("trl-1.16", "trl-1.12"), FIXTURE)
