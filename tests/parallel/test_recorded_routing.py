"""Engines record the experts of each token, and a trainer whose router chooses others agrees with the engine."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rl_megatron.config.model import ModelConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded import EmbeddedEngine, EmbeddedReplica
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.requests import PartialCompletion, make_requests
from rl_megatron.generation.transformers.replica import RoutingRecorder
from rl_megatron.model.layers.router import BalancedRouter
from tests.parallel.layouts import build_policy
from tests.parallel.test_engine_families import VARIANTS, InThisProcess, model_of
from tests.parallel.test_generation import prompts

SAMPLING = Sampling(max_new_tokens=12, stop_ids=(7,))


class Recording(InThisProcess):
    """A Hugging Face model in this process that records its routing."""

    def complete(self, requests):
        return super().complete(requests, RoutingRecorder(self.model))


def pairs() -> list[list[int]]:
    """Return prompts, each twice: the embedded engine reads equal prompts once."""
    return [prompt for prompt in prompts() for _ in range(2)]


def routers(policy) -> list[BalancedRouter]:
    return [
        module
        for model_chunk in policy.model.model_chunks
        for module in model_chunk.modules()
        if isinstance(module, BalancedRouter)
    ]


def noise(router: BalancedRouter, seed: int) -> torch.Tensor:
    """Return the same noise on every rank, of about the rounding error of fp32."""
    return 1e-6 * torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def tie_experts(policy) -> None:
    """Give all experts of a layer nearly equal scores, so that rounding decides which a token gets."""
    for router in routers(policy):
        router.weight.copy_(router.weight[:1] + noise(router, seed=0))


@torch.no_grad()
def perturb(policy) -> None:
    """Change the routers by rounding errors, so that they choose other experts."""
    for router in routers(policy):
        router.weight += noise(router, seed=1)


def differences(policy, engine, disturbed: bool) -> tuple[float, float, torch.Tensor]:
    """Return the largest |trainer's − engine's logprob| with replay and without, and the recorded experts."""
    batch = generate(engine, pairs(), SAMPLING, seed=4)
    if disturbed:
        perturb(policy)
    found = []
    for keys in (batch, {key: value for key, value in batch.items() if key != "routed_experts"}):
        logprobs = policy.get_logprobs(type(batch)(keys))["logprobs"]
        found.append(((logprobs - batch["generation_logprobs"]) * batch["token_mask"]).abs().max().item())
    return (*found, batch)


def of_transformers(model: ModelConfig, disturbed: bool):
    policy = build_policy({}, model)
    if disturbed:
        tie_experts(policy)
    return differences(policy, Recording(policy), disturbed)


MODELS = {
    "Mixtral": lambda: VARIANTS["experts"],
    "Qwen3-MoE": lambda: VARIANTS["experts, qk_norm"],
    "GLM-4.5": lambda: model_of("glm4_moe"),
    "DeepSeek-V3": lambda: model_of("deepseek_v3"),
    "gpt-oss": lambda: model_of("gpt_oss"),
}


@pytest.mark.parametrize("family", MODELS)
def test_transformers_record_the_experts_of_every_token_they_read(ranks, family):
    model = MODELS[family]()
    replayed, own, batch = ranks.run(1, of_transformers, model, False)[0]
    assert replayed < 1e-5 and own < 1e-5
    experts, read = batch["routed_experts"], batch["input_lengths"] - 1
    assert experts.shape == (*batch["input_ids"].shape, model.num_layers, model.experts_per_token)
    known = torch.arange(experts.size(1)) < read[:, None]
    recorded = experts[..., model.first_dense_layers :, :]
    assert (recorded[known] >= 0).all() and (recorded[~known] == -1).all()
    assert (recorded[known].sort().values.diff() > 0).all()  # different experts


@pytest.mark.parametrize("family", MODELS)
def test_a_trainer_whose_router_chooses_others_agrees_with_transformers(ranks, family):
    replayed, own, _ = ranks.run(1, of_transformers, MODELS[family](), True)[0]
    assert replayed < 1e-4 and own > 0.1


def of_embedded(parallel: dict, disturbed: bool, recompute: str = "none"):
    policy = build_policy(parallel, dataclasses.replace(VARIANTS["experts"], recompute=recompute))
    if disturbed:
        tie_experts(policy)
    # Few slots, so that sequences take the slots of others and a slot gets several sequences.
    return differences(policy, EmbeddedEngine(policy, batch_size=3, records_routing=True), disturbed)


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, of_embedded, {}, False)[0]


LAYOUTS = {
    "expert 2": (2, {"expert": 2}),
    "tensor 2": (2, {"tensor": 2, "sequence": True}),
    "interleaved pipeline 2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_embedded_engine_records_the_same_experts_in_every_layout(ranks, one_process, layout):
    world_size, parallel = LAYOUTS[layout]
    replayed, own, batch = ranks.run(world_size, of_embedded, parallel, False)[0]
    assert replayed < 1e-5 and own < 1e-5
    assert torch.equal(batch["routed_experts"].sort().values, one_process[2]["routed_experts"].sort().values)


def test_the_embedded_engine_records_what_transformers_record(ranks, one_process):
    batch = ranks.run(1, of_transformers, VARIANTS["experts"], False)[0][2]
    wanted = batch["routed_experts"].sort().values
    assert torch.equal(one_process[2]["routed_experts"].sort().values, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_trainer_whose_router_chooses_others_agrees_with_the_embedded_engine(ranks, layout):
    world_size, parallel = LAYOUTS[layout]
    replayed, own, _ = ranks.run(world_size, of_embedded, parallel, True, "full")[0]
    assert replayed < 1e-4 and own > 0.1


def completed_in_parts(steps: int) -> dict[str, torch.Tensor]:
    """Return the routed experts of each request, with all sequences moved to another decoder after so many steps."""
    policy, found = build_policy({}, VARIANTS["experts"]), []
    sequences = [PartialCompletion(request) for request in make_requests(pairs(), SAMPLING, seed=4)]
    for decoder in (Decoder(EmbeddedReplica(policy, records_routing=True), 3) for _ in range(2)):
        decoder.add(sequences)
        with decoder.active():
            while steps and (ended := decoder.advance()) is not None:
                found, steps = found + ended, steps - 1
            ended, sequences = decoder.evict()
            found, steps = found + ended, -1
    return {each.request_id: each.routed_experts for each in found}


def test_sequences_that_continue_elsewhere_have_the_experts_of_all_their_tokens(ranks, one_process):
    parts, whole = (ranks.run(1, completed_in_parts, steps)[0] for steps in (7, -1))
    assert len(parts) == len(pairs()) and parts.keys() == whole.keys()
    for index, (length, experts) in enumerate(
        zip(one_process[2]["input_lengths"].tolist(), one_process[2]["routed_experts"], strict=True)
    ):
        for each in (parts[f"4-{index}"], whole[f"4-{index}"]):
            assert torch.equal(each.sort().values, experts[: length - 1].sort().values)


def without_recording() -> bool:
    """Return whether routers stay as they are, and rollouts have no experts, if nothing asks for them."""
    policy = build_policy({}, VARIANTS["experts"])
    decoder = Decoder(EmbeddedReplica(policy), 3)
    with decoder.active():
        untouched = all(router.router_replay is None for router in routers(policy))
    return untouched and "routed_experts" not in generate(EmbeddedEngine(policy), prompts(), SAMPLING, seed=4)


def test_nothing_is_recorded_if_it_is_not_asked_for(ranks):
    assert ranks.run(1, without_recording)[0]
