"""Make megatron-core's optimizers use torch instead of Transformer Engine or Apex."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def torch_optimizers() -> list[tuple[object, str, object]]:
    """Return replacements (owner, name, value) so that megatron-core uses torch's Adam, and computes norms itself.

    Loops over weights in megatron-core become single calls for all weights, which need few kernels on a GPU.
    """
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.optimizer as optimizer_classes
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer

    replaced: list[tuple[object, str, object]] = [
        (optimizers, "USING_PYTORCH_OPTIMIZER", True),
        (optimizers, "Adam", torch.optim.AdamW),
        (distrib_optimizer, "Adam", torch.optim.AdamW),
        (clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm),
        (optimizer_classes, "_multi_tensor_copy_this_to_that", _copy_together),
    ]
    for module in (clip_grads, optimizer_classes):
        replaced.append((module, "multi_tensor_applier", utils.local_multi_tensor_applier))
        replaced.append((module, "multi_tensor_scale_impl", _scale_together))
    return replaced


def use_torch_optimizers() -> None:
    """Apply the replacements of `torch_optimizers` for the rest of this process."""
    for owner, name, value in torch_optimizers():
        setattr(owner, name, value)


def _scale_together(_: int, noop_flag: Tensor, tensor_lists: Sequence[list[Tensor]], scale: float) -> None:
    """Write each tensor of the first list, times `scale`, into that of the same index in the second, as in `amp_C`."""
    sources, targets = tensor_lists
    if any(source is not target for source, target in zip(sources, targets, strict=True)):
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_mul_(targets, scale)  # pyright: ignore[reportPrivateImportUsage]


def _copy_together(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    if this:
        torch._foreach_copy_(that, this)  # pyright: ignore[reportPrivateImportUsage]
