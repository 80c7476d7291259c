"""Nothing that a stranger has written ends a run, runs as code, or gets past the one place that reads it."""

from __future__ import annotations

import ast
import json
import os
import pickle
import stat
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fuzz
import pytest
import torch
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.config import ModelConfig
from rlhf_nb.core import ModelError, RlhfError, decide_precision
from rlhf_nb.data import toy
from rlhf_nb.data.formats import DataWarning
from rlhf_nb.data.readers import read_rows
from rlhf_nb.data.sources import tokenize_sft
from rlhf_nb.models.heads import RewardModel, ScalarHead, ValueModel
from rlhf_nb.models.load import load_causal_lm, load_model, load_tokenizer
from rlhf_nb.run.control import RunControl
from rlhf_nb.run.log import read_metrics
from rlhf_nb.scale.launch import launch
from rlhf_nb.train.dpo import DPOConfig
from rlhf_nb.train.offline import make_reference
from rlhf_nb.train.online import load_reward
from rlhf_nb.train.ppo import PPOConfig
from rlhf_nb.train.rlaif import RLAIFConfig, make_judge

ROOT = Path(__file__).resolve().parent.parent
runner = CliRunner()


# --- one home for each dangerous call ---------------------------------------------------------------------------------------------

HOMES = {  # what reads foreign bytes -> the modules that may call it
    "json.loads": {"untrusted", "run.strategies", "cli.settings", "data.foreign", "aliases", "run.roles"},  # in the child of `data.foreign`; a variable that `launch` sets; the package's own facts.json; what ranks of one job say
    "json.load": set(), "yaml.load": {"untrusted", "aliases"},  # the latter: the package's own trl.yaml
    "yaml.safe_load": set(), "yaml.full_load": set(), "yaml.unsafe_load": set(),
    "pickle.load": {"learn.checks"},  # in the child that runs a submission: what its parent wrote
    "pickle.loads": {"rollout.workers", "rollout.ray"},  # between a run and the processes that it started itself
    "torch.load": set(), "dill.load": set(), "dill.loads": set(),
    "_dill().loads": {"scale.launch"}, "eval": set(), "exec": {"sandbox.inside", "learn.checks"},  # both behind the same fence
}  # fmt: skip


def calls(tree: ast.AST) -> list[str]:
    """What a module calls by one of these names, as it is written."""
    last = {"apply_chat_template", *(name.rpartition(".")[2] for name in HOMES)}
    made = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [ast.unparse(f) for f in made if getattr(f, "attr", getattr(f, "id", "")) in last]


def strays(trees: dict[str, ast.AST]) -> list[str]:
    """Calls that read foreign bytes outside their home, and models that are loaded past `models.load.pretrained`."""
    found = []
    for module, tree in trees.items():
        for c in calls(tree):
            if (c in HOMES and module not in HOMES[c]) or c.endswith(
                ".apply_chat_template"
            ):  # `render_chats` has limits
                found.append(f"{module}: {c}")
        for n in ast.walk(tree):
            if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "from_pretrained":
                words = {k.arg for k in n.keywords}
                own = "PeftModel" in ast.unparse(n.func) or "LoraConfig" in ast.unparse(
                    n.func
                )  # their folder went through find_model
                saved = "use_safetensors" in words and "folder" in ast.unparse(
                    n
                )  # what was written a moment ago is read back
                if "trust_remote_code" not in words and not own and not saved:
                    found.append(f"{module}: {ast.unparse(n)[:80]}")
    return found


def test_foreign_bytes_have_one_home() -> None:
    package = ROOT / "rlhf_nb"
    trees: dict[str, ast.AST] = {
        ".".join(p.relative_to(package).with_suffix("").parts): ast.parse(p.read_text(encoding="utf-8"))
        for p in package.rglob("*.py")
    }
    assert not strays(trees)
    bad = "import json, torch\njson.loads(x)\ntorch.load(x)\nAutoModel.from_pretrained(x)\nyaml.safe_load(x)"
    assert len(strays({"models.heads": ast.parse(bad)})) == 4, "the rule can't fail"


# --- fuzz -------------------------------------------------------------------------------------------------------------------------


