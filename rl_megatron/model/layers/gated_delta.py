"""The gated delta rule, which replaces attention in most layers of Qwen3.5."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import silu

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape
from rl_megatron.model.layers import norms
from rl_megatron.model.layers.attention import PortablePacking
from rl_megatron.model.layers.delta_rule import DeltaStates, apply_delta_rule, compute_log_decays, convolve
from rl_megatron.model.layers.packed_tree import PackedTree
from rl_megatron.topology.context_parallel import gather_heads, scatter_heads, zigzag_order


class GatedDelta(MegatronModule):
    """The gated delta rule of a layer and its projections, in the place of megatron-core's self-attention.

        q, k, v, β, α, z = W_in·h                    per group: one query and key, and R values with their β, α and z
        o = delta_rule(silu(conv(q, k, v)), sigmoid(β), −exp(A_log)·softplus(α + dt_bias))
        output = W·(norm(o)·silu(z))

    Tensor parallelism splits the groups. For the delta rule itself, context parallelism splits them further: instead of
    all groups of its own tokens, each rank gets all tokens of some groups.

    Shapes: hidden is [S, B, H], or [S/tp, B, H] under sequence parallelism; the result has the same shape.

    Source: Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464), and Qwen3.5 in transformers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        model: ModelConfig,
        pg_collection: ProcessGroupCollection,
        **_: object,  # arguments that megatron-core passes to every attention
    ):
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.shape = shape = DeltaShape.from_model(model)
        recomputed = config.recompute_modules or ()
        self.recomputes = config.recompute_granularity == "selective" and "core_attn" in recomputed
        assert config.init_method is not None and config.output_layer_init_method is not None
        self.linear_in_proj = ColumnParallelLinear(
            model.hidden_size, shape.groups * shape.projected, config=config, init_method=config.init_method,
            bias=False, gather_output=False, skip_bias_add=False, is_expert=False, tp_group=self.tp_group,
        )  # fmt: skip
        self.core_attention = DeltaCore(config, shape, pg_collection)
        self.out_norm = GatedRMSNorm(config, shape.value, self.tp_group)
        self.linear_proj = RowParallelLinear(
            shape.groups * shape.values * shape.value, model.hidden_size, config=config,
            init_method=config.output_layer_init_method, bias=False, input_is_parallel=True, skip_bias_add=True,
            is_expert=False, tp_group=self.tp_group,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,  # arguments for RoPE, which the delta rule lacks, and for megatron-core's inference
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [S, B, H] and its bias, which is None. `attention_mask` is not used: the rule is causal."""
        mixed, _ = self.linear_in_proj(hidden_states)
        grouped = mixed.unflatten(-1, (-1, self.shape.projected))
        mixed, gate = grouped.split([self.shape.recurrent, self.shape.values * self.shape.value], dim=-1)

        def compute(mixed: Tensor) -> Tensor:
            return self.core_attention(mixed, packed_seq_params=packed_seq_params)

        output = checkpoint(compute, False, mixed) if self.recomputes and self.training else compute(mixed)
        normed = self.out_norm(output, gate.unflatten(-1, (self.shape.values, -1)))
        return self.linear_proj(normed.flatten(2))


class DeltaCore(torch.nn.Module):
    """The convolution and the gated delta rule of this rank's groups.

    Its parameters, ordered by group, are `conv` [G·C, 1, K], which has K factors for each convolved channel, `A_log`
    [G·R] and `dt_bias` [G·R].
    """

    def __init__(self, config: TransformerConfig, shape: DeltaShape, pg_collection: ProcessGroupCollection):
        super().__init__()
        self.shape, self.tp_group, self.cp_group = shape, pg_collection.tp, pg_collection.cp
        groups = shape.groups // config.tensor_model_parallel_size
        self.conv = self._empty(config, groups * shape.convolved, 1, shape.kernel)
        self.A_log = self._empty(config, groups * shape.values)
        self.dt_bias = self._empty(config, groups * shape.values)

    @staticmethod
    def _empty(config: TransformerConfig, *size: int) -> torch.nn.Parameter:
        weight = torch.empty(size, dtype=config.params_dtype, device=torch.cuda.current_device())
        parameter = torch.nn.Parameter(weight)
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, object]:
        """Return where this rank's parameters, which tensor parallelism splits by rows, are in the whole model."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, dict.fromkeys(state, 0), sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=(metadata or {})["dp_cp_group"],
        )  # fmt: skip

    def forward(self, mixed: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        """Return the output [S, B, G, R, Dv], given queries, keys, values, strengths and decays [S, B, G, C]."""
        whole = scatter_heads(mixed, self.cp_group)  # in rank order
        if packed_seq_params is None:
            output = self._compute_padded(whole)
        else:
            assert isinstance(packed_seq_params, PortablePacking)
            sequences, tokens = packed_seq_params.sequences, whole[:, 0]
            if isinstance(sequences, PackedTree):
                return gather_heads(self._compute_tree(tokens, sequences)[:, None], self.cp_group)
            buckets = sequences.buckets
            batches = [tokens.index_select(0, bucket.keys).unflatten(0, bucket.key_shape) for bucket in buckets]
            outputs = torch.cat([self.compute(batch)[0].flatten(0, 1) for batch in batches])
            output = outputs.index_select(0, sequences.key_slots)[:, None]
        return gather_heads(output, self.cp_group)

    def _compute_tree(self, tokens: Tensor, tree: PackedTree) -> Tensor:
        """Return the output of a tree's tokens [T, …] in rank order. A segment starts from the states of its parent."""
        if tree.order is not None:
            tokens = tokens.index_select(0, tree.order)
        states: dict[int, DeltaStates] = {}
        outputs = []
        for batch in tree.batches:
            parents = [tree.tree.segments[index].parent for index in batch.segments]
            above = [states[parent] for parent in parents if parent is not None]
            earlier = DeltaStates(*map(torch.stack, zip(*above, strict=True))) if above else None
            mixed = tokens.index_select(0, batch.keys).unflatten(0, batch.key_shape)
            output, later = self.compute(mixed, earlier, batch.lengths)
            outputs.append(output.flatten(0, 1))
            for index, *state in zip(batch.segments, *later, strict=True):
                states[index] = DeltaStates(*state)
        output = torch.cat(outputs).index_select(0, tree.batch_slots)
        return output if tree.order is None else output.new_empty(output.shape).index_copy(0, tree.order, output)

    def _compute_padded(self, whole: Tensor) -> Tensor:
        """Return the output of a padded batch whose tokens are in rank order."""
        if self.cp_group.size() == 1:
            return self.compute(whole.transpose(0, 1))[0].transpose(0, 1)
        order = zigzag_order(len(whole), self.cp_group.size(), whole.device)
        output, _ = self.compute(whole.index_select(0, order).transpose(0, 1))
        return output.transpose(0, 1).index_select(0, order.argsort())

    def compute(
        self, mixed: Tensor, earlier: DeltaStates | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, DeltaStates]:
        """Return the output [B, L, G, R, Dv] of sequences, and their states after the last token.

        Args:
            mixed: [B, L, G, C] The input of `forward`, batch first, for the groups that this rank computes: all of its
                tensor-parallel shard or, under context parallelism, a part of that shard.
            earlier: The states before the first token, or None at the start of the sequences.
            lengths: [B] The length of each sequence, or None for L. Later tokens do not change the states.
        """
        shape, groups = self.shape, self._select_groups(mixed.size(2))
        conv = self.conv.squeeze(1).unflatten(0, (-1, shape.convolved))[groups]
        log_rate, bias = (x.unflatten(0, (-1, shape.values))[groups] for x in (self.A_log, self.dt_bias))
        channels, strength, steps = mixed.split([shape.convolved, shape.values, shape.values], dim=-1)
        channels, last = convolve(channels, conv, None if earlier is None else earlier.last, lengths)
        query, key, value = silu(channels).split([shape.key, shape.key, shape.values * shape.value], dim=-1)
        output, memory = apply_delta_rule(
            query, key, value.unflatten(-1, (shape.values, -1)), compute_log_decays(steps, log_rate, bias),
            strength.sigmoid(), None if earlier is None else earlier.memory, lengths,
        )  # fmt: skip
        return output.to(mixed.dtype), DeltaStates(last, memory)

    def _select_groups(self, count: int) -> slice:
        """Return the groups of the tensor-parallel shard that this rank computes; context parallelism splits them."""
        first = self.cp_group.rank() * count if count < len(self.A_log) // self.shape.values else 0
        return slice(first, first + count)


class GatedRMSNorm(torch.nn.Module):
    """The norm of each head's output, multiplied by silu(gate). The norm's weight is the same for all heads."""

    def __init__(self, config: TransformerConfig, size: int, tp_group: torch.distributed.ProcessGroup):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.empty(size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.epsilon, self.tp_group = config.layernorm_epsilon, tp_group

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return norm(x)·silu(gate) of [..., D] in the dtype of x."""
        # Each rank's heads contribute to the weight's gradient, and backward sums the contributions.
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group)
        return (norms.apply_rms_norm(x, weight, self.epsilon) * silu(gate.float())).type_as(x)
