"""Check that the GPUs of this machine fit torch's build and the number of ranks, and that their memory is free."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_megatron.doctor.findings import Finding, ok, problem, warning
from rl_megatron.doctor.versions import Installed

_SECONDS = 30
_CHECK = "devices"
_USED_SHARE = 0.1  # a warning follows if a larger share of a GPU's memory is in use
_CUDA_OF_DRIVER = re.compile(r"CUDA(?: UMD)? Version\s*:\s*(\d+)\.(\d+)")


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine, as `nvidia-smi` reports them.

    Attributes:
        used: The share of each GPU's memory that is in use.
        driver: The driver's version.
        cuda: The newest CUDA version that the driver supports.
        failure: Why `nvidia-smi` failed, or None if it did not fail or is not installed.
    """

    names: tuple[str, ...] = ()
    used: tuple[float, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] | None = None
    failure: str | None = field(default=None)


def read_gpus() -> Gpus:
    """Return the GPUs of this machine, without torch."""
    if shutil.which("nvidia-smi") is None:
        return Gpus()
    query = "--query-gpu=name,memory.used,memory.total,driver_version"
    try:
        answers = [
            subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
            for arguments in ([query, "--format=csv,noheader,nounits"], [])
        ]
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(failure=str(error))
    failed = next((answer for answer in answers if answer.returncode), None)
    if failed is not None:
        lines = (failed.stdout + failed.stderr).split("\n")
        return Gpus(failure=next((line.strip() for line in lines if line.strip()), f"status {failed.returncode}"))
    lines = [[cell.strip() for cell in line.split(",")] for line in answers[0].stdout.splitlines() if line.strip()]
    cuda = _CUDA_OF_DRIVER.search(answers[1].stdout)
    return Gpus(
        tuple(line[0] for line in lines),
        tuple(_compute_share(line[1], line[2]) for line in lines),
        lines[0][3] if lines else "",
        (int(cuda[1]), int(cuda[2])) if cuda else None,
    )


def _compute_share(used: str, total: str) -> float:
    """Return the share of memory in use; it is 0 for a GPU that reports "[N/A]"."""
    return float(used) / float(total) if used.isdigit() and total.isdigit() and float(total) else 0.0


def check_devices(
    gpus: Gpus, installed: Installed, device: str = "auto", environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Check that this node has the devices that its ranks need; `device` is the value of the key `device`.

    The number of ranks of this node is LOCAL_WORLD_SIZE in `environment`, or NPROC_PER_NODE if that is not set.
    """
    if device == "cpu":
        return [ok(_CHECK, "device=cpu: ranks compute on the CPU")]
    if gpus.failure is not None:
        remedy = "reboot the node, or install the driver that fits its kernel module; drain it until then"
        return [problem(_CHECK, f"nvidia-smi fails: {gpus.failure}", remedy)]
    if not gpus.names:
        if device == "cuda":
            remedy = "use device=cpu, or start the container with --gpus all"
            return [problem(_CHECK, "device=cuda, but there is no NVIDIA GPU or driver", remedy)]
        return [ok(_CHECK, f"no NVIDIA GPU: ranks compute on {os.cpu_count()} CPU cores")]
    findings = [*_check_build(gpus, installed), *_check_ranks(gpus, environment), *_check_use(gpus)]
    cuda = "" if gpus.cuda is None else f", for CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}"
    kinds = ", ".join(f"{gpus.names.count(name)} × {name}" for name in sorted(set(gpus.names)))
    return findings or [ok(_CHECK, f"{kinds}, driver {gpus.driver}{cuda}")]


def _check_build(gpus: Gpus, installed: Installed) -> list[Finding]:
    """Compare torch's CUDA version with the driver's. An older driver of the same major version is enough."""
    if installed.find_module("torch") is None:
        return []  # `check_versions` reports it
    cuda = installed.find_torch_cuda()
    if cuda is None:
        remedy = "install a CUDA build of torch, as https://pytorch.org/get-started says, or set device=cpu"
        message = f"{len(gpus.names)} GPU(s), but torch {installed.find_version('torch')} is a build for the CPU"
        return [problem(_CHECK, message, remedy)]
    if gpus.cuda is not None and gpus.cuda[0] < cuda[0]:
        return [
            problem(
                _CHECK,
                f"driver {gpus.driver} supports CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}, but torch is built for CUDA "
                f"{cuda[0]}.{cuda[1]}",
                f"update the driver, or install a build of torch for CUDA {gpus.cuda[0]}",
            )
        ]
    return []


def _check_ranks(gpus: Gpus, environment: Mapping[str, str]) -> list[Finding]:
    text = environment.get("LOCAL_WORLD_SIZE") or environment.get("NPROC_PER_NODE") or "1"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    num_gpus = len(gpus.names) if visible is None else len([name for name in visible.split(",") if name.strip()])
    if not text.isdigit() or int(text) <= num_gpus:
        return []
    note = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    return [
        problem(
            _CHECK,
            f"{text} ranks on this node, but {num_gpus} GPU(s){note}",
            "start at most as many ranks on a node as it has GPUs (NPROC_PER_NODE), or set device=cpu",
        )
    ]


def _check_use(gpus: Gpus) -> list[Finding]:
    busy = [f"GPU {index} ({share:.0%})" for index, share in enumerate(gpus.used) if share > _USED_SHARE]
    if not busy:
        return []
    remedy = "end the other processes, which nvidia-smi lists, unless they are a run of yours"
    return [warning(_CHECK, f"memory is in use on {', '.join(busy)}", remedy)]
