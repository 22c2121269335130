"""The pairs of online DPO: which samples of a group they are made of, and which of them count."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.algorithms.online_dpo import select_pairs
from rl_megatron.batching.trajectory_index import TRAJECTORY
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.batch import BatchedDataDict

REWARDS = [1.0, 3.0, 0.0, 2.0, 2.0, 2.0]  # two groups of three


def rollouts(rewards=REWARDS, sample_mask=(1, 1, 1, 1, 1, 1)):
    ids = torch.arange(6)[:, None] * 10 + torch.arange(4)
    return BatchedDataDict(
        {
            "input_ids": ids, "input_lengths": torch.full((6,), 4), "token_mask": torch.ones(6, 4),
            "sample_mask": torch.tensor(sample_mask).float(), "rewards": torch.tensor(rewards),
            "temperature": torch.full((6,), 0.5), "generation_logprobs": torch.zeros(6, 4), TRAJECTORY: torch.arange(6),
        }
    )  # fmt: skip


def samples_of(pairs):
    return (pairs["input_ids"][:, 0] // 10).tolist()


def test_the_best_sample_of_a_group_is_chosen_and_the_worst_rejected():
    pairs = select_pairs(rollouts([1.0, 3.0, 0.0, 5.0, 2.0, 9.0]), 3)
    assert samples_of(pairs) == [1, 2, 5, 4]
    assert pairs["sample_mask"].tolist() == [1, 1, 1, 1]
    assert set(pairs) == {"input_ids", "input_lengths", "token_mask", "sample_mask", "rewards", "temperature"}


def test_a_group_of_equal_rewards_has_a_pair_that_does_not_count():
    assert select_pairs(rollouts(), 3)["sample_mask"].tolist() == [1, 1, 0, 0]


def test_samples_that_failed_are_left_out():
    pairs = select_pairs(rollouts(sample_mask=(1, 0, 1, 0, 0, 0)), 3)
    assert samples_of(pairs)[:2] == [0, 2] and pairs["sample_mask"].tolist() == [1, 1, 0, 0]
    alone = select_pairs(rollouts(sample_mask=(1, 0, 0, 1, 1, 1)), 3)
    assert alone["sample_mask"].tolist() == [0, 0, 0, 0]


def test_a_trajectory_of_several_sequences_is_refused():
    split = rollouts()
    split[TRAJECTORY] = torch.tensor([0, 0, 1, 2, 3, 4])
    with pytest.raises(ConfigError, match="a trajectory of this step has several; set rollout.on_rewrite=keep"):
        select_pairs(split, 3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.global_batch_size=3"], "train.global_batch_size=3 must be even"),
        (["algorithm.samples_per_prompt=1"], "algorithm.samples_per_prompt=1: .*greater than or equal to 2"),
        (["generation.temperature=0"], "generation.temperature=0 is greedy sampling, but online_dpo needs"),
        (["rollout.async_enabled=true"], "online_dpo learns from completions of the current weights"),
    ],
)
def test_settings_that_do_not_suit_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(["algorithm=online_dpo", "loss=dpo", "data=arithmetic", *overrides])


def test_the_optimizer_steps_are_those_of_the_pairs():
    chosen = ["algorithm=online_dpo", "loss=dpo", "train.steps=5", "train.global_batch_size=16"]
    stage = load_config([*chosen, "algorithm.prompts_per_step=20"]).first
    assert stage.algorithm.optimizer_steps(stage.train) == 5 * 3
