"""Import what parts need, without using a GPU, so that their processes can be forks of this one."""

from __future__ import annotations

import gc
import importlib
import os
import time
import warnings

from benchmarks.gpu_check.parts import PARTS

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch.cuda.is_available() then starts no CUDA
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
MODULES = (
    "torch", "megatron.core", "transformers", "torch.distributed.checkpoint",
    "torch.utils.tensorboard", "rl_megatron.runs.run", "rl_megatron.certify.command", "rl_megatron.cli",
    "rl_megatron.generation.transformers.worker",
)  # fmt: skip
SECONDS: dict[str, float] = {}  # module → how long its import took, without those before it


def import_all() -> None:
    """Import every module. One that cannot be imported is left to the part that needs it."""
    for name in [*MODULES, *(f"benchmarks.gpu_check.parts.{part}" for part in PARTS)]:
        began = time.perf_counter()
        try:
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                importlib.import_module(name)
        except Exception as error:
            print(f"FAILS  import of {name}: {type(error).__name__}: {error}", flush=True)
        SECONDS[name] = time.perf_counter() - began
    gc.freeze()  # A collection in a fork then skips a million objects that are never freed.
