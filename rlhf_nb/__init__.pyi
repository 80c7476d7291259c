"""The public names and where each lives, for type checkers and editors; `__init__.py` reads the imports of this file, too."""

from typing import Any

from .hub.push import push_to_hub as push_to_hub
from .config import DataConfig as DataConfig, LoraSettings as LoraSettings, ModelConfig as ModelConfig
from .config import OptimizerConfig as OptimizerConfig, SamplingConfig as SamplingConfig
from .core import RlhfError as RlhfError
from .data.readers import read_rows as read_rows
from .evaluate.policy import evaluate as evaluate, win_rate as win_rate
from .judges.endpoint import EndpointJudge as EndpointJudge
from .judges.judge import FunctionJudge as FunctionJudge
from .judges.model import ModelJudge as ModelJudge
from .models.adapters import add_lora as add_lora
from .models.heads import RewardModel as RewardModel, ValueModel as ValueModel
from .models.load import load_model as load_model, load_tokenizer as load_tokenizer, save_model as save_model
from .models.process import ProcessModel as ProcessModel
from .rewards.base import Rewards as Rewards
from .rollout.sampler import draw as draw
from .run.callbacks import Callback as Callback, EarlyStop as EarlyStop
from .scale.launch import launch as launch
from .scoring.scores import logps as logps
from .train.dpo import DPOConfig as DPOConfig, DPOTrainer as DPOTrainer
from .train.grpo import GRPOConfig as GRPOConfig, GRPOTrainer as GRPOTrainer
from .train.kto import KTOConfig as KTOConfig, KTOTrainer as KTOTrainer
from .train.online_dpo import OnlineDPOTrainer as OnlineDPOTrainer
from .train.pairs import OnlineDPOConfig as OnlineDPOConfig
from .train.ppo import PPOConfig as PPOConfig, PPOTrainer as PPOTrainer
from .train.process import ProcessConfig as ProcessConfig, ProcessTrainer as ProcessTrainer
from .train.reward import RewardConfig as RewardConfig, RewardTrainer as RewardTrainer
from .train.rloo import RLOOConfig as RLOOConfig, RLOOTrainer as RLOOTrainer
from .train.sft import SFTConfig as SFTConfig, SFTTrainer as SFTTrainer
from .widgets.dashboard import Dashboard as Dashboard
from .widgets.reader import RunReader as RunReader
from .widgets.runs import Runs as Runs

__all__: list[str]
__version__: str


def __getattr__(name: str) -> Any: ...
