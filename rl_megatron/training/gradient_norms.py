"""`GradientNorms`: the norm of a gradient, in all and by group of layers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config
from torch import Tensor

from rl_megatron.checkpoint.optimizer_state import main_parameters, parts

QUARTERS = 4
# The groups of layers: the embedding, quarters of the layers, and what follows them.
GROUPS = ("embedding", *(f"layers_{quarter}" for quarter in range(1, QUARTERS + 1)), "output")


class GradientNorms:
    """The norms of an optimizer's gradients, in all and by group of layers.

    A weight that several ranks or model chunks hold counts once, as in megatron-core's norm.

    Attributes:
        names: The names of the norms: that of the whole gradient, and those of the groups that the model has.
    """

    def __init__(self, optimizer: MegatronOptimizer, model_chunks: Iterable[torch.nn.Module]):
        """Find the group of every weight that this rank updates."""
        model_chunks = list(model_chunks)
        num_layers = get_model_config(model_chunks[0]).num_layers
        used = {"embedding", "output", *(f"layers_{_quarter(layer + 1, num_layers)}" for layer in range(num_layers))}
        groups = [name for name in GROUPS if name in used]
        self.names = ("grad_norm", *(f"grad_norm_{name}" for name in groups))
        group_of = {
            id(parameter): groups.index(name)
            for model_chunk in model_chunks
            for parameter, name in _find_groups(model_chunk, num_layers).items()
        }
        self._device = next(model_chunks[0].parameters()).device
        self._counted: dict[dist.ProcessGroup, list[list[Tensor]]] = {}  # weights by group of layers
        for part in parts(optimizer):
            ranks = part.get_grad_stats_parallel_group()
            counted = self._counted.setdefault(ranks, [[] for _ in groups])
            tp_group = getattr(part, "tp_group", None)
            for parameter, main in main_parameters(part):
                if param_is_not_shared(main) and param_is_not_tensor_parallel_duplicate(main, tp_group):
                    counted[group_of[id(parameter)]].append(main)

    @torch.no_grad()
    def norms(self) -> dict[str, float]:
        """Return the norm of the whole gradient and of each group, by name. Collective.

        Parts of the optimizer whose gradients are on the same ranks share a reduction. The host waits for the device
        once.
        """
        totals = []
        for ranks, counted in self._counted.items():
            total = torch.zeros(len(counted), device=self._device)
            for index, weights in enumerate(counted):
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                if gradients:
                    total[index] = torch.nn.utils.get_total_norm(gradients).square()
            dist.all_reduce(total, group=ranks)
            totals.append(total)
        squared = torch.stack(totals).sum(dim=0).tolist()
        return dict(zip(self.names, map(math.sqrt, [sum(squared), *squared]), strict=True))


def _find_groups(model_chunk: torch.nn.Module, num_layers: int) -> dict[Tensor, str]:
    """Return the group of every parameter of a model chunk."""
    found: dict[Tensor, str] = {}
    for name, module in model_chunk.named_modules():
        if isinstance(module, TransformerLayer) and "decoder.layers." in name:
            found |= dict.fromkeys(module.parameters(), f"layers_{_quarter(module.layer_number, num_layers)}")
    for name, parameter in model_chunk.named_parameters():
        found.setdefault(parameter, "embedding" if "embedding." in name else "output")
    return found


def _quarter(layer_number: int, num_layers: int) -> int:
    """Return the quarter, from 1, of a layer that is counted from 1 over all pipeline stages."""
    return (layer_number - 1) * QUARTERS // num_layers + 1
