"""Each bug of the dojo planted in a real run on the toy world, and what the instruments say of it.

    python tests/dojo_runs.py [NUMBER ...] [--write]

`--write` keeps the outcome as docs/dojo.md. A bug counts as named if the instrument that the table names speaks, in the
table's words, and says nothing of the same run without the bug.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import re
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from rlhf_nb import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, SFTConfig, SFTTrainer
from rlhf_nb.data import toy
from rlhf_nb.learn.dojo import Bug, bugs, function_at
from rlhf_nb.learn.world import LessonWorld
from rlhf_nb.pipeline.doctor import doctor
from rlhf_nb.run.health import lights_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "dojo.md"
CONFIGS: dict[str, Any] = {"ppo": PPOConfig, "dpo": DPOConfig, "grpo": GRPOConfig, "sft": SFTConfig}
world = LessonWorld()


@contextlib.contextmanager
def planted(entry: dict[str, Any]) -> Iterator[None]:
    """A function of the package has the wrong text, for all who call it."""
    if "where" not in entry:
        yield
        return
    module, f = function_at(entry["where"])
    text = textwrap.dedent(inspect.getsource(f))
    text = text[text.index("def ") :].replace(entry["old"], entry["new"])
    space: dict[str, Any] = {}
    exec(compile("from __future__ import annotations\n" + text, "dojo", "exec"), module.__dict__, space)
    sound, f.__code__ = f.__code__, inspect.unwrap(space[f.__name__]).__code__
    try:
        yield
    finally:
        f.__code__ = sound


def trainer_for(run: str, entry: dict[str, Any]) -> Any:
    """A small run on a copy of a shipped model."""
    quiet = {"output_dir": tempfile.mkdtemp(), "console": False}
    seen: dict[str, Any] = {"logged": {"gold": toy.gold_reward}, "eval_rows": []}
    asked = [{"prompt": q} for q in world.prompts(400, train=True)]
    start, tokenizer = copy.deepcopy(world.model("base" if run == "sft" else "sft")), world.tokenizer
    if run == "grpo":
        sizes = quiet | {
            "steps": 30,
            "rollout_batch_size": 64,
            "mini_batch_size": 64,
            "kl_budget": 12.0,
            "kl_coef": 0.02,
        }
        space: dict[str, Any] = {"toy": toy, "reward": world.model("reward")}
        exec(entry.get("text", ""), space)
        return GRPOTrainer(GRPOConfig.preset("toy", **sizes), start, tokenizer, space["reward"], rows=asked, **seen)
    if run.startswith("ppo"):
        sizes = quiet | {"steps": 20, "rollout_batch_size": 48, "mini_batch_size": 24, "kl_budget": 6.0}
        if "text" in entry:
            space = {"copy": copy, "world": world, "PPOConfig": PPOConfig, "small": sizes, "rows": asked}
            space["PPOTrainer"] = lambda *args, **kw: PPOTrainer(*args, **kw, **seen)
            exec(entry["text"], space)
            return space["trainer"]
        sizes |= {"critic_warmup_steps": 4, "entropy_coef": 1e-6}
        sizes |= {"sampling": {"temperature": 0.7, "max_new_tokens": 28}} if run == "ppo_cold" else {}
        sizes |= {"kl_target": 1.0, "kl_horizon": 400.0, "kl_budget": None} if run == "ppo_target" else {}
        return PPOTrainer(PPOConfig.preset("toy", **sizes), start, tokenizer, world.model("reward"), rows=asked, **seen)
    sizes = quiet | {"steps": 80, "epochs": None, "mini_batch_size": 16}
    if run == "sft":
        return SFTTrainer(SFTConfig.preset("toy", **sizes), start, tokenizer, rows=toy.sft_rows(1600, 0))
    held_out, config = toy.preference_rows(48, 2, test=True), DPOConfig.preset("toy", eval_every=2, **sizes)
    return DPOTrainer(config, start, tokenizer, rows=toy.preference_rows(1600, 1), eval_rows=held_out)


def doctor_says(run: str, entry: dict[str, Any]) -> list[str]:
    """Errors and warnings before a run starts."""
    folder = Path(tempfile.mkdtemp())
    settings: dict[str, Any] = {"output_dir": str(folder / "run")}
    settings |= {"reward": "proxy"} if run.startswith("ppo") else {}
    settings |= {"rewards": [{"verify": "number"}]} if run == "grpo" else {}
    if entry.get("kind") == "settings":
        settings |= yaml.safe_load(entry["text"])
    if entry.get("kind") == "rows":
        space: dict[str, Any] = {"toy": toy}
        exec(entry["text"], space)
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, space["rows"])))
        settings["data"] = {"path": str(folder / "rows.jsonl"), "dedup": False}
        settings["model"] = {"name_or_path": "toy"}
    found = doctor(CONFIGS[run.split("_")[0]].preset("toy", **settings))
    return [f"doctor: {f.what}" for f in found if f.level in ("error", "warning")]


def heard(run: str, entry: dict[str, Any]) -> list[str]:
    """What doctor, self-check and lights say, each with its name in front."""

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(f"self-check: {record.getMessage()}")

    said, ear = list[str](), Ear(logging.WARNING)
    with planted(entry):
        said += doctor_says(run, entry)
        if entry.get("kind") in ("settings", "rows"):
            return said
        logging.getLogger("rlhf_nb.scoring.check").addHandler(ear)
        try:
            trainer = trainer_for(run, entry)
            trainer.fit()
            config = trainer.config.model_dump(mode="json") | {k: c.get() for k, c in trainer.method.controls().items()}
            lights = lights_of([*trainer.history, *trainer.history.evals], config)
            said += [f"the light {x.name}: {x.text}" for x in lights if x.state in ("watch", "bad")]
        except Exception as error:  # an error's sentence is an answer, too
            said.append(f"error: {type(error).__name__}: {error}")
        finally:
            logging.getLogger("rlhf_nb.scoring.check").removeHandler(ear)
    return said


def is_named(bug: Bug, said: list[str]) -> bool:
    """Whether the instrument of the table says what the table says."""
    who, words = bug.entry["who"], bug.entry["says"]
    return bool(who) and any(x.startswith(f"{who}: ") and re.search(words, x) for x in said)


def page(rows: list[tuple[int, Bug, list[str], bool]]) -> str:
    """docs/dojo.md."""
    named = sum(ok for *_, ok in rows)
    spoke = sum(bool(said) and not ok for _, _, said, ok in rows)
    kinds = Counter((b.entry.get("kind", "package"), ok) for _, b, _, ok in rows)
    words = {
        "package": "a function of the package, one place changed",
        "settings": "settings",
        "rows": "rows of a file",
    }
    words |= {"reward": "a reward function", "call": "a call"}
    day = time.strftime("%d %B %Y").lstrip("0")
    lines = [
        "# The dojo", "",
        "Fifty silent bugs. `rlhf-nb learn dojo` shows the first that you haven't found, `rlhf-nb learn dojo 4 2` says that in bug 4 line 2 is wrong, and `rlhf-nb learn` says how many you have. In a notebook: `learn.find_bug(4, 2)`. Twelve more are in the lessons, as exercise 3 of each.",
        "", "## Which bugs name themselves", "",
        f"Each bug was planted in a run on the toy world ({day}, `python tests/dojo_runs.py --write`; seed 0, one run each, beside the same run without the bug, of which no instrument complains). **{named} of {len(rows)} ({named / len(rows):.0%}) are named** by `rlhf-nb doctor`, by the self-check at the start of a run, or by a light: the sentence points at what is wrong. {spoke} more raise an alarm that points elsewhere. {len(rows) - named - spoke} are silent.",
        "", "| the bug is in | bugs | named |", "|---|---|---|",
        *(f"| {words[k]} | {kinds[k, True] + kinds[k, False]} | {kinds[k, True]} |" for k in words),
        "", "The bugs in functions were drawn from the [table of deliberate errors](mutants.md) before any instrument was asked; five that change nothing in such runs, or crash at once, were left out. The others are the field's classic mistakes, chosen with the instruments' questions in view, so their share flatters. Three lights (*start*, *ends*, *noise*), two further questions of lights (a price of drift that pays, a margin that falls) and one of the doctor (answers without EOS) were added for what stayed silent at first. The share is of these fifty, and says nothing of bugs that are not among them.",
        "", "Stop here if you want to find them yourself: the table says where to look.", "",
        "| bug | in | named by |", "|---|---|---|",
    ]  # fmt: skip
    for n, bug, said, ok in rows:
        other = "; ".join(dict.fromkeys(x.split(":")[0] for x in said))
        who = bug.entry["who"] if ok else f"not named; alarm by {other}" if said else "silent"
        lines.append(f"| {n} | {bug.about.removeprefix('rlhf_nb.') if 'where' in bug.entry else bug.about} | {who} |")
    silent = [n for n, _, said, ok in rows if not ok]
    more = f"Bugs {', '.join(map(str, silent))} stay unnamed. What they share: means don't move, or they move as they would with other settings. Only a comparison with a known answer finds them: of those in functions, the notebooks' tests notice each ([mutants](mutants.md))."
    return "\n".join([*lines, "", more, ""])


def main() -> int:
    torch.set_num_threads(1)
    chosen = [int(x) for x in sys.argv[1:] if x.isdecimal()]
    every = [(n, b) for n, b in enumerate(bugs(), 1) if not chosen or n in chosen]
    healthy = {run: heard(run, {}) for run in dict.fromkeys(b.entry["run"] for _, b in every)}
    print("without bugs:", healthy, flush=True)
    rows = []
    for n, bug in every:
        said = heard(bug.entry["run"], bug.entry)
        ok = is_named(bug, said)
        rows.append((n, bug, said, ok))
        wrong = "" if ok == bool(bug.entry["who"]) else f"  <- the table says {bug.entry['who'] or 'none'}"
        print(
            n, bug.about, "| named" if ok else "| not named", "|", " / ".join(x[:110] for x in said), wrong, flush=True
        )
    if "--write" in sys.argv and not chosen:
        PAGE.write_text(page(rows), encoding="utf-8")
    print(f"{sum(ok for *_, ok in rows)} of {len(rows)} named")
    return int(any(healthy.values()) or any(ok != bool(b.entry["who"]) for _, b, _, ok in rows))


if __name__ == "__main__":
    sys.exit(main())