def test_a_few_hundred_damaged_files() -> None:
    done, faults = fuzz.campaign(300, seed=7)
    assert not faults, "\n".join(faults)
    assert len(done) == len(fuzz.TARGETS)


@pytest.mark.parametrize(
    ("name", "number"),
    [("adapter", 1), ("config.yaml", 258), ("pairs.jsonl", 750), ("pairs.jsonl", 1097), ("pairs.jsonl", 1351)],
)
def test_what_twenty_thousand_files_found(name: str, number: int, tmp_path: Path) -> None:
    """A path of megabytes, many values of YAML, a role that is a list, a number beyond floats: five cases of seed 2711."""
    fuzz.prepare(tmp_path)
    assert not fuzz.case(name, number, 2711)


def test_what_ten_thousand_files_found_later(tmp_path: Path) -> None:
    """A message that names twenty thousand keys, and values of YAML that take five seconds: two cases of seed 2712."""
    fuzz.prepare(tmp_path)
    assert not fuzz.case("pairs.jsonl", 476, 2712) and not fuzz.case("config.yaml", 41, 2712)


def test_fuzzing_can_find_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(folder: Path, data: bytes) -> None:
        [json.loads(line)["request"] for line in data.splitlines() if line]

    monkeypatch.setitem(fuzz.TARGETS, "control.jsonl", fuzz.TARGETS["control.jsonl"]._replace(read=careless))
    assert len(fuzz.campaign(40, only="control")[1]) > 5


def test_the_limit_of_a_case_is_cpu_time_and_a_case_that_waits_ends_too() -> None:
    with fuzz.limited(0.2):
        time.sleep(0.5)  # another process has the core: no fault
    with pytest.raises(fuzz.TooLong, match="CPU time"), fuzz.limited(0.2):
        while True:
            sum(range(1000))
    with pytest.raises(fuzz.TooLong, match="waits"), fuzz.limited(0.2, wall=0.5):
        time.sleep(20)


@pytest.mark.slow
def test_thousands_of_damaged_files() -> None:
    assert not fuzz.campaign(4000, seed=8)[1]


# --- a run and its folder ---------------------------------------------------------------------------------------------------------

HOSTILE = [b"[" * 100_000, b'{"\\ud83d": 1, "request": "set", "key": "\\udc00"}', b'{"request": "set", "key": "' + b"k" * 20_000_000 + b'"}', b"\xff\xfe\x00",
           b'{"id": [1], "request": {"a": 1}}', b'{"served": [1]}', b'{"id": "x", "request": "set", "key": "lr", "value": ' + b"9" * 400 + b"}"]  # fmt: skip


def sft(folder: Path, *words: str, code: int = 0) -> str:
    """A tiny run of SFT, or its resumption."""
    options = [f"output_dir={folder}", "mini_batch_size=4", "save_every=2", "async_save=false", "eval_size=0"]
    done = runner.invoke(app, ["sft", "--toy", *[o for o in options if "eval" not in o], *words])
    assert done.exit_code == code, done.output
    return done.output


def test_hostile_lines_end_no_run_and_block_no_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "control.jsonl").write_bytes(b"\n".join(HOSTILE) + b"\n")
    begin = time.monotonic()
    sft(run, "steps=2")
    with open(run / "metrics.jsonl", "ab") as f:
        f.write(HOSTILE[0] + b'\n5\n{"step": {}}\n{"step": 1' + b"0" * 400 + b"}\n")
    with open(run / "control.jsonl", "ab") as f:
        f.write(b"\n".join(HOSTILE) + b"\n")
    (run / "config.yaml").write_bytes(b"a: &a [*a]\n" + b"[" * 100_000)
    sft(run, "steps=4", "--resume")
    assert time.monotonic() - begin < 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the log is whole again
        events = read_metrics(run)
    assert [e["step"] for e in events if e["type"] == "step"] == [1, 2, 3, 4]
    refused = [e for e in events if e["type"] == "control"]
    assert len(refused) >= len(HOSTILE) and not any(e["ok"] for e in refused)
    assert (run / "metrics.jsonl").stat().st_size < 200_000, "the log repeats no line of megabytes"
    assert any("can't be read" in " ".join(e.get("changed", ())) for e in events if e["type"] == "resume")


