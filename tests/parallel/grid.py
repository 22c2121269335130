"""The layouts that are compared with one process, on at most eight ranks.

Every value of one factor is combined with every value of any other factor in at least one layout.
"""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

from rl_megatron.batching.config import Batching
from rl_megatron.certify.measurement import Difference, Measurement, compare, run_workload
from rl_megatron.certify.single_process import run_in_one_process
from rl_megatron.certify.workload import SMALL_FUSED_HEAD, STANDARD_OBJECTIVES, Workload, build_small_batching
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from tests.worker_pool import WorkerPool

MAX_RANKS = 8
MODEL = ModelConfig(
    num_layers=8,  # one for each model chunk of 4 stages × 2
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=8,
    num_query_groups=4,
    max_sequence_length=64,
    qk_norm=True,
    qkv_bias=True,
    init_std=0.15,  # makes logits far from uniform, so that errors show
)
EXPERTS = {
    "num_experts": 4, "expert_ffn_hidden_size": 32, "shared_expert_ffn_hidden_size": 32, "shared_expert_gate": True,
    "router_aux_loss": 0.1, "router_aux_loss_scope": "global",
}  # fmt: skip


class Factors(NamedTuple):
    """One value of each factor; `expert` is 0 for a dense model, `sequences` the size of a microbatch."""

    tensor: int
    sequence: bool
    pipeline: int
    virtual_pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int
    sequences: int
    batching: str
    tied: bool
    recompute: str
    uneven: bool
    window: int | None
    distributed_optimizer: bool
    overlap: bool
    fused_head: bool
    shared: bool

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data


