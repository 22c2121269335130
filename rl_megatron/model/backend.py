"""The modules of a transformer layer: Transformer Engine's if they support the run, otherwise portable ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import LayerKind
from rl_megatron.log import once
from rl_megatron.model.layers.attention import PortableAttention, PortablePacking, PortableSelfAttention
from rl_megatron.model.layers.gated_activation import GatedActivation
from rl_megatron.model.layers.gated_delta import GatedDelta
from rl_megatron.model.layers.latent_attention import LatentAttention
from rl_megatron.model.layers.norms import NormedResidual, PortableRMSNorm
from rl_megatron.model.layers.packed import PackedSequences
from rl_megatron.model.layers.packed_tree import PackedTree
from rl_megatron.model.layers.router import BalancedRouter
from rl_megatron.topology.topology import Topology

# Keys that need portable layers. megatron-core has no Transformer Engine layers for the first two. Its layers for the
# other keys have not been tested here.
_PORTABLE_ONLY = (
    "local_rope_base", "sandwich_norms", "kv_lora_rank", "first_dense_layers", "partial_rotary_factor",
    "rope_interleaved", "attention_sinks", "linear_bias", "attention_output_gate", "full_attention_every",
)  # fmt: skip
_DEFAULT = ModelConfig()


def choose_backend(model: ModelConfig, topology: Topology, precision: str) -> str:
    """Return "transformer_engine" or "portable", as `model.backend` asks.

    "auto" means Transformer Engine if it is installed and supports the model, the layout and the precision.
    """
    wanted, obstacle = model.backend, _find_obstacle(model, topology, precision)
    if wanted == "transformer_engine" and obstacle:
        raise ConfigError(f"model.backend=transformer_engine: {obstacle}; use model.backend=auto")
    if wanted != "auto":
        return wanted
    if obstacle and topology.is_cuda:
        once(f"{obstacle[0].upper()}{obstacle[1:]}: layers use the portable torch modules")
    return "portable" if obstacle else "transformer_engine"


def _find_obstacle(model: ModelConfig, topology: Topology, precision: str) -> str | None:
    if not topology.is_cuda:
        return "it needs a GPU, but this run uses none"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    if precision == "fp32":
        # In fp32, Transformer Engine also lacks flash attention, and any attention for packs or context parallelism.
        return "Transformer Engine multiplies matrices in TF32 under precision=fp32"
    if model.sliding_window is not None and topology.context > 1:
        # Transformer Engine refuses windows with ring attention, megatron-core's default. Which other kinds of context
        # parallelism support packs depends on Transformer Engine's version.
        return (
            f"Transformer Engine cannot combine model.sliding_window={model.sliding_window} with "
            f"parallel.context={topology.context}"
        )
    if model.activation == "swiglu_oai":
        return "only portable layers support model.activation=swiglu_oai"
    if topology.expert_tensor > 1:  # not tested with Transformer Engine's grouped experts
        return f"only portable layers support parallel.expert_tensor={topology.expert_tensor}"
    for key in _PORTABLE_ONLY:
        value = getattr(model, key)
        if value != getattr(_DEFAULT, key):
            return f"only portable layers support model.{key}={str(value).lower()}"
    return None


def build_block_spec(
    model: ModelConfig, config: TransformerConfig, backend: str, vp_stage: int | None
) -> TransformerBlockSubmodules | ModuleSpec:
    """Return megatron-core's spec of the decoder layers of this pipeline stage, or of its model chunk `vp_stage`."""
    if backend == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=True, qk_layernorm=config.qk_layernorm
        )
        if config.num_moe_experts is not None:
            mlp: Any = cast(TransformerLayerSubmodules, layer.submodules).mlp  # a result of `_build_experts_spec`
            (mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules).router = BalancedRouter
        return layer
    first = get_transformer_layer_offset(config, vp_stage)
    layers = [
        _build_portable_layer(model, config, LayerKind.from_model(model, layer))
        for layer in range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    ]
    norm: Any = PortableRMSNorm  # the annotation asks for an instance, but megatron-core passes classes too
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _build_experts_spec(module: type, submodules: object) -> Any:
    """Return a builder of an experts' module in megatron-core's form: a spec in 0.16, a callable in later versions."""
    if hasattr(moe_layer, "ExpertsBuilder"):
        return partial(module, submodules=submodules)
    return ModuleSpec(module=module, submodules=submodules)


