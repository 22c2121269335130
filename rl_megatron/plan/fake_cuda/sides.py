"""The state that the parts of `FakeCuda` share: the device of each tensor, the observer, and the tokens per expert."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from torch._ops import OpOverload

CUDA, META, CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")

_active: Sides | None = None
_T = TypeVar("_T")


class Observer:
    """The receiver of what `FakeCuda` reports. Its methods do nothing; subclasses override those they need."""

    def on_allocation(
        self, storage: torch.UntypedStorage, tensor: Tensor, on_device: bool, operator: OpOverload | None
    ) -> None:
        """Take note of a tensor that an operator returned, on the device or the host. Its storage need not be new."""

    def on_resize(self, storage: torch.UntypedStorage) -> None:
        """Take note that the size of a storage may have changed; the size is 0 while the memory is freed."""

    def on_launch(self, operator: OpOverload, args: tuple, kwargs: dict, result: object) -> None:
        """Take note of an operator on the device."""

    def on_wait(self, reason: str) -> None:
        """Take note that the host waits for the device."""

    def on_communication(self, kind: str, group: dist.ProcessGroup, num_bytes: int) -> None:
        """Take note of a collective, or of a message between pipeline stages."""


class Sides:
    """The state of an active `FakeCuda`: its observer, and which tensors without data are on the host."""

    def __init__(self, observer: Observer):
        self.observer = observer
        self.experts = BalancedExperts()
        self._on_host: set[int] = set()  # storages of tensors on the host that are too large to be real

    def find_device(self, tensor: Tensor) -> torch.device:
        """Return the device that a tensor pretends to be on. Do not read `tensor.device`, which calls this method."""
        if not is_meta(tensor):
            return CPU
        return CPU if self.is_on_host(tensor) else CUDA

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor without data counts as on the host."""
        return bool(self._on_host) and tensor.untyped_storage()._cdata in self._on_host

    def put_on_host(self, tensor: Tensor) -> None:
        """Mark a tensor without data as on the host."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._on_host:
            self._on_host.add(storage._cdata)
            weakref.finalize(storage, self._on_host.discard, storage._cdata)
            self.observer.on_allocation(storage, tensor, False, None)


def is_active() -> bool:
    """Return whether tensors on "cuda" are fake."""
    return _active is not None


def report_launch(operator: OpOverload, operands: tuple, result: _T) -> _T:
    """Report a kernel that torch does not dispatch, as a call of `operator` with `operands`, and return `result`."""
    if _active is not None:
        with torch._C.DisableTorchFunction():
            _active.observer.on_launch(operator, operands, {}, result)
    return result


def activate(sides: Sides | None) -> None:
    """Set the shared state (`Sides`) of the active `FakeCuda`; None means that no `FakeCuda` is active."""
    global _active
    _active = sides


def is_meta(tensor: Tensor) -> bool:
    """Return whether a tensor has no data, also while the modes are active."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def names_cuda(device: object) -> bool:
    """Return whether the argument `device` of a function of torch means CUDA."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class BalancedExperts:
    """The number of tokens that each expert gets if routers spread them evenly, for the dispatcher of one layer."""

    def __init__(self) -> None:
        self._dispatcher: Any = None
        self._routed = 0  # this rank's tokens times the experts per token

    def begin(self, dispatcher: MoEAlltoAllTokenDispatcher, routing_map: Tensor) -> None:
        """Take note of the layer that is running, and of its tokens."""
        self._dispatcher, self._routed = dispatcher, routing_map.size(0) * dispatcher.config.moe_router_topk

    def counts(self, tensor: Tensor) -> Tensor:
        """Return balanced counts in place of `tensor`, which the dispatcher would copy to the host.

        All ranks are assumed to have the same number of tokens.
        """
        dispatcher = self._dispatcher
        expert_tokens = torch.full((dispatcher.num_experts,), self._routed // dispatcher.num_experts)
        expert_tokens[: self._routed % dispatcher.num_experts] += 1
        mine = expert_tokens[dispatcher.local_expert_indices]
        answers = {
            "input_splits": expert_tokens.view(dispatcher.ep_size, -1).sum(1),
            "output_splits": mine.sum().expand(dispatcher.ep_size),
            "output_splits_tp": mine.sum().expand(dispatcher.tp_size) * dispatcher.ep_size,
            "tokens_per_expert": mine * (dispatcher.ep_size * dispatcher.tp_size),
            "num_global_tokens_per_local_expert": mine.expand(dispatcher.ep_size * dispatcher.tp_size, -1),
        }
        return next(answer for name, answer in answers.items() if getattr(dispatcher, name) is tensor).contiguous()
