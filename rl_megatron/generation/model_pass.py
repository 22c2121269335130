"""Pass tokens through the policy's model chunks, pipeline stage after pipeline stage, for generation."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rl_megatron.model.build import unwrap
from rl_megatron.training.megatron_policy import MegatronPolicy


class ModelPass:
    """The forward pass of a policy's model without its loss. It owns the table of RoPE angles.

    Every rank of a model replica calls it with the same tokens.
    """

    def __init__(self, policy: MegatronPolicy):
        self.topology = policy.topology
        self.models: list[GPTModel] = [unwrap(model_chunk) for model_chunk in policy.model.model_chunks]
        self._angles = torch.empty(0)

    def angles(self, num_positions: int) -> Tensor:
        """Return the RoPE angles of the first positions, [num_positions, 1, 1 or 2, D]. The table is made once."""
        if len(self._angles) < num_positions:
            self._angles = cast(RotaryEmbedding, self.models[0].rotary_pos_emb).get_emb(num_positions)
        return self._angles[:num_positions]

    def __call__(self, tokens: Tensor, angles: Tensor, wants_logits: bool) -> Tensor | None:
        """Compute all stages for tokens, one stage after the other.

        Args:
            tokens: Token ids, [b, s].
            angles: The RoPE angles, [s, 1 or b, 1 or 2, D].
            wants_logits: Whether the logits after the last column are needed, and not only the caches.

        Returns:
            Vocab-parallel logits [b, V/tp] on the last stage, and None elsewhere or if they are not needed.
        """
        ranks = dist.get_process_group_ranks(self.topology.groups.pp)
        before = ranks[(self.topology.pipeline_rank - 1) % self.topology.pipeline]
        after = ranks[(self.topology.pipeline_rank + 1) % self.topology.pipeline]
        for model in self.models:
            hidden = None
            if model.pre_process:
                hidden = model.embedding(input_ids=tokens, position_ids=None)
            else:
                parameter = next(model.parameters())
                shape = (tokens.size(1), tokens.size(0), model.config.hidden_size)
                received = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                dist.recv(received, src=before, group=self.topology.groups.pp)
                model.set_input_tensor(received)
            hidden = model.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
            if model.post_process:
                return self._logits(model, hidden[-1:]) if wants_logits else None
            dist.send(hidden.contiguous(), dst=after, group=self.topology.groups.pp)
        return None

    def _logits(self, model: GPTModel, hidden: Tensor) -> Tensor:
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else None
        logits, _ = model.output_layer(hidden, weight=weight)
        return logits[0]
