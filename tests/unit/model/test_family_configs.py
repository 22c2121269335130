"""Configs of Gemma 3, GLM and DeepSeek-V3 are read, written and read again. Unsupported values are refused by name."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from transformers import AutoConfig, Gemma3TextConfig, Qwen3_5TextConfig

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import LinearRope, ModelConfig
from rl_megatron.config.rules import check_model
from rl_megatron.model.families import FAMILIES, family_of_model, find_family_of_config, read_model
from rl_megatron.model.families.deepseek import DEEPSEEK_V3
from rl_megatron.model.families.gemma3 import GEMMA3
from rl_megatron.model.families.glm4_moe import GLM4_MOE
from rl_megatron.model.families.score import describe_classifier, name_classifier

# As Google and DeepSeek published them, for transformers 4.
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "vocab_size": 262144,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 4096, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
GLM_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
PUBLISHED = {"gemma3_1b": GEMMA3_1B, "deepseek_v3": DEEPSEEK, "glm4_5_air": GLM_AIR, "gpt_oss_20b": GPT_OSS_20B}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_config_equals_the_preset_of_its_name(preset):
    hf = PUBLISHED[preset]
    model = find_family_of_config(hf, "config.json").read_config(hf)
    check_model(model)
    ours = load_config([f"model={preset}"]).first.model
    assert replace(model, vocab_size=None, max_sequence_length=4096) == ours


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_written_config_reads_back_the_same_directly_and_through_transformers(preset, tmp_path):
    hf = PUBLISHED[preset]
    family = find_family_of_config(hf, "config.json")
    model = family.read_config(hf)
    written = family.write_config(model, hf["vocab_size"])
    assert family.read_config(written) == model
    assert family_of_model(model, hf["vocab_size"]) is family
    config = AutoConfig.for_model(**written)
    config.save_pretrained(tmp_path)
    assert family.read_config(AutoConfig.from_pretrained(tmp_path).to_dict()) == model


@pytest.mark.parametrize(
    ("kinds", "every"),
    [
        (["sliding_attention", "full_attention"] * 2, 2),
        (["sliding_attention"] * 4, 5),
        (["full_attention"] * 4, None),
    ],
    ids=["every second", "all", "none"],
)
def test_layers_with_a_window(kinds, every):
    hf = {key: value for key, value in GEMMA3_1B.items() if key != "sliding_window_pattern"}
    hf |= {"layer_types": kinds, "num_hidden_layers": 4}
    model = GEMMA3.read_config(hf)
    check_model(model)
    assert model.global_attention_every == every
    assert (model.sliding_window, model.local_rope_base) == ((None, None) if every is None else (512, 1e4))
    assert GEMMA3.read_config(GEMMA3.write_config(model, 7)) == replace(model, vocab_size=7)


def test_ropes_of_both_kinds_of_layers():
    scaled = GEMMA3_1B | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    model = GEMMA3.read_config(scaled)
    assert (model.rope_base, model.local_rope_base, model.rope_scaling) == (1e6, 1e4, LinearRope(factor=8.0))
    assert GEMMA3.read_config(Gemma3TextConfig(**scaled).to_dict()) == model


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation=gelu"),
        (GEMMA3, {"layer_types": ["full_attention", *["sliding_attention"] * 25]}, "layer_types="),
        (GEMMA3, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "RoPE scaling of type yarn"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        (DEEPSEEK_V3, {"rope_interleave": False}, "rope_interleave=False"),
        (DEEPSEEK_V3, {"attention_bias": True}, "attention_bias=True"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func=softmax"),
    ],
)
def test_unsupported_values_are_refused(family, changes, said):
    hf = GEMMA3_1B if family is GEMMA3 else DEEPSEEK
    with pytest.raises(ConfigError, match=re.escape(said)):
        family.read_config(hf | changes)


@pytest.mark.parametrize(("family", "hf"), [(DEEPSEEK_V3, DEEPSEEK), (GLM4_MOE, GLM_AIR)], ids=["DeepSeek", "GLM"])
def test_layers_that_predict_further_tokens_are_not_part_of_the_model(family, hf):
    model, is_dropped = family.read_config(hf), family.is_dropped
    last = model.num_layers
    assert is_dropped(f"model.layers.{last}.eh_proj.weight", model)
    assert is_dropped(f"model.layers.{last}.mlp.experts.3.up_proj.weight", model)
    assert not is_dropped(f"model.layers.{last - 1}.mlp.gate.weight", model)
    assert not is_dropped("model.norm.weight", model)
    assert not any(is_dropped(name, model) for name in family.table(replace(model, num_experts=16), 7).hf_shapes)


def test_glm_rotates_half_of_each_head_unless_its_config_says_otherwise():
    bare = {key: value for key, value in GLM_AIR.items() if key != "partial_rotary_factor"}
    five = bare | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.25}}
    assert GLM4_MOE.read_config(bare) == GLM4_MOE.read_config(GLM_AIR)
    assert GLM4_MOE.read_config(AutoConfig.for_model(**bare).to_dict()) == GLM4_MOE.read_config(GLM_AIR)
    assert [GLM4_MOE.read_config(hf).partial_rotary_factor for hf in (bare, five)] == [0.5, 0.25]


def test_a_family_has_the_sequence_classifier_of_transformers_or_refuses_to_export_one():
    import transformers

    for family in FAMILIES.values():
        if hasattr(transformers, name_classifier(family)):
            assert describe_classifier({}, family)["architectures"] == [name_classifier(family)]
        else:
            with pytest.raises(ConfigError, match=f"transformers has no class {name_classifier(family)}"):
                describe_classifier({}, family)


def test_qwen3_5_is_read_strictly_but_for_the_positions_in_images():
    hf = Qwen3_5TextConfig(architectures=["Qwen3_5ForCausalLM"]).to_dict()
    ropes = hf["rope_parameters"] | {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    assert read_model(hf | {"rope_parameters": ropes}, "file") == read_model(hf, "file")
    with pytest.raises(ConfigError, match="new_scale=7.0 is not supported"):
        read_model(hf | {"new_scale": 7.0}, "file")
    del hf["rms_norm_eps"]
    with pytest.raises(ConfigError, match="file has no 'rms_norm_eps'"):
        read_model(hf, "file")


@pytest.mark.parametrize("model", [ModelConfig(activation="gelu_tanh"), ModelConfig(routed_scaling_factor=2.0)])
def test_a_model_of_no_family_is_refused(model):
    with pytest.raises(ConfigError, match="cannot be written for Hugging Face"):
        family_of_model(model, 7)
