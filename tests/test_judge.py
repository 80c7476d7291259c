"""AI feedback from the outside: servers that fail in every way, labels, groups, principles, models that are scripted."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_nb.config import SamplingConfig
from rlhf_nb.core import ConfigError, DataError, ModelError, RewardError
from rlhf_nb.data import toy
from rlhf_nb.data.templates import train_bpe
from rlhf_nb.judges.constitution import (
    Constitution,
    ModelWriter,
    critique_and_revise,
    drawn_principle,
    load_constitution,
)  # fmt: skip
from rlhf_nb.judges.endpoint import AnswerCache, EndpointJudge, read_choice, read_reply
from rlhf_nb.judges.judge import (  # fmt: skip
    FunctionJudge,
    JudgeReward,
    JudgeTemplate,
    Verdicts,
    agreement,
    fill_template,
    label_pairs,
)
from rlhf_nb.judges.model import ModelJudge, label_ids
from rlhf_nb.rewards.base import Rewards
from rlhf_nb.types import Completions, Rollout

torch.set_num_threads(1)
Reply = tuple[int, Any]  # status, JSON or raw bytes
QUICK: dict[str, Any] = {"backoff": 0.005, "backoff_max": 0.02, "timeout": 10.0, "attempts": 3}
P, A, B = "Where do owls live?", "In the forest.", "Go away."


def said(text: Any, top: list[tuple[str, float]] | None = None) -> Reply:
    """A chat completion with one message and, for its first word, probabilities."""
    place = [
        {
            "token": str(text),
            "logprob": 0.0,
            "top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in top or []],
        }
    ]
    more = {"logprobs": {"content": place}} if top else {}
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}, **more}]}


class Server(ThreadingHTTPServer):
    """Answers each request with what a function of (its number, its body, its headers) says."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, answer: Callable[[int, Any, Any], Reply]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.lock, self.seen, self.closing = answer, threading.Lock(), list[Any](), threading.Event()
        self.now = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has given up is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            number = len(self.server.seen)
            self.server.seen.append((self.path, body, dict(self.headers)))
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        code, content = self.server.answer(number, body, self.headers)
        with self.server.lock:
            self.server.now -= 1
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        if code in (302, 307):
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        if code == 429:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: Any) -> None:
        """Silence."""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers: list[Server] = []

    def start(answer: Callable[[int, Any, Any], Reply]) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.closing.set()
        server.shutdown()
        server.server_close()
        server.thread.join(5)


def fair(number: int, body: Any, headers: Any) -> Reply:
    """Prefers answer A, 3 to 1, when it is `A`; knows it by its text."""
    first_is_good = body["messages"][-1]["content"].index(A) < body["messages"][-1]["content"].index(B)
    p = 0.75 if first_is_good else 0.25
    return said("A" if p > 0.5 else "B", [("A", p / 2), ("B", (1 - p) / 2), ("Well", 0.5)])


# ---------------------------------------------------------------- endpoints


def test_endpoint_reads_probabilities_and_asks_in_both_orders(serve: Any) -> None:
    server = serve(fair)
    judge = EndpointJudge(server.url, "m", extra={"seed": 3}, **QUICK)
    assert judge.compare([P, P], [A, B], [B, A]) == pytest.approx([0.75, 0.25])
    path, body, headers = server.seen[0]
    assert path == "/v1/chat/completions" and body["model"] == "m" and body["logprobs"] and body["seed"] == 3
    assert "Authorization" not in headers
    assert judge.counts["requests"] == 2 and judge.stats["position_bias"] == pytest.approx(0)  # equal questions once


def test_rating_is_an_expectation(serve: Any) -> None:
    server = serve(lambda n, body, h: said("4", [("4", 0.5), ("5", 0.25), (" 3", 0.05)]))
    assert EndpointJudge(server.url, "m", **QUICK).rate([P], [A]) == pytest.approx(
        [(4 * 0.5 + 5 * 0.25 + 3 * 0.05) / 0.8]
    )
    server = serve(lambda n, body, h: said("Rating: 4/5"))
    assert EndpointJudge(server.url, "m", **QUICK).rate([P], [A]) == [4.0]


