"""The board of a folder of runs that anybody may have made: every answer is an answer, and one bad run hides no other."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest

from rlhf_nb.widgets.board import serve_board
from rlhf_nb.widgets.runs import Runs

STEPS = [{"type": "start", "step": 0, "total_steps": 5, "method": "sft"}]
STEPS += [{"type": "step", "step": i, "loss": 1 / i, "objective/kl": i, "time": float(i)} for i in range(1, 6)]
LOG = "".join(json.dumps(e) + "\n" for e in STEPS).encode()
LOGS: dict[str, bytes] = {
    "nothing": b"",
    "zeros": b"\0" * 9000,
    "noise": bytes(range(256)) * 20,
    "nested": b'{"type":"step","step":1,"a":' + b"[" * 99_999 + b"]" * 99_999 + b"}\n",
    "not finite": b'{"type":"step","step":1,"loss":NaN}\n{"type":"step","step":1e400,"loss":1}\n{"type":"step","step":-5,"loss":1}\n',
    "huge": b"".join(b'{"type":"step","step":%d,"loss":%s1e308,"objective/kl":%s1e308}\n' % (i, s, s) for i, s in enumerate((b"", b"-") * 9)),
    "long numbers": b'{"type":"step","step":' + b"9" * 5000 + b',"loss":1}\n{"type":"start","total_steps":' + b"9" * 400 + b"}\n",
    "other kinds": b'{"type":5}\n{"type":["a"],"step":3}\n{"type":"step","step":"1","loss":[1]}\n{"type":"end","reason":{"x":"<script>"}}\n3\n',
    "many metrics": json.dumps({"type": "step", "step": 1} | {f"k{i}": i for i in range(5000)}).encode() * 2 + b"\n",
}  # fmt: skip
CONFIGS: dict[str, str] = {
    "a bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi")),
    "a program": "!!python/object/apply:os.system ['touch pwned']\n",
    "a list": "[]\n",
    "a seed that is none": "method: sft\nseed: [1, {a: 2}]\n",
    "kinds": "kl_budget: x\nkl_target: [1]\nkl_coef: {}\nrewards: 3\nsteps: many\n",
}  # fmt: skip
FILES = ["config.yaml", "samples.jsonl", "lock.json", "control.jsonl", "notes.json"]
JSON = [b"", b"[]", b"3", b"{", b'{"note": [1], "tags": 3, "at": "x", "parent": 5}']
JSON += [b'{"tags": [1, "<script>alert(1)</script>"], "at": 1e999, "parent": [1]}']
NAMES = [
    "<script>alert(1)</script>",
    "a b&run=plain#x?y%2F",
    "new\nline",
    "\u202eevil",
    "%2e%2e",
    '"><img src=x onerror=alert(1)>',
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with whatever a folder can hold."""
    home = tmp_path_factory.mktemp("home")
    runs = home / "runs"
    (home / "secret").write_text('{"step": 1, "prompt": "secret"}\n')

    def run(name: str, log: bytes = LOG, config: str | None = "method: sft\n") -> Path:
        made = runs / name
        made.mkdir(parents=True)
        (made / "metrics.jsonl").write_bytes(log)
        if config is not None:
            (made / "config.yaml").write_text(config)
        return made

    for name in ["plain", *NAMES]:
        run(name)
    for name, log in LOGS.items():
        run(name, log)
    for name, config in CONFIGS.items():
        run(name, config=config)
    for kind in ("directory", "pipe", "link"):  # each of a run's other files as something that is no file
        for file in FILES:
            place = run(f"{kind} {file}", config=None) / file
            match kind:
                case "directory":
                    place.mkdir()
                case "pipe":
                    os.mkfifo(place)
                case "link":
                    place.symlink_to(home / "secret")
    for n, text in enumerate(JSON):
        (run(f"{n} notes.json") / "notes.json").write_bytes(text)
    for seed in (0, 1):  # of one experiment, over, and beyond all bounds
        log = LOG.replace(b'"loss": 1.0', b'"loss": 1e308').replace(b'"loss": 0.2', b'"loss": 1.5e308')
        run(f"huge seed {seed}", log + b'{"type": "end", "step": 5}\n', f"method: other\nseed: {seed}\n")
    (runs / "loop").symlink_to(runs)
    (runs / "metrics of a stranger").mkdir()
    (runs / "metrics of a stranger" / "metrics.jsonl").symlink_to(home / "secret")
    return runs


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    server = serve_board(folder, port=0, block=False, say=None)
    yield server.server_address[1]
    server.shutdown()


