"""What a loss is: its protocol, what it declares, and the two ways of calling it."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.logprobs import DeferredLogits, Sharding, next_token_stats
from rl_megatron.losses.batch import TokenMask, first_nan, require_integers

Count = Tensor | float | int | None


_NAN_IS_NAMED = ContextVar("nan_is_named", default=True)


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

    @classmethod
    def table(
        cls, *sums: str, minima: Iterable[str] = (), maxima: Iterable[str] = ()
    ) -> MappingProxyType[str, Reduction]:
        """`Loss.metric_reductions` of metrics by how they reduce."""
        by_kind = {cls.SUM: sums, cls.MIN: minima, cls.MAX: maxima}
        return MappingProxyType({name: kind for kind, names in by_kind.items() for name in names})


@runtime_checkable
class LossFunction(Protocol):
    """(loss, metrics) from a batch, the global counts and the model's output (which one: `input_type`)."""

    loss_type: LossType
    input_type: LossInputType

    def __call__(
        self, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]: ...


class Loss(ABC):
    """One formula (`evaluate`) over what the model's output says of the batch (`read_output`), and two calling forms.

    Every part it returns is divided by a global count, so parts of a batch add up to the loss of the batch, and the
    gradient of the sum is the sum of the gradients.
    """

    loss_type: LossType
    input_type: LossInputType
    output_name: ClassVar[str] = "next_token_logits"  # what `__call__` calls the model's output
    input_names: ClassVar[tuple[str, ...]] = ()  # what `evaluate` takes from it; () where that is the output itself
    further_positional: ClassVar[tuple[str, ...]] = ()  # keywords of `evaluate` that form 1 takes by position too
    output_keys: ClassVar[tuple[str, ...]] = ()  # required keys that `read_output` alone reads, such as a teacher's
    rows_per_unit: ClassVar[int] = 1  # rows that no microbatch may separate: 2 for preference pairs
    reads_deferred_logits: ClassVar[bool] = False  # `read_output` takes `DeferredLogits` as well as logits
    next_token_keys: ClassVar[frozenset[str]] = frozenset()  # data's [B, S] streams whose entry t speaks of token t+1

    @property
    @abstractmethod
    def metric_reductions(self) -> Mapping[str, Reduction]:
        """Every metric this instance can return, and how its parts combine. Known without data, so that a rank that has
        none can take part. Metrics of an optional input are missing where it is; `Reduction.identity` fills in."""

    @property
    def required_keys(self) -> tuple[str, ...]:
        """Keys of the batch without which this instance cannot run."""
        return ("token_mask", "sample_mask", *self.output_keys)

    @abstractmethod
    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        """The keywords of `evaluate` that the model's output gives: streams aligned with the whole batch, the same on
        every rank, whatever the sharding. Tokens that the masks leave out are not evaluated."""

    @abstractmethod
    def evaluate(
        self, data: Mapping[str, Any], global_valid_seqs: Count, global_valid_toks: Count, **inputs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This part's share of the loss and of each metric, as tensors: nothing waits for the device.

        Shapes: data's streams [B, S] aligned with input_ids (but see `next_token_keys`); next-token streams [B, S-1],
            entry t speaking of token t+1. Masked positions may hold anything, NaN included.
        Raises: KeyError naming key and loss; ValueError naming both shapes; TypeError naming key and dtype.
        """

    def on_output(
        self,
        output: Tensor | DeferredLogits,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        sharding: Sharding,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`evaluate` on what `read_output` reads."""
        return self.evaluate(data, global_valid_seqs, global_valid_toks, **self.read_output(output, data, sharding))

    def __call__(self, *args: Any, **inputs: Any) -> tuple[Tensor, dict[str, Any]]:
        """Both forms run `evaluate`; metrics come back as Python numbers.

        Form 1: (output, data, global_valid_seqs, global_valid_toks, vocab_parallel_rank=None,
            vocab_parallel_group=None, context_parallel_group=None, *, valid_vocab_size=None, cu_seqlens=None,
            cu_seqlens_padded=None): the model's output under the name `output_name`, with a context_parallel_group this
            rank's zigzag slice, with cu_seqlens packed (see `Sharding`), while data stays whole. Logits are divided by
            data["temperature"] (a number, [B] or [B, S]) where the batch carries one; ids from valid_vocab_size on are
            padding.
        Form 2: (data, global_valid_seqs, global_valid_toks, **inputs) with `input_names`, such as next_token_logprobs
            [B, S-1]. Other keywords go to `evaluate` in both forms.

        In form 1 backward writes the gradient over the logits, where they are no leaf: see `vocab_parallel_logprobs`.
        A second loss on the same logits wants a clone of them.

        Raises: besides what `evaluate` does, ValueError where the loss is NaN because an input is at a token or sample
            that counts, naming it and the position.
        """
        inputs = self._bind(args, inputs)
        output = inputs.pop(self.output_name, None)
        sharding = self._sharding(**{name: inputs.pop(name, None) for name in _OUTPUT_FORM_ONLY})
        if output is not None:
            inputs |= self.read_output(output, inputs["data"], sharding)
        loss, metrics = self.evaluate(**inputs)
        metrics = as_numbers(metrics)
        if (
            _NAN_IS_NAMED.get()
            and math.isnan(float(loss.detach().sum()))
            and (culprit := first_nan(inputs["data"], inputs, self.required_keys, self.next_token_keys))
        ):
            raise ValueError(f"{type(self).__name__} is NaN: {culprit} is NaN and not masked")
        return loss, metrics

    def _bind(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name. A tensor in the first place is the model's output."""
        loss, names = type(self).__name__, (*_POSITIONAL, *self.further_positional)
        if args and isinstance(args[0], Tensor):
            names = (self._name_of(args[0]), *names)
        if len(args) > len(names):
            raise TypeError(f"{loss} takes {len(names)} positional arguments, got {len(args)}")
        positional = dict(zip(names, args, strict=False))
        if twice := positional.keys() & inputs.keys():
            raise TypeError(f"{loss} got {sorted(twice)} both by position and by name")
        inputs = positional | inputs
        if "logits" in inputs:  # what callers that know the input type only call it
            inputs[self.output_name] = inputs.pop("logits")
        if missing := [key for key in _POSITIONAL[:3] if key not in inputs]:
            raise TypeError(f"{loss} is missing {missing}")
        given = any(inputs.get(name) is not None for name in self.input_names)
        if (inputs.get(self.output_name) is None) != given:
            names = (self.output_name, *self.input_names[:1])
            raise TypeError(f"{loss} takes {'either ' if len(names) > 1 else ''}{' or '.join(names)}")
        return inputs

    def _name_of(self, tensor: Tensor) -> str:
        """What a tensor in the first place is."""
        return self.output_name

    def _sharding(
        self,
        vocab_parallel_rank: int | None,
        vocab_parallel_group: dist.ProcessGroup | None,
        context_parallel_group: dist.ProcessGroup | None,
        **rest: Any,
    ) -> Sharding:
        if vocab_parallel_group is not None and vocab_parallel_rank not in (None, dist.get_rank(vocab_parallel_group)):
            raise ValueError(
                f"vocab_parallel_rank={vocab_parallel_rank}, but this process is rank "
                f"{dist.get_rank(vocab_parallel_group)} of vocab_parallel_group"
            )
        return Sharding(vocab_parallel_group, context_parallel_group, **rest)


_OUTPUT_FORM_ONLY = (
    "vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group", "valid_vocab_size", "cu_seqlens",
    "cu_seqlens_padded",
)  # fmt: skip
_POSITIONAL = ("data", "global_valid_seqs", "global_valid_toks", *_OUTPUT_FORM_ONLY[:3])


class LogprobLoss(Loss):
    """A loss over next-token logprobs, `evaluate(…, next_token_logprobs, next_token_entropy=None)`, each [B, S-1].

    Its logits form takes next_token_logits [B, S, V/tp], or with a context_parallel_group [B, S/cp, V/tp].
    """

    input_type = LossInputType.LOGPROB
    reads_deferred_logits = True
    output_name = "next_token_logits"
    input_names = ("next_token_logprobs",)

    def _name_of(self, tensor: Tensor) -> str:
        return self.input_names[0] if tensor.dim() == 2 else self.output_name  # logits have a vocabulary

    @property
    def needs_entropy(self) -> bool:
        """Whether `evaluate` wants `next_token_entropy`; it costs next to nothing in the same pass over the logits."""
        return False

    def read_output(
        self, output: Tensor | DeferredLogits, data: Mapping[str, Any], sharding: Sharding
    ) -> dict[str, Tensor]:
        stats = next_token_stats(
            output,
            require_integers(data, "input_ids", self).to(output.device),
            sharding,
            temperature=data["temperature"] if "temperature" in data else 1.0,
            entropy=self.needs_entropy,
            mask=TokenMask.of(data, self).including_first.to(output.device),
        )
        streams = {"next_token_logprobs": stats.logprobs}
        return streams | ({} if stats.entropy is None else {"next_token_entropy": stats.entropy})


class ScoreLoss(Loss):
    """A loss over one number a token, `evaluate(…, next_token_scores)` [B, S-1]: what a model with a score head says
    after token t, entry t, is about the prefix that token t+1 extends.

    Its output form takes scores [B, S] or [B, S, 1], or with a context_parallel_group [B, S/cp(, 1)]. A subclass may
    give both names of its own.
    """

    input_type = LossInputType.LOGIT
    output_name = "scores"
    input_names = ("next_token_scores",)

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        return {self.input_names[0]: token_scores(output, data, sharding, self)[:, :-1]}


def token_scores(output: Tensor, data: Mapping[str, Any], sharding: Sharding, loss: Loss) -> Tensor:
    """A score head's output [B, S] or [B, S, 1], sharded or packed, as whole [B, S] in fp32 or more."""
    scores = output.squeeze(-1) if output.dim() == 3 and output.size(-1) == 1 else output
    mask = TokenMask.of(data, loss).including_first
    if scores.dim() != 2:
        raise ValueError(
            f"{type(loss).__name__}: {loss.output_name} {tuple(output.shape)} must be one score a token, [B, S] or "
            f"[B, S, 1] for token_mask {tuple(mask.shape)}"
        )
    layout = sharding.layout(scores, tuple(mask.shape))
    return layout.gather(scores.to(torch.promote_types(scores.dtype, torch.float32)))


@contextmanager
def nan_left_to_caller() -> Iterator[None]:
    """Within, a loss that is NaN is returned rather than refused: for callers that have other ranks to tell first."""
    token = _NAN_IS_NAMED.set(False)
    try:
        yield
    finally:
        _NAN_IS_NAMED.reset(token)


def as_numbers(metrics: Mapping[str, Tensor]) -> dict[str, Any]:
    """Scalars as Python numbers, in one transfer from the device; per-sample metrics stay tensors."""
    scalars = {name: value for name, value in metrics.items() if value.dim() == 0}
    numbers = torch.stack([value.double() for value in scalars.values()]).tolist() if scalars else []
    return {**metrics, **dict(zip(scalars, numbers, strict=True))}
