"""The adapter of an engine's model, whose tensors come by weight syncs. This module does not import megatron-core."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rl_megatron.checkpoint.peft_format import PEFT_PREFIX
from rl_megatron.generation.transformers.model import checkpoint_tensors
from rl_megatron.weight_sync.buckets import RefitPlan, WeightsRefused

_LETTERS = ("A", "B")
_ADAPTER = ".lora_"


class _Added:
    """A forward hook that adds s·B·A·x to the output of a linear layer."""

    def __init__(self, down: Tensor, up: Tensor, scaling: float):
        self._down, self._up, self._scaling = down, up, scaling

    def __call__(self, module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + linear(linear(args[0], self._down) * self._scaling, self._up)


def attach_adapter(model: PreTrainedModel, plan: RefitPlan) -> dict[str, Tensor]:
    """Give a model the adapter that a plan announces, and return its tensors by their names in the plan.

    They hold zeros until the first weight sync. Modules that are trained whole replace those of the base.

    Args:
        model: The model with the weights of the base.
        plan: The plan, whose `hf_config` is an adapter_config.json.

    Raises:
        WeightsRefused: The model has no linear layer of a name in the plan.
    """
    config = plan.hf_config
    r = config["r"]
    scaling = config["lora_alpha"] / (math.sqrt(r) if config["use_rslora"] else r)
    specs = [spec for bucket in plan.buckets for spec in bucket.tensors]
    tensors = {
        spec.name: torch.zeros(spec.shape, dtype=spec.torch_dtype, device=model.device)
        for spec in specs
        if _ADAPTER in spec.name
    }
    modules = dict(model.named_modules())
    for module in sorted({name.removeprefix(PEFT_PREFIX).rpartition(_ADAPTER)[0] for name in tensors}):
        if not isinstance(modules.get(module), torch.nn.Linear):
            raise WeightsRefused(f"{module} gets an adapter, and the engine's model has no linear layer of this name")
        down, up = (tensors[f"{PEFT_PREFIX}{module}.lora_{letter}.weight"] for letter in _LETTERS)
        modules[module].register_forward_hook(_Added(down, up, scaling))
    own = checkpoint_tensors(model)  # modules that are trained whole beside the adapter take their places
    whole = {spec.name: own.get(spec.name.removeprefix(PEFT_PREFIX)) for spec in specs if _ADAPTER not in spec.name}
    return tensors | {name: tensor for name, tensor in whole.items() if tensor is not None}