def asked(port: int, path: str, host: str | None = None) -> tuple[int, str]:
    """Status and text of an answer."""
    to = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    to.putrequest("GET", path, skip_host=True)
    to.putheader("Host", f"127.0.0.1:{port}" if host is None else host)
    to.endheaders()
    answer = to.getresponse()
    return answer.status, answer.read().decode()


@pytest.mark.filterwarnings("ignore:constrained_layout")  # a legend of forty names
def test_each_run_of_a_strange_folder_is_shown(folder: Path, port: int, capfd: pytest.CaptureFixture[str]) -> None:
    status, text = asked(port, "/api/runs")
    names = [r["name"] for row in json.loads(text)["runs"] for r in (row["stages"] or [row])]
    assert status == 200 and len(names) == 1 + len(NAMES) + len(LOGS) + len(CONFIGS) + 3 * len(FILES) + len(JSON) + 2
    for name in names:
        status, text = asked(port, f"/api/compare?run={quote(name, safe='')}&step=3")
        assert status == 200 and "secret" not in text, (name, text[:300])
    together: Any = Runs(folder).compare(*names)
    page = together._repr_html_()
    assert "<script>alert" not in page and "<img src=x" not in page and json.dumps(together.data(), allow_nan=False)
    assert not list(folder.rglob("pwned")) and "Traceback" not in capfd.readouterr().err


STRANGE = [
    "/../../etc/passwd", "//[::1", "http://[::1/api/runs", "/api/compare", "/api/compare?run=../../etc", "/api/compare?run=plain&by=x",
    "/api/compare?run=plain&from=x&to=1", "/api/compare?run=plain&from=1", "/api/compare?run=plain&step=nan", "/api/compare?run=%00%ff",
    "/api/compare?run=" + "x" * 5000, "/api/other",
]  # fmt: skip


@pytest.mark.parametrize("path", STRANGE)
def test_a_strange_address_gets_an_answer(path: str, port: int, capfd: pytest.CaptureFixture[str]) -> None:
    status, text = asked(port, path)
    assert status in (404, 500) and text.strip() and "only runs of this machine" not in text
    assert "Traceback" not in capfd.readouterr().err


def test_a_run_that_is_gone_is_named(port: int) -> None:
    status, text = asked(port, "/api/compare?run=plian")
    assert status == 404 and "there is no run 'plian'" in text and "'plain'" in text


@pytest.mark.parametrize(
    "host", ["evil.com", "127.0.0.1.evil.com", "127.0.0.1:80@evil.com", "", "localhost.evil.com:80"]
)
def test_other_names_of_this_machine(host: str, port: int) -> None:
    assert asked(port, "/api/runs", host)[0] == 404


SEEDS: dict[str, list[dict[str, Any]]] = {  # what another seed of a run may have logged
    "not a number": [{"step": i, "loss": "NaN", "objective/kl": "NaN"} for i in range(1, 8)],
    "infinite": [{"step": i, "loss": "Infinity", "objective/kl": 0.1} for i in range(1, 8)],
    "one step": [{"step": 1, "loss": 1.0, "objective/kl": 0.0}],
    "other steps": [{"step": 100 + i, "loss": 1.0, "objective/kl": 0.1} for i in range(1, 8)],
    "backwards": [{"step": 8 - i, "loss": 1.0, "objective/kl": 0.1 * i} for i in range(1, 8)],
    "constant": [{"step": i, "loss": 1.0, "objective/kl": 0.0} for i in range(1, 8)],
    "nothing": [],
}


