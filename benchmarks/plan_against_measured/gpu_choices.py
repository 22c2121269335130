"""The choices of a GPU, made on a CPU: what the measured ranks do as on a GPU, although they have none.

Each of them is a function or a number of the package that depends on the device, or a product for which a CPU lacks the
GPU's operator. Nothing here allocates memory that a GPU would not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.logprobs import linear
from rl_megatron.logprobs.kernels import tiles
from rl_megatron.model import build
from rl_megatron.model.layers import attention, gated_activation, weight_gradient
from rl_megatron.weight_sync import buckets as refit_plan

_PIECE_ELEMENTS = 1 << 16
_SETTLING_SECONDS = 1.0  # at most


@contextmanager
def gpu_choices(has_window: bool) -> Iterator[None]:
    """Make the choices of a GPU within the block.

    - The gated activation is computed again in the backward pass, instead of kept.
    - Weight gradients are added to the gradient buffer within the product. A CPU has no product of bf16 factors that
      adds to an fp32 sum, so the product is computed in pieces, whose fp32 copies have 256 KiB.
    - Keys and values are repeated for grouped queries where a GPU has no kernel for them: in fp32 and with a window.
    - The fused head has the token blocks of a GPU.
    - Fingerprints of weights are computed of as many elements at once as on a GPU.
    - The logprob kernels of a CPU work on scratch tiles, which Triton's keep in registers. Here they have 128 KiB.

    Besides, a gloo thread may be the last to refer to a tensor that a collective has sent, and the profiler does not
    see what other threads release. So every wait for a collective also waits until the other threads are idle.

    Args:
        has_window: Whether the model has a sliding window.
    """
    fuse, cuda = weight_gradient.fuse_weight_gradients, torch.device("cuda", 0)
    choices: list[tuple[Any, str, Any]] = [
        (gated_activation, "computes_again", lambda device: True),
        (build, "fuse_weight_gradients", lambda topology: fuse(replace(topology, device=cuda))),
        (weight_gradient, "add_weight_gradient", _add_weight_gradient),
        (linear, "add_weight_gradient", _add_weight_gradient),
        # On a CPU, context parallelism has a bias in the place of flash attention, which needs no repetition.
        (attention, "lacks_grouped_kernel", lambda query, bias: has_window or query.dtype is torch.float32),
        (linear, "BLOCK_ELEMENTS_CPU", linear.BLOCK_ELEMENTS_CUDA),
        (refit_plan, "ELEMENTS_AT_ONCE_CPU", refit_plan.ELEMENTS_AT_ONCE_GPU),
        (tiles, "TILE_ELEMENTS_CPU", _PIECE_ELEMENTS // 4),
        (dist.Work, "wait", _settled(dist.Work.wait)),
    ]
    with ExitStack() as stack:
        for owner, name, choice in choices:
            stack.enter_context(mock.patch.object(owner, name, choice))
        yield


def _add_weight_gradient(total: Tensor, dz: Tensor, hidden: Tensor) -> None:
    """Add dzᵀ·h to `total` in pieces of rows. The arguments are those of the function whose place it takes."""
    rows = max(1, _PIECE_ELEMENTS // max(dz.size(1), hidden.size(1)))
    for of_dz, of_hidden in zip(dz.split(rows), hidden.split(rows), strict=True):
        total.addmm_(of_dz.to(total.dtype).t(), of_hidden.to(total.dtype))


def _settled(wait: Callable) -> Callable:
    def wait_and_settle(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        limit = time.monotonic() + _SETTLING_SECONDS
        time.sleep(0.0005)
        while not _other_threads_sleep() and time.monotonic() < limit:
            time.sleep(0.0005)
        return result

    return wait_and_settle


def _other_threads_sleep() -> bool:
    """Return whether all threads of this process but the calling one sleep, as Linux says in /proc."""
    for thread in Path("/proc/self/task").iterdir():
        if int(thread.name) != threading.get_native_id():
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "S":
                return False
    return True
