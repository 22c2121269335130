"""Types of the names that `rl_megatron` loads on first use; tests/test_public_api.py compares the two."""

from rl_megatron.algorithms import LossNeeds as LossNeeds
from rl_megatron.algorithms import register_algorithm as register_algorithm
from rl_megatron.algorithms.rollout import Sampler as Sampler
from rl_megatron.algorithms.rollout import check_problems as check_problems
from rl_megatron.algorithms.run import run as run
from rl_megatron.algorithms.stage import Stage as Stage
from rl_megatron.config.algorithms import RolloutConfig as RolloutConfig
from rl_megatron.config.errors import ConfigError as ConfigError
from rl_megatron.config.load import load_config as load_config
from rl_megatron.config.metrics import Metric as Metric
from rl_megatron.config.metrics import declare_metrics as declare_metrics
from rl_megatron.config.schema import AlgorithmConfig as AlgorithmConfig
from rl_megatron.config.schema import DataConfig as DataConfig
from rl_megatron.config.schema import ModelConfig as ModelConfig
from rl_megatron.config.schema import OptimizerConfig as OptimizerConfig
from rl_megatron.config.schema import ParallelConfig as ParallelConfig
from rl_megatron.config.schema import section as section
from rl_megatron.data.batch import BatchedDataDict as BatchedDataDict
from rl_megatron.data.sources import DataSource as DataSource
from rl_megatron.data.sources import register_source as register_source
from rl_megatron.data.tasks import register_task as register_task
from rl_megatron.generation.embedded import EmbeddedEngine as EmbeddedEngine
from rl_megatron.generation.embedded import MegatronEngine as MegatronEngine
from rl_megatron.generation.interfaces import Sampling as Sampling
from rl_megatron.generation.registry import register_engine as register_engine
from rl_megatron.logprobs import linear_logprobs as linear_logprobs
from rl_megatron.logprobs import vocab_parallel_logprobs as vocab_parallel_logprobs
from rl_megatron.losses import LogprobLoss as LogprobLoss
from rl_megatron.losses import Loss as Loss
from rl_megatron.losses import LossInputType as LossInputType
from rl_megatron.losses import LossType as LossType
from rl_megatron.losses import NLLLoss as NLLLoss
from rl_megatron.losses import Reduction as Reduction
from rl_megatron.losses import build_loss as build_loss
from rl_megatron.losses import masked_mean as masked_mean
from rl_megatron.losses.foreign import as_loss as as_loss
from rl_megatron.losses.functional import masked_max as masked_max
from rl_megatron.losses.registry import register_loss as register_loss
from rl_megatron.losses.settings import parse_settings as parse_settings
from rl_megatron.model.families import register_family as register_family
from rl_megatron.model.families.family import Family as Family
from rl_megatron.observability.sinks import register_sink as register_sink
from rl_megatron.policy.megatron_policy import MegatronPolicy as MegatronPolicy
from rl_megatron.topology.topology import start_topology as start_topology

__version__: str
