"""From prompts to scored rollouts, with an engine whose answers are laid ready."""

import pytest
import torch

from rl_megatron.algorithms.advantages import group_relative
from rl_megatron.algorithms.rewards import completions, score
from rl_megatron.algorithms.rollout import join, keep_informative, logprob_mismatch, sample_groups, statistics
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import GRPOConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.interfaces import Sampling
from tests.unit.algorithms.fakes import Characters, Echo, Scripted

SAMPLING = Sampling(4)


def rollouts_of(answers, size=2, **algorithm):
    """One group per entry of `answers`, {prompt: its completions}."""
    engine = Scripted({prompt: list(texts) for prompt, texts in answers.items()})
    problems = [Problem(prompt, "1") for prompt in answers]
    config = GRPOConfig(samples_per_prompt=size, **algorithm)
    return sample_groups(engine, Characters(), Echo(), problems, SAMPLING, 5, config), engine


def test_groups_are_contiguous_scored_and_weighed():
    rollouts, engine = rollouts_of({"a": ["1", "0.5"], "bcd": ["22", "22"]})
    assert engine.calls == [(["a", "a", "bcd", "bcd"], 5)]
    assert rollouts["rewards"].tolist() == [1.0, 0.5, 22.0, 22.0]
    advantages = group_relative(rollouts["rewards"], 2)
    assert advantages[0] > 0 and advantages[2] == 0
    assert torch.equal(rollouts["advantages"], advantages[:, None] * rollouts["token_mask"])
    assert rollouts["advantages"][0].count_nonzero() == 2, "the completion's character and its end, not the prompt"


def test_the_algorithm_chooses_the_advantages():
    rollouts, _ = rollouts_of({"a": ["3", "1"]}, leave_one_out=True, normalize_std=False)
    assert rollouts["advantages"].amax(1).tolist() == [2.0, 0.0]
    assert rollouts["advantages"].amin(1).tolist() == [0.0, -2.0]


def test_completions_are_the_sampled_text_alone():
    rollouts, _ = rollouts_of({"a": ["1", "234"], "bcd": ["5", "6"]})
    assert completions(rollouts, Characters()) == ["1", "234", "5", "6"]


@pytest.mark.parametrize("reward", ["nan", "inf", "-inf"])
def test_a_reward_that_is_not_finite_names_task_prompt_and_completion(reward):
    problems = [Problem("a", "1"), Problem("the prompt", "1")]
    with pytest.raises(ConfigError) as refused:
        score(Echo(), problems, ["1", reward])
    for word in ("'echo'", "'the prompt'", repr(reward), "finite"):
        assert word in str(refused.value)


def test_rewards_are_one_per_text():
    assert score(Echo(), [Problem("a", "1")] * 3, ["1", "2", "-0.25"]).tolist() == [1.0, 2.0, -0.25]
    with pytest.raises(ValueError):
        score(Echo(), [Problem("a", "1")] * 2, ["1"])


def test_only_informative_groups_are_kept():
    rollouts, _ = rollouts_of({"a": ["1", "1"], "b": ["1", "2"], "c": ["0", "0"], "d": ["5", "4"]})
    kept = keep_informative(rollouts, 2)
    assert kept.size == 4
    assert kept["rewards"].tolist() == [1.0, 2.0, 5.0, 4.0]
    assert completions(kept, Characters()) == ["1", "2", "5", "4"]
    assert kept["prompt_lengths"].tolist() == [1] * 4
    none, _ = rollouts_of({"a": ["1", "1"]})
    assert keep_informative(none, 2).size == 0


def test_rounds_join_in_order_up_to_the_rows_wanted():
    narrow, _ = rollouts_of({"a": ["1", "2"]})
    wide, _ = rollouts_of({"bcdefg": ["3", "44"], "h": ["5", "6"]})
    joined = join([narrow, wide], 4)
    assert joined["rewards"].tolist() == [1.0, 2.0, 3.0, 44.0]
    assert completions(joined, Characters()) == ["1", "2", "3", "44"]
    assert joined["token_mask"].sum(1).tolist() == [2.0, 2.0, 2.0, 3.0]
    assert join([narrow, wide], 100).size == 6
    assert torch.equal(join([narrow], 2)["input_ids"], narrow["input_ids"])


def test_statistics_of_rollouts():
    rollouts, _ = rollouts_of({"a": ["1", "1"], "b": ["10", "20"], "c": ["0", "0"], "d": ["100", "4"]})
    rollouts["stopped"][:2] = False
    assert statistics(rollouts, 2) == pytest.approx(
        {
            "reward": (1 + 1 + 10 + 20 + 0 + 0 + 100 + 4) / 8,
            "completion_tokens": (2 + 2 + 3 + 3 + 2 + 2 + 4 + 2) / 8,
            "stopped": 6 / 8,
            "informative_groups": 2 / 4,
        }
    )


def test_mismatch_counts_sampled_tokens_only():
    rollouts = BatchedDataDict(
        token_mask=torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]),
        generation_logprobs=torch.tensor([[9.0, -1.0, -2.0], [9.0, -3.0, 9.0]]),
        prev_logprobs=torch.tensor([[0.0, -1.5, -1.0], [0.0, -3.0, 0.0]]),
    )
    assert logprob_mismatch(rollouts) == pytest.approx({"mismatch_mean": 0.5, "mismatch_max": 1.0})
    rollouts["token_mask"] = torch.zeros(2, 3)
    assert logprob_mismatch(rollouts) == {"mismatch_mean": 0.0, "mismatch_max": 0.0}


def test_mismatch_is_not_hidden_by_a_masked_nan():
    rollouts = BatchedDataDict(
        token_mask=torch.tensor([[0.0, 1.0]]),
        generation_logprobs=torch.tensor([[torch.nan, -1.0]]),
        prev_logprobs=torch.tensor([[0.0, -1.25]]),
    )
    assert logprob_mismatch(rollouts) == {"mismatch_mean": 0.25, "mismatch_max": 0.25}
