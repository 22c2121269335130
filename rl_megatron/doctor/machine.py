"""Check the shared memory and the ports of a node, and whether it can limit programs that the model writes."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from rl_megatron.config.engines import opens_memory
from rl_megatron.config.generation import ServersConfig
from rl_megatron.config.schema import RunConfig
from rl_megatron.doctor.findings import Finding, ok, problem, warning
from rl_megatron.workers.confinement import find_missing_limits

SHARED_MEMORY = Path("/dev/shm")
_MIN_SHARED, _USUAL_SHARED = 256 << 20, 1 << 30  # docker's default, 64 MiB, is too small for NCCL
_MORE_SHARED = (
    "docker run --ipc=host (or --shm-size=16g); in Kubernetes, mount an emptyDir with medium: Memory at /dev/shm"
)


def check_shared_memory(config: RunConfig | None = None, path: Path = SHARED_MEMORY) -> list[Finding]:
    """Check that shared memory is large enough for NCCL, and for weight syncs through shared memory."""
    if not path.is_dir():
        return [problem("shared memory", f"there is no {path}", f"mount a tmpfs at {path}")]
    free = shutil.disk_usage(path).free
    stages = () if config is None else config.stages.values()
    buckets = [
        (stage.generation.refit_bucket_mb * (1 << 20), stage.generation.refit)
        for stage in stages
        if stage.scores_completions and opens_memory(stage.generation)
    ]
    largest, refit = max(buckets, default=(0, ""))
    needed = 2 * largest  # each side holds two buckets
    if free < max(_MIN_SHARED, needed):
        why = f"generation.refit={refit} needs {_format_mib(needed)}" if needed > _MIN_SHARED else "NCCL needs more"
        remedy = _MORE_SHARED + ("; or lower generation.refit_bucket_mb" if needed > _MIN_SHARED else "")
        return [problem("shared memory", f"{path} has {_format_mib(free)} free, but {why}", remedy)]
    if free < _USUAL_SHARED:
        return [warning("shared memory", f"{path} has only {_format_mib(free)} free", _MORE_SHARED)]
    return [ok("shared memory", f"{path} has {_format_mib(free)} free")]


def check_limits_of_programs(config: RunConfig | None = None) -> list[Finding]:
    """Check that the system can limit the programs that the model writes, if the run has such programs."""
    if config is None or not any(stage.runs_programs for stage in config.stages.values()):
        return []
    check, remedy = "programs of the model", "docs/security.md lists what is open; run the whole job in a container"
    missing = [warning(check, remark, remedy) for remark in find_missing_limits()]
    return missing or [ok(check, "all limits can be set")]


def _format_mib(size: float) -> str:
    return f"{size / (1 << 20):,.0f} MiB" if size < 10 << 30 else f"{size / (1 << 30):,.0f} GiB"


def check_ports(config: RunConfig | None = None, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check that the ports on which ranks and servers of this node will listen are free.

    MASTER_PORT is checked only if no launcher has started this process, because a launcher already uses the port.
    """
    findings, checked = [], []
    port = environment.get("MASTER_PORT")
    if port is not None and "RANK" not in environment:
        if not port.isdigit() or not 0 < int(port) < 1 << 16:
            return [problem("ports", f"MASTER_PORT={port} is not a port", "set a number from 1 to 65535")]
        checked.append(int(port))
        obstacle = _find_obstacle(environment.get("MASTER_ADDR", "localhost"), int(port))
        if obstacle is not None:
            remedy = "set another MASTER_PORT, the same on all nodes, or end the process that uses it (ss -ltnp)"
            findings.append(problem("ports", f"MASTER_PORT={port} cannot be used: {obstacle}", remedy))
    for section in _list_server_sections(config):
        for number in range(section.port, section.port + section.num_servers) if section.port else ():
            checked.append(number)
            obstacle = _find_obstacle(section.host, number)
            if obstacle is not None:
                message = f"{section.key}.port={section.port}: a server cannot listen at port {number}: {obstacle}"
                findings.append(problem("ports", message, f"set {section.key}.port=null, which takes a free port"))
    message = f"free: {', '.join(map(str, checked))}" if checked else "no port is fixed; free ports are chosen"
    return findings or [ok("ports", message)]


def _list_server_sections(config: RunConfig | None) -> list[ServersConfig]:
    """Return the different settings of the servers that the run starts."""
    sections: list[ServersConfig] = []
    for stage in () if config is None else config.stages.values():
        section = getattr(stage.generation, stage.generation.engine, None)
        if stage.scores_completions and isinstance(section, ServersConfig) and not section.urls:
            sections += [section] if section not in sections else []
    return sections


def _find_obstacle(host: str, port: int) -> str | None:
    """Return why this node cannot listen at an address, or None if it can. Another node's address counts as free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        return f"{host} cannot be resolved ({error.strerror})"
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            return None if error.errno == errno.EADDRNOTAVAIL else (error.strerror or str(error)).lower()
    return None
