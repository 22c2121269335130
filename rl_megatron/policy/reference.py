"""A frozen copy of a policy, beside it: never are the policy's own weights swapped out and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from rl_megatron import log
from rl_megatron.model.build import unwrap
from rl_megatron.schedule import Microbatch, Runner

Residence = Literal["resident", "offload"]


class Reference:
    """The weights that a policy had. resident: on the device, beside the policy's; offload: in host memory, and on the
    device during a call."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        of: Sequence[torch.nn.Module],
        runner: Runner,
        residence: Residence,
        device: torch.device,
    ):
        """`chunks`: fresh ones, which `runner` runs, to be filled with the weights of the policy's chunks `of`."""
        for reference, chunk in zip(chunks, of, strict=True):
            unwrap(reference).load_state_dict(unwrap(chunk).state_dict())
            reference.eval().requires_grad_(False)
        self._runner = runner
        self._host_weights: HostWeights | None = None
        if residence == "offload" and device.type == "cuda":
            self._host_weights = HostWeights(chunks, device)
        elif residence == "offload":
            log.once("train.reference=offload: on a CPU the host's memory is the device's; the reference stays in it")

    def next_token_logprobs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        with self._host_weights.on_device() if self._host_weights is not None else nullcontext():
            return self._runner.next_token_logprobs(microbatches)


class HostWeights:
    """Moves modules' parameters to host memory (pinned where there is a GPU to copy it to), and back for a while."""

    def __init__(self, modules: Sequence[torch.nn.Module], device: torch.device):
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._host = [parameter.data.to("cpu", copy=True) for parameter in self._parameters]
        if device.type == "cuda":
            self._host = [weights.pin_memory() for weights in self._host]
        self._device = device
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        try:
            for parameter, weights in zip(self._parameters, self._host, strict=True):
                parameter.data = weights.to(self._device, non_blocking=True)
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        for parameter in self._parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
