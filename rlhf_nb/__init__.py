"""RLHF you can read, run and ship: the public names, each imported when it is first used."""

__version__ = "0.2.0.dev0"

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hub.push import push_to_hub
    from .config import DataConfig, LoraSettings, ModelConfig, OptimizerConfig, SamplingConfig
    from .core import RlhfError
    from .data.readers import read_rows
    from .evaluate.policy import evaluate, win_rate
    from .judges.endpoint import EndpointJudge
    from .judges.judge import FunctionJudge
    from .judges.model import ModelJudge
    from .models.adapters import add_lora
    from .models.heads import RewardModel, ValueModel
    from .models.load import load_model, load_tokenizer, save_model
    from .models.process import ProcessModel
    from .rewards.base import Rewards
    from .rollout.sampler import draw
    from .run.callbacks import Callback, EarlyStop
    from .scale.launch import launch
    from .scoring.scores import logps
    from .train.dpo import DPOConfig, DPOTrainer
    from .train.grpo import GRPOConfig, GRPOTrainer
    from .train.kto import KTOConfig, KTOTrainer
    from .train.online_dpo import OnlineDPOTrainer
    from .train.pairs import OnlineDPOConfig
    from .train.ppo import PPOConfig, PPOTrainer
    from .train.process import ProcessConfig, ProcessTrainer
    from .train.reward import RewardConfig, RewardTrainer
    from .train.rloo import RLOOConfig, RLOOTrainer
    from .train.sft import SFTConfig, SFTTrainer
    from .widgets.dashboard import Dashboard
    from .widgets.reader import RunReader
    from .widgets.runs import Runs

# where each public name lives; the block above says the same to type checkers and editors
_HOMES = {
    "hub.push": "push_to_hub",
    "config": "DataConfig LoraSettings ModelConfig OptimizerConfig SamplingConfig",
    "core": "RlhfError",
    "data.readers": "read_rows",
    "evaluate.policy": "evaluate win_rate",
    "judges.endpoint": "EndpointJudge",
    "judges.judge": "FunctionJudge",
    "judges.model": "ModelJudge",
    "models.adapters": "add_lora",
    "models.heads": "RewardModel ValueModel",
    "models.load": "load_model load_tokenizer save_model",
    "models.process": "ProcessModel",
    "rewards.base": "Rewards",
    "rollout.sampler": "draw",
    "run.callbacks": "Callback EarlyStop",
    "scale.launch": "launch",
    "scoring.scores": "logps",
    "train.dpo": "DPOConfig DPOTrainer",
    "train.grpo": "GRPOConfig GRPOTrainer",
    "train.kto": "KTOConfig KTOTrainer",
    "train.online_dpo": "OnlineDPOTrainer",
    "train.pairs": "OnlineDPOConfig",
    "train.ppo": "PPOConfig PPOTrainer",
    "train.process": "ProcessConfig ProcessTrainer",
    "train.reward": "RewardConfig RewardTrainer",
    "train.rloo": "RLOOConfig RLOOTrainer",
    "train.sft": "SFTConfig SFTTrainer",
    "widgets.dashboard": "Dashboard",
    "widgets.reader": "RunReader",
    "widgets.runs": "Runs",
}
# what TRL's scripts import, too; documented in docs/trl.md
_SCRIPTS = {"ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config", "get_kbit_device_map"}
_RENAMED = {"score": "logps"}  # names of the version before
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
__all__ = ["__version__", *_HOME] # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and keep it."""
    if name in _RENAMED:
        old, name = name, _RENAMED[name]
        warnings.warn(f"rlhf_nb.{old} is now rlhf_nb.{name}; the old name goes with the next version", FutureWarning, 2)
    if name in _SCRIPTS:
        return getattr(import_module(f"{__name__}.train.words"), name)
    if name not in _HOME:
        if not name.startswith("_") and (said := import_module(f"{__name__}.aliases").instead_of(name)):
            raise ImportError(said)  # an AttributeError would lose the sentence in `from rlhf_nb import NAME`
        names = ", ".join(sorted(_HOME))
        raise AttributeError(f"module 'rlhf_nb' has no attribute {name!r}; its public names are: {names}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    """The public names, used or not, and what is there already."""
    return sorted({*__all__, *globals()})