VALUES: dict[str, list[Any]] = {
    "tensor": [1, 2, 4],
    "sequence": [False, True],
    "pipeline": [1, 2, 4],
    "virtual_pipeline": [1, 2],
    "context": [1, 2, 4],
    "expert": [0, 1, 2],
    "expert_tensor": [1, 2],
    "data": [1, 2],
    "sequences": [1, 2, 4],
    "batching": ["packed", "padded", "dynamic"],
    "tied": [True, False],
    "recompute": ["none", "selective", "full"],
    "uneven": [False, True],
    "window": [None, 5],
    "distributed_optimizer": [True, False],
    "overlap": [True, False],
    "fused_head": [True, False],
    "shared": [True, False],
}
# Factors whose values exclude values of other factors. The values of all other factors can be combined freely.
_BOUND = ("tensor", "sequence", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data", "uneven")


def is_possible(f: Factors) -> bool:
    ends = (2,) if f.pipeline == 2 else (1, 3)  # layers of the stages whose number `parallel` sets
    return (
        f.ranks <= MAX_RANKS
        and (f.tensor > 1 or not f.sequence)
        and (f.pipeline > 1 or (f.virtual_pipeline == 1 and not f.uneven))
        and (not f.uneven or all(layers % f.virtual_pipeline == 0 for layers in ends))
        and (f.tensor == 1 or f.sequence or not f.expert)  # with tensor parallelism, experts need sequence parallelism
        and (f.expert > 0 or f.expert_tensor == 1)
        and f.ranks // f.pipeline % (max(f.expert, 1) * f.expert_tensor) == 0
    )


Pair = tuple[tuple[int, Any], tuple[int, Any]]


def pairs(f: Factors) -> set[Pair]:
    """Return every two factors of a layout with their values, as (place of the factor, value) twice."""
    return set(itertools.combinations(enumerate(f), 2))


def possible_pairs() -> set[Pair]:
    """Return all pairs that a layout of at most eight ranks can have."""
    free = Factors(*(values[0] for values in VALUES.values()))
    found: set[Pair] = set()
    for chosen in itertools.product(*(values for name, values in VALUES.items() if name in _BOUND)):
        f = free._replace(**dict(zip(_BOUND, chosen, strict=True)))
        if is_possible(f):
            fixed = [(place, value) for place, value in enumerate(f) if f._fields[place] in _BOUND]
            found |= set(itertools.combinations(fixed, 2))
            for place, name in enumerate(f._fields):
                if name not in _BOUND:
                    found |= {
                        tuple(sorted([pair, (place, value)], key=itemgetter(0)))
                        for pair in fixed
                        for value in VALUES[name]
                    }
    others = [(place, name) for place, name in enumerate(free._fields) if name not in _BOUND]
    for (a, first), (b, second) in itertools.combinations(others, 2):
        found |= {((a, x), (b, y)) for x in VALUES[first] for y in VALUES[second]}
    return found


def whole_grid() -> list[Layout]:
    """Return layouts that together have every possible pair of values; always the same layouts.

    The choice is greedy: among random layouts that have one of the missing pairs, take the one with the most missing
    pairs, and repeat.
    """
    generator, missing, chosen = random.Random(0), possible_pairs(), []
    while missing:
        wanted = min(missing, key=repr)
        candidates = [f for f in (_random_with(wanted, generator) for _ in range(3000)) if is_possible(f)]
        best = max(candidates, key=lambda f: (len(pairs(f) & missing), -f.ranks))
        missing -= pairs(best)
        chosen.append(Layout(best))
    return chosen


def _random_with(pair: Pair, generator: random.Random) -> Factors:
    values = [generator.choice(options) for options in VALUES.values()]
    for place, value in pair:
        values[place] = value
    return Factors(*values)


@dataclass(frozen=True)
class Layout:
    """One layout of the grid, with the model and the workload that it runs."""

    factors: Factors

    @property
    def name(self) -> str:
        f = self.factors
        degrees = {"tp": f.tensor, "pp": f.pipeline, "vpp": f.virtual_pipeline, "cp": f.context, "dp": f.data}
        parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
        parts += ["sp"] if f.sequence else []
        parts += [f"moe-ep{f.expert}"] if f.expert else []
        parts += [f"etp{f.expert_tensor}"] if f.expert_tensor > 1 else []
        parts += [f"{f.batching}{f.sequences}", "tied" if f.tied else "untied"]
        parts += [] if f.recompute == "none" else [f"{f.recompute}-recompute"]
        parts += ["uneven"] if f.uneven else []
        parts += [f"window{f.window}"] if f.window else []
        parts += ["distopt"] if f.distributed_optimizer else []
        parts += ["overlap"] if f.overlap else []
        parts += ["fused"] if f.fused_head else []
        parts += ["shared"] if f.shared else []
        return " ".join(parts)

    @property
    def model(self) -> ModelConfig:
        f = self.factors
        experts = EXPERTS if f.expert else {}
        return replace(MODEL, tie_embeddings=f.tied, recompute=f.recompute, sliding_window=f.window, **experts)

    @property
    def parallel(self) -> ParallelConfig:
        f = self.factors
        ends = {}
        if f.uneven:
            ends = {"first_stage_layers": 2} if f.pipeline == 2 else {"first_stage_layers": 1, "last_stage_layers": 3}
        return ParallelConfig(
            tensor=f.tensor, sequence=f.sequence, pipeline=f.pipeline, virtual_pipeline=f.virtual_pipeline,
            context=f.context, expert=max(f.expert, 1), expert_tensor=f.expert_tensor, **ends,
        )  # fmt: skip

    def workload(self) -> Workload:
        f = self.factors
        optimizer = replace(Workload.optimizer, distributed=f.distributed_optimizer, overlap=f.overlap)
        fused_head = SMALL_FUSED_HEAD if f.fused_head else None
        return Workload(self.model, STANDARD_OBJECTIVES, optimizer=optimizer, fused_head=fused_head)

    def batching(self, group_size: int) -> Batching:
        """Return how the workload's sequences form microbatches, `group_size` of which stay together."""
        f = self.factors
        return build_small_batching(f.batching, f.sequences, group_size, self.parallel, share_prefixes=f.shared)

    @cached_property
    def reference(self) -> Workload:
        """Return the workload of the one process that layouts of this model are compared with."""
        return Workload(replace(self.model, recompute="none"), STANDARD_OBJECTIVES)


@dataclass(frozen=True)
class Result:
    layout: Layout
    differences: dict[str, list[Difference]]
    seconds: float

    def worst(self, quantity: str) -> float:
        return max(d.error for found in self.differences.values() for d in found if d.quantity == quantity)

    @property
    def failures(self) -> list[str]:
        return [
            f"{objective}: {d.quantity} differs by {d.error:.1e} > {d.tolerance:.0e} at {d.where}"
            for objective, found in self.differences.items()
            for d in found
            if not d.holds
        ]


class Grid:
    """Runs layouts on a pool of ranks and compares them with one process, which runs once for each model."""

    def __init__(self, ranks: WorkerPool):
        self._ranks = ranks

    def run(self, layout: Layout) -> Result:
        wanted = self._ranks.reference(run_in_one_process, layout.reference)
        started = time.perf_counter()
        found = self._ranks.run(layout.factors.ranks, _run_on_rank, layout)[0]
        seconds = time.perf_counter() - started
        return Result(layout, {name: compare(found[name], wanted[name]) for name in wanted}, seconds)


def _run_on_rank(layout: Layout) -> dict[str, Measurement]:
    workload = layout.workload()
    where = topology.build(layout.parallel, start_device("cpu"), workload.seed)
    batching = {name: layout.batching(objective.group_size) for name, objective in workload.objectives.items()}
    return run_workload(workload, where, batching)
