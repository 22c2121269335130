"""Loss, gradient norm and logprobs of `rl-megatron certify`'s workload are those of the CPU, from the same seed.

The reference is one padded microbatch with whole logits on the CPU. On the device, every batching is compared with it,
with whole logits and with the fused head.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting, in_new_process
from rl_megatron.certify.measurement import Measurement, run_workload
from rl_megatron.certify.single_process import run_in_one_process
from rl_megatron.certify.workload import SMALL_FUSED_HEAD, STANDARD_OBJECTIVES, Workload, shrunk, small_batching
from rl_megatron.config.load import load_config
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device

MODELS = {"dense": "qwen2_5_0_5b", "experts": "nano_moe", "window": "gemma3_1b"}
LIMITS = {"fp32": 1e-5, "bf16": 2e-2}
# In bf16, another rounding decides whether a ratio near its limit is clipped. DPO's gradient has no such steps.
OBJECTIVES = {"fp32": ("nll", "clipped_pg"), "bf16": ("nll", "dpo")}
KINDS = {  # name → (batching, fused head)
    "padded": ("padded", False),
    "dynamic": ("dynamic", False),
    "packed": ("packed", False),
    "padded, fused head": ("padded", True),
    "packed, fused head": ("packed", True),
}
_TINY_KINDS = ("packed", "padded, fused head")


def rows(tiny: bool) -> list[str]:
    return [f"largest error of a token's logprob, {precision}" for precision in LIMITS]


def run(setting: Setting, record: Record) -> None:
    models = ["dense"] if setting.tiny else list(MODELS)
    workloads = {(model, precision): workload_of(model, precision) for model in models for precision in LIMITS}
    wanted = in_new_process(on_the_cpu, workloads, sees_gpus=False)
    layout = topology.build(ParallelConfig(), start_device(setting.device), Workload.seed)
    largest = dict.fromkeys(LIMITS, 0.0)
    for (model, precision), workload in workloads.items():
        errors: dict[str, list[tuple[float, str]]] = {}
        for kind in _TINY_KINDS if setting.tiny else KINDS:
            for name, found in on_the_device(workload, layout, kind).items():
                compared = compare(found, wanted[model, precision][name])
                for quantity, error in compared.items():
                    errors.setdefault(quantity, []).append((error, f"{kind}, {name}"))
        for quantity, found_errors in errors.items():
            error, place = max(found_errors, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
            if quantity == "largest error of a logprob":
                largest[precision] = max(largest[precision], error)
            else:
                record.at_most(f"{model}, {precision}: {quantity}", error, LIMITS[precision], place)
    for name, precision in zip(rows(setting.tiny), LIMITS, strict=True):
        record.figure(name, largest[precision], "nats", at_most=LIMITS["fp32"] if precision == "fp32" else None)
    dist.destroy_process_group()


def workload_of(model: str, precision: str) -> Workload:
    """Return certify's workload with the smallest model of a family."""
    small, _ = shrunk(load_config([f"model={MODELS[model]}"]).first.model, ParallelConfig())
    return Workload(small, {name: STANDARD_OBJECTIVES[name] for name in OBJECTIVES[precision]}, precision=precision)


def on_the_cpu(workloads: dict[tuple[str, str], Workload]) -> dict[tuple[str, str], dict[str, Measurement]]:
    """Return the reference of each workload; in a process of its own."""
    torch.set_num_threads(1)
    return {key: run_in_one_process(workload, "cpu") for key, workload in workloads.items()}


def on_the_device(workload: Workload, layout: topology.Topology, kind: str) -> dict[str, Measurement]:
    """Return what one batching gives."""
    batching, fused = KINDS[kind]
    each = {
        name: small_batching(batching, 4, objective.group_size, ParallelConfig())  # type: ignore[arg-type]
        for name, objective in workload.objectives.items()
    }
    return run_workload(replace(workload, fused_head=SMALL_FUSED_HEAD if fused else None), layout, each)


def compare(found: Measurement, wanted: Measurement) -> dict[str, float]:
    """Return the errors of one objective.

    Those of logprobs are in nats. Below −1 nat they are relative, because fp32 has only 24 bits.
    """
    stream = wanted.stream.double()
    difference = (found.stream.cpu().double() - stream).abs() / stream.abs().clamp(min=1.0)
    return {
        "loss": _relative(found.metrics["loss"], wanted.metrics["loss"]),
        "gradient norm": _relative(_norm(found), _norm(wanted)),
        "mean error of logprobs": difference.mean().item(),
        "largest error of a logprob": difference.max().item(),
    }


def _norm(measured: Measurement) -> float:
    return math.sqrt(sum(gradient.double().square().sum().item() for gradient in measured.gradients.values()))


def _relative(found: float, wanted: float) -> float:
    return abs(found - wanted) / abs(wanted)
