"""What we tell people to type is run, each line in a folder of its own: README, guides, notebooks, help, messages, recipes.

The files and models are those of `test_suggestions` and the runs below; trainings are cut to one small step. A line that must be
refused here (it needs a package, a GPU or a server) is in REFUSED with the words that it must say.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import shlex
import shutil
import signal
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import suggestions
import torch
from command import call
from suggestions import ROOT, Suggestion
from test_cycle import ask
from test_suggestions import mention, words_of, world
from typer.testing import CliRunner

from rlhf_nb import LoraSettings, add_lora, load_model, save_model
from rlhf_nb.cli.main import app
from rlhf_nb.cli.settings import known_methods, load_config
from rlhf_nb.data import toy
from rlhf_nb.feedback.store import Feedback, FeedbackStore
from rlhf_nb.feedback.versions import Versions, promote_version
from rlhf_nb.serve import door
from rlhf_nb.train.registry import get

__all__ = ["world"]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TOKEN = "hf_" + "t" * 30
SMALL = ["steps=1", "epochs=null", "console=false", "token_budget=2048", "data.eval_size=null", "data.max_cut=1"]
DRAWN = ["mini_batch_size=8", "rollout_batch_size=8", "sampling.max_new_tokens=8"]
REFUSED: dict[str, str] = {  # the beginning of a line, and what it must say here
    "run --config run_all.yaml --gates strict": "didn't pass its gate", "ppo --config t4_ppo": "'fp16' was asked for", "get owner/name": "HF_HUB_OFFLINE forbids",
    "feedback feedback.jsonl --export pairs.jsonl --scrub": "pip install presidio-analyzer",
    "rlaif model.name_or_path=runs/sft/model data.path=prompts.jsonl judge.endpoint.url": "Is the server up at this address?",
    "rlaif judge.endpoint.url=http": "Is the server up at this address?", "eval sums --suite sums url=http": "Is the server up at this address?", "plan grpo model.name_or_path=Qwen/": "no hub name that can be reached", "data owner/name": "HF_HUB_OFFLINE",
    "push runs/grpo owner/name": "HF_HUB_OFFLINE forbids to go to the hub", "push runs/demo/ppo owner/name": "HF_HUB_OFFLINE forbids to go to the hub", "push runs/ppo": "HF_HUB_OFFLINE forbids to go to the hub",
}  # fmt: skip
PARTS = {  # of a sentence that speaks of some settings
    "rlaif judge.endpoint.url=http://localhost:8000/v1 judge.endpoint.model=NAME then=dpo", "rlaif then=...",
}  # fmt: skip
MADE = {
    "merge": ["runs/soup"],
    "compare smollm2": ["runs/eval/sums/smollm2"],
    "eval": ["runs/eval"],
    "cycle": ["models/canary"],
}  # what a command makes, by the line's beginning, and was there
ASKS = ("launch", "doctor", "sweep", "plan", "simulate")  # commands that take a method
ELSEWHERE = {"demo --real": "tests/test_recipes.py"}  # what is run there
ALERTS = {"cycle": 3}  # commands whose exit code also says what was found


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(r) + "\n" for r in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


def fenced(page: str, sign: str) -> str:
    """The block of a page that holds a sign."""
    return next(b for _, b in suggestions._fences((ROOT / "docs" / page).read_text(encoding="utf-8")) if sign in b)


@pytest.fixture(scope="module")
def lived_in(world: Path) -> Path:
    """The world after some work: runs, versions that serve, their traffic, what users said, and files that the guides print."""
    torch.set_num_threads(1)
    few = ["epochs=null", "console=false", "mini_batch_size=8", "rollout_batch_size=8", "sampling.max_new_tokens=8"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(world)
        patch.setenv("XDG_CACHE_HOME", str(world / "cache"))
        patch.setenv("COLUMNS", "200")
        for name in ("runs/ppo", "runs/demo", "runs/grpo", "runs/what-if"):
            shutil.rmtree(name)
        call("reward", "model.name_or_path=runs/sft/model", "data.path=pairs.jsonl", "model.lora.r=2", "steps=1", "epochs=null", "console=false", "baseline_pairs=0", "--overwrite")  # fmt: skip
        call("ppo", "--toy", "model.name_or_path=tiny", "reward=runs/reward/model", "steps=41", "save_every=20", "log_every=4", "optimizer.lr=0.003", *few)  # fmt: skip
        shutil.copytree("runs/ppo", "runs/what-if")
        call("grpo", "--toy", "model.name_or_path=tiny", "reward=gold", "steps=4", "num_generations=4", *few)
        call("dpo", "--toy", "model.name_or_path=tiny", "steps=1", "epochs=null", "console=false", "model.lora.r=2")
        tiny = [f"{s}.{w}" for s in ("sft", "reward", "ppo") for w in ("steps=1", "epochs=null")]
        call("run", "--toy", "output_dir=runs/demo", "console=false", "eval_prompts=2", "ppo.rollout_batch_size=8", "ppo.mini_batch_size=8", *tiny)  # fmt: skip
        call("sft", "--config", "legs_sft", "steps=1", "epochs=null", "console=false")
        jsonl(Path("runs/legs_steps.jsonl"), [{"prompt": "3+2=", "completions": ["3+2=5;", "5"], "labels": [True, True]}] * 8)  # fmt: skip
        call("process", "--config", "legs_process", "model.name_or_path=runs/legs_sft/model", "data.path=runs/legs_steps.jsonl", "steps=1", "epochs=null", "console=false")  # fmt: skip
        for place in ("runs/eval/old", "runs/eval/sums/smollm2", "runs/eval/sums/runs-grpo-model", "runs/eval/new"):
            call("eval", "tiny" if "old" in place or "smol" in place else "other", "--suite", "sums", "--limit", 4, f"output_dir={place}", "max_new_tokens=4")  # fmt: skip
        base, tokenizer = load_model("runs/sft/model")
        save_model(add_lora(base, LoraSettings(r=2)), tokenizer, "adapters/polite")
        for name in ("runs/a/model", "runs/soup", "runs/b/model", "models/canary", "RUN/model", "runs/demo_real/model"):
            shutil.copytree("other", name)
        store = FeedbackStore("feedback.jsonl")
        ask(store, 250)
        store.add("u-17", Feedback("rating", "up", "p", ("a",), ("v1",), consent=True))
        shutil.copyfile("feedback.jsonl", "labels.jsonl")
        for name, place in (("v1", "tiny"), ("v2", "other")):
            shutil.copytree(place, f"models/{name}")
            promote_version(Versions("models"), name, "for the tests")
        Path("cluster_topology.yaml").write_text(call("config", "init", "topology"))
    (world / "submissions").mkdir()
    (world / "submissions/u17.json").write_text(json.dumps({"student": "u17", "answers": {}}))
    line = {"time": 1.0, "id": "1", "model": "pip", "version": "8d1f0c2a77b1", "user": "u-17", "finish": "stop"}
    jsonl(world / "traffic.jsonl", [line])
    jsonl(world / "alpaca.json", [{"instruction": "Say owl.", "input": "", "output": "Owl."}] * 16)
    jsonl(world / "orca_dpo.jsonl.gz", [{"system": "", "question": f"Owl {i}?", "chosen": "Yes.", "rejected": "No."} for i in range(16)])  # fmt: skip
    jsonl(world / "pairs.jsonl.gz", toy.preference_rows(64, 0))
    (world / "online.yaml").write_text(
        (world / "run.yaml").read_text()
        + "rewards: [{model: runs/reward/model, name: helpful}, {file: rewards.py, fn: short, weight: 0.01}]\n"
    )
    (world / "capitals.yaml").write_text(fenced("evaluate.md", "name: capitals"))
    (world / "sums.yaml").write_text(fenced("rewards.md", "- {file: rewards.py, fn: brief"))
    with (world / "rewards.py").open("a") as file:
        file.write(fenced("rewards.md", "def brief("))
    (world / "person.json").write_text(json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}}))
    return world


def commands() -> dict[str, Suggestion]:
    """Lines to run, by what is typed once the placeholders are filled."""
    found: dict[str, Suggestion] = {}
    for line in suggestions.all_lines():
        if not mention(words_of(line)) and "--help" not in line.text and line.text not in ELSEWHERE:
            found.setdefault(shlex.join(filled(line)), line)
    return found


def filled(line: Suggestion) -> list[str]:
    """The words of a line; "..." stands for a model and data."""
    words, more = words_of(line), " ..." in line.text or " …" in line.text
    kind = words[1] if words[0] in ASKS and len(words) > 1 else words[0]
    online = kind in known_methods() and get(known_methods()[kind]).online
    if "run.yaml" in words and online:
        words[words.index("run.yaml")] = "online.yaml"
    if "--resume" in words and "--config" not in words:
        words[1:1] = ["--config", "runs/ppo"]
    if words[0] in (kind, *ASKS) and kind in known_methods() and not {"--config", "--toy"} & {*words}:
        said = [w.partition("=")[0] for w in words]
        file = {"sft": "sft.jsonl", "process": "steps.jsonl"}.get(kind, "prompts.jsonl" if online else "pairs.jsonl")
        fill = {"model.name_or_path": "tiny", "data.path": file} | ({"reward": "runs/reward/model"} if online else {})
        fill = {"model.name_or_path": "tiny"} if words[0] in ("plan", "simulate") else fill
        whole = more or words[0] in ASKS or set(fill) - {"reward"} <= {*said}
        assert whole or line.text in PARTS, f"{line.where}: {line.text!r} can't run as it is"
        words += [f"{k}={v}" for k, v in fill.items() if k not in said and "rewards" not in said]
    return words


LINES = commands()


LITTLE = {  # what makes a command's work small
    "eval": ["--limit", "2", "max_new_tokens=4"], "compare": ["--limit", "2"],
    "sample": ["--max-new-tokens", "8"], "chat": ["--max-new-tokens", "8"],
    "cycle": ["toy=true", *(f"{s}.{w}" for s in ("dpo", "ppo", "reward") for w in ("steps=1", "epochs=null"))],
    "demo": ["steps=1", *DRAWN],
}  # fmt: skip


def small(words: list[str]) -> list[str]:
    """The same line with the least work."""
    name = words[1] if words[0] in ("launch", "sweep", "plan", "doctor") else words[0]
    if "--resume" in words:
        return words
    if words[0] == "sweep":
        return [
            *words,
            *SMALL[:2],
            *DRAWN[: 3 if name in known_methods() and get(name).online else 1],
            "--seeds",
            "2",
            *(["--trials", "3", "steps=3"] if "--trials" in words else []),
        ]
    if words[0] == "launch" and "--topology" not in words:  # which says how many
        words = [*words, "--processes", "2"]
    if words[0] == "run":
        config = load_config(
            "run", words[words.index("--config") + 1] if "--config" in words else None, [], "--toy" in words
        )
        stages = [s for s in config.stages if s != "base"]
        few = [
            f"{s}.{w}"
            for s in stages
            for w in ("steps=1", "epochs=null", "mini_batch_size=8", "data.eval_size=null")
            if w.split("=")[0].split(".")[0] in get(s).config.model_fields
        ]
        few += [
            f"{s}.{w}"
            for s in stages
            if get(s).online or s == "rlaif"
            for w in ("rollout_batch_size=8", "sampling.max_new_tokens=8")
            if w.split("=")[0].split(".")[0] in get(s).config.model_fields
        ]
        return [*words, *few, "eval_prompts=2", "questions=1", "--overwrite"]
    if name in known_methods():
        fields = get(known_methods()[name]).config.model_fields
        few = [w for w in (*SMALL, *DRAWN) if w.split("=")[0].split(".")[0] in fields]
        if words[0] == "launch":  # two processes, and a group of answers for each
            few = [w.replace("batch_size=8", "batch_size=16") for w in few]
        trains = words[0] in (name, "launch") and "--resume" not in words
        return [*words, *few, *(["--overwrite"] if trains else [])]
    if words[0] == "compare" and "--suite" not in words:
        return words
    return [*words, *(w for w in LITTLE.get(words[0], ()))]


class Answered:
    """In the place of a server's loop: one request, and the end."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def run(self, **_: Any) -> None:
        async def once() -> int:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1"
            ) as client:
                return (await client.get("/health")).status_code

        assert asyncio.run(once()) == 200


@pytest.mark.parametrize("typed", LINES, ids=lambda typed: typed[:100])
def test_each_line_runs(typed: str, lived_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    shutil.copytree(lived_in, here, symlinks=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    monkeypatch.setattr(door, "make_server", lambda app, *a: Answered(app))
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: None)
    words = small(filled(LINES[typed]))
    for place in map(Path, (p for k, v in MADE.items() if typed.startswith(k) for p in v)):
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    signal.signal(signal.SIGVTALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("more than a minute of CPU")))
    signal.setitimer(signal.ITIMER_VIRTUAL, 60)
    try:
        result = CliRunner().invoke(app, words, input="Hello.\n/quit\n")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    refused = next((v for k, v in REFUSED.items() if typed.startswith(k) and "--dry-run" not in typed), None)
    if refused is None:
        assert result.exit_code in (0, ALERTS.get(words[0])), (result.output, result.exception)
    else:
        assert result.exit_code == 1 and refused in " ".join(result.output.split()), result.output
