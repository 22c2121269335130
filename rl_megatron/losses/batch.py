"""Reading a batch: keys, shapes, dtypes and the mask, checked once, so that formulas start from clean streams."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from rl_megatron.losses.interfaces import Loss


def require(data: Mapping[str, Any], key: str, loss: Loss) -> Any:
    """data[key]. Raises: KeyError naming the key, the loss and what the batch has."""
    if key not in data:
        raise KeyError(f"{type(loss).__name__} needs data[{key!r}]; the batch has {sorted(data.keys())}")
    return data[key]


def require_integers(data: Mapping[str, Any], key: str, loss: Loss) -> Tensor:
    """data[key], a tensor of ids. Raises: KeyError as `require`; TypeError naming key and dtype."""
    value = _tensor(require(data, key, loss), f"data[{key!r}]", loss)
    if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise _wrong_type(f"data[{key!r}]", value, "must hold ids, in an integer dtype", loss)
    return value


def require_mask(data: Mapping[str, Any], key: str, loss: Loss) -> Tensor:
    """data[key], booleans or weights. Raises: KeyError as `require`; TypeError naming key and dtype."""
    value = _tensor(require(data, key, loss), f"data[{key!r}]", loss)
    if value.is_complex():
        raise _wrong_type(f"data[{key!r}]", value, "must hold booleans or real weights", loss)
    return value


def real(value: Any, name: str, loss: Loss) -> Tensor:
    """`value`, real numbers. Raises: TypeError naming it and its dtype."""
    value = _tensor(value, name, loss)
    if value.is_complex() or value.dtype is torch.bool:
        raise _wrong_type(name, value, "must hold real numbers", loss)
    return value


def _tensor(value: Any, name: str, loss: Loss) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(loss).__name__}: {name} must be a tensor, got {type(value).__name__}")
    return value


def _wrong_type(name: str, value: Tensor, rule: str, loss: Loss) -> TypeError:
    return TypeError(f"{type(loss).__name__}: {name} is {str(value.dtype).removeprefix('torch.')}; it {rule}")


def first_nan(
    data: Mapping[str, Any],
    inputs: Mapping[str, Any],
    required_keys: Sequence[str] = (),
    next_token_keys: Collection[str] = frozenset(),
) -> str | None:
    """The first NaN that counts among the streams of a batch, as "data['advantages'][2, 5]", or None. For telling why a
    loss is NaN: it reads everything, first the data that the loss reads, then what it has from the model, then the
    rest.

    Shapes: data's streams [B, S, …] or [B]; inputs [B, S-1, …], [B, S, …] or [B]. Entry t of data's next_token_keys
        belongs to token t+1.
    """
    mask = (data["token_mask"] * data["sample_mask"][:, None]) != 0
    by_shape = {mask.shape: mask, mask[:, 1:].shape: mask[:, 1:], mask.shape[:1]: data["sample_mask"] != 0}
    rolled = {f"data[{key!r}]": pad(mask[:, 1:], (0, 1)) for key in next_token_keys}
    read = {f"data[{key!r}]": data[key] for key in (*required_keys, *sorted(next_token_keys)) if key in data}
    for name, value in (read | dict(inputs) | {f"data[{key!r}]": value for key, value in data.items()}).items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == 0:
            continue
        counts = rolled.get(name, by_shape.get(value.shape[:2]))
        if counts is None:
            continue
        counts = counts.to(value.device).view(*counts.shape, *(1,) * (value.dim() - counts.dim()))
        found = (value.isnan() & counts).nonzero()
        if len(found):
            return f"{name}[{', '.join(map(str, found[0].tolist()))}]"
    return None


@dataclass(frozen=True)
class TokenMask:
    """Which tokens count: m[b, t] = token_mask[b, t]·sample_mask[b].

    Weights between 0 and 1 are weights; what is 0 is nowhere read.
    """

    including_first: Tensor  # [B, S], aligned with input_ids
    samples: Tensor  # [B]

    @classmethod
    def of(cls, data: Mapping[str, Any], loss: Loss) -> TokenMask:
        """Raises: KeyError naming a missing key; TypeError naming a dtype; ValueError naming shapes that do not fit."""
        token_mask, sample_mask = require_mask(data, "token_mask", loss), require_mask(data, "sample_mask", loss)
        if token_mask.dim() != 2 or sample_mask.shape != token_mask.shape[:1]:
            raise ValueError(
                f"{type(loss).__name__}: token_mask must be [B, S] and sample_mask [B], "
                f"got {tuple(token_mask.shape)} and {tuple(sample_mask.shape)}"
            )
        return cls(token_mask * sample_mask[:, None], sample_mask)

    @property
    def tokens(self) -> Tensor:
        """[B, S-1], aligned with next-token logprobs: the first token has no prediction."""
        return self.including_first[:, 1:]


class TokenStreams:
    """The batch as `[B, S-1]` streams beside what the model says of the next token, in its dtype and on its device.

    Masked positions of every stream are 0, by `torch.where`: whatever was there, NaN included, reaches neither a value
    nor a gradient, and no formula has to think of it again.
    """

    def __init__(self, data: Mapping[str, Any], loss: Loss, like: Tensor) -> None:
        self.data, self._loss = data, loss
        for key in loss.required_keys:
            if key not in loss.output_keys:
                require(data, key, loss)
        mask = TokenMask.of(data, loss)
        self._like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
        self.mask = mask.tokens.to(self._like)
        self.sample_mask = mask.samples.to(self._like)

    @property
    def token_mask(self) -> Tensor:
        """[B, S-1], the weights of tokens within their sample: without the sample's own, and 0 where that is 0."""
        token_mask = self.data["token_mask"][:, 1:].to(self._like)
        return torch.where(self.sample_mask[:, None] != 0, token_mask, 0.0)

    def select(self, name: str, stream: Tensor, trailing: int = 0) -> Tensor:
        """A [B, S-1] stream with its masked positions zeroed, or one with so many `trailing` dimensions more."""
        if stream.shape[: stream.dim() - trailing] != self.mask.shape:
            more = f" and {trailing} more dimension(s)" if trailing else ""
            raise ValueError(
                f"{type(self._loss).__name__}: {name} {tuple(stream.shape)} does not fit token_mask[:, 1:] "
                f"{tuple(self.mask.shape)}{more}"
            )
        counts = (self.mask != 0).view(*self.mask.shape, *(1,) * trailing)
        return torch.where(counts, real(stream, name, self._loss).to(self._like), 0.0)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def __getitem__(self, key: str) -> Tensor:
        """data[key] [B, S] (or [B], one value per sequence) without its first column, or without its last where the
        loss has it among its `next_token_keys`."""
        value = real(require(self.data, key, self._loss), f"data[{key!r}]", self._loss)
        batch, length = self.mask.shape[0], self.mask.shape[1] + 1
        if value.shape == (batch,):
            value = value[:, None].expand(batch, length)
        if value.shape != (batch, length):
            raise ValueError(
                f"{type(self._loss).__name__}: data[{key!r}] {tuple(value.shape)} does not fit token_mask "
                f"{(batch, length)}"
            )
        return self.select(f"data[{key!r}]", value[:, :-1] if key in self._loss.next_token_keys else value[:, 1:])

    def per_sample(self, key: str) -> Tensor:
        """data[key] [B], zero where the sample is masked."""
        value = real(require(self.data, key, self._loss), f"data[{key!r}]", self._loss)
        if value.shape != self.sample_mask.shape:
            raise ValueError(
                f"{type(self._loss).__name__}: data[{key!r}] {tuple(value.shape)} must be one value per sample "
                f"{tuple(self.sample_mask.shape)}"
            )
        return torch.where(self.sample_mask != 0, value.to(self._like), 0.0)