def test_a_key_of_a_hundred_megabytes_is_answered_at_once(tmp_path: Path) -> None:
    run = fuzz.Paper(tmp_path)
    (tmp_path / "control.jsonl").write_bytes(b'{"request": "set", "key": "' + b"k" * 100_000_000 + b'", "value": 1}\n')
    begin, steering = time.monotonic(), RunControl(run)
    assert steering.waiting()
    from types import SimpleNamespace

    steering.serve(SimpleNamespace(requested=""))  # type: ignore[arg-type]
    assert time.monotonic() - begin < 3
    [event] = read_metrics(tmp_path)
    assert not event["ok"] and "100,000,0" in event["why"] and (tmp_path / "metrics.jsonl").stat().st_size < 1000


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_half_a_character_is_counted_named_and_replaced(name: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"Visitor: {i}?\nPip:", "completion": " Owls sleep."} for i in range(20)]
    rows[7]["completion"] = rows[9]["completion"] = " Yes \ud83d"
    path = tmp_path / name
    if name.endswith("csv"):
        path.write_text("messages\n" + "".join('"[{""role"": ""user"", ""content"": ""a""}, {""role"": ""assistant"", ""content"": ""b' + ("\\ud83d" if i in (7, 9) else "") + '""}]"\n' for i in range(20)))  # fmt: skip
    else:
        path.write_text(json.dumps(rows) if name.endswith("json") else "".join(json.dumps(r) + "\n" for r in rows))
    with pytest.warns(DataWarning, match="2 rows hold half of a character.*the first is row 7"):
        found = read_rows(path)
    assert len(found) == 20 and "\ufffd" in str(found[7]) and "\ud83d" not in str(found)
    with pytest.warns(DataWarning, match="2 rows hold half"):
        assert len(tokenize_sft(rows, toy.build_tokenizer())) == 20, "rows in memory, too"


def test_sft_and_doctor_say_which_row_holds_half_a_character(tmp_path: Path) -> None:
    rows = [{k: r[k] for k in ("prompt", "completion")} for r in toy.sft_rows(40)]
    rows[5]["completion"] += "\udc00"
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in rows))
    said = sft(tmp_path / "run", "steps=2", f"data.path={data}")
    assert "1 row holds half of a character" in said and "row 5" in said
    looked = runner.invoke(app, ["doctor", "sft", "--toy", f"data.path={data}", f"output_dir={tmp_path / 'x'}"])
    assert looked.exit_code == 0 and "surrogate" in looked.output and "first is row 5" in looked.output, looked.output


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_bombs_in_a_config_are_refused_at_once(suffix: str, tmp_path: Path) -> None:
    names = "abcdefghij"
    bomb = f"{names[0]}: &{names[0]} [x, x]\n" + "".join(
        f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip(names, names[1:])
    )
    deep = "[" * 100_000
    twins = "{" + ", ".join(f'"k{i}": 1' for i in range(20_000)) + "}"
    for text in (deep, twins, "x" * 10_000_000, *([bomb] if suffix == "yaml" else ())):
        path = tmp_path / f"c.{suffix}"
        path.write_text(text)
        begin = time.process_time()
        done = runner.invoke(app, ["sft", "--config", str(path)])
        assert done.exit_code == 1 and "Error: " in done.output and time.process_time() - begin < 5
        assert len(done.output) < 20_000


# --- models that others have made -------------------------------------------------------------------------------------------------

MARK = "RLHF_NB_RAN"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked on the terminal, where somebody answers yes to everything."""
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text="": questions.append(text) or "y")
    monkeypatch.delenv(MARK, raising=False)
    return questions


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and a reward model, of our own."""
    folder = tmp_path_factory.mktemp("own")
    fuzz.prepare(folder)
    return folder


def with_code(folder: Path, source: Path, kind: str = "LlamaForCausalLM") -> Path:
    """A copy of a model that brings Python code of its own."""
    import shutil

    shutil.copytree(source, folder)
    (folder / "own.py").write_text(
        f"import os\nos.environ[{MARK!r}] = 'yes'\nfrom transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, LlamaModel, PreTrainedTokenizerFast\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\nclass OwnLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
        "class OwnScore(LlamaForSequenceClassification):\n    config_class = OwnConfig\nclass OwnModel(LlamaModel):\n    config_class = OwnConfig\n"
    )
    settings = json.loads((folder / "config.json").read_text())
    auto = {
        "AutoConfig": "own.OwnConfig",
        "AutoModel": "own.OwnModel",
        "AutoModelForCausalLM": "own.OwnLM",
        "AutoModelForSequenceClassification": "own.OwnScore",
    }
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "own", "auto_map": auto}))
    return folder


