"""`Trainer`: takes optimizer steps on this rank's part of global batches, and reports gradient norms."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config
from torch import Tensor

from rl_megatron import log
from rl_megatron.checkpoint.optimizer_state import list_main_parameters, list_parts
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.losses.base import Loss
from rl_megatron.model.layers.router import find_moving_routers, move_biases
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.timing import phase
from rl_megatron.training.metrics import NonFiniteLoss, combine_steps
from rl_megatron.training.optimizer import build_optimizer, build_scheduler, wrap_for_gradients
from rl_megatron.training.runner import Runner
from rl_megatron.training.steps import OptimizerStep

QUARTERS = 4
# The groups that have gradient norms: the embedding, quarters of the layers, and the parameters after the layers.
GROUPS = ("embedding", *(f"layers_{quarter}" for quarter in range(1, QUARTERS + 1)), "output")


class Trainer:
    """The owner of a model's gradient buffers and optimizer, which takes steps. All methods are collective.

    A step with a NaN or infinite loss or gradient norm can be skipped. The trainer counts the steps that were skipped
    since the last update. All ranks raise `NonFiniteLoss` for the same step, so all of them skip it.

    Attributes:
        runner: The runner, which computes gradients.
        optimizer: megatron-core's optimizer.
        scheduler: The optimizer's learning-rate schedule.
    """

    def __init__(
        self,
        model: ShardedModel,
        runner: Runner,
        config: OptimizerConfig,
        precision: str,
        total_steps: int | None,
        max_skipped_steps: int,
    ):
        """Wrap the model chunks in megatron-core's DDP, and build their optimizer."""
        model.model_chunks[:] = wrap_for_gradients(model.model_chunks, model.topology, config)
        self._model, self.runner = model, runner
        self.optimizer = build_optimizer(model.wrapped_model_chunks, config, precision, model.topology)
        self.scheduler = build_scheduler(self.optimizer, config, total_steps)
        self._gradients = GradientNorms(self.optimizer, model.wrapped_model_chunks)
        self._clip_grad = config.clip_grad
        self._max_skipped, self._num_skipped = max_skipped_steps, 0

    def train(self, steps: Iterable[OptimizerStep], loss: Loss) -> dict[str, Any]:
        """Take optimizer steps, which `steps` plans one by one, and return their combined metrics."""
        reports = [self.step(step, loss) for step in steps]
        counts = {"num_updates": int(sum(report["updated"] for report in reports))}
        if self._max_skipped:
            counts["skipped_steps"] = int(sum(report["skipped_steps"] for report in reports))
        return combine_steps(reports, loss) | counts

    def step(self, step: OptimizerStep, loss: Loss) -> dict[str, float]:
        """Take one optimizer step, and return the loss's metrics with gradient norms, `lr` and `updated`.

        A batch without a valid token changes nothing: weights, moments and learning rate stay the same. If the loss or
        the gradient norm is not finite and the step may not be skipped, every rank raises `NonFiniteLoss` before a
        weight has changed.
        """
        lr = self.optimizer.param_groups[0]["lr"]
        if lr == 0:
            log.once(
                "the learning rate is 0, so optimizer steps do not change the weights: the decay has ended at "
                "optimizer.min_lr=0; raise optimizer.decay_steps or min_lr"
            )
        try:
            report = self.accumulate(step, loss)
            norms, updated = dict.fromkeys((*self._gradients.names, "grad_norm_clipped"), 0.0), False
            if step.denominators.tokens > 0:
                with phase("optimizer"):
                    norms, updated = self.update(report["loss"])
        except NonFiniteLoss as error:
            self._skip(error)
            return {"lr": lr, "updated": 0.0, "skipped_steps": 1.0}
        if updated:
            self._num_skipped = 0
        report |= norms | {"lr": lr, "updated": float(updated), "packing_efficiency": step.plan.efficiency}
        return report | ({"skipped_steps": 0.0} if self._max_skipped else {})

    def accumulate(self, step: OptimizerStep, loss: Loss) -> dict[str, float]:
        """Store the loss's gradient of one step in the parameters' `main_grad`, and return the loss's metrics."""
        for model_chunk in self._model.wrapped_model_chunks:
            model_chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        report = self.runner.train_step(
            step.plan.microbatches, loss, step.denominators, number=self.scheduler.num_steps
        )
        self._model.mark_gathered()
        return report

    def update(self, loss: float) -> tuple[dict[str, float], bool]:
        """Update the weights with the buffered gradients, and advance the schedule.

        Return the gradient norms before clipping, with `grad_norm_clipped`, and whether the weights were updated. If
        the norm is not finite, raise NonFiniteLoss instead; `loss` is for its message.
        """
        self.optimizer.prepare_grads()
        norms = self._gradients.compute()
        grad_norm = clipped = norms["grad_norm"]
        if not math.isfinite(grad_norm):  # clipping with it would make every weight NaN
            raise NonFiniteLoss(f"the gradient norm is {grad_norm} at a finite loss of {loss:.4g}")
        if self._clip_grad > 0:
            for part in list_parts(self.optimizer):
                clip_grads.clip_grad_by_total_norm_fp32([*part.get_parameters()], self._clip_grad, grad_norm)
            clipped *= min(1.0, self._clip_grad / (grad_norm + 1e-6))  # megatron-core scales gradients by this factor
        updated = bool(self.optimizer.step_with_ready_grads())
        self._model.mark_updated(updated)
        if updated and self._model.lora is None:  # the routers beside adapters are frozen
            move_biases(find_moving_routers(self._model.model_chunks), self._model.topology.groups.tp_dp_cp)
        self.scheduler.step(increment=1)
        return norms | {"grad_norm_clipped": clipped}, updated

    def _skip(self, error: NonFiniteLoss) -> None:
        """Count a step as skipped, or raise its error if no further step in a row may be skipped."""
        if self._max_skipped == 0:
            raise error
        if self._num_skipped == self._max_skipped:
            raise NonFiniteLoss(
                f"{error}; the {self._max_skipped} optimizer steps before were skipped for the same kind of failure "
                "(train.max_nonfinite_steps)"
            ) from error
        self._num_skipped += 1
        log.LOGGER.warning("an optimizer step is skipped, and weights and optimizer state stay unchanged: %s", error)


