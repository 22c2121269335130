import os

import torch.distributed as dist

from rl_megatron.topology.device import start_device


def count_loops_of_groups() -> tuple[int, int]:
    """Return how many event loops this process has with one process group of gloo, and with six."""
    start_device("cpu")
    before = count_event_loops()
    for _ in range(5):
        dist.new_group([0])
    return before, count_event_loops()


def count_event_loops() -> int:
    """Count the epoll descriptors. A device opens its own at once, while its thread gets its name some time later."""
    opened = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return sum(os.path.lexists(path) and os.readlink(path) == "anon_inode:[eventpoll]" for path in opened)


def test_all_groups_of_a_process_share_a_device(ranks):
    [(with_one, with_six)] = ranks.run(1, count_loops_of_groups)
    assert with_one == with_six >= 1
