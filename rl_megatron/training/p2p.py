"""Send activations and gradients between pipeline stages, whose microbatches may differ in shape.

If shapes differ, megatron-core's stages send a shape before each tensor, so the host waits for the device at each send.
If two stages interleave model chunks, each is both the next and the previous stage of the other, so shapes reach the
wrong receiver. Here every stage knows the plan of all microbatches, and so the shape of each tensor that it receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig

from rl_megatron.topology.topology import Topology

Shape = tuple[int, int]


class PlannedCommunicator(P2PCommunicator):
    """A communicator of megatron-core that takes the shapes of received tensors from the plan.

    With interleaving, stages process microbatches in groups of as many as there are stages; otherwise, all microbatches
    are one group. In each group, activations arrive model chunk by model chunk, and so do gradients. The first stage
    receives no activations for its first model chunk, and the last stage receives no gradients for its last one.

    `shapes` are (number of sequences, padded length over all ranks) of each microbatch. A pack is one sequence.
    """

    def __init__(self, topology: Topology, config: TransformerConfig, shapes: Sequence[Shape]):
        super().__init__(topology.groups.pp, config)
        num_model_chunks, local = topology.virtual_pipeline, [_activation(shape, topology, config) for shape in shapes]
        self._group = topology.pipeline if num_model_chunks > 1 else len(local)
        self._activations = self._arrivals(local, num_model_chunks - (topology.pipeline_rank == 0))
        self._gradients = self._arrivals(local, num_model_chunks - topology.is_last_stage)

    def _arrivals(self, shapes: list[list[int]], num_model_chunks: int) -> Iterator[list[int]]:
        for start in range(0, len(shapes), self._group):
            for _ in range(num_model_chunks):
                yield from shapes[start : start + self._group]

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        nothing = [0, 0, 0]
        return (
            next(self._activations) if recv_prev else nothing,
            next(self._gradients) if recv_next else nothing,
        )


def _activation(shape: Shape, topology: Topology, config: TransformerConfig) -> list[int]:
    """Return the shape [S, b, H] of the hidden states between stages, on this rank."""
    num_sequences, length = shape
    cut = topology.context * (topology.tensor if topology.sequence else 1)
    return [length // cut, num_sequences, config.hidden_size]
