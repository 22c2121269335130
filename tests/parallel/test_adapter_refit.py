"""Engines of Hugging Face models that get the base once and then the adapter alone, and apply it themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_megatron.config.peft import LoraConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.logprob_check import EngineMismatch
from rl_megatron.generation.transformers import process as worker_process
from rl_megatron.losses import NLLLoss
from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.exporter import WeightExporter
from tests.parallel.test_generation import prompts
from tests.parallel.test_layouts import random_batch
from tests.parallel.test_transformers_engine import (
    LLAMA,
    dropping,
    killed_while,
    logprob_check,
    patched,
    refusal,
    serving,
)

LORA = LoraConfig(r=3, lora_alpha=5.0, init_lora_weights=False)
GLM4 = replace(LLAMA, qkv_bias=True, sandwich_norms=True, rope_interleaved=True)  # gate and up are one module
LATENT = replace(
    LLAMA, num_query_groups=LLAMA.num_attention_heads, tie_embeddings=False, kv_lora_rank=11, q_lora_rank=13,
    qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=12,
)  # fmt: skip
LAYOUTS = {
    "one process": ({}, LLAMA, {}),
    "tensor 2, 2 engines": ({"tensor": 2, "sequence": True}, LLAMA, {"num_engines": 2}),
    "pipeline 2": ({"pipeline": 2}, replace(LLAMA, qk_norm=True), {}),
    "fused gate and up": ({}, GLM4, {}),
    "latent attention, tensor 2": ({"tensor": 2, "sequence": True}, LATENT, {}),
}


def difference(policy, engine) -> float:
    """Return the largest difference between the engine's logprobs and the trainer's, of completions of 12 tokens."""
    rollouts = generate(engine, prompts(), Sampling(max_new_tokens=12), seed=1)
    found, wanted = rollouts["generation_logprobs"], policy.get_logprobs(rollouts)["logprobs"]
    return float(((found - wanted) * rollouts["token_mask"]).abs().max())


def use_engine(parallel: dict, model, settings: dict) -> dict:
    found: dict = {"differences": []}
    keys = {"refit": "adapter", "peft": LORA, "model": model, **settings}
    with serving(parallel, **keys) as (policy, engine):
        found["differences"].append(difference(policy, engine))
        for seed in range(2):
            policy.train(random_batch(4, 12, seed), NLLLoss(), gbs=4)
            found["sync"] = engine.sync()
            found["differences"].append(difference(policy, engine))
        found["gate"] = logprob_check(policy).run(engine, prompts())
        with policy.model.adapters_off():
            found["without"] = difference(policy, engine)
        exporter = policy.weights.make_adapter_exporter()
        found["bytes"] = exporter.plan.num_bytes
    return found


def use_failing_engine() -> dict:
    """Alter a tensor on its way, and then kill the engine while it reads the adapter."""
    with serving({}, refit="adapter", peft=LORA) as (policy, engine):
        found: dict = {"before": difference(policy, engine)}
        exporter = policy.weights.make_adapter_exporter()
        name = exporter.plan.buckets[0].tensors[0].name
        policy.model.version += 1
        with patched(WeightExporter, "fill", dropping(name)):
            found["refused"] = refusal(WeightsRefused, engine.sync)
        with killed_while("take"):
            engine.sync()
        found["after"] = difference(policy, engine)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_that_gets_the_adapter_alone_has_the_logprobs_of_the_trainer(ranks, layout):
    """They agree at the start and after each step; the base alone has others."""
    parallel, model, settings = LAYOUTS[layout]
    for found in ranks.run(2 if parallel else 1, use_engine, parallel, model, settings):
        assert max(found["differences"]) <= 1e-5
        assert found["without"] > 1e-2
        assert found["gate"]["gate_max"] <= 1e-5
        assert found["sync"]["refit_bytes"] == found["bytes"]


def test_an_altered_adapter_is_refused_and_a_killed_engine_gets_base_and_adapter_again(ranks):
    (found,) = ranks.run(1, use_failing_engine)
    assert "arrived altered" in found["refused"]
    assert max(found["before"], found["after"]) <= 1e-5


def with_a_changed_adapter() -> str:
    with (
        patched(worker_process, "WORKER_MODULE", "tests.parallel.perturbing_worker"),
        serving({}, refit="adapter", peft=LORA) as (policy, engine),
    ):
        return refusal(EngineMismatch, logprob_check(policy).run, engine, prompts())


def test_an_adapter_that_changed_after_it_was_verified_fails_the_logprob_check(ranks):
    assert "generation.gate_limit=0.0001" in ranks.run(1, with_a_changed_adapter)[0]
