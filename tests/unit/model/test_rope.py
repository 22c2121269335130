"""RoPE's scalings equal those of transformers, and configs of transformers 4 and 5 are read and written."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import LinearRope, Llama3Rope, YarnRope
from rl_megatron.model.families.llama import read_config, write_config
from rl_megatron.model.layers.rope import compute_frequencies, compute_rotary_scale

OLD = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
       "original_max_position_embeddings": 512}  # fmt: skip
SCALINGS = {
    "linear": ({"rope_type": "linear", "factor": 8.0}, LinearRope(factor=8.0)),
    "llama3": (OLD, Llama3Rope(factor=8.0, original_max_position_embeddings=512)),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        YarnRope(factor=4.0, original_max_position_embeddings=512),
    ),
    "yarn, DeepSeek's": (
        {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2,
         "mscale": 1.0, "mscale_all_dim": 0.7},
        YarnRope(factor=40.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0, mscale=1.0,
                 mscale_all_dim=0.7),
    ),
    "yarn, untruncated": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False,
         "attention_factor": 1.3},
        YarnRope(factor=4.0, original_max_position_embeddings=512, truncate=False, attention_factor=1.3),
    ),
}  # fmt: skip


def hf_config(**keys) -> dict:
    small = {"hidden_size": 96, "num_attention_heads": 3, "num_hidden_layers": 1, "max_position_embeddings": 2048}
    return LlamaConfig(architectures=["LlamaForCausalLM"], **small, **keys).to_dict()


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_their_scale_equal_those_of_transformers(name, base):
    given, section = SCALINGS[name]
    hf = LlamaConfig(hidden_size=96, num_attention_heads=3, max_position_embeddings=2048,
                     rope_parameters={"rope_theta": base, **given})  # fmt: skip
    wanted, scale = ROPE_INIT_FUNCTIONS[hf.rope_parameters["rope_type"]](hf)
    torch.testing.assert_close(compute_frequencies(32, base, section), wanted, rtol=2e-7, atol=0)
    assert compute_rotary_scale(section) == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_configs_of_both_versions_of_transformers_are_read(name):
    given, section = SCALINGS[name]
    plain = {key: value for key, value in hf_config().items() if key not in ("rope_parameters", "rope_theta")}
    new = read_config(plain | {"rope_parameters": {"rope_theta": 5e5, **given}})
    old = read_config(plain | {"rope_theta": 5e5, "rope_scaling": given})
    assert new == old
    assert (new.rope_base, new.rope_scaling) == (5e5, section)
    assert read_config(plain | {"rope_theta": 5e5, "rope_scaling": None}).rope_scaling is None


@pytest.mark.parametrize("name", ["none", *SCALINGS])
def test_transformers_reads_a_written_config_as_we_do(name, tmp_path):
    given = {"rope_theta": 3e4} | (SCALINGS[name][0] if name != "none" else {})
    model = read_config(hf_config(rope_parameters=given))
    written = write_config(model, 77)
    assert read_config(written).rope_scaling == model.rope_scaling
    (tmp_path / "config.json").write_text(LlamaConfig(**written).to_json_string())
    for config in (LlamaConfig(**written), AutoConfig.from_pretrained(tmp_path)):
        assert read_config(config.to_dict()) == read_config(written)
    for dialect in ("rope_parameters", "rope_scaling"):  # each says all, without the other
        assert read_config({key: value for key, value in written.items() if key != dialect}) == read_config(written)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "rope_type=dynamic is not supported; supported types: default, linear, llama3, yarn",
        ),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "rope_parameters.beta_fast=3.0"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "rope_parameters.mrope_section"),
        ({"rope_type": "linear"}, "rope_parameters.factor is missing"),
        ({"rope_type": "linear", "factor": -2.0}, "rope_parameters.factor=-2.0: Input should be greater than 0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor=0.5"),
    ],
)
def test_unsupported_ropes_are_refused_by_name(parameters, message):
    with pytest.raises(ConfigError, match=message.replace("[", "\\[")):
        read_config(hf_config() | {"rope_parameters": {"rope_theta": 1e4, **parameters}})