def build_packing_params(
    padded_lengths: Sequence[int], topology: Topology, backend: str, tree: PrefixTree | None = None
) -> PackedSeqParams:
    """Return the packing parameters that the layers need to process a pack. Their tensors are on the host.

    `padded_lengths` has the length of each sequence in tokens, padding included, over all ranks. If the sequences share
    tokens, it has that of each segment of their `tree`.
    """
    if tree is not None:
        if backend != "portable":
            raise ValueError(f"the layers of {backend} cannot share the tokens of common prefixes")
        return PortablePacking(sequences=PackedTree.from_tree(tree, padded_lengths, topology.groups.cp))
    if backend == "portable":
        return PortablePacking(sequences=PackedSequences.from_padded_lengths(padded_lengths, topology.groups.cp))
    # Padding follows its sequence and attention is causal, so padding may count as part of the sequence. If max_seqlen
    # is the length of the pack, megatron-core wrongly counts RoPE positions over the whole pack. It must therefore be
    # the longest padded length.
    longest, starts = max(padded_lengths), torch.tensor([0, *accumulate(padded_lengths)], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def _build_portable_layer(model: ModelConfig, config: TransformerConfig, kind: LayerKind) -> ModuleSpec:
    # Checkpoints have Transformer Engine's names, in which a norm is part of the linear that follows it.
    if kind.has_delta_rule:
        attention = ModuleSpec(module=GatedDelta, params={"model": model})
        names = {"input_layernorm.": "self_attention.linear_in_proj.layer_norm_"}
    else:
        has_latent = model.kv_lora_rank is not None
        attention, names = _specify_latent_attention(model) if has_latent else _specify_self_attention(config)
    parts = MLPSubmodules(
        linear_fc1=ColumnParallelLinear,
        activation_func=ModuleSpec(module=GatedActivation, params={"activation": model.activation}),
        linear_fc2=RowParallelLinear,
    )
    if kind.has_experts:
        experts, shared = _build_experts_spec(SequentialMLP, parts), _build_experts_spec(SharedExpertMLP, parts)
        mlp = _build_experts_spec(MoELayer, MoESubmodules(experts, shared, BalancedRouter))
    else:
        mlp = ModuleSpec(module=MLP, submodules=parts)
        names |= {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    residual: Any = get_bias_dropout_add  # the annotation asks for a class, but megatron-core passes functions too
    if model.sandwich_norms:
        residual = ModuleSpec(module=NormedResidual, params={"config": config})
        names |= {"self_attn_bda.norm.": "post_self_attn_layernorm.", "mlp_bda.norm.": "post_mlp_layernorm."}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=PortableRMSNorm,
            self_attention=attention,
            self_attn_bda=residual,
            pre_mlp_layernorm=PortableRMSNorm,
            mlp=mlp,
            mlp_bda=residual,
            sharded_state_dict_keys_map=names,
        ),
    )


def _specify_self_attention(config: TransformerConfig) -> tuple[ModuleSpec, dict[str, str]]:
    """Return the spec of self-attention, and the names of its norms in checkpoints."""
    qk_norm = PortableRMSNorm if config.qk_layernorm else IdentityOp
    attention = ModuleSpec(
        module=PortableSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PortableAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )
    return attention, {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def _specify_latent_attention(model: ModelConfig) -> tuple[ModuleSpec, dict[str, str]]:
    names = {
        f"self_attention.{part}_layernorm.": f"self_attention.linear_{part}_up_proj.layer_norm_" for part in ("q", "kv")
    }
    return ModuleSpec(module=LatentAttention, params={"model": model}), names
