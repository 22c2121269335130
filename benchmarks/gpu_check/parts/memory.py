"""The peak of a training step's memory, as torch's allocator counts it, beside that of `rl-megatron plan`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from benchmarks.gpu_check.measured import DeviceCounter, run_phases_on
from benchmarks.gpu_check.planned import plan_of, workload_of
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting, in_new_process, key_of
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.plan.phases import PhaseName
from rl_megatron.plan.workload import Workload
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device

GIB = 2**30
LIMIT = 0.10
PHASES: tuple[PhaseName, ...] = ("logprobs", "train")


@dataclass(frozen=True)
class Shape:
    """A model, and two microbatches of it."""

    overrides: tuple[str, ...]
    vocab_size: int
    tokens: int
    packed: int = 1  # sequences of a microbatch

    def workload(self) -> Workload:
        if self.packed == 1:
            batching: tuple[str, ...] = ("train.batching=padded", "train.micro_batch_size=1")
        else:
            batching = ("train.batching=packed", f"train.micro_batch_tokens={self.packed * self.tokens}")
        return workload_of(
            (*self.overrides, *batching), vocab_size=self.vocab_size, tokens=self.tokens, sequences=2 * self.packed
        )


SHAPES = {  # those that matter most first
    "0.5B, packed, fused head": Shape(("model=qwen2_5_0_5b", "train.fused_head=true"), 151936, 2048, packed=8),
    "8B with 4 layers, packed, fused head": Shape(
        ("model=llama3_1_8b", "model.num_layers=4", "train.fused_head=true"), 128256, 4096, packed=4
    ),
    "0.5B, padded": Shape(("model=qwen2_5_0_5b",), 151936, 4096),
    "1.7B, packed, recomputed": Shape(("model=qwen3_1_7b", "model.recompute=full"), 151936, 4096, packed=4),
}
TINY = {
    "2 layers, padded": Shape(("model=micro", "model.num_layers=2"), 8192, 128),
    "2 layers, packed, fused head, recomputed": Shape(
        ("model=micro", "model.num_layers=2", "train.fused_head=true", "model.recompute=full"), 8192, 64, packed=4
    ),
}


def rows(tiny: bool) -> list[str]:
    return [row for name in (TINY if tiny else SHAPES) for row in _rows(name)]


def _rows(name: str) -> tuple[str, str]:
    return f"peak, {name}", f"peak / plan, {name}"


def run(setting: Setting, record: Record) -> None:
    seconds = 0.0  # of the slowest shape
    for name, shape in (TINY if setting.tiny else SHAPES).items():
        if setting.seconds_left < 1.5 * seconds:
            record.cannot(list(_rows(name)), "the part's time was over")
            continue
        began = time.monotonic()
        compare(name, shape, setting, record)
        seconds = max(seconds, time.monotonic() - began)


def expect(setting: Setting) -> dict[str, Any]:
    shapes = TINY if setting.tiny else SHAPES
    return {key_of_shape(name, shape): plan_of(shape.workload(), PHASES) for name, shape in shapes.items()}


def key_of_shape(name: str, shape: Shape) -> str:
    return key_of(f"memory: {name}", shape.workload(), PHASES)


def compare(name: str, shape: Shape, setting: Setting, record: Record) -> None:
    """Compare the memory of a shape with its plan."""
    workload = shape.workload()
    planned = setting.expected(key_of_shape(name, shape), lambda: plan_of(workload, PHASES))
    found = in_new_process(_measured, workload, setting.device)
    # Between phases, weights, gradients and optimizer state stay. The CPU holds the same.
    held, planned_held = found["build"][1], planned["build"].after_bytes
    record.at_most(f"weights and optimizer, {name}: difference from the plan", _apart(held, planned_held), LIMIT)
    for phase in PHASES:
        peak, planned_peak = found[phase][0], planned[phase].peak_bytes
        if setting.on_gpu and not setting.tiny:  # cuBLAS's own memory is more than all of a tiny shape
            apart = _apart(peak, planned_peak)
            record.at_most(f"peak of '{phase}', {name}: difference from the plan", apart, LIMIT)
    peak, planned_peak = found["train"][0] / GIB, planned["train"].peak_bytes / GIB
    record.figure(f"peak, {name}", peak, "GiB", prediction=((1 - LIMIT) * planned_peak, (1 + LIMIT) * planned_peak))
    record.figure(f"peak / plan, {name}", peak / planned_peak)


def _apart(found: float, planned: float) -> float:
    return abs(found / planned - 1)


def _measured(workload: Workload, device: str) -> dict[PhaseName, tuple[int, int]]:
    """Return the bytes of each phase at its peak and after it, in a process of its own."""
    layout = topology.build(ParallelConfig(), start_device(device), 0)
    with DeviceCounter(layout.device) as counter:
        phases = run_phases_on(layout, workload, counter, PHASES)
    dist.destroy_process_group()
    return {each.name: (each.use().peak_bytes, each.end_bytes) for each in phases}
