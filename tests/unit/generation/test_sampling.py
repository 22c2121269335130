"""Sampling from sharded logits equals a plain fp64 computation on the whole vocabulary, for every tensor degree."""

import math

import pytest
import torch
import torch.distributed as dist

from rl_megatron.generation.interfaces import Sampling
from rl_megatron.generation.sampling import sample

PADDED = 48  # is divisible by 1, 2 and 3; ids from VALID on are padding
VALID = 41
ROWS = 64
SAMPLINGS = {
    "greedy": Sampling(1, temperature=0.0),
    "plain": Sampling(1),
    "cold": Sampling(1, temperature=0.3),
    "hot": Sampling(1, temperature=2.5),
    "top-k": Sampling(1, top_k=5),
    "top-1": Sampling(1, top_k=1, temperature=1.7),
    "top-k of more than there are": Sampling(1, top_k=1000),
    "top-p": Sampling(1, top_p=0.6),
    "tiny top-p": Sampling(1, top_p=1e-6),
    "top-k and top-p": Sampling(1, temperature=1.3, top_k=12, top_p=0.7),
}


def logits_of(scale=3.0, rows=ROWS, seed=0):
    """Return logits [rows, PADDED]; if the padding took part, it would win every draw."""
    logits = torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(seed)) * scale
    logits[:, VALID:] = 50.0
    return logits


def uniforms_of(rows=ROWS, seed=1):
    return torch.rand(rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(logits, uniforms, sampling):
    """Sample from whole logits in fp64: sort, filter, invert the CDF.

    Returns:
        The tokens, their logprobs, and the filtered probabilities (None if greedy).
    """
    logprobs = (logits[:, :VALID].double() / (sampling.temperature or 1.0)).log_softmax(-1)
    if sampling.temperature == 0:
        tokens = logits[:, :VALID].argmax(-1)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0], None
    kept = logprobs.exp()
    if sampling.top_k:
        order = kept.argsort(-1, descending=True)
        kept = kept.scatter(1, order[:, sampling.top_k :], 0.0)
    if sampling.top_p < 1:
        ranked, order = (kept / kept.sum(-1, keepdim=True)).sort(-1, descending=True)
        before = ranked.cumsum(-1) - ranked  # a token is kept if the mass of better tokens is below top_p
        kept = kept.masked_fill(
            torch.zeros_like(kept, dtype=torch.bool).scatter(1, order, before >= sampling.top_p), 0.0
        )
    kept = kept / kept.sum(-1, keepdim=True)
    tokens = (kept.cumsum(-1) <= uniforms[:, None]).sum(-1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], kept


def draw(logits, uniforms, samplings):
    """Return (tokens, logprobs) of every sampling from this rank's shard of `logits`."""
    shard = logits.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()
    return [sample(shard, uniforms, sampling, dist.group.WORLD, VALID) for sampling in samplings]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_tokens_and_logprobs_equal_the_whole_vocabulary_in_fp64(ranks, world_size):
    logits, uniforms = logits_of(), uniforms_of()
    by_rank = ranks.run(world_size, draw, logits, uniforms, list(SAMPLINGS.values()))
    for index, (name, sampling) in enumerate(SAMPLINGS.items()):
        tokens, logprobs, _ = reference(logits, uniforms, sampling)
        for results in by_rank:
            found_tokens, found_logprobs = results[index]
            assert found_tokens.tolist() == tokens.tolist(), name
            assert found_logprobs.dtype == torch.float32
            torch.testing.assert_close(found_logprobs.double(), logprobs, rtol=2e-6, atol=2e-6, msg=name)


