"""A Hugging Face model as a `Replica`, in the engine's process, and a recorder of its routed experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_megatron.batching.routing import UNKNOWN_EXPERT
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.sampling import sample
from rl_megatron.generation.transformers.attention import CachedAttention


class TransformersReplica:
    """A `Replica` in one process."""

    shares_experts = False
    why_not_captured = "the layers are those of transformers"

    def __init__(
        self, model: PreTrainedModel, vocab_size: int, version: Callable[[], int], recorder: RoutingRecorder | None
    ):
        """Keep a model whose attention is `CachedAttention`; without `recorder`, routed experts are not recorded."""
        self.model, self.device = model, model.device
        self._vocab_size, self._version, self._recorder = vocab_size, version, recorder
        self.cache = self.make_cache(1, 1)

    @property
    def weight_version(self) -> int:
        return self._version()

    def tensors(self) -> Iterable[Tensor]:
        return self.model.parameters()

    def make_cache(self, num_slots: int, capacity: int) -> CachedAttention:
        """Return a cache, which the model uses from now on."""
        recorder = self._recorder
        routing = None if recorder is None else (recorder.num_layers, recorder.experts_per_token)
        self.cache = CachedAttention(self.model, num_slots, capacity, routing)
        return self.cache

    def active(self) -> AbstractContextManager[None]:
        """Record experts within the context, if there is a recorder."""
        return nullcontext() if self._recorder is None else self._recorder.recording()

    def agree(self, refills: bool, decodes: bool) -> tuple[bool, bool]:
        """Return the arguments: no other replica takes part."""
        return refills, decodes

    def read(self, tokens: Tensor) -> None:
        """Write the keys and values of tokens [b, s], at the positions 0 … s − 1, to the cache."""
        self._pass(tokens, torch.arange(tokens.size(1), device=self.device)[None])

    def compute_logits(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits [n, V] after tokens [n] at positions [n]."""
        return self._pass(tokens[:, None], positions[:, None])[:, -1]

    def _pass(self, tokens: Tensor, positions: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=1).logits
        if self._recorder is not None:
            self.cache.keep_experts(self._recorder.read(*tokens.shape))
        return logits

    def gather_stages(self, experts: Tensor) -> Tensor:
        """Return the experts unchanged: there is one stage."""
        return experts

    def sample(self, logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        return sample(logits, uniforms, sampling, None, self._vocab_size)

    def share(self, drawn: Tensor) -> None:
        """Do nothing: there is one stage."""


class RoutingRecorder:
    """A recorder of the experts that a model's routers choose in each forward pass within `recording`.

    In every family with experts, a layer of transformers passes the chosen experts to its module `mlp.experts`.
    """

    def __init__(self, model: PreTrainedModel):
        layers: Any = model.get_submodule("model.layers")
        self.num_layers, self.experts_per_token = len(layers), int(model.config.num_experts_per_tok)
        self._modules = {
            number: layer.mlp.experts for number, layer in enumerate(layers) if hasattr(layer.mlp, "experts")
        }
        self._chosen: dict[int, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record within the context."""
        handles = [
            module.register_forward_pre_hook(partial(self._keep, number)) for number, module in self._modules.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, number: int, _: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self._chosen[number] = args[1]  # hidden states, experts, weights

    def read(self, num_sequences: int, columns: int) -> Tensor:
        """Return the experts of the last forward pass, [num_sequences, columns, layers, k] int16.

        Entries are `UNKNOWN_EXPERT` in layers without experts. The pass read `columns` tokens of each sequence.
        """
        shape = (num_sequences, columns, self.num_layers, self.experts_per_token)
        device = next(iter(self._chosen.values())).device
        experts = torch.full(shape, UNKNOWN_EXPERT, dtype=torch.int16, device=device)
        for number, chosen in self._chosen.items():
            experts[:, :, number] = chosen.view(num_sequences, columns, -1).short()
        return experts
