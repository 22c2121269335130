"""A head that gives one number a token: what a reward model scores with, and a critic values with."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_megatron.topology.topology import Topology


class ScoreHead(MegatronModule):
    """score = w·h in fp32, in the place of a GPTModel's output layer, and called as one.

    w is whole on every tensor-parallel rank, and each of them computes every score: one vector is not worth a
    collective. Their gradients are therefore equal and are not summed; under sequence parallelism the hidden states are
    gathered first, and backward takes each rank's part of the tokens.

    Shapes: hidden [S, B, H] (sequence parallel: [S/tp, B, H]) → [S, B, 1].
    """

    def __init__(self, config: TransformerConfig, topology: Topology):
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = topology.groups.tp  # megatron-core's checkpointing reads it too

    def forward(self, hidden: Tensor, weight: None = None, runtime_gather_output: bool | None = None):
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None
