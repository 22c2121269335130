"""The registry of advantage estimators; `algorithm.advantage_estimator` selects one.

An estimator is a function of `AdvantageInputs` that returns the advantages of the sampled tokens, [B, S], or of the
samples, [B]. Every data-parallel rank calls it with that rank's samples. A user's estimator gets all samples of a
prompt, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from rl_megatron.algorithms import advantages as formulas
from rl_megatron.algorithms.rollout import rewards_per_token, whole_trajectories
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.config.advantages import ESTIMATORS, Estimator, check_estimator, get_estimator
from rl_megatron.config.algorithms import GRPOConfig
from rl_megatron.config.errors import ConfigError, RunFailed
from rl_megatron.config.loading.import_strings import describe_user_error
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.contract import LossFunction
from rl_megatron.rollouts.batch import COMPONENT, TURN
from rl_megatron.rollouts.statistics import sample_mask
from rl_megatron.topology.reductions import ALONE, RankReduction


class AdvantageInputs:
    """The inputs of an advantage estimator: samples, grouped by prompt, and their tokens.

    B is the number of samples (it may be 0), and S their padded length. Entry t of a sequence corresponds to token t.

    Attributes:
        group_size: The number of samples per prompt.
        ranks: A reduction over the data-parallel ranks that share the step's samples. Its methods return sums, extremes
            and moments over the whole batch; every rank must call them equally often.
        leave_one_out: The value of algorithm.leave_one_out.
        normalize_std: The value of algorithm.normalize_std.
    """

    def __init__(
        self,
        rollouts: BatchedDataDict,
        group_size: int,
        *,
        ranks: RankReduction = ALONE,
        loss_fn: LossFunction | None = None,
        reward: RewardConfig | None = None,
        leave_one_out: bool = False,
        normalize_std: bool = True,
    ):
        """Make the inputs from a batch, whose keys the properties read.

        `loss_fn` is the policy's loss, whose settings may subtract a KL penalty from rewards; if it is None, there is
        no penalty. `reward` has the weights of the reward functions; if it is None, all weights are 1. For the other
        arguments, see the class.
        """
        self.group_size, self.ranks = group_size, ranks
        self.leave_one_out, self.normalize_std = leave_one_out, normalize_std
        self.index = TrajectoryIndex(rollouts)
        self._rollouts, self._reward = rollouts, reward
        self._loss_fn: Any = loss_fn

    @property
    def rewards(self) -> Float[Tensor, " batch"]:
        """Return one reward per sample."""
        return self.index.take_first(self._rollouts["rewards"])

    @property
    def sample_mask(self) -> Float[Tensor, " batch"]:
        """Return 1 for each sample that succeeded, and 0 for one that failed (rollout.on_failure).

        The reward and the token_mask of a failed sample are 0. Leave it out of baselines.
        """
        return self.index.take_first(sample_mask(self._rollouts))

    @property
    def token_mask(self) -> Shaped[Tensor, "batch sequence"]:
        """Return 1 at sampled tokens, and 0 elsewhere: at the prompt, tool outputs and padding."""
        return self.index.join(self._rollouts["token_mask"])

    @property
    def token_rewards(self) -> Float[Tensor, "batch sequence"]:
        """Return token rewards: a sample's reward is at its last sampled token, and other tokens have 0.

        With loss.use_kl_in_reward, the KL penalty is subtracted at every sampled token. Rewards that an environment
        gave for turns are at the last tokens of these turns instead.
        """
        return self.index.join(rewards_per_token(self._rollouts, self.index, self._loss_fn))

    @property
    def turns(self) -> Int[Tensor, "batch sequence"]:
        """Return for each sampled token the number of its turn, from 0, and -1 elsewhere. A completion is one turn."""
        mask = self.token_mask
        turns = self.index.join(self._rollouts[TURN]) if TURN in self._rollouts else torch.zeros_like(mask).long()
        return torch.where(mask != 0, turns, -1)

    @property
    def component_rewards(self) -> dict[str, Float[Tensor, " batch"]]:
        """Return the unweighted scores of each reward function, one per sample; NaN if the function gave none.

        The rewards of an environment are under the name "environment".
        """
        keys = [key for key in self._rollouts if key.startswith(COMPONENT)]
        return {key.removeprefix(COMPONENT): self.index.take_first(self._rollouts[key]) for key in keys}

    @property
    def component_weights(self) -> Mapping[str, float]:
        """Return the weight of each reward function."""
        functions = () if self._reward is None else self._reward.functions
        weights = {function.shown_name: function.weight for function in functions}
        return {name: weights.get(name, 1.0) for name in self.component_rewards}

    @property
    def rollouts(self) -> BatchedDataDict:
        """Return the batch, with input_ids, input_lengths, prompt_lengths, generation_logprobs and prev_logprobs.

        The batch lacks prev_logprobs if algorithm.recompute_logprobs is never.

        Raises:
            ConfigError: A sample has several sequences.
        """
        if not self.index.all_alone:
            raise ConfigError(
                "the advantage estimator reads inputs.rollouts, but a trajectory of this step has several sequences; "
                "read inputs.token_rewards and inputs.token_mask instead, or set rollout.on_rewrite=keep"
            )
        return self._rollouts


AdvantageEstimator = Callable[[AdvantageInputs], Tensor]
ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")


def register_advantage(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Return a decorator that registers a function as the advantage estimator `name`.

    Raises:
        ConfigError: The function does not take `AdvantageInputs` alone.
        ValueError: Another estimator has this name already.
    """

    def add(function: AdvantageEstimator) -> AdvantageEstimator:
        check_estimator(function, f"advantage estimator {name!r}")
        ADVANTAGES.register(name)(function)
        if name not in ESTIMATORS:
            ESTIMATORS.register(name)(Estimator())
        return function

    return add


