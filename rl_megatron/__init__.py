"""rl_megatron: train language models, from pretraining to reinforcement learning, on megatron-core.

The names in `__all__` can be imported from here. Each is loaded on first use, so that `import rl_megatron` does not
import torch; `rl_megatron/__init__.pyi` declares them for type checkers. A subpackage imports only those before it:

    config → topology → workers → data → batching → logprobs → losses → model → checkpoint → weight_sync → policy →
    training → generation → rewards → rollouts → observability → evaluation → algorithms → runs → certify → plan →
    doctor → compat → cli → api
"""

import importlib

from rl_megatron.log import silence_libraries as _silence_libraries

__version__ = "0.1.0"

_HOME = {
    "AdvantageInputs": "algorithms.advantage_estimators",
    "AlgorithmConfig": "config.schema",
    "BatchedDataDict": "data.batch",
    "Batching": "batching.config",
    "ConfigError": "config.errors",
    "DataConfig": "config.schema",
    "DataSource": "data.sources",
    "EmbeddedEngine": "generation.embedded",
    "EnvironmentStep": "rollouts.environment",
    "Family": "model.families.family",
    "LogprobLoss": "losses",
    "LoraConfig": "config.peft",
    "Loss": "losses",
    "LossInputType": "losses",
    "Loop": "training.loop",
    "LossNeeds": "algorithms",
    "LossType": "losses",
    "MegatronPolicy": "training.megatron_policy",
    "Metric": "config.metrics",
    "ModelConfig": "config.model",
    "NLLLoss": "losses",
    "OptimizerConfig": "config.optimizer",
    "ParallelConfig": "config.parallel",
    "Reduction": "losses",
    "HistoryFull": "rollouts.trajectory",
    "RolloutConfig": "config.algorithm_kinds",
    "Sampler": "rollouts.sampler",
    "Sampling": "generation.interfaces",
    "Segment": "rollouts.trajectory",
    "Trajectory": "rollouts.trajectory",
    "Turn": "rollouts.trajectory",
    "TrainingResult": "api.train",
    "as_loss": "losses.foreign",
    "build_loss": "losses",
    "check_problems": "algorithms.rollout",
    "declare_metrics": "config.metrics",
    "declare_token_keys": "data.token_keys",
    "dpo": "api.train",
    "generate": "generation.completion_batch",
    "grpo": "api.train",
    "linear_logprobs": "logprobs",
    "load_config": "config.loading.load",
    "masked_max": "losses.functional",
    "masked_mean": "losses",
    "parse_settings": "config.loading.settings",
    "register_advantage": "algorithms.advantage_estimators",
    "register_algorithm": "algorithms",
    "register_engine": "generation.registry",
    "register_family": "model.families",
    "register_loss": "losses.registry",
    "register_reward": "rewards",
    "register_rollout_worker": "rollouts.worker",
    "register_sink": "observability.sinks",
    "register_source": "data.sources",
    "register_task": "data.tasks",
    "register_tool": "rollouts.tools",
    "run": "runs.run",
    "section": "config.loading.settings",
    "sft": "api.train",
    "start_topology": "topology.topology",
    "train": "api.train",
    "vocab_parallel_logprobs": "logprobs",
}
__all__ = ["__version__", *_HOME]


_silence_libraries()  # before anything imports megatron-core


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
