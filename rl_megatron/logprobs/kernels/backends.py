"""The choice of kernels for given logits: plain torch, which runs everywhere, or Triton on a GPU."""

from __future__ import annotations

import torch

from rl_megatron import log
from rl_megatron.logprobs.kernels import torch as torch_kernels
from rl_megatron.logprobs.vocab_parallel import Kernels

BACKENDS = ("torch", "triton")
TORCH = Kernels(*(getattr(torch_kernels, name) for name in Kernels._fields))


def choose_kernels(backend: str, device: torch.device) -> Kernels:
    """Return the kernels for logits on `device`. "auto" is "triton" on a GPU if triton is installed, else "torch".

    Triton is imported only here, and only if `backend` and `device` require it.

    Raises:
        ValueError: The backend is unknown, or it is "triton" and cannot run here. The message names the remedy.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend={backend!r} is unknown; use 'auto' or one of {list(BACKENDS)}")
    on_gpu = device.type == "cuda"
    if backend == "torch" or (backend == "auto" and not on_gpu):
        return TORCH
    try:
        from rl_megatron.logprobs.kernels import triton
    except ModuleNotFoundError:
        if backend == "triton":
            raise ValueError("backend='triton' needs triton, which is not installed: `pip install triton`") from None
        log.once(
            "Triton is not installed, so torch computes logprobs, in more passes over the logits; `pip install triton`."
        )
        return TORCH
    if not (on_gpu or triton.INTERPRETED):
        raise ValueError(
            "backend='triton' runs on a CPU only in Triton's interpreter, which is for tests; set TRITON_INTERPRET=1 "
            "before triton is imported, or use backend='auto'"
        )
    return Kernels(*(getattr(triton, name) for name in Kernels._fields))
