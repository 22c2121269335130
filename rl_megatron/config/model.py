"""The section `model`: the architecture, and the kinds of RoPE scaling. Its rules are in rules.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_megatron.config.loading.settings import NonNegative, NonNegativeFloat, Positive, PositiveFloat, section


@section
class LinearRope:
    """Linear RoPE scaling: every frequency is divided by `factor` (Gemma 3)."""

    kind: Literal["linear"] = "linear"  # selects linear scaling
    factor: PositiveFloat  # the divisor of every frequency; 8 stretches the context to eight times its length


@section
class Llama3Rope:
    """RoPE scaling of Llama 3.1 and later.

    Low frequencies are divided by `factor`, high frequencies are unchanged, and those between are interpolated.
    """

    kind: Literal["llama3"] = "llama3"  # selects the scaling of Llama 3.1
    factor: PositiveFloat  # the divisor of low frequencies
    low_freq_factor: PositiveFloat = 1.0  # low frequencies turn at most this many times in the original context
    high_freq_factor: PositiveFloat = 4.0  # high frequencies turn at least this many times in the original context
    original_max_position_embeddings: Positive  # the original context length, in tokens


@section
class YarnRope:
    """YaRN RoPE scaling: a frequency's scaling depends on its turns within the original context (DeepSeek, Qwen).

    Source: Peng et al. 2023 (arXiv:2309.00071).
    """

    kind: Literal["yarn"] = "yarn"  # selects YaRN
    factor: PositiveFloat  # the divisor of low frequencies
    original_max_position_embeddings: Positive  # the original context length, in tokens
    beta_fast: PositiveFloat = 32.0  # frequencies with at least this many turns in that context are unchanged
    beta_slow: PositiveFloat = 1.0  # frequencies with at most this many turns in that context are divided by factor
    truncate: bool = True  # round the two bounds of the range between them to whole dimensions
    # Rotated queries and keys are multiplied by (0.1·mscale·ln(factor) + 1) / (0.1·mscale_all_dim·ln(factor) + 1). If
    # mscale or mscale_all_dim is null: by 0.1·ln(factor) + 1.
    mscale: PositiveFloat | None = None
    # The second coefficient in the formula above. With kv_lora_rank, attention scores are also multiplied by
    # (0.1·mscale_all_dim·ln(factor) + 1)². null: they are not.
    mscale_all_dim: PositiveFloat | None = None
    attention_factor: PositiveFloat | None = None  # replaces the factor that mscale gives; null: use mscale


RopeScaling = Annotated[LinearRope | Llama3Rope | YarnRope, Field(discriminator="kind")]


@section
class ModelConfig:
    """A decoder like LLaMA: RMSNorm, gated MLP, RoPE, grouped-query attention; dense, or a mixture of experts."""

    num_layers: Positive = 4  # transformer layers
    hidden_size: Positive = 128  # width of the hidden states
    ffn_hidden_size: Positive = 384  # inner width of a dense MLP
    num_attention_heads: Positive = 4  # query heads
    num_query_groups: Positive = 4  # key/value heads; equal to num_attention_heads for plain multi-head attention
    head_dim: Positive | None = None  # dimensions of an attention head; null: hidden_size / num_attention_heads
    max_sequence_length: Positive = 256  # the longest sequence, in tokens, prompt and completion together
    vocab_size: Positive | None = None  # rows of the embedding; null: one for each of the tokenizer's tokens
    rope_base: PositiveFloat = 10_000.0  # base θ of the RoPE frequencies
    rope_scaling: RopeScaling | None = None  # stretches RoPE to longer contexts: kind linear, llama3 or yarn; null: off
    partial_rotary_factor: PositiveFloat = 1.0  # leading share of a head's dimensions that RoPE rotates (GLM: 0.5)
    rope_interleaved: bool = False  # RoPE pairs neighbouring dimensions (dense GLM-4); false: one of each half
    local_rope_base: PositiveFloat | None = None  # RoPE base of windowed layers, unscaled (Gemma 3); null: rope_base
    norm_epsilon: PositiveFloat = 1e-5  # added to the mean square in every RMSNorm
    zero_centered_norm: bool = False  # norms multiply by 1 + weight instead of weight (Gemma)
    sandwich_norms: bool = False  # also normalise the outputs of attention and MLP (Gemma 3, dense GLM-4)
    # Activation of the MLP's gate. Gemma uses gelu_tanh. swiglu_oai is gpt-oss's: gate and up are clamped to 7, and the
    # result is gate·sigmoid(1.702·gate)·(up + 1).
    activation: Literal["silu", "gelu_tanh", "swiglu_oai"] = "silu"
    scale_embeddings: bool = False  # multiply embeddings by √hidden_size (Gemma)
    tie_embeddings: bool = True  # use the embedding matrix as the output head
    qkv_bias: bool = False  # add a bias to query, key and value projections (Qwen2)
    linear_bias: bool = False  # also add a bias to all other linears: attention's output, MLP, router (gpt-oss)
    qk_norm: bool = False  # apply RMSNorm to each head's queries and keys (Qwen3)
    attention_sinks: bool = False  # add a learned sink score per head to each attention softmax (gpt-oss)
    # attention scores are divided by the square root of this (Gemma); null: by that of the size of a head's queries
    query_pre_attn_scalar: Positive | None = None
    init_std: PositiveFloat = 0.02  # standard deviation of the initial weights
    sliding_window: Positive | None = None  # tokens that a token attends to, itself included; null: all before it
    global_attention_every: Positive | None = None  # every n-th layer has no window (Gemma 3: 6); null: all have one
    attention_output_gate: bool = False  # multiply each head's output by a sigmoid gate (Qwen3.5)
    # Every n-th layer has attention, and all others the gated delta rule, a memory of fixed size (Qwen3.5: 4). null:
    # all layers have attention, and the next five keys must be null.
    full_attention_every: Positive | None = None
    linear_num_key_heads: Positive | None = None  # heads of queries and keys of the gated delta rule
    # heads of values of the gated delta rule, a multiple of linear_num_key_heads
    linear_num_value_heads: Positive | None = None
    linear_key_head_dim: Positive | None = None  # dimensions of a query or key head of the gated delta rule
    linear_value_head_dim: Positive | None = None  # dimensions of a value head of the gated delta rule
    # width of the causal convolution before the gated delta rule, in tokens
    linear_conv_kernel_dim: Positive | None = None
    # Rank of the latent that keys and values of all heads are computed from, which turns on multi-head latent attention
    # (DeepSeek-V2 and V3). null: ordinary attention, and the next four keys must be null.
    kv_lora_rank: Positive | None = None
    q_lora_rank: Positive | None = None  # rank of the queries' latent; null: queries come from the hidden state
    qk_nope_head_dim: Positive | None = None  # dimensions without RoPE of a head's queries and keys
    qk_rope_head_dim: Positive | None = None  # dimensions with RoPE of a head's queries and keys
    v_head_dim: Positive | None = None  # dimensions of a head's values
    num_experts: Positive | None = None  # experts in each layer's MLP (Mixtral, Qwen-MoE); null: a dense MLP
    experts_per_token: Positive = 2  # experts that each token is sent to
    expert_ffn_hidden_size: Positive | None = None  # inner width of an expert; null: ffn_hidden_size
    shared_expert_ffn_hidden_size: Positive | None = None  # width of an expert for all tokens (Qwen2-MoE); null: none
    shared_expert_gate: bool = False  # multiply the shared expert's output by a learned gate (Qwen2-MoE)
    normalize_expert_weights: bool = True  # scale the weights of a token's experts to add up to 1 (Qwen2-MoE: false)
    router_aux_loss: NonNegativeFloat = 0.0  # coefficient of the load-balancing loss of experts; 0: off
    # The tokens over which this loss balances the experts. microbatch: those of each microbatch, so that gradients
    # depend on which sequences share a microbatch. global: those of the global batch, which costs one more forward
    # pass.
    router_aux_loss_scope: Literal["microbatch", "global"] = "microbatch"
    first_dense_layers: NonNegative = 0  # leading layers with a dense MLP instead of experts (DeepSeek-V3, GLM-4.5)
    router_score: Literal["softmax", "sigmoid"] = "softmax"  # turns router logits into scores (DeepSeek-V3: sigmoid)
    # Add a bias to each expert's score to choose experts, but not to weight them (DeepSeek-V3). The bias is saved with
    # the weights and has no gradient.
    router_bias: bool = False
    # How far an optimizer step moves that bias, up for experts with fewer tokens than the mean and down for others
    # (DeepSeek-V3's pretraining: 0.001). 0: not at all.
    router_bias_update: NonNegativeFloat = 0.0
    # Number of expert groups. A token is only sent to router_groups_per_token of them, those whose two best experts
    # score highest together (DeepSeek-V3). null: a token may be sent to any expert.
    router_groups: Positive | None = None
    router_groups_per_token: Positive | None = None  # groups that a token may be sent to; null without router_groups
    routed_scaling_factor: PositiveFloat = 1.0  # multiplies the output of routed experts, but not of shared ones
    # Activations that backward recomputes. selective: those of core attention; full: all within each layer.
    recompute: Literal["none", "selective", "full"] = "none"
    # Implementation of the layers. auto: Transformer Engine on a GPU with precision=bf16, if it is installed and
    # supports the model and the layout; otherwise the portable torch modules.
    backend: Literal["auto", "portable", "transformer_engine"] = "auto"
    # Let cuDNN compute causal attention in portable layers on a GPU, for bf16 and sequences without a window. It is
    # faster for long sequences, but spends 0.2 s or more on each new shape of a microbatch: use it if shapes are few.
    cudnn_attention: bool = False
