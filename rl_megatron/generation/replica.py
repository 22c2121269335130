"""`Replica`: the decoder's interface to a model, with a cache of slots and forward passes that read and write it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.slot_cache import SlotCache


class Replica(Protocol):
    """A copy of the model on one or more ranks, which all make the same calls."""

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        ...

    @property
    def weight_version(self) -> int:
        """Return the version of the weights."""
        ...

    @property
    def why_not_captured(self) -> str | None:
        """Return why a decoding step cannot be captured in a CUDA graph, or None if it can."""
        ...

    def tensors(self) -> Iterable[Tensor]:
        """Return the weights, and everything else besides the cache that a decoding step reads."""
        ...

    @property
    def shares_experts(self) -> bool:
        """Return whether replicas share experts (expert parallelism), so that all take part in every forward pass."""
        ...

    def make_cache(self, num_slots: int, capacity: int) -> SlotCache:
        """Make the cache. The model uses it within `active`."""
        ...

    def active(self) -> AbstractContextManager[None]:
        """Let the model use the cache within the context."""
        ...

    def agree(self, refills: bool, decodes: bool) -> tuple[bool, bool]:
        """Return whether any replica that shares experts with this one prefills prompts, and whether any decodes."""
        ...

    def read(self, tokens: Tensor) -> None:
        """Write the keys and values of tokens [b, s], at the positions 0 … s − 1, to the cache."""
        ...

    def compute_logits(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """Return this rank's logits [n, V/tp] after tokens [n] at positions [n], or None if another stage has them."""
        ...

    def gather_stages(self, experts: Tensor) -> Tensor:
        """Return the experts of all pipeline stages' layers, int16 [slots, layers, capacity, k], from this rank's."""
        ...

    def sample(self, logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return a token of each sequence and its logprob, [n] each; see `sampling.sample`."""
        ...

    def share(self, drawn: Tensor) -> None:
        """Broadcast `drawn` from the last pipeline stage to all stages."""
        ...