@register_advantage("group_relative")
def _group_relative(inputs: AdvantageInputs) -> Float[Tensor, " batch"]:
    return formulas.group_relative(
        inputs.rewards, inputs.group_size, leave_one_out=inputs.leave_one_out, normalize_std=inputs.normalize_std,
        sample_mask=inputs.sample_mask,
    )  # fmt: skip


@register_advantage("group_relative_turns")
def _group_relative_turns(inputs: AdvantageInputs) -> Float[Tensor, "batch sequence"]:
    return formulas.group_relative_turns(
        inputs.token_rewards, inputs.turns, inputs.group_size, leave_one_out=inputs.leave_one_out,
        normalize_std=inputs.normalize_std,
    )  # fmt: skip


@register_advantage("group_relative_steps")
def _group_relative_steps(inputs: AdvantageInputs) -> Float[Tensor, "batch sequence"]:
    return formulas.group_relative_steps(
        inputs.token_rewards, inputs.turns, inputs.group_size, normalize_std=inputs.normalize_std
    )


@register_advantage("reinforce_plus_plus")
def _reinforce_plus_plus(inputs: AdvantageInputs) -> Float[Tensor, "batch sequence"]:
    return formulas.reinforce_plus_plus(inputs.token_rewards, inputs.token_mask, inputs.ranks)


@register_advantage("reinforce_plus_plus_baseline")
def _reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Float[Tensor, "batch sequence"]:
    return formulas.reinforce_plus_plus_baseline(
        inputs.rewards, inputs.group_size, inputs.token_mask, inputs.ranks, inputs.sample_mask
    )


@register_advantage("optimal_baseline")
def _optimal_baseline(inputs: AdvantageInputs) -> Float[Tensor, " batch"]:
    return formulas.optimal_baseline(inputs.rewards, inputs.group_size, inputs.token_mask, inputs.sample_mask)


@register_advantage("group_decoupled")
def _group_decoupled(inputs: AdvantageInputs) -> Float[Tensor, " batch"]:
    scores, weights = inputs.component_rewards, inputs.component_weights
    function_weights = torch.tensor([weights[name] for name in scores])
    return formulas.group_decoupled(
        torch.stack(list(scores.values()), 1), function_weights, inputs.group_size, inputs.ranks
    )


class AdvantagesFailed(RunFailed):
    """The error of a user's advantage estimator that failed in a step."""


def estimate_advantages(
    rollouts: Batch, algorithm: GRPOConfig, loss_fn: LossFunction, reward: RewardConfig | None = None
) -> Float[Tensor, "batch sequence"]:
    """Return the configured estimator's advantages [B, S] of this rank's sequences; they are 0 where token_mask is 0.

    Collective. Raises AdvantagesFailed on every rank if the estimator fails on any rank, or returns a wrong shape or
    values that are not finite. `reward` has the weights of the reward functions; if it is None, all are 1.
    """
    try:
        return rollouts.all_ranks.all_or_none(lambda: _estimate(rollouts, algorithm, loss_fn, reward))
    except ConfigError as error:
        raise AdvantagesFailed(f"the advantage estimator failed: {error}") from error


def group_for_owners(rollouts: Batch, algorithm: GRPOConfig) -> Tensor | None:
    """Return a group number per sequence (one rank must own a whole group), or None if ranks may own any sequence."""
    together = get_estimator(algorithm.advantage_estimator).together
    if together == "group":
        return rollouts.trajectories.owner // algorithm.samples_per_prompt
    return whole_trajectories(rollouts) if together == "trajectory" else None


def _estimate(
    rollouts: Batch, algorithm: GRPOConfig, loss_fn: LossFunction, reward: RewardConfig | None
) -> Float[Tensor, "batch sequence"]:
    name, is_whole = algorithm.advantage_estimator, get_estimator(algorithm.advantage_estimator).together == "sequence"
    where, mask = f"algorithm.advantage_estimator={name}", rollouts["token_mask"]
    inputs = AdvantageInputs(
        BatchedDataDict(rollouts.facts) if is_whole else rollouts.local, algorithm.samples_per_prompt,
        ranks=ALONE if is_whole else rollouts.ranks, loss_fn=loss_fn, reward=reward,
        leave_one_out=algorithm.leave_one_out, normalize_std=algorithm.normalize_std,
    )  # fmt: skip
    index, function = inputs.index, ADVANTAGES.find(name, "algorithm.advantage_estimator")
    try:
        advantages = function(inputs)
    except ConfigError:
        raise
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(f"{where} {describe_user_error(error)}") from error
    shapes = [(index.num_trajectories,), *([] if is_whole else [tuple(inputs.token_mask.shape)])]
    if not isinstance(advantages, Tensor) or tuple(advantages.shape) not in shapes:
        shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
        raise ConfigError(f"{where} returned {shape}; it must return a tensor {' or '.join(map(str, shapes))}")
    if is_whole:
        advantages = rollouts.select_local(index.spread(advantages))[:, None]
    elif advantages.dim() == 1:
        advantages = index.spread(advantages)[:, None]
    else:
        advantages = index.split(advantages)
    advantages = torch.where(mask != 0, advantages, 0.0).to(mask.device)
    if not advantages.isfinite().all():
        raise ConfigError(f"{where} returned advantages that are not finite")
    return advantages
