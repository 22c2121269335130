"""The real policy, optimizer and engine run on fake GPUs: on every kind of rank, with the bytes of closed forms."""

from __future__ import annotations

import importlib.util
import traceback
import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import library

from rl_megatron.batching.config import Batching
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.plan import PlanConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.nll import NLLLoss
from rl_megatron.model.sharded_shape import ShardedShape
from rl_megatron.plan import ledger
from rl_megatron.plan.closed_forms import training_bytes
from rl_megatron.plan.closed_use import estimate_use
from rl_megatron.plan.command import build_workload
from rl_megatron.plan.ledger import Ledger
from rl_megatron.plan.run import choose_depths, count_use, find_kind, run_as_rank, run_phases
from rl_megatron.plan.settings import Settings
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.unit.plan.planned import EXPERTS, measured, workload

TP2_PP4_CP2 = ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=4", "parallel.context=2")
LAYOUTS = {
    "one": (1, ()),
    "packed and fused": (4, ("train.batching=packed", "train.micro_batch_tokens=256", "train.fused_head=true")),
    "tensor, pipeline and context": (64, TP2_PP4_CP2),
    "interleaved and recomputed": (
        32, ("parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.recompute=full", "optimizer.overlap=true"),
    ),
    "experts": (64, (*TP2_PP4_CP2, *EXPERTS, "parallel.expert=4")),
    "experts, packed and fused": (
        16, (*EXPERTS, "parallel.expert=8", "parallel.tensor=2", "parallel.sequence=true", "train.batching=packed",
             "train.micro_batch_tokens=256", "train.fused_head=true"),
    ),
}  # fmt: skip


