"""The most memory that this process had in use since the last look: of the GPU, or of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK = "VmHWM:"  # the largest resident set, in KiB
_RESET_PEAK = "5"  # what sets it to the present one


class PeakMemory(Protocol):
    """A meter of memory."""

    def peak_and_reset(self) -> int | None:
        """Return the largest number of bytes since the last call, or None if it is not known."""
        ...


class DevicePeak:
    """The memory of tensors on this process's GPU, as torch's allocator counts it."""

    def peak_and_reset(self) -> int | None:
        """Return the largest number of bytes since the last call."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak


class HostPeak:
    """The resident set of this process, which Linux counts."""

    def peak_and_reset(self) -> int | None:
        """Return the largest number of bytes since the last call, or None if the system does not tell it."""
        try:
            status = _STATUS.read_text()
            _RESET.write_text(_RESET_PEAK)
        except OSError:
            return None
        line = next((line for line in status.splitlines() if line.startswith(_PEAK)), None)
        return None if line is None else 1024 * int(line.split()[1])
