"""Race the refit of an engine against the plain way to send it weights, on the ranks of this machine:

    python benchmarks/refit.py
    python benchmarks/refit.py --layers 2 --hidden 128 --vocab 1024 --repetitions 2

A policy on two tensor-parallel ranks sends its weights to an engine in a separate process, over gloo. These ways
alternate in one run:

    bucketed        broadcast_weights_for_collective and WeightReceiver.receive: one all-reduce per bucket over policy
                    and engine; fingerprints are taken before and verified after
    one by one      an all-gather for each parameter; the first rank assembles the Hugging Face tensors and sends each;
                    nothing is verified
    shared memory   get_weights_ipc_handles: one all-reduce per bucket among the policy's ranks; the engine opens the
                    memory, verifies and copies

Seconds run from the first rank's start until the engine has all weights in its parameters; they are medians of
interleaved repetitions. Phases overlap. Collectives and sends are counted on the first rank when they start.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.weight_sync.buckets import RefitPlan, TensorSpec
from rl_megatron.weight_sync.ipc import opened
from rl_megatron.weight_sync.process_group import StandaloneGroup
from rl_megatron.weight_sync.receiver import ParameterSink, WeightReceiver

RANKS = 2
WAYS = ("bucketed", "one by one", "shared memory")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """The weights that are sent, and how often."""

    model: ModelConfig
    precision: str
    bucket_bytes: int
    repetitions: int
    port: int
    store: str


@dataclass
class Figures:
    """The figures of one way, for every repetition."""

    num_bytes: int = 0
    collectives: int = 0
    sends: int = 0
    seconds: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


# --- the engine's process ---


def engine(connection: Connection, port: int) -> None:
    """Answer requests (way, …) with the seconds of each phase, in the engine's process."""
    torch.set_num_threads(1)
    plan: RefitPlan = connection.recv()
    specs = specs_of(plan)
    parameters = {spec.name: torch.zeros(spec.shape, dtype=spec.torch_dtype) for spec in specs}
    receiver = WeightReceiver(ParameterSink(parameters), plan)
    group = StandaloneGroup("127.0.0.1", port, RANKS, RANKS + 1, _CPU)
    for version, way in enumerate(iter(connection.recv, None)):
        if way == "bucketed":
            receiver.receive(group, version)
        elif way == "shared memory":
            receiver.begin(version)
            for handle in iter(connection.recv, None):
                with opened(handle) as words:
                    receiver.accept(handle.bucket_index, words)
                connection.send("taken")
            receiver.finish()
        else:
            receive_one_by_one(parameters, specs, group)
        connection.send(dict(receiver.seconds) if way != "one by one" else {})


def receive_one_by_one(parameters: dict[str, Tensor], specs: Sequence[TensorSpec], group: StandaloneGroup) -> None:
    for spec in specs:
        group.process_group.recv([parameters[spec.name].view(-1).view(torch.uint8)], 0, 0).wait()


def specs_of(plan: RefitPlan) -> list[TensorSpec]:
    return [spec for bucket in plan.buckets for spec in bucket.tensors]


# --- the policy's ranks ---


def policy_rank(rank: int, case: Case, connection: Connection | None, results: Connection | None) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    from rl_megatron.topology import topology
    from rl_megatron.topology.device import start_device
    from rl_megatron.training.megatron_policy import MegatronPolicy

    dist.init_process_group("gloo", store=dist.FileStore(case.store, RANKS), rank=rank, world_size=RANKS)
    layout = topology.build(ParallelConfig(tensor=RANKS), start_device("cpu"), seed=0)
    policy = MegatronPolicy(case.model, layout, vocab_size=case.model.vocab_size, precision=case.precision)
    policy.prepare_weights_for_ipc(case.bucket_bytes)
    if connection is not None:
        connection.send(policy.weights.plan)
    for handle in policy.init_collective("127.0.0.1", case.port, RANKS + 1):
        handle.wait()
    ways: dict[str, WeightSync] = {
        "bucketed": lambda counted: bucketed(policy),
        "one by one": lambda counted: one_by_one(policy, counted),
        "shared memory": lambda counted: shared_memory(policy, connection),
    }
    figures = {way: Figures(policy.weights.plan.num_bytes) for way in WAYS}
    for repetition in range(case.repetitions + 1):  # the first repetition warms up
        for way, sync in ways.items():
            dist.barrier()
            measured = measure(way, sync, connection)
            if repetition:
                add(figures[way], *measured)
    if connection is not None:
        connection.send(None)
        results.send(figures)
    dist.barrier()
    policy.shutdown()
    dist.destroy_process_group()


def measure(way: str, sync: WeightSync, connection: Connection | None) -> tuple[Any, ...]:
    """Return (seconds, collectives, sends, seconds of each phase) of one weight sync."""
    with Counted() as counted:
        began = time.perf_counter()
        if connection is not None:
            connection.send(way)
        phases = sync(counted)
        if connection is not None:
            phases |= connection.recv()
        return time.perf_counter() - began, counted.collectives, counted.sends, phases


def add(figures: Figures, seconds: float, collectives: int, sends: int, phases: dict[str, float]) -> None:
    figures.seconds.append(seconds)
    figures.collectives, figures.sends = collectives, sends
    for name, spent in phases.items():
        figures.phases.setdefault(name, []).append(spent)


