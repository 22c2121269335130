"""One process: thresholds of top-k and top-p against a sort."""

import pytest
import torch

from rl_megatron.logprobs import SamplingFilter
from rl_megatron.logprobs.kernels import tiles
from rl_megatron.logprobs.kernels.float_order import from_ordered_bits, ordered_bits
from rl_megatron.logprobs.sampling_filter import filter_thresholds
from rl_megatron.logprobs.vocab_parallel import VocabShard


def thresholds(logits, sampling_filter, temperature=None, active=None, valid=None):
    active = torch.ones(len(logits), dtype=torch.bool) if active is None else active
    return filter_thresholds(logits, sampling_filter, VocabShard(0, logits.shape[1], valid, None), temperature, active)


def by_sorting(logits, sampling_filter, temperature=None):
    """[N, V] bool: what the filter leaves, ties at its edge included."""
    temperature = torch.ones(len(logits)) if temperature is None else temperature
    ranked = logits.double().sort(dim=-1, descending=True).values
    lowest = ranked[:, min(sampling_filter.top_k or ranked.shape[1], ranked.shape[1]) - 1]
    if sampling_filter.top_p < 1:
        inside = ranked.masked_fill(ranked < lowest[:, None], -torch.inf)
        masses = (inside / temperature.double()[:, None]).softmax(-1)
        short = masses.cumsum(-1) - masses < sampling_filter.top_p  # a token stays while the better ones fall short
        lowest = torch.maximum(lowest, ranked.masked_fill(~short, torch.inf).amin(-1))
    return logits.double() >= lowest[:, None]


FILTERS = [
    SamplingFilter(top_k=1),
    SamplingFilter(top_k=7),
    SamplingFilter(top_k=1000),
    SamplingFilter(top_p=0.9),
    SamplingFilter(top_p=0.3),
    SamplingFilter(top_p=1e-9),
    SamplingFilter(top_k=30, top_p=0.7),
]


@pytest.mark.parametrize("sampling_filter", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_threshold_leaves_what_a_sort_leaves(dtype, sampling_filter):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(60, 200, generator=generator)).to(dtype)
    temperature = 0.5 + torch.rand(60, generator=generator)
    found = thresholds(logits, sampling_filter, temperature)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(logits >= found[:, None], by_sorting(logits, sampling_filter, temperature))
    if not sampling_filter.is_off and sampling_filter.top_k != 1000:
        assert (logits == found[:, None]).any(dim=1).all(), "one of the row's own logits"


def test_ties_at_the_threshold_all_stay():
    logits = torch.tensor([[1.0, 3, 2, 2, 2, 0], [-0.0, 0.0, -1, -2, -3, -4]])
    assert (logits >= thresholds(logits, SamplingFilter(top_k=2))[:, None]).sum(1).tolist() == [4, 2]
    assert (logits >= thresholds(logits, SamplingFilter(top_k=1))[:, None]).sum(1).tolist() == [1, 2]
    uniform = torch.zeros(1, 10)
    assert (uniform >= thresholds(uniform, SamplingFilter(top_p=0.05))[:, None]).all()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4, 1e30])
def test_any_scale_ends_exactly(scale):
    logits = scale * torch.randn(20, 100, generator=torch.Generator().manual_seed(1))
    for sampling_filter in (SamplingFilter(top_k=3), SamplingFilter(top_p=0.8)):
        found = thresholds(logits, sampling_filter)
        assert torch.equal(logits >= found[:, None], by_sorting(logits, sampling_filter))


@pytest.mark.parametrize("scale", [-1e-30, -1.0, -1e30, 1e30])
def test_logits_of_one_sign_are_searched_at_any_scale(scale):
    logits = scale * (1 + torch.rand(4, 60, generator=torch.Generator().manual_seed(1)))
    active, shard = torch.ones(4, dtype=torch.bool), VocabShard(0, 60, None, None)
    found = filter_thresholds(logits, SamplingFilter(top_k=20), shard, None, active, num_candidates=8)
    assert torch.equal(logits >= found[:, None], by_sorting(logits, SamplingFilter(top_k=20)))


@pytest.mark.parametrize("sampling_filter", [SamplingFilter(top_k=3), SamplingFilter(top_p=0.5)], ids=str)
def test_infinities_nan_and_rows_that_do_not_count(sampling_filter):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    logits[0, 5:] = -torch.inf
    logits[1] = -torch.inf
    logits[2], logits[3, 7], logits[4, 9] = torch.nan, torch.nan, torch.inf
    active = torch.tensor([True, True, False, True, True, True])
    found = thresholds(logits, sampling_filter, active=active)
    assert not found.isnan().any() and (found[1:3] == -torch.inf).all()
    assert torch.isfinite(found[[0, 5]]).all()
    assert not (logits[3] < found[3])[7], "a NaN that counts is never filtered away"


def test_without_a_filter_every_token_is_above_the_threshold():
    assert (thresholds(torch.randn(3, 9), SamplingFilter()) == -torch.inf).all()


def test_padding_has_no_rank_and_no_mass():
    logits = torch.randn(8, 40)
    logits[:, 33:], logits[0, 36] = 50.0, torch.nan
    for sampling_filter in (SamplingFilter(top_k=4), SamplingFilter(top_p=0.6)):
        assert torch.equal(
            thresholds(logits, sampling_filter, valid=33), thresholds(logits[:, :33].clone(), sampling_filter)
        )


def test_a_row_does_not_depend_on_its_block_or_batch(monkeypatch):
    logits, sampling_filter = torch.randn(30, 101).bfloat16(), SamplingFilter(top_k=40, top_p=0.8)
    whole = thresholds(logits, sampling_filter)
    assert torch.equal(thresholds(logits[7:9], sampling_filter), whole[7:9])
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_CPU", 4 * 101)
    assert torch.equal(thresholds(logits, sampling_filter), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_ordered_bits_grow_with_the_numbers_and_come_back(dtype):
    infinity = torch.inf
    numbers = torch.tensor([-infinity, -60000.0, -1.0, -1e-7, 0.0, 1e-7, 0.5, 1.0, 60000.0, infinity], dtype=dtype)
    bits = ordered_bits(numbers)
    assert (bits[1:] > bits[:-1]).all()
    assert torch.equal(from_ordered_bits(bits.long(), dtype), numbers)
    assert torch.equal(ordered_bits(torch.tensor([-0.0], dtype=dtype)), ordered_bits(torch.tensor([0.0], dtype=dtype)))


def test_nothing_of_the_logits_size_is_allocated(monkeypatch):
    rows, vocab = 64, 1 << 15
    monkeypatch.setattr(tiles, "TILE_ELEMENTS_CPU", 2 * vocab)
    logits = torch.randn(rows, vocab)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        thresholds(logits, SamplingFilter(top_k=100, top_p=0.9))
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= rows * vocab * 4 / 8


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="top_k=0 must be a whole number of at least 1, or None"):
        SamplingFilter(top_k=0)
    for top_p in (0.0, 1.1):
        with pytest.raises(ValueError, match=rf"top_p={top_p} must lie in \(0, 1\]"):
            SamplingFilter(top_p=top_p)
    with pytest.raises(ValueError, match="outside='drop' must be one of"):
        SamplingFilter(outside="drop")
