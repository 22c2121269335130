"""What a loss is: its protocol, what it declares, and the two ways of calling it."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, overload, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.logprobs import LogprobStats, next_token_stats
from rl_megatron.losses.batch import TokenMask, require

Count = Tensor | float | int | None


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
    """How a metric's parts (microbatches, data-parallel ranks) combine. A part of a mean is already divided by the
    global count, so parts add up; so do parts of a count."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"

    @property
    def identity(self) -> float:
        """The part of a rank that has nothing to say."""
        return {"sum": 0.0, "min": float("inf"), "max": float("-inf")}[self.value]


@runtime_checkable
class LossFunction(Protocol):
    """(loss, metrics) from a batch, the global counts and the model's output (which one: `input_type`)."""

    loss_type: LossType
    input_type: LossInputType

    def __call__(
        self, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]: ...


class Loss(ABC):
    """A loss over next-token logprobs: one formula (`evaluate`), two calling forms (`__call__`).

    Every part it returns is divided by a global count, so parts of a batch add up to the loss of the batch, and the
    gradient of the sum is the sum of the gradients.
    """

    loss_type: LossType
    input_type: LossInputType = LossInputType.LOGPROB

    @property
    @abstractmethod
    def metric_reductions(self) -> Mapping[str, Reduction]:
        """Every metric this instance can return, and how its parts combine. Known without data, so that a rank that has
        none can take part. Metrics of an optional input are missing where it is; `Reduction.identity` fills in."""

    @property
    def required_keys(self) -> tuple[str, ...]:
        """Keys of the batch without which this instance cannot run."""
        return ("token_mask", "sample_mask")

    @property
    def needs_entropy(self) -> bool:
        """Whether `evaluate` wants `next_token_entropy`; it costs next to nothing in the same pass over the logits."""
        return False

    @abstractmethod
    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        next_token_logprobs: Tensor,
        next_token_entropy: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This part's share of the loss and of each metric, as tensors: nothing waits for the device.

        Shapes: data's streams [B, S] aligned with input_ids; next_token_logprobs and next_token_entropy [B, S-1], entry
            t speaking of token t+1. Masked positions may hold anything, NaN included.
        Raises: KeyError naming key and loss; ValueError naming both shapes.
        """

    @overload
    def __call__(
        self,
        next_token_logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: dist.ProcessGroup | None = None,
        context_parallel_group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, dict[str, Any]]: ...

    @overload
    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        *,
        next_token_logprobs: Tensor,
        next_token_entropy: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]: ...

    def __call__(self, *args: Any, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Both forms run `evaluate`; metrics come back as Python numbers.

        Logits form: next_token_logits [B, S, V/tp] (with a context_parallel_group this rank's zigzag slice [B, S/cp,
        V/tp]) while data stays whole. Logprobs form: next_token_logprobs [B, S-1], and next_token_entropy if needed.
        Further keywords of the logits form: valid_vocab_size (ids from there on are padding). The logits are divided by
        data["temperature"] (a number, [B] or [B, S]) where the batch carries one. Other keywords go to `evaluate`.
        """
        logits_first = bool(args) and isinstance(args[0], Tensor)
        names = _POSITIONAL if logits_first else _POSITIONAL[1:]
        if len(args) > len(names):
            raise TypeError(f"{type(self).__name__} takes {len(names)} positional arguments, got {len(args)}")
        inputs = _bind(type(self).__name__, dict(zip(names, args, strict=False)), inputs)
        logits = inputs.pop("next_token_logits", None)
        if (logits is None) == (inputs.get("next_token_logprobs") is None):
            raise TypeError(f"{type(self).__name__} takes either next_token_logits or next_token_logprobs")
        parallel = {name: inputs.pop(name, None) for name in _LOGITS_FORM_ONLY}
        if logits is not None:
            stats = self._statistics(logits, inputs["data"], **parallel)
            inputs |= {"next_token_logprobs": stats.logprobs, "next_token_entropy": stats.entropy}
        loss, metrics = self.evaluate(**inputs)
        return loss, as_numbers(metrics)

    def _statistics(
        self,
        logits: Tensor,
        data: Mapping[str, Any],
        vocab_parallel_rank: int | None,
        vocab_parallel_group: dist.ProcessGroup | None,
        context_parallel_group: dist.ProcessGroup | None,
        valid_vocab_size: int | None,
    ) -> LogprobStats:
        if vocab_parallel_group is not None and vocab_parallel_rank not in (None, dist.get_rank(vocab_parallel_group)):
            raise ValueError(
                f"vocab_parallel_rank={vocab_parallel_rank}, but this process is rank "
                f"{dist.get_rank(vocab_parallel_group)} of vocab_parallel_group"
            )
        input_ids = require(data, "input_ids", self).to(logits.device)
        mask = TokenMask.of(data, self).including_first.to(logits.device)
        return next_token_stats(
            logits,
            input_ids,
            vocab_parallel_group,
            context_parallel_group,
            valid_vocab_size=valid_vocab_size,
            temperature=data["temperature"] if "temperature" in data else 1.0,
            entropy=self.needs_entropy,
            mask=mask,
        )


_LOGITS_FORM_ONLY = ("vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group", "valid_vocab_size")
_POSITIONAL = ("next_token_logits", "data", "global_valid_seqs", "global_valid_toks", *_LOGITS_FORM_ONLY[:3])


def _bind(name: str, positional: dict[str, Any], keywords: dict[str, Any]) -> dict[str, Any]:
    if twice := positional.keys() & keywords.keys():
        raise TypeError(f"{name} got {sorted(twice)} both by position and by name")
    inputs = positional | keywords
    if missing := [key for key in _POSITIONAL[1:4] if key not in inputs]:
        raise TypeError(f"{name} is missing {missing}")
    return inputs


def as_numbers(metrics: Mapping[str, Tensor]) -> dict[str, Any]:
    """Scalars as Python numbers, in one transfer from the device; per-sample metrics stay tensors."""
    scalars = {name: value for name, value in metrics.items() if value.dim() == 0}
    numbers = torch.stack([value.double() for value in scalars.values()]).tolist() if scalars else []
    return {**metrics, **dict(zip(scalars, numbers, strict=True))}
