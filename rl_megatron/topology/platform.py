"""The seam under megatron-core: CUDA with NCCL where a GPU is used, the CPU with gloo where none is.

megatron-core is written for CUDA: it allocates with `device="cuda"`, asks for `torch.cuda.current_device()`, seeds
CUDA generators and compares tensor type names. `start()` redirects exactly those calls to the CPU when the run uses no
GPU, once per process, so that megatron-core itself stays unmodified. On a GPU nothing is redirected; a name that
megatron-core takes from Transformer Engine and misses without it is given there, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device

from rl_megatron.config.errors import ConfigError

# Factories that megatron-core calls with device="cuda" (counters, norms, buffers, RoPE tables, p2p receive buffers).
_FACTORIES = ("arange", "empty", "empty_like", "eye", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")


@dataclass(frozen=True)
class Platform:
    """Where this rank computes (`device`) and how it talks (`backend`: "nccl" or "gloo")."""

    device: torch.device
    backend: str

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"


def start(device: str = "auto", timeout_minutes: float = 10.0) -> Platform:
    """Chooses the device, redirects megatron-core to the CPU if there is no GPU to use, and joins the process group.

    `device`: "auto" (a GPU when one is there), "cpu" or "cuda". Ranks come from torchrun's environment; without it the
    process is a world of one. A process group that exists already is used as it is. Calling twice is harmless; asking
    for CUDA after the process was redirected to the CPU is an error.
    """
    platform = choose(device)
    if platform.is_cuda:
        if _redirected:
            raise ConfigError("device=cuda: this process was started on the CPU; start a new process to use the GPU")
        torch.cuda.set_device(platform.device)
    else:
        _redirect_cuda_to_cpu()
    _do_without_transformer_engine()
    if not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(platform.backend, timeout=timeout)
        else:
            dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return platform


def _do_without_transformer_engine() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # imported from Transformer Engine only, yet compared with None
        moe_utils.te_general_gemm = None


def choose(device: str) -> Platform:
    """This rank's, of `device` as `start` takes it.  Raises: ConfigError."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={device!r}: must be one of auto, cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no CUDA device; use device=cpu, or install a CUDA build of torch")
    if device == "cpu" or not torch.cuda.is_available():
        return Platform(torch.device("cpu"), "gloo")
    return Platform(torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))), "nccl")


# --- the redirection; nothing below runs when a GPU is used ---

_redirected = False


def _redirect_cuda_to_cpu() -> None:
    global _redirected
    if _redirected:
        return
    _redirected = True
    cpu = torch.device("cpu")

    # `with torch.device(…)` knows factories by what they are when it first asks. Were they ours by then, it would leave
    # tensors where they are, and transformers, which loads through it, models with RoPE frequencies of random memory.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.to = _on_cpu(torch.Tensor.to)
    torch.Tensor.type = _type_named_as_on_cuda(torch.Tensor.type)

    torch.cuda.current_device = lambda: cpu
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream = torch.cuda.Event = _Inert
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: _Inert()
    torch.cuda.stream = lambda stream: nullcontext()

    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None
    torch.cuda.manual_seed_all = lambda seed: None  # torch.manual_seed has seeded the CPU generator by then
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(
        state
    )

    import megatron.core.tensor_parallel.random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # Moves from the GPU only, and counts that were on the CPU all along stay tensors where all-to-all wants numbers.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def _names_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(call: Callable) -> Callable:
    @functools.wraps(call)
    def redirected(*args, **kwargs):
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)  # pinning is a CUDA driver's service
        if len(args) > 1 and any(_names_cuda(arg) for arg in args):
            args = tuple("cpu" if _names_cuda(arg) else arg for arg in args)
        return call(*args, **kwargs)

    return redirected


def _type_named_as_on_cuda(type_of: Callable) -> Callable:
    """megatron-core's optimizers tell fp32 from bf16 parameters by names such as "torch.cuda.FloatTensor"."""

    @functools.wraps(type_of)
    def redirected(self, *args, **kwargs):
        result = type_of(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return redirected


class _Inert:
    """Stands for a CUDA stream or event: on the CPU every call has finished when it returns."""

    def __init__(self, *args, **kwargs):
        pass

    def record_event(self, *args):
        return _Inert()

    def record(self, *args):
        return None

    wait_stream = wait_event = wait = synchronize = record

    def query(self):
        return True
