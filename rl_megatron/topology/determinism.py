"""Deterministic computation: the switches of torch, CUDA, NCCL and Transformer Engine that make runs repeatable."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

import torch

from rl_megatron.config.errors import ConfigError

# Environment variable → the default value, and the values that are allowed. cuBLAS, NCCL and Transformer Engine read
# the variables when they start.
VARIABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", (":4096:8", ":16:8")),
    "NCCL_ALGO": ("Ring", ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", ("0",)),
}


def compute_deterministically(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set every switch, for the rest of this process. Call it before the device is used.

    megatron-core's own switch is set from torch's when a model is built (model/build.py). On a GPU, an operation
    without a deterministic implementation then raises an error that names it. On a CPU, torch computes with one thread,
    because the bits of a sum depend on the number of threads.

    Raises:
        ConfigError: A variable has a value that is not allowed, or is not set although CUDA has started.
    """
    for name, (value, allowed) in VARIABLES.items():
        current = environment.get(name)
        if current is None and torch.cuda.is_initialized():
            raise ConfigError(
                f"train.deterministic=true: CUDA has started in this process before {name} was set; "
                f"set {name}={value} before Python starts"
            )
        if current is not None and current not in allowed:
            raise ConfigError(
                f"train.deterministic=true: the environment has {name}={current}, so results differ between runs; "
                f"unset it, or set it to {' or '.join(allowed)}"
            )
        environment.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)
