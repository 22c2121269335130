"""One process: the k largest logits and their ids against a stable sort."""

import pytest
import torch

from rl_megatron.logprobs import vocab_parallel_top_k
from rl_megatron.logprobs.kernels import tiles


def by_sorting(logits, k):
    """Descending, equal logits by ascending id."""
    order = logits.float().sort(dim=-1, descending=True, stable=True)
    return order.values[..., :k], order.indices[..., :k]


@pytest.mark.parametrize("k", [1, 7, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_largest_come_first_and_ties_by_id(k, dtype):
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0)).mul(4).round().to(dtype)  # many ties
    values, ids = vocab_parallel_top_k(logits, k)
    assert values.dtype == torch.float32 and ids.dtype == torch.int64
    want_values, want_ids = by_sorting(logits, k)
    assert torch.equal(values, want_values) and torch.equal(ids, want_ids)


def test_zeros_of_either_sign_are_equal_and_infinities_keep_their_place():
    logits = torch.tensor([[0.0, -0.0, 1.0, -torch.inf, torch.inf, -1e-40, 1e-40, -torch.inf]])
    values, ids = vocab_parallel_top_k(logits, 8)
    assert ids.tolist() == [[4, 2, 6, 0, 1, 5, 3, 7]]
    assert torch.equal(values, logits[:, ids[0]])


def test_nan_counts_as_the_largest():
    nan = torch.tensor(torch.nan)
    logits = torch.stack([torch.tensor(1.0), -nan, torch.tensor(torch.inf), nan])[None]
    values, ids = vocab_parallel_top_k(logits, 3)
    assert ids.tolist() == [[1, 3, 2]] and values[0, :2].isnan().all() and values[0, 2] == torch.inf


def test_a_row_of_nothing_but_minus_infinity_gives_the_lowest_ids():
    values, ids = vocab_parallel_top_k(torch.full((2, 9), -torch.inf), 3)
    assert (values == -torch.inf).all() and ids.tolist() == [[0, 1, 2]] * 2


def test_padding_is_never_among_them():
    logits = torch.arange(12.0).expand(3, 12).clone()
    logits[1, 10] = torch.nan
    _, ids = vocab_parallel_top_k(logits, 9, valid_vocab_size=9)
    assert ids.tolist() == [list(range(8, -1, -1))] * 3


def test_leading_shapes_and_permuted_memory():
    logits = torch.randn(4, 3, 21).transpose(0, 1)
    values, ids = vocab_parallel_top_k(logits, 5)
    want_values, want_ids = by_sorting(logits, 5)
    assert torch.equal(values, want_values) and torch.equal(ids, want_ids)
    assert vocab_parallel_top_k(torch.randn(2, 0, 9), 4)[1].shape == (2, 0, 4)


def test_it_takes_part_in_no_gradient_and_reads_only():
    logits = torch.randn(4, 9, requires_grad=True)
    kept = logits.detach().clone()
    values, _ = vocab_parallel_top_k(logits, 2)
    assert not values.requires_grad and torch.equal(logits.detach(), kept)


@pytest.mark.parametrize("k", [0, -1, 9])
def test_a_k_that_no_row_has_is_refused(k):
    with pytest.raises(ValueError, match=rf"k={k} must be at least 1 and at most 8, the vocabulary's size"):
        vocab_parallel_top_k(torch.randn(3, 10), k, valid_vocab_size=8)


def test_nothing_of_the_logits_size_is_allocated(monkeypatch):
    rows, vocab = 512, 1024
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_CPU", 8 * vocab)
    logits = torch.randn(rows, vocab)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        vocab_parallel_top_k(logits, 16)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < rows * vocab * 4 / 8
