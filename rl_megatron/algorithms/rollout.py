"""The parts of policy gradients that follow sampling: the loss, logprobs, and rewards of tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import token_rewards
from rl_megatron.algorithms.registry import LossNeeds
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.config.algorithm_kinds import PolicyGradientConfig, RolloutConfig
from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import RolloutPrompts
from rl_megatron.losses.contract import LossFunction
from rl_megatron.losses.functional import kl_penalty
from rl_megatron.losses.registry import configured_loss
from rl_megatron.policy.interfaces import PolicyInterface
from rl_megatron.rollouts.batch import TURN_REWARDS
from rl_megatron.rollouts.statistics import mean_over_tokens
from rl_megatron.timing import count_tokens, phase

# The keys of rollouts when they reach the loss.
ROLLOUT_KEYS = frozenset(
    "input_ids input_lengths token_mask sample_mask rewards advantages temperature generation_logprobs prev_logprobs "
    "reference_policy_logprobs covariance_mask".split()
)


def _uses_advantages(loss_fn: LossFunction) -> bool:
    return "advantages" in getattr(loss_fn, "required_keys", ("advantages",))  # without required_keys, it may use them


ROLLOUT_LOSS = LossNeeds("advantages", _uses_advantages, ROLLOUT_KEYS, "clipped_pg")


def uses_reference(stage: StageConfig) -> bool:
    return needs_reference(rollout_loss(stage))


def rollout_loss(stage: StageConfig) -> LossFunction:
    """Return the loss of a stage, with the importance weights that `rollout.importance_correction` selects."""
    recomputed = stage.rollout.correction == "recomputed" and stage.rollout.async_enabled
    return configured_loss({**stage.loss, **({"use_importance_sampling_correction": True} if recomputed else {})})


def check_problems(stage: StageConfig, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Check that there are enough different problems for a step; return the largest length of prompt plus completion.

    Raises:
        ConfigError: There are too few problems, or a completion may not fit after a prompt.
    """
    algorithm: RolloutConfig = stage.algorithm  # pyright: ignore[reportAssignmentType] registered only for this class
    return [(RolloutPrompts(stage, algorithm, tokenizer).longest + stage.generation.max_new_tokens,)]


