"""`rl-megatron certify`: compare the user's layout with one process, on a small model of the user's model family."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from rl_megatron import disk, log
from rl_megatron.algorithms.registry import get_algorithm
from rl_megatron.batching.config import Batching
from rl_megatron.certify.measurement import Difference, Measurement, compare, find_failures, run_workload
from rl_megatron.certify.single_process import Reference
from rl_megatron.certify.workload import (
    NUM_SEQUENCES,
    SMALL_FUSED_HEAD,
    STANDARD_OBJECTIVES,
    VOCAB_SIZE,
    WIDTH,
    Objective,
    Workload,
    build_small_batching,
    shrink,
)
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import RunConfig
from rl_megatron.runs.preflight import check_loss
from rl_megatron.topology import degrees, topology
from rl_megatron.topology.device import start_device

_WIDTH_IN_FILES = 120  # wide enough for a parameter's name on one line


def certify(config: RunConfig) -> int:
    """Run the losses of the run's stages, and the standard losses, in the layout and in one process; print the errors.

    Returns:
        The exit status, the same on every rank. 0: every quantity is within its tolerance. 1: a quantity is not, and
        the first such quantity is printed. 2: the configuration cannot run.

    Raises:
        RuntimeError: The reference process failed.
    """
    try:
        return _certify(config)
    except ConfigError as error:
        log.error(error)
        return 2
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _certify(config: RunConfig) -> int:
    started, first = time.perf_counter(), config.first
    device = start_device(first.device, first.train.collective_timeout_minutes)
    for stage in config.stages.values():
        check_loss(stage)
    degrees.validate(first.parallel, dist.get_world_size())
    degrees.validate_model(first.model, first.parallel)  # the user's own model, before the small model is made from it
    model, parallel = shrink(first.model, first.parallel)
    layout = topology.build(parallel, device, first.train.seed, first.train.collective_timeout_minutes)
    objectives, batching = _collect_objectives(config)
    optimizer_keys = {key: getattr(first.optimizer, key) for key in ("distributed", "overlap", "clip_grad")}
    fused_head = SMALL_FUSED_HEAD if first.train.fused_head else None
    workload = Workload(
        model, objectives, optimizer=replace(Workload.optimizer, **optimizer_keys), fused_head=fused_head
    )

    with tempfile.TemporaryDirectory(prefix=disk.make_temporary_prefix("certify")) as directory:
        reference = Reference(workload, Path(directory), first.device, config.plugins) if layout.ranks.leads else None
        try:
            measured = run_workload(workload, layout, batching)
            # Only rank 0 knows how the reference ended, and it must tell the other ranks if the reference failed.
            expected = reference.finish() if reference is not None else None
        finally:
            if reference is not None:
                reference.stop()

    def judge() -> int:  # on rank 0
        assert expected is not None
        if isinstance(expected, str):
            raise RuntimeError(expected)
        differences = {name: compare(measured[name], expected[name]) for name in objectives}
        worst = next(find_failures(differences), None)
        console = Console(width=None if sys.stdout.isatty() else _WIDTH_IN_FILES)
        options = ", fused head" * first.train.fused_head + ", overlapped" * first.optimizer.overlap
        console.print(f"{layout.describe()}{options}, on {device.type}, compared with one process; both run in fp32")
        console.print(_build_table(differences, measured, batching))
        console.print(_describe_verdict(worst, time.perf_counter() - started))
        return 0 if worst is None else 1

    return layout.ranks.share(judge, (RuntimeError,))


def _collect_objectives(config: RunConfig) -> tuple[dict[str, Objective], dict[str, Batching]]:
    """Return the objectives by name, and how each forms microbatches.

    They are the losses of the stages, with each stage's batching, and the standard objectives, with the first stage's
    batching. If several stages have the same objective and batching, there is one entry under all their names.
    """
    requested = []
    for name, stage in config.stages.items():
        for model, loss in get_algorithm(stage).losses(stage).items():
            requested.append((name if model == "policy" else f"{name} {model}", Objective.from_section(loss), stage))
    requested += [(f"standard {name}", objective, config.first) for name, objective in STANDARD_OBJECTIVES.items()]

    different: list[tuple[list[str], Objective, Batching]] = []
    for name, objective, stage in requested:
        batching = build_small_batching(
            stage.train.batching, stage.train.micro_batch_size, objective.group_size, stage.parallel,
            share_prefixes=stage.train.share_prefixes == "auto",
        )  # fmt: skip
        names = next((names for names, *entry in different if entry == [objective, batching]), None)
        if names is None:
            different.append(([name], objective, batching))
        elif not name.startswith("standard "):
            names.append(name)
    return (
        {", ".join(names): objective for names, objective, _ in different},
        {", ".join(names): batching for names, _, batching in different},
    )


def _build_table(
    differences: dict[str, list[Difference]], measured: dict[str, Measurement], batching: dict[str, Batching]
) -> Table:
    table = Table(caption=f"{NUM_SEQUENCES} sequences of 1 to {WIDTH} tokens, vocabulary of {VOCAB_SIZE}")
    for heading in ("loss", "quantity", "error", "at most", "largest at", ""):
        numbers = heading in ("error", "at most")
        table.add_column(
            heading, justify="right" if numbers else "left", overflow="fold", no_wrap=heading != "largest at"
        )
    for name, of_objective in differences.items():
        for number, difference in enumerate(of_objective):
            table.add_row(
                name if number == 0 else "",
                difference.quantity,
                f"{difference.error:.1e}",
                f"{difference.tolerance:.0e}",
                difference.where,
                "holds" if difference.holds else "[bold red]DIFFERS",
            )
        packing = measured[name]
        used = f"{packing.packing_efficiency:.0%} of token slots used"
        table.add_row("", batching[name].kind, "", "", f"{packing.num_microbatches} microbatches, {used}", "")
        table.add_section()
    return table


def _describe_verdict(worst: tuple[str, Difference] | None, seconds: float) -> str:
    if worst is None:
        return f"This layout gives what one process gives ({seconds:.0f} s)."
    name, difference = worst
    return (
        f"This layout does NOT give what one process gives: {difference.quantity} of {name} differs by "
        f"{difference.error:.1e} (at most {difference.tolerance:.0e}), at {difference.where} ({seconds:.0f} s)."
    )
