"""Definitions that every loss and its callers share: enums, metric reductions, and NeMo RL's protocol."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float, Shaped
from torch import Tensor

Count = Shaped[Tensor, ""] | float | int | None
CountOfSequences = Callable[[Mapping[str, Any]], Float[Tensor, " batch"]]
"""Returns a count for each sequence of a batch."""


class LossType(enum.Enum):
    """The unit that a loss averages over. It selects the global count that divides the loss."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    """The output that a loss needs from the model."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DRAFT = "draft"


class Reduction(enum.Enum):
    """The operation that combines the parts of a metric from microbatches and data-parallel ranks.

    Each part of a mean is already divided by the global count. Parts of means therefore add up, like parts of counts.
    """

    SUM = "sum"
    MIN = "min"
    MAX = "max"

    @property
    def identity(self) -> float:
        """Return the value that a rank without this metric contributes."""
        return {"sum": 0.0, "min": float("inf"), "max": float("-inf")}[self.value]

    @classmethod
    def table(
        cls, *sums: str, minima: Iterable[str] = (), maxima: Iterable[str] = ()
    ) -> MappingProxyType[str, Reduction]:
        """Build the value of `Loss.metric_reductions` from names of metrics that are listed by reduction."""
        by_kind = {cls.SUM: sums, cls.MIN: minima, cls.MAX: maxima}
        return MappingProxyType({name: kind for kind, names in by_kind.items() for name in names})


@runtime_checkable
class LossFunction(Protocol):
    """NeMo RL's protocol: a callable that returns (loss, metrics) for a batch, the global counts and a model's output.

    `input_type` selects the keyword of the output. `rl_megatron.losses.as_loss` wraps such an object as a `Loss`.
    """

    loss_type: LossType
    input_type: LossInputType

    def __call__(
        self, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]: ...


def is_loss_function(candidate: object) -> bool:
    """Return whether an object is itself a loss, and not a class or a function that makes one."""
    return hasattr(candidate, "input_type") or takes_logprobs(candidate)


def takes_logprobs(loss_fn: object) -> bool:
    """Return whether an object has the input_type LOGPROB, or is a function of logprobs that has no input_type."""
    if hasattr(loss_fn, "input_type") or not inspect.isfunction(loss_fn):
        return getattr(loss_fn, "input_type", None) is LossInputType.LOGPROB
    return "next_token_logprobs" in inspect.signature(loss_fn).parameters
