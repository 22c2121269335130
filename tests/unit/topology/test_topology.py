"""Degrees that fit the world size and the model are accepted; the error for others proposes degrees that fit."""

import itertools
import os
import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.topology import topology
from rl_megatron.topology.degrees import padded_vocab_size, validate, validate_model
from rl_megatron.topology.device import start_device


@pytest.mark.parametrize(
    ("degrees", "world_size", "data"),
    [
        ({}, 1, 1),
        ({}, 6, 6),
        ({"tensor": 2}, 4, 2),
        ({"tensor": 2, "sequence": True, "pipeline": 2, "context": 2}, 16, 2),
        ({"pipeline": 2, "virtual_pipeline": 2}, 2, 1),
        ({"tensor": 2, "expert": 4}, 4, 2),
    ],
)
def test_data_parallelism_uses_the_remaining_ranks(degrees, world_size, data):
    assert validate(ParallelConfig(**degrees), world_size) == data


@pytest.mark.parametrize(
    ("degrees", "world_size", "words"),
    [
        (
            {"tensor": 3},
            4,
            [
                "parallel.tensor=3",
                "= 3 does not divide the world size 4",
                "parallel.tensor in [1, 2, 4]",
                "multiple of 3 ranks",
            ],
        ),
        (
            {"tensor": 2, "pipeline": 3, "context": 1},
            4,
            [
                "parallel.tensor=2 × parallel.pipeline=3",
                "= 6",
                "world size 4",
                "parallel.pipeline in [1, 2]",
                "of 6 ranks",
            ],
        ),
        ({"tensor": 2, "context": 2}, 2, ["= 4", "world size 2", "parallel.tensor in [1] or parallel.context in [1]"]),
        ({"tensor": 2, "pipeline": 2, "context": 2}, 1, ["= 8", "world size 1", "a multiple of 8 ranks"]),
        ({"sequence": True}, 2, ["parallel.sequence=true", "parallel.tensor", "parallel.sequence=false"]),
        (
            {"virtual_pipeline": 2},
            2,
            ["parallel.virtual_pipeline=2", "parallel.pipeline is 1", "virtual_pipeline=1 or raise"],
        ),
        ({"expert": 3}, 4, ["parallel.expert=3", "the 4 ranks", "[1, 2, 4]"]),
        ({"expert_tensor": 3}, 4, ["parallel.expert_tensor=3", "the 4 ranks of a pipeline stage", "[1, 2, 4]"]),
        (
            {"expert": 4, "expert_tensor": 2},
            4,
            ["parallel.expert=4", "the 2 groups of parallel.expert_tensor=2 ranks", "stage of 4", "[1, 2]"],
        ),
        ({"tensor": 0}, 2, ["parallel.tensor=0", "at least 1"]),
        ({"context": -1}, 2, ["parallel.context=-1", "at least 1"]),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_a_proposal(degrees, world_size, words):
    with pytest.raises(ConfigError) as refused:
        validate(ParallelConfig(**degrees), world_size)
    assert all(word in str(refused.value) for word in words), str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_degree_that_a_refusal_proposes_fits():
    for world_size in (1, 2, 4, 6, 8):
        for tensor in (1, 2, 3, 5):
            for pipeline in (1, 2, 3):
                degrees = {"tensor": tensor, "pipeline": pipeline}
                try:
                    validate(ParallelConfig(**degrees), world_size)
                except ConfigError as error:
                    for name in degrees:
                        _, found, rest = str(error).partition(f"parallel.{name} in [")
                        for value in rest.partition("]")[0].split(", ") if found else []:
                            validate(ParallelConfig(**degrees | {name: int(value)}), world_size)


@pytest.mark.parametrize(
    ("degrees", "shape", "words"),
    [
        (
            {"tensor": 4},
            {"num_attention_heads": 6},
            ["parallel.tensor=4", "model.num_attention_heads=6", "[1, 2, 3, 6]"],
        ),
        ({"tensor": 4}, {"num_query_groups": 2}, ["parallel.tensor=4", "model.num_query_groups=2", "[1, 2]"]),
        ({"tensor": 4}, {"ffn_hidden_size": 90}, ["parallel.tensor=4", "model.ffn_hidden_size=90", "[1, 2, 3, 5, 6]"]),
        ({"pipeline": 3}, {"num_layers": 4}, ["parallel.pipeline", "=3", "model.num_layers=4", "[1, 2, 4]"]),
        (
            {"pipeline": 2, "virtual_pipeline": 4},
            {"num_layers": 4},
            [
                "parallel.pipeline=2 × parallel.virtual_pipeline=4",
                "num_layers=4, which leaves some of the 8 model chunks without",
            ],
        ),
        ({"expert": 2}, {}, ["parallel.expert=2", "dense"]),
        ({"expert_tensor": 2}, {}, ["parallel.expert_tensor=2", "dense"]),
        (
            {"expert_tensor": 2},
            {"num_experts": 4, "expert_ffn_hidden_size": 9},
            ["parallel.expert_tensor=2", "model.expert_ffn_hidden_size=9", "[1, 3]"],
        ),
        (
            {"expert_tensor": 2},
            {"num_experts": 4, "qkv_bias": True, "linear_bias": True},
            ["parallel.expert_tensor=2", "model.linear_bias=true", "set parallel.expert_tensor=1"],
        ),
        ({"expert": 3}, {"num_experts": 4}, ["parallel.expert=3", "model.num_experts=4", "[1, 2, 4]"]),
        (
            {"tensor": 2},
            {"num_experts": 4},
            ["parallel.tensor=2 with model.num_experts=4", "set parallel.sequence=true"],
        ),
        (
            {"tensor": 2, "sequence": True},
            {"num_experts": 4, "shared_expert_ffn_hidden_size": 5},
            ["parallel.tensor=2", "model.shared_expert_ffn_hidden_size=5"],
        ),
        ({"first_stage_layers": 2}, {}, ["parallel.first_stage_layers=2", "one pipeline stage", "null"]),
        (
            {"pipeline": 2, "first_stage_layers": 2, "last_stage_layers": 1},
            {"num_layers": 4},
            ["first_stage_layers=2, parallel.last_stage_layers=1 leave 1 of model.num_layers=4", "that must be 0"],
        ),
        (
            {"pipeline": 4, "first_stage_layers": 3},
            {"num_layers": 8},
            ["parallel.first_stage_layers=3 leave 5", "3 pipeline stage(s)", "a positive multiple of 3"],
        ),
        (
            {"pipeline": 2, "virtual_pipeline": 2, "first_stage_layers": 3},
            {"num_layers": 8},
            ["parallel.first_stage_layers=3 must be a multiple of parallel.virtual_pipeline=2"],
        ),
        (
            {"tensor": 2, "context": 4},
            {"full_attention_every": 2, "linear_num_key_heads": 4},
            ["parallel.tensor · parallel.context=8 must divide model.linear_num_key_heads=4", "[1, 2, 4]"],
        ),
    ],
)
def test_degrees_that_do_not_divide_the_model_are_refused(degrees, shape, words):
    shape = {"num_attention_heads": 8, "num_query_groups": 8, "hidden_size": 96} | shape
    with pytest.raises(ConfigError) as refused:
        validate_model(ModelConfig(**shape), ParallelConfig(**degrees))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_every_pipeline_that_a_refusal_proposes_fits():
    for num_layers, stages, model_chunks in itertools.product(range(1, 13), range(2, 7), range(1, 5)):
        model, degrees = ModelConfig(num_layers=num_layers), {"pipeline": stages, "virtual_pipeline": model_chunks}
        try:
            validate_model(model, ParallelConfig(**degrees))
        except ConfigError as error:
            proposed = str(error).partition("; set ")[2]
            ways = [dict(re.findall(r"parallel\.(\w+)(?: in |=)(\[.*?\]|\d+)", way)) for way in proposed.split(" or ")]
            assert all(ways), proposed
            divides = num_layers % model_chunks == 0 and num_layers >= stages * model_chunks
            assert ("last_stage_layers" in proposed) == divides
            for way in ways:
                values = [[int(value) for value in re.findall(r"\d+", text)] for text in way.values()]
                assert all(values), proposed
                for chosen in itertools.product(*values):
                    changed = ParallelConfig(**degrees | dict(zip(way, chosen, strict=True)))
                    validate(changed, changed.pipeline)
                    validate_model(model, changed)


def test_experts_of_any_width_are_whole_with_tensor_parallelism():
    width = {"ffn_hidden_size": 5, "expert_ffn_hidden_size": 7}
    validate_model(ModelConfig(num_experts=2, **width), ParallelConfig(tensor=2, sequence=True))


def test_a_model_that_fits_is_accepted():
    validate_model(ModelConfig(num_layers=8), ParallelConfig(tensor=4, pipeline=2, virtual_pipeline=4, context=2))
    validate_model(ModelConfig(num_layers=9), ParallelConfig(pipeline=4, first_stage_layers=1, last_stage_layers=4))
    validate_model(ModelConfig(num_layers=5), ParallelConfig(pipeline=2, last_stage_layers=1))
    validate_model(ModelConfig(num_experts=4), ParallelConfig(tensor=2, sequence=True, expert=4))


@pytest.mark.parametrize("vocab_size", [1, 63, 64, 65, 259, 260, 32000, 50257])
@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 6, 8])
def test_the_padded_vocabulary_is_divisible_and_little_larger(vocab_size, tensor):
    padded = padded_vocab_size(vocab_size, tensor)
    assert padded >= vocab_size
    assert padded % tensor == 0 and padded % 64 == 0
    assert padded - vocab_size < 64 * (3 if tensor % 3 == 0 else 1)


