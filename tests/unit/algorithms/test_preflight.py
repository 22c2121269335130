"""What an algorithm can learn from: losses that it cannot serve are refused before the first step."""

from dataclasses import replace

import pytest

from rl_megatron.algorithms.preflight import _check_loss
from rl_megatron.algorithms.run import _on_all_or_none
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.load import load
from rl_megatron.losses import LOSSES, ClippedPGLossFn

PAIRS = ["data=gsm8k_pairs", "data.path=x"]
OVERRIDES = {
    "grpo": ["algorithm=grpo"],
    "reinforce++": ["algorithm=grpo", "algorithm.advantage_estimator=reinforce_plus_plus"],
    "ppo": ["algorithm=ppo"],
    "dpo": ["algorithm=dpo", *PAIRS],
    "reward_model": ["algorithm=reward_model", *PAIRS],
}
IN_REWARD = {"name": "clipped_pg", "use_kl_in_reward": True}


def stage_of(algorithm, loss):
    return replace(load(OVERRIDES[algorithm]).first, loss=loss)


@pytest.mark.parametrize(
    ("algorithm", "loss", "words"),
    [
        ("grpo", {"name": "nll"}, "no advantages.*use clipped_pg"),
        ("ppo", {"name": "dpo"}, "no advantages.*use clipped_pg"),
        ("grpo", {"name": "clipped_pgg"}, "clipped_pg"),
        ("grpo", {"name": "clipped_pg", "ratio_clip_mx": 0.2}, "did you mean 'ratio_clip_max'"),
        ("grpo", IN_REWARD, "use_kl_in_reward.*advantage_estimator=reinforce_plus_plus"),
        ("dpo", {"name": "clipped_pg"}, "no logprobs of pairs.*use dpo or ipo"),
        ("dpo", {"name": "preference"}, "no logprobs of pairs"),
        ("reward_model", {"name": "dpo"}, "no scores of pairs.*use preference"),
        ("reward_model", {"name": "mse_value"}, "no scores of pairs.*use preference"),
    ],
)
def test_a_loss_that_the_algorithm_cannot_serve(algorithm, loss, words):
    with pytest.raises(ConfigError, match=words):
        _check_loss(stage_of(algorithm, loss))


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        ("grpo", {"name": "clipped_pg"}),
        ("grpo", {"name": "clipped_pg", "positive_example_nll_weight": 0.1}),
        ("reinforce++", IN_REWARD),
        ("ppo", IN_REWARD),
        ("dpo", {"name": "dpo", "sft_loss_weight": 0.1}),
        ("dpo", {"name": "ipo"}),
        ("reward_model", {"name": "preference"}),
    ],
)
def test_losses_that_it_can(algorithm, loss):
    _check_loss(stage_of(algorithm, loss))


def test_a_loss_that_needs_what_rollouts_do_not_carry(monkeypatch):
    class Judged(ClippedPGLossFn):
        required_keys = ("advantages", "verdicts")

    monkeypatch.setitem(LOSSES, "judged", Judged)
    with pytest.raises(ConfigError, match=r"loss.name=judged needs \['verdicts'\], which ppo's batches do not carry"):
        _check_loss(stage_of("ppo", {"name": "judged"}))


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