def roles(model: Path, reward: Path, trust: bool) -> dict[str, Callable[[], Any]]:
    """Every role in which a run loads somebody's folder."""
    precision, tokenizer = decide_precision("cpu"), load_tokenizer(ModelConfig(name_or_path="toy"))
    place = ModelConfig(name_or_path=str(model), trust_remote_code=trust)
    ensemble = reward.parent / f"{reward.name}-ensemble"
    if not ensemble.exists():
        ensemble.mkdir()
        (ensemble / "member-0").symlink_to(reward)
    ppo = PPOConfig.preset("toy").replace(model={"trust_remote_code": trust})
    dpo = DPOConfig.preset("toy").replace(model={"trust_remote_code": trust}, reference_model=str(model))
    judge = RLAIFConfig.preset("toy").replace(model={"trust_remote_code": trust}, judge={"model": str(model)})
    return {
        "policy": lambda: load_causal_lm(place, precision),
        "reference": lambda: make_reference(
            dpo, None, load_tokenizer(ModelConfig(name_or_path=str(model), trust_remote_code=trust)), True
        ),
        "reward": lambda: load_reward(ppo.replace(reward=str(reward))),
        "ensemble": lambda: load_reward(ppo.replace(reward=str(ensemble))),
        "critic": lambda: ValueModel.load(reward, trust_remote_code=trust),
        "reward by hand": lambda: RewardModel.load(reward, trust_remote_code=trust),
        "judge": lambda: make_judge(judge),
        "doctor": lambda: __import__("rlhf_nb.pipeline.doctor", fromlist=["load_start"]).load_start(place),
        "tokenizer": lambda: load_tokenizer(place) and tokenizer,
    }


ROLES = ["policy", "reference", "reward", "ensemble", "critic", "reward by hand", "judge", "doctor"]


@pytest.mark.parametrize("role", ROLES)
def test_no_role_runs_foreign_code_or_asks(role: str, tmp_path: Path, own: Path, asked: list[str]) -> None:
    model, reward = with_code(tmp_path / "m", own / "model"), with_code(tmp_path / "r", own / "reward")
    with pytest.raises(ModelError, match="trust_remote_code=true"):
        roles(model, reward, False)[role]()
    assert not asked and MARK not in os.environ


def test_foreign_code_runs_where_it_is_trusted(tmp_path: Path, own: Path, asked: list[str]) -> None:
    """So the tests above can fail."""
    model, reward = with_code(tmp_path / "m", own / "model"), with_code(tmp_path / "r", own / "reward")
    roles(model, reward, True)["policy"]()
    assert os.environ.pop(MARK) == "yes" and not asked
    roles(model, reward, True)["reward"]()


class Payload:
    """A pickle that leaves a mark when it is opened."""

    def __reduce__(self) -> Any:
        return os.putenv, (MARK, "yes")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "model.pt", "indexed"])
def test_no_role_opens_a_pickle(
    role: str, name: str, tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("a pickle was opened"))
    folders = []
    for kind in ("model", "reward"):
        folder = tmp_path / kind
        shutil.copytree(own / kind, folder)
        for f in folder.glob("*.safetensors"):
            f.unlink()
        if name == "adapter_model.bin":
            (folder / "adapter_config.json").write_text(
                json.dumps({"base_model_name_or_path": str(own / "model"), "peft_type": "LORA", "r": 2})
            )
        if name == "indexed":
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {"model.norm.weight": "part.bin"}})
            )
            shutil.copy(own / kind / "model.safetensors", folder / "other.safetensors")
        (folder / ("part.bin" if name == "indexed" else name)).write_bytes(pickle.dumps(Payload()))
        folders.append(folder)
    with pytest.raises(ModelError, match="can run code when opened"):
        roles(*folders, False)[role]()