def test_every_degree_draws_the_same(ranks):
    logits, uniforms = logits_of(scale=1.0, rows=512, seed=4), uniforms_of(rows=512, seed=5)
    first, second, third = (
        ranks.run(world_size, draw, logits, uniforms, list(SAMPLINGS.values()))[0] for world_size in (1, 2, 3)
    )
    for one, two, three in zip(first, second, third, strict=True):
        assert torch.equal(one[0], two[0]) and torch.equal(one[0], three[0])
        torch.testing.assert_close(one[1], two[1], rtol=0, atol=1e-6)
        torch.testing.assert_close(one[1], three[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_frequencies_are_the_probabilities(ranks, world_size):
    """Pearson's χ² of many draws from one row; χ² has mean k and deviation √(2k) with k degrees of freedom."""
    samplings = [SAMPLINGS["plain"], SAMPLINGS["top-k and top-p"]]
    draws = 20_000
    logits = logits_of(scale=1.0, rows=1, seed=7).expand(draws, -1).contiguous()
    uniforms = uniforms_of(rows=draws, seed=8)
    results = ranks.run(world_size, draw, logits, uniforms, samplings)[0]
    for (tokens, _), sampling in zip(results, samplings, strict=True):
        probabilities = reference(logits[:1], uniforms[:1], sampling)[2][0]
        counts = torch.bincount(tokens, minlength=PADDED).double()
        assert counts[VALID:].sum() == 0, "padding was drawn"
        assert counts[:VALID][probabilities == 0].sum() == 0, "a token outside of top-k or top-p was drawn"
        expected = draws * probabilities[probabilities > 0]
        chi_square = ((counts[:VALID][probabilities > 0] - expected) ** 2 / expected).sum()
        freedom = len(expected) - 1
        assert freedom >= 5
        assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


def logits_allowing(allowed):
    """Return logits [rows, PADDED] that are -inf except for the allowed tokens of each row, and for the padding."""
    logits = torch.full((len(allowed), PADDED), -torch.inf)
    for row, ids in enumerate(allowed):
        logits[row, ids] = torch.tensor([float(i) for i in range(len(ids))])
    logits[:, VALID:] = 3.0
    return logits


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(ranks, world_size):
    """u = 0 draws the first possible token, and u → 1 (or 1 after rounding) the last, also if whole shards are -inf."""
    allowed = [[0], [40], [3, 17, 39], [16, 17], [31, 32], [20], [0, 40]]
    logits = logits_allowing(allowed)
    samplings = [sampling for name, sampling in SAMPLINGS.items() if name in ("plain", "top-k", "hot")]
    below_one = math.nextafter(1.0, 0.0)
    for uniform, wanted in ((0.0, min), (below_one, max), (1.0, max)):
        uniforms = torch.full((len(allowed),), uniform, dtype=torch.float64)
        for results in ranks.run(world_size, draw, logits, uniforms, samplings):
            for tokens, logprobs in results:
                assert tokens.tolist() == [wanted(ids) for ids in allowed]
                assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_impossible_tokens_are_never_drawn(ranks, world_size):
    allowed = [[5, 6, 7, 30], [1], [38, 39, 40], [15, 16, 31, 32]]
    rows = [row for row in range(len(allowed)) for _ in range(200)]
    logits, uniforms = logits_allowing(allowed)[rows], uniforms_of(rows=len(rows))
    for results in ranks.run(world_size, draw, logits, uniforms, list(SAMPLINGS.values())):
        for (tokens, logprobs), sampling in zip(results, SAMPLINGS.values(), strict=True):
            assert all(token in allowed[row] for row, token in zip(rows, tokens.tolist(), strict=True))
            _, expected, _ = reference(logits, uniforms, sampling)
            torch.testing.assert_close(logprobs.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_greedy_breaks_ties_at_the_lowest_id(ranks, world_size):
    logits = torch.zeros(3, PADDED)
    logits[1, [20, 40]] = 1.0
    logits[2, [15, 16]] = 1.0
    for results in ranks.run(world_size, draw, logits, torch.zeros(3), [SAMPLINGS["greedy"]]):
        assert results[0][0].tolist() == [0, 20, 15]


def test_low_precision_logits_are_drawn_from_in_fp32(ranks):
    logits, uniforms = logits_of().bfloat16(), uniforms_of()
    tokens, logprobs, _ = reference(logits, uniforms, SAMPLINGS["hot"])
    found_tokens, found_logprobs = ranks.run(2, draw, logits, uniforms, [SAMPLINGS["hot"]])[0][0]
    assert found_tokens.tolist() == tokens.tolist()
    torch.testing.assert_close(found_logprobs.double(), logprobs, rtol=2e-6, atol=2e-6)
