"""The frozen model with which a policy is compared: a second model, or the policy's own with other adapters.

`ReferenceModel` is on the device or in host memory. `AdapterReference` needs no second model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from rl_megatron import log
from rl_megatron.batching.config import Batching
from rl_megatron.batching.sharded import ShardedBatch
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.model.lora.attach import dora_adapters_of, trained_adapters_of
from rl_megatron.model.lora.originals import whole_parameters
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.training.inference import Inference, build_runner
from rl_megatron.training.runner import FusedHead

Placement = Literal["resident", "offload"]
"""Where reference weights are kept: always on the device, or in host memory and on the device only during a call."""


class ReferenceModel:
    """A frozen copy of a model. It owns the copied weights and their placement.

    Attributes:
        host_weights: The weights in host memory, or None if they are always on the device.
    """

    def __init__(self, model: ShardedModel, placement: Placement, fused_head: FusedHead | None):
        """Copy the current weights of `model`. Collective."""
        self.model = model.frozen_copy()
        self._inference = Inference(self.model, build_runner(self.model, fused_head))
        self.host_weights: HostWeights | None = None
        device = model.topology.device
        if placement == "offload" and device.type == "cuda":
            self.host_weights = HostWeights(self.model.model_chunks, device)
        elif placement == "offload":
            log.once("train.reference=offload has no effect on a CPU, where host memory is the device's memory")

    def logprobs(self, data: BatchedDataDict | ShardedBatch, batching: Batching) -> Tensor:
        """Return logprobs [B, S] fp32 under the frozen weights. Entry t corresponds to token t. Collective."""
        with self.host_weights.on_device() if self.host_weights is not None else nullcontext():
            return self._inference.logprobs(data, batching)


class AdapterReference:
    """A model with adapters as it was when this was built. It shares the model's weights.

    If the adapters had not been trained by then, they are switched off during a call. Otherwise they are copied, and
    the copies take their places during a call. Frozen adapters take part in either case.
    """

    def __init__(self, model: ShardedModel, inference: Inference):
        """Keep the adapters of `model`, whose logprobs `inference` computes. Collective."""
        model.gather_parameters()
        self._model, self._inference, self._start = model, inference, None
        if not model.adapters_are_new:
            self._start = [weight.detach().clone() for weight in self._weights()]

    def logprobs(self, data: BatchedDataDict | ShardedBatch, batching: Batching) -> Tensor:
        """Return logprobs [B, S] fp32 under the weights at the start. Entry t corresponds to token t. Collective."""
        self._model.gather_parameters()
        self._model.set_training(False)
        with self._model.adapters_off(trained_only=True) if self._start is None else self._in_place(self._start):
            return self._inference.logprobs(data, batching)

    def _weights(self) -> list[torch.nn.Parameter]:
        model_chunks = self._model.model_chunks
        whole = [weight for weight, _ in whole_parameters(model_chunks)]
        return [weight for adapter in trained_adapters_of(model_chunks) for weight in adapter.parameters()] + whole

    @contextmanager
    def _in_place(self, start: list[Tensor]) -> Iterator[None]:
        now = [weight.detach().clone() for weight in self._weights()]
        try:
            self._set(start)
            yield
        finally:
            self._set(now)

    def _set(self, values: list[Tensor]) -> None:
        _copy(values, self._weights())
        for adapter in dora_adapters_of(self._model.model_chunks):
            adapter.forget_lengths()


@torch.no_grad()
def _copy(values: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.copy_(value)


class HostWeights:
    """The parameters of modules in host memory (pinned if there is a GPU), which are copied to the device for a call.

    It owns the host copies. Between calls the modules' parameters are empty.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device):
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._host = [parameter.data.to("cpu", copy=True) for parameter in self._parameters]
        if device.type == "cuda":
            self._host = [weights.pin_memory() for weights in self._host]
        self._device = device
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the parameters on the device within the block."""
        try:
            for parameter, weights in zip(self._parameters, self._host, strict=True):
                parameter.data = weights.to(self._device, non_blocking=True)
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
