"""The two kernels for a device without data: they allocate what those in Triton allocate, and compute nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_megatron.topology.fake_cuda import launched


def row_stats(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the memory of the statistics, [rows, 4] in fp32; arguments as `kernels/torch.py` takes them."""
    stats = logits.new_empty(logits.shape[0], 4, dtype=torch.float32)
    return launched(torch.ops.aten.logsumexp.default, (logits,), stats)


def write_row_gradients(out: Tensor, logits: Tensor, *args: Any, **kwargs: Any) -> None:
    """Write nothing into `out`; arguments as `kernels/torch.py` takes them."""
    launched(torch.ops.aten._log_softmax_backward_data.default, (logits,), out)
