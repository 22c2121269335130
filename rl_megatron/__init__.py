"""rl_megatron: train language models, from pretraining to reinforcement learning, on megatron-core.

The names below can be imported from here. Each is loaded when it is first asked for, so that `import rl_megatron`
imports no torch; `rl_megatron/__init__.pyi` tells type checkers what they are.
"""

import importlib

__version__ = "0.1.0"

_HOME = {
    "BatchedDataDict": "data.batch",
    "ConfigError": "config.errors",
    "Loss": "losses",
    "MegatronEngine": "generation.megatron",
    "MegatronPolicy": "policy.megatron_policy",
    "ModelConfig": "config.schema",
    "OptimizerConfig": "config.schema",
    "ParallelConfig": "config.schema",
    "Reduction": "losses",
    "Sampling": "generation.interfaces",
    "build_loss": "losses",
    "linear_logprobs": "logprobs",
    "load_config": "config.load",
    "register_algorithm": "algorithms.registry",
    "register_engine": "generation.registry",
    "register_family": "model.families",
    "register_loss": "losses",
    "register_sink": "observability.sinks",
    "register_source": "data.sources",
    "register_task": "data.tasks",
    "run": "algorithms.run",
    "start_topology": "topology.topology",
    "vocab_parallel_logprobs": "logprobs",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
