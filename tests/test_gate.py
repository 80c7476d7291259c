"""Whatever somebody changes in a model: log-probs are those of `model(...)`, fast path or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import rlhf_nb.fast.blocks as blocks
from rlhf_nb import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, RewardConfig, RewardTrainer
from rlhf_nb.core import ModelError
from rlhf_nb.data import toy
from rlhf_nb.fast.support import FAMILIES, can_run, distrust, fast_families, use_fast
from rlhf_nb.pipeline.doctor import check_speed
from rlhf_nb.run.log import read_metrics
from rlhf_nb.scoring.scores import completion_logps, completion_values
from rlhf_nb.types import Completions

torch.set_num_threads(1)
FIRST = "model.layers.0"


def build(kind: str = "llama", **over: Any) -> Any:
    """A tiny model in float64 whose random weights are large enough to matter."""
    shape: dict[str, Any] = dict(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    settings = {key: value for key, value in (shape | over).items() if value is not None}
    config = transformers.AutoConfig.for_model(kind, **settings)
    attention = {} if kind in ("big_bird", "xlm", "xlnet", "prophetnet") else {"attn_implementation": "sdpa"}
    model = transformers.AutoModelForCausalLM.from_config(config, **attention).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def rows(*shape: tuple[int, tuple[int, ...]]) -> Completions:
    """Prompts of a length, each with answers of several lengths."""
    g = torch.Generator().manual_seed(1)
    draw = lambda n: torch.randint(3, 60, (n,), generator=g).tolist()
    prompts, answers = [], []
    for p, lens in shape or ((7, (4, 5)), (9, (2, 6, 3)), (3, (1,))):
        prompt = draw(p)
        for n in lens:
            prompts.append(prompt)
            answers.append(draw(n))
    return Completions.from_lists(prompts, answers)


def plain(model: Any, c: Completions) -> Tensor:
    """Log-probs from `model(...)`, one row at a time, without any padding."""
    out = torch.zeros(c.completion_ids.shape, dtype=torch.float64)
    for i in range(len(c)):
        prompt = c.prompt_ids[i][c.prompt_mask[i]]
        answer = c.completion_ids[i][: int(c.completion_lens[i])]
        logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1].double()
        out[i, : len(answer)] = torch.log_softmax(logits, -1).gather(1, answer[:, None])[:, 0]
    return out


class Wrapper(nn.Module):
    """A layer around a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return 0.7 * self.inner(*args, **kwargs)


