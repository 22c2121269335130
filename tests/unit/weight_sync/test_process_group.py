"""A process group beside the default one: its sums, and that no process waits for ever."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from rl_megatron.config.addresses import is_loopback
from rl_megatron.weight_sync.process_group import (
    CollectiveFailed,
    StandaloneGroup,
    find_free_address,
    open_listening_socket,
)
from tests.ports import free_port

CPU = torch.device("cpu")


def two_ranks(timeout_seconds: float) -> list[StandaloneGroup]:
    """Return both groups in this process, which has no default group."""
    port, groups = free_port(), {}

    def join(rank: int) -> None:
        groups[rank] = StandaloneGroup("127.0.0.1", port, rank, 2, CPU, timeout_seconds)

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    return [groups[0], groups[1]]


def test_words_of_all_ranks_are_summed_as_integers():
    groups, largest = two_ranks(20), 2**63 - 1
    words = [torch.tensor([largest, 5, 0]), torch.tensor([1, 0, -7])]
    for work in [group.all_reduce(mine) for group, mine in zip(groups, words, strict=True)]:
        work.wait()
    assert words[0].tolist() == words[1].tolist() == [-(2**63), 5, -7]


def test_a_broadcast_is_over_when_rank_0_has_sent_it_and_not_before():
    groups = two_ranks(20)
    received, began = torch.zeros(2), time.monotonic()
    receiving = groups[1].broadcast(received)
    assert not receiving.is_over(0.1) and time.monotonic() - began >= 0.1
    sending = groups[0].broadcast(torch.tensor([3.0, 4.0]))
    assert receiving.is_over(10.0) and sending.is_over(10.0)
    receiving.wait()
    assert received.tolist() == [3, 4]


@pytest.mark.change
def test_a_peer_that_does_not_answer_raises_within_the_timeout_and_ends_the_group():
    groups, began = two_ranks(2), time.monotonic()
    with pytest.raises(CollectiveFailed, match="rank 0 of the 2 .* a peer left the group or did not answer within 2 s"):
        groups[0].all_reduce(torch.zeros(3, dtype=torch.int64)).wait()
    assert time.monotonic() - began < 15
    with pytest.raises(CollectiveFailed, match="an earlier collective failed"):
        groups[0].all_reduce(torch.zeros(3, dtype=torch.int64))


def test_a_peer_that_never_joins_raises_within_the_timeout():
    began = time.monotonic()
    with pytest.raises(CollectiveFailed, match="rank 0 of the 2 processes that meet at 127.0.0.1:.* could not join"):
        StandaloneGroup("127.0.0.1", free_port(), 0, 2, CPU, timeout_seconds=0.5)
    assert time.monotonic() - began < 10


class NcclGroup:
    """A stand-in for torch's NCCL group, which reads its settings from the environment when it is made."""

    Options: Any = SimpleNamespace

    def __init__(self, store, rank, world_size, options):
        self.settings = {name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL_")}


def test_a_dead_peer_raises_an_error_in_an_nccl_group_and_does_not_end_the_process(monkeypatch):
    """torch reads the variables by these names, and the number 0 means that its watchdog handles no error."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclGroup, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    group: Any = StandaloneGroup("127.0.0.1", free_port(), 0, 1, torch.device("cuda", 0), 5).process_group
    assert group.settings["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert group.settings["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"  # other groups of the process keep their settings
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    source = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    text = source.read_text()
    assert "NoHandling = 0," in text and all(f'"{name}"' in text for name in group.settings)


# --- the address at which rank 0 listens ---


def test_rank_0_listens_at_its_own_address_only(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with open_listening_socket("127.0.0.1", 0, 2) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    with open_listening_socket("localhost", 0, 2) as listening:
        assert listening.getsockname()[0] in ("127.0.0.1", "::1")


def test_rank_0_listens_everywhere_if_other_nodes_reach_it_by_another_address(monkeypatch):
    with open_listening_socket("192.0.2.1", 0, 2) as listening:  # an address that is forwarded to this machine
        assert listening.getsockname()[0] == "0.0.0.0"
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with open_listening_socket("127.0.0.1", 0, 2) as listening:  # what /etc/hosts may say about the node's own name
        assert listening.getsockname()[0] == "0.0.0.0"


def test_servers_of_another_node_meet_the_ranks_at_an_address_that_they_reach(monkeypatch):
    own = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and not is_loopback(address.address)
    ]
    if not own:
        pytest.skip("this machine has no address but the loopback's")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert find_free_address()[0] == find_free_address(["127.0.0.1", "localhost"])[0] == "127.0.0.1"
    assert find_free_address(["localhost", own[0]])[0] == own[0], "the way to itself"
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.7")
    assert find_free_address([own[0]])[0] == "192.0.2.7"
