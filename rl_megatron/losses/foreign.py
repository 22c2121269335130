"""Wrap any loss function as a `Loss`, so that a runner only ever calls `read_output` and `evaluate`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_megatron.logprobs import Sharding
from rl_megatron.losses.base import LogprobLoss, Loss
from rl_megatron.losses.calling import NaNLoss, describe_sharding
from rl_megatron.losses.contract import Count, CountOfSequences, LossFunction, LossType, Reduction, takes_logprobs


def as_loss(loss_fn: LossFunction | Loss) -> Loss:
    """Return `loss_fn` as a `Loss` whose `read_output` and `evaluate` run it.

    - A `Loss` that does not override `__call__` is returned unchanged.
    - A `Loss` that overrides `__call__` is run through that method, which may do more than `evaluate` does. The method
      receives the model's output (logits or scores) itself, as in NeMo RL.
    - Any other object must follow `LossFunction` with the input_type LOGPROB. It is called with next_token_logprobs. It
      may declare `metric_reductions`, `required_keys`, `next_token_keys` and `group_size` as a `Loss` does.

    Raises:
        TypeError: The object is not a `Loss`, and its input_type is not LOGPROB.
    """
    if isinstance(loss_fn, CalledLoss):
        return loss_fn
    if isinstance(loss_fn, Loss):
        return CalledLoss(loss_fn) if loss_fn.has_own_call else loss_fn
    return ProtocolLoss(loss_fn)


def check_call(loss: Loss) -> None:
    """Raise TypeError if a loss does not accept its call's keywords, or a wrapped object requires other arguments."""
    names = ("data", "global_valid_seqs", "global_valid_toks", *loss.input_names)
    try:
        if isinstance(loss, ProtocolLoss):
            inspect.signature(loss.wrapped).bind(**dict.fromkeys(names))
        else:  # `read_output` may return more than `input_names`
            inspect.signature(loss.evaluate).bind_partial(**dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(f"{loss.display_name} is called with {', '.join(names)} by name: {error}") from error


class CalledLoss(Loss):
    """A `Loss` that runs another loss through that loss's own `__call__`."""

    def __init__(self, loss_fn: Loss) -> None:
        self._loss_fn = loss_fn
        self.loss_type, self.input_type = loss_fn.loss_type, loss_fn.input_type
        self.output_name, self.input_names = loss_fn.output_name, ("output", "sharding")
        self.further_positional, self.output_keys = loss_fn.further_positional, loss_fn.output_keys
        self.group_size, self.next_token_keys = loss_fn.group_size, loss_fn.next_token_keys

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return self._loss_fn.metric_reductions

    @property
    def required_keys(self) -> tuple[str, ...]:
        return self._loss_fn.required_keys

    @property
    def on_policy_keys(self) -> frozenset[str]:
        return self._loss_fn.on_policy_keys

    @property
    def reads_on_policy_keys(self) -> bool:
        return self._loss_fn.reads_on_policy_keys

    @property
    def global_counts(self) -> Mapping[str, CountOfSequences]:
        return self._loss_fn.global_counts

    @property
    def display_name(self) -> str:
        return self._loss_fn.display_name

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Any]:
        return {"output": output, "sharding": sharding}

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        output: Tensor,
        sharding: Sharding,
    ) -> tuple[Tensor, dict[str, Any]]:
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        try:
            return self._loss_fn(output, data=data, **counts, **describe_sharding(sharding))
        except NaNLoss as error:  # the caller informs all ranks: if one raised alone, the others would wait for it
            return error.loss, error.metrics

    def __call__(self, *args: Any, **keywords: Any) -> tuple[Tensor, dict[str, Any]]:
        return self._loss_fn(*args, **keywords)


class ProtocolLoss(LogprobLoss):
    """A `Loss` that runs `wrapped`, an object that follows `LossFunction` and takes next_token_logprobs.

    The logprobs of masked tokens are 0.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self.wrapped, name = loss_fn, _get_name(loss_fn)
        if not takes_logprobs(loss_fn):
            raise TypeError(
                f"{name} has input_type={getattr(loss_fn, 'input_type', None)}, but a loss function that is not a "
                "rl_megatron.losses.Loss gets next_token_logprobs; set its input_type to LOGPROB, or derive it from "
                "Loss"
            )
        self.loss_type = getattr(loss_fn, "loss_type", LossType.TOKEN_LEVEL)  # runners do not read it
        self.group_size = getattr(loss_fn, "group_size", 1)
        self.next_token_keys = getattr(loss_fn, "next_token_keys", frozenset())

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return getattr(self.wrapped, "metric_reductions", {})

    @property
    def required_keys(self) -> tuple[str, ...]:
        return getattr(self.wrapped, "required_keys", ())

    @property
    def display_name(self) -> str:
        return _get_name(self.wrapped)

    def evaluate(
        self, data: Mapping[str, Any], global_valid_seqs: Any, global_valid_toks: Any, **keywords: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        return self.wrapped(data=data, **counts, **keywords)


def _get_name(loss_fn: object) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
