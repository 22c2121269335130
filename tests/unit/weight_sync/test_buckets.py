"""Buckets and fingerprints: fingerprints are exact and additive, and change with the tensor."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_megatron.weight_sync.buckets import (
    Bucket,
    TensorSpec,
    WeightsRefused,
    fingerprint,
    fingerprint_ones,
    hash_columns,
    hash_rows,
    plan_buckets,
)

CPU = torch.device("cpu")


def random_bits(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    return torch.randint(-128, 128, (*shape[:-1], shape[-1] * size), dtype=torch.int8, generator=generator).view(dtype)


def by_hand(tensor: torch.Tensor) -> int:
    """Return the fingerprint by its formula, in Python's integers."""
    matrix = (tensor.unsqueeze(-1) if tensor.dim() < 2 else tensor).contiguous().view(torch.int16)
    rows, columns = hash_rows(0, matrix.size(0), CPU).tolist(), hash_columns(0, matrix.size(1), CPU).tolist()
    total = sum(
        x * (rows[0][i] * columns[0][j] + rows[1][i] * columns[1][j])
        for i, row in enumerate(matrix.tolist())
        for j, x in enumerate(row)
    )
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (9,), (1, 1)], ids=str)
def test_the_fingerprint_equals_its_formula(shape, dtype):
    tensor = random_bits(*shape, dtype=dtype)
    assert fingerprint(tensor).item() == by_hand(tensor)


def test_sums_over_columns_are_exact_at_the_limit_of_fp64(monkeypatch):
    tensor = torch.full((2, 40_000), -(2**15), dtype=torch.int16)  # the largest integers, all of one sign
    whole = fingerprint(tensor)
    monkeypatch.setattr("rl_megatron.weight_sync.buckets.COLUMNS_AT_ONCE", 97)
    monkeypatch.setattr("rl_megatron.weight_sync.buckets.ELEMENTS_AT_ONCE_CPU", 97)
    assert torch.equal(fingerprint(tensor), whole)
    assert whole == -(2**15) * fingerprint_ones(tensor.shape, (0, 0), CPU)


class MatrixProducts(TorchDispatchMode):
    """Count matrix products, of which there is one per block of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 64), ("meta", 1)])  # "meta" stands for a GPU
def test_a_gpu_gets_large_blocks_and_a_cpu_blocks_that_fit_its_cache(device, blocks):
    with MatrixProducts() as products:
        fingerprint(torch.zeros(4096, 4096, dtype=torch.bfloat16, device=device))
    assert products.count == blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fingerprints_of_blocks_add_up_to_that_of_the_tensor(dtype):
    tensor = random_bits(12, 10, dtype=dtype)
    blocks = {(0, 0): tensor[:5], (5, 0): tensor[5:, :3], (5, 3): tensor[5:, 3:]}
    assert sum(fingerprint(block, location) for location, block in blocks.items()) == fingerprint(tensor)
    ones = sum(fingerprint_ones(block.shape, location, CPU) for location, block in blocks.items())
    assert ones == fingerprint_ones((12, 10), (0, 0), CPU)
    vector = random_bits(11, dtype=dtype)
    assert fingerprint(vector[:4]) + fingerprint(vector[4:], (4, 0)) == fingerprint(vector)


def test_every_flipped_bit_changes_the_fingerprint():
    tensor = random_bits(4, 6)
    bits, wanted = tensor.view(torch.int16), fingerprint(tensor)
    for i in range(4):
        for j in range(6):
            for bit in range(16):
                flipped = bits.clone()
                flipped[i, j] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15), dtype=torch.int16)
                assert fingerprint(flipped.view(torch.bfloat16)) != wanted


def test_swapped_rows_or_columns_change_the_fingerprint():
    tensor = random_bits(40, 50)
    wanted = fingerprint(tensor)
    for i in range(40):
        assert fingerprint(tensor.roll(i + 1, 0)) != wanted or i == 39
    for j in range(50):
        order = list(range(50))
        order[j], order[j - 1] = order[j - 1], order[j]
        assert fingerprint(tensor[:, order].contiguous()) != wanted


def test_the_first_row_and_column_are_hashed_like_the_others():
    tensor = random_bits(1, 7000)
    swapped = tensor.clone()
    swapped[0, 524], swapped[0, 6265] = tensor[0, 6265], tensor[0, 524]  # whose 24-bit hashes alone are one
    assert fingerprint(swapped) != fingerprint(tensor)
    assert (hash_rows(0, 1, CPU).abs() > 1 << 32).all() and (hash_columns(0, 1, CPU) > 1 << 8).all()


def test_buckets_are_filled_in_order_and_a_larger_tensor_has_its_own():
    specs = [TensorSpec(f"t{i}", (rows, 3), "bfloat16") for i, rows in enumerate((4, 4, 100, 1))]
    buckets = plan_buckets(specs, max_bytes=48)
    assert [[spec.name for spec in bucket.tensors] for bucket in buckets] == [["t0", "t1"], ["t2"], ["t3"]]
    assert buckets[2].num_words == 1 + 1  # 6 bytes take a word, and the fingerprint another


def test_a_bucket_names_the_tensor_that_was_altered():
    bucket = Bucket((TensorSpec("first", (3, 3), "bfloat16"), TensorSpec("second", (5,), "float32")))
    buffer = torch.zeros(bucket.num_words, dtype=torch.int64)
    bucket.tensor(buffer, 0).copy_(random_bits(3, 3))
    bucket.tensor(buffer, 1).copy_(torch.arange(5.0))
    bucket.fingerprints(buffer).copy_(torch.stack([fingerprint(bucket.tensor(buffer, i)) for i in range(2)]))
    bucket.verify(buffer)
    bucket.tensor(buffer, 1)[2] = 7
    with pytest.raises(WeightsRefused, match="second arrived altered"):
        bucket.verify(buffer)
