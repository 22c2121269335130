"""Measure what moving rollouts to the ranks that learn from them costs, and how it grows with the number of ranks:

    python benchmarks/data_plane.py
    torchrun --nproc-per-node 4 benchmarks/data_plane.py

Alone, it simulates 8 to 1,024 data-parallel ranks, each of which has produced 64 sequences of up to 8,192 tokens. One
rank does its part of the work for real: it collects the numbers of all sequences, plans the ownership, and exchanges
its sequences. Collectives are those of a fake process group, so they take no time. The bytes are counted where they are
given to a collective. What other ranks would answer is computed from the same seeds.

    collecting    the CPU time to collect the numbers of all sequences
    planning      the CPU time to plan the ownership; both times are the least of several runs, as means over seeds
    one block     the CPU time to plan it for all ranks together, instead of for the rank's block alone
    held          bytes of the sequences and numbers that the rank holds afterwards
    moved         bytes that the rank has received from others
    imbalance     by how much the costliest of all ranks exceeds the mean
    stay          the share of sequences that stay in the block of ranks in which they were produced

Under torchrun, real ranks race two sides on the CPU. Each computes logprobs and takes one optimizer step, in turns. On
one side every rank has the whole batch from the beginning. On the other side rank 0 has it, and the time of moving the
sequences to their owners counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rl_megatron.batching import batch as batch_module  # noqa: E402
from rl_megatron.batching import ownership as ownership_module  # noqa: E402
from rl_megatron.batching.batch import LENGTHS, SAMPLED, Batch  # noqa: E402
from rl_megatron.batching.blocks import Blocks  # noqa: E402
from rl_megatron.batching.config import Batching  # noqa: E402
from rl_megatron.batching.cost import SequenceCost  # noqa: E402
from rl_megatron.batching.ownership import OwnershipPlanner, plan_ownership  # noqa: E402
from rl_megatron.config.model import ModelConfig  # noqa: E402
from rl_megatron.config.optimizer import OptimizerConfig  # noqa: E402
from rl_megatron.data.batch import BatchedDataDict  # noqa: E402
from rl_megatron.losses import build_loss  # noqa: E402
from rl_megatron.topology import reductions  # noqa: E402
from rl_megatron.topology.topology import leave, start_topology  # noqa: E402
from rl_megatron.training.megatron_policy import MegatronPolicy  # noqa: E402

WIDTH, PER_RANK, RANKS = 8192, 64, (8, 64, 256, 1024)
COST = SequenceCost(per_token=6.0 * 494e6, per_pair=6.0 * 24 * 896)  # of a model with 0.5 billion weights
PACKED = Batching("packed", tokens=16384)


@dataclass(frozen=True)
class Measured:
    """What one rank of `ranks` holds, moves and needs."""

    ranks: float
    collecting_seconds: float
    planning_seconds: float
    one_block_seconds: float
    held: float
    moved: float
    imbalance: float
    stay: float


def lengths_of(seed: int, rank: int, shortest: int) -> np.ndarray:
    """Return the lengths of the sequences that a rank has produced."""
    return np.random.default_rng((seed, rank)).integers(shortest, WIDTH + 1, PER_RANK)


def rollouts_of(lengths: np.ndarray) -> BatchedDataDict:
    """Return sequences of these lengths with the keys that rollouts have."""
    number = len(lengths)
    within = torch.arange(WIDTH) < torch.from_numpy(lengths)[:, None]
    return BatchedDataDict(
        input_ids=torch.ones(number, WIDTH, dtype=torch.int64), input_lengths=torch.from_numpy(lengths),
        token_mask=within.float(), generation_logprobs=-within.float(),
        token_weight_versions=torch.zeros(number, WIDTH, dtype=torch.int64), prompt_lengths=torch.ones(number).long(),
        sample_mask=torch.ones(number), rewards=torch.zeros(number), temperature=torch.ones(number),
        stopped=torch.ones(number, dtype=torch.bool), weight_version=torch.zeros(number, dtype=torch.int64),
    )  # fmt: skip


def simulated(ranks: int, rank: int) -> Any:
    """Return the layout of a rank that has a replica for itself, in a fake process group."""
    world = dist.group.WORLD
    return SimpleNamespace(
        data=ranks, data_rank=rank, world_size=ranks, device=torch.device("cpu"), tensor_rank=0, context_rank=0,
        pipeline_rank=0, tensor=1, context=1, sequence=False, sequence_multiple=1,
        groups=SimpleNamespace(dp=world, pp=alone(), cp=alone(), tp=alone()),
    )  # fmt: skip


def alone() -> SimpleNamespace:
    """Return a group of one rank."""
    return SimpleNamespace(size=lambda: 1)


@contextmanager
def others(
    ranks: int, own: BatchedDataDict, facts: torch.Tensor, moves: np.ndarray, local: np.ndarray
) -> Iterator[None]:
    """Answer collectives as the other ranks would."""
    alike = Batch.gather_facts(own, None)
    counts = torch.tensor([[PER_RANK, WIDTH]] * ranks)
    answers = {torch.int64: counts, torch.uint8: facts}

    def describe(objects: list[Any], *_: Any) -> None:
        objects[0] = alike.columns, alike.padding

    with (
        mock.patch.object(batch_module, "gather_from_ranks", lambda values, _: answers[values.dtype]),
        mock.patch.object(dist, "broadcast_object_list", describe),
        mock.patch.object(ownership_module, "gather_from_ranks", lambda *_: torch.from_numpy(moves)[None]),
        mock.patch.object(dist, "all_reduce", lambda values, **_: values.copy_(torch.from_numpy(local))),
        mock.patch.object(reductions, "gather_from_ranks", lambda values, _: values[None]),
    ):
        yield


def plan_of_all(planner: OwnershipPlanner, homes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what all blocks plan.

    These are what blocks give away, the rank within its block that owns each sequence, and the rank that does.
    """
    blocks, number, given = planner.blocks, len(planner.lengths), []

    def recorded(moves: np.ndarray) -> np.ndarray:
        given.append(moves)
        return moves

    for block in range(len(blocks)):
        planner.assign_blocks(0, number, homes, block, recorded)
    moves = np.concatenate(given) if given else np.zeros((0, 2), dtype=np.int64)
    block_of, local = planner.assign_blocks(0, number, homes, 0, lambda _: moves), np.zeros(number, dtype=np.uint8)
    for block in range(len(blocks)):
        numbers = np.flatnonzero(block_of == block)
        local[numbers], _ = planner.plan_block(numbers, len(blocks.ranks(block)))
    return moves, local, block_of * blocks.ranks_per_block + local