class OwnForward(transformers.LlamaForCausalLM):
    """A language model with a bias on its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + torch.linspace(-1, 1, out.logits.shape[-1], dtype=out.logits.dtype)
        return out


def subclass(model: Any) -> None:
    model.__class__ = OwnForward


def louder(out: Any) -> Any:
    """1.3 times an output, whatever kind it is."""
    if isinstance(out, Tensor):
        return 1.3 * out
    if isinstance(out, tuple):
        return (1.3 * out[0], *out[1:])
    for key in ("logits", "last_hidden_state"):
        if key in out:
            out[key] = 1.3 * out[key]
    return out


def on_instance(at: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module = model.get_submodule(at)
        module.forward = lambda *args, real=module.forward, **kwargs: louder(real(*args, **kwargs))

    return change


def hook(at: str) -> Callable[[Any], None]:
    return lambda model: model.get_submodule(at).register_forward_hook(lambda module, args, out: louder(out))


def wrapper(model: Any) -> None:
    model.model.layers[0] = Wrapper(model.model.layers[0])


def of_subclass(at: str) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        module = model.get_submodule(at)
        real = type(module).forward
        forward = lambda self, *args, **kwargs: louder(real(self, *args, **kwargs))
        module.__class__ = type("Other", (type(module),), {"forward": forward})

    return change


def on_class(model: Any) -> None:
    """Undone by `restored`."""
    mlp = type(model.model.layers[0].mlp)
    real = mlp.forward
    mlp.forward = lambda self, x: 1.3 * real(self, x)


CHANGES: dict[str, Callable[[Any], None]] = {
    "subclass with its own forward": subclass,
    **{f"forward on the instance: {at or 'model'}": on_instance(at) for at in ("", "lm_head", "model", FIRST, f"{FIRST}.self_attn", f"{FIRST}.mlp")},
    "hook on the model": hook(""),
    "hook on lm_head": hook("lm_head"),
    "layer in a wrapper": wrapper,
    "attention subclass": of_subclass(f"{FIRST}.self_attn"),
    "MLP subclass": of_subclass(f"{FIRST}.mlp"),
    "forward of the MLP class": on_class,
    "forward on the instance: norm": on_instance("model.norm"),
    "forward on the instance: rotary": lambda m: setattr(m.model.rotary_emb, "forward", lambda x, position_ids, real=m.model.rotary_emb.forward: real(x, 2 * position_ids)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    real = mlp.forward
    yield
    mlp.forward = real


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_are_scored_as_they_are(name: str, fast: bool) -> None:
    model, c = build(), rows()
    before = plain(model, c)
    assert can_run(model) is None
    CHANGES[name](model)
    want = plain(model, c)
    assert (want - before).abs().max() > 0.01  # a change that changes something
    assert isinstance(can_run(model), str)
    with torch.no_grad(), use_fast(fast):
        for share in (True, False):
            got = completion_logps(model, c, share_prompts=share).logps
            torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CHANGES)
def test_gradients_of_changed_models(name: str) -> None:
    model, c = build(), rows()
    CHANGES[name](model)
    weights = torch.randn(c.completion_ids.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = []
    for logps in (plain(model, c), completion_logps(model, c).logps):
        model.zero_grad()
        (logps * weights).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_hook_added_between_two_calls_is_seen() -> None:
    model, c = build(), rows()
    with torch.no_grad():
        completion_logps(model, c)
        handle = model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: 2 * out)
        torch.testing.assert_close(completion_logps(model, c).logps, plain(model, c), rtol=0, atol=1e-6)
        handle.remove()
        assert can_run(model) is None
        torch.testing.assert_close(completion_logps(model, c).logps, plain(model, c), rtol=0, atol=1e-6)


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    with use_fast(False):
        assert "switched off" in str(can_run(model))
    assert can_run(model) is None
    monkeypatch.setenv("RLHF_NB_FAST", "0")
    assert "switched off" in str(can_run(model))
    monkeypatch.undo()
    distrust(model, "it was found to differ")
    assert can_run(model) == "it was found to differ" and can_run(build()) is None


@pytest.mark.parametrize("share", [True, False, "always"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_angles_that_depend_on_the_longest_row(kind: str, share: Any) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0],
            "original_max_position_embeddings": 16,
        }
    model = build(rope_parameters=rope, max_position_embeddings=64 if kind == "longrope" else 16)
    assert kind in str(can_run(model))
    short, mixed = rows((7, (4, 5)), (6, (3, 3, 2))), rows((9, (3, 12)), (4, (2, 20)), (12, (9, 7)))
    with torch.no_grad():
        torch.testing.assert_close(
            completion_logps(model, short, share_prompts=share).logps, plain(model, short), rtol=0, atol=1e-6
        )
        if kind == "longrope":
            torch.testing.assert_close(
                completion_logps(model, mixed, share_prompts=share).logps, plain(model, mixed), rtol=0, atol=1e-6
            )
        else:
            with pytest.raises(ModelError, match="dynamic"):
                completion_logps(model, mixed, share_prompts=share)


BERTS = (
    "bert",
    "roberta",
    "xlm-roberta",
    "camembert",
    "ernie",
    "big_bird",
    "data2vec-text",
    "xlm",
    "xlnet",
    "prophetnet",
    "opt",
    "bart",
)


@pytest.mark.parametrize("kind", BERTS)
def test_heads_that_do_more_than_a_matrix(kind: str) -> None:
    over: dict[str, Any] = {"max_position_embeddings": 80}
    if kind in ("xlm", "xlnet"):
        over |= dict(d_head=8, max_position_embeddings=None) if kind == "xlnet" else {}
    elif kind == "prophetnet":
        over |= dict(num_hidden_layers=None, num_attention_heads=None, num_encoder_layers=2, num_decoder_layers=2)
        over |= dict(
            num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48
        )
    elif kind in ("opt", "bart", "prophetnet"):
        over |= dict(
            ffn_dim=48,
            word_embed_proj_dim=32,
            decoder_layers=2,
            encoder_layers=2,
            decoder_ffn_dim=48,
            num_decoder_layers=2,
        )
    else:
        over |= dict(is_decoder=True)
    model, c = build(kind, **over), rows()
    try:
        with torch.no_grad():
            got = completion_logps(model, c).logps
    except ModelError as e:
        assert len(str(e)) > 40
        return
    with torch.no_grad():
        torch.testing.assert_close(got, plain(model, c), rtol=0, atol=1e-6)


def test_a_value_head_beside_logits_that_are_not_split() -> None:
    model, c = build(), rows()
    head = nn.Linear(32, 1).double()
    with torch.no_grad():
        want = completion_values(model.model, head, c)
        hook("")(model)
        got = completion_logps(model, c, value_head=head)
    torch.testing.assert_close(got.values, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(got.logps, plain(model, c), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["dpo", "moving", "ppo", "grpo"])
def test_a_run_that_found_wrong_log_probs_computes_all_its_models_plainly_and_so_does_its_resumption(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(steps: int) -> Any:
        same: dict[str, Any] = {"steps": steps, "epochs": None, "device": "cpu", "console": False, "mini_batch_size": 4}
        model, tokenizer = toy.build_model(size="tiny"), toy.build_tokenizer()
        if name in ("dpo", "moving"):
            config: Any = DPOConfig.preset("toy", **same, reference="moving" if name == "moving" else "frozen")
            rows = toy.preference_rows(16)
            return DPOTrainer(config, model, tokenizer, rows=rows, eval_rows=[], run_dir=tmp_path)
        draws = {"sampling": {"max_new_tokens": 4}, "rollout_batch_size": 4, "kl_coef": 0.1}
        kind, trainer = (PPOConfig, PPOTrainer) if name == "ppo" else (GRPOConfig, GRPOTrainer)
        config = kind.preset("toy", **same, **draws, **({} if name == "ppo" else {"num_generations": 2}))
        rows = toy.train_prompts(16)
        return trainer(config, model, tokenizer, toy.gold_reward, rows, [], run_dir=tmp_path)

    monkeypatch.setattr(blocks, "rotate", lambda x, cos, sin, real=blocks.rotate: real(x, cos, -sin))
    build(1).fit()
    again = build(2)
    again.fit(resume=True)
    checked = [e["checked"]["reason"] for e in read_metrics(tmp_path) if e["type"] in ("start", "resume")]
    assert len(checked) == 2 and all("differ from model(...)" in reason for reason in checked)
    decoders = [m for net in again.method.models() for m in net.modules() if type(m).__name__ == "LlamaModel"]
    assert len(decoders) >= (3 if name == "ppo" else 2) and all(can_run(d) is not None for d in decoders)


@pytest.mark.parametrize("broken", [False, True], ids=["right", "broken"])
def test_reward_models_check_their_scores_and_go_on_plainly(
    broken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken:
        monkeypatch.setattr(blocks, "rotate", lambda x, cos, sin, real=blocks.rotate: real(x, cos, -sin))
    same: dict[str, Any] = {"steps": 1, "epochs": None, "device": "cpu", "console": False, "mini_batch_size": 4}
    config = RewardConfig.preset("toy", **same, ensemble_size=2)
    trainer = RewardTrainer(config, rows=toy.preference_rows(16), eval_rows=[], run_dir=tmp_path)
    trainer.fit()
    checked = next(e["checked"] for e in read_metrics(tmp_path) if e["type"] == "start")
    decoders = [m.decoder for m in trainer.method.members]
    assert len(decoders) == 2 and (checked["scorer"] > checked["bound"]) is broken
    assert all((can_run(d) is not None) is broken for d in decoders)


def test_every_known_family_is_fast_with_the_installed_transformers() -> None:
    """A release with another text of these models would lose the speed: this test and the doctor say so."""
    slow = [name for name, fast in fast_families().items() if not fast]
    assert len(fast_families()) == len(FAMILIES)
    assert not slow, (
        f"transformers {transformers.__version__} writes {', '.join(slow)} in a way that fast.support.VERIFIED doesn't list: read what changed, "
        "run this file and the sweep with that release, and add what `python .ci/fast_table.py` prints"
    )
    assert [f.level for f in check_speed()] == ["ok"]


def test_the_doctor_names_families_that_lost_their_speed() -> None:
    (finding,) = check_speed({"Llama": False, "Qwen2": True, "GPT2": False})
    assert (
        finding.level == "warning" and "writes Llama, GPT2 in a way" in finding.what and "Qwen2 are fast" in finding.why
    )
