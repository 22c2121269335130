"""Families whose computation differs from LLaMA's, in every kind of layout.

Logits and greedy tokens are compared with transformers, each gradient with one process.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
)

from rl_megatron.batching.config import Batching
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.losses import NLLLoss
from rl_megatron.model.build import unwrap
from rl_megatron.model.shards import pieces
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel.hf_models import policy_of, save_random
from tests.parallel.layouts import gradients, weights, worst_relative_error
from tests.parallel.test_layouts import random_batch

VOCAB_SIZE = 77  # the model pads it to 128; the padding must not change any result
NEW_TOKENS = 6
SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": 128,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip

CONFIGS = {
    "gemma3": Gemma3TextConfig(
        **SMALL, num_hidden_layers=4, intermediate_size=56, num_key_value_heads=2, head_dim=20, sliding_window=5,
        sliding_window_pattern=3, query_pre_attn_scalar=13,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "deepseek_v3": DeepseekV3Config(
        **SMALL, num_hidden_layers=4, intermediate_size=56, moe_intermediate_size=24, kv_lora_rank=11, q_lora_rank=13,
        qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14, num_key_value_heads=4, first_k_dense_replace=1,
        n_routed_experts=12, num_experts_per_tok=5, n_group=3, topk_group=2, n_shared_experts=2,
        routed_scaling_factor=1.7, num_nextn_predict_layers=0,
        rope_parameters={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
                         "rope_theta": 100.0, "mscale": 1.0, "mscale_all_dim": 0.6},
    ),
    "deepseek_v3 dense": DeepseekV3Config(
        **SMALL, num_hidden_layers=2, intermediate_size=56, kv_lora_rank=11, q_lora_rank=None, qk_nope_head_dim=10,
        qk_rope_head_dim=6, v_head_dim=14, num_key_value_heads=4, first_k_dense_replace=2, num_nextn_predict_layers=0,
        n_routed_experts=1, n_group=1, topk_group=1,
    ),
    "glm4": Glm4Config(
        **SMALL, num_hidden_layers=2, intermediate_size=56, num_key_value_heads=2, head_dim=20,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.6},
    ),
    "glm4_moe": Glm4MoeConfig(
        **SMALL, num_hidden_layers=4, intermediate_size=56, moe_intermediate_size=24, num_key_value_heads=2,
        head_dim=20, attention_bias=True, use_qk_norm=False, first_k_dense_replace=1, n_routed_experts=12,
        num_experts_per_tok=4, n_group=3, topk_group=2, n_shared_experts=2, routed_scaling_factor=1.7,
        num_nextn_predict_layers=0,
        rope_parameters={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
                         "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    ),
    "gpt_oss": GptOssConfig(
        **SMALL, num_hidden_layers=4, intermediate_size=24, num_key_value_heads=2, head_dim=20, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=5,
        rope_parameters={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
                         "rope_theta": 100.0, "truncate": False},
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **SMALL, num_hidden_layers=4, intermediate_size=56, num_key_value_heads=2, head_dim=20,
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=4, linear_num_value_heads=12,
        linear_key_head_dim=10, linear_value_head_dim=14, linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5,
                         "mrope_section": [2, 2, 1], "mrope_interleaved": True},
    ),
    "llama yarn": LlamaConfig(
        **SMALL, num_hidden_layers=2, intermediate_size=56, num_key_value_heads=2, head_dim=20,
        rope_parameters={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16,
                         "rope_theta": 100.0},
    ),
    "llama3": LlamaConfig(
        **SMALL, num_hidden_layers=2, intermediate_size=56, num_key_value_heads=2, head_dim=20,
        rope_parameters={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 16, "rope_theta": 100.0},
    ),
}  # fmt: skip
PACKED = Batching("packed", tokens=64)
LAYOUTS = {
    "gemma3": {
        "tensor 2 sequence": (2, {"tensor": 2, "sequence": True}, Batching(sequences=3)),
        "tensor 2": (2, {"tensor": 2}, PACKED),
        "pipeline 2 interleaved": (2, {"pipeline": 2, "virtual_pipeline": 2}, Batching(sequences=3)),
        "context 2": (2, {"context": 2}, Batching(sequences=3)),
        "context 2 packed, recomputed": (2, {"context": 2}, PACKED, "full"),
    },
    "deepseek_v3": {
        "tensor 2 sequence": (2, {"tensor": 2, "sequence": True}, Batching(sequences=3)),
        "pipeline 2 interleaved packed": (2, {"pipeline": 2, "virtual_pipeline": 2}, PACKED, "full"),
        "context 2": (2, {"context": 2}, Batching(sequences=3)),
        "expert 2": (2, {"expert": 2}, PACKED, "selective"),
        "tensor 2 sequence, pipeline 2, expert 2": (
            4,
            {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2},
            PACKED,
        ),
    },
    "deepseek_v3 dense": {"tensor 2": (2, {"tensor": 2}, Batching(sequences=3))},
    "glm4": {"tensor 2 sequence, packed": (2, {"tensor": 2, "sequence": True}, PACKED)},
    "glm4_moe": {
        "tensor 2 sequence": (2, {"tensor": 2, "sequence": True}, Batching(sequences=3)),
        "pipeline 2 interleaved packed": (2, {"pipeline": 2, "virtual_pipeline": 2}, PACKED, "full"),
        "context 2": (2, {"context": 2}, Batching(sequences=3)),
        "expert 2": (2, {"expert": 2}, PACKED, "selective"),
    },
    "gpt_oss": {
        "tensor 2 sequence": (2, {"tensor": 2, "sequence": True}, Batching(sequences=3)),
        "tensor 2 sequence, packed, recomputed": (2, {"tensor": 2, "sequence": True}, PACKED, "selective"),
        "pipeline 2 interleaved packed": (2, {"pipeline": 2, "virtual_pipeline": 2}, PACKED, "full"),
        "context 2": (2, {"context": 2}, Batching(sequences=3)),
        "context 2 packed": (2, {"context": 2}, PACKED),
        "expert 2": (2, {"expert": 2}, PACKED),
    },
    "qwen3_5": {
        "tensor 2": (2, {"tensor": 2}, PACKED),
        "tensor 2 sequence, recomputed": (2, {"tensor": 2, "sequence": True}, Batching(sequences=3), "full"),
        "pipeline 2 interleaved packed": (2, {"pipeline": 2, "virtual_pipeline": 2}, PACKED),
        "context 2": (2, {"context": 2}, Batching(sequences=3)),
        "context 2 packed, recomputed": (2, {"context": 2}, PACKED, "selective"),
        "tensor 2 context 2 packed": (4, {"tensor": 2, "sequence": True, "context": 2}, PACKED),
    },
    "llama yarn": {"context 2 packed": (2, {"context": 2}, PACKED)},
    "llama3": {},
}
CASES = [(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts]


def batch() -> BatchedDataDict:
    return random_batch(7, 40, seed=0, vocab_size=VOCAB_SIZE)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (1, 9, 23)]


def by_transformers(directory) -> tuple[torch.Tensor, list[list[int]]]:
    """Return the logits [B, S, V] of the batch, and the prompts with greedy completions."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(batch()["input_ids"]).logits
        greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        completed = [model.generate(torch.tensor([prompt]), **greedy)[0].tolist() for prompt in prompts()]
    return logits, completed


