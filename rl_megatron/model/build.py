"""Build megatron-core's GPT model from a model section: one model chunk per virtual pipeline stage of a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig, YarnRope
from rl_megatron.config.model_shape import query_size, rotary_size
from rl_megatron.config.peft import LoraConfig
from rl_megatron.config.rules import check_vocabulary
from rl_megatron.model.backend import build_block_spec, choose_backend
from rl_megatron.model.heads.score import ScoreHead
from rl_megatron.model.layers.attention import PortableRotaryEmbedding
from rl_megatron.model.layers.expert_dispatch import gather_unequal_numbers, permute_without_waiting
from rl_megatron.model.layers.gated_activation import ACTIVATIONS
from rl_megatron.model.layers.rope import compute_frequencies, compute_rotary_scale, compute_yarn_mscale
from rl_megatron.model.layers.router import SCOPES
from rl_megatron.model.layers.weight_gradient import fuse_weight_gradients
from rl_megatron.model.lora.attach import attach_adapters, attach_frozen, find_dora_adapters
from rl_megatron.model.lora.layers import LinearAdapter
from rl_megatron.model.lora.modules import find_whole_tensors
from rl_megatron.model.lora.originals import train_whole
from rl_megatron.model.lora.targets import find_adapted_linears, is_expert, refuse_fused_parts
from rl_megatron.model.shards import initialise_parameters, zero_parameters
from rl_megatron.topology.degrees import padded_vocab_size, validate_model
from rl_megatron.topology.topology import Topology

Head = Literal["lm", "score"]


def build_transformer_config(model: ModelConfig, topology: Topology, precision: str, backend: str) -> TransformerConfig:
    """Return megatron-core's config for `model`. Fusions that need a GPU or a compiler are off for portable layers."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=query_size(model),
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=model.zero_centered_norm,
        layernorm_epsilon=model.norm_epsilon,
        gated_linear_unit=True,
        # megatron-core expects a function of the gate, which swiglu_oai is not. Portable layers use `GatedActivation`.
        activation_func=ACTIVATIONS.get(model.activation, ACTIVATIONS["silu"]),
        add_bias_linear=model.linear_bias,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        attention_output_gate=model.attention_output_gate,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method=_draw_nothing,  # `build_model` fills all weights, from numbers that do not depend on the layout
        output_layer_init_method=_draw_nothing,
        embedding_init_method=_draw_nothing,
        softmax_scale=_choose_softmax_scale(model),
        softmax_type="learnable" if model.attention_sinks else "vanilla",
        window_size=None if model.sliding_window is None else (model.sliding_window - 1, 0),
        window_attn_skip_freq=model.global_attention_every,
        tensor_model_parallel_size=topology.tensor,
        sequence_parallel=topology.sequence,
        pipeline_model_parallel_size=topology.pipeline,
        virtual_pipeline_model_parallel_size=topology.virtual_pipeline if topology.virtual_pipeline > 1 else None,
        context_parallel_size=topology.context,
        expert_model_parallel_size=topology.expert,
        expert_tensor_parallel_size=topology.expert_tensor,
        num_layers_in_first_pipeline_stage=topology.first_stage_layers,
        num_layers_in_last_pipeline_stage=topology.last_stage_layers,
        bf16=precision == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=True,  # losses are already normalised, so schedules and DDP must not rescale them
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        rotary_interleaved=model.rope_interleaved,
        # Without this fusion, megatron-core reads a pack's lengths from the device for queries and keys of each layer.
        apply_rope_fusion=backend == "transformer_engine",
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=False,  # gloo does not guarantee the order of batched sends
        **_list_expert_keys(model),
        **_list_recompute_keys(model.recompute),
    )


def _draw_nothing(weight: Tensor) -> None:
    """Leave a new weight as it is."""


def _choose_softmax_scale(model: ModelConfig) -> float | None:
    """Return the factor of attention scores, or None for megatron-core's default, 1/√head_dim.

    If RoPE rotates whole heads, YaRN's scale of queries and keys is part of this factor. If RoPE rotates only a part of
    each head, the rotary embedding applies the scale. With latent attention, DeepSeek also scales the scores.
    """
    growth, scaling = 1.0, model.rope_scaling
    if model.kv_lora_rank is None:
        growth = compute_rotary_scale(scaling) if model.partial_rotary_factor == 1.0 else 1.0
    elif isinstance(scaling, YarnRope) and scaling.mscale_all_dim is not None:
        growth = compute_yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    if growth == 1.0 and model.query_pre_attn_scalar is None and model.kv_lora_rank is None:
        return None
    return growth**2 / math.sqrt(model.query_pre_attn_scalar or query_size(model))


