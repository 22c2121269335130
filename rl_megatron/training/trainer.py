"""`Trainer`: takes optimizer steps on this rank's microbatches of global batches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron.core.optimizer import clip_grads

from rl_megatron import log
from rl_megatron.batching.rank_plan import RankPlan
from rl_megatron.checkpoint.optimizer_state import parts
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.losses.base import Loss
from rl_megatron.model.layers.router import move_biases, moving_routers
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.timing import phase
from rl_megatron.training.gradient_norms import GradientNorms
from rl_megatron.training.metrics import Denominators, NonFiniteLoss
from rl_megatron.training.optimizer import build_optimizer, build_scheduler, wrap_for_gradients
from rl_megatron.training.runner import Runner
from rl_megatron.training.skipped_steps import SkippedSteps


class Trainer:
    """The gradient buffers and the optimizer of a model, and the steps that they take. All methods are collective.

    Attributes:
        optimizer: megatron-core's optimizer.
        scheduler: The optimizer's learning-rate schedule.
    """

    def __init__(
        self,
        model: ShardedModel,
        config: OptimizerConfig,
        precision: str,
        total_steps: int | None,
        max_skipped_steps: int,
    ):
        """Wrap the model chunks in megatron-core's DDP, and build their optimizer."""
        model.model_chunks[:] = wrap_for_gradients(model.model_chunks, model.topology, config)
        self._model = model
        self.optimizer = build_optimizer(model.wrapped_model_chunks, config, precision, model.topology)
        self.scheduler = build_scheduler(self.optimizer, config, total_steps)
        self._gradients = GradientNorms(self.optimizer, model.wrapped_model_chunks)
        self._clip_grad = config.clip_grad
        self._skipped = SkippedSteps(max_skipped_steps)

    def accumulate(self, runner: Runner, planned: RankPlan, loss: Loss, denominators: Denominators) -> dict[str, float]:
        """Return the loss's metrics, and store its gradient in the parameters' `main_grad`."""
        for model_chunk in self._model.wrapped_model_chunks:
            model_chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        report = runner.train_step(planned.microbatches, loss, denominators, number=self.scheduler.num_steps)
        self._model.mark_gathered()
        return report

    def step(self, runner: Runner, planned: RankPlan, loss: Loss, denominators: Denominators) -> dict[str, float]:
        """Take one optimizer step, and return the loss's metrics with gradient norms, `lr` and `updated`.

        A batch without a valid token changes nothing: weights, moments and learning rate stay the same.

        Raises:
            NonFiniteLoss: The loss or the gradient norm is not finite, and the step may not be skipped. It is raised on
                every rank before a weight has changed.
        """
        lr = self.optimizer.param_groups[0]["lr"]
        if lr == 0:
            log.once(
                "the learning rate is 0, so that optimizer steps change no weight: the decay has ended at "
                "optimizer.min_lr=0; set optimizer.decay_steps or min_lr"
            )

        def train() -> dict[str, float]:
            report = self.accumulate(runner, planned, loss, denominators)
            norms, updated = dict.fromkeys(self._gradients.names, 0.0), False
            if denominators.tokens > 0:
                with phase("optimizer"):
                    norms, updated = self.update(report["loss"])
            clipped = self._norm_after_clipping(norms["grad_norm"])
            costs = {"packing_efficiency": planned.efficiency}
            return report | norms | {"grad_norm_clipped": clipped, "lr": lr, "updated": float(updated)} | costs

        return self._skipped.take(train, lr)

    def update(self, loss: float) -> tuple[dict[str, float], bool]:
        """Update the weights with the gradients in their buffers, and advance the schedule.

        Args:
            loss: The value of the loss, for the error message.

        Returns:
            The gradient's norms before clipping, in all and by group of layers, and whether the weights were updated.

        Raises:
            NonFiniteLoss: The gradient norm is NaN or infinite. Nothing is updated then.
        """
        self.optimizer.prepare_grads()
        norms = self._gradients.norms()
        grad_norm = norms["grad_norm"]
        if not math.isfinite(grad_norm):  # clipping with it would make every weight NaN
            raise NonFiniteLoss(f"the gradient norm is {grad_norm} at a finite loss of {loss:.4g}")
        if self._clip_grad > 0:
            for part in parts(self.optimizer):
                clip_grads.clip_grad_by_total_norm_fp32([*part.get_parameters()], self._clip_grad, grad_norm)
        updated = bool(self.optimizer.step_with_ready_grads())
        self._model.mark_updated(updated)
        if updated and self._model.lora is None:  # the routers beside adapters are frozen
            move_biases(moving_routers(self._model.model_chunks), self._model.topology.groups.tp_dp_cp)
        self.scheduler.step(increment=1)
        return norms, updated

    def _norm_after_clipping(self, grad_norm: float) -> float:
        """Return the norm that the gradient has after megatron-core has clipped it."""
        return grad_norm * min(1.0, self._clip_grad / (grad_norm + 1e-6)) if self._clip_grad > 0 else grad_norm


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
