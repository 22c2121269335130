"""The policy that a policy is measured against: a frozen copy beside it, or what it said of the data, recorded.

Never are the policy's own weights swapped out and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from rl_megatron import log
from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution import Runner
from rl_megatron.model.build import Head, unwrap
from rl_megatron.policy.interfaces import PolicyInterface
from rl_megatron.policy.recorded_reference import RecordedReference
from rl_megatron.weight_sync.exporter import weights_digest

if TYPE_CHECKING:
    from rl_megatron.topology.topology import Topology

Residence = Literal["resident", "offload"]


class ReferencedPolicy(PolicyInterface):
    """The part of a policy that keeps a reference. Every method is collective."""

    chunks: list[torch.nn.Module]
    topology: Topology
    require_head: Callable[[Head, str], None]
    _new_model: Callable[[], list[torch.nn.Module]]
    _runner_of: Callable[[list[torch.nn.Module]], Runner]
    _token_stream: Callable[..., Tensor]

    def __init__(self, residence: Residence) -> None:
        self._residence = residence
        self._reference: Reference | RecordedReference | None = None

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    def freeze_reference(self) -> None:
        """Copies the present weights into a frozen reference policy, kept beside the policy."""
        self.require_head("lm", "freeze_reference")
        self.finish_training()
        chunks = self._new_model()
        device = self.topology.device
        self._reference = Reference(chunks, self.chunks, self._runner_of(chunks), self._residence, device)

    def record_reference(self, path: Path, batches: Iterable[BatchedDataDict]) -> None:
        """Computes what the present weights say of the rows of `batches`, and keeps that, here and at `path`, in the
        place of a reference policy: the reference of these rows, in whatever batches, and of no others. Rows that
        `path` holds of the same weights are not computed again."""
        self.require_head("lm", "record_reference")
        self.finish_training()
        self.drop_reference()
        recorded = RecordedReference(path, weights_digest(self.chunks, self.topology))
        recorded.complete(batches, lambda batch: self.get_logprobs(batch)["logprobs"])
        self._reference = recorded

    def drop_reference(self) -> None:
        self._reference = None

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`reference_logprobs` [B, S] of the policy that `freeze_reference` kept, or `record_reference` recorded."""
        self.require_head("lm", "get_reference_policy_logprobs")
        if self._reference is None:
            raise RuntimeError("there is no reference policy yet; call freeze_reference() first")
        if isinstance(self._reference, RecordedReference):
            return BatchedDataDict({"reference_logprobs": self._reference.logprobs(data)})
        logprobs = self._token_stream(self._reference.next_token_logprobs, data, micro_batch_size)
        return BatchedDataDict({"reference_logprobs": logprobs})


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