def test_the_padded_vocabulary_is_the_same_at_every_usual_degree():
    assert {padded_vocab_size(259, tensor) for tensor in (1, 2, 4, 8, 16, 32, 64)} == {320}


def _places(degrees):
    device = start_device("cpu")
    layout = topology.build(ParallelConfig(**degrees), device, seed=1)
    place = (layout.tensor_rank, layout.context_rank, layout.pipeline_rank, layout.data_rank)
    return layout.describe(), place, layout.is_last_stage, layout.last_stage_rank, layout.sequence_multiple


def test_every_rank_has_a_place_of_its_own(ranks):
    found = ranks.run(4, _places, {"tensor": 2, "sequence": True, "pipeline": 2})
    assert {text for text, *_ in found} == {"4 rank(s): tensor 2 × pipeline 2 × context 1 × data 1 (sequence parallel)"}
    assert [place for _, place, *_ in found] == [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (1, 0, 1, 0)]
    assert [last for _, _, last, *_ in found] == [False, False, True, True]
    assert [rank for *_, rank, _ in found] == [2, 3, 2, 3]
    assert {multiple for *_, multiple in found} == {2}


def test_context_ranks_pad_to_zigzag_slices(ranks):
    found = ranks.run(4, _places, {"context": 2})
    assert [place for _, place, *_ in found] == [(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 1), (0, 1, 0, 1)]
    assert {multiple for *_, multiple in found} == {4}


