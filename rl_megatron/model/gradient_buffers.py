"""The layout of a rank's gradients in megatron-core's DDP and distributed optimizer, computed without the model.

All counts are exact. tests/unit/model/test_sharded_shape.py compares them with what a `MegatronPolicy` allocates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl_megatron.model.sharded_shape import Parameter, ShardedShape

# megatron-core aligns each parameter's start and each bucket's end to multiples of these numbers of elements.
_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
# If gradients are reduced during backward, a bucket ends at the larger of these numbers of elements. The second is per
# data-parallel rank.
_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True)
class GradientBuffer:
    """megatron-core's gradient buffer for some parameters of one model chunk.

    Attributes:
        elements: The number of its elements, alignment included.
        parameters: (first element, last element + 1) of each parameter.
        buckets: (first element, last element + 1) of each bucket. Each bucket is split over `shards` ranks.
        shards: The number of ranks that split the optimizer state.
        of_experts: Whether the parameters are those of routed experts.
    """

    elements: int
    parameters: tuple[tuple[int, int], ...]
    buckets: tuple[tuple[int, int], ...]
    shards: int
    of_experts: bool

    @classmethod
    def from_parameters(
        cls, parameters: list[Parameter], shards: int, *, distributed: bool, bucket_elements: int | None
    ) -> GradientBuffer:
        """Return the buffer of some parameters, which it holds in reverse order.

        Args:
            parameters: The parameters of a model chunk, either dense ones or those of experts.
            shards: The number of ranks that split the optimizer state.
            distributed: Whether the optimizer is distributed. Otherwise nothing is aligned.
            bucket_elements: The number of elements after which a bucket ends, or None for one bucket.
        """
        alignment = _PARAMETER_ALIGNMENT if distributed else 1
        bucket_alignment = math.lcm(shards, _BUCKET_ALIGNMENT) if distributed else 1
        places: list[tuple[int, int]] = []
        buckets: list[tuple[int, int]] = []
        end = bucket_start = in_bucket = 0

        def close(end: int) -> int:
            nonlocal bucket_start, in_bucket
            buckets.append((bucket_start, _align(end, bucket_alignment)))
            bucket_start, in_bucket = buckets[-1][1], 0
            return bucket_start

        for parameter in reversed(parameters):
            start, alone = _align(end, alignment), parameter.is_shared and distributed
            if alone and in_bucket:  # the first and last stage must split a shared embedding alike
                start = close(start)
            end = start + parameter.elements
            places.append((start, end))
            in_bucket += 1
            if alone or (bucket_elements is not None and end - bucket_start >= bucket_elements):
                end = close(end)
        if in_bucket:
            end = close(end)
        return cls(end, tuple(places), tuple(buckets), shards, any(parameter.of_expert for parameter in parameters))

    def shard_elements(self, rank: int) -> int:
        """Return the number of elements, without alignment, whose optimizer state is on one of the `shards` ranks."""
        total = 0
        for first, last in self.buckets:
            size = (last - first) // self.shards
            begin, end = first + rank * size, first + (rank + 1) * size
            total += sum(max(0, min(end, stop) - max(begin, start)) for start, stop in self.parameters)
        return total


def plan_gradient_buffers(shape: ShardedShape, stage: int, *, distributed: bool, overlap: bool) -> list[GradientBuffer]:
    """Return the buffers of a rank of a stage: for each model chunk, one for dense parameters and one for experts'.

    `distributed` and `overlap` are the keys of the section `optimizer`.
    """
    distributed = distributed and shape.has_replicas
    limit = max(_BUCKET_ELEMENTS, _BUCKET_ELEMENTS_PER_RANK * shape.data) if overlap else None
    buffers = []
    for model_chunk, parameters in enumerate(shape.parameters(stage)):
        bucket_elements = limit if stage == 0 and model_chunk == 0 else None  # the others are not split by size
        for of_expert, shards in ((False, shape.data_shards), (True, shape.expert_shards)):
            chosen = [parameter for parameter in parameters if parameter.of_expert == of_expert]
            if chosen:
                buffers.append(
                    GradientBuffer.from_parameters(
                        chosen, shards, distributed=distributed, bucket_elements=bucket_elements
                    )
                )
    return buffers


def _align(number: int, divisor: int) -> int:
    return -(-number // divisor) * divisor
