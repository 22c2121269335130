"""Trajectories become sequences in which the policy's own tokens count, with rewards at the ends of turns."""

import pytest
import torch

from rl_megatron.algorithms.advantage_estimators import estimate_advantages
from rl_megatron.algorithms.advantages import (
    generalized_advantages,
    group_relative,
    group_relative_turns,
    reinforce_plus_plus,
)
from rl_megatron.algorithms.ppo import add_advantages
from rl_megatron.algorithms.rollout import rewards_per_token
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.config.algorithms import GRPOConfig, PPOConfig
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.records import Record
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.interfaces import Completion, Sampling, WeightSpan
from rl_megatron.rollouts.batch import trajectory_batch
from rl_megatron.rollouts.sampler import join, keep_informative
from rl_megatron.rollouts.statistics import statistics
from rl_megatron.rollouts.trajectory import Segment, Trajectory, Turn

SAMPLING = Sampling(8)
WARM = Sampling(8, temperature=0.5)


def turn(start, ids, version=3, reward=0.0, sampling=SAMPLING, reason="stop"):
    logprobs = tuple(-0.25 * id_ for id_ in ids)
    completion = Completion(str(ids), tuple(ids), logprobs, (WeightSpan(version, 0, len(ids)),), reason)
    return Turn(start, completion, sampling, reward)


def prompt(*ids):
    return EncodedPrompt(list(ids), Problem("", ""), Record({}, "x:1"))


# Two turns with a reward each and another's tokens 8, 9 between them; then a trajectory in two segments.
TWO_TURNS = Trajectory(
    [Segment([1, 2, 5, 6, 8, 9, 7], [turn(2, [5, 6], 2, reward=0.5), turn(6, [7], 3, reward=-1.0)])], reward=2.0
)
TWO_SEGMENTS = Trajectory(
    [Segment([1, 4], [turn(1, [4])]), Segment([1, 8, 6, 6], [turn(2, [6, 6], reward=1.0)], parent=0)], truncated=True
)


@pytest.fixture
def batch():
    made = trajectory_batch([TWO_TURNS, TWO_SEGMENTS, None], [prompt(1, 2), prompt(1), prompt(3)], SAMPLING, True)
    made["rewards"] = torch.tensor([2.5, 4.0, 4.0, 0.0])  # with 1 and 3 of reward functions
    return made