def _timeouts_of_groups() -> dict[str, set[timedelta]]:
    """Return the timeouts of this rank's process groups, by the backends of the groups, except the default group."""
    device = start_device("cpu")
    degrees = {"tensor": 2, "sequence": True, "pipeline": 2, "expert": 2}
    topology.build(ParallelConfig(**degrees), device, seed=1, timeout_minutes=2.5)
    found: dict[str, set[timedelta]] = {}
    for group in dist.distributed_c10d._world.pg_map:
        if group != dist.group.WORLD:
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            found.setdefault(group.group_desc, set()).add(timeout)
    return found


def test_every_process_group_has_the_timeout_of_the_run_and_none_is_a_second_one_of_gloo(ranks):
    for found in ranks.run(4, _timeouts_of_groups):
        assert "TENSOR_MODEL_PARALLEL_GROUP" in found and "EXPERT_MODEL_PARALLEL_GROUP" in found
        assert {name: times for name, times in found.items() if times != {timedelta(minutes=2.5)}} == {}
        assert [name for name in found if "GLOO" in name] == []


def _connections(degrees: dict[str, int], set_by_user: str | None) -> str | None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    os.environ.pop(name, None)
    os.environ.update({} if set_by_user is None else {name: set_by_user})
    topology.start_topology(ParallelConfig(**degrees), device="cpu")
    return os.environ.pop(name, None)


@pytest.mark.parametrize(
    ("degrees", "set_by_user", "expected"),
    [
        ({"tensor": 2}, None, "1"),
        ({"context": 2}, None, "1"),
        ({"tensor": 2}, "8", "8"),
        ({}, None, None),
        ({"pipeline": 2}, None, None),
    ],
)
def test_kernels_start_in_launch_order_if_collectives_overlap_with_matrix_products(
    ranks, degrees, set_by_user, expected
):
    assert set(ranks.run(2, _connections, degrees, set_by_user)) == {expected}


def test_first_layers_without_experts_divide_over_tensor_parallelism():
    model = ModelConfig(num_experts=4, ffn_hidden_size=90, expert_ffn_hidden_size=33, first_dense_layers=1)
    validate_model(model, ParallelConfig(tensor=2, sequence=True))
    with pytest.raises(ConfigError, match="must divide model.ffn_hidden_size=90"):
        validate_model(model, ParallelConfig(tensor=4, sequence=True))


def test_nccl_stays_on_the_loopback_if_ranks_and_servers_are_on_this_machine(monkeypatch):
    def chosen(*hosts, **variables):
        monkeypatch.setattr(os, "environ", variables)
        topology.keep_nccl_on_loopback(hosts)
        return variables.get("NCCL_SOCKET_IFNAME")

    assert chosen() == chosen("127.0.0.1", "::1") == chosen(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1") == "lo"
    assert chosen(NCCL_SOCKET_IFNAME="eth0") == "eth0", "the user's"
    assert chosen("10.0.0.5") is chosen(WORLD_SIZE="16", LOCAL_WORLD_SIZE="8", MASTER_ADDR="node-1") is None
