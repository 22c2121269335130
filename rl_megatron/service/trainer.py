"""`ServiceTrainer`: what a training service computes with the model. Every rank calls it with the same arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from rl_megatron.batching.step_microbatches import plan_microbatches, plan_step
from rl_megatron.config.peft import LoraConfig
from rl_megatron.data.token_keys import declare_token_keys
from rl_megatron.service.datums import Datum, form_batch
from rl_megatron.service.losses import TargetLoss
from rl_megatron.training.adapter_runs import AdapterRun, AdapterSlot, AdapterSlots, SavedAdapter
from rl_megatron.training.inference import build_whole_batch, prepare
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.metrics import Denominators
from rl_megatron.training.token_values import TokenValues


@dataclass(frozen=True)
class LossResult:
    """The result of a loss on datums.

    Attributes:
        logprobs: The logprobs of each datum's targets, in the shape of its targets, fp32.
        metrics: The metrics of all datums together.
    """

    logprobs: list[np.ndarray]
    metrics: dict[str, float]


class ServiceTrainer:
    """The adapters of many training runs on the frozen model of a policy. All methods are collective.

    An operation computes with the adapter of one run only, or with none. So its result is bitwise the same, whatever
    other runs there are.
    """

    def __init__(self, policy: MegatronPolicy):
        """Freeze the policy's model, which must have no optimizer."""
        assert policy.optimizer is None and policy.model.lora is None, "the adapters of runs have their own optimizers"
        self.policy = policy
        self._slots = AdapterSlots(policy.model)

    def create(self, config: LoraConfig, seed: int) -> AdapterRun:
        """Return a new adapter with initial weights. Equal seeds give equal weights.

        Raises:
            ConfigError: The adapter does not fit the model.
        """
        return AdapterRun(self._slots.find(config), seed)

    def find_slot(self, config: LoraConfig) -> AdapterSlot:
        """Return the places in the model for adapters with these settings. ConfigError is raised if they do not fit."""
        return self._slots.find(config)

    @contextmanager
    def using(self, run: AdapterRun | SavedAdapter | None) -> Iterator[None]:
        """Let the model compute with a run's adapter within the block, or as the base model if `run` is None."""
        with nullcontext() if run is None else run.computing():
            yield

    def compute(
        self, run: AdapterRun | SavedAdapter | None, data: Sequence[Datum], loss: TargetLoss, backward: bool
    ) -> LossResult:
        """Return the loss's result for datums that were checked; with `backward`, add its gradient to the run's.

        If `run` is None, the base model computes it, without a gradient.

        Raises:
            NonFiniteLoss: The loss is not finite. The run's gradients are then as before.
        """
        assert isinstance(run, AdapterRun) or not backward, "only a training run has gradients"
        policy, topology = self.policy, self.policy.topology
        declare_token_keys(*loss.next_token_keys)
        batch = prepare(policy.model, build_whole_batch(policy.model, form_batch(data, loss)))
        step = plan_step(batch, 0, batch.size, policy.batching, topology, topology.data_rank)
        plan = plan_microbatches(batch, step)
        policy.model.set_training(backward)
        with run.computing(backward) if isinstance(run, AdapterRun) else self.using(run):
            report = policy.runner.train_step(
                plan.microbatches, loss, Denominators.count(batch.local, batch.ranks), forward_only=not backward
            )
        policy.model.set_training(False)
        element = 2 if policy.model.precision == "bf16" else 4
        values = TokenValues(batch, step, 1, topology, policy.model_config.hidden_size * element)
        num_targets = max(datum.targets.shape[1] for datum in data)
        gathered = values.gather(loss.logprobs[: len(plan.microbatches)], torch.zeros(num_targets))
        logprobs = [
            gathered[index, 1 : len(datum.tokens) + 1, : datum.targets.shape[1]].numpy().reshape(datum.shape)
            for index, datum in enumerate(data)
        ]
        return LossResult(logprobs, {name: report[name] for name in loss.metric_reductions})
