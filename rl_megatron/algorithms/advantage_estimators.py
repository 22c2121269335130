"""The registry of advantage estimators; `algorithm.advantage_estimator` selects one.

An estimator is a function that returns the advantages of the sampled tokens, [B, S], or of the samples, [B]. It gets
by name those of these inputs that it has as parameters. B is the number of samples, S their padded length, and entry t
of a sequence corresponds to token t:

- rewards [B]: one reward per sample. Samples of a prompt are contiguous.
- group_size: the number of samples per prompt.
- sample_mask [B]: 1, and 0 for a sample that failed (rollout.on_failure). Its reward and its token_mask are 0, and it
  must not be compared with.
- token_mask [B, S]: 1 at sampled tokens, 0 at the prompt and at padding.
- token_rewards [B, S]: the reward of each sample at its last sampled token, minus the KL penalty at every sampled token
  if loss.use_kl_in_reward is true. Rewards that an environment gave for turns are at the last tokens of these turns.
- turns [B, S]: the number of the turn at sampled tokens, from 0, and -1 elsewhere. A completion is one turn.
- rollouts: the whole batch, with input_ids, input_lengths, prompt_lengths and generation_logprobs; and prev_logprobs,
  unless algorithm.recompute_logprobs is never.
- ranks: the data-parallel ranks that share the step's samples (`RankReduction`), with sums, extremes and moments over
  all of them. In a single process it has the values of this process.
- component_rewards: the score of each reward function for each sample, {name: [B]}, before its weight and NaN where it
  gave none. The rewards of an environment have the name "environment".
- component_weights: the weight of each of them, {name: number}.
- leave_one_out, normalize_std: these keys of the algorithm section.

A function of rewards and group_size alone gets those of all samples. One that takes `ranks` gets the samples that one
data-parallel rank owns: all those of a prompt, so that samples of a prompt can be compared. What is compared with the
whole batch has to be reduced with `ranks`. Any other function of a user's own gets the whole batch, on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from rl_megatron import log
from rl_megatron.algorithms.advantages import (
    group_decoupled,
    group_relative,
    optimal_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from rl_megatron.algorithms.rollout import rewards_per_token, whole_trajectories
from rl_megatron.algorithms.rollout_statistics import sample_mask
from rl_megatron.algorithms.turn_advantages import group_relative_steps, group_relative_turns
from rl_megatron.batching.batch import Batch
from rl_megatron.config.advantages import (
    ESTIMATORS,
    OPTIONS,
    estimator_parameters,
    parameters_of,
    takes_all_samples,
    takes_whole_batch,
    takes_whole_groups,
)
from rl_megatron.config.algorithms import GRPOConfig
from rl_megatron.config.errors import ConfigError, RunFailed
from rl_megatron.config.loading.import_strings import raised
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.contract import LossFunction
from rl_megatron.rollouts.batch import COMPONENT, TURN
from rl_megatron.rollouts.trajectory_index import TrajectoryIndex
from rl_megatron.topology.reductions import ALONE, RankReduction

Function = TypeVar("Function", bound=Callable[..., Tensor])

ADVANTAGES: Registry[Callable[..., Tensor]] = Registry("advantage estimator")


def register_advantage(name: str) -> Callable[[Function], Function]:
    """Return a decorator that registers a function as the advantage estimator `name`.

    Raises:
        ConfigError: The function has a parameter that it will not get.
        ValueError: Another estimator has this name already.
    """

    def add(function: Function) -> Function:
        parameters = parameters_of(function, f"advantage estimator {name!r}")
        ADVANTAGES.register(name)(function)
        if name not in ESTIMATORS:
            ESTIMATORS.register(name)(parameters)
        return function

    return add


register_advantage("group_relative")(group_relative)
register_advantage("group_relative_turns")(group_relative_turns)
register_advantage("group_relative_steps")(group_relative_steps)


@register_advantage("reinforce_plus_plus")
def _reinforce_plus_plus(
    token_rewards: Float[Tensor, "batch sequence"], token_mask: Shaped[Tensor, "batch sequence"], ranks: RankReduction
) -> Float[Tensor, "batch sequence"]:
    return reinforce_plus_plus(token_rewards, token_mask, ranks)


@register_advantage("reinforce_plus_plus_baseline")
def _reinforce_plus_plus_baseline(
    rewards: Float[Tensor, " batch"],
    group_size: int,
    token_mask: Shaped[Tensor, "batch sequence"],
    ranks: RankReduction,
    sample_mask: Float[Tensor, " batch"],
) -> Float[Tensor, "batch sequence"]:
    return reinforce_plus_plus_baseline(rewards, group_size, token_mask, ranks, sample_mask)


@register_advantage("optimal_baseline")
def _optimal_baseline(
    rewards: Float[Tensor, " batch"],
    group_size: int,
    token_mask: Shaped[Tensor, "batch sequence"],
    sample_mask: Float[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    return optimal_baseline(rewards, group_size, token_mask, sample_mask)


@register_advantage("group_decoupled")
def _group_decoupled(
    component_rewards: Mapping[str, Float[Tensor, " batch"]],
    component_weights: Mapping[str, float],
    group_size: int,
    ranks: RankReduction,
) -> Float[Tensor, " batch"]:
    weights = torch.tensor([component_weights[name] for name in component_rewards])
    return group_decoupled(torch.stack(list(component_rewards.values()), 1), weights, group_size, ranks)


class AdvantagesFailed(RunFailed):
    """A user's advantage estimator failed in a step."""


