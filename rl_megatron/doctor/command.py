"""`rl-megatron doctor`: check a machine before a run, and whether it has what an experiment needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from rl_megatron import log
from rl_megatron.config.schema import RunConfig
from rl_megatron.doctor.devices import check_devices, read_gpus
from rl_megatron.doctor.experiment import check_files, check_layout, check_servers, check_tokenizer
from rl_megatron.doctor.findings import Finding, Transfer, count_state, print_json, print_report, summarize
from rl_megatron.doctor.machine import check_limits_of_programs, check_ports, check_shared_memory
from rl_megatron.doctor.storage import check_storage
from rl_megatron.doctor.versions import (
    Installed,
    check_apex,
    check_transformer_engine,
    check_triton,
    check_versions,
)

_WIDTH_IN_FILES = 120
_COMPARED = ("rl-megatron", "torch", "megatron-core", "transformers", "transformer-engine", "triton", "numpy")


def doctor(config: RunConfig | None, check_early: Callable[[RunConfig], None], as_json: bool = False) -> int:
    """Print the findings, and return the exit status: 1 if any node has a problem, and 0 otherwise.

    Under a launcher, the first rank of each node checks its machine, and all ranks check their communication.

    Args:
        config: The run whose needs are checked, or None to check only the machine.
        check_early: Checks paths and files, as every command does before it imports torch.
        as_json: Whether to print JSON.
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
    problems = count_state(findings, "problem")
    if problems and "WORLD_SIZE" in os.environ:  # otherwise the launcher would report no reason
        failed = [finding.message for finding in findings if finding.check == "communication" and not transfers]
        log.error(f"doctor: {failed[0] if failed else summarize(findings)}", on_every_node=bool(failed))
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
    config: RunConfig | None, findings: list[Finding], is_first_of_node: bool
) -> tuple[list[Finding], list[Transfer]]:
    """Return the findings of all nodes and of the communication between all ranks."""
    import torch.distributed as dist

    from rl_megatron.doctor.communication import gather_findings, join_ranks, judge_transfers, time_transfers

    device, problems = join_ranks("auto" if config is None else config.first.device)
    if device is None:
        return findings + problems, []
    installed = Installed()
    versions = {name: installed.find_version(name) for name in _COMPARED} if is_first_of_node else {}
    findings, differences = gather_findings(findings, versions)
    transfers = time_transfers(device)
    findings += differences + judge_transfers(transfers, dist.get_backend(), dist.get_world_size())
    dist.destroy_process_group()
    return findings, transfers