def test_server_without_logprobs_is_asked_again_without(serve: Any) -> None:
    def answer(number: int, body: Any, headers: Any) -> Reply:
        return (400, {"error": "logprobs is not supported"}) if "logprobs" in body else said("A")

    server = serve(answer)
    judge = EndpointJudge(server.url, "m", concurrency=1, **QUICK)
    assert judge.compare([P], [A], [B]) == [0.5]  # always "A": pure position bias, which both orders show
    assert judge.stats["position_bias"] == 0.5 and judge.stats["flips"] == 1
    assert judge.counts["requests"] == 3 and judge.counts["text_only"] == 2


@pytest.mark.parametrize("code", [408, 429, 500, 503])
def test_passing_trouble_is_tried_again(code: int, serve: Any) -> None:
    server = serve(lambda n, body, h: (code, {"error": "busy"}) if n < 2 else fair(n, body, h))
    judge = EndpointJudge(server.url, "m", concurrency=1, **QUICK)
    assert judge.compare([P], [A], [B]) == pytest.approx([0.75]) and judge.counts["failures"] == 2


def test_hanging_request_is_given_up_and_tried_again(serve: Any) -> None:
    def answer(number: int, body: Any, headers: Any) -> Reply:
        if number == 0:
            server.closing.wait(20)
        return fair(number, body, headers)

    server = serve(answer)
    start = time.monotonic()
    judge = EndpointJudge(server.url, "m", **{**QUICK, "timeout": 1.0})
    assert judge.compare([P], [A], [B]) == pytest.approx([0.75])
    assert judge.counts["failures"] >= 1 and time.monotonic() - start < 15


