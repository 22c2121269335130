"""`NcclGroup`: an NCCL communicator with processes that do not use torch's process groups, such as vLLM's workers.

torch's process group exchanges NCCL's unique id through a store of its own. vLLM's stock backend takes the id in a
request instead, so this module calls the NCCL library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rl_megatron.weight_sync.process_group import CollectiveFailed

_UNIQUE_ID_BYTES = 128
_UINT8, _FLOAT32, _SUM = 1, 7, 0  # NCCL's numbers
_POLL_SECONDS = 0.0005


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _UNIQUE_ID_BYTES)]


def _library() -> ctypes.CDLL:
    """Return NCCL, with the types of the functions that are used.

    Raises:
        CollectiveFailed: torch has loaded no NCCL.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise CollectiveFailed(f"generation.refit=nccl needs NCCL, which a CUDA build of torch has: {error}") from error
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), ctypes.c_int, _UniqueId, ctypes.c_int]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def new_unique_id() -> bytes:
    """Return an id that names a communicator which processes are about to join.

    Raises:
        CollectiveFailed: There is no NCCL.
    """
    library, unique_id = _library(), _UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(unique_id)


class NcclGroup:
    """A communicator of which this process is rank 0. It owns the communicator and a stream."""

    def __init__(self, unique_id: bytes, world_size: int, device: torch.device, timeout_seconds: float):
        """Start to join in a thread; the other ranks have to join at the same time.

        Args:
            unique_id: The result of `new_unique_id`.
            world_size: The number of processes.
            device: The GPU of this process.
            timeout_seconds: The longest time for joining, and for each broadcast.
        """
        self._device, self._timeout = device, timeout_seconds
        self._library, self._stream = _library(), torch.cuda.Stream(device)
        self._communicator = ctypes.c_void_p()
        self._error: CollectiveFailed | None = None
        self._thread = threading.Thread(target=self._join, args=(unique_id, world_size), daemon=True)
        self._thread.start()

    def joined(self, gave_up: Callable[[], bool]) -> None:
        """Wait until all processes have joined.

        Args:
            gave_up: Whether a process is known not to join any more.

        Raises:
            CollectiveFailed: Not all processes joined.
        """
        deadline = time.monotonic() + self._timeout
        while self._thread.is_alive():
            self._thread.join(0.1)
            if gave_up() or time.monotonic() > deadline:
                raise CollectiveFailed("not all processes joined the NCCL communicator")
        if self._error is not None:
            raise self._error

    def broadcast(self, tensor: Tensor, gave_up: Callable[[], bool]) -> None:
        """Send a tensor to all other ranks, and wait until it is sent.

        Args:
            tensor: A contiguous tensor on the group's GPU.
            gave_up: Whether a process is known not to receive any more.

        Raises:
            CollectiveFailed: A rank did not receive it.
        """
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            memory, stream = tensor.data_ptr(), self._stream.cuda_stream
            arguments = (memory, memory, tensor.nbytes, _UINT8, 0, self._communicator, stream)
            _check(self._library, self._library.ncclBroadcast(*arguments))
        self._wait(gave_up)

    def close(self) -> None:
        """Leave. Broadcasts that were started fail on all ranks."""
        if self._communicator:
            self._library.ncclCommAbort(self._communicator)
            self._communicator = ctypes.c_void_p()

    def _join(self, unique_id: bytes, world_size: int) -> None:
        try:
            with torch.cuda.device(self._device):
                own = _UniqueId.from_buffer_copy(unique_id)
                joining = self._library.ncclCommInitRank(ctypes.byref(self._communicator), world_size, own, 0)
                _check(self._library, joining)
                # vLLM's workers sum one number as soon as they have joined, and wait for all ranks to do so.
                number = torch.zeros(1, device=self._device)
                torch.cuda.current_stream().synchronize()
                memory, stream = number.data_ptr(), self._stream.cuda_stream
                arguments = (memory, memory, 1, _FLOAT32, _SUM, self._communicator, stream)
                _check(self._library, self._library.ncclAllReduce(*arguments))
                self._stream.synchronize()
        except CollectiveFailed as error:
            self._error = error

    def _wait(self, gave_up: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._stream.query():
            if gave_up() or time.monotonic() > deadline:
                self.close()
                raise CollectiveFailed(f"a broadcast over NCCL was not received within {self._timeout:g} s")
            time.sleep(_POLL_SECONDS)


def _check(library: ctypes.CDLL, status: int) -> None:
    if status != 0:
        raise CollectiveFailed(f"NCCL: {library.ncclGetErrorString(status).decode()}")
