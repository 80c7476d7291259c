"""Pushing a run to a hub on this machine: what is sent, what is refused, and that the card and the notebook beside the weights do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command import call
from fake_hub import Hub
from markdown_it import MarkdownIt
from test_payloads import HARMLESS, PAYLOADS, Skeleton, tame

from rlhf_nb.core import RunError
from rlhf_nb.hub.card import Measured, card, cell, read_run
from rlhf_nb.hub.push import push_to_hub
from rlhf_nb.models.load import probe_ids
from rlhf_nb.untrusted import parse_yaml

torch.set_num_threads(1)
TOKEN, NAME = "hf_" + "t" * 30, "me/pip"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GRPO run of a few seconds."""
    folder = tmp_path_factory.mktemp("runs") / "grpo"
    call("grpo", "--toy", "reward=gold", "steps=8", "epochs=null", "rollout_batch_size=64", "mini_batch_size=64", "data.eval_size=16", "console=false", f"output_dir={folder}")  # fmt: skip
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that knows one user."""
    from huggingface_hub import constants

    served = Hub(tokens={TOKEN: "me"})
    monkeypatch.setenv("HF_ENDPOINT", served.start())
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield served
    served.stop()


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a page that are in a language."""
    return [t.content for t in MarkdownIt("commonmark").parse(text) if t.type == "fence" and t.info == language]


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch.save(model(input_ids=torch.load(sys.argv[2])).logits, sys.argv[3])
"""


def test_pushed_loaded_back_the_same_and_the_card_runs_offline(hub: Hub, run: Path, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM

    shown = call("push", run, NAME, "--license", "mit")
    assert f"{hub.address}/{NAME}/commit/" in shown and NAME in hub.private and f"To {hub.address}/{NAME}, private." in shown  # fmt: skip
    files = hub.models[NAME]["main"]
    made = {"README.md", "figures/curves.png", "run/config.yaml", "run/metrics.jsonl"}
    assert set(files) == made | {p.name for p in (run / "model").iterdir()}
    assert not [p for p in run.iterdir() if p.name.startswith(".push")]
    assert any(verb == "PUT" for verb, *_ in hub.asked)  # large files go their own way
    everything = b"".join(c for f, c in files.items() if f not in ("model.safetensors",))
    assert not [w for w in (str(run), TOKEN, "begun_in") if w.encode() in everything]

    home = {"HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    ids = probe_ids(100)
    torch.save(ids, tmp_path / "ids.pt")
    args = [NAME, str(tmp_path / "ids.pt"), str(tmp_path / "logits.pt")]
    done = subprocess.run([sys.executable, "-c", LOAD, *args], env={**os.environ, **home}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    own = AutoModelForCausalLM.from_pretrained(run / "model")(input_ids=ids).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), own, rtol=0, atol=0)

    folder = tmp_path / "folder"
    snapshot_download(NAME, local_dir=folder, endpoint=hub.address)
    text = (folder / "README.md").read_text()
    code, lines = blocks(text, "python"), blocks(text, "bash")
    assert len(code) == 1 and len(lines) == 1 and "rlhf-nb grpo --config run/config.yaml" in lines[0]
    snapshot_download(NAME, endpoint=hub.address, cache_dir=tmp_path / "hf" / "hub")  # the tokenizer, too
    (tmp_path / "logits.pt").unlink()
    away = {**os.environ, **home, "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "PATH": f"{folder}/bin:{os.environ['PATH']}"}  # fmt: skip
    (folder / "bin").mkdir()
    (folder / "bin" / "rlhf-nb").write_text(f'#!/bin/sh\nexec {sys.executable} -m rlhf_nb "$@"\n')
    (folder / "bin" / "rlhf-nb").chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code[0] + LOAD, *args], env=away, cwd=folder, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0 and done.stdout, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), own, rtol=0, atol=0)
    done = subprocess.run(["bash", "-euc", lines[0]], env=away, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    was, now = ([json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in (run, folder / "again"))  # fmt: skip
    scores = [[e["objective/scores"] for e in log if e["type"] == "step"] for log in (was, now)]
    assert len(scores[0]) == 8 and scores[0] == scores[1]  # bit for bit


def test_what_the_card_says(run: Path, tmp_path: Path) -> None:
    push_to_hub(run, NAME, license="apache-2.0", dry_run=tmp_path / "look")
    text = (tmp_path / "look" / "README.md").read_text()
    about = parse_yaml(text.split("---\n")[1])
    assert about["tags"] == ["rlhf-nb", "grpo"] and about["license"] == "apache-2.0" and about["library_name"] == "transformers"  # fmt: skip
    for said in ("## Before and after", "held-out prompts", "![reward, KL", "optimizer.lr", "| seed | 0 |", "toy world", "256 held out", "python 3", "## Limits", "One seed", "torch 2"):  # fmt: skip
        assert said in text, said
    row = next(line for line in text.splitlines() if line.startswith("| gold_reward |"))
    before, after = (float(x.split("±")[0]) for x in row.split("|")[2:4])
    log = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [e["reward"] for e in log if e["type"] == "step"]
    assert abs(before - rewards[0]) < 0.25 and after > before  # the untrained model, and one that has learnt a little
    assert "pickle" not in text and not re.search(r"/(tmp|root|home|work)/", text)


def test_a_dry_run_asks_nobody(hub: Hub, run: Path, tmp_path: Path) -> None:
    shown = call("push", run, NAME, "--dry-run", "--to", tmp_path / "look")
    size = (run / "model" / "model.safetensors").stat().st_size
    assert f"{size:,}  model.safetensors" in shown and "Nothing was sent" in shown and str(tmp_path / "look") in shown
    assert call(
        "push", run, NAME, "--dry-run", "--to", tmp_path / "look", "--no-samples"
    )  # the earlier one is replaced
    assert "Answers, from" not in (tmp_path / "look" / "README.md").read_text() and not hub.asked
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert "no earlier dry run" in call("push", run, NAME, "--dry-run", "--to", tmp_path / "mine", code=1)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert "--dry-run" in call("push", run, NAME, "--to", tmp_path / "look", code=1)


@pytest.mark.parametrize("what", ["unknown", "read-only", "other owner", "conflict", "refused commit", "broken", "offline", "public", "no licence", "name", "secret"])  # fmt: skip
def test_every_refusal_is_a_sentence(
    hub: Hub, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    from huggingface_hub import HfApi

    model, args, words = run / "model", [NAME], ("",)  # the model's own folder is quicker to push
    shutil.copytree(model, tmp_path / "model")
    model = tmp_path / "model"
    if what == "unknown":
        monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
        words = ("doesn't know who you are", "hf auth login", "/settings/tokens")
    elif what == "read-only":
        hub.models[NAME], hub.read_only, hub.private = {"main": {}}, {NAME}, {NAME}
        words = ("may not write to me/pip", "hf auth whoami")
    elif what == "other owner":
        args, words = ["you/pip"], ("may not write to you/pip",)
    elif what == "conflict":
        info = HfApi.model_info
        monkeypatch.setattr(HfApi, "model_info", lambda self, *a, **k: SimpleNamespace(**{**vars(info(self, *a, **k)), "sha": "c" * 40}))  # fmt: skip
        words = ("at the same moment", "nothing of that is overwritten")
    elif what == "refused commit":
        hub.refuse["/commit/"] = 409
        words = ("at the same moment",)
    elif what == "broken":
        hub.broken.add("/commit/")
        words = ("broke, and no commit was made", "rlhf-nb push")
    elif what == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        words = ("HF_HUB_OFFLINE=0 rlhf-nb push", "--dry-run")
    elif what == "public":
        hub.models[NAME] = {"main": {}}
        words = ("is public", "--public")
    elif what == "no licence":
        args, words = [NAME, "--public"], ("without a licence", "--license apache-2.0")
    elif what == "name":
        args, words = ["pip"], ("no name on the hub", "owner/name")
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"note": "hf_" + "s" * 34}))
        words = ("looks like a secret", "config.json, line 1", "a token of the hub")
    shown = call("push", model, *args, code=1)
    assert all(word in shown for word in words) and shown.count("Error:") == 1, shown
    assert "ssss" not in shown and not hub.messages and not hub.models.get(NAME, {}).get("main")
    if what == "secret":
        assert not hub.asked
    if what == "broken":  # what arrived isn't sent twice, and the next attempt goes through
        hub.broken.clear()
        hub.asked.clear()
        call("push", model, *args)
        assert "model.safetensors" in hub.models[NAME]["main"] and not [p for verb, p, _ in hub.asked if verb == "PUT"]


def test_branches_and_weights_of_an_earlier_push(hub: Hub, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    push_to_hub(tmp_path / "model", NAME, message="first")
    hub.models[NAME]["main"] |= {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
    said: list[str] = []
    push_to_hub(tmp_path / "model", NAME, revision="longer", say=said.append)
    assert set(hub.models[NAME]) == {"main", "longer"} and "notes.txt" in hub.models[NAME]["longer"]
    assert "model-00001-of-00002.safetensors" in hub.models[NAME]["main"]
    assert "model-00001-of-00002.safetensors" not in hub.models[NAME]["longer"]
    assert "model-00001-of-00002.safetensors" in " ".join(said) and hub.messages[0] == "first"
    text = hub.models[NAME]["main"]["README.md"].decode()
    assert "nothing is known of how they were made" in text and "## Do it again" not in text


def test_a_pipelines_folder_names_its_runs(run: Path) -> None:
    with pytest.raises(RunError, match=f"Runs with one: {run}"):
        push_to_hub(run.parent, NAME, dry_run=run.parent / "look")


def page(run: Path, words: list[str]) -> str:
    """A card with one of these words in each place that a model or a person can fill."""
    told = read_run(run)
    told.start["machine"] = {w: w for w in words}
    told.start["precision"] = words[0]
    told.missing = [*words]
    score = {w: torch.ones(len(words)) for w in words}
    rollout: Any = SimpleNamespace(texts=words, prompts=words)

    def summary(against: Any = None) -> dict[str, float]:
        return {w: 1.0 for w in words} | {f"{w}_stderr": 0.1 for w in words} | {"length": 3.0}

    shown: Any = SimpleNamespace(texts=words, prompts=rollout.prompts, scores=score, summary=summary)
    measured = Measured(shown, shown, True)
    measured.rows = lambda n=6: [{"prompt": w, "before": w, "after": w, "score": "1"} for w in words]  # type: ignore[method-assign]
    return card(told, NAME, "mit", measured, "figures/curves.png")


MARKDOWN = ["| a | b |\n|---|---|", "# title", "```\ncode", "**bold** _it_ ~~no~~", "![p](http://x.invalid/p.png)", "[l](javascript:alert(1))", "<http://x.invalid>", "[ref]: http://x.invalid", "- item", "1. item", "> quote", "---", "&lt;b&gt; &#60;b&#62;", "\\| \\* \\`", "http://x.invalid www.x.invalid", "@somebody #1"]  # fmt: skip


def test_no_answer_breaks_out_of_the_card(run: Path) -> None:
    hostile = [*PAYLOADS, *MARKDOWN]
    harmless = [*HARMLESS, *(re.sub(r"[^\w ]", "x", re.sub(r"\s", " ", w)) for w in MARKDOWN)]
    render = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render
    bad, good = page(run, hostile), page(run, harmless)
    assert Skeleton(render(bad)).elements == Skeleton(render(good)).elements, "the words changed the page"
    assert Skeleton(render(bad)).addresses == ["figures/curves.png"]
    tame(bad)
    text = re.sub(r"<[^>]*>", "", render(bad))
    for word in hostile:
        assert cell(word)[:12] in bad, word
    assert "&lt;script&gt;" in text and "www.x" not in bad and "@somebody" not in bad
    broken = MarkdownIt("commonmark", {"html": True}).render("| a |\n|---|\n| <img src=x> |")
    assert Skeleton(broken).elements  # a page without `cell` would have changed


def test_the_verdict_says_when_nothing_was_learned(tmp_path: Path) -> None:
    """The verdict can be the other one."""
    told = read_run_of(tmp_path, [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1])
    assert str(told).startswith("not learned") and str(read_run_of(tmp_path, [1.0, 0.9, 0.8, 0.5, 0.4, 0.3, 0.2, 0.1])).startswith("not learned")  # fmt: skip
    assert str(read_run_of(tmp_path, [0.0, 0.1, 0.0, 0.5, 0.6, 0.9, 1.0, 1.0])).startswith("learned")


def read_run_of(folder: Path, scores: list[float]) -> Any:
    """The verdict on a log with these scores."""
    from rlhf_nb.hub.card import verdict

    lines = [json.dumps({"type": "step", "step": i, "objective/scores": x, "loss": 0.0}) for i, x in enumerate(scores)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return verdict(folder)


def test_weights_can_be_read_by_whom_the_umask_lets(run: Path) -> None:
    before = os.umask(0)
    os.umask(before)
    assert stat.S_IMODE((run / "model" / "model.safetensors").stat().st_mode) == 0o666 & ~before
