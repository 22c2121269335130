"""Redirect megatron-core's CUDA calls to the CPU, for runs that use no GPU.

megatron-core is written for CUDA: it allocates with `device="cuda"`, asks for `torch.cuda.current_device()`, seeds
CUDA generators and compares tensor type names. `redirect_cuda_to_cpu()` replaces exactly those calls of torch, once per
process, so that megatron-core itself stays unmodified. Runs on a GPU do not call it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.utils._device

from rl_megatron.topology.torch_optimizers import use_torch_optimizers

# Factories that megatron-core calls with device="cuda" (counters, norms, buffers, RoPE tables, p2p receive buffers).
_FACTORIES = ("arange", "empty", "empty_like", "eye", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")

_redirected = False


def is_redirected() -> bool:
    """Return whether this process's CUDA calls go to the CPU."""
    return _redirected


def redirect_cuda_to_cpu() -> None:
    """Replace the CUDA calls of torch that megatron-core makes. A second call does nothing."""
    global _redirected
    if _redirected:
        return
    _redirected = True
    cpu = torch.device("cpu")

    # `with torch.device(…)` lists torch's factories at its first use, and recognises them by identity. The list must
    # have the originals, which our replacements call: transformers loads models in such a block, and with another list
    # it would read uninitialised RoPE tables.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _redirect(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.to = _redirect(torch.Tensor.to)
    torch.Tensor.type = _name_types_as_on_cuda(torch.Tensor.type)

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

    # megatron-core converts only GPU tensors to numbers. Counts that are on the CPU already would stay tensors, but
    # all-to-all expects numbers.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    use_torch_optimizers()


def _names_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _redirect(call: Callable) -> Callable:
    @functools.wraps(call)
    def call_on_cpu(*args, **kwargs):
        if kwargs:
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)  # only the CUDA driver can pin memory
        if len(args) > 1 and any(_names_cuda(arg) for arg in args):
            args = tuple("cpu" if _names_cuda(arg) else arg for arg in args)
        return call(*args, **kwargs)

    return call_on_cpu


def _name_types_as_on_cuda(read_type: Callable) -> Callable:
    """Return a replacement of `Tensor.type` that gives CPU tensors the type names of CUDA tensors.

    megatron-core's optimizers tell fp32 from bf16 parameters by names such as "torch.cuda.FloatTensor".
    """

    @functools.wraps(read_type)
    def read_cuda_type(self, *args, **kwargs):
        result = read_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return read_cuda_type


class _Inert:
    """A CUDA stream or event that does nothing: on the CPU every call has finished when it returns."""

    def __init__(self, *args, **kwargs):
        pass

    def record_event(self, *args):
        return _Inert()

    def record(self, *args):
        return None

    wait_stream = wait_event = wait = synchronize = record

    def query(self):
        return True