def _list_expert_keys(model: ModelConfig) -> dict:
    if model.num_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.expert_ffn_hidden_size or model.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "moe_router_pre_softmax": not model.normalize_expert_weights,
        "moe_router_load_balancing_type": SCOPES[model.router_aux_loss_scope] if model.router_aux_loss > 0 else "none",
        "moe_aux_loss_coeff": model.router_aux_loss,
        "moe_layer_freq": [int(layer >= model.first_dense_layers) for layer in range(model.num_layers)],
        "moe_router_score_function": model.router_score,
        "moe_router_enable_expert_bias": model.router_bias,
        "moe_router_bias_update_rate": model.router_bias_update,
        "moe_router_num_groups": model.router_groups,
        "moe_router_group_topk": model.router_groups_per_token,
        "moe_router_topk_scaling_factor": None if model.routed_scaling_factor == 1.0 else model.routed_scaling_factor,
        "moe_router_dtype": "fp32",  # bf16 scores may be equal, and ranks would choose differently among equal ones
        "moe_token_dispatcher_type": "alltoall",  # it allows microbatches of different lengths
    }


def _list_recompute_keys(recompute: str) -> dict:
    if recompute == "none":
        return {}
    if recompute == "selective":
        return {"recompute_granularity": "selective"}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build_model(
    model: ModelConfig,
    topology: Topology,
    *,
    vocab_size: int,
    precision: str,
    seed: int,
    head: Head = "lm",
    initialise: bool = True,
    lora: LoraConfig | None = None,
) -> list[torch.nn.Module]:
    """Return the model chunks of this rank on the topology's device. Every layout starts from the same weights.

    Args:
        model: The model section.
        topology: The layout.
        vocab_size: The tokenizer's vocabulary size. The embedding and the head have `model.vocab_size` rows (by default
            `vocab_size`), padded. No softmax includes rows beyond the tokenizer's vocabulary.
        precision: "fp32" or "bf16". Under bf16 each model chunk is wrapped so that it computes in bf16 and returns bf16
            logits.
        seed: The seed of the initial weights.
        head: "lm" returns logits [B, S, V/tp]. "score" returns one number per token, [B, S, 1] in fp32 (see
            `ScoreHead`).
        initialise: Draw the initial weights. False leaves all weights 0, for a caller that loads them next.
        lora: The adapters to train instead of the weights, or None to train the weights.
    """
    validate_model(model, topology)
    check_vocabulary(model, vocab_size)
    linears = {} if lora is None else find_adapted_linears(lora, model, model.vocab_size or vocab_size)
    if lora is not None and lora.lora_dropout and topology.expert_tensor > 1 and any(map(is_expert, linears)):
        raise ConfigError(
            f"peft.lora_dropout={lora.lora_dropout} is not supported for adapters of experts with parallel."
            f"expert_tensor={topology.expert_tensor}, because its ranks would drop different elements of a token; set "
            "peft.lora_dropout=0, or leave the experts out with peft.exclude_modules"
        )
    if topology.tensor > 1:
        refuse_fused_parts(linears, topology.tensor)
    backend = choose_backend(model, topology, precision)
    config = build_transformer_config(model, topology, precision, backend)
    setattr(config, "cudnn_attention", model.cudnn_attention)  # noqa: B010  # for `PortableAttention`
    config.deterministic_mode = torch.are_deterministic_algorithms_enabled()
    config.gradient_accumulation_fusion = fuse_weight_gradients(topology)
    permute_without_waiting()
    gather_unequal_numbers()
    # With this option, MLPs call the activation of their spec, `GatedActivation`. It is set after the config is built,
    # because the constructor would refuse it with gelu_tanh.
    config.use_te_activation_func = backend == "portable"
    model_chunks: list[torch.nn.Module] = [
        _build_model_chunk(model, config, topology, backend, vocab_size, model_chunk, head)
        for model_chunk in range(topology.virtual_pipeline)
    ]
    if initialise:
        initialise_parameters(
            model_chunks,
            seed=seed,
            std=model.init_std,
            num_layers=model.num_layers,
            norm_weight=0.0 if model.zero_centered_norm else 1.0,
        )
    else:
        zero_parameters(model_chunks)
    if lora is not None:
        for model_chunk in model_chunks:
            attach_adapters(model_chunk, lora, linears, config, topology, seed)
            train_whole(unwrap(model_chunk), find_whole_tensors(lora, model, model.vocab_size or vocab_size, head))
    if precision == "bf16":
        model_chunks = [_Bf16Module(config, model_chunk) for model_chunk in model_chunks]
    if initialise:  # otherwise, loading the weights sets DoRA's magnitudes
        for adapter in find_dora_adapters(model_chunks):
            adapter.start()
    return model_chunks


