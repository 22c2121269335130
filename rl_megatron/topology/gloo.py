"""Make all gloo groups of a process share one device.

torch gives every group a device of its own, whose thread wakes up 100 times a second, and a rank has 20 to 60 groups.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, distributed_c10d

from rl_megatron.topology.job_store import is_on_one_node

LOOPBACK = "127.0.0.1"


def share_gloo_device() -> None:
    """Give every gloo group that torch makes in this process from here on one device.

    As in torch, there is one device for each of the network interfaces that GLOO_SOCKET_IFNAME names. If all ranks are
    on this machine and it is not set, no other machine reaches the device. Forks call this again, because a device's
    thread is not there in a fork.
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
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta):
            options = gloo._Options()
            options._timeout, options._devices = timeout, devices
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OneDevice
