"""Memory that another process of the machine opens by a handle: anonymous shared memory on the CPU, CUDA IPC on a GPU.

On the CPU the memory is a file without a name (`memfd_create`), reached through /proc: it takes nothing of /dev/shm,
whose size containers limit, and ceases to exist with the last process that has it open, however that one ends.
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
_DEVICE_ARGUMENT = 6  # of rebuild_cuda_tensor: the sender's device number


@dataclass(frozen=True)
class WeightHandle:
    """Where a bucket lies, to be sent to the process that reads it. `cuda`: the arguments of torch's
    `rebuild_cuda_tensor`; `path`: of shared memory on the CPU."""

    bucket_index: int
    num_words: int
    path: str | None = None
    cuda: tuple[Any, ...] | None = None
    device_uuid: str | None = None


class SharedBuffer:
    """`words` [num_words] int64 on `device`, which other processes can open."""

    def __init__(self, num_words: int, device: torch.device):
        """Raises: RuntimeError on a CPU whose system is not Linux."""
        self._file: int | None = None
        if device.type == "cuda":
            self.words = torch.empty(num_words, dtype=torch.int64, device=device)
            return
        if not hasattr(os, "memfd_create"):
            raise RuntimeError("weights are handed over in shared memory on Linux alone; use the collective instead")
        self._file = os.memfd_create("rl_megatron_weights")
        os.ftruncate(self._file, num_words * _WORD)
        self.words = torch.frombuffer(mmap.mmap(self._file, num_words * _WORD), dtype=torch.int64)

    def handle(self, bucket_index: int, num_words: int) -> WeightHandle:
        """For the first `num_words`, whatever is in them when it is opened."""
        if self._file is not None:
            return WeightHandle(bucket_index, num_words, path=f"/proc/{os.getpid()}/fd/{self._file}")
        torch.cuda.current_stream(self.words.device).synchronize()  # what was written is there before it is read
        _, arguments = reduce_tensor(self.words)
        return WeightHandle(bucket_index, num_words, cuda=arguments, device_uuid=device_key(self.words.device))

    def close(self) -> None:
        """Gives the memory back once no reader has it open any more."""
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
    """[num_words] int64: the sender's memory, to be read and let go before the block ends.

    Raises: WeightsRefused where the sender has gone, or is on another machine.
    """
    words = _opened_on_gpu(handle) if handle.cuda is not None else _opened_on_cpu(handle)
    try:
        yield words[: handle.num_words]
        if words.is_cuda:
            torch.cuda.current_stream(words.device).synchronize()  # copies out of it are done
    finally:
        del words


def _opened_on_cpu(handle: WeightHandle) -> Tensor:
    try:
        file = os.open(handle.path, os.O_RDONLY)
    except OSError as error:
        raise WeightsRefused(
            f"bucket {handle.bucket_index} cannot be opened at {handle.path} ({error.strerror}): the policy's process "
            "ended, or released it, or runs on another machine or as another user"
        ) from error
    try:
        # Private and writable only because torch has no read-only tensors: nothing is ever written to it.
        return torch.frombuffer(
            mmap.mmap(file, handle.num_words * _WORD, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE),
            dtype=torch.int64,
        )
    finally:
        os.close(file)


def _opened_on_gpu(handle: WeightHandle) -> Tensor:
    """The sender's device has a number of its own here: CUDA_VISIBLE_DEVICES may differ between processes."""
    here = [i for i in range(torch.cuda.device_count()) if device_key(torch.device("cuda", i)) == handle.device_uuid]
    if not here:
        raise WeightsRefused(
            f"bucket {handle.bucket_index} lies on GPU {handle.device_uuid}, which is not visible here"
        )
    arguments = list(handle.cuda)
    arguments[_DEVICE_ARGUMENT] = here[0]
    return rebuild_cuda_tensor(*arguments)


def device_key(device: torch.device) -> str:
    """A GPU's uuid, the same in every process; "cpu"."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"
