"""The receiving end of a refit: nothing is served until every tensor has come, once and unaltered.

Light on purpose: an engine's process imports neither megatron-core nor a policy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from rl_megatron.weight_sync.plan import RefitPlan, WeightsRefused
from rl_megatron.weight_sync.process_group import StandaloneGroup


class WeightReceiver:
    """Copies buckets into an engine's parameters.

    version: of the weights that the parameters hold; None before the first refit, while one is under way, and after
        one that was refused, when the parameters are a mixture that must not be served.
    seconds: what the last refit spent, by phase: `verify`, `copy`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], plan: RefitPlan):
        """parameters: by their Hugging Face names; names that share memory (tied embeddings) may come under either.

        Raises: WeightsRefused naming the first tensor that is not on both sides, or differs in shape or dtype.
        """
        self.version: int | None = None
        self.seconds: dict[str, float] = {}
        self._plan = plan
        self._parameters = {name: parameter.detach() for name, parameter in parameters.items()}
        self._pending: int | None = None
        self._came: set[int] = set()
        self._check()

    def begin(self, version: int) -> None:
        """A refit to the weights of `version` begins; from here on the old ones are not served any more."""
        self.version, self._pending, self._came = None, version, set()
        self.seconds = {"verify": 0.0, "copy": 0.0}

    @torch.no_grad()
    def accept(self, bucket_index: int, buffer: Tensor) -> None:
        """Takes the bucket that `buffer` [at least its num_words] int64 holds.

        Raises: WeightsRefused naming a tensor, where the bucket came before or something in it was altered; the refit
            has failed then, and another has to begin.
        """
        if self._pending is None:
            raise WeightsRefused("a bucket came outside a refit: the last one was refused, or none has begun")
        pending, self._pending = self._pending, None  # until all went well
        if not 0 <= bucket_index < len(self._plan.buckets):
            raise WeightsRefused(f"bucket {bucket_index} is unknown; {len(self._plan.buckets)} were announced")
        bucket = self._plan.buckets[bucket_index]
        if bucket_index in self._came:
            raise WeightsRefused(f"{bucket.tensors[0].name} came twice, with bucket {bucket_index}")
        if buffer.numel() < bucket.num_words:
            raise WeightsRefused(
                f"{bucket.tensors[-1].name} is missing: bucket {bucket_index} came with {buffer.numel()} words of "
                f"{bucket.num_words}"
            )
        began = time.perf_counter()
        bucket.verify(buffer)
        verified = time.perf_counter()
        for index, spec in enumerate(bucket.tensors):
            self._parameters[spec.name].copy_(bucket.tensor(buffer, index))
        self.seconds["verify"] += verified - began
        self.seconds["copy"] += time.perf_counter() - verified
        self._came.add(bucket_index)
        self._pending = pending

    def finish(self) -> int:
        """The version that is served from here on.

        Raises: WeightsRefused naming the first tensor that did not come.
        """
        if self._pending is None:
            raise WeightsRefused("no refit to finish: the last one was refused, or none has begun")
        pending, self._pending = self._pending, None
        for index, bucket in enumerate(self._plan.buckets):
            if index not in self._came:
                raise WeightsRefused(f"{bucket.tensors[0].name} is missing: bucket {index} never came")
        self.version = pending
        return pending

    def receive(self, group: StandaloneGroup, version: int) -> int:
        """A whole refit over `group`, whose other ranks are the policy's `broadcast_weights_for_collective`: while one
        bucket is verified and copied, the next is on its way.

        Raises: WeightsRefused, after every bucket was taken off the wire, so that the policy's side is not left
            waiting; CollectiveFailed.
        """
        self.begin(version)
        buckets, refused = self._plan.buckets, None
        words = max(bucket.num_words for bucket in buckets)
        buffers = [torch.empty(words, dtype=torch.int64, device=group.device) for _ in range(min(2, len(buckets)))]

        def expect(index: int):
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

    def _check(self) -> None:
        announced = {spec.name: spec for bucket in self._plan.buckets for spec in bucket.tensors}
        for name, spec in announced.items():
            if name not in self._parameters:
                raise WeightsRefused(f"{name} is unknown to the engine's model")
            found = self._parameters[name]
            if (tuple(found.shape), found.dtype) != (spec.shape, spec.torch_dtype):
                raise WeightsRefused(
                    f"{name} comes as {spec.dtype} {list(spec.shape)}, and the engine's model has it as "
                    f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
                )
        filled = {self._parameters[name].data_ptr() for name in announced}
        for name, parameter in self._parameters.items():
            if name not in announced and parameter.data_ptr() not in filled:
                raise WeightsRefused(f"{name} of the engine's model is missing from the weights to come")
