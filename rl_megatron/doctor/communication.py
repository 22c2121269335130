"""Check the communication between ranks, through the process group that a run uses."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from rl_megatron.config.errors import ConfigError
from rl_megatron.doctor.findings import Finding, Transfer, ok, problem, refusal, warning
from rl_megatron.topology.device import start_device
from rl_megatron.topology.ranks import Ranks

_CHECK = "communication"
_TIMEOUT_MINUTES = 2.0
_SIZES = (8, 64 << 10, 1 << 20, 16 << 20)  # bytes
_LARGE_SIZES = (256 << 20,)  # on GPUs
_FEW, _MANY = 5, 20  # repetitions of large and small messages
_SLOW_NCCL = 1e9  # bytes per second; a speed that TCP reaches, too


def join_ranks(device: str, timeout_minutes: float = _TIMEOUT_MINUTES) -> tuple[torch.device | None, list[Finding]]:
    """Join the process group as a run does. Return the rank's device, or None and the problem if that fails."""
    try:
        torch_device = start_device(device, timeout_minutes)
        probe = torch.ones(1, device=torch_device)
        dist.all_reduce(probe)
    except ConfigError as error:
        return None, [refusal(_CHECK, error)]
    except RuntimeError as error:  # torch raises it for wrong addresses, wrong interfaces and timeouts
        remedy = (
            "check MASTER_ADDR, firewalls between the nodes, and GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME; "
            "NCCL_DEBUG=INFO logs more"
        )
        reason = str(error).split("\n")[0]
        message = f"the ranks of {socket.gethostname()} cannot reach the others: {reason}"
        return None, [problem(_CHECK, message, remedy)]
    if probe.item() != dist.get_world_size():
        message = f"a sum of ones over {dist.get_world_size()} ranks is {probe.item():g}"
        return None, [problem(_CHECK, message, "set NCCL_P2P_DISABLE=1 to find out whether a link is broken")]
    return torch_device, []


def time_transfers(device: torch.device) -> list[Transfer]:
    """Return the times of all-reduces of several sizes. Collective."""
    return [_time_transfer(size, device) for size in _SIZES + (_LARGE_SIZES if device.type == "cuda" else ())]


def _time_transfer(size: int, device: torch.device) -> Transfer:
    x, repetitions = torch.zeros(size // 4, device=device), _MANY if size <= 1 << 20 else _FEW
    dist.all_reduce(x)
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(repetitions):
        dist.all_reduce(x)
    _synchronize(device)
    seconds, ranks = (time.perf_counter() - began) / repetitions, dist.get_world_size()
    return Transfer(size, seconds, 2 * (ranks - 1) / ranks * size / seconds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def judge_transfers(transfers: Sequence[Transfer], backend: str, ranks: int) -> list[Finding]:
    """Check that the transfers are as fast as the network of a cluster should be."""
    fastest = max(transfer.bandwidth for transfer in transfers)
    message = (
        f"{ranks} ranks meet over {backend}; {transfers[0].seconds * 1e6:,.0f} µs, up to {fastest / 1e9:,.2f} GB/s"
    )
    if backend == "nccl" and fastest < _SLOW_NCCL:
        remedy = "NCCL probably uses TCP: look for NET/IB or NVLink in NCCL_DEBUG=INFO, and set NCCL_IB_HCA"
        return [warning(_CHECK, message, remedy)]
    return [ok(_CHECK, message)]


def compare_nodes(versions: Sequence[tuple[str, dict[str, str | None]]]) -> list[Finding]:
    """Report the versions that differ from the first node's; `versions` has each node's name and versions."""
    first, first_versions = versions[0]
    findings = []
    for host, host_versions in versions[1:]:
        differing = [
            f"{name} {host_versions.get(name)} instead of {version}"
            for name, version in first_versions.items()
            if host_versions.get(name) != version
        ]
        if differing:
            remedy = "install the same environment on all nodes, or use one that they share"
            findings.append(problem("nodes", f"{host} has {', '.join(differing)}, which {first} has", remedy))
    return findings


def gather_findings(
    findings: Sequence[Finding], versions: dict[str, str | None]
) -> tuple[list[Finding], list[Finding]]:
    """Return the findings of all nodes, with the nodes' names, and findings about differing versions. Collective.

    `findings` and `versions` are this node's, and are empty on all but the first rank of the node.
    """
    answer = json.dumps([socket.gethostname(), [asdict(finding) for finding in findings], versions])
    answers = [json.loads(text) for text in Ranks.detect().gather(answer)]
    nodes = [(host, node_versions) for host, _, node_versions in answers if node_versions]
    all_findings = [
        Finding(**finding | {"host": host if len(nodes) > 1 else ""})
        for host, node_findings, _ in answers
        for finding in node_findings
    ]
    return all_findings, compare_nodes(nodes)
