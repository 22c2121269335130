"""Memory that another process on the same machine can open: anonymous shared memory on the CPU, CUDA IPC on a GPU.

On the CPU the memory is a file without a name (`memfd_create`), which is opened through /proc. It needs no space in
/dev/shm, whose size containers limit. It is freed once no process has it open, even if processes are killed.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rl_megatron.config.errors import ConfigError
from rl_megatron.weight_sync.buckets import WeightsRefused

_WORD = torch.int64.itemsize
_DEVICE_ARGUMENT = 6  # the position of the sender's device number among the arguments of rebuild_cuda_tensor
_PIDFD_GETFD = 438  # the number of the system call on all of Linux's usual architectures
# This program tries, on an ordinary file, the system call with which engines open memory in expandable segments.
_GET_FILE = """
import ctypes, os, sys
call, process, file = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(0 if libc.syscall(call, os.pidfd_open(process), file, 0) >= 0 else os.strerror(ctypes.get_errno()))
"""


def check_gpu_memory_can_be_shared(refit: str) -> None:
    """Raise ConfigError if other processes cannot open this process's GPU memory, as `generation.refit=refit` needs.

    With expandable segments, engines open the memory with the system call pidfd_getfd, which containers often forbid.
    Without this check, the engine would fail only at the first weight sync.
    """
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" not in os.environ.get(variable, "").lower().replace(" ", ""):
            continue
        with open(os.devnull) as file:
            command = [sys.executable, "-S", "-c", _GET_FILE, str(_PIDFD_GETFD), str(os.getpid()), str(file.fileno())]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            reason = done.stderr.strip().splitlines()[-1:] or ["it failed"]
            raise ConfigError(
                f"generation.refit={refit}: {variable} has expandable_segments:True, so engines must open the policy's "
                f"GPU memory with the system call pidfd_getfd, which fails here ({reason[0]}); leave "
                "expandable_segments out, or set generation.refit=collective, for which engines need their own GPUs"
            )


@dataclass(frozen=True)
class WeightHandle:
    """The address of a bucket in shared memory, for the process that reads it.

    Attributes:
        bucket_index: The number of the bucket in the plan.
        num_words: The size of the bucket in 64-bit words.
        path: On the CPU, the path of the shared memory.
        cuda: On a GPU, the arguments of torch's `rebuild_cuda_tensor`.
        device_uuid: On a GPU, the uuid of the sender's GPU.
    """

    bucket_index: int
    num_words: int
    path: str | None = None
    cuda: tuple[Any, ...] | None = None
    device_uuid: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return the handle for the JSON body of an HTTP request."""
        fields = {"bucket_index": self.bucket_index, "num_words": self.num_words, "path": self.path}
        cuda = None if self.cuda is None else [_to_json(argument) for argument in self.cuda]
        return fields | {"cuda": cuda, "device_uuid": self.device_uuid}

    @staticmethod
    def from_json(handle: dict[str, Any]) -> WeightHandle:
        cuda = handle["cuda"] and tuple(_from_json(argument) for argument in handle["cuda"])
        return WeightHandle(handle["bucket_index"], handle["num_words"], handle["path"], cuda, handle["device_uuid"])


# The arguments of rebuild_cuda_tensor are numbers, bytes, sizes, and these objects (all buffers are int64).
_OBJECTS: dict[str, type | torch.dtype] = {
    "Tensor": Tensor,
    "UntypedStorage": torch.UntypedStorage,
    "TypedStorage": torch.storage.TypedStorage,
    "int64": torch.int64,
}


def _to_json(argument: object) -> object:
    if isinstance(argument, bytes):
        return {"bytes": argument.hex()}
    if isinstance(argument, tuple):  # a size or strides
        return {"tuple": list(argument)}
    for name, value in _OBJECTS.items():
        if argument is value:
            return {"object": name}
    return argument


