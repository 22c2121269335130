import os
from collections import Counter
from pathlib import Path

import torch.distributed as dist

from rl_megatron.topology.device import start_device


def devices_of_groups() -> tuple[int, int]:
    """Return how many threads serve devices of gloo with one process group, and with six."""
    start_device("cpu")
    before = threads()
    for _ in range(5):
        dist.new_group([0])
    return before["gloo_tcp_loop"], threads()["gloo_tcp_loop"]


def threads() -> Counter[str]:
    return Counter(Path(task.path, "comm").read_text().strip() for task in os.scandir("/proc/self/task"))


def test_all_groups_of_a_process_share_a_device(ranks):
    [(with_one, with_six)] = ranks.run(1, devices_of_groups)
    assert with_one == with_six >= 1
