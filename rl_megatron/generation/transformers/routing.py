"""Record which experts the routers of a Hugging Face model choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl_megatron.batching.routing import UNKNOWN_EXPERT


class RoutingRecorder:
    """Records the choices of a model's routers in each forward pass, while its context is entered.

    Every family of transformers with experts passes the chosen experts to the module `mlp.experts` of a layer.
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

    def _keep(self, number: int, _: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._chosen[number] = args[1]  # hidden states, experts, weights

    def last(self, num_sequences: int, columns: int) -> Tensor:
        """Return the experts of the last forward pass, [num_sequences, columns, layers, k] int16.

        Entries are `UNKNOWN_EXPERT` in layers without experts.

        Args:
            num_sequences: The sequences of that pass.
            columns: The tokens of each of them.
        """
        shape = (num_sequences, columns, self.num_layers, self.experts_per_token)
        device = next(iter(self._chosen.values())).device
        experts = torch.full(shape, UNKNOWN_EXPERT, dtype=torch.int16, device=device)
        for number, chosen in self._chosen.items():
            experts[:, :, number] = chosen.view(num_sequences, columns, -1).short()
        return experts