@pytest.mark.change
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_phase_runs_on_the_first_a_middle_and_the_last_stage(fresh_process, layout):
    world_size, overrides = layout
    work = workload(world_size, *overrides)
    stages = work.stage.parallel.pipeline
    shape = ShardedShape(work.stage.model, work.stage.parallel, world_size, work.vocab_size)
    for stage in sorted({0, stages // 2, stages - 1}):
        rank = stage * world_size // stages
        found = fresh_process.run(measured, world_size, rank, overrides)
        assert list(found) == ["build", "generate", "logprobs", "reference", "train", "save"]
        expected = training_bytes(shape, rank, precision="bf16", distributed=True, overlap=work.stage.optimizer.overlap)
        use = found["train"].use()
        assert use.peak.gradients == expected.gradients
        assert use.peak.optimizer == expected.optimizer
        assert use.peak.kv_cache == 0 and found["generate"].use().peak.kv_cache > 0
        assert use.flops > found["logprobs"].use().flops > 0 and use.peak.activations > 0
        # Little is left of a phase: masks, rotations, and the last message between pipeline stages.
        assert 0 <= use.after_bytes - found["build"].use().after_bytes < 0.1 * use.after_bytes


@pytest.mark.change
def test_weights_are_counted_twice_with_a_reference_and_synced_to_engines(fresh_process):
    overrides = ("generation.engine=transformers", "parallel.tensor=2", "parallel.sequence=true")
    found = fresh_process.run(measured, 4, 1, overrides)
    assert list(found) == ["build", "refit", "logprobs", "reference", "train", "save"]
    work = workload(4, *overrides)
    shape = ShardedShape(work.stage.model, work.stage.parallel, 4, work.vocab_size)
    buffers = training_bytes(shape, 1, precision="bf16", distributed=True).parameters  # with alignment
    reference = 2 * sum(each.elements for model_chunk in shape.parameters(0) for each in model_chunk)
    assert found["build"].use().peak.parameters == buffers + reference
    refit = found["refit"].use()
    assert refit.peak.buffers > 0
    assert [(each.kind, each.group, each.group_size) for each in refit.collectives] == [("all_reduce", "world", 4)]
    assert refit.collectives[0].bytes > reference  # the one bucket holds the weights of both tensor-parallel ranks


@pytest.mark.change
def test_a_sync_of_the_adapter_alone_sends_its_bytes(fresh_process):
    overrides = ("generation.engine=transformers", "generation.refit=adapter", "peft.r=4", "parallel.tensor=2")
    use = fresh_process.run(measured, 2, 0, overrides, ("refit",))["refit"].use()
    (sums,) = use.collectives
    settings = Settings.from_workload(workload(2, *overrides))
    closed = next(phase for phase in estimate_use(settings, 0).phases if phase.name == "refit")
    one_rank = ShardedShape(settings.shape.model, ParallelConfig(), 1, 1024, lora=settings.shape.lora)
    of_adapter, of_model = (2 * sum(each) for each in (one_rank.adapter_elements(0), one_rank.elements(0)))
    assert closed.collectives[0].bytes == of_adapter < of_model / 10
    assert closed.peak.buffers == of_model <= use.peak.buffers, "engines get the base when they start"
    assert of_adapter < sums.bytes < 1.05 * of_adapter, "with the fingerprints of the tensors"


@pytest.mark.change
def test_magnitudes_keep_the_outputs_of_linears_for_the_backward_pass(fresh_process):
    overrides = ("parallel.tensor=2", "parallel.sequence=true", "peft.r=4")
    without, with_them = (
        fresh_process.run(measured, 2, 0, (*overrides, f"peft.use_dora={use}"), ("train",))["train"].use()
        for use in (False, True)
    )
    assert with_them.peak.activations > 1.2 * without.peak.activations
    assert with_them.peak.gradients > without.peak.gradients


@pytest.mark.change
def test_full_recomputation_runs_the_layers_a_second_time(fresh_process):
    plain, recomputed = (
        fresh_process.run(measured, 1, 0, (f"model.recompute={kind}",))["train"].use() for kind in ("none", "full")
    )
    head = 2 * 1024 * 128  # of a token: the head's product is not repeated
    forward = fresh_process.run(measured, 1, 0, ())["logprobs"].use().flops - 16 * 64 * head
    assert recomputed.flops == plain.flops + forward
    assert recomputed.peak.activations < plain.peak.activations


def _uses(exact, *overrides):
    shape = ("model.num_layers=16", "parallel.pipeline=2", *EXPERTS, "parallel.expert=2")
    use = count_use(workload(8, *shape, *overrides), 4, exact=exact)
    return use.kind, {phase.name: phase for phase in use.phases}


@pytest.mark.change
def test_two_depths_give_the_use_of_all_layers(fresh_process):
    kind, exact = fresh_process.run(_uses, True)
    _, extrapolated = fresh_process.run(_uses, False)
    assert kind == "last stage" and list(extrapolated) == list(exact)
    for name, phase in exact.items():
        other = extrapolated[name]
        for attribute in ("peak_bytes", "after_bytes", "flops", "memory_bytes"):
            expected = getattr(phase, attribute)
            assert abs(getattr(other, attribute) - expected) <= 0.005 * expected, (name, attribute)
        assert abs(other.kernels - phase.kernels) <= 0.02 * phase.kernels, name  # chunks of a foreach operator
        sent, expected = (sum(c.bytes * c.count for c in use.collectives) for use in (other, phase))
        assert abs(sent - expected) <= 0.005 * expected, name
        assert sum(count for _, count in other.syncs) == sum(count for _, count in phase.syncs), name


@pytest.mark.change
def test_gradients_are_free_from_a_weight_sync_to_the_next_training_phase(fresh_process):
    for exact in (True, False):
        _, found = fresh_process.run(_uses, exact, "generation.engine=transformers")
        gradients = found["build"].peak.gradients
        assert gradients > 0
        held = {name: phase.peak.gradients for name, phase in found.items()}
        assert held == {
            "build": gradients, "refit": 0, "logprobs": 0, "reference": 0, "train": gradients, "save": gradients
        }, exact  # fmt: skip
        tables = 2**21  # of the fingerprints, which are kept
        assert found["logprobs"].after_bytes < found["build"].after_bytes - gradients + 1.3 * tables, exact


@pytest.mark.change
def test_both_directions_between_two_pipeline_stages_belong_to_the_pipeline(fresh_process):
    train = fresh_process.run(measured, 8, 4, ("parallel.pipeline=2",), ("train",))["train"].use()
    messages = [each for each in train.collectives if each.kind in ("send", "recv")]
    assert {each.kind for each in messages} == {"send", "recv"}
    assert {(each.group, each.group_size) for each in messages} == {("pipeline", 2)}


def _bytes_of_calls(data):
    """Return the live bytes before, and at the peak of, each call of a policy: four sequences for each of the ranks."""
    work, ledger = workload(data, f"train.global_batch_size={4 * data}"), Ledger()
    of_response = torch.ones(4 * data, work.sequence_tokens)
    batch = BatchedDataDict(
        input_ids=torch.zeros_like(of_response, dtype=torch.long), token_mask=of_response,
        sample_mask=torch.ones(4 * data),
    )  # fmt: skip
    with run_as_rank(work, 0, ledger) as topology:
        policy = MegatronPolicy(
            work.stage.model, topology, vocab_size=work.vocab_size, precision="bf16",
            optimizer=replace(work.stage.optimizer, distributed=False),  # its state would shrink instead
            batching=Batching.from_config(work.stage.train), total_steps=work.stage.train.steps,
        )  # fmt: skip
        calls = {
            "train": lambda: policy.train(batch, NLLLoss(), gbs=4 * data),
            "logprobs": lambda: policy.get_logprobs(batch),
            "top k": lambda: policy.get_topk_logits(batch, 8),
        }
        found = {}
        for name, call in calls.items():
            with ledger.phase("train") as result:
                call()
            found[name] = (result[0].start_bytes, sum(result[0].peak))
        policy.shutdown()
    return found


@pytest.mark.change
@pytest.mark.parametrize("call", ["train", "logprobs", "top k"])
def test_memory_of_a_call_does_not_grow_with_data_parallelism(fresh_process, of_calls, call):
    (few_before, few), (many_before, many) = (of_calls(fresh_process, data)[call] for data in (8, 4096))
    # What a call needs beyond the weights, and not only all bytes of a rank, stays the same.
    assert abs((many - many_before) - (few - few_before)) <= 0.02 * (few - few_before)
    assert abs(many - few) <= 0.02 * few


@pytest.fixture(scope="module")
def of_calls():
    """Return a function that measures the calls with a number of ranks once."""
    return lru_cache(lambda processes, data: processes.run(_bytes_of_calls, data))


READING = {
    "dense": ("model=llama3_1_8b", "model.num_layers=3", "parallel.tensor=2", "parallel.sequence=true"),
    "experts": ("model=qwen3_30b_a3b", "model.num_layers=3", "parallel.expert=4"),
    "two stages": ("model=llama3_1_8b", "model.num_layers=4", "parallel.pipeline=2"),
}  # fmt: skip


def _generation(overrides):
    """Return the bytes that generation needs besides weights and optimizer, when it is run and by closed forms."""
    stage = load_config(
        ["algorithm=grpo", "data=arithmetic", "+model.vocab_size=8192", "precision=bf16",
         "generation.max_new_tokens=256", *overrides]
    ).first  # fmt: skip
    work = build_workload(stage, 8, PlanConfig(prompt_tokens=2048, response_tokens=256))
    build, generate = run_phases(work, 0, Ledger(), ("generate",))
    settings = Settings.from_workload(work)
    closed = next(phase for phase in estimate_use(settings, 0).phases if phase.name == "generate")
    return (
        sum(generate.peak) - build.end_bytes,
        closed.peak_bytes - settings.count_static_bytes(0).total,
        closed.peak.activations,
    )


@pytest.mark.change
@pytest.mark.parametrize("overrides", READING.values(), ids=READING)
def test_closed_forms_count_what_is_held_while_prompts_are_read(fresh_process, overrides):
    run, closed, of_reading = fresh_process.run(_generation, overrides)
    assert closed == pytest.approx(run, rel=0.05)
    assert of_reading > 0.5 * run  # the texts of a pass need more than the cache


def _cause_of_a_failed_phase():
    with pytest.raises(ConfigError, match="phase train cannot be run on fake GPUs as rank 0") as caught:
        loss = f"{Path(__file__).parent / 'chooses_tokens.py'}:ChoosingLoss"
        work = workload(1)
        run_phases(replace(work, stage=replace(work.stage, loss={"name": loss})), 0, Ledger(), ("train",))
    cause = caught.value.__cause__
    return type(cause), [frame.name for frame in traceback.extract_tb(cause and cause.__traceback__)]


def test_an_error_in_a_phase_keeps_its_traceback_as_the_cause(fresh_process):
    kind, functions = fresh_process.run(_cause_of_a_failed_phase)
    assert kind is RuntimeError and "evaluate" in functions


def _depths(*overrides, stage=0, world_size=4):
    found = choose_depths(workload(world_size, *overrides), stage)
    return None if found is None else ([run.stage.model.num_layers for run in found[:2]], found[2])


def test_deep_stacks_of_equal_layers_are_run_at_two_depths():
    assert _depths("model.num_layers=16") == ([2, 4], 7.0)
    assert _depths("model.num_layers=16", "parallel.pipeline=2") == ([4, 8], 3.0)
    assert _depths("model.num_layers=5") is None  # there is nothing to gain
    # Periods of windows stay whole.
    windows = ("model.sliding_window=16", "model.global_attention_every=3")
    assert _depths("model.num_layers=18", *windows) == ([6, 12], 2.0)
    assert _depths("model.num_layers=16", *windows) is None
    hybrid = (
        "model.full_attention_every=4", "model.linear_num_key_heads=2", "model.linear_num_value_heads=2",
        "model.linear_key_head_dim=8", "model.linear_value_head_dim=8", "model.linear_conv_kernel_dim=4",
    )  # fmt: skip
    assert _depths("model.num_layers=32", *hybrid) == ([8, 16], 3.0)
    # The dense layers before those with experts are on the first stage.
    dense = (*EXPERTS, "model.first_dense_layers=2", "parallel.pipeline=2", "model.num_layers=20")
    assert _depths(*dense, stage=0) == ([8, 12], 3.0)
    assert _depths(*dense, stage=1) == ([4, 8], 4.0)
    # Stages of other sizes do not change what a stage uses.
    uneven = ("model.num_layers=18", "parallel.pipeline=2", "parallel.first_stage_layers=8")
    assert _depths(*uneven, stage=1) == ([4, 8], 4.0)


def test_ranks_are_named_for_their_pipeline_stage():
    work = workload(64, *TP2_PP4_CP2)
    assert [find_kind(work, rank) for rank in (0, 15, 16, 47, 48, 63)] == [
        "first stage", "first stage", "middle stage", "middle stage", "last stage", "last stage"
    ]  # fmt: skip
    assert find_kind(workload(4), 3) == "last stage"


def _with_cudnn():
    both = [(), ("model.cudnn_attention=true",)]
    return [measured(1, 0, ("train.batching=padded", *more), ("train",))["train"].use().flops for more in both]


@pytest.mark.change
def test_the_flops_of_cudnn_are_counted(fresh_process):
    of_flash, of_cudnn = fresh_process.run(_with_cudnn)
    assert of_flash == of_cudnn > 0


def _beside_transformer_engine():
    """Plan as if Transformer Engine were installed, whose modules and optimizer need a GPU."""
    import megatron.core.optimizer as optimizers

    with (
        patch.multiple(optimizers, Adam=None, USING_PYTORCH_OPTIMIZER=False),
        patch.object(importlib.util, "find_spec", lambda name: name),
    ):
        return measured(1, 0, ("train.batching=padded",), ("train",))["train"].use().flops


def test_a_plan_needs_nothing_of_transformer_engine(fresh_process):
    assert fresh_process.run(_beside_transformer_engine) > 0


def _of_older_torch():
    """Let torch refuse what releases up to 2.12 refuse: grouped queries in formulas, dtypes of sums without data."""
    aten = torch.ops.aten
    formulas = dict(ledger.flop_registry)

    def refusing(formula, before_query):
        def checked(*operands, **options):
            shapes = [getattr(x, "shape", x) for x in operands[before_query : before_query + 3]]
            assert len({shape[1] for shape in shapes}) == 1, "query/key/value shapes are incompatible"
            return formula(*operands, **options)

        return checked

    attention = aten._scaled_dot_product_flash_attention
    backward = aten._scaled_dot_product_flash_attention_backward
    older = formulas | {attention: refusing(formulas[attention], 0), backward: refusing(formulas[backward], 1)}
    replaced = library.Library("aten", "IMPL")
    with patch.object(ledger, "flop_registry", older), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the operator has a function already
        replaced.impl("addmm.dtype_out", _refused, "Meta", allow_override=True)
        found = measured(1, 0, ("train.batching=padded",), ("train",))["train"].use().flops
    replaced._destroy()
    return found


def _refused(*operands, **options):
    raise TypeError("unsupported operand type(s) for *: 'torch.dtype' and 'Tensor'")


@pytest.mark.change
def test_a_plan_is_the_same_with_torch_releases_that_know_fewer_operators(fresh_process):
    here = fresh_process.run(measured, 1, 0, ("train.batching=padded",), ("train",))["train"].use().flops
    assert fresh_process.run(_of_older_torch) == here > 0
