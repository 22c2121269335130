"""Choose the device that this rank computes on, and join the process group: NCCL on a GPU, gloo on the CPU."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.topology.cuda_on_cpu import is_redirected, redirect_cuda_to_cpu
from rl_megatron.topology.job_store import TIMEOUT_MINUTES, is_on_one_node, open_job_store
from rl_megatron.topology.torch_optimizers import use_torch_optimizers

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

LOOPBACK = "127.0.0.1"


def start_device(name: str = "auto", timeout_minutes: float = TIMEOUT_MINUTES) -> torch.device:
    """Call `join`, and return the device only."""
    return join(name, timeout_minutes)[0]


def join(name: str = "auto", timeout_minutes: float = TIMEOUT_MINUTES) -> tuple[torch.device, Store | None]:
    """Choose this rank's device, prepare megatron-core for it, and join the process group.

    The rank and the world size come from torchrun's environment variables; without them the world is one process. A
    process group that exists already is used as it is. A second call is harmless.

    Args:
        name: "auto" (a GPU if there is one), "cpu", or "cuda".
        timeout_minutes: How long a collective may wait for its peers.

    Returns:
        The device, and the store in which the ranks met, or None if the process group existed already.

    Raises:
        ConfigError: `name` is unknown, this rank's GPU does not exist, or an earlier call redirected this process to
            the CPU.
    """
    import megatron.core.optimizer as optimizers

    device = choose_device(name)
    if device.type == "cuda":
        if is_redirected():
            raise ConfigError("device=cuda: this process was started on the CPU; start a new process to use the GPU")
        torch.cuda.set_device(device)
        # On a Hopper GPU torch would choose cuDNN's attention, which builds a plan for every new shape, and packs have
        # many shapes. With `model.cudnn_attention`, layers call cuDNN's operator directly.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if optimizers.USING_PYTORCH_OPTIMIZER:
            use_torch_optimizers()
    else:
        redirect_cuda_to_cpu()
        log.silence_gpu_advice()
    _define_transformer_engine_names()
    store = None
    if not dist.is_initialized():
        share_gloo_device()
        backend, timeout = "nccl" if device.type == "cuda" else "gloo", timedelta(minutes=timeout_minutes)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            store, rank, world_size = open_job_store(timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]  # documented, not re-exported
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return device, store


def choose_device(name: str) -> torch.device:
    """Return this rank's device for "auto", "cpu" or "cuda". A rank's GPU has the number `LOCAL_RANK`."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name!r}: must be one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda: torch sees no CUDA device; use device=cpu, or install a CUDA build of torch")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    number, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= num_gpus:
        raise ConfigError(
            f"LOCAL_RANK={number} computes on cuda:{number}, but this process sees {num_gpus} GPU(s); start at most as "
            "many ranks on a machine as it has GPUs, let each rank see all GPUs, or set LOCAL_RANK=0 if each rank sees "
            "only its own GPU"
        )
    return torch.device("cuda", number)


def share_gloo_device() -> None:
    """Make all gloo groups that torch creates in this process from now on share one device.

    torch gives every group its own device, whose thread wakes up 100 times a second, and a rank has 20 to 60 groups. As
    in torch, there is one device for each network interface that GLOO_SOCKET_IFNAME names. If the variable is not set
    and all ranks are on this machine, the device listens on the loopback address only. A forked process must call this
    again, because it lacks the device's thread.
    """
    gloo: Any = ProcessGroupGloo  # torch's stub leaves its options out
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if names:
        devices = [gloo.create_device(interface=name) for name in names.split(",")]
    elif is_on_one_node():
        devices = [gloo.create_device(hostname=LOOPBACK)]
    else:
        devices = [gloo.create_default_device()]

    class OneDevice(ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **more: bool):
            options = gloo._Options()
            options._timeout, options._devices = timeout, devices
            for name, value in more.items():  # torch 2.14 passes enable_reconfigure
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneDevice


def _define_transformer_engine_names() -> None:
    """Define `te_general_gemm`, which megatron-core always reads but imports only with Transformer Engine."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
