"""Bind the arguments of a loss's call. As in NeMo RL, a loss is called with a model's output or with streams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.logprobs import Sharding
from rl_megatron.losses.contract import Count
from rl_megatron.losses.streams import find_nan

_COUNTS = ("global_valid_seqs", "global_valid_toks")
_GROUPS = ("vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group")
_LAYOUT = ("valid_vocab_size", "cu_seqlens", "cu_seqlens_padded")
_POSITIONAL = ("data", *_COUNTS, *_GROUPS)


class CallForms(Protocol):
    """The part of a `Loss` that describes the ways to call it. `Loss` explains each attribute."""

    @property
    def output_name(self) -> str: ...

    @property
    def input_names(self) -> tuple[str, ...]: ...

    @property
    def further_positional(self) -> tuple[str, ...]: ...

    @property
    def display_name(self) -> str: ...

    def name_of(self, tensor: Tensor) -> str: ...


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a loss.

    Attributes:
        output: The model's output, or None if the call has streams instead.
        sharding: How the output is distributed over ranks. It is not used if `output` is None.
        vocab_parallel_rank: The caller's value. It is only checked, because the group knows its own rank.
        keywords: All other keywords: streams, and options of the loss's `evaluate`.
    """

    data: Mapping[str, Any]
    global_valid_seqs: Count
    global_valid_toks: Count
    output: Tensor | None
    sharding: Sharding
    vocab_parallel_rank: int | None
    keywords: dict[str, Any]


class NaNLoss(ValueError):
    """The error of a loss that is NaN because an input that counts is NaN or infinite.

    Its attributes `loss` and `metrics` are what the call would have returned.
    """

    def __init__(self, message: str, loss: Tensor, metrics: dict[str, Any]) -> None:
        super().__init__(message)
        self.loss, self.metrics = loss, metrics


def bind(forms: CallForms, args: tuple[object, ...], keywords: Mapping[str, object]) -> Call:
    """Return the arguments of a call by name. A tensor as the first positional argument is the output or a stream."""
    named = _name_positional(forms, args)
    if twice := named.keys() & keywords.keys():
        raise TypeError(f"{forms.display_name} got {sorted(twice)} both by position and by name")
    named |= keywords
    if "logits" in named:  # callers that know only the loss's input_type use this name
        named[forms.output_name] = named.pop("logits")
    if missing := [key for key in ("data", *_COUNTS) if key not in named]:
        raise TypeError(f"{forms.display_name} is missing {missing}")
    has_streams = any(named.get(name) is not None for name in forms.input_names)
    if (named.get(forms.output_name) is None) != has_streams:
        names = (forms.output_name, *forms.input_names[:1])
        raise TypeError(f"{forms.display_name} needs {'either ' if len(names) > 1 else ''}{' or '.join(names)}")
    output = named.pop(forms.output_name, None)
    rank, tp_group, cp_group = (named.pop(name, None) for name in _GROUPS)
    if tp_group is not None and rank not in (None, dist.get_rank(tp_group)):
        raise ValueError(
            f"vocab_parallel_rank={rank}, but this process is rank {dist.get_rank(tp_group)} of vocab_parallel_group"
        )
    sharding = Sharding(tp_group, cp_group, **{name: named.pop(name, None) for name in _LAYOUT})
    data, seqs, toks = (named.pop(name) for name in ("data", *_COUNTS))
    return Call(data, seqs, toks, output, sharding, rank, named)


def _name_positional(forms: CallForms, args: tuple[object, ...]) -> dict[str, Any]:
    names = (*_POSITIONAL, *forms.further_positional)
    if args and isinstance(args[0], Tensor):
        names = (forms.name_of(args[0]), *names)
    if len(args) > len(names):
        raise TypeError(f"{forms.display_name} takes {len(names)} positional arguments, got {len(args)}")
    return dict(zip(names, args, strict=False))


def describe_sharding(sharding: Sharding) -> dict[str, Any]:
    """Return the keywords that describe `sharding` in a call with a model's output.

    Keywords without a value are left out, because a loss with NeMo RL's signature does not accept all of them.
    """
    keywords = {
        "vocab_parallel_rank": None if sharding.tp_group is None else dist.get_rank(sharding.tp_group),
        "vocab_parallel_group": sharding.tp_group,
        "context_parallel_group": sharding.cp_group,
        "valid_vocab_size": sharding.valid_vocab_size,
        "cu_seqlens": sharding.cu_seqlens,
        "cu_seqlens_padded": sharding.cu_seqlens_padded,
    }
    return {name: value for name, value in keywords.items() if value is not None}


def refuse_nan(
    name: str,
    loss: Tensor,
    metrics: dict[str, Any],
    data: Mapping[str, object],
    keywords: Mapping[str, object],
    required_keys: tuple[str, ...],
    next_token_keys: frozenset[str],
) -> None:
    """Raise `NaNLoss` if the loss is NaN because of an input that counts. The error names the input and the position.

    `name` is the loss's name in the message, and `keywords` are the streams that `evaluate` received. The other
    arguments are those of `find_nan`.
    """
    if not math.isnan(float(loss.detach().sum())):
        return
    for what, is_wanted in {"NaN": torch.isnan, "infinite": torch.isinf}.items():
        if position := find_nan(data, keywords, required_keys, next_token_keys, is_wanted):
            raise NaNLoss(f"{name} is NaN: {position} is {what} and not masked", loss, metrics)


def as_numbers(metrics: Mapping[str, object]) -> dict[str, Any]:
    """Return the metrics with scalar tensors converted to Python numbers, in one transfer from the device.

    Per-sample metrics stay tensors, and numbers are returned unchanged.
    """
    scalars = {name: value for name, value in metrics.items() if isinstance(value, Tensor) and value.dim() == 0}
    numbers = torch.stack([value.double() for value in scalars.values()]).tolist() if scalars else []
    return {**metrics, **dict(zip(scalars, numbers, strict=True))}
