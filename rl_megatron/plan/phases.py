"""What a rank uses in each phase of a step: bytes by category, FLOPs, collectives and host syncs."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

PhaseName = Literal[
    "build", "generate", "logprobs", "reference", "values", "train_critic", "train", "refit", "save"
]  # fmt: skip
RankKind = Literal["first stage", "middle stage", "last stage"]
GroupName = Literal["tensor", "data", "context", "pipeline", "expert", "world"]


@dataclass(frozen=True)
class Bytes:
    """Device memory in bytes, by what it is used for.

    Attributes:
        parameters: The weights of the policy, the critic and the reference policy.
        gradients: The buffers that gradients are summed in.
        optimizer: Adam's moments and the fp32 copy of the weights.
        activations: Tensors that the forward pass keeps for the backward pass, and temporary tensors.
        logits: Logits and their gradient.
        buffers: Batches, token positions, masks, and the buckets of a weight sync.
        kv_cache: Keys and values of the sequences that are being decoded.
        servers: The memory of rollout servers on the same GPU.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    buffers: int = 0
    kv_cache: int = 0
    servers: int = 0

    @property
    def total(self) -> int:
        """Return the sum of all categories."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Collective:
    """Equal collectives of a phase on one rank.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" or "recv".
        bytes: The bytes of one call on one rank: of its input or its output, whichever is larger.
    """

    kind: str
    group: GroupName
    group_size: int
    bytes: int
    count: int = 1


@dataclass(frozen=True)
class PhaseUse:
    """The use of one phase on one rank.

    Attributes:
        peak: The live bytes at the peak, by category.
        after_bytes: The live bytes at the end of the phase.
        flops: Floating-point operations of matrix products and attention, as torch's FlopCounterMode counts them.
        kernels: The operators that were launched.
        memory_bytes: The bytes that these operators read and write.
        syncs: The host syncs: (file and line, how often).
        host_bytes: The peak host memory of this rank, including what it holds during the whole phase.
        timeline: Points (number of an operator, live bytes after it), for a picture.
    """

    name: PhaseName
    peak: Bytes
    after_bytes: int = 0
    flops: int = 0
    kernels: int = 0
    memory_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    syncs: tuple[tuple[str, int], ...] = ()
    host_bytes: int = 0
    timeline: tuple[tuple[int, int], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Return the live bytes at the peak."""
        return self.peak.total


@dataclass(frozen=True)
class RankUse:
    """The use of every phase of a step on a rank of one kind.

    Attributes:
        phases: The phases, in the order in which a step runs them.
    """

    kind: RankKind
    rank: int
    phases: tuple[PhaseUse, ...]

    @property
    def peak_phase(self) -> PhaseUse:
        """Return the phase with the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)