def estimated_advantages(
    rollouts: Batch, algorithm: GRPOConfig, loss_fn: LossFunction, reward: RewardConfig | None = None
) -> Float[Tensor, "batch sequence"]:
    """Return the advantages [B, S] that the configured estimator gives the rollouts, 0 at tokens that do not count.

    They are those of this rank's sequences. Collective, because a user's function may fail on some ranks only.

    Args:
        rollouts: The rollouts.
        algorithm: The settings that choose the estimator.
        loss_fn: The policy's loss, which says whether rewards have a KL penalty.
        reward: The section `reward`, which has the weights of the reward functions; None: all are 1.

    Raises:
        AdvantagesFailed: The user's function raised an error, or its result has another shape or is not finite. It is
            raised on every rank.
    """
    try:
        return rollouts.all_ranks.all_or_none(lambda: _estimated_advantages(rollouts, algorithm, loss_fn, reward))
    except ConfigError as error:
        raise AdvantagesFailed(f"the advantage estimator failed: {error}") from error


def owned_together(rollouts: Batch, algorithm: GRPOConfig) -> Tensor | None:
    """Return a number for each sequence, equal for those that one rank must own, or None if it may own any."""
    parameters = estimator_parameters(algorithm.advantage_estimator)
    if takes_all_samples(parameters):
        return None
    if takes_whole_groups(parameters):
        return rollouts.trajectories() // algorithm.samples_per_prompt
    return whole_trajectories(rollouts)


def _turns(
    rollouts: BatchedDataDict, index: TrajectoryIndex, mask: Shaped[Tensor, "trajectory sequence"]
) -> Int[Tensor, "trajectory sequence"]:
    """Return the number of the turn at each sampled token of trajectories, and -1 elsewhere."""
    numbers = index.joined(rollouts[TURN]) if TURN in rollouts else torch.zeros_like(mask, dtype=torch.int64)
    return torch.where(mask != 0, numbers, -1)


def _components(rollouts: BatchedDataDict, index: TrajectoryIndex) -> dict[str, Float[Tensor, " trajectory"]]:
    """Return the scores of trajectories by the name of the reward function."""
    keys = [key for key in rollouts if key.startswith(COMPONENT)]
    return {key.removeprefix(COMPONENT): index.of_first(rollouts[key]) for key in keys}


def _estimated_advantages(
    rollouts: Batch, algorithm: GRPOConfig, loss_fn: LossFunction, reward: RewardConfig | None
) -> Float[Tensor, "batch sequence"]:
    name = algorithm.advantage_estimator
    parameters, where = estimator_parameters(name), f"algorithm.advantage_estimator={name}"
    if takes_all_samples(parameters):
        return _of_all_samples(rollouts, algorithm, parameters, where)
    if takes_whole_batch(parameters, name) and rollouts.owners is not None:
        return _of_whole_batch(rollouts, algorithm, loss_fn, reward)
    return _of_sequences(rollouts.own, rollouts.ranks, algorithm, loss_fn, reward)


