"""Count what the phases of a step use on a real device: the peak of memory, and how often the host waits for a GPU."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.logprobs.counters import Counters
from rl_megatron.plan.ledger import short_name
from rl_megatron.plan.measured import CATEGORIES, Measured
from rl_megatron.plan.phases import PhaseName
from rl_megatron.plan.rank_phases import PhaseCounter, RankPhases
from rl_megatron.plan.workload import Workload
from rl_megatron.topology import transfer
from rl_megatron.topology.topology import Topology

WARNING = "called a synchronizing CUDA operation"  # torch's, for each wait, in its mode "warn"
_NOT_A_PLACE = (str(Path(torch.__file__).parent), warnings.__file__, transfer.__file__, __file__, "<")


class Waits:
    """How often the host waits for a GPU within the context.

    torch warns of reads, of copies that wait, and of operators whose shape depends on data. It does not warn of
    `torch.cuda.synchronize` and of waits for an event or a stream, so these are counted when they are called.

    Attributes:
        places: How often each file and line waits. A wait in a backward pass counts where the pass was started.
    """

    def __init__(self, device: torch.device):
        self.places: Counter[str] = Counter()
        self._on_gpu = device.type == "cuda"
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> Self:
        self._warnings.__enter__()
        warnings.filterwarnings("always", WARNING)  # Python shows others once for each line, or not at all
        self._show = warnings.showwarning
        warnings.showwarning = self._shown
        if self._on_gpu:
            self._mode = torch.cuda.get_sync_debug_mode()
            self._called = [(torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize")]
            self._called += [(torch.cuda.Stream, "synchronize")]
            self._functions = [vars(owner)[name] for owner, name in self._called]
            for (owner, name), function in zip(self._called, self._functions, strict=True):
                setattr(owner, name, self._counting(function))
            torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_gpu:
            torch.cuda.set_sync_debug_mode(self._mode)
            for (owner, name), function in zip(self._called, self._functions, strict=True):
                setattr(owner, name, function)
        self._warnings.__exit__(None, None, None)

    def _shown(self, message: Any, category: Any, *where: Any) -> None:
        if str(message).startswith(WARNING):
            self.places[_place()] += 1
        else:
            self._show(message, category, *where)

    def _counting(self, function: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.places[_place()] += 1
            # torch may warn of it as well.
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            try:
                return function(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        return counting


def _place() -> str:
    """Return "file:line" of the innermost call that is neither torch's nor of a module that only passes it on."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_NOT_A_PLACE):
            return f"{short_name(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch's backward pass:0"


def run_phases_on(
    layout: Topology, workload: Workload, counter: PhaseCounter, phases: Iterable[PhaseName]
) -> list[Measured]:
    """Return what "build" and these phases of a planned workload use on a device that has been started."""
    of_rank = RankPhases(workload, layout, counter)
    found = [of_rank.build(), *(getattr(of_rank, name)() for name in phases)]
    of_rank.close()
    return found


class DeviceCounter:
    """What `run_phases_on` counts with on a real device, within the context.

    A GPU's memory is what torch's allocator has given out. On the CPU it is the sum of the tensors that were
    made within the context and are alive. Memory is not told apart by its use.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._tensors = Counters()

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def __enter__(self) -> Self:
        if not self._on_gpu:
            self._tensors.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._on_gpu:
            self._tensors.__exit__(*exception)

    def label(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Do nothing."""

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[list[Measured]]:
        """Count a phase within the block. The list has what it used when the block has ended."""
        gc.collect()
        if self._on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._tensors.peak = self._tensors.live
        before, result = self._live, []
        with Waits(self._device) as waits:
            yield result
        if self._on_gpu:
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() if self._on_gpu else self._tensors.peak
        live = tuple(peak if category == "activations" else 0 for category in CATEGORIES)
        counts = {("sync", place): float(count) for place, count in waits.places.items()}
        timeline = ((0, before), (1, peak))
        result.append(Measured(name, counts, {"peak": live}, before, self._live, 0, timeline))

    @property
    def _live(self) -> int:
        return torch.cuda.memory_allocated() if self._on_gpu else self._tensors.live
