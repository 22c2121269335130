"""The frozen originals of parameters that are trained whole beside adapters (`peft.modules_to_save`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rl_megatron.model.shards import SHARDING_METADATA

_ORIGINAL = "frozen_original"  # a buffer that is not saved


def train_whole(model_chunk: MegatronModule, names: Collection[str]) -> None:
    """Make parameters of a model chunk (without wrappers) trainable, and keep copies of their values as originals.

    `names` are the global names of the parameters.
    """
    entries = model_chunk.sharded_state_dict(metadata=dict(SHARDING_METADATA)).values()
    chosen = {id(entry.data) for entry in entries if isinstance(entry, ShardedTensor) and entry.key in names}
    for module in model_chunk.modules():
        weight = module._parameters.get("weight")
        if weight is not None and id(weight) in chosen:
            weight.requires_grad_()
            module.register_buffer(_ORIGINAL, weight.detach().clone(), persistent=False)


def find_whole_parameters(model_chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield each parameter of this rank that is trained whole, with its original."""
    for model_chunk in model_chunks:
        for module in model_chunk.modules():
            if _ORIGINAL in module._buffers:
                yield module.get_parameter("weight"), module.get_buffer(_ORIGINAL)


@torch.no_grad()
def keep_originals(model_chunks: Sequence[torch.nn.Module]) -> None:
    """Copy the current weights of the parameters that are trained whole to their originals."""
    for parameter, original in find_whole_parameters(model_chunks):
        original.copy_(parameter)


@contextmanager
def use_originals(model_chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Make the model compute with the originals within the block."""
    exchanged = [(parameter, parameter.data, original) for parameter, original in find_whole_parameters(model_chunks)]
    for parameter, _, original in exchanged:
        parameter.data = original
    try:
        yield
    finally:
        for parameter, now, _ in exchanged:
            parameter.data = now
