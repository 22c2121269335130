"""The Hugging Face models of the rollout engine, for every family: they draw what the embedded engine draws.

The models run in the test's own process.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.logprob_check import LIMITS
from rl_megatron.generation.ongoing import Ongoing
from rl_megatron.generation.transformers.model import build_model, checkpoint_tensors
from rl_megatron.generation.transformers.replica import TransformersReplica
from rl_megatron.model.families import family_of_model, find_family_of_config
from tests.parallel.family_cases import architecture, hf_model
from tests.parallel.layouts import EXPERTS, VOCAB_SIZE, build_policy
from tests.parallel.test_generation import prompts
from tests.parallel.test_transformers_engine import LLAMA, assert_same, drawn, logprob_check


class InThisProcess:
    """An engine that runs its Hugging Face model in this process, so that only precision can make a difference."""

    def __init__(self, policy):
        self.policy, self.model = policy, build_model(policy.weights.plan, torch.device("cpu"))
        memory = checkpoint_tensors(self.model)
        for name, tensor in policy.weights.stream():
            memory[name].copy_(tensor)

    def complete(self, requests, recorder=None):
        """Decode with few slots, so that sequences take those of others."""
        replica = TransformersReplica(self.model, VOCAB_SIZE, lambda: self.policy.weight_version, recorder)
        decoder, found = Decoder(replica, max_slots=4), {}
        decoder.add([Ongoing(request) for request in requests])
        with decoder.active():
            while (ended := decoder.advance()) is not None:
                found |= {completion.request_id: completion for completion in ended}
        return [found[request.request_id] for request in requests]


def passed() -> tuple[torch.dtype, dict]:
    """Run the logprob check in bf16; return the dtype of the engine's model and the check's metrics."""
    policy = build_policy({}, LLAMA, precision="bf16")
    engine = InThisProcess(policy)
    return engine.model.dtype, logprob_check(policy).run(engine, prompts())


def test_bf16_passes_the_logprob_check(ranks):
    dtype, figures = ranks.run(1, passed)[0]
    assert dtype == torch.bfloat16
    assert 1e-4 < figures["gate_mean"] < LIMITS["bf16"] / 2
    assert figures["gate_mean"] <= figures["gate_p99"] <= figures["gate_max"]


VARIANTS = {
    "untied, padded vocabulary": dataclasses.replace(LLAMA, tie_embeddings=False, vocab_size=56),
    "qkv_bias": dataclasses.replace(LLAMA, qkv_bias=True),
    "qk_norm": dataclasses.replace(LLAMA, qk_norm=True),
    "sliding_window": dataclasses.replace(LLAMA, sliding_window=4, tie_embeddings=False),
    "experts": dataclasses.replace(EXPERTS, qk_norm=False, qkv_bias=False, tie_embeddings=False),
    "experts, qk_norm": dataclasses.replace(EXPERTS, qkv_bias=False, normalize_expert_weights=False),
}


def experts_of_router(model: ModelConfig) -> tuple[torch.Tensor, ...]:
    """Return the experts that a router chooses for bf16 tokens, those of fp32 scores, and those of bf16 scores."""
    engine = InThisProcess(build_policy({}, model, precision="bf16"))
    router = next(module for module in engine.model.modules() if type(module).__name__.endswith("TopKRouter"))
    hidden = torch.randn(2048, model.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    (chosen,) = (output for output in router(hidden) if not output.is_floating_point())
    in_fp32, in_bf16 = hidden.float() @ router.weight.float().T, hidden @ router.weight.T
    return tuple(
        experts.sort(-1).values for experts in (chosen, *(scores.topk(2).indices for scores in (in_fp32, in_bf16)))
    )


@pytest.mark.parametrize("variant", ["experts", "experts, qk_norm"])
def test_bf16_routers_choose_the_experts_of_fp32_scores_as_the_trainer_does(ranks, variant):
    chosen, in_fp32, in_bf16 = ranks.run(1, experts_of_router, VARIANTS[variant])[0]
    assert torch.equal(chosen, in_fp32)
    assert not torch.equal(in_bf16, in_fp32), "or the test shows nothing"


def has_a_family(model: ModelConfig) -> bool:
    try:
        family_of_model(model, model.vocab_size or VOCAB_SIZE)
    except ConfigError:
        return False
    return True


def model_of(case: str) -> ModelConfig:
    hf = hf_model(case).config.to_dict() | {"architectures": [architecture(case)]}
    return dataclasses.replace(find_family_of_config(hf, case).read_config(hf), init_std=0.1)


def both(model: ModelConfig) -> tuple[dict, dict]:
    """Return what the Hugging Face model draws, and what the embedded engine draws."""
    policy = build_policy({}, model)
    return drawn(InThisProcess(policy)), drawn(EmbeddedEngine(policy))


@pytest.mark.parametrize("variant", [name for name, model in VARIANTS.items() if has_a_family(model)])
def test_every_family_draws_what_the_embedded_engine_draws(ranks, variant):
    found, wanted = ranks.run(1, both, VARIANTS[variant])[0]
    assert_same(found, wanted, atol=1e-5)


@pytest.mark.parametrize("case", ["gemma3", "glm4", "glm4_moe", "deepseek_v3", "gpt_oss", "qwen3_5", "qwen3_5_moe"])
def test_families_with_other_shapes_draw_what_the_embedded_engine_draws(ranks, case):
    found, wanted = ranks.run(1, both, model_of(case))[0]
    assert_same(found, wanted, atol=1e-5)
