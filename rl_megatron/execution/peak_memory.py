"""The most memory that this process had in use since the last look: of the GPU, or of the host."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import BinaryIO, Protocol

import torch

_RESET = "/proc/self/clear_refs"
_RESET_PEAK = b"5"  # sets the largest resident set to the present one


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
    """The resident set of this process, which Linux counts. It owns the file that resets it."""

    def __init__(self) -> None:
        self._reset: BinaryIO | None = None
        with suppress(OSError):  # another system, or a container that does not allow it
            self._reset = open(_RESET, "wb", buffering=0)  # it stays open, because opening takes longer

    def peak_and_reset(self) -> int | None:
        """Return the largest number of bytes since the last call, or None if the system does not tell it."""
        if self._reset is None:
            return None
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            self._reset.write(_RESET_PEAK)
        except OSError:
            self._reset = None
        return peak