def test_a_model_too_large_to_build_is_refused_at_once(tmp_path: Path, own: Path) -> None:
    import shutil

    for key, number in (
        ("num_hidden_layers", 2**30),
        ("num_labels", 10**9),
        ("vocab_size", 10**9),
        ("hidden_size", 2**40),
    ):
        folder = tmp_path / key
        shutil.copytree(own / "reward", folder)
        settings = json.loads((folder / "config.json").read_text()) | {key: number}
        (folder / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ModelError, match=key):
            RewardModel.load(folder)


# --- files that are no files, names that are expressions, programs inside a folder -------------------------------------------------


def load_policy(folder: Path | str) -> Any:
    """A folder as the policy of a run."""
    return load_causal_lm(ModelConfig(name_or_path=str(folder)), decide_precision("cpu"))


def load_words(folder: Path | str) -> Any:
    """A folder's tokenizer."""
    return load_tokenizer(ModelConfig(name_or_path=str(folder)))


def text_files(folder: Path) -> list[str]:
    """Names of what a model's folder holds, and of what libraries would read if it were there."""
    more = [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.model",
        "merges.txt",
        "vocab.json",
        "adapter_config.json",
    ]
    return sorted({*(p.name for p in folder.iterdir()), *more, "model.safetensors.index.json", "added_tokens.json"})


def no_file(kind: str, place: Path, victim: Path) -> None:
    """Put something that is no file of the folder at a place."""
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "huge":
        with place.open("wb") as f:
            f.truncate(1 << 40)
    else:
        place.symlink_to({"device": "/dev/zero", "link out": victim, "link nowhere": "gone"}[kind])


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "link out", "link nowhere", "huge"])
def test_what_is_no_file_in_a_models_folder_is_refused_at_once(kind: str, tmp_path: Path, own: Path) -> None:
    import shutil

    victim = tmp_path / "victim.json"
    victim.write_text("{}")
    for name in text_files(own / "model"):
        if kind == "huge" and name.endswith(".safetensors"):
            continue  # safetensors itself compares the size with the table
        folder = tmp_path / f"model-{name}"
        shutil.copytree(own / "model", folder)
        no_file(kind, folder / name, victim)
        for load in (load_policy, load_words, RewardModel.load):
            with pytest.raises(ModelError, match="can't be read as a part of a model"), fuzz.limited(fuzz.SECONDS):
                load(folder)


@pytest.mark.parametrize(
    "name", ["README.md", "notes.md", "run.yaml", "picture.png", "LICENSE", ".env", "more/notes.md"]
)
def test_no_link_in_a_models_folder_is_copied_or_published(name: str, tmp_path: Path, own: Path) -> None:
    """Names that no library reads, but that go along when the folder is sent to the hub or becomes a version."""
    import shutil

    from rlhf_nb.feedback.versions import Versions, add_version
    from rlhf_nb.hub.push import push_to_hub

    secret = tmp_path / "home" / "secret.md"
    secret.parent.mkdir()
    secret.write_text("dear-diary")
    folder = tmp_path / "m"
    shutil.copytree(own / "model", folder)
    if "/" in name:
        (folder / "more").symlink_to(secret.parent)
    else:
        (folder / name).symlink_to(secret)
    for act in (
        lambda: push_to_hub(folder, "me/m", dry_run=tmp_path / "sent"),
        lambda: add_version(Versions(tmp_path / "versions"), folder, "try"),
    ):
        with suppress(ModelError):
            act()
    copied = [
        p for p in tmp_path.rglob("*") if p.is_file() and "home" not in p.parts and tmp_path / "m" not in p.parents
    ]
    assert not [p for p in copied if b"dear-diary" in p.read_bytes()]


