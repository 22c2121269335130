"""Refit: a sharded policy exports the weights that one process exports, and errors name weights that are wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from rl_megatron.config.model import ModelConfig
from rl_megatron.losses import NLLLoss
from rl_megatron.model.families import find_family_of_config
from rl_megatron.weight_sync.buckets import WeightsRefused
from rl_megatron.weight_sync.exporter import WeightExporter
from rl_megatron.weight_sync.process_group import StandaloneGroup
from tests.parallel.family_cases import CASES, architecture, hf_model
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, MODEL, build_policy
from tests.parallel.refit_engines import (
    digests,
)
from tests.parallel.test_layouts import random_batch

CPU = torch.device("cpu")
LLAMA = dataclasses.replace(MODEL, qk_norm=False, qkv_bias=False)
UNTIED = dataclasses.replace(LLAMA, tie_embeddings=False, vocab_size=56)
MAX_BYTES = 20_000  # gives several buckets; the embedding shares one with other weights
OVERLAPPED = dataclasses.replace(DISTRIBUTED_OPTIMIZER, overlap=True)


def llama(parallel: dict, model: ModelConfig = LLAMA, **kwargs):
    return build_policy(parallel, model, **kwargs)


class CountedCollectives:
    """Counts the collectives that start within the block, of torch.distributed and of standalone groups."""

    NAMES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_object", "send", "gather")

    def __enter__(self):
        self.count = 0
        self._kept = [(dist, name, getattr(dist, name)) for name in self.NAMES]
        self._kept.append((StandaloneGroup, "all_reduce", StandaloneGroup.all_reduce))
        for owner, name, function in self._kept:
            setattr(owner, name, self._counting(function))
        return self

    def _counting(self, function):
        def counting(*args, **kwargs):
            self.count += 1
            return function(*args, **kwargs)

        return counting

    def __exit__(self, *_):
        for owner, name, function in self._kept:
            setattr(owner, name, function)


def streamed(parallel: dict, model: ModelConfig, precision: str) -> tuple[dict, int, int]:
    """Return (digests of the exported weights, number of collectives, number of buckets)."""
    policy = llama(parallel, model, precision=precision)
    policy.prepare_weights_for_ipc(MAX_BYTES)
    with CountedCollectives() as collectives:
        found = digests(policy.weights.stream())
    return found, collectives.count, len(policy.weights.plan.buckets)


TIED_LAYOUTS = [
    (2, {"tensor": 2, "sequence": True}),
    (2, {"pipeline": 2}),
    (2, {"pipeline": 2, "virtual_pipeline": 2}),
    pytest.param((4, {"tensor": 2, "pipeline": 2}), marks=pytest.mark.fast),
    (2, {}),
]


@pytest.fixture(scope="module")
def whole(ranks):
    """Return a function that gives what one process exports of a model; each model is exported once."""
    known: dict = {}

    def of(model: ModelConfig, precision: str) -> dict:
        key = (repr(model), precision)
        if key not in known:
            known[key] = ranks.run(1, streamed, {}, model, precision)[0]
        return known[key]

    return of


@pytest.mark.parametrize("layout", TIED_LAYOUTS, ids=str)
@pytest.mark.parametrize(("model", "precision"), [(LLAMA, "fp32"), (UNTIED, "bf16")], ids=["tied-fp32", "untied-bf16"])
def test_a_sharded_export_equals_that_of_one_process_bitwise(ranks, whole, layout, model, precision):
    wanted, none, buckets = whole(model, precision)
    assert none == 0 and buckets > 2
    for found, collectives, _ in ranks.run(layout[0], streamed, layout[1], model, precision):
        assert found == wanted
        assert collectives == buckets


def model_of(case: str) -> ModelConfig:
    hf = hf_model(case).config.to_dict() | {"architectures": [architecture(case)]}
    return find_family_of_config(hf, case).read_config(hf)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "layout",
    [
        (2, {"tensor": 2, "sequence": True, "expert_tensor": 2}),
        (2, {"expert_tensor": 2}),
        (4, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}),
    ],
    ids=str,
)
def test_experts_whose_matrices_are_split_are_exported_bitwise(ranks, whole, layout, case):
    model = model_of(case)
    for found, _, _ in ranks.run(layout[0], streamed, layout[1], model, "bf16"):
        assert found == whole(model, "bf16")[0]


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_exported_bitwise(ranks, whole, case):
    """The layout has tensor and sequence parallelism, and expert parallelism if the model has experts."""
    model = model_of(case)
    layout = {"tensor": 2, "sequence": True} | ({"expert": 2} if model.num_experts else {})
    for found, _, _ in ranks.run(2, streamed, layout, model, "bf16"):
        assert found == whole(model, "bf16")[0]


def after_a_step(parallel: dict, overlap: bool) -> dict:
    policy = llama(parallel, optimizer=dataclasses.replace(DISTRIBUTED_OPTIMIZER, overlap=overlap))
    policy.train(random_batch(4, 12, 0), NLLLoss(), gbs=4)
    return digests(policy.weights.stream())


def test_weights_that_the_last_step_left_scattered_are_gathered_first(ranks):
    wanted = ranks.run(2, after_a_step, {}, False)[0]
    assert ranks.run(2, after_a_step, {}, True) == [wanted, wanted]


# --- weights that are refused ---


def refusal(parallel: dict, change: str) -> str:
    """Change a weight shard of the last rank; return the error of building the exporter, or "nothing"."""
    from rl_megatron.weight_sync import exporter

    policy, pieces = llama(parallel), exporter.pieces
    name = "decoder.layers.1.mlp.linear_fc2.weight"

    def changed(model_chunks):
        for piece in pieces(model_chunks):
            if piece.name == name and piece.is_first_replica and dist.get_rank() == dist.get_world_size() - 1:
                if change == "dropped":
                    continue
                if change == "doubled":
                    yield piece
                if change == "elsewhere":
                    piece = dataclasses.replace(piece, offset=(0, 0))
                if change == "unknown":
                    piece = dataclasses.replace(piece, name="decoder.layers.1.mlp.linear_fc3.weight")
                if change == "reshaped":
                    piece = dataclasses.replace(piece, global_shape=(32, 65))
            yield piece

    exporter.pieces = changed
    try:
        WeightExporter(policy.model)
    except RuntimeError as error:
        return str(error)
    finally:
        exporter.pieces = pieces
    return "nothing"


@pytest.mark.parametrize(("change", "held"), [("dropped", 1024), ("doubled", 3072), ("elsewhere", 2048)])
def test_elements_that_are_not_held_exactly_once_are_refused_on_every_rank(ranks, change, held):
    for message in ranks.run(2, refusal, {"tensor": 2}, change):
        assert f"model.layers.1.mlp.down_proj.weight: the ranks hold {held} elements of 2048" in message


@pytest.mark.parametrize("change", ["unknown", "reshaped"])
def test_a_tensor_that_the_table_does_not_know_is_refused_on_every_rank(ranks, change):
    first, last = ranks.run(2, refusal, {"tensor": 2}, change)
    assert first == "the family's weight table lacks tensors of another rank"
    assert "lacks decoder.layers.1.mlp.linear_fc" in last


def altered_in_transit(parallel: dict) -> str:
    """Change a rank's part of a weight after it is written into a bucket and before the buckets are summed."""
    policy = llama(parallel)
    exporter = WeightExporter(policy.model, MAX_BYTES)
    fill = exporter.fill

    def altering(index, buffer):
        filled = fill(index, buffer)
        names = [spec.name for spec in exporter.plan.buckets[index].tensors]
        if "model.layers.2.self_attn.k_proj.weight" in names and dist.get_rank() == 1:
            position = names.index("model.layers.2.self_attn.k_proj.weight")
            exporter.plan.buckets[index].tensor(filled, position)[-1, 3] += 1e-3
        return filled

    exporter.fill = altering
    with pytest.raises(WeightsRefused) as error:
        list(exporter.stream())
    return str(error.value)


def test_weights_that_change_in_transit_are_named(ranks):
    for message in ranks.run(2, altered_in_transit, {"tensor": 2}):
        assert message.startswith("model.layers.2.self_attn.k_proj.weight arrived altered")
