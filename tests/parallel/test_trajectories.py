"""Batches of several turns and segments have the loss and the gradients of one process in every layout."""

from __future__ import annotations

import random

import pytest
import torch

from rl_megatron.algorithms.advantage_estimators import estimate_advantages
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.config.algorithms import GRPOConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.records import Record
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.interfaces import Completion, Sampling, WeightSpan
from rl_megatron.losses import build_loss
from rl_megatron.rollouts.batch import trajectory_batch
from rl_megatron.rollouts.trajectory import Segment, Trajectory, Turn
from tests.parallel.layouts import VOCAB_SIZE, build_policy, gradients, worst_relative_error

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
SAMPLING, WARM = Sampling(8, temperature=0.8), Sampling(8, temperature=1.3)
PACKED = Batching("packed", tokens=64)
LAYOUTS = {
    "tensor 2 sequence packed": (2, {"tensor": 2, "sequence": True}, PACKED),
    "context 2": (2, {"context": 2}, Batching(sequences=4)),
    "context 2 packed": (2, {"context": 2}, PACKED),
    "pipeline 2 data 2 dynamic": (4, {"pipeline": 2}, Batching("dynamic", tokens=96)),
}


def trajectory(draw: random.Random) -> Trajectory:
    """Return one or two segments of up to four turns of random tokens and rewards, some at another temperature."""
    segments = []
    for number in range(draw.choice([1, 1, 2])):
        ids, turns = tokens(draw, 2, 6), []
        for _ in range(draw.randint(1, 4)):
            sampled = tokens(draw, 1, 5)
            completion = Completion(
                str(draw.random()), sampled, tuple(-1.0 - draw.random() for _ in sampled),
                (WeightSpan(0, 0, len(sampled)),), "stop",
            )  # fmt: skip
            sampling = draw.choice([SAMPLING, SAMPLING, WARM])
            turns.append(Turn(len(ids), completion, sampling, draw.choice([0.0, 0.5])))
            ids += (*sampled, *tokens(draw, 1, 3))
        segments.append(Segment(ids[: turns[-1].end], turns, None if number == 0 else 0))
    return Trajectory(segments, reward=draw.random())


def tokens(draw: random.Random, fewest: int, most: int) -> tuple[int, ...]:
    return tuple(draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(fewest, most)))


def batch_of(trajectories: list[Trajectory]) -> BatchedDataDict:
    prompts = [EncodedPrompt([1], Problem("", ""), Record({}, "x:1"))] * len(trajectories)
    batch = trajectory_batch(trajectories, prompts, SAMPLING, has_turns=True)
    rewards = torch.tensor([each.environment_reward for each in trajectories])
    batch["rewards"] = TrajectoryIndex(batch).spread(rewards)
    batch["prev_logprobs"] = batch["generation_logprobs"].clone()
    batch["reference_policy_logprobs"] = batch["generation_logprobs"] - 0.1 * batch["token_mask"]
    settings = GRPOConfig(samples_per_prompt=2, advantage_estimator="group_relative_turns")
    batch["advantages"] = estimate_advantages(Batch.from_whole(batch), settings, loss())
    return batch


def loss():
    return build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.05})


def by_turn(batch: BatchedDataDict) -> BatchedDataDict:
    """Return each turn as a sequence of its own, which ends with the turn."""
    parts = []
    for number in range(batch.size):
        for turn in batch["turn"][number].unique():
            if turn < 0:
                continue
            part = batch.slice(number, number + 1)
            is_own = part["turn"] == turn
            part["token_mask"] = part["token_mask"] * is_own
            part["input_lengths"] = is_own.nonzero()[-1:, 1] + 1
            parts.append(part)
    return BatchedDataDict({key: torch.cat([part[key] for part in parts]) for key in batch})


def learn(parallel: dict, batching: Batching, alone: bool = False) -> tuple[dict, dict, dict]:
    """Return the metrics and gradients of a batch, and the metrics of two optimizer steps of three trajectories each.

    Args:
        parallel: The layout.
        batching: How sequences form microbatches.
        alone: Whether each turn is a sequence of its own.
    """
    draw = random.Random(3)
    batch = batch_of([trajectory(draw) for _ in range(6)])
    sizes = TrajectoryIndex(batch).step_sizes(3)
    assert sizes is not None and sum(sizes) == batch.size > 6  # trajectories have several sequences
    policy = build_policy(parallel, batching=batching)
    report = policy.accumulate_gradients(by_turn(batch) if alone else batch, loss())
    gradient = gradients(policy)
    return report, gradient, {} if alone else policy.train(batch, loss(), sizes=sizes)


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, learn, {}, Batching(sequences=32))[0]


def assert_equal(found, wanted):
    for name in wanted.keys() - {"packing_efficiency"}:  # it depends on the microbatches
        assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_and_gradients_equal_one_process(ranks, one_process, layout):
    report, gradient, steps = ranks.run(LAYOUTS[layout][0], learn, *LAYOUTS[layout][1:])[0]
    wanted, wanted_gradient, wanted_steps = one_process
    assert report["loss"] == pytest.approx(wanted["loss"], rel=LOSS_TOLERANCE) and wanted_steps["num_updates"] == 2
    assert_equal(report, wanted)
    assert_equal(steps, wanted_steps)
    error, name = worst_relative_error(gradient, wanted_gradient)
    assert error <= GRADIENT_TOLERANCE, (name, error)


def test_a_turn_is_learned_from_as_if_all_before_it_were_its_prompt(ranks, one_process):
    report, gradient, _ = ranks.run(1, learn, {}, PACKED, True)[0]
    assert report["loss"] == pytest.approx(one_process[0]["loss"], rel=LOSS_TOLERANCE)
    error, name = worst_relative_error(gradient, one_process[1])
    assert error <= GRADIENT_TOLERANCE, (name, error)
