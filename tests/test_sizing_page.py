"""docs/sizing.md: its table is up to date, and its formulas give the bytes that a built model holds."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from docs import generate_sizing as sizing
from rl_megatron.checkpoint.optimizer_state import list_parts
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import LayerKind
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.generation import kv_cache
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.model.layers import gated_activation
from rl_megatron.plan.closed_forms import layer_activation_elements
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel.layouts import EXPERTS, MODEL, build_policy

VOCAB_SIZE = 64  # needs no padding
UNTIED = replace(MODEL, tie_embeddings=False)


def case(model: ModelConfig, world_size: int, parallel: dict, **options) -> sizing.Case:
    return sizing.Case("", model, VOCAB_SIZE, world_size, ParallelConfig(**parallel), **options)


def test_the_table_is_up_to_date():
    text = sizing.PAGE.read_text()
    assert sizing.page(text) == text, "run `python docs/generate_sizing.py`"


@pytest.mark.parametrize(
    ("model", "vocab_size", "published"),
    [
        (sizing.QWEN, 151_936, 494_032_768),
        (sizing.LLAMA_8B, 128_256, 8_030_261_248),
        (sizing.QWEN_MOE, 151_936, 30.5e9),
    ],
)
def test_presets_have_as_many_parameters_as_the_published_models(model, vocab_size, published):
    whole = sizing.Case("", model, vocab_size, 1, ParallelConfig())
    assert sizing.total_parameters(whole) == pytest.approx(published, rel=2e-3)


def held_bytes(model: ModelConfig, parallel: dict, precision: str, distributed: bool) -> dict[str, int]:
    """Return the bytes of a policy's parameters, gradients, optimizer state and reference on this rank."""
    policy = build_policy(parallel, model, OptimizerConfig(distributed=distributed), precision, vocab_size=VOCAB_SIZE)
    policy.freeze_reference()
    models = [parameter for model_chunk in policy.model.model_chunks for parameter in model_chunk.parameters()]
    storages = {p.untyped_storage().data_ptr() for p in models}
    state = []
    for part in list_parts(policy.optimizer):
        stepped = [p for group in part.optimizer.param_groups for p in group["params"]]
        state += [p for p in stepped if p.untyped_storage().data_ptr() not in storages]
        state += [
            x for entry in part.optimizer.state.values() for x in entry.values() if torch.is_tensor(x) and x.dim()
        ]
    frozen = [p for model_chunk in policy.reference.model.model_chunks for p in model_chunk.parameters()]
    return {
        "parameters": sum(p.numel() * p.element_size() for p in models),
        "gradients": sum(p.main_grad.numel() * p.main_grad.element_size() for p in models),
        "optimizer": sum(x.numel() * x.element_size() for x in state),
        "reference": sum(p.numel() * p.element_size() for p in frozen),
    }


LAYOUTS = [
    (1, {}, MODEL),
    (2, {}, UNTIED),
    (2, {"tensor": 2}, MODEL),
    (2, {"pipeline": 2}, UNTIED),
    (2, {"context": 2}, MODEL),
    (2, {"expert": 2}, EXPERTS),
]


@pytest.mark.change
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: str(layout[:2]))
@pytest.mark.parametrize(("precision", "distributed"), [("bf16", True), ("fp32", True), ("bf16", False)])
def test_the_formulas_give_the_bytes_of_a_built_policy(ranks, layout, precision, distributed):
    world_size, parallel, model = layout
    sized = case(model, world_size, parallel, precision=precision, distributed=distributed)
    sized_bytes = sizing.training_bytes(sized)
    held = ranks.run(world_size, held_bytes, model, parallel, precision, distributed)
    final_norm = model.hidden_size * (parallel.get("pipeline", 1) > 1)  # only the last stage has it
    fullest = max(held, key=lambda rank: rank["parameters"])
    assert fullest["parameters"] == sized_bytes.parameters
    assert fullest["gradients"] == sized_bytes.gradients
    assert fullest["reference"] == sizing.reference_bytes(sized) == sized_bytes.parameters
    # Ranks that share a model split its state at the borders of buckets, so that only the sum is exact.
    per_stage = sum(rank["optimizer"] for rank in held) / len(held)
    assert per_stage == pytest.approx(sized_bytes.optimizer, abs=12 * final_norm)


def cached_bytes(batch_size: int) -> int:
    """Return the bytes of the KV cache of a generation with this batch size."""
    policy = build_policy({}, MODEL, precision="bf16", vocab_size=VOCAB_SIZE)
    caches, initialize = [], kv_cache.KVCache.__init__

    def keep(self, *args):
        initialize(self, *args)
        caches.append(self)

    kv_cache.KVCache.__init__ = keep
    try:
        generate(EmbeddedEngine(policy, batch_size), [[1, 2, 3]] * batch_size, Sampling(max_new_tokens=5), seed=0)
    finally:
        kv_cache.KVCache.__init__ = initialize
    return sum(tensor.nbytes for cache in caches for tensor in cache.tensors())


def test_the_formula_gives_the_bytes_of_the_kv_cache(ranks):
    sized = case(MODEL, 1, {}, sequences=4, columns=8)
    assert ranks.run(1, cached_bytes, 4) == [sizing.working_bytes(sized)[-1]]


def saved_elements(model: ModelConfig, num_layers: int, num_tokens: int) -> float:
    """Return how many bf16 elements per token autograd keeps for the backward pass."""
    model = replace(model, num_layers=num_layers, max_sequence_length=num_tokens)
    policy: MegatronPolicy = build_policy({}, model, precision="bf16", vocab_size=VOCAB_SIZE)
    model_chunk = policy.model.model_chunks[0]
    model_chunk.train()
    weights = {p.untyped_storage().data_ptr() for p in model_chunk.parameters()}
    kept = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    as_on_a_gpu = mock.patch.object(gated_activation, "computes_again", lambda device: True)
    with as_on_a_gpu, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model_chunk(torch.zeros(1, num_tokens, dtype=torch.long), None, None)
    size = sum(t.untyped_storage().nbytes() for data, t in kept.items() if data not in weights)
    del output
    return size / 2 / num_tokens


DENSE = ModelConfig(hidden_size=128, ffn_hidden_size=384, num_attention_heads=4, num_query_groups=2)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_formula_gives_the_activations_of_a_layer(ranks, qk_norm):
    dense = replace(DENSE, qk_norm=qk_norm)

    def elements_of_a_layer(recompute: str) -> float:
        model = replace(dense, recompute=recompute)
        two, four = (ranks.run(1, saved_elements, model, layers, 64)[0] for layers in (2, 4))
        return (four - two) / 2

    assert elements_of_a_layer("full") == dense.hidden_size
    formula = layer_activation_elements(dense, LayerKind())
    assert formula <= elements_of_a_layer("none") <= 1.1 * formula  # the page says 1.0 to 1.1
    assert elements_of_a_layer("selective") == pytest.approx(elements_of_a_layer("none"), rel=0.1)


def test_layers_of_an_uneven_pipeline():
    uneven = case(MODEL, 2, {"pipeline": 2, "last_stage_layers": 1}).shape
    assert [uneven.layers(stage) for stage in (0, 1)] == [[range(3)], [range(3, 4)]]
    interleaved = case(MODEL, 2, {"pipeline": 2, "virtual_pipeline": 2}).shape
    assert [interleaved.layers(stage) for stage in (0, 1)] == [[range(1), range(2, 3)], [range(1, 2), range(3, 4)]]
