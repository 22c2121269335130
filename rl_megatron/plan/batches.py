"""The shapes of all microbatches that a data-parallel rank computes in a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rl_megatron.batching.config import BatchingKind
from rl_megatron.model.microbatch_shape import MicrobatchShape
from rl_megatron.plan.microbatches import MicrobatchSizes
from rl_megatron.plan.workload import Workload
from rl_megatron.topology.degrees import ConfiguredLayout, sequence_multiple


@dataclass(frozen=True)
class BatchShape:
    """The microbatches of a data-parallel rank in one or several batches.

    Attributes:
        parts: (shape of a microbatch, how many such microbatches there are), the largest first.
    """

    parts: tuple[tuple[MicrobatchShape, int], ...]

    @property
    def number(self) -> int:
        """Return how many microbatches there are."""
        return sum(count for _, count in self.parts)

    @property
    def largest(self) -> MicrobatchShape:
        """Return the microbatch with the most sequences."""
        return self.parts[0][0]

    @property
    def tokens(self) -> int:
        """Return the tokens of all microbatches, padding included."""
        return sum(microbatch.tokens * count for microbatch, count in self.parts)


@dataclass(frozen=True)
class Batches:
    """The batches of a training step, on the data-parallel rank that has the most sequences.

    Attributes:
        step: One optimizer step.
        training: All optimizer steps. The last of a pass may have fewer sequences.
        rollout: A forward pass over all sequences, as for logprobs.
        learned_sequences: The sequences that all ranks learn from, each as often as it is learned from, and no padding
            sequence.
        optimizer_steps: The optimizer steps.
    """

    step: BatchShape
    training: BatchShape
    rollout: BatchShape
    learned_sequences: int
    optimizer_steps: int

    @classmethod
    def from_workload(cls, workload: Workload) -> Self:
        """Return the batches of a workload in its layout."""
        stage = workload.stage
        layout = ConfiguredLayout(workload.data, stage.parallel.context, sequence_multiple(stage.parallel))
        return cls.from_layout(
            workload, layout, workload.most_per_microbatch, stage.train.batching, workload.filled_multiple
        )

    @classmethod
    def from_layout(
        cls, workload: Workload, layout: ConfiguredLayout, most: int, kind: BatchingKind, multiple: int
    ) -> Self:
        """Return the batches of a workload in any layout.

        Args:
            workload: The workload, whose layout and batching are not read.
            layout: The layout.
            most: The most sequences of a microbatch.
            kind: `train.batching`.
            multiple: The number of microbatches is a multiple of this.
        """

        def shape(sequences: int, times: int, group_size: int) -> BatchShape:
            sizes = MicrobatchSizes.from_sequences(
                sequences, layout.data, most, kind, group_size=group_size, multiple=multiple
            )
            return BatchShape(
                tuple(
                    (
                        MicrobatchShape.from_lengths(
                            [workload.sequence_tokens] * size, layout, is_packed=kind == "packed",
                            prompt_tokens=workload.prompt_tokens,
                        ),
                        count * times,
                    )
                    for size, count in sizes.counts
                )
            )  # fmt: skip

        steps, group_size = workload.optimizer_batches, workload.group_size
        training = [part for sequences, times in steps for part in shape(sequences, times, group_size).parts]
        return cls(
            shape(steps[0][0], 1, group_size),
            BatchShape(tuple(training)),
            shape(workload.sequences_per_step, 1, 1),
            sum(sequences * times for sequences, times in steps),
            workload.optimizer_steps,
        )