def test_a_folder_of_the_hubs_cache_is_read(tmp_path: Path, own: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "abc", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    for i, file in enumerate(sorted((own / "model").iterdir())):
        (blobs / str(i)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    load_causal_lm(ModelConfig(name_or_path=str(snapshot)), decide_precision("cpu"))


NAMING = ["target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern", "target_parameters"]  # fmt: skip


def adapter(folder: Path, **settings: Any) -> Path:
    """A folder that looks like an adapter's."""
    from safetensors.torch import save_file

    folder.mkdir()
    usual = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "base_model_name_or_path": "toy"}
    (folder / "adapter_config.json").write_text(json.dumps(usual | settings))
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("key", NAMING)
def test_an_adapter_names_layers_by_names(key: str, tmp_path: Path, own: Path) -> None:
    from rlhf_nb.models.heads import read_adapter
    from rlhf_nb.models.shards import ModelTensors

    bad = "(([a-z._0-9]*)*)*!!!"
    value: Any = (
        {bad: 4} if key.endswith("rank_pattern") or key == "alpha_pattern" else bad if "modules" in key else [bad]
    )
    folder = adapter(tmp_path / "a", base_model_name_or_path=str(own / "model"), **{key: value})
    for load in (load_policy, RewardModel.load, ValueModel.load, read_adapter, ModelTensors):
        with pytest.raises(ModelError, match="layers are named by letters"), fuzz.limited(fuzz.SECONDS):
            load(folder)


def test_adapters_in_a_circle(tmp_path: Path) -> None:
    from rlhf_nb.models.shards import ModelTensors

    one = adapter(tmp_path / "one", base_model_name_or_path=str(tmp_path / "two"))
    adapter(tmp_path / "two", base_model_name_or_path=str(tmp_path / "one"))
    self = adapter(tmp_path / "self", base_model_name_or_path=str(tmp_path / "self"))
    for folder in (one, self):
        for load in (load_policy, load_words, load_model, ModelTensors):
            with pytest.raises(ModelError, match="an adapter itself"):
                load(str(folder))


def test_a_tokenizers_rules_are_tried_before_it_is_used(tmp_path: Path, own: Path) -> None:
    import shutil

    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    rules = {
        "nested": {"pre_tokenizer": split | {"pattern": {"Regex": "(a+)+$"}}},
        "polynomial": {"pre_tokenizer": split | {"pattern": {"Regex": r"\w*\w*\w*;"}}},
        "doubling": {
            "normalizer": {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
            }
        },
    }
    for name, rule in rules.items():
        folder = tmp_path / name
        shutil.copytree(own / "model", folder)
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | rule))
        with pytest.raises(ModelError, match="trust_remote_code=true takes it"):
            load_tokenizer(ModelConfig(name_or_path=str(folder)))
        if name == "nested":  # so the test can fail
            load_tokenizer(ModelConfig(name_or_path=str(folder), trust_remote_code=True))


def test_a_template_runs_in_a_child_with_limits(tmp_path: Path, own: Path) -> None:
    import shutil

    from rlhf_nb.core import DataError
    from rlhf_nb.data.templates import encode_chat, encode_prompts

    folder = tmp_path / "m"
    shutil.copytree(own / "model", folder)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(
        "{% if messages | length > 1 %}" + loop + "{% endif %}{{ messages[0].content }}"
    )
    tok = load_tokenizer(ModelConfig(name_or_path=str(folder)))
    short = [{"role": "user", "content": "Where do owls live?"}]
    assert encode_prompts(tok, [short])[0]
    for encode in (encode_prompts, encode_chat):
        with pytest.raises(DataError, match="s of CPU"), fuzz.limited(fuzz.SECONDS, wall=600):
            encode(tok, [short * 2] if encode is encode_prompts else short * 2)
    assert encode_prompts(tok, [short])[0]


# --- the launcher's pickles -------------------------------------------------------------------------------------------------------


def what_lies_around(run: str) -> dict[str, Any]:
    """On a rank: pickles in the run's folder, and who may read the call."""
    private = Path(os.environ["RLHF_NB_CALL"])
    return {
        "shared": [p.name for p in Path(run).rglob("*.pkl")],
        "private": str(private),
        "modes": [oct(stat.S_IMODE(p.stat().st_mode)) for p in (private, private / "call.pkl")],
    }


def test_a_launch_leaves_no_pickle_that_others_could_write(tmp_path: Path) -> None:
    found = launch(
        what_lies_around, str(tmp_path / "run"), num_processes=1, run_dir=tmp_path / "run", device="cpu", say=None
    ).value
    assert found["shared"] == [] and found["modes"] == ["0o700", "0o600"]
    assert not Path(found["private"]).exists() and not list(tmp_path.rglob("*.pkl"))


def test_errors_of_the_package_are_all_of_one_family() -> None:
    assert issubclass(ModelError, RlhfError) and ScalarHead
