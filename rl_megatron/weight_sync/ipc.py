"""Memory that another process on the same machine can open: anonymous shared memory on the CPU, CUDA IPC on a GPU.

On the CPU the memory is a file without a name (`memfd_create`), which is opened through /proc. It needs no space in
/dev/shm, whose size containers limit. It is freed with the last process that has it open, however that process ends.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from rl_megatron.weight_sync.plan import WeightsRefused

_WORD = torch.int64.itemsize
_DEVICE_ARGUMENT = 6  # the position of the sender's device number among the arguments of rebuild_cuda_tensor


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


class SharedBuffer:
    """A buffer that other processes can open. It owns the memory.

    Attributes:
        words: [num_words] int64, the memory.
    """

    def __init__(self, num_words: int, device: torch.device):
        """Allocate the buffer on `device`.

        Raises:
            RuntimeError: The device is a CPU, and the system is not Linux.
        """
        self._file: int | None = None
        if device.type == "cuda":
            self.words = torch.empty(num_words, dtype=torch.int64, device=device)
            return
        if not hasattr(os, "memfd_create"):
            raise RuntimeError("weights can be sent through shared memory only on Linux; use the collective instead")
        self._file = os.memfd_create("rl_megatron_weights")
        os.ftruncate(self._file, num_words * _WORD)
        self.words = torch.frombuffer(mmap.mmap(self._file, num_words * _WORD), dtype=torch.int64)

    def handle(self, bucket_index: int, num_words: int) -> WeightHandle:
        """Return a handle to the first `num_words` words. A reader gets their values when it opens the handle."""
        if self._file is not None:
            return WeightHandle(bucket_index, num_words, path=f"/proc/{os.getpid()}/fd/{self._file}")
        torch.cuda.current_stream(self.words.device).synchronize()  # writes are done before the buffer is read
        _, arguments = reduce_tensor(self.words)
        return WeightHandle(bucket_index, num_words, cuda=arguments, device_uuid=device_key(self.words.device))

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
def opened(handle: WeightHandle) -> Iterator[Tensor]:
    """Open the sender's memory [num_words] int64 for reading. No reference to it may outlive the block.

    Raises:
        WeightsRefused: The sender has ended, or runs on another machine.
    """
    words = _opened_on_cpu(handle) if handle.cuda is None else _opened_on_gpu(handle, handle.cuda)
    try:
        yield words[: handle.num_words]
        if words.is_cuda:
            torch.cuda.current_stream(words.device).synchronize()  # copies out of it are done
    finally:
        del words


def _opened_on_cpu(handle: WeightHandle) -> Tensor:
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


def _opened_on_gpu(handle: WeightHandle, cuda: tuple[Any, ...]) -> Tensor:
    """Return the memory on the sender's GPU.

    The GPU is found by its uuid, because CUDA_VISIBLE_DEVICES may differ between processes.
    """
    here = [i for i in range(torch.cuda.device_count()) if device_key(torch.device("cuda", i)) == handle.device_uuid]
    if not here:
        raise WeightsRefused(
            f"bucket {handle.bucket_index} is on GPU {handle.device_uuid}, which is not visible to this process"
        )
    arguments = list(cuda)
    arguments[_DEVICE_ARGUMENT] = here[0]
    return rebuild_cuda_tensor(*arguments)


def device_key(device: torch.device) -> str:
    """Return a GPU's uuid, which is the same in every process, or "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