def by_us(directory, parallel: dict, batching: Batching, recompute: str = "none") -> dict:
    """Compute the same with a policy in a layout, and the loss and the gradients of an NLL step."""
    policy = policy_of(
        directory, parallel, {"recompute": recompute} if recompute != "none" else None, batching=batching
    )
    rollouts = generate(
        EmbeddedEngine(policy, batch_size=2), prompts(), Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0), seed=0
    )
    lengths = rollouts["input_lengths"].tolist()
    completed = [ids[:n] for ids, n in zip(rollouts["input_ids"].tolist(), lengths, strict=True)]
    report = policy.accumulate_gradients(batch(), NLLLoss())
    return {"logits": logits_of(policy), "completed": completed, "loss": report["loss"], "gradients": gradients(policy)}


def logits_of(policy: MegatronPolicy) -> torch.Tensor:
    """Return the policy's logits [B, S, V] of the batch."""
    values = policy.get_topk_logits(batch(), k=VOCAB_SIZE)
    return torch.zeros(values["topk_logits"].shape).scatter(-1, values["topk_indices"], values["topk_logits"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a random model of each family; return family → (directory, what transformers computes)."""
    directories = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in CONFIGS}
    for name, directory in directories.items():
        save_random(CONFIGS[name], directory)
    return {name: (directory, by_transformers(directory)) for name, directory in directories.items()}


@pytest.fixture(scope="module")
def one_process(ranks, saved):
    return {name: ranks.run(1, by_us, saved[name][0], {}, Batching(sequences=7))[0] for name in CONFIGS}


def assert_like_transformers(found: dict, wanted: tuple[torch.Tensor, list[list[int]]]) -> None:
    logits, completed = wanted
    within = torch.arange(logits.size(1)) < batch()["input_lengths"][:, None]
    assert logits[within].std() > 0.5, "almost equal logits would hide errors"
    torch.testing.assert_close(found["logits"][within], logits[within], atol=1e-4, rtol=0)
    assert found["completed"] == completed


@pytest.mark.parametrize("family", CONFIGS)
def test_one_process_equals_transformers(saved, one_process, family):
    assert_like_transformers(one_process[family], saved[family][1])


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_layout_equals_transformers_and_one_process(ranks, saved, one_process, family, layout):
    world_size, *settings = LAYOUTS[family][layout]
    directory, wanted = saved[family]
    found = ranks.run(world_size, by_us, directory, *settings)[0]
    assert_like_transformers(found, wanted)
    assert found["loss"] == pytest.approx(one_process[family]["loss"], rel=1e-5)
    error, name = worst_relative_error(found["gradients"], one_process[family]["gradients"])
    assert error <= 1e-4, (name, error)


NEUTRAL = {
    "gpt_oss": {
        "sliding_window": {"sliding_window": None, "global_attention_every": None},
        "global_attention_every": 3,
        "rope_scaling": None,
        "activation": "silu",
    },
    "gemma3": {
        "zero_centered_norm": False,
        "sandwich_norms": False,
        "activation": "silu",
        "scale_embeddings": False,
        "query_pre_attn_scalar": None,
        "global_attention_every": 4,
        "local_rope_base": None,
        "rope_scaling": None,
        "sliding_window": 6,
    },
    "glm4": {"rope_interleaved": False, "partial_rotary_factor": 0.5, "sandwich_norms": False},
    "glm4_moe": {"rope_scaling": None, "partial_rotary_factor": 1.0, "router_bias": False},
    "deepseek_v3": {
        "rope_scaling": None,
        "routed_scaling_factor": 1.0,
        "router_bias": False,
        "router_groups": {"router_groups": None, "router_groups_per_token": None},
        "router_score": {"router_score": "softmax", "router_bias": False},
    },
}


def logits_with(directory, changes: dict) -> dict[str, torch.Tensor]:
    keys = {name: value if isinstance(value, dict) else {name: value} for name, value in changes.items()}
    return {name: logits_of(policy_of(directory, {}, changed)) for name, changed in keys.items()}


@pytest.mark.parametrize("family", NEUTRAL)
def test_each_key_of_the_model_changes_the_logits(ranks, saved, one_process, family):
    """No key of the models above can be wrong without changing their logits."""
    found = ranks.run(1, logits_with, saved[family][0], NEUTRAL[family])[0]
    for key, logits in found.items():
        assert (logits - one_process[family]["logits"]).abs().max() > 1e-2, key


def router_biases(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: bias for name, bias in weights(policy).items() if name.endswith("router.expert_bias")}


def trained_saved_and_loaded(directory, checkpoints) -> list[dict[str, torch.Tensor]]:
    """Return the routers' biases in a bf16 run: imported, after a step, and loaded in another layout."""
    policy = policy_of(directory, {"expert": 2}, precision="bf16")
    found = [router_biases(policy)]
    policy.train(batch(), NLLLoss(), gbs=7)
    found.append(router_biases(policy))
    path = policy.save_checkpoint(checkpoints, step=1)
    resumed = policy_of(directory, {"pipeline": 2}, precision="bf16")
    for piece in pieces(resumed.model.model_chunks):
        piece.tensor.zero_()
    resumed.load_checkpoint(path)
    return [*found, router_biases(resumed)]


def test_a_routers_bias_stays_in_fp32_and_does_not_change(ranks, saved, tmp_path):
    directory = saved["deepseek_v3"][0]
    tensors = load_file(directory / "model.safetensors")
    wanted = {
        f"decoder.layers.{n}.mlp.router.expert_bias": tensors[f"model.layers.{n}.mlp.gate.e_score_correction_bias"]
        for n in (1, 2, 3)
    }
    for found in ranks.run(2, trained_saved_and_loaded, directory, tmp_path)[0]:
        assert found.keys() == wanted.keys()
        for name, bias in wanted.items():
            assert not torch.equal(bias, bias.bfloat16().float()), "bf16 could not represent it"
            assert torch.equal(found[name], bias), name


RATE = 0.01


def biases_after_a_step(directory, parallel: dict, batching: Batching) -> dict[str, torch.Tensor]:
    policy = policy_of(directory, parallel, {"router_bias_update": RATE}, batching=batching)
    policy.accumulate_gradients(batch(), NLLLoss())  # counts tokens, but does not move the biases
    policy.train(batch(), NLLLoss(), gbs=7)
    return router_biases(policy)


def moved_by_hand(directory) -> dict[str, torch.Tensor]:
    """Return the biases after one update, from the number of tokens that visit each expert; padding does not count."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    within = (torch.arange(batch()["input_ids"].size(1)) < batch()["input_lengths"][:, None]).flatten()
    moved = {}
    for layer in (1, 2, 3):
        gate = model.model.layers[layer].mlp.gate

        def count(_, __, output, gate=gate, name=f"decoder.layers.{layer}.mlp.router.expert_bias"):
            visits = torch.bincount(output[2][within].flatten(), minlength=12).float()
            moved[name] = gate.e_score_correction_bias + RATE * (visits.mean() - visits).sign()

        gate.register_forward_hook(count)
    with torch.no_grad():
        model(batch()["input_ids"])
    return moved


@pytest.mark.parametrize(
    ("parallel", "batching"),
    [
        ({"expert": 2}, PACKED),
        ({"tensor": 2, "sequence": True}, Batching(sequences=3)),
        ({"pipeline": 2}, Batching(sequences=2)),
    ],
    ids=["expert 2", "tensor 2 sequence", "pipeline 2"],
)
def test_a_routers_bias_moves_towards_an_even_load_if_its_update_is_on(ranks, saved, parallel, batching):
    directory = saved["deepseek_v3"][0]
    found, wanted = ranks.run(2, biases_after_a_step, directory, parallel, batching)[0], moved_by_hand(directory)
    assert found.keys() == wanted.keys()
    for name, bias in wanted.items():
        torch.testing.assert_close(found[name], bias, atol=1e-6, rtol=0)


def long_sequence() -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (1, 2500), generator=torch.Generator().manual_seed(2))


def logits_of_long_sequence(directory) -> torch.Tensor:
    policy = policy_of(directory, {}, {"max_sequence_length": 4096})
    with torch.no_grad():
        return unwrap(policy.model.model_chunks[0])(long_sequence(), None, None)[..., :VOCAB_SIZE]


@pytest.mark.parametrize("family", ["llama3", "llama yarn"])
def test_scaled_rope_far_from_the_start(ranks, saved, family):
    directory = saved[family][0]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        wanted = model(long_sequence()).logits
    found = ranks.run(1, logits_of_long_sequence, directory)[0]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
