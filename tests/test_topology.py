"""The planner: limits, monotony, agreement with what training really makes, and one measured peak."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import patience
import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from rlhf_nb.cli.main import app
from rlhf_nb.config import LoraSettings
from rlhf_nb.core import ConfigError, ModelError, decide_precision
from rlhf_nb.models.adapters import add_lora
from rlhf_nb.scale import topology
from rlhf_nb.scale.plan import ASSUMPTIONS, plan, plan_table, sent_per_step, smallest_group
from rlhf_nb.scale.predict import Machine, named_gpu, plan_report, predict_step
from rlhf_nb.scale.topology import (
    MOMENTS,
    NUMBER_FORMATS,
    DecoderShape,
    Job,
    Split,
    decoder_shape,
    job_of,
    predict_memory,
    row_tokens,
)
from rlhf_nb.train.registry import get, methods

ROOT = Path(__file__).resolve().parent.parent
BIG = DecoderShape(layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, head_dim=128, vocab=128_256, tied=False)
FAMILIES = {
    "llama": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4},
    "qwen2": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "mistral": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 1},
    "gpt_neox": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_the_real_model(family: str, tied: bool) -> None:
    config = AutoConfig.for_model(family, vocab_size=300, tie_word_embeddings=tied, **FAMILIES[family])
    model, shape = AutoModelForCausalLM.from_config(config), decoder_shape(config)
    assert shape.total == sum(p.numel() for p in model.parameters())
    adapted = add_lora(model, LoraSettings(r=3))
    assert shape.lora(3) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_config_json_is_read_as_the_model_s_code_would(family: str, tied: bool, tmp_path: Path) -> None:
    from rlhf_nb.scale import topology

    config = AutoConfig.for_model(family, vocab_size=300, tie_word_embeddings=tied, **FAMILIES[family])
    config.save_pretrained(tmp_path)
    plain = topology._plain_shape(tmp_path)
    assert (plain is None) is (family in ("qwen3", "gpt2", "gpt_neox"))
    assert decoder_shape(str(tmp_path)) == decoder_shape(config)


def test_a_directory_is_as_good_as_a_config(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", vocab_size=300, **FAMILIES["llama"])
    config.save_pretrained(tmp_path)
    assert decoder_shape(tmp_path) == decoder_shape(str(tmp_path)) == decoder_shape(config)
    with pytest.raises(ModelError, match=r"no directory with a config\.json"):
        decoder_shape(tmp_path / "nothing")


PLANNED = [name for name, method in methods().items() if method.leaves != "pairs"]


@pytest.mark.parametrize("method", PLANNED)
@pytest.mark.parametrize("lora", [None, 16])
def test_more_of_anything_never_needs_less(method: str, lora: int | None) -> None:
    job = Job(method, prompt=64, completion=64, mini_batch=1024, lora=lora)
    base = predict_memory(
        BIG, job
    ).peak  # (a step that becomes a single forward can need less: no gradients wait beside its activations)
    longer: dict[str, Any] = {"completion": 512, "token_budget": 8192}
    for more in ({"token_budget": 8192}, longer, {"mini_batch": 4096}):
        assert predict_memory(BIG, dataclasses.replace(job, **more)).peak >= base, more
    peaks = [predict_memory(BIG, job, Split(gpus=8, stage=s)).at("step") for s in (0, 1, 2)]
    assert peaks[0] > peaks[1]
    assert predict_memory(BIG, job, Split(gpus=64, stage=2)).at("step") < predict_memory(
        BIG, job, Split(gpus=8, stage=2)
    ).at("step")
    assert predict_memory(BIG, dataclasses.replace(job, recompute=True)).peak < base
    wider = dataclasses.replace(BIG, inner=2 * BIG.inner)
    assert predict_memory(wider, job).peak > base


def test_accounts_add_up() -> None:
    budget = predict_memory(BIG, Job("ppo"), Split(gpus=8, stage=3, overhead=1e9))
    for moment in MOMENTS:
        assert sum(budget.by_role(moment).values()) == pytest.approx(budget.at(moment))
    assert budget.peak == max(budget.at(m) for m in MOMENTS) == budget.at(budget.fullest)
    assert "keys and values" in budget.table() and f"{budget.peak / 2**30:.2f}" in budget.table()


def test_sharing_prompts_is_decided_as_the_packer_decides() -> None:
    import torch

    from rlhf_nb.scoring.trees import pack
    from rlhf_nb.types import Completions

    for prompt, completion in ((200, 20), (100, 50), (4, 60), (64, 64), (30, 90)):
        c = Completions.from_lists([[1] * prompt] * 2, [[2] * completion, [3] * completion])
        packed = pack(c, width=64, limit=10_000)
        n, k = row_tokens(Job("dpo", prompt=prompt, completion=completion, token_budget=10_000), 64)
        assert (k, n) == (int(torch.bincount(packed.tree).max()), packed.input_ids.shape[1]), (prompt, completion)


def test_plan_takes_the_least_that_fits() -> None:
    job = Job("dpo", prompt=512, completion=512, mini_batch=512)
    small = DecoderShape(layers=12, hidden=768, inner=2048, heads=12, kv_heads=12, head_dim=64, vocab=32_000)
    assert plan(small, job, gpus=8).split.stage == 0
    stages = [plan(BIG, job, gpus=n, host=400).split.stage for n in (8, 64, 512)]
    assert all(s >= 2 for s in stages)
    tight = plan(small, job, gpus=1, memory=12)
    assert tight.budget.peak <= 0.9 * 12 * 2**30 and tight.rows >= 1 and "GiB" in str(tight)
    assert smallest_group(BIG, plan(BIG, job, gpus=512, host=400)) <= 64
    assert sent_per_step(small, plan(small, job, gpus=8)) == pytest.approx(2 * 4 * small.total * 7 / 8)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(ConfigError, match=r"don't fit on 1 × 24 GiB.*adapters \(model.lora.r=16\)"):
        plan(BIG, Job("sft"), gpus=1, memory=24, host=8)
    with pytest.raises(ConfigError, match="some GPUs would have nothing to do"):
        plan(BIG, Job("sft", mini_batch=4), gpus=8)
    with pytest.raises(ConfigError, match="at least one GPU"):
        plan(BIG, Job("sft"), gpus=0)


def test_table_states_what_it_assumes() -> None:
    text = plan_table(BIG, Job("grpo", group=8, mini_batch=64), host=200)
    assert all(f"| {n} |" in text for n in ("1", "8", "512", "10,000"))
    assert all(a in text for a in ASSUMPTIONS) and "arithmetic" in text


@pytest.mark.parametrize("method", PLANNED)
def test_every_configuration_can_be_planned(method: str) -> None:
    from rlhf_nb.data import toy

    job = job_of(get(method).config.preset("toy"), decide_precision("cpu"))
    assert job.format == NUMBER_FORMATS["fp32"] and job.device == "cpu" and job.method == method
    assert 0 < predict_memory(toy.toy_model_config(), job).peak < 2e9


def test_what_is_held_follows_the_configuration() -> None:
    def held(method: str, **over: Any) -> tuple[str, ...]:
        return job_of(get(method).config.preset("toy", **over), decide_precision("cpu")).models

    assert held("ppo") == ("policy", "critic", "reference", "reward model")
    assert held("ppo", critic="shared", reward="gold") == ("policy", "reference")
    assert held("ppo", critic="hydra", model={"lora": {"r": 2}})[-1] == "reward adapter"
    assert held("dpo") == ("policy", "reference") and held("dpo", loss="simpo") == held("dpo", reference="cached") == (
        "policy",
    )
    assert held("kto", reference="cached") == held("sft") == ("policy",)
    assert held("grpo", kl_coef=0.1, reward="check") == ("policy", "reference") and held("grpo", reward="check") == (
        "policy",
    )
    assert held("reward", ensemble_size=3) == ("reward model",) * 3


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_prediction_against_a_measured_peak() -> None:
    done = patience.run([sys.executable, "benchmarks/check_topology.py", "--only", "SFT, all"], cpu=1200, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:]
    assert float(done.stdout.split()[-1].rstrip("%")) <= 15, done.stdout


@pytest.mark.parametrize(
    "wrong",
    [
        "flops: 0",
        "flops: .inf",
        "flops: .nan",
        "flops: 1.0e+300",
        "flops: fast",
        "flops: true",
        "links: 3.0e+9",
        "flops: -1.0e+12",
        "products: 1.5",
        *(f"{key}: 5.0e-324" for key in Machine._fields[1:]),
    ],
)
def test_a_machine_of_ones_own(wrong: str, tmp_path: Path) -> None:
    """Rates from a file are taken; a rate that is none is named, with what a machine has."""
    path = tmp_path / "mine.yaml"
    rates = dict.fromkeys(Machine._fields[1:], 2.0e12) | {"products": 0.5}
    path.write_text("\n".join(f"{k}: {v:.1e}" for k, v in rates.items()), encoding="utf-8")
    assert named_gpu(str(path)) == Machine("mine", **rates)
    key = wrong.split(":")[0]
    kept = [f"{k}: {v:.1e}" for k, v in rates.items() if k != key]
    path.write_text("\n".join([*kept, wrong]), encoding="utf-8")
    with pytest.raises(ConfigError, match=key):
        named_gpu(str(path))


ABSURD = [
    "--memory 0",
    "--memory -5",
    "--memory nan",
    "--memory inf",
    "--host -1",
    "--host nan",
    "--price -1",
    "--price nan",
    "--price inf",
]
ABSURD += [
    "--gpus 0",
    "--gpus -1",
    "--gpus 1.5",
    "--on h1000",
    "--on ''",
    "--memory 80GB",
]


@pytest.mark.parametrize("words", ABSURD)
def test_absurd_numbers_are_refused(words: str) -> None:
    """No table of nothing that fits, and no price without end: a sentence that names the option or the GPU."""
    typed = ["plan", "sft", "--toy", *([] if "--on" in words else ["--on", "h100"]), *shlex.split(words)]
    done = CliRunner().invoke(app, typed)
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.output)
    assert done.exit_code in (1, 2) and ("GPU" in said or words.split()[0] in said), said


def test_a_small_price_is_not_nothing() -> None:
    job, h100 = Job("dpo", 512, 512, token_budget=8192, mini_batch=512), named_gpu("h100")
    for price, cell in ((0.0, "0"), (1e-6, "e-"), (1e-3, "0."), (1e6, ",")):
        shown = plan_report(BIG, job, [64], h100, price=price).split("\n| 64 |")[-1].split("|")[-2].strip()
        assert cell in shown and (float(shown.replace(",", "")) > 0) == (price > 0), shown


def test_a_step_has_its_parts() -> None:
    """A method without answers of its own draws none; twice the GPUs halve the update; a link that is slower is waited for."""
    h100 = named_gpu("h100")
    job = Job("dpo", 512, 512, token_budget=8192, mini_batch=512)
    two, four = (predict_step(BIG, plan(BIG, job, n), h100) for n in (64, 128))
    assert two.generate == 0 and two.score > 0 and 0.4 < four.update / two.update < 0.6
    slow = predict_step(BIG, plan(BIG, job, 64), h100._replace(link=1e9))
    assert slow.wait > 10 * two.wait and slow[:3] == two[:3] and slow.slowest == "wait"


@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize(("gpus", "stage"), [(1, 0), (8, 1), (8, 2), (8, 3)])
def test_the_sums_of_system_design_md_are_the_planner_s(form: str, gpus: int, stage: Any) -> None:
    """The table of docs/system_design.md, term by term."""
    f, n = NUMBER_FORMATS[form], BIG.total
    job, split = Job(format=f, recompute=True), Split(gpus, stage)
    roles = topology.roles_of(BIG, job)
    terms = {(x.role, x.what): x.bytes for x in topology.weight_terms(roles, job, split, BIG)}
    own_copy = f.weight < 4 or stage > 0
    assert terms["policy", "weights"] == f.weight * n / (gpus if stage == 3 else 1)
    assert terms["optimizer", "Adam's numbers"] == (12 if own_copy else 8) * n / (gpus if stage else 1)
    waits = topology._gradients(roles, job, split)
    assert waits["waiting"] + waits["buffer"] == f.grad * n / (gpus if stage >= 2 else 1)
    one, many = (topology.activations(BIG, job, tokens) for tokens in (1, 100))
    kept = topology.layer_activations(BIG, job) + BIG.layers * BIG.hidden * f.residual  # one whole layer, inputs of all
    assert many == 100 * one == pytest.approx(100 * kept)
    assert topology.head_memory(BIG, job, 10) == 8 * 10 * BIG.vocab
    cache, rows = topology.sampling_memory(BIG, job, 1)["cache"], topology.cache_rows(BIG, job, 1)[0]
    assert cache == rows * (job.prompt + job.completion) * BIG.layers * 2 * BIG.kv_heads * BIG.head_dim * f.compute