def check_policy_gradient(stage: StageConfig, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Run `check_problems`, and refuse algorithm.recompute_logprobs=never for a loss that needs `prev_logprobs`."""
    algorithm: PolicyGradientConfig = stage.algorithm  # pyright: ignore[reportAssignmentType] registered only for this class
    recomputes_logprobs(stage, algorithm, rollout_loss(stage))
    return check_problems(stage, tokenizer)


def recomputes_logprobs(stage: StageConfig, algorithm: PolicyGradientConfig, loss_fn: LossFunction) -> bool:
    """Return whether `prev_logprobs` are computed before the policy learns from a rollout.

    With `rollout.importance_correction=engine`, the engine's logprobs are used instead. With
    `algorithm.recompute_logprobs=auto`, they are computed unless the loss takes them from the forward pass of the
    training step (`Loss.on_policy_keys`) and nothing else may read them. With `never`, a loss that needs them raises
    ConfigError.
    """
    if stage.rollout.correction == "engine":
        return False
    key = "prev_logprobs"
    needed = key in getattr(loss_fn, "required_keys", ())
    if algorithm.recompute_logprobs == "never" and needed:
        raise ConfigError(
            f"algorithm.recompute_logprobs=never: loss.name={stage.loss['name']} needs {key!r} in its batch; set "
            "recompute_logprobs to auto"
        )
    if algorithm.recompute_logprobs != "auto":
        return algorithm.recompute_logprobs == "always"
    derived = key in getattr(loss_fn, "on_policy_keys", ())
    return not derived or algorithm.may_read_logprobs() or algorithm.needs_logprobs(stage) is not None


def whole_trajectories(rollouts: Batch) -> Tensor | None:
    """Return the trajectory number of each sequence, or None if each trajectory is one sequence."""
    return None if rollouts.trajectories.all_alone else rollouts.trajectories.owner


def add_logprobs(
    rollouts: Batch, policy: PolicyInterface, *, recompute: bool, reference: bool, from_engine: bool = False
) -> Batch:
    """Add `prev_logprobs` and, if `reference`, `reference_policy_logprobs`, and return the rollouts.

    `prev_logprobs` are those of the current policy if `recompute`, or those that the engine reported if `from_engine`.
    """
    if from_engine:
        rollouts["prev_logprobs"] = rollouts["generation_logprobs"].clone()
    if recompute:
        with phase("logprobs"):
            rollouts["prev_logprobs"] = policy.get_logprobs(rollouts)["logprobs"]
            count_tokens(rollouts.num_tokens)
    if reference:
        with phase("reference"):
            rollouts["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(rollouts)["reference_logprobs"]
            count_tokens(rollouts.num_tokens)
    return rollouts


def kl_in_reward(loss_fn: LossFunction) -> float:
    """Return β if the KL penalty is part of the reward (`use_kl_in_reward`) instead of the loss, otherwise 0."""
    cfg = _kl_settings(loss_fn)
    return 0.0 if cfg is None else cfg.reference_policy_kl_penalty


def _kl_settings(loss_fn: LossFunction) -> ClippedPGLossConfig | None:
    """Return the settings of a loss whose KL penalty is part of the reward, or None for any other loss."""
    cfg = getattr(loss_fn, "cfg", None)
    return cfg if getattr(cfg, "use_kl_in_reward", False) else None


def needs_reference(loss_fn: LossFunction) -> bool:
    return "reference_policy_logprobs" in getattr(loss_fn, "required_keys", ()) or kl_in_reward(loss_fn) > 0


def rewards_per_token(rollouts: BatchedDataDict, index: TrajectoryIndex, loss_fn: LossFunction) -> Tensor:
    """Return token rewards [B, S]: the reward of each trajectory at its last sampled token, minus any KL penalty.

    Rewards that an environment gave for turns are at the last tokens of these turns instead. If the KL penalty is part
    of the reward, β·KL(π_prev‖π_ref) is subtracted at every sampled token.
    """
    kl = _kl_of_tokens(rollouts, loss_fn)
    at_end, of_turns = rollouts["rewards"].float(), rollouts.get(TURN_REWARDS)
    if of_turns is not None:  # turn rewards stay at their tokens; the rest of the reward is at the last token
        at_end = torch.where(index.is_last(), at_end - index.spread(index.total(of_turns.sum(1))), 0.0)
    rewards = token_rewards(at_end, rollouts["token_mask"], kl, kl_in_reward(loss_fn))
    return rewards if of_turns is None else rewards + of_turns


def reward_kl(rollouts: Batch, loss_fn: LossFunction) -> dict[str, float]:
    """Return the metric `reward_kl`: the mean KL over sampled tokens, without the factor β. Collective.

    The result is empty if the KL penalty is not part of the reward.
    """
    kl = _kl_of_tokens(rollouts, loss_fn)
    return {} if kl is None else {"reward_kl": mean_over_tokens(kl, rollouts)}


def _kl_of_tokens(rollouts: Mapping[str, Tensor], loss_fn: LossFunction) -> Tensor | None:
    """Return KL(π_prev‖π_ref) [B, S], with the loss's estimator and clamps, or None if the reward has no KL penalty."""
    cfg = _kl_settings(loss_fn)
    if cfg is None or cfg.reference_policy_kl_penalty == 0:
        return None
    return kl_penalty(
        rollouts["prev_logprobs"], rollouts["reference_policy_logprobs"], cfg.reference_policy_kl_type,
        cfg.kl_input_clamp_value, cfg.kl_output_clamp_value,
    )  # fmt: skip