@pytest.mark.parametrize("name", SEEDS)
def test_a_seed_that_went_astray_is_compared(name: str, tmp_path: Path) -> None:
    """Runs that differ in their seed alone are pooled; one that logged no number leaves the curves of the others."""
    for seed, rows in enumerate(
        [[{"step": i, "loss": 1 / i, "objective/kl": 0.1 * i} for i in range(1, 8)], SEEDS[name]]
    ):
        (tmp_path / str(seed)).mkdir()
        (tmp_path / str(seed) / "config.yaml").write_text(f"method: sft\nseed: {seed}\noutput_dir: {seed}\n")
        events = STEPS[:1] + [{"type": "step", "time": float(r["step"])} | r for r in rows]
        (tmp_path / str(seed) / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    for by in ("step", "time", "kl"):
        for window in (None, (2.0, 4.0), (50.0, 60.0)):
            data = Runs(tmp_path).compare("0", "1", by=by, window=window).data()
            assert json.dumps(data, allow_nan=False) and data["members"] == ["0", "1"]


def test_pairs_are_labelled_at_the_board(tmp_path: Path) -> None:
    """Two people, one file; without the word one may only look, and with it one may label, but steers no run."""
    rows = [{"prompt": f"q{i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(5)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "guideline.md").write_text("Be **fair**.")
    told = list[str]()
    server = serve_board(tmp_path, port=0, block=False, say=told.append, label=tmp_path / "pairs.jsonl")
    base, word = told[0].split()[0].split("?word=")

    def post(body: object, given: str = word) -> tuple[int, str]:
        data = json.dumps(body).encode()
        try:
            with urlopen(Request(f"{base}api/change", data, {"X-Word": given})) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    def label(who: str, key: str, **message: object) -> tuple[int, str]:
        state = json.loads(urlopen(f"{base}api/label?who={who}").read())
        message = {"pair": state["pair"], "key": key, "seconds": 9.0, **message}
        return post({"run": "", "request": "label", "who": who, "message": message})

    try:
        assert 'src="label.js"' in urlopen(f"{base}label").read().decode()
        for who in ("ada", "bob"):
            time.sleep(0.2)  # a key that comes at once is not about the pair
            json.loads(urlopen(f"{base}api/label?who={who}").read())
            time.sleep(0.2)
            code, text = label(who, "a", reasons=["clearer"])
            assert code == 200 and json.loads(text)["done"] == 1 and json.loads(text)["guideline"] == "Be **fair**."
        kept = [json.loads(x) for x in (tmp_path / "pairs.labels.jsonl").read_text().splitlines()]
        assert [x["annotator"] for x in kept] == ["ada", "bob"] and kept[0][
            "seconds"
        ] < 5  # the clock here has the last word
        assert "another pair" in json.loads(label("ada", "a", pair="no such")[1])["message"]
        assert "chosen" not in json.loads(label("ada", "o")[1])  # nothing says which one was chosen before
        assert urlopen(f"{base}api/labels?format=unpaired").read().count(b"\n") == 2 * (
            kept[0]["verdict"] == kept[1]["verdict"]
        )
        assert post({"run": "", "request": "label", "who": "eve", "message": {}}, "wrong")[0] == 404
        assert "only look" in post({"run": "", "request": "label", "who": "eve", "message": {}}, "")[1]
        assert post({"run": "x", "request": "remark", "note": "hi"})[1].startswith("this address may look and label")
        for odd in (None, [], {"pair": 3, "key": ["a"]}, {"seconds": "x" * 99}, {"note": 7, "pair": "x"}):
            assert post({"run": "", "request": "label", "who": "ada", "message": odd})[0] == 200
        assert len((tmp_path / "pairs.labels.jsonl").read_text().splitlines()) == 2
    finally:
        server.shutdown()
        server.server_close()
