"""The words that every loss and its callers share: enums, how metrics reduce, and the protocol of NeMo RL."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Shaped
from torch import Tensor

Count = Shaped[Tensor, ""] | float | int | None


class LossType(enum.Enum):
    """What the loss averages over, and so which global count divides it."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    """What the loss needs from the model."""

    LOGIT = "logit"
    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DRAFT = "draft"


class Reduction(enum.Enum):
    """How the parts of a metric (from microbatches and data-parallel ranks) combine.

    A part of a mean is divided by the global count already, so parts of means add up, as parts of counts do.
    """

    SUM = "sum"
    MIN = "min"
    MAX = "max"

    @property
    def identity(self) -> float:
        """Return the part of a rank that does not have the metric."""
        return {"sum": 0.0, "min": float("inf"), "max": float("-inf")}[self.value]

    @classmethod
    def table(
        cls, *sums: str, minima: Iterable[str] = (), maxima: Iterable[str] = ()
    ) -> MappingProxyType[str, Reduction]:
        """Return the value of `Loss.metric_reductions` for metrics listed by how they reduce."""
        by_kind = {cls.SUM: sums, cls.MIN: minima, cls.MAX: maxima}
        return MappingProxyType({name: kind for kind, names in by_kind.items() for name in names})


@runtime_checkable
class LossFunction(Protocol):
    """NeMo RL's protocol: a callable that returns (loss, metrics) for a batch, the global counts and a model's output.

    `input_type` tells which keyword holds the output. `rl_megatron.losses.as_loss` makes a `Loss` of such an object.
    """

    loss_type: LossType
    input_type: LossInputType

    def __call__(
        self, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]: ...


class CallForms(Protocol):
    """What a loss declares about the ways of calling it. `Loss` explains each attribute."""

    @property
    def output_name(self) -> str: ...

    @property
    def input_names(self) -> tuple[str, ...]: ...

    @property
    def further_positional(self) -> tuple[str, ...]: ...

    @property
    def display_name(self) -> str: ...

    def name_of(self, tensor: Tensor) -> str: ...