def test_the_masks_of_a_batch_are_those_of_this_table(batch):
    assert batch["input_ids"].tolist() == [
        [1, 2, 5, 6, 8, 9, 7], [1, 4, 0, 0, 0, 0, 0], [1, 8, 6, 6, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    assert batch["token_mask"].tolist() == [
        [0, 0, 1, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0],
    ]  # fmt: skip
    assert batch["turn"].tolist() == [
        [-1, -1, 0, 0, -1, -1, 1], [-1, 0, -1, -1, -1, -1, -1], [-1, -1, 1, 1, -1, -1, -1], [-1] * 7,
    ]  # fmt: skip
    assert batch["turn_rewards"].tolist() == [
        [0, 0, 0, 0.5, 0, 0, -1], [0] * 7, [0, 0, 0, 1, 0, 0, 0], [0] * 7,
    ]  # fmt: skip
    assert batch["token_weight_versions"][0].tolist() == [-1, -1, 2, 2, -1, -1, 3]
    assert batch["generation_logprobs"][0].tolist() == [0, 0, -1.25, -1.5, 0, 0, -1.75]
    assert batch["weight_version"].tolist() == [2, 3, 3, -1]
    assert batch["prompt_lengths"].tolist() == [2, 1, 2, 1] and batch["input_lengths"].tolist() == [7, 2, 4, 1]
    assert batch["trajectory"].tolist() == [0, 1, 1, 2] and batch["sample_mask"].tolist() == [1, 1, 1, 0]
    assert batch["stopped"].tolist() == [True, False, False, False]


def test_turns_of_another_temperature_are_sequences_of_their_own():
    segment = Segment([1, 5, 8, 6, 9, 7], [turn(1, [5]), turn(3, [6], sampling=WARM), turn(5, [7])])
    made = trajectory_batch([Trajectory([segment])], [prompt(1)], SAMPLING, True)
    assert made["temperature"].tolist() == [1.0, 0.5, 1.0] and made["trajectory"].tolist() == [0, 0, 0]
    assert made["input_lengths"].tolist() == [2, 4, 6]
    assert [mask.nonzero()[:, 0].tolist() for mask in made["token_mask"]] == [[1], [3], [5]]


def test_rewards_of_turns_have_their_places_and_the_rest_is_at_the_end(batch):
    found = rewards_per_token(batch, TrajectoryIndex(batch), None)
    assert found.tolist() == [
        [0, 0, 0, 0.5, 0, 0, 2.0], [0] * 7, [0, 0, 0, 4.0, 0, 0, 0], [0] * 7,
    ]  # fmt: skip
    assert TrajectoryIndex(batch).total(found.sum(1)).tolist() == [2.5, 4.0, 0.0]


def test_advantages_of_segments_are_those_of_one_long_sequence(batch):
    """Sequences of a trajectory follow each other without a gap for the discount."""
    rows = TrajectoryIndex(batch)
    batch["values"] = torch.rand(4, 7, generator=torch.Generator().manual_seed(0))
    rewards, values, mask = rewards_per_token(batch, rows, None), batch["values"], batch["token_mask"]
    settings = {"discount": 0.9, "gae_lambda": 0.8}
    made = add_advantages(Batch.from_whole(batch), PPOConfig(**settings, whiten_advantages=False), None)
    whole = [torch.cat([x[1], x[2]])[None] for x in (rewards, values, mask)]
    expected, returns = generalized_advantages(*whole, **settings)
    assert torch.equal(made["advantages"][1:3].flatten(), expected[0])
    assert torch.equal(made["returns"][1:3].flatten(), returns[0])
    assert torch.equal(rows.split(rows.join(values)), values)
    plus = estimate_advantages(Batch.from_whole(batch), GRPOConfig(advantage_estimator="reinforce_plus_plus"), None)
    joined = [rows.join(x) for x in (rewards, mask)]
    assert torch.equal(plus, rows.split(reinforce_plus_plus(*joined)))


def test_groups_are_of_trajectories(batch):
    batch = join([Batch.from_whole(batch), Batch.from_whole(batch)], 4).local
    assert batch["trajectory"].tolist() == [0, 1, 1, 2, 3] and batch.size == 5
    found = estimate_advantages(Batch.from_whole(batch), GRPOConfig(samples_per_prompt=2), None)
    first, second = group_relative(torch.tensor([2.5, 4.0]), 2).tolist()  # the sibling of the last one has failed
    assert found.sum(1).tolist() == pytest.approx([3 * first, second, 2 * second, 0.0, 0.0])
    index = TrajectoryIndex(batch)
    assert index.step_sizes(2) == [3, 2] and index.step_sizes(4) == [5]
    batch["rewards"][:3], batch["sample_mask"][:] = 1.0, 1.0
    kept = keep_informative(Batch.from_whole(batch), 2)
    assert kept["rewards"].tolist() == [0.0, 2.5] and kept["trajectory"].tolist() == [0, 1]  # numbered anew


def test_statistics_are_over_trajectories_that_have_not_failed(batch):
    found = statistics([Batch.from_whole(batch)], 1)
    assert found["reward"] == 3.25 and found["completion_tokens"] == 3.0
    assert found["stopped"] == 0.5 and found["reward_min"] == 2.5


def test_estimators_of_turns_see_the_turns_of_whole_trajectories(batch):
    batch = join([Batch.from_whole(batch), Batch.from_whole(batch)], 4).local
    index = TrajectoryIndex(batch)
    rewards, turns = index.join(rewards_per_token(batch, index, None)), index.join(batch["turn"])
    wanted = group_relative_turns(rewards, torch.where(index.join(batch["token_mask"]) > 0, turns, -1), 2)
    settings = GRPOConfig(samples_per_prompt=2, advantage_estimator="group_relative_turns")
    found = estimate_advantages(Batch.from_whole(batch), settings, None)
    assert torch.equal(found, index.split(wanted)) and (found != 0).any(1).tolist() == [True, True, True, False, False]