def _from_json(argument: object) -> object:
    if not isinstance(argument, dict):
        return argument
    ((kind, value),) = argument.items()
    return bytes.fromhex(value) if kind == "bytes" else tuple(value) if kind == "tuple" else _OBJECTS[value]


class SharedBuffer:
    """A buffer that other processes can open. It owns the memory.

    Attributes:
        words: [num_words] int64, the memory.
    """

    def __init__(self, num_words: int, device: torch.device):
        """Allocate the buffer on `device`. On a CPU, the system must be Linux."""
        self._file: int | None = None
        if device.type == "cuda":
            self.words = torch.empty(num_words, dtype=torch.int64, device=device)
            return
        if not hasattr(os, "memfd_create"):
            raise RuntimeError("weights can be sent through shared memory only on Linux; use the collective instead")
        self._file = os.memfd_create("rl_megatron_weights")
        os.ftruncate(self._file, num_words * _WORD)
        self.words = torch.frombuffer(mmap.mmap(self._file, num_words * _WORD), dtype=torch.int64)

    def make_handle(self, bucket_index: int, num_words: int) -> WeightHandle:
        """Return a handle to the first `num_words` words. A reader sees the values at the time when it reads them."""
        if self._file is not None:
            return WeightHandle(bucket_index, num_words, path=f"/proc/{os.getpid()}/fd/{self._file}")
        torch.cuda.current_stream(self.words.device).synchronize()  # finish writes before others read
        _, arguments = reduce_tensor(self.words)
        return WeightHandle(bucket_index, num_words, cuda=arguments, device_uuid=get_device_key(self.words.device))

    def close(self) -> None:
        """Release the memory. It is freed once no reader has it open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        elif self.words.is_cuda:
            device, self.words = self.words.device, torch.empty(0, dtype=torch.int64)
            with torch.cuda.device(device):
                torch.cuda.ipc_collect()
                torch.cuda.empty_cache()
        self.words = torch.empty(0, dtype=torch.int64)


@contextmanager
def open_handle(handle: WeightHandle) -> Iterator[Tensor]:
    """Open the sender's memory [num_words] int64 for reading. No reference to the memory may outlive the block.

    Raises:
        WeightsRefused: The memory cannot be opened, for example because the sender has ended.
    """
    words = _open_on_cpu(handle) if handle.cuda is None else _open_on_gpu(handle, handle.cuda)
    try:
        yield words[: handle.num_words]
        if words.is_cuda:
            torch.cuda.current_stream(words.device).synchronize()  # complete the copies out of the memory
    finally:
        del words


def _open_on_cpu(handle: WeightHandle) -> Tensor:
    assert handle.path is not None  # every handle has a path or CUDA arguments
    try:
        file = os.open(handle.path, os.O_RDONLY)
    except OSError as error:
        raise WeightsRefused(
            f"bucket {handle.bucket_index} cannot be opened at {handle.path} ({error.strerror}): the policy's process "
            "has ended, has released it, or runs on another machine or as another user"
        ) from error
    try:
        # The mapping is private and writable only because torch has no read-only tensors. Nothing is written to it.
        return torch.frombuffer(
            mmap.mmap(file, handle.num_words * _WORD, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE),
            dtype=torch.int64,
        )
    finally:
        os.close(file)


def _open_on_gpu(handle: WeightHandle, cuda: tuple[object, ...]) -> Tensor:
    """Open the memory on the GPU that has the handle's uuid, because GPU numbers may differ between processes."""
    here = [
        i for i in range(torch.cuda.device_count()) if get_device_key(torch.device("cuda", i)) == handle.device_uuid
    ]
    if not here:
        raise WeightsRefused(
            f"bucket {handle.bucket_index} is on GPU {handle.device_uuid}, which is not visible to this process"
        )
    arguments = list(cuda)
    arguments[_DEVICE_ARGUMENT] = here[0]
    return rebuild_cuda_tensor(*arguments)


def get_device_key(device: torch.device) -> str:
    """Return a GPU's uuid, which is the same in every process, or "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
