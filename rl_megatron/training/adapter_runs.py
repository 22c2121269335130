"""Adapters of many training runs on one frozen model: their places in the model, their tensors and their optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.peft import DEFAULT_ADAPTER, LoraConfig
from rl_megatron.model.build import attach_frozen_adapters, unwrap
from rl_megatron.model.lora.attach import freeze_weights
from rl_megatron.model.lora.layers import LinearAdapter
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.topology.transfer import read_numbers

_MOST_SLOTS = 64


@dataclass(frozen=True)
class AdamParams:
    """The hyperparameters of one optimizer step: AdamW with decoupled weight decay, as the client sends them.

    Attributes:
        grad_clip_norm: Gradients are scaled down to this norm; 0: they are not clipped.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


class AdapterSlot:
    """The places in the model for the adapters of runs with the same rank, alpha and targets, one run at a time.

    Its parameters have no storage, except while a run uses the slot and they are the run's tensors.

    Attributes:
        config: The section `peft` that all runs of the slot share.
        model: The model, which is frozen.
        topology: Its layout.
        parameters: The parameters of this rank, always in the same order.
        entries: The place of each parameter in the whole tensor, by the name that peft gives it.
    """

    def __init__(self, model: ShardedModel, config: LoraConfig, name: str):
        """Add the places to a model whose weights are frozen."""
        self.config, self.model, self.topology = config, model, model.topology
        self._adapters: list[LinearAdapter] = attach_frozen_adapters(
            model.model_chunks, model.config, model.topology, model.vocab_size, replace(config, adapter_name=name)
        )
        places = [
            (adapter.get_parameter(local), entry)
            for adapter in self._adapters
            for local, entry in adapter.list_entries("")
        ]
        self.parameters = [parameter for parameter, _ in places]
        self.entries: list[ShardedTensor] = [entry for _, entry in places]
        self._shapes = [(parameter.shape, parameter.dtype) for parameter in self.parameters]
        self._none = torch.empty(0, device=model.topology.device)
        for entry in self.entries:
            entry.data = None
        self._release()

    def _release(self) -> None:
        for adapter in self._adapters:
            adapter.is_on = False
        for parameter in self.parameters:
            parameter.requires_grad_(False)
            parameter.data = self._none.to(parameter.dtype)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each parameter."""
        return [dtype for _, dtype in self._shapes]

    @contextmanager
    def holding(self, weights: Sequence[Tensor], gradients: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Let the model compute with these tensors within the block, and add gradients to `gradients`, in fp32."""
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.data = weight
        for adapter in self._adapters:
            adapter.is_on = True
        hooks = []
        for parameter, gradient in zip(self.parameters, gradients or [], strict=False):
            parameter.requires_grad_()
            hooks.append(parameter.register_post_accumulate_grad_hook(_AddTo(gradient)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._release()

    def make_weights(self, seed: int) -> list[Tensor]:
        """Return new tensors with the initial values of a run with this seed."""
        weights = [torch.empty(shape, dtype=dtype, device=self.topology.device) for shape, dtype in self._shapes]
        with self.holding(weights):
            for adapter in self._adapters:
                adapter.reset(replace(self.config, adapter_name=DEFAULT_ADAPTER), seed)
        return weights


class _AddTo:
    """A hook that moves a parameter's gradient to a sum in fp32."""

    def __init__(self, total: Tensor):
        self._total = total

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._total.add_(parameter.grad)
        parameter.grad = None


class AdapterSlots:
    """The slots of a model, which is frozen. There is one for each combination of rank, alpha and targets in use."""

    def __init__(self, model: ShardedModel):
        self._model = model
        self._slots: dict[LoraConfig, AdapterSlot] = {}
        for model_chunk in model.model_chunks:
            freeze_weights(unwrap(model_chunk))

    def find(self, config: LoraConfig) -> AdapterSlot:
        """Return the slot for these settings, which is added to the model if it has none. Collective if it is added.

        Raises:
            ConfigError: The settings do not fit the model, or there are too many others. The model is unchanged.
        """
        if config not in self._slots:
            if len(self._slots) == _MOST_SLOTS:
                ranks = sorted({other.r for other in self._slots})
                raise ConfigError(
                    f"there are {_MOST_SLOTS} kinds of adapters already; use one of their ranks: "
                    f"{', '.join(map(str, ranks))}"
                )
            self._slots[config] = AdapterSlot(self._model, config, f"slot-{len(self._slots)}")
        return self._slots[config]


@dataclass(frozen=True)
class SavedAdapter:
    """The weights of an adapter on this rank, which are only sampled from."""

    slot: AdapterSlot
    weights: Sequence[Tensor]

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the model compute with these weights within the block."""
        with self.slot.holding(self.weights):
            yield


class AdapterRun:
    """The adapter of one training run on this rank: its weights, accumulated gradients and optimizer.

    Attributes:
        slot: Its places in the model.
        weights: The tensors that the model computes with, in the model's dtype.
        masters: The tensors that the optimizer updates, in fp32. With a model in fp32 they are the weights.
        gradients: The sums of this rank's gradients since the last optimizer step, in fp32.
        has_gradients: Whether there was a backward pass since the last optimizer step.
        num_steps: The number of optimizer steps.
    """

    def __init__(self, slot: AdapterSlot, seed: int):
        self.slot = slot
        self.weights = slot.make_weights(seed)
        self.masters = [weight if weight.dtype is torch.float32 else weight.float() for weight in self.weights]
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        self.has_gradients = False
        self._optimizer = torch.optim.AdamW(self.masters, lr=0.0, fused=True)
        self.num_steps = 0
        self.set_moments(None, 0)

    @torch.no_grad()
    def set_weights(self, weights: Sequence[Tensor], masters: Sequence[Tensor] | None) -> None:
        """Copy weights into the run, and drop its gradients. Without `masters`, the masters are the weights."""
        for target, weight in zip(self.weights, weights, strict=True):
            target.copy_(weight)
        for target, master in zip(self.masters, masters or weights, strict=True):
            target.copy_(master)
        self._drop_gradients()

    @torch.no_grad()
    def set_moments(self, moments: Sequence[Sequence[Tensor]] | None, num_steps: int) -> None:
        """Set the optimizer's two moments and its number of steps. None: the moments are 0."""
        self.num_steps = num_steps
        for index, master in enumerate(self.masters):
            first, second = (
                (torch.zeros_like(master), torch.zeros_like(master))
                if moments is None
                else (moment[index].clone() for moment in moments)
            )
            step = torch.tensor(float(num_steps), device=master.device)
            self._optimizer.state[master] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def moments(self, name: str) -> list[Tensor]:
        """Return the optimizer's moment `exp_avg` or `exp_avg_sq` of every tensor."""
        return [self._optimizer.state[master][name] for master in self.masters]

    def state(self) -> dict[str, list[Tensor]]:
        """Return all tensors of the run on this rank, by kind. The weights are the masters in the model's dtype."""
        moments = {name: self.moments(name) for name in ("exp_avg", "exp_avg_sq")}
        return {"master": self.masters, "gradient": self.gradients, **moments}

    @property
    def has_masters(self) -> bool:
        """Return whether the masters are other tensors than the weights: the model does not compute in fp32."""
        return any(weight is not master for weight, master in zip(self.weights, self.masters, strict=True))

    @torch.no_grad()
    def set_state(self, state: Mapping[str, Sequence[Tensor]], num_steps: int, has_gradients: bool) -> None:
        """Copy all tensors, as `state` returned them, into the run."""
        self.set_weights(state["master"], state["master"])
        for target, gradient in zip(self.gradients, state["gradient"], strict=True):
            target.copy_(gradient)
        self.set_moments((state["exp_avg"], state["exp_avg_sq"]), num_steps)
        self.has_gradients = has_gradients

    def _drop_gradients(self) -> None:
        for gradient in self.gradients:
            gradient.zero_()
        self.has_gradients = False

    @contextmanager
    def computing(self, backward: bool = False) -> Iterator[None]:
        """Let the model compute with this adapter within the block; with `backward`, gradients are accumulated.

        If the block raises an error, the accumulated gradients are those from before.
        """
        kept = [gradient.clone() for gradient in self.gradients] if backward and self.has_gradients else None
        try:
            with self.slot.holding(self.weights, self.gradients if backward else None):
                yield
        except Exception:
            self._restore(kept)
            raise
        self.has_gradients = self.has_gradients or backward

    def _restore(self, kept: list[Tensor] | None) -> None:
        for index, gradient in enumerate(self.gradients):
            if kept is None:
                gradient.zero_()
            else:
                gradient.copy_(kept[index])

    @torch.no_grad()
    def step(self, params: AdamParams) -> float:
        """Take an optimizer step with the accumulated gradients, drop them, and return their norm. Collective.

        The norm is that before clipping. Without a backward pass since the last step, gradients count as 0, so that
        moments decay and weights move by their momentum and weight decay.

        Raises:
            FloatingPointError: The norm is not finite. On every rank; weights and moments are unchanged, and the
                gradients are dropped.
        """
        self.reduce()
        norm = self._compute_norm()
        try:
            if not torch.isfinite(torch.tensor(norm)):
                raise FloatingPointError(f"the gradient norm is {norm}, so the weights stay as they are")
            if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
                for gradient in self.gradients:
                    gradient.mul_(params.grad_clip_norm / norm)
            for group in self._optimizer.param_groups:
                group.update(
                    lr=params.learning_rate, betas=(params.beta1, params.beta2), eps=params.eps,
                    weight_decay=params.weight_decay,
                )  # fmt: skip
            for master, gradient in zip(self.masters, self.gradients, strict=True):
                master.grad = gradient
            self._optimizer.step()
            self.num_steps += 1
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad = None
                if weight is not master:
                    weight.copy_(master)
        finally:
            self._drop_gradients()
        return norm

    def reduce(self) -> None:
        """Sum the accumulated gradients over the ranks that have other tokens, once for each step. Collective."""
        groups = self.slot.topology.groups
        for group, chosen in (
            (groups.tp, [_is_summed_over_tensor(parameter) for parameter in self.slot.parameters]),
            (groups.dp_cp, [not _is_expert(parameter) for parameter in self.slot.parameters]),
            (groups.expt_dp, [_is_expert(parameter) for parameter in self.slot.parameters]),
        ):
            tensors = [gradient for gradient, wanted in zip(self.gradients, chosen, strict=True) if wanted]
            if tensors and group.size() > 1:
                flat = _flatten_dense_tensors(tensors)
                dist.all_reduce(flat, group=group)
                for tensor, total in zip(tensors, _unflatten_dense_tensors(flat, tensors), strict=True):
                    tensor.copy_(total)

    def _compute_norm(self) -> float:
        """Return the norm of the gradients of all ranks, which have been reduced. Collective."""
        groups, total = self.slot.topology.groups, torch.zeros((), device=self.slot.topology.device)
        for ranks, tensor_ranks, is_expert in (
            (groups.mp, groups.tp, False),
            (groups.tp_ep_pp, groups.expt_tp, True),
        ):
            counted = [
                gradient
                for gradient, parameter in zip(self.gradients, self.slot.parameters, strict=True)
                if _is_expert(parameter) is is_expert
                and param_is_not_tensor_parallel_duplicate(parameter, tensor_ranks)
            ]
            part = torch.zeros((), device=self.slot.topology.device)
            if counted:
                part = torch.nn.utils.get_total_norm(counted).square()
            if ranks.size() > 1:
                dist.all_reduce(part, group=ranks)
            total = total + part
        return read_numbers(total.sqrt()[None])[0]


def _is_expert(parameter: Tensor) -> bool:
    mark: Any = parameter
    return not getattr(mark, "allreduce", True)


def _is_summed_over_tensor(parameter: Tensor) -> bool:
    mark: Any = parameter
    return bool(getattr(mark, "sequence_parallel", False))
