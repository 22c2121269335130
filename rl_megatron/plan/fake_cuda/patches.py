"""The functions of torch and megatron-core that `FakeCuda` replaces while it is active, with the reasons.

- Functions of `torch.cuda` ask the driver, for streams, events, generators and memory.
- `Module._apply` drops the Python attributes of parameters that change their device from "cpu" to "meta".
- For a backward pass, torch switches off the mode of functions.py, although the pass runs Python code.
- `UntypedStorage.resize_`, by which megatron-core frees gradient buffers, is not an operator, so no mode sees it.
- `new_group` would write an entry to the store for each of the thousands of groups that this rank is not in.
- megatron-core reads values that do not exist: the generator's state, and the number of tokens of each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupMember
from torch.overrides import TorchFunctionMode

from rl_megatron.plan.fake_cuda.sides import CUDA, Sides
from rl_megatron.plan.fake_cuda.stand_ins import list_stand_ins

if TYPE_CHECKING:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

_CAPABILITY = (9, 0)  # the compute capability of a Hopper GPU
_MISSING = object()


def list_replacements(sides: Sides, functions: TorchFunctionMode) -> list[tuple[object, str, object]]:
    """Return the replacements: (owner, name of the attribute, its new value)."""
    return [
        *_list_cuda_replacements(sides),
        *_list_torch_replacements(sides, functions),
        *_list_megatron_replacements(sides),
        *list_stand_ins(),
    ]


@contextmanager
def patch_attribute(owner: object, name: str, replacement: object) -> Iterator[None]:
    """Replace an attribute of a module or class within the context."""
    original = vars(owner).get(name, _MISSING)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def _list_cuda_replacements(sides: Sides) -> list[tuple[object, str, object]]:
    """Return replacements of the functions of `torch.cuda` that ask the driver."""

    class Inert:
        """A CUDA stream or event. Nothing runs, so nothing is waited for."""

        cuda_stream = 0

        def __init__(self, *args: object, **kwargs: object):
            pass

        def record_event(self, *args: object) -> Inert:
            return Inert()

        def record(self, *args: object) -> None:
            return None

        wait_stream = wait_event = wait = record

        def synchronize(self, *args: object) -> None:
            sides.observer.on_wait("a stream is waited for")

        def query(self) -> bool:
            return True

    class HostGenerator(torch.Generator):
        """A generator on the host, whatever its device. Its numbers are drawn into tensors without data."""

        def __new__(cls, device: object = "cpu") -> HostGenerator:
            return super().__new__(cls, "cpu")  # pyright: ignore[reportCallIssue]  # the stub has no device

    def synchronize(*args: object) -> None:
        sides.observer.on_wait("the device is waited for")

    def nothing() -> Callable:  # torch's compiler, which megatron-core calls, needs a different function for each name
        return lambda *args, **kwargs: None

    module = torch.cuda
    answers: dict[str, object] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": nothing(),
        "device_count": lambda: 8,
        "current_device": lambda: CUDA,
        "set_device": nothing(),
        "synchronize": synchronize,
        "empty_cache": nothing(),
        "Stream": Inert,
        "Event": Inert,
        "current_stream": lambda *args, **kwargs: Inert(),
        "default_stream": lambda *args, **kwargs: Inert(),
        "stream": lambda stream: nullcontext(),
        "device": lambda device: nullcontext(),
        "manual_seed": nothing(),
        "manual_seed_all": nothing(),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": nothing(),
        "get_device_capability": lambda *args: _CAPABILITY,
        "is_current_stream_capturing": lambda: False,
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
    }
    random = [
        (torch.cuda.random, "get_rng_state", lambda *args: torch.get_rng_state()),
        (torch.cuda.random, "set_rng_state", nothing()),
    ]
    ranges = [(torch.cuda.nvtx, name, nothing()) for name in ("range_push", "range_pop")]
    answered = [(module, name, answer) for name, answer in answers.items()]
    return [*answered, (torch, "Generator", HostGenerator), *random, *ranges]


def _list_torch_replacements(sides: Sides, functions: TorchFunctionMode) -> list[tuple[object, str, object]]:
    apply, new_group, resize = torch.nn.Module._apply, dist.new_group, torch.UntypedStorage.resize_
    run_backward = vars(torch.autograd)["_engine_run_backward"]

    def keep_marks(self: torch.nn.Module, fn: Callable, recurse: bool = True) -> torch.nn.Module:
        old = dict(self._parameters)
        result = apply(self, fn, recurse)
        for name, parameter in old.items():
            now = self._parameters[name]
            if parameter is not None and now is not None and now is not parameter:
                vars(now).update(vars(parameter))
        return result

    def own_group(ranks: list[int] | None = None, *args: Any, **kwargs: Any) -> object:
        if ranks is not None and dist.get_rank() not in ranks:
            return GroupMember.NON_GROUP_MEMBER
        kwargs.pop("backend", None)
        return new_group(ranks, *args, backend="fake", **kwargs)

    health = [
        (torch.optim.Optimizer, name, lambda self: None)
        for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check")
        if hasattr(torch.optim.Optimizer, name)
    ]

    def run_in_mode(*args: Any, **kwargs: Any) -> object:
        is_active = torch._C._len_torch_function_stack() > 0
        with nullcontext() if is_active else functions:
            return run_backward(*args, **kwargs)

    def resize_and_report(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        sides.observer.on_resize(storage)
        return result

    replaced = [
        (torch.UntypedStorage, "resize_", resize_and_report),
        (torch.nn.Module, "_apply", keep_marks),
        (dist, "new_group", own_group),
        (torch.autograd, "_engine_run_backward", run_in_mode),
    ]
    return [*replaced, *health]


def _list_megatron_replacements(sides: Sides) -> list[tuple[object, str, object]]:
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess = dispatcher.preprocess

    def note_and_preprocess(self: MoEAlltoAllTokenDispatcher, routing_map: Tensor) -> Tensor:
        sides.experts.begin(self, routing_map)
        return preprocess(self, routing_map)

    def move(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        if not torch.is_tensor(tensor):
            return tensor
        # The copy does not wait. The dispatcher waits for its stream before it reads any of the counts.
        counts = sides.experts.counts(tensor)
        return counts.numpy() if as_numpy else counts

    return [
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
        (dispatcher, "preprocess", note_and_preprocess),
        (dispatcher, "cuda_dtoh_stream", None),  # a stream that this class keeps for all layers
        (token_dispatcher, "maybe_move_tensor_to_cpu", move),
    ]
