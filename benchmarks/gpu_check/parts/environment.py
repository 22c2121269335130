"""What there is: packages, the GPU, and how fast it copies and multiplies."""

from __future__ import annotations

import importlib
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata

import psutil
import torch

from benchmarks.gpu_check import preload
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.runner import REPOSITORY
from benchmarks.gpu_check.setting import Setting

# Modules that the package and tests/gpu import → their distribution, if it has another name.
MODULES = {
    "beartype": "", "cloudpickle": "", "einops": "", "httpx2": "", "hydra": "hydra-core", "jaxtyping": "",
    "jinja2": "", "matplotlib": "", "megatron.core": "megatron-core", "numpy": "", "omegaconf": "", "packaging": "",
    "psutil": "", "pydantic": "", "pytest": "", "rich": "", "safetensors": "", "tensorboard": "", "tokenizers": "",
    "torch": "", "transformers": "", "yaml": "PyYAML",
}  # fmt: skip
FURTHER = ("triton", "transformer-engine", "flash-attn", "liger-kernel", "cut-cross-entropy", "trl")
COPY, PRODUCT = (2300, 4600), (500, 850)  # predictions, for an H100 or H200
_REPETITIONS = 10


def rows(tiny: bool) -> list[str]:
    size, elements = (256, "2**20") if tiny else (8192, "2**31")
    return [f"copy of {elements} bf16 numbers", f"bf16 product of {size} x {size} matrices"]


def run(setting: Setting, record: Record) -> None:
    cannot = [module for module in MODULES if not _imports(module, record)]
    record.equal("modules that cannot be imported", ", ".join(cannot) or "none", "none")
    for module, seconds in preload.SECONDS.items():
        if seconds > 1:
            record.fact(f"import of {module}", f"{seconds:.1f} s")
    for name, distribution in [*MODULES.items(), *((name, "") for name in FURTHER)]:
        version = _version(distribution or name)
        if version is not None and name not in ("pytest", "beartype"):
            record.fact(distribution or name, version)
    record.fact("python", platform.python_version())
    record.fact("commit", _output("git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD") or "unknown")
    record.fact("cores", str(len(os.sched_getaffinity(0))))
    if setting.on_gpu:
        gpu = torch.cuda.get_device_properties(0)
        record.fact("GPU", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}")
        record.fact("number of GPUs", str(torch.cuda.device_count()))
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # pyright: ignore[reportAttributeAccessIssue]
        record.fact("CUDA", f"{torch.version.cuda}, NCCL {nccl}")
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        record.fact("driver", driver.splitlines()[0] if driver else "unknown")
    record.fact("/dev/shm", f"{psutil.disk_usage('/dev/shm').free / 2**30:.0f} GiB free")
    doctor = subprocess.run([sys.executable, "-m", "rl_megatron", "doctor"], cwd=REPOSITORY).returncode
    if setting.on_gpu:
        record.equal("exit status of `rl-megatron doctor`", doctor, 0)
    names, device = rows(setting.tiny), torch.device(setting.device)
    speeds, is_same = _copy(1 << (20 if setting.tiny else 31), device)
    record.equal("a copy has the values of its source", is_same, True)
    _figure(record, names[0], speeds, "GB/s", COPY if setting.on_gpu else None)
    speeds, error = _product(256 if setting.tiny else 8192, device)
    record.at_most("error of a bf16 product, over its size", error, 2e-2)
    _figure(record, names[1], speeds, "TFLOP/s", PRODUCT if setting.on_gpu else None)


def _figure(record: Record, name: str, values: list[float], unit: str, prediction: tuple[float, float] | None) -> None:
    spread = min(values), max(values)
    record.figure(name, statistics.median(values), unit, spread=spread, prediction=prediction)


def _imports(module: str, record: Record) -> bool:
    try:
        importlib.import_module(module)
    except Exception as error:
        record.cannot([f"module {module}"], f"{type(error).__name__}: {error}")
        return False
    return True


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _copy(elements: int, device: torch.device) -> tuple[list[float], bool]:
    """Return the GB per second that copies read and write, and whether the last numbers are those of the source."""
    source = torch.randn(elements, dtype=torch.bfloat16, device=device)
    copy = torch.empty_like(source)
    seconds = _seconds(lambda: copy.copy_(source), device)
    return [2 * source.nbytes / each / 1e9 for each in seconds], torch.equal(copy[-1000:], source[-1000:])


def _product(size: int, device: torch.device) -> tuple[list[float], float]:
    """Return the TFLOP/s of products of square matrices, and the error of the first rows over their size."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    seconds = _seconds(lambda: a @ b, device)
    found, wanted = (a[:16] @ b).double(), a[:16].double() @ b.double()
    return [2 * size**3 / each / 1e12 for each in seconds], ((found - wanted).abs().max() / size**0.5).item()


def _seconds(compute: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds of each call, after two that are not timed."""
    seconds = []
    for _ in range(2 + _REPETITIONS):
        _wait(device)
        began = time.perf_counter()
        compute()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return seconds[2:]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
