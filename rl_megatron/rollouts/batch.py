"""Turn trajectories into training batches, in which only the tokens that the policy sampled are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from rl_megatron.batching.trajectory_index import TRAJECTORY
from rl_megatron.config.rewards import ENVIRONMENT
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.generation.completion_batch import SampledSequence, make_completion_batch
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts.trajectory import Segment, Trajectory, Turn

# Keys of batches that only workers other than `completion` need:
# trajectory [B] int64 (`TRAJECTORY`);
# turn [B, S] int64: at sampled tokens the number of the turn within its trajectory, elsewhere -1;
# turn_rewards [B, S] fp32: at the last token of a turn the environment's reward for it, elsewhere 0.
TURN, TURN_REWARDS = "turn", "turn_rewards"

# This prefix and the name of a reward function form the key of its scores, [B] fp32, with NaN for missing ones.
# The name for an environment's rewards is `environment`. Batches have these keys if an advantage estimator reads them.
COMPONENT = "component_reward."


def build_component_keys(
    scores: Mapping[str, Sequence[float | None]], counts: torch.Tensor, has_turns: bool
) -> dict[str, torch.Tensor]:
    """Return the scores of each reward function, [N] fp32, under their keys in a batch.

    Args:
        scores: For the name of each function, the scores of all trajectories; None for a missing score.
        counts: [N] bool. Which trajectories count; the scores of others are NaN.
        has_turns: Whether an environment may give rewards; missing ones are 0.
    """
    of_environment = {ENVIRONMENT: scores.get(ENVIRONMENT, [None] * len(counts))} if has_turns else {}
    keys = {}
    for name, values in {**of_environment, **scores}.items():
        missing = 0.0 if name == ENVIRONMENT else torch.nan
        scored = torch.tensor([missing if value is None else value for value in values], dtype=torch.float32)
        keys[COMPONENT + name] = torch.where(counts, scored, torch.nan)
    return keys


def index_data_sets(names: Sequence[str], mixture: Sequence[str]) -> torch.Tensor:
    """Return the index of each data set in `names` within a mixture's list of names, [n] int64."""
    indices = {name: index for index, name in enumerate(mixture)}
    return torch.tensor([indices[name] for name in names])


def build_trajectory_batch(
    trajectories: Sequence[Trajectory | None],
    prompts: Sequence[EncodedPrompt],
    sampling: Sampling,
    has_turns: bool,
) -> BatchedDataDict:
    """Return trajectories as a batch with the keys of `generate` and, if `has_turns`, those of this module.

    The sequences of a trajectory are consecutive. A trajectory that is None becomes a sequence of its prompt with a
    `sample_mask` of 0.

    Args:
        trajectories: The trajectories.
        prompts: The prompt of each.
        sampling: The sampling to record for trajectories that are None.
        has_turns: Whether trajectories may have several sequences or turns.
    """
    sequences: list[tuple[int, SampledSequence, Sequence[tuple[int, Turn]]]] = []  # with the numbers of the turns
    for owner, (trajectory, prompt) in enumerate(zip(trajectories, prompts, strict=True)):
        if trajectory is None:
            sequences.append((owner, SampledSequence(prompt.ids, (), sampling), ()))
            continue
        num_earlier = 0
        for segment in trajectory.segments:
            for part in _split_by_filters(segment):
                last = part[-1][1]
                completions = tuple((turn.start, turn.completion) for _, turn in part)
                numbered = [(num_earlier + number, turn) for number, turn in part]
                sequences.append(
                    (owner, SampledSequence(segment.ids[: last.end], completions, last.sampling), numbered)
                )
            num_earlier += len(segment.turns)
    batch = make_completion_batch([sequence for _, sequence, _ in sequences])
    owners = torch.tensor([owner for owner, _, _ in sequences])
    batch["sample_mask"] = torch.tensor([float(trajectories[owner] is not None) for owner, _, _ in sequences])
    if has_turns:
        batch[TRAJECTORY] = owners
        batch |= _build_turn_keys([turns for _, _, turns in sequences], batch["input_ids"].shape)
    ended_early = [trajectory is not None and trajectory.truncated for trajectory in trajectories]
    batch["stopped"] &= ~torch.tensor(ended_early)[owners]
    return batch


def _split_by_filters(segment: Segment) -> list[list[tuple[int, Turn]]]:
    """Split the turns of a segment, with their numbers, into parts that each use one temperature and the same filters.

    Each part becomes a sequence, because the logprobs of a sequence use one temperature.
    """
    numbered = enumerate(segment.turns)
    return [list(part) for _, part in groupby(numbered, lambda entry: _read_filters(entry[1].sampling))]


def _read_filters(sampling: Sampling) -> tuple[float, int, float]:
    return sampling.temperature, sampling.top_k, sampling.top_p


def _build_turn_keys(sequences: Sequence[Sequence[tuple[int, Turn]]], shape: torch.Size) -> dict[str, torch.Tensor]:
    numbers, rewards = torch.full(shape, -1), torch.zeros(shape)
    for index, turns in enumerate(sequences):
        for number, turn in turns:
            numbers[index, turn.start : turn.end] = number
            if turn.completion.ids:
                rewards[index, turn.end - 1] = turn.reward
    return {TURN: numbers, TURN_REWARDS: rewards}
