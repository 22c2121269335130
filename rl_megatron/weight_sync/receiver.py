"""`WeightReceiver`: the engine's side of a weight sync.

The engine may serve the weights only after every tensor has arrived once and unaltered. An engine's process imports
neither megatron-core nor a policy, so this module does not either.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from rl_megatron.weight_sync.buckets import RefitPlan, WeightsRefused
from rl_megatron.weight_sync.process_group import Handle, StandaloneGroup


class WeightSink(Protocol):
    """The model of an engine, into which weights are loaded."""

    def check(self, plan: RefitPlan) -> None:
        """Check that the plan has the tensors of the engine's model, and no others.

        Raises:
            WeightsRefused: They differ. The message names the first tensor that does.
        """
        ...

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy verified tensors, each with its Hugging Face name, into the model.

        The memory of the tensors is reused after the call.

        Raises:
            WeightsRefused: The model cannot take a tensor.
        """
        ...


class ParameterSink:
    """A `WeightSink` of parameters that have their Hugging Face names and shapes."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        """Keep the engine's parameters by Hugging Face name.

        If two names share memory (tied embeddings), the weights may have either name in the plan.
        """
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}

    def check(self, plan: RefitPlan) -> None:
        """Check that the plan fits the parameters; see `WeightSink.check`."""
        announced = {spec.name: spec for bucket in plan.buckets for spec in bucket.tensors}
        for name, spec in announced.items():
            if name not in self._parameters:
                raise WeightsRefused(f"{name} is unknown to the engine's model")
            parameter = self._parameters[name]
            if (tuple(parameter.shape), parameter.dtype) != (spec.shape, spec.torch_dtype):
                raise WeightsRefused(
                    f"{name} will come as {spec.dtype} {list(spec.shape)}, but the engine's model has "
                    f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
                )
        filled = {self._parameters[name].data_ptr() for name in announced}
        for name, parameter in self._parameters.items():
            if name not in announced and parameter.data_ptr() not in filled:
                raise WeightsRefused(f"{name} of the engine's model is missing from the trainer's plan")

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            self._parameters[name].copy_(weight)


class WeightReceiver:
    """An object that verifies buckets and loads them into a sink. It owns the version of the sink's weights.

    Attributes:
        version: The version of the weights in the sink. It is None before the first refit, during a refit, and after a
            refused refit, when the weights are a mixture of versions that must not be served.
        seconds: The seconds that the last refit spent in each phase, `verify` and `copy`.
    """

    def __init__(self, sink: WeightSink, plan: RefitPlan):
        """Check that the trainer's plan fits the engine's model, and keep both.

        Raises:
            WeightsRefused: The plan or the engine's model lacks a tensor, or a tensor differs in shape or dtype. The
                message names the first such tensor.
        """
        self.version: int | None = None
        self.seconds: dict[str, float] = {}
        self._plan = plan
        self._sink = sink
        self._pending: int | None = None
        self._received: set[int] = set()
        sink.check(plan)

    def begin(self, version: int) -> None:
        """Begin a refit to the weights of `version`. The old weights must not be served from now on."""
        self.version, self._pending, self._received = None, version, set()
        self.seconds = {"verify": 0.0, "copy": 0.0}

    @torch.no_grad()
    def accept(self, bucket_index: int, buffer: Tensor) -> None:
        """Verify the bucket in `buffer` [≥ the bucket's num_words] int64, and load its tensors into the sink.

        Raises:
            WeightsRefused: The bucket is unknown, has arrived already, is too short, or holds an altered tensor. The
                refit has then failed, and a new one must begin.
        """
        if self._pending is None:
            raise WeightsRefused("a bucket came outside a refit: the last refit was refused, or none has begun")
        pending, self._pending = self._pending, None  # restored if the bucket is accepted
        if not 0 <= bucket_index < len(self._plan.buckets):
            raise WeightsRefused(f"bucket {bucket_index} is unknown; {len(self._plan.buckets)} were announced")
        bucket = self._plan.buckets[bucket_index]
        if bucket_index in self._received:
            raise WeightsRefused(f"{bucket.tensors[0].name} came twice, with bucket {bucket_index}")
        if buffer.numel() < bucket.num_words:
            raise WeightsRefused(
                f"{bucket.tensors[-1].name} is missing: bucket {bucket_index} came with {buffer.numel()} words instead "
                f"of {bucket.num_words}"
            )
        began = time.perf_counter()
        bucket.verify(buffer)
        verified = time.perf_counter()
        self._sink.load((spec.name, bucket.tensor(buffer, index)) for index, spec in enumerate(bucket.tensors))
        self.seconds["verify"] += verified - began
        self.seconds["copy"] += time.perf_counter() - verified
        self._received.add(bucket_index)
        self._pending = pending

    def finish(self) -> int:
        """End the refit, and return the version that may be served from now on.

        Raises:
            WeightsRefused: A tensor did not arrive. The message names the first such tensor.
        """
        if self._pending is None:
            raise WeightsRefused("there is no refit to finish: the last refit was refused, or none has begun")
        pending, self._pending = self._pending, None
        for index, bucket in enumerate(self._plan.buckets):
            if index not in self._received:
                raise WeightsRefused(f"{bucket.tensors[0].name} is missing: bucket {index} never came")
        self.version = pending
        return pending

    def receive(self, group: StandaloneGroup, version: int) -> int:
        """Receive all weights over `group` while the trainer calls `WeightSender.broadcast`, and return the version.

        The trainer and all engines must have joined the group. While one bucket is verified and copied, the next one is
        received.

        Raises:
            WeightsRefused: A bucket was refused. The other buckets are still received, so that the trainer does not
                wait for this process.
            CollectiveFailed: A peer died.
        """
        self.begin(version)
        buckets, refused = self._plan.buckets, None
        words = max(bucket.num_words for bucket in buckets)
        buffers = [torch.empty(words, dtype=torch.int64, device=group.device) for _ in range(min(2, len(buckets)))]

        def expect(index: int) -> Handle:
            return group.all_reduce(buffers[index % 2][: buckets[index].num_words].zero_())

        coming = expect(0)
        for index in range(len(buckets)):
            coming.wait()
            if index + 1 < len(buckets):
                coming = expect(index + 1)
            if refused is None:
                try:
                    self.accept(index, buffers[index % 2])
                except WeightsRefused as error:
                    refused = error
        if refused is not None:
            raise refused
        return self.finish()