def attach_frozen_adapters(
    model_chunks: Sequence[torch.nn.Module], model: ModelConfig, topology: Topology, vocab_size: int, lora: LoraConfig
) -> list[LinearAdapter]:
    """Add frozen adapters, under another name, to a model, and return them. The caller loads their weights next.

    `lora` is the section `peft` with which the frozen adapters were trained. The model chunks may have wrappers.
    """
    linears = find_adapted_linears(lora, model, model.vocab_size or vocab_size)
    if topology.tensor > 1:
        refuse_fused_parts(linears, topology.tensor)
    return [
        adapter
        for model_chunk in map(unwrap, model_chunks)
        for adapter in attach_frozen(model_chunk, lora, linears, model_chunk.config, topology)
    ]


def _build_model_chunk(
    model: ModelConfig,
    config: TransformerConfig,
    topology: Topology,
    backend: str,
    vocab_size: int,
    model_chunk: int,
    head: Head,
) -> GPTModel:
    vp_stage = model_chunk if topology.virtual_pipeline > 1 else None
    module = GPTModel(
        config=config,
        # The decoder also accepts a block's submodules, which the annotation omits.
        transformer_layer_spec=build_block_spec(model, config, backend, vp_stage),  # pyright: ignore[reportArgumentType]
        vocab_size=padded_vocab_size(model.vocab_size or vocab_size, topology.tensor),
        max_sequence_length=model.max_sequence_length,
        pre_process=topology.pipeline_rank == 0 and model_chunk == 0,
        post_process=topology.is_last_stage and model_chunk == topology.virtual_pipeline - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_embeddings and head == "lm",
        position_embedding_type="rope",
        rotary_base=model.rope_base,  # pyright: ignore[reportArgumentType]  # annotated int; any number works
        pg_collection=topology.groups,
        vp_stage=vp_stage,
    )
    _set_rope(module, model, topology, backend)
    if model.scale_embeddings and module.pre_process:
        module.embedding.register_forward_hook(partial(_multiply, factor=math.sqrt(model.hidden_size)))
    for name, parameter in module.named_parameters():
        if ".experts." in name:
            # With this mark, DDP sums the gradient over the ranks that hold the same experts. megatron-core 0.16 sets
            # it only if experts are spread over ranks; without it, DDP sums over too few ranks (NVIDIA/Megatron-LM pull
            # request 5916).
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]  # a mark that DDP reads
            # megatron-core marks gradients of experts' biases for a sum over tensor-parallel ranks, but DDP already
            # sums them.
            parameter.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
    if model.linear_bias:
        _add_expert_biases_in_place(module)
    if head == "score" and module.post_process:
        module.register_module("output_layer", ScoreHead(config, topology))
    return module.to(topology.device)


def _add_expert_biases_in_place(module: GPTModel) -> None:
    """Make megatron-core add an expert's bias to the output of its last linear, which one rank computes completely.

    Otherwise the output passes through an autograd function that returns it unchanged, and torch refuses to change the
    result in place.
    """
    for linear in module.modules():
        if isinstance(linear, RowParallelLinear) and linear.is_expert:
            linear.explicit_expert_comm = True


def _set_rope(module: GPTModel, model: ModelConfig, topology: Topology, backend: str) -> None:
    size, device = rotary_size(model), topology.device
    if backend == "portable":
        module.rotary_pos_emb = PortableRotaryEmbedding(
            size,
            rotary_percent=1.0,
            rotary_base=model.rope_base,  # pyright: ignore[reportArgumentType]  # annotated int; any number works
            cp_group=topology.groups.cp,
        )
        if model.partial_rotary_factor < 1.0:
            module.rotary_pos_emb.scale = compute_rotary_scale(model.rope_scaling)
        if model.local_rope_base is not None:
            module.rotary_pos_emb.local_frequencies = compute_frequencies(size, model.local_rope_base, None).to(device)
    module.rotary_pos_emb.inv_freq = compute_frequencies(size, model.rope_base, model.rope_scaling).to(device)


def _multiply(module: torch.nn.Module, args: tuple, output: Tensor, *, factor: float) -> Tensor:
    """Return `output` times `factor`. The factor is rounded to the model's dtype first, as when Gemma was trained."""
    return output * output.new_tensor(factor)


class _Bf16Module(Float16Module):
    """megatron-core's half-precision wrapper without its conversion of the logits to fp32.

    The logprob kernels compute in fp32 anyway, and an fp32 copy of the logits would be the largest tensor of the step.
    """

    def forward(self, *args, fp32_output: bool = False, **kwargs):
        """Return the model's output, in bf16 unless `fp32_output`."""
        return super().forward(*args, fp32_output=fp32_output, **kwargs)


def unwrap(model_chunk: torch.nn.Module) -> GPTModel:
    """Return the GPTModel inside DDP and precision wrappers."""
    while not isinstance(model_chunk, GPTModel):
        model_chunk = model_chunk.get_submodule("module")
    return model_chunk
