"""Small transformers models of every family, with random weights and the special cases of real models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

# The shape that all cases share: the heads together are wider than the hidden states, queries are grouped, and no size
# is a power of two.
SHAPE = {
    "hidden_size": 20,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 51,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,  # makes logits far from uniform, so that errors show
    "tie_word_embeddings": False,
}
_TIED = {"tie_word_embeddings": True}


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_DELTA = "linear_attention"
_HYBRID = _rope(100.0, partial_rotary_factor=0.5, mrope_section=[1, 1, 1], mrope_interleaved=True) | {
    "head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 5,
    "linear_value_head_dim": 7, "linear_conv_kernel_dim": 3,
}  # fmt: skip
# Case → (prefix of the class in transformers, keys of its config besides SHAPE).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _rope(50.0) | {"rms_norm_eps": 1e-3, "num_hidden_layers": 4}),
    "llama tied, rope scaled": ("Llama", _rope(50.0, **_LLAMA3, original_max_position_embeddings=8) | _TIED),
    "mistral": ("Mistral", _rope(100.0) | {"sliding_window": 5}),
    "qwen2": ("Qwen2", _rope(1000.0) | {"hidden_size": 24, "head_dim": None} | _TIED),
    "qwen3": ("Qwen3", _rope(1000.0) | {"hidden_size": 22}),  # 22 is not a multiple of 4 heads
    "mixtral": ("Mixtral", _rope(100.0) | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        _rope(100.0)
        | {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "norm_topk_prob": False},
    ),
    "qwen3_moe normalised": (
        "Qwen3Moe",
        _rope(100.0)
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
        | _TIED,
    ),
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 4, "sliding_window": 5, "sliding_window_pattern": 3, "query_pre_attn_scalar": 13} | _TIED,
    ),
    "glm4": ("Glm4", _rope(100.0, partial_rotary_factor=0.5) | {"head_dim": 8, "pad_token_id": 0}),
    "glm4_moe": (
        "Glm4Moe",
        _rope(100.0, partial_rotary_factor=0.5)
        | {"num_hidden_layers": 2, "head_dim": 12, "attention_bias": True, "use_qk_norm": True}
        | {"moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 3}
        | {"n_shared_experts": 2, "routed_scaling_factor": 1.7, "num_nextn_predict_layers": 0},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        _rope(100.0)
        | {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": None, "kv_lora_rank": 11, "q_lora_rank": 13}
        | {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "num_nextn_predict_layers": 0}
        | {"moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_routed_experts": 6, "num_experts_per_tok": 4}
        | {"n_group": 3, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.7},
    ),
    "gpt_oss": (
        "GptOss",
        _rope(100.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False)
        | {"num_hidden_layers": 4, "intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"sliding_window": 5},
    ),
    "qwen3_5": ("Qwen3_5", _HYBRID | {"num_hidden_layers": 4, "layer_types": [_DELTA, "full_attention"] * 2}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        _HYBRID
        | {"layer_types": [_DELTA, "full_attention"], "intermediate_size": None, "moe_intermediate_size": 12}
        | {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16},
    ),
}
_CONFIGS = {
    "Gemma3": "Gemma3TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}  # config classes that are not named after the model's class


def architecture(case: str) -> str:
    return f"{CASES[case][0]}ForCausalLM"


def hf_model(case: str, **changes: Any) -> torch.nn.Module:
    """Return the model of a case with `changes` to its config; its vectors (norms, biases) are random as well."""
    import transformers  # not at the top: it takes seconds, and ranks import this module without making models

    name, keys = CASES[case]
    keys = {key: value for key, value in {**SHAPE, **keys, **changes}.items() if value is not None}
    torch.manual_seed(0)
    config: Callable = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))
    return with_random_vectors(getattr(transformers, f"{name}ForCausalLM")(config(**keys)))


def with_random_vectors(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model, after changing its vectors (norms, biases) at random."""
    model.eval()
    with torch.no_grad():
        router_biases = (buffer for name, buffer in model.named_buffers() if name.endswith("_bias"))
        for tensor in [*model.parameters(), *router_biases]:
            if tensor.dim() == 1:
                tensor += torch.randn_like(tensor) * 0.2
    return model


_VISION = {"hidden_size": 16, "intermediate_size": 16}
_SMALL_QWEN = _VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 20}
_SMALL_VIT = _VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
# Case → (prefix of the class in transformers that reads images, its `vision_config`, other keys of its config).
WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5", _SMALL_QWEN, {}),
    "qwen3_5_moe": ("Qwen3_5Moe", _SMALL_QWEN, {}),
    "gemma3": ("Gemma3", _SMALL_VIT, {"mm_tokens_per_image": 4}),
    "mistral": ("Mistral3", _SMALL_VIT | {"model_type": "pixtral", "head_dim": 8}, {"spatial_merge_size": 1}),
    "qwen3": ("Qwen3VL", _SMALL_QWEN | {"out_hidden_size": 22, "deepstack_visual_indexes": [0]}, {}),
}


def model_with_images(case: str, **changes: Any) -> torch.nn.Module:
    """Return a model that reads images, whose text model has the config of a case with `changes`."""
    import transformers  # not at the top: see `hf_model`

    name, vision, keys = WITH_IMAGES[case]
    text = hf_model(case, **changes).config.to_dict()
    if name == "Qwen3VL":
        text["model_type"] = "qwen3_vl_text"
        text["rope_parameters"] |= {"mrope_section": [1, 1, 1], "mrope_interleaved": True}
    tied = text["tie_word_embeddings"]
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=tied, **keys
    )
    torch.manual_seed(0)
    return with_random_vectors(getattr(transformers, f"{name}ForConditionalGeneration")(config))


def save(model: torch.nn.Module, directory: Path, max_shard_size: str = "20KB") -> Path:
    """Save `model` with transformers and return the directory; a small `max_shard_size` gives several files."""
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def save_as_published(model: torch.nn.Module, directory: Path, **more: torch.Tensor) -> Path:
    """Save a model under the names of its parameters, which stack experts, and return the directory."""
    directory.mkdir()
    state = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state | more, directory / "model.safetensors")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    return directory


def save_tokenizer(directory: Path, num_tokens: int) -> None:
    """Save a tokenizer whose words are numbers, with its config and a chat template."""
    vocabulary = {"<eos>": 0} | {str(number): number for number in range(1, num_tokens)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<eos>"])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "note": "kept"}))
    (directory / "chat_template.jinja").write_text("{{ messages }}")


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a directory, as the safetensors library reads it."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
    return found


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Check that two sets of tensors have the same names, dtypes, shapes and bits."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and tensor.shape == other[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name
