"""What rank 0 tells other ranks: they hear of it as well if it cannot be sent."""

import pytest
import torch
import torch.distributed as dist

from rl_megatron.weight_sync.policy_ranks import PolicyRanks


def told(value):
    ranks = PolicyRanks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    try:
        return ranks.from_rank_0(lambda: (lambda: 1) if value == "a function" else value)
    except RuntimeError as error:
        return str(error)


@pytest.mark.fast
def test_every_rank_gets_what_rank_0_has_or_why_it_cannot_be_sent(ranks):
    assert ranks.run(2, told, {"a": [1, 2]}) == [{"a": [1, 2]}] * 2
    first, second = ranks.run(2, told, "a function")
    assert first == second and "cannot be sent to other ranks" in first
