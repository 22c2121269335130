"""A table of GPUs: the memory that processes can use, and the speeds that the makers state."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The specification of a GPU.

    Attributes:
        memory_gib: The memory that a process can use, as the driver reports it.
        bf16_tflops: The speed of dense matrix products in bf16, in 10¹² operations per second.
        fp32_tflops: The speed of matrix products in fp32 without TF32.
        link: The name of the usual link between the GPUs of a node.
    """

    name: str
    memory_gib: float
    bf16_tflops: float
    fp32_tflops: float
    memory_gb_per_s: float
    link: str

    def tflops(self, precision: str) -> float:
        """Return the speed of matrix products in a precision, in 10¹² operations per second."""
        return self.bf16_tflops if precision == "bf16" else self.fp32_tflops


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100_40", 39.4, 312, 19.5, 1555, "nvlink3"),
        Gpu("a100_80", 79.1, 312, 19.5, 2039, "nvlink3"),
        Gpu("h100", 79.1, 989, 67, 3350, "nvlink4"),
        Gpu("h200", 139.8, 989, 67, 4800, "nvlink4"),
        Gpu("h20", 95.1, 148, 44, 4000, "nvlink4"),
        Gpu("b200", 178.3, 2250, 75, 8000, "nvlink5"),
        Gpu("l40s", 44.4, 362, 91.6, 864, "pcie4"),
        Gpu("rtx_4090", 23.5, 165, 82.6, 1008, "pcie4"),
    )
}


# Word in the driver's name of a device → the GPU. Names of slower cards with this chip also match `_SLOWER`.
_PRODUCTS = {
    "A100": "a100_80",
    "H100": "h100",
    "H200": "h200",
    "H20": "h20",
    "B200": "b200",
    "L40S": "l40s",
    "RTX 4090": "rtx_4090",
}
_SLOWER = re.compile(r"\b(PCIE|NVL|MIG|LAPTOP|4090 D)\b")


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU that the driver calls `name`, such as "NVIDIA H100 80GB HBM3", or None if it is unknown.

    The PCIe card of an A100 is as fast as other A100s. PCIe cards of other GPUs are slower, and count as unknown.
    """
    words = name.upper().replace("-", " ")
    gpu = next((gpu for product, gpu in _PRODUCTS.items() if re.search(rf"\b{product}\b", words)), None)
    if gpu is None or (gpu != "a100_80" and _SLOWER.search(words)):
        return None
    return GPUS[gpu]
