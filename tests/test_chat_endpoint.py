"""A server with OpenAI's interface, in the place of a model that is evaluated, and of a user; a stub on the loopback answers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command import call

from rlhf_nb.bench.results import Results
from rlhf_nb.core import RewardError
from rlhf_nb.data import toy
from rlhf_nb.judges.chat import SimulatedUser
from rlhf_nb.train.grpo import GRPOConfig, GRPOTrainer


class Stub(BaseHTTPRequestHandler):
    """Adds the numbers that it is asked about; as a user it says good-bye to the second turn."""

    heard: list[Any] = []
    fails = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).heard.append((body, self.headers.get("Authorization")))
        last = body["messages"][-1]["content"]
        text = f"It is {sum(map(int, re.findall(r'[0-9]+', last)))}."
        if body["messages"][0]["content"].startswith("You play"):
            turns = sum(m["role"] == "assistant" for m in body["messages"])
            text = "And what do owls eat?" if turns < 2 else "GOODBYE"
        message = {
            "role": "assistant",
            "content": [{"type": "text", "text": text}] if body["model"] == "parts" else text,
        }
        said: dict[str, Any] = {"choices": [{"message": message, "finish_reason": "stop"}]}
        said |= {} if body["model"] == "silent" else {"usage": {"completion_tokens": 4}}
        type(self).fails -= 1
        data = json.dumps(said).encode()
        self.send_response(503 if type(self).fails >= 0 else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Stub.heard, Stub.fails = [], 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


SUITE = """
name: plus
rule: {verify: number}
rows: [{prompt: "What is 2 + 3?", answer: 5}, {prompt: "What is 10 + 30?", answer: 40}, {prompt: "What is 1 + 1?", answer: 3}]
"""


def test_a_server_is_evaluated(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_KEY", "secret")
    Path("plus.yaml").write_text(SUITE)
    Stub.fails = 1  # the first request is asked again
    line = [
        "eval",
        "some/model",
        "--suite",
        "plus.yaml",
        f"url={url}",
        "key_env=SOME_KEY",
        "output_dir=out",
        "system=Add.",
    ]
    call(*line)
    results = Results.load("out/results.json")
    assert results.metrics["score"].value == pytest.approx(2 / 3) and len(Stub.heard) == 4
    bodies, keys = zip(*Stub.heard)
    assert all(b["model"] == "some/model" and b["temperature"] == 0 for b in bodies) and set(keys) == {"Bearer secret"}
    assert [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "What is 2 + 3?"},
    ] in [b["messages"] for b in bodies]  # several are asked at the same time
    assert "secret" not in Path("out/results.json").read_text() + Path("out/asked.json").read_text()
    call(*line)
    assert len(Stub.heard) == 4, "what was asked isn't asked again"
    call(*line[:-2], "output_dir=more", "samples=2", "temperature=0.7", "top_p=0.9", "seed=5")
    drawn = [b for b, _ in Stub.heard[4:]]
    assert sorted(b["seed"] for b in drawn) == [5] * 3 + [6] * 3 and {b["top_p"] for b in drawn} == {0.9}


RULES = """
def shorter(prompts, completions):
    return [-len(c) for c in completions]

def ids(prompts, completions, completion_ids):
    return [len(x) for x in completion_ids]
"""


def test_lengths_that_a_server_does_not_say_are_unknown(url: str, tmp_path: Path, monkeypatch: Any) -> None:
    """And text in parts is read; what a server said is compared without its tokenizer."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {i} + 1?", "answer": i + i % 2} for i in range(12)]
    Path("plus.yaml").write_text(f"name: plus\nrule: {{verify: number}}\nrows: {json.dumps(rows)}\n")
    Path("rules.py").write_text(RULES)
    for model in ("silent", "parts"):
        line = ["eval", model, "--suite", "plus.yaml", f"url={url}", f"output_dir={model}"]
        call(*line, "concurrency=3", "timeout=9")
    silent, parts = Results.load("silent/results.json"), Results.load("parts/results.json")
    assert "length" not in silent.metrics and {r.length for r in silent.rows} == {None}
    assert parts.metrics["length"].value == 4 and parts.metrics["score"].value == silent.metrics["score"].value == 0.5
    assert '["It is 12."]' in Path("parts/answers.jsonl").read_text()
    call("compare", "silent", "parts", "output_dir=both", "judge_rule={file: rules.py, fn: shorter}")
    (pair,) = json.loads(Path("both/compare.json").read_text())["pairs"]
    assert pair["length_controlled"] is None and pair["win_rate"]["value"] == 0.5
    shown = call("compare", "silent", "parts", "output_dir=no", "judge_rule={file: rules.py, fn: ids}", code=1)
    assert "judge_rule: file: rules.py, fn: ids reads token ids" in " ".join(shown.split())


REFUSED = [
    (["decoder=best_of_n:2"], "decoder needs the model:"),
    (["raw=true"], "raw needs the model:"),
    (["'measures=[{verify: length, target: 9, width: 3}]'"], "reads token ids, and a server"),
    (["measures=[{file: rules.py, fn: ids}]"], "fn: ids reads token ids, and a server"),
    (["url=ftp://x"], "url: "),
]


@pytest.mark.parametrize(("words", "sentence"), REFUSED)
def test_what_a_server_cannot_do(words: list[str], sentence: str, url: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plus.yaml").write_text(SUITE)
    Path("rules.py").write_text(RULES)
    words = [w.strip("'") for w in words]
    shown = call("eval", "some", "--suite", "plus.yaml", f"url={url}", *words, code=1)
    assert sentence in " ".join(shown.split()) and not Stub.heard


def test_nothing_is_trained_through_an_address(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = " ".join(call("grpo", "--toy", f"model.name_or_path={url}", "steps=1", code=1).split())
    assert "nothing is trained through it" in shown and "eval NAME --suite SUITE url=" in shown and not Stub.heard


def test_a_policy_talks_to_a_user_who_is_played(url: str, tmp_path: Path) -> None:
    how = {"environment": "user", "options": {"url": url, "model": "some", "role": "a child"}, "max_turns": 3}
    config = GRPOConfig.preset(
        "toy", output_dir=str(tmp_path / "run"), steps=1, epochs=None, num_generations=4, rollout_batch_size=8,
        mini_batch_size=8, console=False, episodes=how, sampling={"max_new_tokens": 24},
    )  # fmt: skip
    model, rows = toy.build_model(0, "tiny"), [{**r, "user": "a farmer"} for r in toy.train_prompts(4)]
    model.generation_config.eos_token_id = list(range(2, 400, 3))
    (event,) = GRPOTrainer(config, model, toy.build_tokenizer(), rows=rows, reward=toy.gold_reward).fit()
    assert event["rollout/turns"] > 1 and any("a farmer" in b["messages"][0]["content"] for b, _ in Stub.heard)
    assert event["rollout/left"] <= 1


def test_a_user_who_does_not_answer() -> None:
    with pytest.raises(RewardError, match="127.0.0.1:9/v1/chat/completions gave no answer"):
        SimulatedUser("http://127.0.0.1:9/v1", "some", attempts=1).reset({}, 0)
