"""`OptimizerSteps`: takes the optimizer steps of a batch, or computes a loss's metrics on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from rl_megatron.batching.config import Batching, require_count
from rl_megatron.data.token_keys import declare_token_keys
from rl_megatron.losses.base import Loss
from rl_megatron.policy.interfaces import Batch
from rl_megatron.training.batches import PlannedStep, StepPlanner
from rl_megatron.training.metrics import over_steps
from rl_megatron.training.runner import Runner
from rl_megatron.training.skipped_steps import counts
from rl_megatron.training.teacher import Teacher
from rl_megatron.training.trainer import Trainer, require_whole_groups


class OptimizerSteps:
    """The optimizer steps of a policy's batches. All methods are collective."""

    def __init__(self, planner: StepPlanner, runner: Runner, trainer: Trainer | None):
        """Keep what plans, computes and trains. A policy without an optimizer has no trainer."""
        self._planner, self._runner, self._trainer = planner, runner, trainer

    def require_optimizer(self) -> Trainer:
        """Return the trainer.

        Raises:
            RuntimeError: The policy was built without an optimizer.
        """
        if self._trainer is None:
            raise RuntimeError("this policy was built without an optimizer; pass `optimizer` to train it")
        return self._trainer

    def release(self) -> None:
        """Drop the optimizer."""
        self._trainer = None

    def planned(
        self,
        data: Batch,
        loss: Loss,
        batching: Batching,
        gbs: int,
        sizes: Sequence[int] | None,
        teacher: Teacher | None = None,
        on_policy: bool = True,
    ) -> Iterator[PlannedStep]:
        """Return an iterator over the optimizer steps of a batch; the arguments are those of `MegatronPolicy.train`.

        Raises:
            ValueError: The sizes would separate sequences that the loss needs together, or the batch lacks logprobs of
                before the first step.
        """
        declare_token_keys(*loss.next_token_keys)
        if sizes is not None:
            for number, size in enumerate(sizes):
                require_count(f"sizes[{number}]", size)
            if sum(sizes) != data.size:
                raise ValueError(f"sizes {list(sizes)} must add up to the batch, which has {data.size} sequences")
        _require_logprobs(data, loss, on_policy, -(-data.size // gbs) if sizes is None else len(sizes))
        per_microbatch = {"mbs": batching.sequences} if batching.kind == "padded" else {}
        require_whole_groups(loss, {"the batch": data.size, "gbs": gbs, **per_microbatch})
        counts_of = {key: count for key, count in loss.global_counts.items() if key not in data}
        steps = self._planner.steps(data, batching, loss.group_size, gbs, sizes, counts_of)
        if teacher is None:
            return steps
        return (replace(step, plan=teacher.attached(step.plan)) for step in steps)

    def take(self, steps: Iterable[PlannedStep], loss: Loss) -> dict[str, Any]:
        """Take the steps, and return the metrics over them."""
        trainer = self.require_optimizer()
        reports = [trainer.step(self._runner, step.plan, loss, step.denominators) for step in steps]
        return over_steps(reports, loss) | counts(reports)

    def evaluate(self, steps: Iterable[PlannedStep], loss: Loss) -> dict[str, Any]:
        """Return the metrics over the steps without gradients."""
        reports = [
            self._runner.train_step(step.plan.microbatches, loss, step.denominators, forward_only=True)
            | {"packing_efficiency": step.plan.efficiency}
            for step in steps
        ]
        return over_steps(reports, loss)

    def accumulate(self, step: PlannedStep, loss: Loss) -> dict[str, float]:
        """Return the loss's metrics on one step, and store its gradient in the parameters' `main_grad`."""
        return self.require_optimizer().accumulate(self._runner, step.plan, loss, step.denominators)


def _require_logprobs(data: Batch, loss: Loss, on_policy: bool, steps: int) -> None:
    """Check that a batch has what the loss reads of the time before the first of the steps, unless it may do without.

    Raises:
        ValueError: It has not.
    """
    missing = ", ".join(repr(key) for key in sorted(loss.on_policy_keys) if key not in data)
    if not missing or not loss.reads_on_policy_keys:
        return
    compute = "compute it with policy.get_logprobs(batch)['logprobs'] before the first step"
    if not on_policy:
        raise ValueError(
            f"{loss.display_name} needs {missing}, which the batch does not have: {compute}, or pass on_policy=True if "
            "this is the first step since the policy sampled the batch"
        )
    if steps > 1:
        raise ValueError(
            f"{loss.display_name} needs {missing} for {steps} optimizer steps, of which only the first one is "
            f"on-policy: {compute}"
        )
