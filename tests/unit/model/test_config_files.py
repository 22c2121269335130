"""Reading config.json into a model section and back, in both notations, and refusing unsupported files."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.compose import config_directory
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families import FAMILIES, family_of_model, read_model, same_weights

PRESETS = sorted(path.stem for path in (config_directory() / "model").glob("*.yaml") if path.stem != "init_from")
DENSE = ModelConfig(vocab_size=77, max_sequence_length=64, head_dim=48, tie_embeddings=False)
EXPERTS = replace(DENSE, num_experts=4, expert_ffn_hidden_size=96)
# One that the family alone, or the first of its kin, can say.
MODELS = {
    "LlamaForCausalLM": DENSE,
    "MistralForCausalLM": replace(DENSE, sliding_window=8),
    "Qwen2ForCausalLM": replace(DENSE, qkv_bias=True),
    "Qwen3ForCausalLM": replace(DENSE, qk_norm=True),
    "MixtralForCausalLM": replace(EXPERTS, sliding_window=8),
    "Qwen3MoeForCausalLM": replace(EXPERTS, qk_norm=True, normalize_expert_weights=False),
    "Gemma3ForCausalLM": replace(
        DENSE,
        qk_norm=True,
        zero_centered_norm=True,
        sandwich_norms=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        query_pre_attn_scalar=24,
        sliding_window=8,
        global_attention_every=3,
        local_rope_base=100.0,
    ),
    "Glm4ForCausalLM": replace(
        DENSE, qkv_bias=True, partial_rotary_factor=0.5, rope_interleaved=True, sandwich_norms=True
    ),
    "Glm4MoeForCausalLM": replace(
        EXPERTS,
        qk_norm=True,
        partial_rotary_factor=0.5,
        shared_expert_ffn_hidden_size=96,
        first_dense_layers=1,
        router_score="sigmoid",
        router_bias=True,
    ),
    "DeepseekV3ForCausalLM": replace(
        EXPERTS,
        num_query_groups=4,
        head_dim=None,
        kv_lora_rank=8,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=8,
        first_dense_layers=1,
        router_score="sigmoid",
        router_bias=True,
    ),
}
MODELS["GptOssForCausalLM"] = replace(
    EXPERTS, attention_sinks=True, qkv_bias=True, linear_bias=True, activation="swiglu_oai", sliding_window=8,
    global_attention_every=2,
)  # fmt: skip


def config(architecture: str, **changes) -> dict:
    """Return the config that the family writes for its model, with changed keys; `...` leaves a key out."""
    family = FAMILIES[architecture]
    written = family.write_config(MODELS[architecture], 77) | changes
    return {key: value for key, value in written.items() if value is not ...}


@pytest.mark.parametrize("architecture", MODELS)
def test_a_family_reads_what_it_writes(architecture):
    family, model = read_model(config(architecture), "there")
    assert family.architecture == architecture
    assert same_weights(model, MODELS[architecture])
    assert family_of_model(MODELS[architecture], 77) is family


@pytest.mark.parametrize("architecture", MODELS)
def test_transformers_reads_and_writes_the_config_that_a_family_writes(architecture):
    """The config class of transformers reads the file and writes one of the same model. It ignores no key."""
    from transformers import CONFIG_MAPPING

    written = config(architecture)
    theirs = CONFIG_MAPPING[written["model_type"]](**written).to_dict()
    assert same_weights(read_model(theirs, "there")[1], MODELS[architecture])
    renamed = {"num_experts", "rope_theta", "rope_local_base_freq", "rope_scaling", "max_window_layers"}
    renamed |= {"partial_rotary_factor"}
    assert {key for key in written if key not in theirs} <= renamed


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_a_family_or_is_listed_as_having_none(preset):
    model = load_config([f"model={preset}"]).first.model
    if preset == "nano_moe":  # a shared expert beside Mixtral's: no family here has one
        with pytest.raises(ConfigError, match="none of Llama.* cannot be written for Hugging Face"):
            family_of_model(model, 300)
    else:
        family = family_of_model(model, 300)
        read = read_model(family.write_config(model, 300), preset)[1]
        assert same_weights(read, replace(model, vocab_size=300))


def test_configs_of_transformers_4_and_5_read_the_same():
    five = config("LlamaForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_theta=...)
    four = config("LlamaForCausalLM", rope_parameters=..., rope_theta=5e5, rope_scaling=None, torch_dtype="bfloat16")
    assert read_model(five, "there")[1] == read_model(four, "there")[1]
    assert read_model(four, "there")[1].rope_base == 5e5
    four = config("Qwen3MoeForCausalLM")
    five = config("Qwen3MoeForCausalLM", num_experts=..., num_local_experts=4)
    assert read_model(five, "there")[1] == read_model(four, "there")[1]


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, {"sliding_window": None}),
        ("LlamaForCausalLM", {"num_key_value_heads": ...}, {"num_query_groups": 4}),
        ("LlamaForCausalLM", {"head_dim": ...}, {"head_dim": None}),
        ("LlamaForCausalLM", {"tie_word_embeddings": ...}, {"tie_embeddings": False}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 4096}, {"sliding_window": None}),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4},
            {"sliding_window": None},
        ),
        (
            "Qwen3ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
            {"sliding_window": 9},
        ),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 4}, {"sliding_window": None}),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [], "sliding_window": 4096}, {"sliding_window": None}),
        # harmless, off, a generation setting, or the default of transformers
        ("LlamaForCausalLM", {"bos_token_id": 1, "use_cache": True, "_name_or_path": "x", "torch_dtype": "x"}, {}),
        ("LlamaForCausalLM", {"attention_dropout": 0.1, "initializer_range": 0.5, "transformers_version": "4"}, {}),
        ("Qwen2ForCausalLM", {"use_mrope": False, "unheard_of": None}, {}),
        ("LlamaForCausalLM", {"max_length": 4096, "temperature": 0.6}, {}),
        ("MixtralForCausalLM", {"output_router_logits": True, "router_aux_loss_coef": 0.02}, {}),
        # of other software
        ("LlamaForCausalLM", {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}}, {}),
        ("LlamaForCausalLM", {"unsloth_fixed": True, "unsloth_version": "2025.1", "model_max_length": 4096}, {}),
        ("Qwen3MoeForCausalLM", {"use_qk_norm": True, "_attn_implementation_autoset": True}, {}),
        ("DeepseekV3ForCausalLM", {"n_group": None, "topk_group": None}, {"router_groups": None}),
    ],
)
def test_accepted_keys_give_the_expected_model_section(architecture, changes, expected):
    model = read_model(config(architecture, **changes), "there")[1]
    for key, value in expected.items():
        assert getattr(model, key) == value
    if not expected:
        assert model == read_model(config(architecture), "there")[1]


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "LlamaForCausalLM",
            {"architectures": ["BertModel"]},
            r"architectures=\['BertModel'\].*supported architectures: Llama.*Qwen3M",
        ),
        ("LlamaForCausalLM", {"architectures": ...}, r"architectures=\[\] is not supported"),
        ("LlamaForCausalLM", {"hidden_size": ...}, "there/config.json has no 'hidden_size'"),
        ("LlamaForCausalLM", {"rms_norm_eps": ...}, "has no 'rms_norm_eps'"),
        ("Qwen3ForCausalLM", {"head_dim": ...}, "has no 'head_dim'"),
        ("MistralForCausalLM", {"sliding_window": ...}, "has no 'sliding_window'"),
        ("MixtralForCausalLM", {"num_local_experts": ...}, "has no 'num_local_experts'"),
        ("Qwen3MoeForCausalLM", {"num_experts": ...}, "has no 'num_experts'"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": ...}, "has no 'norm_topk_prob'"),
        ("LlamaForCausalLM", {"hidden_size": "wide"}, "hidden_size='wide'"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_layers=0"),
        ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias=True is not supported"),
        ("Qwen2ForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; hidden_act='silu' is"),
        ("Qwen3ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=.?dynamic"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "in some layers only"),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
            "sliding_window=9 in some layers only",
        ),
        ("MixtralForCausalLM", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("Qwen3MoeForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("LlamaForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ("LlamaForCausalLM", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map=.* is not supported"),
        ("Qwen2ForCausalLM", {"is_causal": False}, "is_causal=False is not supported"),
        ("Qwen3ForCausalLM", {"use_qk_norm": False}, "use_qk_norm=False is not supported"),
        ("LlamaForCausalLM", {"rope_parameters": "x"}, "a value has another type than its key needs"),
        ("GptOssForCausalLM", {"swiglu_limit": 8.0}, "swiglu_limit=8.0 is not supported; swiglu_limit=7.0 is"),
        ("GptOssForCausalLM", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported"),
        ("GptOssForCausalLM", {"attention_bias": False}, "attention_bias=False is not supported"),
        (
            "GptOssForCausalLM",
            {"quantization_config": {"quant_method": "mxfp4"}},
            r"mxfp4.* is not supported; load the model with transformers' Mxfp4Config\(dequantize=True\)",
        ),
        (
            "GptOssForCausalLM",
            {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
            "every n-th layer must be full_attention",
        ),
        ("LlamaForCausalLM", {"logit_scale": 0.5}, "logit_scale=0.5 is not supported, and may change what"),
    ],
)
def test_unsupported_configs_are_refused(architecture, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_model(config(architecture, **changes), "there/config.json")
