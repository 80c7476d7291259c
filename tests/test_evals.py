"""Suites as a user runs them: killed and gone on with, every suite in the box, every rule, what is refused."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import patience
import pytest
import yaml
from typer.testing import CliRunner

from rlhf_nb.bench.evals import EvalConfig, evaluate_suite
from rlhf_nb.bench.results import Results
from rlhf_nb.bench.suites import load_suite, model_asker, run_rows, suites
from rlhf_nb.cli.main import app
from rlhf_nb.core import ConfigError, DataError, RunError
from rlhf_nb.data import toy
from rlhf_nb.data.templates import set_chat_template
from rlhf_nb.models.heads import RewardModel
from rlhf_nb.models.load import save_model

ROOT = Path(__file__).resolve().parent.parent
SHARED = Path(__file__).resolve().parents[2] / "shared"
REAL = Path(os.environ.get("REAL_MODEL", Path.home() / ".cache/rlhf_nb/smollm2-135m-instruct"))
OWN = ("attacks", "facts", "over-refusal", "sums", "sycophancy")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model on disk; it knows no English, so everything but its answers can be tested with it."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(toy.build_model(0, "tiny"), set_chat_template(toy.build_tokenizer()), folder)
    return folder


@pytest.fixture(scope="module")
def loaded(model: Path) -> Any:
    from rlhf_nb.bench.talk import _load

    return _load(str(model))


def rlhf_nb(*words: object, ok: bool = True) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, [str(w) for w in words])
    assert (done.exit_code == 0) == ok, done.output
    return re.sub(r"\s+", " ", done.output)


@pytest.mark.parametrize("name", OWN)
def test_every_suite_in_the_box_runs(name: str, loaded: Any, tmp_path: Path) -> None:
    suite = load_suite(name, limit=6)
    config = EvalConfig(output_dir=str(tmp_path), max_new_tokens=8)
    try:
        results, folder = evaluate_suite("tiny", suite, config, loaded=loaded)
    except DataError as e:  # the toy model's window is small
        assert "window" in str(e) or "long" in str(e), e
        pytest.skip(f"the tiny model can't read it: {e}")
    assert Results.read(folder) == results and len(results.rows) == 6
    assert "score" in results.metrics or name == "sycophancy"  # nothing right at first: nothing to keep


def test_suites_in_the_box_are_whole() -> None:
    """Ids, prompts and rules; answers that are right are scored as right."""
    for name, path in suites().items():
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert said["name"] == name and said["about"] and (said.get("rows") or said.get("file")), name
        if said.get("rows"):
            suite = load_suite(name)
            prompts = [json.dumps(r["turns"]) for r in suite.rows]
            assert len(set(prompts)) == len(prompts) >= 20, name
    for row in load_suite("sums").rows:
        numbers = list(map(int, re.findall(r"\d+", row["prompt"])))
        kind, wanted = row["kind"], int(row["answer"])
        right = {"add": sum(numbers), "subtract": numbers[0] - numbers[-1], "times": numbers[0] * numbers[-1], "two steps": numbers[0] - numbers[1] + numbers[-1]}  # fmt: skip
        assert wanted == right[kind], row


def write_suite(folder: Path, rule: str, rows: str, more: str = "") -> Path:
    path = folder / "mine.yaml"
    path.write_text(f"name: mine\nrule: {rule}\nmax_new_tokens: 8\n{more}rows:\n{rows}", encoding="utf-8")
    return path


ROWS = "".join(f"  - {{prompt: 'Where do {a} live?', answer: '{i}', kind: {'ab'[i % 2]}}}\n" for i, a in enumerate(["owls", "bees", "bears", "frogs", "wolves", "goats"]))  # fmt: skip


def test_eval_goes_on_and_is_compared(model: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.py"
    rules.write_text(
        "def vowels(prompts, completions, kind=None):\n    return [sum(c in 'aeiou' for c in x) / (1 + len(x)) for x in completions]\n"
    )
    suite = write_suite(tmp_path, f"{{file: {rules}, fn: vowels}}", ROWS, "slice: kind\n")
    one = rlhf_nb(
        "eval", model, "-s", suite, f"output_dir={tmp_path / 'one'}", "temperature=1.0", "samples=2", "chunk=4"
    )
    two = rlhf_nb("evaluate", model, "-s", suite, f"output_dir={tmp_path / 'two'}", "temperature=1.0", "seed=1", "samples=2", "chunk=4")  # fmt: skip
    assert "score of a" in one and "score" in two and "rlhf-nb compare" in one
    before = (tmp_path / "one/results.json").read_bytes()
    again = rlhf_nb(
        "eval", model, "-s", suite, f"output_dir={tmp_path / 'one'}", "temperature=1.0", "samples=2", "chunk=4"
    )
    assert "6 of 6 rows were done before" in again and (tmp_path / "one/results.json").read_bytes() == before
    said = rlhf_nb("compare", tmp_path / "one", tmp_path / "two", f"output_dir={tmp_path / 'c'}")
    assert "undecidable with these 6 prompts" in said or "decided" in said
    assert "p, Holm" in said and (tmp_path / "c/compare.svg").read_text().startswith("<?xml")
    assert (tmp_path / "c/compare.png").read_bytes()[:4] == b"\x89PNG"
    judged = rlhf_nb("compare", tmp_path / "one", tmp_path / "two", f"output_dir={tmp_path / 'j'}", f"judge_rule={{file: {rules}, fn: vowels}}")  # fmt: skip
    assert "position bias" in judged and "κ" in judged and "by the judge" in judged
    other = rlhf_nb(
        "eval",
        model,
        "-s",
        suite,
        f"output_dir={tmp_path / 'one'}",
        "temperature=0.5",
        "samples=2",
        "chunk=4",
        ok=False,
    )
    assert "temperature=1.0, and now it is 0.5" in other and "--overwrite" in other
    fewer = rlhf_nb("eval", model, "-s", suite, "--limit", 3, f"output_dir={tmp_path / 'three'}")
    assert "score" in fewer
    assert "only answers to the same rows" in rlhf_nb("compare", tmp_path / "one", tmp_path / "three", ok=False)


def test_a_changed_model_is_noticed(model: Path, tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, "{verify: number}", ROWS))
    evaluate_suite(str(model), suite, EvalConfig(output_dir=str(tmp_path / "out")))
    other = tmp_path / "other"
    save_model(toy.build_model(5, "tiny"), set_chat_template(toy.build_tokenizer()), other)
    from rlhf_nb.bench.talk import _load

    with pytest.raises(RunError, match="weights="):
        evaluate_suite(str(model), suite, EvalConfig(output_dir=str(tmp_path / "out")), loaded=_load(str(other)))


def test_votes_passes_and_slices(loaded: Any, tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, "{verify: number}", ROWS, "samples: 4\n"))
    results, _ = evaluate_suite("tiny", suite, EvalConfig(output_dir=str(tmp_path / "out"), slice="kind", measures=[{"verify": "repetition"}]), loaded=loaded)  # fmt: skip
    assert {"pass@1", "pass@4", "majority@3", "repetition"} <= set(results.metrics)
    assert "read" not in results.metrics and "wanted" not in results.metrics
    assert sum(m.n for m in results.slices.values()) == 6 and len(results.slices) <= 2
    assert all(len(r.samples) == 4 for r in results.rows)


def test_multiple_choice_is_by_log_probs(loaded: Any, tmp_path: Path) -> None:
    """Against probabilities computed one by one through the model itself."""
    import torch

    from rlhf_nb.data.templates import as_chat, encode_pairs

    net, tok, _ = loaded
    rows = "  - {prompt: 'Where do owls live?', choices: [forest, pond, hills], answer: 0}\n  - {prompt: 'Do bees fly?', choices: ['yes', 'no'], answer: [1]}\n"
    path = write_suite(tmp_path, "{choice: true}", rows, "task: choice\n")
    suite = load_suite(path)
    results, folder = evaluate_suite("tiny", suite, EvalConfig(output_dir=str(tmp_path / "out")), loaded=loaded)
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    for row, line in zip(suite.rows, lines):
        ask = as_chat(tok, [row["turns"][0]])[0]
        logps = []
        pairs = [encode_pairs(tok, [ask], [[{"role": "assistant", "content": c}]])[0] for c in row["choices"]]
        shared = 0
        while len({tuple(p[1][len(p[1]) - shared - 1 :]) for p in pairs}) == 1:
            shared += 1
        for p, c, _ in pairs:
            c = c[: len(c) - shared]
            logits = net(torch.tensor([p + c])).logits[0, len(p) - 1 : -1].log_softmax(-1)
            logps.append(logits.gather(1, torch.tensor(c)[:, None]).sum())
        assert torch.allclose(torch.stack(logps).softmax(0), torch.tensor(line["probabilities"]), atol=1e-4)
    assert {"score", "normalized", "mass", "brier", "ece", "ece_if_perfect"} <= set(results.metrics)


def test_capabilities_are_held_against_a_frozen_baseline(model: Path, loaded: Any, tmp_path: Path) -> None:
    """The same model keeps all it had where there are rows enough; one that lost everything fails; other settings are refused."""
    from rlhf_nb.bench.capability import CapabilityTester

    rows = "".join(f"  - {{prompt: 'Where do owls live? {i}'}}\n" for i in range(60))
    suite = load_suite(write_suite(tmp_path, "{verify: length, target: 6, width: 6, unit: words}", rows))
    config = EvalConfig(output_dir=str(tmp_path / "base"), max_new_tokens=6)
    base, _ = evaluate_suite(str(model), suite, config, loaded=loaded)
    file = CapabilityTester.freeze({"mine": base}, {"mine": 0.05}).save(tmp_path / "frozen.json")
    tester = CapabilityTester.read(file)
    assert [c.verdict for c in tester.test({"mine": base})] == ["kept"]
    worse = base.replace(rows=[r.model_dump() | {"score": 0.0} for r in base.rows])
    assert base.metrics["score"].value > 0.1 and [c.verdict for c in tester.test({"mine": worse})] == ["lost"]
    other, _ = evaluate_suite(
        str(model), suite, EvalConfig(output_dir=str(tmp_path / "o"), max_new_tokens=5), loaded=loaded
    )
    with pytest.raises(DataError, match="max_new_tokens=6, now 5"):
        tester.test({"mine": other})


@pytest.mark.parametrize(
    ("rule", "rows", "error", "said"),
    [
        ("{verify: length}", "  - {id: a, prompt: p}\n", ConfigError, "suite mine, rule: verify: length needs target"),
        ("{verfy: exact}", ROWS, ConfigError, "Did you mean 'verify'"),
        ("{verify: exat}", ROWS, ConfigError, "Did you mean 'exact'"),
        ("{judg: true}", ROWS, ConfigError, "Did you mean 'judge'"),
        ("{judge: true}", ROWS, ConfigError, "judge.model="),
        ("{flip: true}", ROWS, DataError, "two turns"),
        ("{checks: true}", ROWS, ConfigError, "In earlier versions that was a rule for instructions"),
        ("{verify: number, answer: solution}", ROWS, Exception, "solution"),
    ],
)
def test_rules_that_cannot_work_are_told(rule: str, rows: str, error: type[Exception], said: str, loaded: Any, tmp_path: Path) -> None:  # fmt: skip
    suite = load_suite(write_suite(tmp_path, rule, rows))
    with pytest.raises(error, match=re.escape(said)):
        evaluate_suite("tiny", suite, EvalConfig(output_dir=str(tmp_path / "out")), loaded=loaded)


RIGHT = "def right(prompts, completions, criteria=None):\n    return [len(c) % 5 + 1.0 for c in completions]\n"


def test_a_win_rate_is_against_the_files_own_answers(model: Path, tmp_path: Path) -> None:
    """AlpacaEval's way: a judge that likes long answers always prefers the file's, at equal length neither."""
    rows = [{"instruction": f"Where do owls live, {i}?", "output": "In the forest. " * (3 + i % 4)} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "rules.py").write_text(
        "def long(prompts, completions):\n    return [len(c) / 20 for c in completions]\n"
    )
    out = tmp_path / "out"
    rule = f"judge_rule={{file: {tmp_path / 'rules.py'}, fn: long}}"
    rlhf_nb("eval", model, "-s", "alpaca-eval", "-f", tmp_path / "rows.jsonl", rule, "max_new_tokens=6", f"output_dir={out}")  # fmt: skip
    metrics = Results.read(out).metrics
    score, controlled = metrics["score"], metrics["score_at_equal_length"]
    assert 0 < score.value < 0.4 and score.value < controlled.value < 1 and metrics["longer"].value < 0
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"instruction": r["instruction"]}) + "\n" for r in rows))
    lacking = rlhf_nb("eval", model, "-s", "alpaca-eval", "-f", tmp_path / "rows.jsonl", rule, f"output_dir={tmp_path / 'b'}", ok=False)  # fmt: skip
    assert "needs the column 'output'" in lacking


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the file of MT-Bench isn't here")
def test_a_judge_sees_the_references_of_mt_bench() -> None:
    """Each turn's own, in ratings and in pairs; where a row has none, the judge's own criterion decides."""
    from rlhf_nb.bench.results import pair_work
    from rlhf_nb.bench.suites import judge_rule
    from rlhf_nb.judges.judge import FunctionJudge, JudgeTemplate, verdicts_of

    suite = load_suite("mt-bench", SHARED / "data" / "mt_bench_questions.jsonl")
    told: list[tuple[str, str]] = []

    def score(prompts: Any, completions: Any, criteria: Any = None) -> list[float]:
        told.extend(
            (JudgeTemplate().rating(p, c, ["1", "5"], by), c) for p, c, by in zip(prompts, completions, criteria)
        )
        return [3.0] * len(completions)

    judge, answers = FunctionJudge(score), [["first", "second"] for _ in suite.rows]
    with_one = {r["category"] for r in suite.rows if r.get("reference")}
    assert {"math", "reasoning", "coding"} <= with_one
    judge_rule(judge)(suite.rows, answers)
    places = [(row, turn) for row in suite.rows for turn in range(2)]
    said = {r["id"]: ["first", "second"] for r in suite.rows}
    ratings, told[:] = list(told), []
    pair_work(said, said, lambda *x: verdicts_of(judge, *x))(suite.rows)
    assert len(ratings) == 160 and len(told) == 4 * 160
    for asked in (ratings, told[:160]):
        for (row, turn), (question, _) in zip(places, asked, strict=True):
            right = (row.get("reference") or ["", ""])[turn].strip()
            assert (right in question) if right else ("helpful, honest and harmless" in question)


ANSWERS = ["#### 4", "The answer is 4.", "(B)", "I can't help with that.", "one two three", "```python\ndef f(x):\n    return x + 1\n```", '{"a": 1}', "<think>2 + 2</think> 4", "no no no no no no no no", ""]  # fmt: skip
SCORED: dict[str, dict[str, Any]] = {  # what each rule is tried on; a digest of its scores stands beside its version
    "number": {"rule": {"verify": "number"}, "row": {"answer": "4"}},
    "exact": {"rule": {"verify": "exact"}, "row": {"answer": "one two three"}},
    "choice": {"rule": {"verify": "choice"}, "row": {"answer": "B"}},
    "format": {"rule": {"verify": "format", "pattern": "one.*"}, "row": {}},
    "think": {"rule": {"verify": "think"}, "row": {}},
    "json": {"rule": {"verify": "json"}, "row": {}},
    "repetition": {"rule": {"verify": "repetition"}, "row": {}},
    "length": {"rule": {"verify": "length", "target": 3, "width": 2, "unit": "words"}, "row": {}},
    "token ids": {"rule": {"verify": "length", "target": 3, "width": 2}, "row": {}},
    "code": {"rule": {"verify": "code"}, "row": {"tests": ["assert f(1) == 2"]}},
    "refusal": {"rule": {"refusal": True}, "row": {"should": "answer"}},
    "flip": {"rule": {"flip": True}, "row": {"answer": "B"}},
}
DIGESTS = Path(__file__).parent / "data" / "rules.json"


def scores_of(kind: str) -> list[Any]:
    """What a rule says of the answers above."""
    from rlhf_nb.bench.evals import make_rule
    from rlhf_nb.bench.suites import Suite, SuiteConfig

    case = SCORED[kind]
    rows = [{"id": str(i), "turns": ["?", "Sure?"], **case["row"]} for i in range(len(ANSWERS))]
    suite = Suite(SuiteConfig(name="one", rule=case["rule"]), rows)
    rule = make_rule(suite, EvalConfig(), set_chat_template(toy.build_tokenizer()), "")
    return rule(rows, [["(B)", a] if kind == "flip" else [a] for a in ANSWERS])


@pytest.mark.parametrize("kind", sorted(SCORED))
def test_a_rule_that_scores_otherwise_has_another_version(kind: str) -> None:
    """A changed score needs a new version in `suites.RULES`, and then a new line in tests/data/rules.json."""
    from rlhf_nb.bench.suites import RULES

    found = {"version": RULES.get(kind, 1), "scores": json.loads(json.dumps(scores_of(kind)))}
    known = json.loads(DIGESTS.read_text(encoding="utf-8"))[kind]
    same = known["scores"] == found["scores"]
    assert same or known["version"] < found["version"], f"the scores of {kind} changed: raise its version in RULES"
    assert known == found, "its version was raised: write what it scores now into tests/data/rules.json"


def test_every_rule_is_tried() -> None:
    from rlhf_nb.bench.evals import _OURS
    from rlhf_nb.bench.suites import RULES
    from rlhf_nb.train.entries import VERIFIERS

    elsewhere = {"reference", "math"}  # what a judge sees is tested above; math needs an extra: test_symbolic.py
    assert {*VERIFIERS, *_OURS, *RULES} - elsewhere == set(SCORED)


@pytest.mark.parametrize("kind", ["number", "code", "token ids", "reference"])
def test_what_was_begun_under_another_version_of_a_rule_is_refused(kind: str, model: Path, loaded: Any, tmp_path: Path) -> None:  # fmt: skip
    """In a folder without marks, as older versions left it, and in one with an older mark; rules that never changed go on."""
    from rlhf_nb.bench.suites import RULES

    (tmp_path / "rules.py").write_text(RIGHT)
    judged = {"judge_rule": {"file": str(tmp_path / "rules.py"), "fn": "right"}}
    rule = "{judge: true}" if kind == "reference" else json.dumps(SCORED[kind]["rule"])
    more = {"reference": ["6"], "tests": ["assert f(1) == 2"], "answer": "6"}
    rows = "".join(f"  - {json.dumps({'prompt': f'Where do owls live? {i}', **more})}\n" for i in range(3))
    suite = load_suite(write_suite(tmp_path, rule, rows))
    config = EvalConfig(output_dir=str(tmp_path / "out"), **(judged if kind == "reference" else {}))
    _, folder = evaluate_suite(str(model), suite, config, loaded=loaded)
    evaluate_suite(str(model), suite, config, loaded=loaded)
    head = json.loads((folder / "asked.json").read_text())
    assert head["rules"][kind] == RULES[kind] == 2
    for marks in ({}, {"rules": {kind: 1}}):
        old = {k: v for k, v in head.items() if k != "rules"} | marks
        (folder / "asked.json").write_text(json.dumps(old))
        with pytest.raises(RunError, match=f"rule {kind}, version 1; it is 2 now.*--overwrite"):
            evaluate_suite(str(model), suite, config, loaded=loaded)
    results, _ = evaluate_suite(str(model), suite, config, loaded=loaded, overwrite=True)
    if kind == "token ids":  # the mark of 0.2's first folders
        old = {k: v for k, v in head.items() if k != "rules"} | {"scoring": 2}
        (folder / "asked.json").write_text(json.dumps(old))
        evaluate_suite(str(model), suite, config, loaded=loaded)
    from rlhf_nb.bench.results import compare_results

    older = results.replace(settings=results.settings | {"rules": {kind: 1}})
    with pytest.raises(DataError, match="rules of the versions"):
        compare_results([results, older], ["a", "b"])


def test_a_rule_that_never_changed_goes_on_without_a_mark(loaded: Any, tmp_path: Path) -> None:
    suite = load_suite(write_suite(tmp_path, "{verify: exact}", ROWS))
    config = EvalConfig(output_dir=str(tmp_path / "out"))
    _, folder = evaluate_suite("tiny", suite, config, loaded=loaded)
    head = json.loads((folder / "asked.json").read_text())
    (folder / "asked.json").write_text(json.dumps({k: v for k, v in head.items() if k != "rules"}))
    evaluate_suite("tiny", suite, config, loaded=loaded)


def test_torn_files_are_mended(loaded: Any, tmp_path: Path) -> None:
    """Cut at any byte, the file ends as it would have without the cut."""
    from rlhf_nb.bench.suites import answer_work
    from rlhf_nb.config import SamplingConfig

    net, tok, _ = loaded
    suite = load_suite(write_suite(tmp_path, "{verify: exact}", ROWS))
    ask = model_asker(net, tok, SamplingConfig(max_new_tokens=4))
    work = answer_work(ask, lambda rows, said: [{"score": float(len(s[-1]))} for s in said])
    run_rows(suite, work, tmp_path / "a", {}, chunk=2)
    whole = (tmp_path / "a/answers.jsonl").read_bytes()
    for cut in range(0, len(whole), 61):
        (tmp_path / "a/answers.jsonl").write_bytes(whole[:cut])
        run_rows(suite, work, tmp_path / "a", {}, chunk=2)
        assert (tmp_path / "a/answers.jsonl").read_bytes() == whole, cut


def test_results_of_another_version_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"format": "rlhf-nb/eval", "version": 2}')
    with pytest.raises(DataError, match="version 2"):
        Results.read(tmp_path)
    schema = json.loads(CliRunner().invoke(app, ["eval", "--schema"]).output)
    assert schema["properties"]["version"]["const"] == 1 and "rows" in schema["properties"]


def test_blocks_of_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RewardModel.from_policy(toy.build_model(0, "tiny")).save("runs/reward/model", toy.build_tokenizer())
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy.preference_rows(8, 0)))
    text = (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, "docs/evaluate.md", "exec"), {})
    for block in re.findall(r"```yaml\n(name: .*?)```", text, re.S):
        path = tmp_path / "guide.yaml"
        path.write_text(block, encoding="utf-8")
        load_suite(path)


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the files of GSM8K, HumanEval and MT-Bench aren't here")
def test_suites_read_the_usual_files() -> None:
    data = SHARED / "data"
    gsm = load_suite("gsm8k", data / "gsm8k_train.jsonl.gz", 3)
    assert "The answer is NUMBER" in gsm.rows[0]["turns"][0] and "####" in gsm.rows[0]["answer"]
    with gzip.open(data / "humaneval.jsonl.gz", "rt") as f:
        first = json.loads(next(f))
    human = load_suite("humaneval", data / "humaneval.jsonl.gz", 3)
    assert first["prompt"] in human.rows[0]["turns"][0]
    mt = load_suite("mt-bench", data / "mt_bench_questions.jsonl")
    assert len(mt.rows) == 80 and all(len(r["turns"]) == 2 for r in mt.rows) and mt.config.slice == "category"


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the file of HumanEval isn't here")
def test_right_programs_pass_humaneval() -> None:
    """The canonical solutions score 1 in the sandbox, broken ones 0."""
    from rlhf_nb.bench.evals import make_rule

    tok = set_chat_template(toy.build_tokenizer())
    suite = load_suite("humaneval", SHARED / "data" / "humaneval.jsonl.gz", 3)
    rule = make_rule(suite, EvalConfig(), tok, "")
    good = [[f"```python\n{r['prompt']}{r['canonical_solution']}```"] for r in suite.rows]
    bad = [[f"```python\n{r['prompt']}    return None\n```"] for r in suite.rows]
    assert [s["score"] for s in rule(suite.rows, good)] == [1.0] * 3
    assert [s["score"] for s in rule(suite.rows, bad)] == [0.0] * 3


RATING = '''
def rate(prompts, completions):
    """1 to 10: different words, without what is said again."""
    return [1 + 9 * min(len(set(c.split())), 30) / 30 * len(set(c.split())) / (1 + len(c.split())) for c in completions]
'''


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "data").is_dir() or not REAL.is_dir(), reason="MT-Bench's file or SmolLM2 isn't here")
def test_mt_bench_killed_twice_gives_the_same_numbers(tmp_path: Path) -> None:
    """80 questions of two turns, a rule in the judge's place; kill -9 at two moments; results byte for byte."""
    (tmp_path / "rules.py").write_text(RATING)
    command = [
        sys.executable, "-m", "rlhf_nb", "eval", str(REAL), "--suite", "mt-bench", "--file", str(SHARED / "data/mt_bench_questions.jsonl"),
        f"judge_rule={{file: {tmp_path / 'rules.py'}, fn: rate}}", "max_new_tokens=16", "chunk=8",
    ]  # fmt: skip
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    start = time.monotonic()
    assert patience.run([*command, f"output_dir={straight}"], cpu=2400).returncode == 0
    print(f"80 questions without a kill: {time.monotonic() - start:.0f} s")
    for lines in (8, 32):  # after the first chunk, and in the middle
        process = subprocess.Popen(
            [*command, f"output_dir={killed}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        file = killed / "answers.jsonl"
        while not file.exists() or file.read_bytes().count(b"\n") < lines:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (killed / "results.json").exists()
    done = patience.run([*command, f"output_dir={killed}"], cpu=2400)
    assert done.returncode == 0 and "rows were done before" in done.stdout
    assert (straight / "answers.jsonl").read_bytes() == (killed / "answers.jsonl").read_bytes()
    assert (straight / "results.json").read_bytes() == (killed / "results.json").read_bytes()
    results = Results.read(killed)
    print({k: str(results.metrics[k]) for k in ("score", "turn_1", "turn_2", "length", "finished")})
    assert len(results.rows) == 80 and len(results.slices) == 8


def test_truthfulqa_as_it_is_on_the_hub(tmp_path: Path) -> None:
    """MC1 is decided among its own choices, MC2's mass among its own; both as if each were a row by itself."""
    from rlhf_nb.bench.suites import choice_work, load_suite
    from rlhf_nb.data import toy

    one = {"choices": ["Owls live in the forest.", "Owls live in the sea."], "labels": [1, 0]}
    two = {
        "choices": ["Owls live in the forest.", "They live in the forest.", "Owls live in the desert."],
        "labels": [1, 1, 0],
    }
    row = {"question": "Visitor: Where do owls live?\nPip:", "mc1_targets": one, "mc2_targets": two}
    apart = [
        {"question": row["question"], "choices": s["choices"], "answer": [i for i, x in enumerate(s["labels"]) if x]}
        for s in (one, two)
    ]
    work, found = choice_work(toy.build_model(0, "tiny"), toy.build_tokenizer()), []
    for name, rows in (("hub", [row]), ("apart", apart)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        found.append([lines[0]["scores"] for lines in work(load_suite("truthfulqa", tmp_path / f"{name}.jsonl").rows)])
    (hub,), (first, second) = found
    assert (
        hub["score"] == first["score"]
        and hub["said"] == pytest.approx(first["said"], rel=1e-4)
        and hub["mass"] == pytest.approx(second["mass"], rel=1e-4)
    )
    (tmp_path / "broken.jsonl").write_text(
        json.dumps({**row, "mc1_targets": {"choices": ["a"], "labels": [1, 0]}}) + "\n"
    )
    with pytest.raises(DataError, match="as many labels"):
        load_suite("truthfulqa", tmp_path / "broken.jsonl")
