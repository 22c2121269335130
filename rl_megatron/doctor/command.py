"""`rl-megatron doctor`: check a machine, and what an experiment needs of it, before a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from rl_megatron import log
from rl_megatron.config.schema import RunConfig
from rl_megatron.doctor.devices import check_devices, read_gpus
from rl_megatron.doctor.experiment import check_files, check_layout, check_servers, check_tokenizer
from rl_megatron.doctor.findings import Finding, count
from rl_megatron.doctor.installed import Installed
from rl_megatron.doctor.machine import check_limits_of_programs, check_ports, check_shared_memory
from rl_megatron.doctor.report import print_json, print_report, summary
from rl_megatron.doctor.storage import check_storage
from rl_megatron.doctor.versions import check_apex, check_transformer_engine, check_triton, check_versions

if TYPE_CHECKING:
    from rl_megatron.doctor.communication import Transfer

_WIDTH_IN_FILES = 120
_COMPARED = ("rl-megatron", "torch", "megatron-core", "transformers", "transformer-engine", "triton", "numpy")


def doctor(config: RunConfig | None, check_early: Callable[[RunConfig], None], as_json: bool = False) -> int:
    """Print what is wrong with this machine, and return the exit status.

    Under a launcher, the first rank of each node checks its machine, and all ranks check their communication.

    Args:
        config: The run whose needs are checked, or None to check the machine alone.
        check_early: The checks of paths and files that every command makes before it imports torch.
        as_json: Whether to print JSON.

    Returns:
        0 if there is no problem, on any node, and 1 otherwise.
    """
    is_first_of_node = int(os.environ.get("LOCAL_RANK", "0")) == 0
    findings = check_node(config, check_early) if is_first_of_node else []
    transfers: list[Transfer] = []
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        findings, transfers = _check_ranks(config, findings, is_first_of_node)
    if log.is_main_rank():
        if as_json:
            print_json(findings, transfers)
        else:
            width = None if sys.stdout.isatty() else _WIDTH_IN_FILES
            print_report(findings, transfers, Console(width=width, highlight=False))
    problems = count(findings, "problem")
    if problems and "WORLD_SIZE" in os.environ:  # the launcher says nothing else then
        apart = next((found.message for found in findings if found.check == "communication" and not transfers), None)
        log.error(f"doctor: {apart or summary(findings)}", on_every_node=apart is not None)
    return 1 if problems else 0


def check_node(config: RunConfig | None, check_early: Callable[[RunConfig], None]) -> list[Finding]:
    """Return the findings of all checks that need no torch and no other rank."""
    installed, gpus = Installed(), read_gpus()
    device = "auto" if config is None else config.first.device
    has_gpu = bool(gpus.names) and device != "cpu"
    findings = [
        *check_versions(installed),
        *check_devices(gpus, installed, device),
        *check_transformer_engine(installed, has_gpu),
        *check_apex(installed),
        *check_triton(installed, has_gpu),
        *check_shared_memory(config),
        *check_ports(config),
        *check_limits_of_programs(config),
        *check_storage(Path("." if config is None else config.output_dir), config),
    ]
    if config is not None:
        findings += check_files(config, check_early)
        findings += check_layout(config)
        findings += check_tokenizer(config)
        findings += check_servers(config)
    return findings


def _check_ranks(
    config: RunConfig | None, own: list[Finding], is_first_of_node: bool
) -> tuple[list[Finding], list[Transfer]]:
    """Return the findings of all nodes and of the communication between all ranks."""
    import torch.distributed as dist

    from rl_megatron.doctor.communication import gather, join, judge, time_transfers

    device, failures = join("auto" if config is None else config.first.device)
    if device is None:
        return own + failures, []
    installed = Installed()
    versions = {name: installed.version(name) for name in _COMPARED} if is_first_of_node else {}
    findings, differences = gather(own, versions)
    transfers = time_transfers(device)
    findings += differences + judge(transfers, dist.get_backend(), dist.get_world_size())
    dist.destroy_process_group()
    return findings, transfers
