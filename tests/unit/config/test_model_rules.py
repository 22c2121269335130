"""Keys of a model that contradict each other or have no effect are refused by name; nested RoPE keys are strict."""

from __future__ import annotations

import re

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import from_yaml, load_config, to_yaml
from rl_megatron.config.model import LinearRope, YarnRope

LATENT = ["model=deepseek_v3"]
DELTA = [
    "model.full_attention_every=2", "model.linear_num_key_heads=4", "model.linear_num_value_heads=8",
    "model.linear_key_head_dim=8", "model.linear_value_head_dim=8", "model.linear_conv_kernel_dim=4",
]  # fmt: skip
LLAMA3 = "kind:llama3,factor:8,original_max_position_embeddings:512"
YARN = "kind:yarn,factor:8,original_max_position_embeddings:512"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model=nano_moe", "model.router_aux_loss_scope=global"], "has no effect: model.router_aux_loss=0 turns"),
        (["model.rope_scaling={kind:liner,factor:2}"], "model.rope_scaling="),
        (["model.rope_scaling={kind:linear,factr:2}"], "unknown key 'model.rope_scaling.factr'; did you mean"),
        (["model.rope_scaling={kind:linear,factor:0}"], "model.rope_scaling.factor=0: input should be greater than 0"),
        (["model.rope_scaling={kind:linear,factor:2,beta_fast:3}"], "unknown key 'model.rope_scaling.beta_fast'"),
        ([f"model.rope_scaling={{{LLAMA3},high_freq_factor:1}}"], "low_freq_factor=1.0 must be less than"),
        ([f"model.rope_scaling={{{YARN},beta_slow:40}}"], "beta_slow=40.0 must not exceed"),
        ([*LATENT, "model.rope_scaling.factr=2"], "unknown key 'model.rope_scaling.factr'"),
        (["model.global_attention_every=2"], "does nothing: with model.sliding_window=null"),
        (["model.sliding_window=4", "model.global_attention_every=1"], "leaves no layer with the window"),
        (["model.sliding_window=4", "model.local_rope_base=100"], "global_attention_every=null makes all layers alike"),
        (
            ["model=gemma3_1b", f"model.rope_scaling={{{YARN}}}"],
            "kind=yarn scales the scores of every layer",
        ),
        (["model.activation=gelu"], "model.activation='gelu'"),
        (["model.v_head_dim=4"], "model.v_head_dim=4 does nothing: model.kv_lora_rank=null"),
        ([*LATENT, "model.v_head_dim=null"], "model.v_head_dim=null: model.kv_lora_rank=512 needs this key"),
        ([*LATENT, "model.qk_norm=true"], "model.qk_norm=true is not a key of latent attention"),
        ([*LATENT, "model.sliding_window=4"], "model.sliding_window=4 is not a key of latent attention"),
        ([*LATENT, "model.num_query_groups=64"], "set it to model.num_attention_heads=128"),
        ([*LATENT, "model.qk_rope_head_dim=63"], "model.qk_rope_head_dim=63 must be even"),
        ([*LATENT, "model.partial_rotary_factor=0.5"], "model.partial_rotary_factor=0.5 is not a key of latent"),
        (["model.linear_bias=true"], "model.linear_bias=true needs model.qkv_bias=true"),
        (["model=gemma3_1b", "model.qkv_bias=true", "model.linear_bias=true"], "with model.sandwich_norms=true"),
        (["model=gpt_oss_20b", "model.shared_expert_ffn_hidden_size=8"], "shared_expert_ffn_hidden_size=8; set linear"),
        ([*LATENT, "model.attention_sinks=true"], "model.attention_sinks=true is not a key of latent attention"),
        ([*LATENT, "model.attention_output_gate=true"], "model.attention_output_gate=true is not a key of latent"),
        (
            ["model.linear_num_key_heads=2"],
            "model.linear_num_key_heads=2 does nothing: with model.full_attention_every",
        ),
        (["model.full_attention_every=1"], "gives every layer attention"),
        (["model.full_attention_every=2"], "model.linear_num_key_heads=null: model.full_attention_every=2 needs this"),
        ([*DELTA, "model.linear_num_value_heads=6"], "must be a multiple of model.linear_num_key_heads=4"),
        ([*DELTA, "model.sliding_window=5"], "model.sliding_window=5 is not supported with model.full_attention_every"),
        (["model.partial_rotary_factor=1.5"], "model.partial_rotary_factor=1.5 must be at most 1"),
        (["model=glm4_5_air", "model.partial_rotary_factor=0.31"], "rotates 39 of 128 dimensions of a head"),
        (["model.router_bias=true"], "model.router_bias=true does nothing: model.num_experts=null"),
        (["model=nano_moe", "model.router_bias=true"], "needs model.router_score=sigmoid"),
        ([*LATENT, "model.router_bias=false", "model.router_bias_update=0.1"], "router_bias_update=0.1 does nothing"),
        (["model=nano_moe", "model.router_groups=2"], "set both or neither"),
        ([*LATENT, "model.first_dense_layers=61"], "leaves none of model.num_layers=61 layers to the experts"),
        ([*LATENT, "model.normalize_expert_weights=false"], "with model.router_score=sigmoid"),
        ([*LATENT, "model.router_groups=7"], "model.router_groups=7 must divide model.num_experts=256"),
        ([*LATENT, "model.router_groups_per_token=8"], "of model.router_groups=8 excludes no group"),
        ([*LATENT, "model.experts_per_token=12"], "must be 8 to 11 with model.router_groups_per_token=4"),
        ([*LATENT, "model.num_experts=16", "model.experts_per_token=9"], "exceeds the 8 experts of"),
    ],
)
def test_mistakes_are_named(overrides, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(overrides)


def test_a_nested_section_may_be_written_and_changed_key_by_key():
    assert load_config(["model.rope_scaling={kind:linear,factor:8}"]).first.model.rope_scaling == LinearRope(factor=8.0)
    config = load_config([*LATENT, "model.rope_scaling.factor=20"])
    assert config.first.model.rope_scaling == YarnRope(
        factor=20.0, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0
    )
    assert from_yaml(to_yaml(config), "here") == config