def test_dripping_answer_is_cut_off(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Drip(Handler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            while not self.server.closing.wait(0.1):
                self.wfile.write(b" ")
                self.wfile.flush()

    server = serve(fair)
    server.RequestHandlerClass = Drip
    start = time.monotonic()
    with pytest.raises(RewardError, match="still coming"):
        EndpointJudge(server.url, "m", **{**QUICK, "timeout": 0.5, "attempts": 1}).compare([P], [A], [B])
    assert time.monotonic() - start < 10


def test_nonsense_is_asked_once_more_with_a_reminder_then_none(serve: Any) -> None:
    server = serve(
        lambda n, body, h: said("Both are lovely.") if "first" in body["messages"][0]["content"] else said("A")
    )
    judge = EndpointJudge(server.url, "m", **QUICK)
    assert judge.compare(["first", P], [A, A], [B, B]) == [None, 0.5]
    assert judge.counts == {"requests": 6, "nonsense": 4, "text_only": 2, "no_opinion": 2}
    assert any("only: A, B" in body["messages"][-1]["content"] for _, body, _ in server.seen)
    reward = Rewards([JudgeReward(judge, "pairwise"), lambda p, c: [1.0] * len(c)], names=["wins", "one"])
    reward(rollout(["first"] * 2, [A, B]))
    assert reward.stats["rewards/wins/no_opinion"] == 2  # None reaches the rewards as "no opinion"


@pytest.mark.parametrize("content", [None, "", 7, {"a": 1}])
def test_replies_without_text_are_nonsense_not_a_crash(content: Any, serve: Any) -> None:
    server = serve(lambda n, body, h: said(content))
    assert EndpointJudge(server.url, "m", **QUICK).compare([P], [A], [B]) == [None]


DOWN = {
    "wrong path": ((404, {"error": "no such route"}), ("404", "chat/completions"), 1),
    "wrong key": ((401, {"error": "who are you"}), ("401", "key"), 1),
    "a web page": ((200, b"<html>hello</html>"), ("not JSON",), 1),
    "another API": ((200, {"hello": "world"}), ("no choices",), 1),
    "redirect": ((307, b""), ("307", "elsewhere"), 1),
    "always 500": ((500, {"error": "boom"}), ("3 tries failed", "boom", "up"), 3),
    "error as 200": ((200, {"error": {"message": "overloaded"}}), ("3 tries failed", "overloaded"), 3),
}


@pytest.mark.parametrize("case", sorted(DOWN))
def test_one_clear_error(case: str, serve: Any) -> None:
    reply, says, requests = DOWN[case]
    server = serve(lambda n, body, h: reply)
    judge = EndpointJudge(server.url, "m", concurrency=1, **QUICK)
    with pytest.raises(RewardError) as caught:
        judge.compare([P], [A], [B])
    message = str(caught.value)
    assert all(s in message for s in (*says, server.url, "0 of 2 answers")) and "\n" not in message
    assert len(server.seen) == requests


def test_nobody_listens() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with pytest.raises(RewardError, match="3 tries failed.*refused.*Is the server up"):
        EndpointJudge(f"http://127.0.0.1:{port}/v1", "m", **QUICK).rate([P], [A])


def test_budgets(serve: Any) -> None:
    server = serve(lambda n, body, h: (503, {}))
    start = time.monotonic()
    patient = {"attempts": 1000, "backoff": 0.05, "backoff_max": 0.05, "budget": 0.5}
    with pytest.raises(RewardError, match="budget of 0.5 s is used up"):
        EndpointJudge(server.url, "m", **patient).compare([P], [A], [B])
    assert time.monotonic() - start < 10
    server = serve(fair)
    judge = EndpointJudge(server.url, "m", max_requests=2, concurrency=1, **QUICK)
    with pytest.raises(RewardError, match="max_requests=2 is used up. 2 of 4 answers"):
        judge.compare([P, "And by day?"], [A, A], [B, B])
    assert len(server.seen) == 2


def test_nothing_is_lost(serve: Any, tmp_path: Path) -> None:
    cache, prompts = tmp_path / "deep" / "cache.jsonl", [f"{P} ({i})" for i in range(10)]
    server = serve(lambda n, body, h: fair(n, body, h) if n < 7 else (500, {}))
    with pytest.raises(RewardError, match="7 of 20 answers were obtained and are kept in .*cache.jsonl"):
        EndpointJudge(server.url, "m", cache=cache, concurrency=1, **QUICK).compare(prompts, [A] * 10, [B] * 10)
    with cache.open("a") as f:
        f.write('{"key": "torn')  # killed in the middle of a line
    server = serve(fair)
    judge = EndpointJudge(server.url, "m", cache=cache, **QUICK)
    assert judge.compare(prompts, [A] * 10, [B] * 10) == pytest.approx([0.75] * 10)
    assert len(server.seen) == 13 and judge.cache.damaged == 1
    again = AnswerCache(cache)
    assert len(again.found) == 20 and again.damaged == 1
    other = EndpointJudge(server.url, "another model", cache=cache, **QUICK)
    other.compare(prompts[:1], [A], [B])
    assert len(server.seen) == 15  # another model's answers are other answers


def test_concurrency_is_used_and_limited(serve: Any) -> None:
    def answer(number: int, body: Any, headers: Any) -> Reply:
        time.sleep(0.15)
        return fair(number, body, headers)

    server = serve(answer)
    EndpointJudge(server.url, "m", concurrency=4, **QUICK).compare([f"{P} {i}" for i in range(8)], [A] * 8, [B] * 8)
    assert 2 <= server.most <= 4


def test_key_comes_from_the_environment_only(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(lambda n, body, h: (401, {"error": f"bad {h['Authorization']}"}))
    with pytest.raises(ConfigError, match="JUDGE_TEST_KEY.*isn't set: export"):
        EndpointJudge(server.url, "m", key_env="JUDGE_TEST_KEY")
    monkeypatch.setenv("JUDGE_TEST_KEY", "s3cret-value")
    judge = EndpointJudge(server.url, "m", key_env="JUDGE_TEST_KEY", **QUICK)
    with pytest.raises(RewardError) as caught:
        judge.compare([P], [A], [B])
    assert server.seen[0][2]["Authorization"] == "Bearer s3cret-value"
    assert "s3cret" not in str(caught.value) and "s3cret" not in judge.config.to_yaml() + repr(judge.config)
    with pytest.raises(ConfigError, match="NAME of an environment variable") as bad:
        EndpointJudge(server.url, "m", key_env="sk-abc123")
    assert "abc123" not in str(bad.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host/v1", "http://", "file:///etc/passwd", "http://u:p@host/v1"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="url: expected an address like"):
        EndpointJudge(url, "m")


def test_settings_are_checked(tmp_path: Path) -> None:
    for bad, says in (
        ({"timeot": 1}, "timeout"),
        ({"attempts": 0}, "attempts"),
        ({"cache": tmp_path}, "can't be used"),
    ):
        with pytest.raises(ConfigError, match=says):
            EndpointJudge("http://localhost/v1", "m", **bad)


@pytest.mark.parametrize(
    ("text", "index"),
    [("A", 0), ("b", None), ("B.", 1), ("[[B]]", 1), ("**A**\nbecause", 0), ("Verdict: B", 1), ("A or B", None), ("A/B", None),
     ("A good question", None), ("B is wrong, so A", 0), ("A: nicer than B", None), ("", None), ("AB", None)],
)  # fmt: skip
def test_reading_words(text: str, index: int | None) -> None:
    assert read_choice(text, ("A", "B")) == index


def test_logprobs_in_odd_forms_fall_back_to_the_text() -> None:
    choice: dict[str, Any] = {"message": {"content": "A"}}
    for odd in (
        None,
        [],
        {"content": None},
        {"content": [{"token": "A"}]},
        {"content": [{"token": "A", "top_logprobs": []}]},
    ):
        assert read_reply({**choice, "logprobs": odd}, ("A", "B")) == ([1.0, 0.0], False)
    assert read_reply("no dict", ("A", "B")) == (None, False)


# ---------------------------------------------------------------- models as judges


def small_model(tokenizer: Any, positions: int = 512) -> Any:
    """An untrained toy model for a tokenizer."""
    from transformers import LlamaForCausalLM

    config = toy.toy_model_config("tiny", len(tokenizer))
    config.max_position_embeddings = positions
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def bpe() -> Any:
    template = JudgeTemplate()
    return train_bpe([template.compare, template.rate, "1 2 3 4 5", P, A, B] * 3 + [" A B" * 99], 500)


@pytest.mark.parametrize("chat", [False, True])
def test_model_judge_is_the_models_own_distribution(chat: bool, bpe: Any) -> None:
    model = small_model(bpe)
    judge = ModelJudge(model, bpe, chat=chat)
    model.train()
    verdicts = judge.verdicts([P], [A], [B])
    assert model.training  # left as it was
    model.eval()
    question = judge.template.comparison(P, A, B, ("A", "B"))
    if chat:
        text = bpe.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = bpe(text, add_special_tokens=False)["input_ids"]
    else:
        ids = bpe(question)["input_ids"]
    letters = [bpe(" A", add_special_tokens=False)["input_ids"], bpe(" B", add_special_tokens=False)["input_ids"]]
    assert [len(x) for x in letters] == [1, 1]
    with torch.no_grad():
        p = model(torch.tensor([ids])).logits[0, -1].softmax(0)[[x[0] for x in letters]]
    assert verdicts.forward[0] == pytest.approx(float(p[0] / p.sum()), abs=1e-5)
    assert judge.stats["label_mass"] < 0.1 and "position_bias" in judge.stats


def test_criteria_change_the_question(bpe: Any) -> None:
    judge = ModelJudge(small_model(bpe), bpe, chat=False)
    plain, other = judge.compare([P], [A], [B]), judge.compare([P], [A], [B], ["that it is short"])
    assert plain != other and judge.compare([P], [A], [B], [judge.template.criterion]) == pytest.approx(plain)
    with pytest.raises(DataError, match="2 criteria"):
        judge.compare([P], [A], [B], ["x", "y"])


def test_labels_of_several_tokens() -> None:
    tok = toy.build_tokenizer()
    assert [len(x) for x in label_ids(tok, ["one wolf", "two owl"], chat=False)] == [2, 2]
    with pytest.raises(ModelError, match="begins with label 'one'.*differ in their first token"):
        label_ids(tok, ["one", "one wolf"], chat=False)
    with pytest.raises(ModelError, match="'Zorro'"):
        ModelJudge(toy.build_model(0, "tiny"), tok, labels=("Zorro", "one"), ratings=("one", "two"), chat=False)
    for labels in (("A",), ("A", "A"), ("A", " B"), ("A", ""), "AB"):
        with pytest.raises(ConfigError, match="labels"):
            ModelJudge(toy.build_model(0, "tiny"), tok, labels=labels, ratings=("one", "two"), chat=False)


def test_question_longer_than_the_window(bpe: Any) -> None:
    with pytest.raises(DataError, match="512"):
        ModelJudge(small_model(bpe), bpe, chat=False).rate([P * 200], [A])


def test_weights_that_are_nan(bpe: Any) -> None:
    model = small_model(bpe)
    model.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(ModelError, match="not finite"):
        ModelJudge(model, bpe, chat=False).rate([P], [A])


def test_templates() -> None:
    for bad, says in (
        ({"compare": "{prompt} {first}"}, "{second}"),
        ({"rate": "{prompt} {answr}"}, "{answer}"),
        ({"remind": "{label}"}, "Did you mean {labels}"),
        ({"comparison": ""}, "Did you mean 'compare'"),
    ):
        with pytest.raises(ConfigError) as caught:
            JudgeTemplate(**bad)
        assert says in str(caught.value)
    assert fill_template("{a}{b}", a="{b}", b="{a}") == "{b}{a}"
    assert "(no answer)" in JudgeTemplate().rating(P, " ", ("1", "5"))
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Hm"},
    ]
    assert "User: Hi\n\nAssistant: Ho\n\nUser: Hm" in JudgeTemplate().rating(chat, A, ("1", "5"))
    with pytest.raises(DataError, match="expected a text"):
        JudgeTemplate().rating(3, A, ("1", "5"))


# ---------------------------------------------------------------- rewards, labels, agreement


def rollout(prompts: list[Any], texts: list[str]) -> Rollout:
    """A rollout from texts."""
    n = len(prompts)
    c = Completions.from_lists([[1]] * n, [[2]] * n)
    return Rollout(
        **c.columns_dict(), uid=torch.arange(n), finished=torch.ones(n, dtype=torch.bool), prompts=prompts, texts=texts
    )


def by_length(prompts: list[Any], completions: list[str]) -> list[float | None]:
    return [None if c == "?" else float(len(c)) for c in completions]


def test_win_rates_in_groups() -> None:
    judge = FunctionJudge(by_length, clarity=100.0, position_bias=5.0)
    prompts, texts = ["a", "b", "a", "b", "a"], ["x", "xx", "xxx", "x", "xx"]  # groups needn't be neighbours
    scores, _ = Rewards(JudgeReward(judge, "pairwise"))(rollout(prompts, texts))
    assert scores.tolist() == pytest.approx([0.0, 1.0, 1.0, 0.0, 0.5])
    assert JudgeReward(judge, "pairwise")(["a"] * 3, ["x", "?", "xx"]) == [0.0, None, 1.0]
    with pytest.raises(RewardError, match="1 of 2 prompts have one answer only.*mode='pointwise'"):
        Rewards(JudgeReward(judge, "pairwise"), on_error="skip")(rollout(["a", "a", "b"], ["x", "y", "z"]))
    with pytest.raises(ConfigError):
        JudgeReward(judge, "both")


def test_labels_do_not_depend_on_the_order_of_the_columns() -> None:
    rows = toy.preference_rows(60, 0)
    prompts, a, b = ([r[k] for r in rows] for k in ("prompt", "chosen", "rejected"))
    judge = FunctionJudge(toy.gold_reward, position_bias=0.8, noise=0.5)
    one = label_pairs(judge, prompts, a, b, columns={"number": list(range(60))})
    other = label_pairs(judge, prompts, b, a)
    assert one.stats["flips"] > 0 and one.stats["position_bias"] > 0.05
    assert [r["chosen"] for r in one.rows] == [r["chosen"] for r in other.rows]
    assert all(rows[r["number"]]["prompt"] == r["prompt"] for r in one.rows)
    for bad in ((["", P], [A, A], [B, B]), ([P, P], [A, ""], [B, B]), ([P, P], [A, A], [B, " \n"])):
        with pytest.raises(DataError, match="row [01]: the (prompt|first answer|second answer) is empty"):
            label_pairs(judge, *bad)


def test_agreement_on_known_noise() -> None:
    """Labels drawn from what the judge says: right as often as it claims, calibrated, κ = 2·accuracy − 1."""
    g = torch.Generator().manual_seed(0)
    said = torch.rand(20000, generator=g, dtype=torch.float64)
    gold = (torch.rand(20000, generator=g, dtype=torch.float64) < said).double()
    found = agreement(said.tolist(), gold.tolist())
    assert found.accuracy == pytest.approx(0.75, abs=0.01) and found.low < 0.75 < found.high
    assert found.kappa == pytest.approx(2 * found.accuracy - 1, abs=0.01) and found.calibration_error < 0.02
    wrong = agreement((1 - said).tolist(), gold.tolist())
    assert wrong.kappa < -0.45 and wrong.calibration_error > 0.3
    assert math.isnan(agreement([0.9, 0.8], [1, 1]).kappa)
    biased = agreement(Verdicts([0.9, 0.9], [0.5, 0.5]), [1, 1])
    assert biased.position_bias == pytest.approx(0.2)
    for bad in (([0.5], [1, 0]), ([None], [1]), ([1.5], [1]), ([0.7], [2])):
        with pytest.raises(DataError):
            agreement(*bad)


# ---------------------------------------------------------------- principles


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


ONE = "principles:\n  - {name: a, critique: b, revision: c, criterion: d}\n"


def test_shipped_principles_and_files_of_ones_own(tmp_path: Path) -> None:
    shipped = load_constitution()
    assert len(shipped.principles) >= 5 and shipped.stop and "{criterion}" in shipped.judge.compare
    mine = load_constitution(write(tmp_path / "p.yaml", ONE))
    assert [p.name for p in mine.principles] == ["a"] and mine.critique_prompt == shipped.critique_prompt
    assert Constitution.load(shipped.save(tmp_path / "again.yaml")) == shipped


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("principals: []", "Did you mean 'principles'"),
        ("principles:\n  - {name: a, critique: b, revision: c, criterio: d}", "principles[0].criterio"),
        ("principles: []", "principles"),
        (ONE + ONE.split("\n")[1], "two principles are called 'a'"),
        ("critique_prompt: '{prompt} {answer}'", "{critique_request}"),
        ("judge: {compare: '{prompt}'}", "judge.compare"),
        ("", "empty"),
        ("principles: [1", "line"),
    ],
)
def test_bad_principles(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_constitution(write(tmp_path / "p.yaml", text))
    assert says in str(caught.value)


def test_principles_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="doesn't exist"):
        load_constitution(tmp_path / "none.yaml")


class Script:
    """A writer that says which stage of which row it writes, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, Any]] = []

    def __call__(self, asked: list[Any], rows: list[int], stage: int) -> list[str]:
        self.asked += [(stage, r, q) for r, q in zip(rows, asked)]
        return [f" text {stage} of {r}\n\nHuman: zebra" for r in rows]


def test_two_rounds_with_a_script() -> None:
    script, c = Script(), load_constitution()
    rows = [{"prompt": P, "id": "x"}, {"prompt": [{"role": "user", "content": "Hi?"}], "completion": "Ho."}]
    made = critique_and_revise(script, None, rows, rounds=2, seed=5, first_row=10)
    one, two = made.rows
    assert (
        one["completion"] == " text 4 of 10"
        and one["id"] == "x"
        and two["completion"] == [{"role": "assistant", "content": "text 4 of 11"}]
    )
    assert [t["answer"] for t in two["trail"]] == ["Ho.", "text 2 of 11"]
    names = [[drawn_principle(c, 5, 10 + i, r).name for r in (0, 1)] for i in (0, 1)]
    assert [[t["principle"] for t in r["trail"]] for r in made.rows] == names and names[0][0] != names[0][1]
    critique, revision = (next(q for s, r, q in script.asked if (s, r) == (stage, 10)) for stage in (1, 2))
    principle = drawn_principle(c, 5, 10)
    assert principle.critique in critique and "text 0 of 10" in critique and principle.revision in revision
    assert "text 1 of 10" in revision and "zebra" not in revision  # cut at the stop text
    assert made.stats == {"rows": 2, "dropped": 0, "unchanged": 0}


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_any_causal_model_can_write(kind: str, bpe: Any) -> None:
    """A model the sampler decodes itself, and one it leaves to transformers; rows are the same in pieces."""
    if kind == "llama":
        model = small_model(bpe)
    else:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        torch.manual_seed(0)
        model = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=len(bpe), max_position_embeddings=512, **size)).eval()
    rows = [{"prompt": f"{P} {i}"} for i in range(4)] + [{"prompt": [{"role": "user", "content": P}]}]
    short = SamplingConfig(max_new_tokens=6, min_new_tokens=5)
    made = critique_and_revise(model, bpe, rows, sampling=short, seed=1)
    assert 0 < len(made.rows) <= 5 and made.stats["rows"] + made.stats["dropped"] == 5
    part = critique_and_revise(model, bpe, rows[2:4], sampling=short, seed=1, first_row=2)
    keep = {r["prompt"]: r for r in made.rows if isinstance(r["prompt"], str)}
    assert all(keep[r["prompt"]] == r for r in part.rows)
    writer = ModelWriter(model, bpe, short, seed=1)
    assert writer([P], [0], 1) != writer([P], [0], 2) and writer([P * 300], [0], 0) == [""]
