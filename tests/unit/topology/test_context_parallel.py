"""The zigzag cut: each token is on one rank, gathering restores the order, and gradients reach their owners."""

import pytest
import torch
import torch.distributed as dist

from rl_megatron.topology.context_parallel import zigzag_gather_and_reduce, zigzag_positions
from tests.zigzag import zigzag_shard


def test_positions_of_two_and_four_ranks():
    assert [zigzag_positions(8, rank, 2).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [zigzag_positions(8, rank, 4).tolist() for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert zigzag_positions(6, 0, 1).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_ranks_share_the_tokens_and_the_causal_work(cp_size):
    length = 12 * cp_size
    positions = [zigzag_positions(length, rank, cp_size) for rank in range(cp_size)]
    assert sorted(torch.cat(positions).tolist()) == list(range(length))
    assert len({int((rank_positions + 1).sum()) for rank_positions in positions}) == 1, "visible keys differ"


def test_a_length_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="4 does not divide its 10 positions; pad the sequences to a multiple of 4"):
        zigzag_positions(10, 0, 2)


def test_a_world_of_one_gathers_nothing():
    x = torch.randn(2, 8)
    assert zigzag_gather_and_reduce(x, None, dim=1) is x


def _whole():
    return torch.randn(3, 16, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _shard_gather_backward(dim):
    """Shard, gather and run backward on a rank.

    Returns:
        Whether the gathered tensor equals the whole one, the gradient of this rank's slice, and the weights of its part
        of the loss.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = _whole().transpose(1, dim).contiguous()
    own_weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1 + rank), dtype=torch.float64)

    shard = zigzag_shard(whole, rank, size, dim).clone().requires_grad_()
    gathered = zigzag_gather_and_reduce(shard, dist.group.WORLD, dim)
    is_whole = torch.equal(gathered, whole)
    (own_weight * gathered**2).sum().backward()
    return is_whole, shard.grad, own_weight


@pytest.mark.parametrize(("world_size", "dim"), [(2, 1), (4, 1), (2, 0), (4, 2)])
def test_gather_undoes_shard_and_backward_reaches_the_owner(ranks, world_size, dim):
    results = ranks.run(world_size, _shard_gather_backward, dim)
    whole = _whole().transpose(1, dim).contiguous()
    weight_of_all = sum(own for *_, own in results)
    for rank, (is_whole, gradient, _) in enumerate(results):
        assert is_whole
        # Every rank computed its own part of the loss, so the gradients of the parts add up.
        torch.testing.assert_close(gradient, zigzag_shard(2 * weight_of_all * whole, rank, world_size, dim))