def _of_sequences(
    own: BatchedDataDict, ranks: RankReduction, algorithm: GRPOConfig, loss_fn: LossFunction,
    reward: RewardConfig | None,
) -> Float[Tensor, "batch sequence"]:  # fmt: skip
    """Return the advantages of sequences; other ranks have those that `ranks` adds."""
    name = algorithm.advantage_estimator
    parameters, where = estimator_parameters(name), f"algorithm.advantage_estimator={name}"
    if not own.size and "ranks" not in parameters:  # a function with `ranks` takes part without samples
        return torch.zeros(own["token_mask"].shape)
    index = TrajectoryIndex(own)
    mask = index.joined(own["token_mask"])
    weights = {} if reward is None else {function.shown_name: function.weight for function in reward.functions}
    available = {
        "rewards": lambda: index.of_first(own["rewards"]),
        "group_size": lambda: algorithm.samples_per_prompt,
        "sample_mask": lambda: index.of_first(sample_mask(own)),
        "token_mask": lambda: mask,
        "token_rewards": lambda: index.joined(rewards_per_token(own, loss_fn)),
        "turns": lambda: _turns(own, index, mask),
        "rollouts": lambda: own,
        "ranks": lambda: ranks,
        "component_rewards": lambda: _components(own, index),
        "component_weights": lambda: {name: weights.get(name, 1.0) for name in _components(own, index)},
    }
    if "rollouts" in parameters and not index.all_alone:
        raise ConfigError(
            f"{where} takes the parameter `rollouts`, and a trajectory of this step has several sequences; take "
            "token_rewards and token_mask instead, or set rollout.on_rewrite=keep"
        )
    given = {key: value() for key, value in available.items() if key in parameters}
    advantages = _called(algorithm, parameters, given, where, (mask.shape[:1], mask.shape))
    if advantages.dim() == 1:
        advantages = advantages[:, None]
    return index.split(_finite(torch.where(mask != 0, advantages, 0.0).to(mask.device), where))


def _of_whole_batch(
    rollouts: Batch, algorithm: GRPOConfig, loss_fn: LossFunction, reward: RewardConfig | None
) -> Float[Tensor, "batch sequence"]:
    """Return the advantages of this rank's sequences, which rank 0 has computed from the whole batch. Collective."""
    log.once(
        f"algorithm.advantage_estimator={algorithm.advantage_estimator} gets the whole batch on rank 0, because it "
        "takes tokens and has no parameter `ranks`; with it, every rank computes the advantages of its own samples"
    )
    every = rollouts.on_rank_0(list(rollouts))
    failure, advantages = None, BatchedDataDict()
    if every.size:
        try:
            advantages["advantages"] = _of_sequences(every, ALONE, algorithm, loss_fn, reward).float()
        except ConfigError as error:  # the other ranks wait for the advantages
            failure = str(error)
    failure = rollouts.all_ranks.share(lambda: failure)
    if failure is not None:
        raise ConfigError(failure)
    return rollouts.from_rank_0("advantages", advantages)


def _of_all_samples(
    rollouts: Batch, algorithm: GRPOConfig, parameters: frozenset[str], where: str
) -> Float[Tensor, "batch sequence"]:
    """Return the advantages of this rank's sequences, from the rewards of all samples."""
    numbers = rollouts.facts
    index = TrajectoryIndex(numbers)
    values = {
        "rewards": index.of_first(numbers["rewards"]),
        "group_size": algorithm.samples_per_prompt,
        "sample_mask": index.of_first(sample_mask(numbers)),
    }
    given = {key: value for key, value in values.items() if key in parameters}
    of_samples = _called(algorithm, parameters, given, where, (torch.Size([index.num_trajectories]),))
    own, mask = rollouts.own_facts(index.spread(of_samples)), rollouts["token_mask"]
    return _finite(torch.where(mask != 0, own[:, None], 0.0), where)


def _called(
    algorithm: GRPOConfig, parameters: frozenset[str], given: dict[str, Any], where: str, shapes: Sequence[torch.Size]
) -> Tensor:
    """Return the result of the estimator, which has one of the shapes.

    Raises:
        ConfigError: It failed, or its result has another shape.
    """
    function = ADVANTAGES.find(algorithm.advantage_estimator, "algorithm.advantage_estimator")
    options = {option: getattr(algorithm, option) for option in OPTIONS if option in parameters}
    try:
        advantages = function(**given, **options)
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(f"{where} {raised(error)}") from error
    if not isinstance(advantages, Tensor) or advantages.shape not in shapes:
        shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
        wanted = " or ".join(str(tuple(each)) for each in shapes)
        raise ConfigError(f"{where} returned {shape}; it must return a tensor {wanted}")
    return advantages


def _finite(advantages: Tensor, where: str) -> Tensor:
    if not advantages.isfinite().all():
        raise ConfigError(f"{where} returned advantages that are not finite")
    return advantages
