"""Reading a batch: keys, shapes and the mask, checked once, so that formulas start from clean streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rl_megatron.losses.interfaces import Loss


def require(data: Mapping[str, Any], key: str, loss: Loss) -> Any:
    """data[key]. Raises: KeyError naming the key, the loss and what the batch has."""
    if key not in data:
        raise KeyError(f"{type(loss).__name__} needs data[{key!r}]; the batch has {sorted(data.keys())}")
    return data[key]


def first_nan(data: Mapping[str, Any], inputs: Mapping[str, Any]) -> str | None:
    """The first NaN that counts among the streams of a batch, as "data['advantages'][2, 5]", or None. For telling why a
    loss is NaN: it reads everything.

    Shapes: data's streams [B, S] or [B]; inputs [B, S-1, …], [B, S] or [B].
    """
    mask = data["token_mask"] * data["sample_mask"][:, None] != 0
    named = {f"data[{key!r}]": value for key, value in data.items()} | dict(inputs)
    for name, value in named.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == 0:
            continue
        by_shape = {mask.shape: mask, mask[:, 1:].shape: mask[:, 1:], mask.shape[:1]: data["sample_mask"] != 0}
        counts = by_shape.get(value.shape[:2])
        if counts is None:
            continue
        found = (
            value.isnan() & counts.to(value.device).view(*counts.shape, *(1,) * (value.dim() - counts.dim()))
        ).nonzero()
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
        """Raises: KeyError naming a missing key; ValueError naming shapes that do not fit."""
        token_mask, sample_mask = require(data, "token_mask", loss), require(data, "sample_mask", loss)
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
    """The batch as `[B, S-1]` streams beside the next-token logprobs, in their dtype and on their device.

    Masked positions of every stream are 0, by `torch.where`: whatever was there, NaN included, reaches neither a value
    nor a gradient, and no formula has to think of it again.
    """

    def __init__(self, data: Mapping[str, Any], loss: Loss, next_token_logprobs: Tensor) -> None:
        self._data, self._loss = data, loss
        for key in loss.required_keys:
            require(data, key, loss)
        dtype = torch.promote_types(next_token_logprobs.dtype, torch.float32)
        self._like = next_token_logprobs.new_empty(0, dtype=dtype)
        mask = TokenMask.of(data, loss)
        self.mask = mask.tokens.to(self._like)
        self.sample_mask = mask.samples.to(self._like)
        self.logprobs = self.select("next_token_logprobs", next_token_logprobs)

    def select(self, name: str, stream: Tensor) -> Tensor:
        """A [B, S-1] stream with its masked positions zeroed."""
        if stream.shape != self.mask.shape:
            raise ValueError(
                f"{type(self._loss).__name__}: {name} {tuple(stream.shape)} does not fit token_mask[:, 1:] "
                f"{tuple(self.mask.shape)}"
            )
        return torch.where(self.mask != 0, stream.to(self._like), 0.0)

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def __getitem__(self, key: str) -> Tensor:
        """data[key] [B, S] (or [B], one value per sequence) without its first column."""
        value = require(self._data, key, self._loss)
        batch, length = self.mask.shape[0], self.mask.shape[1] + 1
        if value.shape == (batch,):
            value = value[:, None].expand(batch, length)
        if value.shape != (batch, length):
            raise ValueError(
                f"{type(self._loss).__name__}: data[{key!r}] {tuple(value.shape)} does not fit token_mask "
                f"{(batch, length)}"
            )
        return self.select(key, value[:, 1:])

    def per_sample(self, key: str) -> Tensor:
        """data[key] [B], zero where the sample is masked."""
        value = require(self._data, key, self._loss)
        if value.shape != self.sample_mask.shape:
            raise ValueError(
                f"{type(self._loss).__name__}: data[{key!r}] {tuple(value.shape)} must be one value per sample "
                f"{tuple(self.sample_mask.shape)}"
            )
        return torch.where(self.sample_mask != 0, value.to(self._like), 0.0)
