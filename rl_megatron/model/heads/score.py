"""A head that gives one number per token: the score of a reward model or the value of a critic."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_megatron.topology.topology import Topology


class ScoreHead(MegatronModule):
    """The head score = w·h in fp32. It replaces a GPTModel's output layer and is called like it.

    w is whole on every tensor-parallel rank, and each rank computes every score, because splitting one vector is not
    worth a collective. The ranks' gradients are therefore equal and are not summed. Under sequence parallelism the
    hidden states are gathered first, and in backward each rank keeps the gradient of its own tokens.

    Shapes: hidden is [S, B, H], or [S/tp, B, H] under sequence parallelism; the result is [S, B, 1].
    """

    def __init__(self, config: TransformerConfig, topology: Topology):
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.empty(1, config.hidden_size, dtype=config.params_dtype))
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = topology.groups.tp  # megatron-core's checkpointing reads it too

    def forward(self, hidden: Tensor, weight: None = None, runtime_gather_output: bool | None = None):
        """Return the scores [S, B, 1] in fp32, and None as the bias. The other arguments are not used."""
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.nn.functional.linear(hidden.float(), self.weight.float()), None
