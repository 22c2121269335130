"""One optimizer step, or one evaluation of the loss, on this rank's microbatches of a global batch."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rl_megatron.batching.rank_plan import RankPlan
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution import Denominators, Runner
from rl_megatron.execution.phase_timer import phase
from rl_megatron.losses.base import Loss
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.policy.gradient_norms import GradientNorms
from rl_megatron.policy.optimizer import norm_after_clipping, take_step


def require_whole_groups(loss: Loss, counts: Mapping[str, int]) -> None:
    """Refuse sizes that would separate sequences that the loss needs together.

    Args:
        loss: The loss. Its `group_size` is 2 for preference pairs.
        counts: The sizes to check, in sequences, by their names for the message.

    Raises:
        ValueError: A size is not a multiple of the group size.
    """
    for name, count in counts.items():
        if count % loss.group_size:
            size = loss.group_size
            raise ValueError(
                f"{loss.display_name} needs groups of {size} sequences, but {name} has {count}; use a multiple of "
                f"{size}"
            )


def evaluate_batch(runner: Runner, batch: BatchedDataDict, planned: RankPlan, loss: Loss) -> dict[str, float]:
    """Return the loss's metrics on one global batch, without gradients. Collective."""
    report = runner.train_step(planned.microbatches, loss, Denominators.count(batch), forward_only=True)
    return report | {"packing_efficiency": planned.efficiency}


def accumulate_gradients(
    model: ShardedModel,
    runner: Runner,
    optimizer: MegatronOptimizer,
    planned: RankPlan,
    loss: Loss,
    denominators: Denominators,
) -> dict[str, float]:
    """Return the loss's metrics, and store its gradient in the parameters' `main_grad`. Collective."""
    for model_chunk in model.wrapped_model_chunks:
        model_chunk.zero_grad_buffer()
    optimizer.zero_grad()
    report = runner.train_step(planned.microbatches, loss, denominators)
    model.mark_gathered()
    return report


def train_on_batch(
    model: ShardedModel,
    runner: Runner,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler,
    gradients: GradientNorms,
    batch: BatchedDataDict,
    planned: RankPlan,
    loss: Loss,
) -> dict[str, float]:
    """Take one optimizer step, and return the loss's metrics with gradient norms, `lr` and `updated`. Collective.

    A batch without a valid token changes nothing: weights, moments and learning rate stay the same.

    Raises:
        NonFiniteLoss: The loss or the gradient norm is not finite. It is raised on every rank before a weight has
            changed.
    """
    denominators = Denominators.count(batch)
    report = accumulate_gradients(model, runner, optimizer, planned, loss, denominators)
    updated, lr = False, optimizer.param_groups[0]["lr"]
    outcome: dict[str, float] = dict.fromkeys(gradients.names, 0.0)
    if denominators.tokens > 0:
        with phase("optimizer"):
            outcome, updated = take_step(model, optimizer, scheduler, gradients, report["loss"])
    outcome["grad_norm_clipped"] = norm_after_clipping(optimizer, outcome["grad_norm"])
    outcome |= {"lr": lr, "updated": float(updated)}
    return report | outcome | {"packing_efficiency": planned.efficiency}
