"""Transformer Engine's layers beside the portable ones: losses, gradients, weights after a step, and seconds of a step.

It is measured in bf16, for which `model.backend=auto` chooses them. A gradient of either is compared with that of the
portable layers in fp32 on the same GPU: Transformer Engine's may be as far from it as the portable ones in bf16.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec

import torch.distributed as dist

from benchmarks import train_step
from benchmarks.gpu_check.parts import smoke
from benchmarks.gpu_check.parts import train_step as step_part
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting, in_new_process
from rl_megatron.certify.measurement import Measurement
from rl_megatron.certify.workload import Workload
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device

KINDS = ("padded", "packed", "packed, fused head")
CASE = "packed, fused head"
MODELS = ("dense", "experts")
TE, PORTABLE = "transformer_engine", "portable"


def rows(tiny: bool) -> list[str]:
    return ["NLL step, Transformer Engine / portable", "GRPO step, Transformer Engine / portable"]


def run(setting: Setting, record: Record) -> None:
    if not setting.on_gpu:
        record.skip("Transformer Engine needs a GPU")
        return
    if find_spec("transformer_engine") is None:
        record.skip("Transformer Engine is not installed")
        return
    for name in MODELS[:1] if setting.tiny else MODELS:
        exact, portable, found = in_new_process(measure, name)
        for kind in KINDS:
            for objective in found[kind]:
                limits = smoke.compare(portable[objective], exact[objective], "bf16")
                errors = smoke.compare(found[kind][objective], exact[objective], "bf16")
                where = f"{name}, {kind}, {objective}"
                for quantity in ("loss", "gradient norm", "mean error of logprobs"):
                    record.at_most(f"{quantity}, {where}", errors[quantity], smoke.LIMITS["bf16"])
                for quantity in (smoke.GRADIENTS, smoke.WEIGHTS):
                    if quantity in errors:
                        limit = smoke.BF16_FACTOR * limits[quantity]
                        record.at_most(f"{quantity}, {where}", errors[quantity], limit)
    seconds = {}
    for backend in (PORTABLE, TE):
        output = setting.directory / f"{backend}.json"
        arguments = [*step_part.arguments(setting, CASE), "--set", f"backend={backend}", "--output", str(output)]
        record.equal(f"exit status, {backend}", in_new_process(train_step.main, arguments), 0)
        seconds[backend] = json.loads(output.read_text())["figures"]
    for name, figure in zip(rows(setting.tiny), ("nll", "grpo"), strict=True):
        record.figure(name, seconds[TE][figure] / seconds[PORTABLE][figure])
        for backend, figures in seconds.items():
            record.fact(f"{figure} step, {backend}", f"{1000 * figures[figure]:.1f} ms")


def measure(model: str) -> tuple[dict[str, Measurement], dict[str, Measurement], dict[str, dict[str, Measurement]]]:
    """Return a workload's results: portable in fp32, portable in bf16, and Transformer Engine's of each batching."""
    workload = smoke.workload_of(model, "bf16")
    layout = topology.build(ParallelConfig(), start_device("cuda"), workload.seed)

    def by(backend: str, precision: str, kind: str) -> dict[str, Measurement]:
        return smoke.run_kind(_with(workload, backend, precision), layout, kind)

    exact, portable = by(PORTABLE, "fp32", "padded"), by(PORTABLE, "bf16", "padded")
    found = {kind: by(TE, "bf16", kind) for kind in KINDS}
    dist.destroy_process_group()
    return exact, portable, found


def _with(workload: Workload, backend: str, precision: str) -> Workload:
    return replace(workload, precision=precision, model=replace(workload.model, backend=backend))