def measure(shortest: int, sizes: Sequence[int] = RANKS, seeds: int = 8) -> list[Measured]:
    """Return what one rank of each number of ranks holds, moves and needs, as means over seeds of the lengths."""
    found = [[measure_once(ranks, shortest, seed) for ranks in sizes] for seed in range(seeds)]
    return [
        Measured(*(statistics.mean(getattr(each, field.name) for each in of_size) for field in fields(Measured)))
        for of_size in zip(*found, strict=True)
    ]


def measure_once(ranks: int, shortest: int, seed: int, repetitions: int = 10) -> Measured:
    """Return what the middle one of so many ranks holds, moves and needs, for one seed."""
    rank = ranks // 2
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        layout = simulated(ranks, rank)
        lengths = [lengths_of(seed, each, shortest) for each in range(ranks)]
        homes, every = np.repeat(np.arange(ranks, dtype=np.uint16), PER_RANK), np.concatenate(lengths).astype(np.int32)
        planner = OwnershipPlanner(every, WIDTH, PACKED, layout, COST, Blocks(ranks))
        moves, local, owners = plan_of_all(planner, homes)
        own = rollouts_of(lengths[rank])
        facts = facts_of(lengths, Batch.gather_facts(own, None).facts)
        collecting, planning = [], []
        with others(ranks, own, facts, moves, local):
            for _ in range(repetitions):
                started = time.process_time()
                batch = Batch.gather_facts(own, layout)
                collecting.append(time.process_time() - started)
                started = time.process_time()
                plan = plan_ownership(planner, [batch.size], batch.homes.numpy(), rank, batch.ranks)
                planning.append(time.process_time() - started)
            assert (plan.owners == owners).all()
            batch = batch.move_to_owners(plan)
        started = time.process_time()
        planner.plan_block(np.arange(len(every)), ranks)
        one_block = time.process_time() - started
        costs = np.bincount(owners, weights=COST.per_token * every + COST.per_pair * every.astype(float) ** 2)
        stay = (owners // 8 == homes // 8).mean().item()
        # The planner's own collectives: a byte for each sequence, and 8 for each that goes to another block.
        moved = batch.traffic.received + (len(every) + 8 * len(moves) if ranks > 8 else 0)
        imbalance = costs.max() / costs.mean() - 1
        return Measured(ranks, min(collecting), min(planning), one_block, held(batch), moved, imbalance, stay)
    finally:
        dist.destroy_process_group()


def facts_of(lengths: Sequence[np.ndarray], like: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the bytes [ranks, …] that ranks say about their sequences; `like` has those of one rank."""
    of_lengths = torch.from_numpy(np.stack(lengths)).int()
    parts = [
        of_lengths if name in (LENGTHS, SAMPLED) else values.expand(len(lengths), -1) for name, values in like.items()
    ]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def held(batch: Batch) -> int:
    """Return the bytes of a rank's sequences, without what pads them, and of the numbers of all."""
    tokens = int(batch.lengths[batch.numbers].sum())
    columns = batch.columns.values()
    own = sum(each.bytes * (tokens if each.per_token else len(batch.numbers)) for each in columns)
    known = sum(values.nbytes for values in batch.facts.values()) + batch.homes.nbytes
    return own + known + (0 if batch.owners is None else batch.owners.nbytes)


# --- the race of real ranks ---

MODEL = ModelConfig(
    num_layers=2, hidden_size=128, ffn_hidden_size=256, num_attention_heads=4, num_query_groups=2,
    max_sequence_length=512,
)  # fmt: skip


def race(per_rank: int, rounds: int) -> tuple[float, float, int]:
    """Return the median seconds of a step of a whole batch and of a sharded one, and the bytes that rank 0 sent."""
    layout = start_topology(device="cpu")
    policy = MegatronPolicy(
        MODEL, layout, vocab_size=512, optimizer=OptimizerConfig(lr=1e-5), total_steps=10**6,
        global_batch_size=per_rank * layout.data, batching=Batching("packed", tokens=2048),
    )  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    number, width = per_rank * layout.data, MODEL.max_sequence_length
    lengths = torch.randint(64, width + 1, (number,), generator=draw)
    within = torch.arange(width) < lengths[:, None]
    batch = BatchedDataDict(
        input_ids=torch.randint(512, (number, width), generator=draw), input_lengths=lengths,
        token_mask=within.float(), sample_mask=torch.ones(number), generation_logprobs=-within.float(),
        advantages=torch.randn(number, 1, generator=draw) * within, temperature=torch.ones(number),
        token_weight_versions=torch.zeros(number, width, dtype=torch.int64),
    )  # fmt: skip
    loss = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0})
    times: dict[str, list[float]] = {"whole": [], "sharded": []}
    sent = 0
    for _ in range(rounds):
        for side, seconds in times.items():
            dist.barrier()
            started = time.perf_counter()
            data = BatchedDataDict(batch)
            if side == "sharded":
                data = policy.distribute(Batch.gather_facts(data if layout.rank == 0 else None, layout))
                sent = data.traffic.sent
            data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]
            policy.train(data, loss)
            seconds.append(time.perf_counter() - started)
    medians = [statistics.median(seconds[1:]) for seconds in times.values()]
    leave()
    return medians[0], medians[1], sent


