"""The `Ledger`, which counts what a rank does on fake GPUs: memory, operators, collectives and waits, by location."""

from __future__ import annotations

import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rl_megatron.plan import fake_cuda
from rl_megatron.plan.measured import CATEGORIES, Count, Live, Measured, thin_timeline
from rl_megatron.plan.phases import GroupName, PhaseName
from rl_megatron.topology import transfer
from rl_megatron.topology.topology import Topology

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten = torch.ops.aten
_GROUPS: dict[str, GroupName] = {
    "tp": "tensor", "cp": "context", "pp": "pipeline", "embd": "pipeline", "pos_embd": "pipeline", "dp": "data",
    "dp_cp": "data", "expt_dp": "data", "ep": "expert", "tp_ep": "expert", "expt_tp": "expert", "tp_cp": "context",
    "tp_dp_cp": "data", "mp": "tensor", "tp_ep_pp": "expert", "intra_dp_cp": "data", "intra_expt_dp": "data",
}  # fmt: skip
_TORCH = str(Path(torch.__file__).parent)
_FAKE_CUDA = str(Path(fake_cuda.__file__).parent)
_SKIPPED_FILES = (_FAKE_CUDA, transfer.__file__, __file__, "<")  # an operator called there counts at its caller's line
# Operators that allocate or rename memory, and launch nothing.
_NO_KERNELS = {
    f"aten::{name}"
    for name in ("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach")
}

# Operators of attention, and how many operands come before the query.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention: 0,
    aten._scaled_dot_product_efficient_attention: 0,
    aten._scaled_dot_product_cudnn_attention: 0,
    aten._scaled_dot_product_flash_attention_backward: 1,
    aten._scaled_dot_product_efficient_attention_backward: 1,
    aten._scaled_dot_product_cudnn_attention_backward: 1,
}


class Ledger(fake_cuda.Observer):
    """The counts of one rank, phase by phase.

    Attributes:
        logits_width: The size of the last dimension of logits, or None if no tensor counts as logits.
        held: Live bytes on the device by the location (file and line) that allocated them.
        held_at_peak: `held` at the peak of the current phase; recorded only with `keeps_locations`, because it takes
            time.
    """

    def __init__(self, keeps_locations: bool = False) -> None:
        self.logits_width: int | None = None
        self.held: Counter[str] = Counter()
        self._keeps_locations = keeps_locations
        self._live = [0] * len(CATEGORIES)
        self._now = self._host_now = 0
        self._allocations: dict[int, _Allocation] = {}
        self._group_names: dict[str, GroupName] = {}
        self._pipeline = 1
        self._launches: dict[OpOverload, bool] = {}
        self._begin()

    def _begin(self) -> None:
        self._peaks: dict[str, Live] = {"before": tuple(self._live)}
        self._peak_of: dict[str, int] = {}
        self._peak, self.held_at_peak = self._now, Counter(self.held)
        self._start_bytes = self._now
        self._host_peak = self._host_now
        self._counts: Counter[Count] = Counter()
        self._kernels = 0
        self._timeline: list[tuple[int, int]] = [(0, self._now)]

    def begin_topology(self, topology: Topology) -> None:
        """Record the names of the process groups."""
        self._pipeline = topology.pipeline
        for name, group in vars(topology.groups).items():
            if isinstance(group, dist.ProcessGroup) and name in _GROUPS:
                self._group_names.setdefault(group.group_name, _GROUPS[name])

    def label(self, tensors: Iterable[Tensor | None], category: str) -> None:
        """Count the memory of existing tensors as `category` from now on."""
        index = CATEGORIES.index(category)
        for tensor in tensors:
            allocation = None if tensor is None else self._allocations.get(tensor.untyped_storage()._cdata)
            if allocation is not None and allocation.on_device:
                self._live[allocation.category] -= allocation.num_bytes
                self._live[index] += allocation.num_bytes
                allocation.category = index

    @contextmanager
    def phase(self, name: PhaseName) -> Iterator[list[Measured]]:
        """Count the block of a `with` statement as a phase, and append its use to the yielded list at the end.

        In "build", memory counts under the label that it has at the end, and memory freed before counts as activations.
        """
        self._begin()
        result: list[Measured] = []
        yield result
        if name == "build":
            self._peaks = _relabel(self._peaks, tuple(self._live))
        counts = {**self._counts, ("kernels",): float(self._kernels)}
        timeline = thin_timeline(self._timeline)
        result.append(
            Measured(name, counts, dict(self._peaks), self._start_bytes, self._now, self._host_peak, timeline)
        )

    # --- what `FakeCuda` reports ---

    def on_allocation(
        self, storage: torch.UntypedStorage, tensor: Tensor, on_device: bool, operator: OpOverload | None
    ) -> None:
        """Count new memory."""
        key = storage._cdata
        if key in self._allocations:
            self.on_resize(storage)  # an operator may have made the memory of an output larger
            return
        location = _locate_call() if on_device and storage.nbytes() else ""
        self._allocations[key] = _Allocation(0, self._choose_category(tensor, location, operator), location, on_device)
        weakref.finalize(storage, self._on_free, key)
        self.on_resize(storage)

    def on_resize(self, storage: torch.UntypedStorage) -> None:
        """Count the memory of a storage at its present size."""
        allocation = self._allocations.get(storage._cdata)
        if allocation is not None:
            self._change(allocation, storage.nbytes())

    def _on_free(self, key: int) -> None:
        self._change(self._allocations.pop(key), 0)

    def _change(self, allocation: _Allocation, num_bytes: int) -> None:
        """Set the size of an allocation, and record the live bytes if they reach a new peak."""
        change, allocation.num_bytes = num_bytes - allocation.num_bytes, num_bytes
        if not allocation.on_device:
            self._host_now += change
            self._host_peak = max(self._host_peak, self._host_now)
            return
        location = allocation.location
        self._live[allocation.category] += change
        self.held[location] += change
        self._now += change
        if change > 0 and self._now > self._peak_of.get(location, 0):
            self._peak_of[location], self._peaks[location] = self._now, tuple(self._live)
        if self._now > self._peak:
            self._peak = self._now
            if self._keeps_locations:
                self.held_at_peak = Counter(self.held)

    def _choose_category(self, tensor: Tensor, location: str, operator: OpOverload | None) -> int:
        category = "activations"
        is_upload = operator is aten._to_copy.default and location.startswith("rl_megatron/")
        if self.logits_width is not None and tensor.dim() > 1 and tensor.size(-1) == self.logits_width:
            category = "logits"
        elif location.startswith("rl_megatron/generation/slot_cache.py") and operator is aten.new_zeros.default:
            category = "kv_cache"
        elif location.startswith("rl_megatron/weight_sync/") or (is_upload and "/model/" not in location):
            category = "buffers"
        return CATEGORIES.index(category)

    def on_launch(self, operator: OpOverload, args: tuple, kwargs: dict, result: object) -> None:
        """Count an operator."""
        formula = flop_registry.get(operator._overloadpacket)
        if formula is not None:
            # Formulas take neither an output nor its dtype.
            operands = [arg for arg in args if not isinstance(arg, torch.dtype)]
            before_query = _ATTENTION.get(operator._overloadpacket)
            if before_query is not None:
                operands = _with_all_heads(operands, before_query)
            options = {name: value for name, value in kwargs.items() if name != "out"}
            self._counts["flops",] += formula(*operands, **options, out_val=result)
        if not self._launches_kernel(operator):
            return
        self._kernels += 1
        self._counts["memory_bytes",] += sum(
            min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            for x in tree_leaves((args, kwargs, result))
            if isinstance(x, Tensor)
        )
        if self._timeline[-1][1] != self._now:
            self._timeline.append((self._kernels, self._now))

    def _launches_kernel(self, operator: OpOverload) -> bool:
        if operator not in self._launches:
            aliases = [argument.alias_info for argument in operator._schema.arguments]
            is_view = any(alias is not None and not alias.is_write for alias in aliases)
            self._launches[operator] = not is_view and operator.name() not in _NO_KERNELS
        return self._launches[operator]

    def on_wait(self, reason: str) -> None:
        self._counts["sync", _locate_call()] += 1

    def on_communication(self, kind: str, group: dist.ProcessGroup, num_bytes: int) -> None:
        """Count a collective."""
        if group.size() > 1:
            name, size = self._group_names.get(group.group_name, "world"), group.size()
            if kind in ("send", "recv") and name == "world":
                # With two pipeline stages, megatron-core sends in one direction over the group of all ranks.
                name, size = "pipeline", self._pipeline
            key = (kind, name, size, _locate_call())
            self._counts["calls", *key] += 1
            self._counts["bytes", *key] += num_bytes