class GradientNorms:
    """The gradient norms of an optimizer: of all weights together, and of each group of layers.

    A weight that several ranks or model chunks hold counts once, as in megatron-core's norm.

    Attributes:
        names: The names of the norms: of the whole gradient, then of each group that the model has.
    """

    def __init__(self, optimizer: MegatronOptimizer, model_chunks: Iterable[torch.nn.Module]):
        """Find the group of every weight that this rank updates."""
        model_chunks = list(model_chunks)
        num_layers = get_model_config(model_chunks[0]).num_layers
        used = {"embedding", "output", *(f"layers_{_quarter(layer + 1, num_layers)}" for layer in range(num_layers))}
        groups = [name for name in GROUPS if name in used]
        self.names = ("grad_norm", *(f"grad_norm_{name}" for name in groups))
        group_indices = {
            id(parameter): groups.index(name)
            for model_chunk in model_chunks
            for parameter, name in _find_groups(model_chunk, num_layers).items()
        }
        self._device = next(model_chunks[0].parameters()).device
        self._counted: dict[dist.ProcessGroup, list[list[Tensor]]] = {}  # weights by group of layers
        for part in list_parts(optimizer):
            ranks = part.get_grad_stats_parallel_group()
            counted = self._counted.setdefault(ranks, [[] for _ in groups])
            tp_group = getattr(part, "tp_group", None)
            for parameter, main in list_main_parameters(part):
                if param_is_not_shared(main) and param_is_not_tensor_parallel_duplicate(main, tp_group):
                    counted[group_indices[id(parameter)]].append(main)

    @torch.no_grad()
    def compute(self) -> dict[str, float]:
        """Return the norm of the whole gradient and of each group, by name. Collective.

        Parts of the optimizer whose gradients are on the same ranks share a reduction. The host waits for the device
        once.
        """
        totals = []
        for ranks, counted in self._counted.items():
            total = torch.zeros(len(counted), device=self._device)
            for index, weights in enumerate(counted):
                gradients = [weight.grad for weight in weights if weight.grad is not None]
                if gradients:
                    total[index] = torch.nn.utils.get_total_norm(gradients).square()
            dist.all_reduce(total, group=ranks)
            totals.append(total)
        squared = torch.stack(totals).sum(dim=0).tolist()
        return dict(zip(self.names, map(math.sqrt, [sum(squared), *squared]), strict=True))


def _find_groups(model_chunk: torch.nn.Module, num_layers: int) -> dict[Tensor, str]:
    """Return the group of every parameter of a model chunk."""
    groups: dict[Tensor, str] = {}
    for name, module in model_chunk.named_modules():
        if isinstance(module, TransformerLayer) and "decoder.layers." in name:
            groups |= dict.fromkeys(module.parameters(), f"layers_{_quarter(module.layer_number, num_layers)}")
    for name, parameter in model_chunk.named_parameters():
        groups.setdefault(parameter, "embedding" if "embedding." in name else "output")
    return groups


def _quarter(layer_number: int, num_layers: int) -> int:
    """Return the quarter (1 to 4) of the model that has this layer. Layers are numbered from 1 over all stages."""
    return (layer_number - 1) * QUARTERS // num_layers + 1