def table(measured: Sequence[Measured], title: str) -> Table:
    """Return the measurements as a table, with the growth from the first to the last."""
    found = Table(title=title)
    for name in ("ranks", "collecting", "planning", "one block", "held", "moved", "imbalance", "stay"):
        found.add_column(name, justify="right")
    for each in measured:
        times = (
            f"{seconds * 1e3:.2f} ms"
            for seconds in (each.collecting_seconds, each.planning_seconds, each.one_block_seconds)
        )
        sizes = (f"{number / 1e6:.2f} MB" for number in (each.held, each.moved))
        found.add_row(f"{each.ranks:,.0f}", *times, *sizes, f"{each.imbalance:.2%}", f"{each.stay:.1%}")
    first, last = measured[0], measured[-1]
    keys = "collecting_seconds", "planning_seconds", "one_block_seconds", "held", "moved"
    growth = [f"×{getattr(last, key) / getattr(first, key):.2f}" for key in keys]
    found.add_row("growth", *growth, "", "")
    return found


def main() -> None:
    """Print the table of simulated ranks or, under torchrun, the race of real ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-rank", type=int, default=16, help="sequences per rank in the race")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each side in the race")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    if "RANK" in os.environ:
        whole, sharded, sent = race(arguments.per_rank, arguments.rounds)
        if os.environ["RANK"] == "0":
            console.print(
                f"{os.environ['WORLD_SIZE']} ranks: {whole:.3f} s with the whole batch on every rank, {sharded:.3f} s "
                f"with its sequences moved to their owners; ratio {sharded / whole:.3f}; rank 0 sent "
                f"{sent / 1e6:.2f} MB"
            )
        return
    for shortest in (1024, WIDTH):
        title = f"64 sequences per rank of {shortest:,} to {WIDTH:,} tokens"
        console.print(table(measure(shortest), title))


if __name__ == "__main__":
    main()