def _with_all_heads(operands: list[Any], before_query: int) -> list[object]:
    """Return the operands, with query, keys and values as shapes that all have the query's number of heads.

    The kernels repeat the heads of keys and values, which the formulas of torch up to 2.12 ignore.
    """
    query, *keys = (operand.shape for operand in operands[before_query : before_query + 3])
    shapes = [query, *((batch, query[1], length, size) for batch, _, length, size in keys)]
    return [*operands[:before_query], *shapes, *operands[before_query + 3 :]]


class _Allocation:
    """The memory of one storage."""

    __slots__ = ("category", "num_bytes", "on_device", "location")

    def __init__(self, num_bytes: int, category: int, location: str, on_device: bool):
        self.num_bytes, self.category, self.location, self.on_device = num_bytes, category, location, on_device


def _relabel(peaks: dict[str, Live], end: Live) -> dict[str, Live]:
    """Return `end`, and all peaks above it with its categories; memory freed after a peak counts as activations."""
    index = CATEGORIES.index("activations")
    above = {location: sum(live) - sum(end) for location, live in peaks.items() if sum(live) > sum(end)}
    higher = {location: (*end[:index], end[index] + more, *end[index + 1 :]) for location, more in above.items()}
    return {"end": end, **higher}


def _locate_call() -> str:
    """Return "file:line" of the innermost call outside torch, fake CUDA and the ledger."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, *_SKIPPED_FILES)):
            return f"{short_name(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch's backward pass:0"


def locate_error(error: BaseException) -> str:
    """Return "file:line" of the innermost call in an error's traceback, chosen as in `_locate_call`."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    callers = [frame for frame in frames if not frame[0].startswith((_TORCH, *_SKIPPED_FILES))]
    name, line = (callers or frames)[-1]
    return f"{short_name(name)}:{line}"


def short_name(path: str) -> str:
    """Shorten a path in rl_megatron or megatron-core to start at the package; return other paths whole."""
    for package in ("megatron/core/", "rl_megatron/"):
        if package in path:
            return package + path.rpartition(package)[2]
    return path
