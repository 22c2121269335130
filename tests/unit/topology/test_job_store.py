"""Ranks of an attempt meet under a name of their own, whatever earlier attempts have left in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from rl_megatron.config.errors import ConfigError
from rl_megatron.topology.job_store import open_attempt_store

SOON = timedelta(seconds=20)


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(store):
    """Return another connection, because a connection that waits lets no other thread ask."""
    return dist.TCPStore("127.0.0.1", store.port, is_master=False)


def attempt(store, size):
    """Return what each rank gets, and write an address there as gloo does."""
    with ThreadPoolExecutor(size) as threads:
        stores = list(threads.map(lambda rank: open_attempt_store(client(store), rank, size, SOON), range(size)))
    for rank, each in enumerate(stores):
        assert not each.check([f"address/{rank}"]), "an earlier attempt has left it"
        each.set(f"address/{rank}", f"of rank {rank}")
    return stores


def test_ranks_of_an_attempt_share_a_part_of_the_store_that_no_other_attempt_uses(store):
    for size in (4, 4, 3, 1):
        stores = attempt(store, size)
        assert all(each.get("address/0") == b"of rank 0" for each in stores)


def test_a_rank_that_died_while_it_asked_does_not_count(store):
    store.append("asking", "somebody ")
    assert len(attempt(store, 2)) == 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_in_vain_says_for_whom(store, rank):
    words = f"rank {rank} of 3 waited 0 s for the other ranks.*look for the message of a rank that did not start"
    with pytest.raises(ConfigError, match=words):
        open_attempt_store(client(store), rank, 3, timedelta(seconds=0.3))
