"""The mode for operators on tensors without data: it replaces those that need data or peers, and reports every call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_megatron.plan.fake_cuda.sides import CPU, META, Sides, names_cuda

if TYPE_CHECKING:
    from torch._ops import OpOverload

aten = torch.ops.aten
_REAL_COPY_BYTES = 1 << 26  # larger tensors have no data, even after a copy to the host

_READS = {aten._local_scalar_dense.default}
_DEPENDS_ON_DATA = {
    aten.nonzero.default, aten.masked_select.default, aten.unique_consecutive.default, aten._unique2.default,
    aten.unique_dim.default,
}  # fmt: skip
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Operators(TorchDispatchMode):
    """A mode that runs operators on tensors without data, and replaces those that need data or peers."""

    def __init__(self, sides: Sides):
        super().__init__()
        self._sides = sides

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None) -> object:
        """Run one operator."""
        kwargs, observer = kwargs or {}, self._sides.observer
        if func.namespace == "c10d":
            return self._communicate(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if names_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": META}
            fake = [x for x in tensors if x.is_meta]
            if not fake and kwargs.get("device") != META:
                result = func(*args, **kwargs)
                self._report_host_memory(result)
                return result
            on_host = bool(fake) and all(self._sides.is_on_host(x) for x in fake)
            if func in _READS:
                if not on_host:
                    observer.on_wait("a value is read")
                return _planned_value(fake[0].dtype)
            if func is aten._to_copy.default and kwargs.get("device") == CPU:
                if not on_host and not kwargs.get("non_blocking"):
                    observer.on_wait("values are copied to the host")
                return self._to_host(fake[0], kwargs.get("dtype") or fake[0].dtype)
            if func is aten.copy_.default and fake[0] is not args[0]:
                if not on_host and not _non_blocking(args, kwargs):
                    observer.on_wait("values are copied to the host")
                return args[0]
            if on_host:
                result = func(*args, **kwargs)
                for tensor in tree_leaves(result):
                    if isinstance(tensor, Tensor) and tensor.is_meta:
                        self._sides.put_on_host(tensor)
                return result
            if func in _DEPENDS_ON_DATA:
                raise RuntimeError(
                    f"{func.name()} returns a number of values that depends on the data, which is unknown without a GPU"
                )
            self._check_devices(func, args, kwargs, tensors)
            # torch up to 2.12 mistakes this operator's dtype argument for a factor on meta tensors. So do not run it.
            result = kwargs["out"] if func is aten.addmm.dtype_out else func(*args, **kwargs)
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    observer.on_allocation(tensor.untyped_storage(), tensor, True, func)
            observer.on_launch(func, args, kwargs, result)
            return result

    def _report_host_memory(self, result: object) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._sides.observer.on_allocation(tensor.untyped_storage(), tensor, False, None)

    def _to_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.numel() * dtype.itemsize <= _REAL_COPY_BYTES:
            result = torch.full(tensor.shape, _planned_value(tensor.dtype), dtype=dtype)
            self._report_host_memory(result)
            return result
        result = torch.empty_like(tensor, dtype=dtype)
        self._sides.put_on_host(result)
        return result

    def _check_devices(self, func: OpOverload, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        """Refuse operands on different devices, as CUDA does, and report the transfers and reads within an operator."""
        observer = self._sides.observer
        real = [x for x in tensors if not x.is_meta or self._sides.is_on_host(x)]
        if func in (aten._to_copy.default, aten.copy_.default):
            source = args[0] if func is aten._to_copy.default else args[1]
            if real and source.dim() and source.numel() and not _non_blocking(args, kwargs):
                observer.on_wait("values are copied to the device")
            return
        if func in _INDEXING:
            indices = [x for x in args[1] if x is not None]
            written = args[2] if len(args) > 2 else None
            fills = written is not None and written.numel() == 1  # CUDA then fills masked entries without counting them
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not fills:
                observer.on_wait(f"{func.name()} with a mask needs to know how many entries it has")
            if any(not x.is_meta for x in indices):
                observer.on_wait("indices are copied to the device")
            real = [x for x in real if all(x is not index for index in indices)]
        if any(x.dim() for x in real) and any(x.is_meta for x in tensors):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (in "
                f"{func.name()})"
            )

    def _communicate(self, func: OpOverload, args: tuple, kwargs: dict) -> object:
        """Report a collective, and return its result: the outputs exist already, and no peer writes to them."""
        from torch._C._distributed_c10d import FakeWork

        with torch._C.DisableTorchFunction():
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if not any(x.is_meta for x in tensors):
                return func(*args, **kwargs)
            name: str = func.name().removeprefix("c10d::").strip("_").removesuffix("_base")
            group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
            sides = [sum(x.nbytes for x in tree_leaves(arg) if isinstance(x, Tensor)) for arg in args]
            self._sides.observer.on_communication(_COLLECTIVES.get(name, name), group, max(sides))
            work = FakeWork().boxed()
            returns = func._schema.returns
            return (args[0], work) if len(returns) == 2 else work


_COLLECTIVES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce", "allgather": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather", "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter", "alltoall": "all_to_all", "recv_any_source": "recv",
}  # fmt: skip


def _non_blocking(args: tuple, kwargs: dict) -> bool:
    return bool(kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _planned_value(dtype: torch.dtype) -> bool | int | float:
    """Return what a read from the device gives: 1 for floats and True for flags, so that a step continues; else 0."""
    return 1.0 if dtype.is_floating_point else dtype == torch.bool
