"""What GRPO can learn from: losses that it cannot serve are refused before the first step."""

import pytest

from rl_megatron.algorithms.preflight import _check_grpo_loss
from rl_megatron.algorithms.run import _on_all_or_none
from rl_megatron.config.errors import ConfigError


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"name": "nll"}, "no advantages"),
        ({"name": "clipped_pgg"}, "clipped_pg"),
        ({"name": "clipped_pg", "ratio_clip_mx": 0.2}, "did you mean 'ratio_clip_max'"),
        ({"name": "clipped_pg", "use_kl_in_reward": True}, "use_kl_in_reward"),
    ],
)
def test_a_loss_that_grpo_cannot_serve(loss, words):
    with pytest.raises(ConfigError, match=words):
        _check_grpo_loss(loss)


@pytest.mark.parametrize("loss", [{"name": "clipped_pg"}, {"name": "clipped_pg", "positive_example_nll_weight": 0.1}])
def test_losses_that_it_can(loss):
    _check_grpo_loss(loss)


def missing_on(rank: int) -> str:
    import torch.distributed as dist

    def check() -> int:
        if rank in (dist.get_rank(), -1):
            raise ConfigError("data.path: missing")
        return 5

    if rank is not None and rank >= dist.get_world_size():
        return str(_on_all_or_none(check))
    with pytest.raises(ConfigError) as error:
        _on_all_or_none(check)
    return str(error.value)


@pytest.mark.parametrize(
    ("rank", "message"),
    [(1, "data.path: missing (on rank 1)"), (-1, "data.path: missing"), (9, "5")],
    ids=["one rank", "all ranks", "none"],
)
def test_what_one_rank_finds_ends_all(ranks, rank, message):
    assert ranks.run(2, missing_on, rank) == [message, message]
