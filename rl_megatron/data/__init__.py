"""Data: tokenizers, tasks, data sources, and the datasets that turn files and tasks into batches.

Modules that only read files, templates and tasks do not import torch. So errors in files, templates and tasks are
found before torch is imported, and the processes of reward functions never import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_megatron.data.batch import BatchedDataDict as BatchedDataDict


def __getattr__(name: str) -> Any:
    """Return `BatchedDataDict`, whose module imports torch."""
    if name != "BatchedDataDict":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rl_megatron.data.batch import BatchedDataDict

    return BatchedDataDict
