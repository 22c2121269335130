"""The sizes that config/model_shape.py computes from a model's configuration."""

import pytest

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import LatentShape, head_size, num_experts, query_size, rotary_size

LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def test_a_head_without_latents_has_one_size():
    derived, own = ModelConfig(hidden_size=64, num_attention_heads=4), ModelConfig(hidden_size=64, head_dim=24)
    assert [head_size(derived), query_size(derived), rotary_size(derived)] == [16, 16, 16]
    assert [head_size(own), query_size(own), rotary_size(own)] == [24, 24, 24]


def test_queries_with_latents_have_two_parts_and_rope_rotates_one():
    model = ModelConfig(**LATENT)
    shape = LatentShape.from_model(model)
    assert (shape.latent, shape.query, shape.key_and_value, shape.value) == (16, 8 + 4, 8 + 6, 6)
    assert (query_size(model), rotary_size(model)) == (12, 4)


@pytest.mark.parametrize("key", LATENT)
def test_a_latent_shape_with_a_dimension_missing_is_refused_by_name(key):
    with pytest.raises(ValueError, match=f"model.{key}=None"):
        LatentShape.from_model(ModelConfig(**{**LATENT, key: None}))


def test_a_dense_model_has_no_number_of_experts():
    assert num_experts(ModelConfig(num_experts=8)) == 8
    with pytest.raises(ValueError, match="a dense model has no experts"):
        num_experts(ModelConfig())
