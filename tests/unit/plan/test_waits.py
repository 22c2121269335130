"""How often the host waits for a GPU: never in a microbatch, besides for the number of tokens of each expert."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rl_megatron.generation.decoder import Decoder
from rl_megatron.generation.embedded import EmbeddedReplica
from rl_megatron.generation.interfaces import Request, Sampling
from rl_megatron.generation.requests import PartialCompletion
from rl_megatron.plan.ledger import Ledger
from rl_megatron.plan.run import run_as_rank, run_phases
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.unit.plan.planned import EXPERTS, measured, workload

HERE = Path(__file__).parent
DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py"
# Waits in every expert layer. This list may only become shorter.
OF_EXPERTS = {
    DISPATCHER: 1,  # all-to-all needs to know how many tokens go to which rank
}
LAYERS = 4

LAYOUTS = {
    "padded": (2, ()),
    "packed": (2, ("train.batching=packed", "train.micro_batch_tokens=128")),
    "fused head": (2, ("train.fused_head=true",)),
    "packed, fused head, tensor 2, context 2": (
        8, ("train.batching=packed", "train.micro_batch_tokens=128", "train.fused_head=true", "parallel.tensor=2",
            "parallel.sequence=true", "parallel.context=2"),
    ),
    "pipeline": (4, ("parallel.pipeline=2",)),
    "window": (2, ("model.sliding_window=16",)),
    "recomputed": (2, ("model.recompute=full",)),
    "plain optimizer": (2, ("optimizer.distributed=false",)),
    "fp32": (2, ("precision=fp32",)),
    "experts": (2, (*EXPERTS, "parallel.expert=2")),
}  # fmt: skip


def _waits(world_size, rank, overrides, sequences):
    """Return the waits of each phase by file, with so many sequences in a step."""
    sizes = (f"train.global_batch_size={sequences}", f"algorithm.prompts_per_step={sequences // 4}")
    found = measured(world_size, rank, (*overrides, *sizes), ("logprobs", "train"))
    waits = {name: Counter() for name in found}
    for name, phase in found.items():
        for place, count in phase.use().syncs:
            waits[name][place.rpartition(":")[0]] += count
    return waits


def _few_and_many(world_size, rank, overrides):
    few, many = 16, 24  # sequences; each data-parallel rank has more microbatches, but all of them are run
    return tuple(_waits(world_size, rank, overrides, count) for count in (few, many))


@pytest.mark.change
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_no_microbatch_waits_for_the_device(fresh_process, layout):
    world_size, overrides = layout
    allowed = set(OF_EXPERTS) if "model.num_experts=8" in overrides else set()
    for rank in {0, world_size - 1} if "parallel.pipeline=2" in overrides else {0}:
        few, many = fresh_process.run(_few_and_many, world_size, rank, overrides)
        for phase, most in (("logprobs", 1), ("train", 2)):
            waits = many[phase]
            assert {file for file in waits if waits[file] != few[phase][file]} <= allowed, (phase, few, many)
            # A step reads its metrics and the gradient norm, and logprobs are copied to the host.
            assert sum(count for file, count in waits.items() if file not in allowed) <= most, (phase, many)


@pytest.mark.change
def test_each_expert_layer_waits_as_often_as_is_allowed(fresh_process):
    few, many = fresh_process.run(_few_and_many, 2, 0, (*EXPERTS, "parallel.expert=2"))
    microbatches = (24 - 16) // 2 // 2
    added = {file: many["train"][file] - few["train"][file] for file in OF_EXPERTS}
    assert added == {file: each * LAYERS * microbatches for file, each in OF_EXPERTS.items()}


@pytest.mark.change
def test_a_read_that_someone_adds_is_named_with_file_and_line(fresh_process):
    source = (HERE / "reads_too_much.py").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if ".item()" in text)
    syncs = dict(fresh_process.run(_planted))
    place = f"{HERE / 'reads_too_much.py'}:{line}"
    assert syncs[place] == 8, syncs  # once in each microbatch


def _planted():
    work = workload(1)
    stage = replace(work.stage, loss={"name": f"{HERE / 'reads_too_much.py'}:ReadingLoss"})
    work = replace(work, stage=stage)
    return {each.name: each for each in run_phases(work, 0, Ledger(), ("train",))}["train"].use().syncs


def _decode(overrides, steps):
    work, ledger = workload(2, *overrides, prompt_tokens=32, response_tokens=32), Ledger()
    with run_as_rank(work, 0, ledger) as topology:
        policy = MegatronPolicy(work.stage.model, topology, vocab_size=work.vocab_size, precision="bf16")
        decoder = Decoder(EmbeddedReplica(policy), 8)
        sampling = Sampling(work.response_tokens, top_p=0.9, top_k=20)
        decoder.add([PartialCompletion(Request(f"{n}", (n,) * 32, sampling, n)) for n in range(8)])
        with decoder.active():
            decoder.advance()  # reads the prompts
            decoder.advance()  # sends how the new sequences are sampled
            with ledger.phase("generate") as result:
                for _ in range(steps):
                    decoder.advance()
        policy.shutdown()
    return dict(result[0].use().syncs)


@pytest.mark.change
@pytest.mark.parametrize("overrides", [(), ("parallel.pipeline=2",), ("parallel.tensor=2", "parallel.sequence=true")])
def test_decoding_waits_once_in_eight_tokens(fresh_process, overrides):
    syncs = fresh_process.run(_decode, overrides, 16)
    assert sum(syncs.values()) <= 2, syncs
