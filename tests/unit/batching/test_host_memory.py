"""Tensors that exceed a limit of host memory are in files, which are gone with them."""

import gc

import torch

from rl_megatron.batching.host_memory import TensorStore


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


def test_memory_that_is_freed_can_be_used_again(tmp_path):
    store = TensorStore(1000, str(tmp_path))
    for _ in range(5):
        held = store.full((100,), 0, torch.int64)
        del held
        gc.collect()
    assert store.directory is None
    first = store.kept(torch.arange(100))
    second = store.kept(torch.arange(100))
    assert store.directory is not None and torch.equal(first, second)


def test_without_a_limit_a_tensor_is_kept_as_it_is():
    values = torch.arange(3)
    assert TensorStore().kept(values) is values
