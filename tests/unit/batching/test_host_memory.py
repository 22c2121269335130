"""Tensors that exceed a limit of host memory are in files, which are gone with them."""

import gc

import pytest
import torch

from rl_megatron.batching.host_memory import TensorStore
from tests.full_disk import files_of_at_most


def test_tensors_beyond_the_limit_are_in_files_of_a_directory_that_is_removed(tmp_path):
    store = TensorStore(1000, str(tmp_path))
    small = store.full((10, 10), 1, torch.int64)
    assert store.directory is None
    large = store.full((30, 10), -1, torch.int16)
    assert store.directory is not None and store.directory.parent == tmp_path
    assert not list(store.directory.iterdir())  # a file has no name, and is gone with its tensor
    large[3] = 7
    assert large.sum() == 29 * 10 * -1 + 70 and small.sum() == 100
    store.close()
    assert not list(tmp_path.iterdir()) and large[3].tolist() == [7] * 10


@pytest.mark.change
def test_memory_that_is_freed_can_be_used_again(tmp_path):
    store = TensorStore(1000, str(tmp_path))
    for _ in range(5):
        held = store.full((100,), 0, torch.int64)
        del held
        gc.collect()
    assert store.directory is None
    first = store.keep(torch.arange(100))
    second = store.keep(torch.arange(100))
    assert store.directory is not None and torch.equal(first, second)


def test_a_full_disk_is_an_error_and_does_not_end_the_process_later(tmp_path):
    """A file with holes would end it by SIGBUS, where a value is written for which the disk has no block."""
    store = TensorStore(0, str(tmp_path))
    with files_of_at_most(1000), pytest.raises(OSError, match="8,000 bytes of sequences: File too large"):
        store.full((1000,), 0, torch.int64)
    assert store.full((1000,), 3, torch.int64).sum() == 3000


def test_without_a_limit_a_tensor_is_kept_as_it_is():
    values = torch.arange(3)
    assert TensorStore().keep(values) is values
