"""Start the ranks of a run: as many processes as its cases need, each with its part of the cores."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.logprobs.cases import Case, Grid
from benchmarks.logprobs.report import EvalResult, environment


@dataclass(frozen=True)
class Plan:
    """The settings that every rank needs."""

    device: str
    grid: Grid
    peers: tuple[str, ...]
    repetitions: int
    threads: int  # of all ranks together
    seconds: float | None  # no case begins after so many


def run(plan: Plan) -> tuple[EvalResult, dict[str, Any], list[Case]]:
    """All results, the machine, and the cases for which there was not enough time."""
    measured: EvalResult = []
    left_out: list[Case] = []
    where: dict[str, Any] = {}
    began = time.monotonic()
    for tensor in sorted(set(plan.grid.tensor)):
        cases = list(plan.grid.cases(tensor))
        left = None if plan.seconds is None else plan.seconds - (time.monotonic() - began)
        if not cases or (left is not None and left <= 0):
            left_out += cases
            continue
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(_rank, (tensor, plan, cases, left, _free_port(), directory), nprocs=tensor)
            found, where_now = pickle.loads((Path(directory) / "results").read_bytes())
        measured += found
        where = where or where_now
        left_out += cases[len(found) :]
    return measured, where, left_out


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank(
    rank: int, size: int, plan: Plan, cases: Sequence[Case], seconds: float | None, port: int, directory: str
) -> None:
    threads = max(1, plan.threads // size)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", module="megatron.*")  # warnings that Transformer Engine and Apex are missing
    from benchmarks.logprobs.fused import fused_variants
    from benchmarks.logprobs.race import Machine, race
    from benchmarks.logprobs.variants import logits_variants, peer_variant
    from rl_megatron.config.parallel import ParallelConfig
    from rl_megatron.topology import topology
    from rl_megatron.topology.device import start_device

    # megatron-core's cross entropy reads the group from its own globals.
    layout = topology.build(ParallelConfig(tensor=size), start_device(plan.device), seed=0)
    device = layout.device
    variants = logits_variants(device) + fused_variants(device)
    variants += [peer_variant(peer, device) for peer in plan.peers]
    machine = Machine.measure(device, layout.groups.tp)
    found: EvalResult = []
    began = time.monotonic()
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=rank > 0) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            late = torch.tensor(float(seconds is not None and time.monotonic() - began > seconds), device=device)
            dist.all_reduce(late, group=layout.groups.tp)  # ranks' clocks differ
            if late:
                break
            fewer = case.mode == "fused" and device.type == "cpu"  # minutes otherwise
            repetitions = -(-plan.repetitions // 3) if fewer else plan.repetitions
            show = partial(_describe, progress, task)
            found.append((case, race(case, variants, machine, repetitions, show)))
            progress.advance(task)
    if rank == 0:
        result = (found, environment(device, threads, machine.bandwidth))
        (Path(directory) / "results").write_bytes(pickle.dumps(result))
    dist.destroy_process_group()


def _describe(progress: Progress, task: TaskID, text: str) -> None:
    progress.update(task, description=text)