class Counted:
    """Count the collectives and sends that start within the context."""

    def __enter__(self) -> Counted:
        self.collectives = self.sends = 0
        self._kept = [(dist, "all_reduce"), (dist, "all_gather"), (StandaloneGroup, "all_reduce")]
        self._functions = [getattr(owner, name) for owner, name in self._kept]
        for (owner, name), function in zip(self._kept, self._functions, strict=True):
            setattr(owner, name, self._counting(function))
        return self

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.collectives += 1
            return function(*args, **kwargs)

        return counting

    def __exit__(self, *_: object) -> None:
        for (owner, name), function in zip(self._kept, self._functions, strict=True):
            setattr(owner, name, function)


WeightSync = Callable[[Counted], dict[str, float]]


def bucketed(policy: Any) -> dict[str, float]:
    for handle in policy.broadcast_weights_for_collective():
        handle.wait()
    return phases_of(policy)


def shared_memory(policy: Any, connection: Connection | None) -> dict[str, float]:
    for keys in policy.prepare_weights_for_ipc():
        handles = policy.get_weights_ipc_handles(keys)
        if connection is not None:
            connection.send(handles["cpu"])
            connection.recv()
        dist.barrier()  # the engine has read the memory, which every rank overwrites next
    if connection is not None:
        connection.send(None)
    return phases_of(policy)


def phases_of(policy: Any) -> dict[str, float]:
    metrics = policy.weights.timings.metrics()
    return {name: metrics[f"refit_{name}_seconds"] for name in ("fill", "transfer")}


def one_by_one(policy: Any, counted: Counted) -> dict[str, float]:
    group = policy.weights.group()
    for tensor in whole_tensors(policy):
        if dist.get_rank() == 0:
            counted.sends += 1
            group.process_group.send([tensor.contiguous().view(-1).view(torch.uint8)], RANKS, 0).wait()
    return {}


def whole_tensors(policy: Any) -> Iterator[Tensor]:
    """Yield every Hugging Face tensor in the plan's order, assembled from gathered shards and blocks of rows."""
    from rl_megatron.model.families import family_of_model
    from rl_megatron.model.shards import pieces

    table = family_of_model(policy.model_config, policy.vocab_size).table(policy.model_config, policy.vocab_size)
    local: dict[str, list[Any]] = {}
    for piece in pieces(policy.model.model_chunks):
        local.setdefault(piece.name, []).append(piece)
    gathered: dict[str, Tensor] = {}
    for hf_name in table.hf_shapes:
        blocks = sorted(table.by_hf_name[hf_name], key=lambda rows: rows.hf_row)
        for name in {rows.name for rows in blocks} - gathered.keys():
            gathered[name] = torch.cat([gather(piece) for piece in local[name]])
        yield torch.cat([gathered[rows.name][rows.row : rows.row + rows.count] for rows in blocks])
        gathered = {name: gathered[name] for name in {rows.name for rows in blocks}}


def gather(piece: Any) -> Tensor:
    """Concatenate the shards of a parameter, or of half of it (gate, up), along the axis along which it is sharded."""
    if piece.tensor.shape == piece.global_shape:
        return piece.tensor
    shards = [torch.empty_like(piece.tensor) for _ in range(RANKS)]
    dist.all_gather(shards, piece.tensor.contiguous())
    rows_are_cut = piece.tensor.shape[1:] == piece.global_shape[1:]
    return torch.cat(shards, dim=0 if rows_are_cut else 1)


# --- the command ---


def race(model: ModelConfig, precision: str, bucket_bytes: int, repetitions: int) -> dict[str, Figures]:
    """Return the figures of every way, measured in separate processes."""
    context = multiprocessing.get_context("spawn")
    ours, engines = context.Pipe()
    results, of_first_rank = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        case = Case(model, precision, bucket_bytes, repetitions, free_port(), str(Path(directory) / "store"))
        processes = [context.Process(target=engine, args=(engines, case.port))]
        for rank in range(RANKS):
            connections = (ours, of_first_rank) if rank == 0 else (None, None)
            processes.append(context.Process(target=policy_rank, args=(rank, case, *connections)))
        for process in processes:
            process.start()
        of_first_rank.close()
        try:
            return results.recv()
        except EOFError:
            raise RuntimeError("a rank failed; its traceback is above") from None
        finally:
            for process in processes:
                process.join(30)
                process.kill()


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def table(title: str, figures: dict[str, Figures], markdown: bool) -> Table:
    from rich import box

    result = Table(title=title, title_justify="left", box=box.MARKDOWN if markdown else box.HEAVY_HEAD)
    for heading in ("", "GB", "seconds", "GB/s", "/ bucketed", "collectives", "sends", "fill", "transfer", "verify"):
        result.add_column(heading, justify="right" if heading else "left")
    first = figures[WAYS[0]].median
    for way, found in figures.items():
        phases = [statistics.median(found.phases[name]) for name in found.phases]
        spent = dict(zip(found.phases, phases, strict=True))
        result.add_row(
            way,
            f"{found.num_bytes / 1e9:.3f}",
            f"{found.median:.3f}",
            f"{found.num_bytes / 1e9 / found.median:.2f}",
            f"{found.median / first:.2f}",
            str(found.collectives),
            str(found.sends),
            *(f"{spent[name]:.3f}" if name in spent else "–" for name in ("fill", "transfer", "verify")),
        )
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Bucketed refit against one collective and one send a tensor.")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    model = ModelConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        ffn_hidden_size=3 * options.hidden,
        num_attention_heads=16,
        num_query_groups=8,
        vocab_size=options.vocab,
        tie_embeddings=False,
    )
    figures = race(model, options.precision, options.bucket_mib << 20, options.repetitions)
    title = f"{options.layers} layers of {options.hidden}, {options.precision}, buckets of {options.bucket_mib} MiB"
    Console(width=140).print(table(title, figures, options.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
