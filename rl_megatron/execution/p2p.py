"""Sends between pipeline stages when microbatches differ in shape.

megatron-core lets stages tell each other each shape before each tensor: a wait for the device at every send, and, where
two stages interleave chunks (each is the other's next and previous at once), shapes that meet the wrong receiver. Here
every stage knows the plan, and so what will come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer import TransformerConfig

from rl_megatron.topology.topology import Topology

Shape = tuple[int, int]


class PlannedCommunicator(P2PCommunicator):
    """megatron-core's sends, with the shapes of what is received taken from the plan.

    `shapes`: (rows, tokens of a row over all ranks) of each microbatch, in order. Activations arrive chunk by chunk for
    each group of microbatches (as many as stages; all of them without interleaving), gradients likewise; the first
    stage receives none for its first chunk, the last stage no gradients for its last.
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
    """[S, b, H] of the hidden states between stages, on this rank."""
    num_sequences, length = shape
    cut = topology.context * (topology.tensor if topology.sequence else 1)
    return [length // cut, num_sequences, config.hidden_size]
