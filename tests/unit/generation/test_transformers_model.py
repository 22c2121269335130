"""A model that is built from a refit plan: its tensors have the names of its checkpoint and the dtypes of the plan."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.generation.transformers.model import build_model, checkpoint_tensors
from rl_megatron.weight_sync.buckets import RefitPlan, TensorSpec, plan_buckets

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 30,
    "dtype": "float32",
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
CONFIGS = {
    "llama": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": EXPERTS,
    "gemma3_text": {},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "glm4": {"pad_token_id": 0},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v3": {
        **EXPERTS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip


def plan_of(kind, *specs):
    return RefitPlan({"model_type": kind} | SHAPE | CONFIGS[kind], 30, plan_buckets(specs, 1 << 20))


@pytest.mark.parametrize("kind", CONFIGS)
def test_tensors_have_the_names_that_a_checkpoint_saves(tmp_path, kind):
    """If the model is filled by these names, transformers saves each value under its name."""
    model = build_model(plan_of(kind), CPU)
    memory, written = checkpoint_tensors(model), {}
    with torch.no_grad():
        for number, (name, tensor) in enumerate(memory.items()):
            written[name] = tensor.copy_(torch.full_like(tensor, number / 8)).clone()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == memory.keys() - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    for name, tensor in saved.items():
        tied = name == "model.embed_tokens.weight" and model.config.tie_word_embeddings
        assert torch.equal(tensor, written["lm_head.weight" if tied else name]), name


def test_a_tensor_in_fp32_can_be_among_tensors_in_bf16():
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    plan = plan_of("deepseek_v3", TensorSpec(name, (4,), "float32"))
    plan.hf_config["dtype"] = "bfloat16"
    memory = checkpoint_tensors(build_model(plan, CPU))
    assert {tensor.dtype for key, tensor in memory.items() if key != name} == {torch.bfloat16}
    assert memory[name].dtype == torch.float32
