"""Make a `Loss` of any loss function that a policy is given, once, so that what runs it calls `on_output` alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_megatron.logprobs import DeferredLogits, Sharding
from rl_megatron.losses.base import LogprobLoss, Loss
from rl_megatron.losses.calling import NaNLoss, output_form
from rl_megatron.losses.contract import Count, LossFunction, LossInputType, LossType, Reduction


def as_loss(loss_fn: LossFunction | Loss) -> Loss:
    """Return `loss_fn` as a `Loss` whose `on_output` runs it.

    - A `Loss` is returned as it is.
    - A `Loss` with a `__call__` of its own is called with the model's whole logits or scores, in NeMo RL's form with
      an output, because that call may do more than `evaluate` does.
    - Any other object follows `LossFunction` with an input_type of LOGPROB, and is called with next_token_logprobs. It
      may declare `metric_reductions`, `required_keys`, `next_token_keys` and `group_size` as a `Loss` does.

    Raises:
        TypeError: the object is not a `Loss` and takes something other than logprobs.
    """
    if isinstance(loss_fn, CalledLoss):
        return loss_fn
    if isinstance(loss_fn, Loss):
        return CalledLoss(loss_fn) if loss_fn.has_own_call else loss_fn
    return ProtocolLoss(loss_fn)


class CalledLoss(Loss):
    """A `Loss` that is run by its own `__call__`."""

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn
        self.loss_type, self.input_type = loss_fn.loss_type, loss_fn.input_type
        self.output_name, self.input_names = loss_fn.output_name, loss_fn.input_names
        self.further_positional, self.output_keys = loss_fn.further_positional, loss_fn.output_keys
        self.group_size, self.next_token_keys = loss_fn.group_size, loss_fn.next_token_keys

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return self._loss_fn.metric_reductions

    @property
    def required_keys(self) -> tuple[str, ...]:
        return self._loss_fn.required_keys

    @property
    def display_name(self) -> str:
        return self._loss_fn.display_name

    def read_output(self, output: Any, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        return self._loss_fn.read_output(output, data, sharding)

    def evaluate(self, data: Mapping[str, Any], *counts: Count, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return self._loss_fn.evaluate(data, *counts, **inputs)

    def on_output(
        self,
        output: Tensor | DeferredLogits,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        sharding: Sharding,
    ) -> tuple[Tensor, dict[str, Any]]:
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        try:
            return self._loss_fn(output, data=data, **counts, **output_form(sharding))
        except NaNLoss as error:  # an error on one rank would leave the others waiting
            return error.loss, error.metrics

    def __call__(self, *args: Any, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        return self._loss_fn(*args, **inputs)


class ProtocolLoss(LogprobLoss):
    """An object that follows `LossFunction` and takes next_token_logprobs; 0 stands for those of masked tokens."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn, name = loss_fn, _name_of(loss_fn)
        if not takes_logprobs(loss_fn):
            raise TypeError(
                f"{name} takes {getattr(loss_fn, 'input_type', None)}, but a loss function that is not a "
                "rl_megatron.losses.Loss is given next_token_logprobs; let its input_type be LOGPROB, or derive it "
                "from Loss"
            )
        self.loss_type = getattr(loss_fn, "loss_type", LossType.TOKEN_LEVEL)  # nothing that runs a loss asks for it
        self.group_size = getattr(loss_fn, "group_size", 1)
        self.next_token_keys = getattr(loss_fn, "next_token_keys", frozenset())

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return getattr(self._loss_fn, "metric_reductions", {})

    @property
    def required_keys(self) -> tuple[str, ...]:
        return getattr(self._loss_fn, "required_keys", ())

    @property
    def display_name(self) -> str:
        return _name_of(self._loss_fn)

    def evaluate(
        self, data: Mapping[str, Any], global_valid_seqs: Any, global_valid_toks: Any, **inputs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        return self._loss_fn(data=data, **counts, **inputs)


def takes_logprobs(loss_fn: Any) -> bool:
    """Return whether an object declares LOGPROB as its input_type (NeMo RL's first generation declares none)."""
    return getattr(loss_fn, "input_type", None) is LossInputType.LOGPROB


def _name_of(loss_fn: Any) -> str:
    """Return the name of a function, or that of an object's class."""
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
