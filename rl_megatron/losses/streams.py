"""Read a batch: check keys, shapes, dtypes and masks once, so that formulas need no checks of their own.

In this module, `loss` is the name of the loss that reads the batch. It appears in messages, which also name the key,
the shapes or the dtype. A missing key is a KeyError, a wrong dtype a TypeError, and a wrong shape a ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from rl_megatron.config.errors import nearest
from rl_megatron.data.token_keys import is_token_key


def require(data: Mapping[str, object], key: str, loss: str) -> Any:
    """Return data[key]. If the key is missing, the error names the most similar key of the batch."""
    if key not in data:
        raise KeyError(f"{loss} needs data[{key!r}], which the batch does not have{nearest(key, data)}")
    return data[key]


def require_integers(data: Mapping[str, object], key: str, loss: str) -> Tensor:
    """Return data[key], a tensor of ids."""
    value = _tensor(require(data, key, loss), f"data[{key!r}]", loss)
    if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        raise _wrong_type(f"data[{key!r}]", value, "must hold ids, in an integer dtype", loss)
    return value


def require_mask(data: Mapping[str, object], key: str, loss: str) -> Tensor:
    """Return data[key], a tensor of booleans or weights."""
    value = _tensor(require(data, key, loss), f"data[{key!r}]", loss)
    if value.is_complex():
        raise _wrong_type(f"data[{key!r}]", value, "must hold booleans or real weights", loss)
    return value


def require_real(value: object, name: str, loss: str) -> Tensor:
    """Check that `value`, which messages call `name`, is a tensor of real numbers, and return it."""
    value = _tensor(value, name, loss)
    if value.is_complex() or value.dtype is torch.bool:
        raise _wrong_type(name, value, "must hold real numbers", loss)
    return value


def _tensor(value: object, name: str, loss: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{loss}: {name} must be a tensor, got {type(value).__name__}")
    return value


def _wrong_type(name: str, value: Tensor, rule: str, loss: str) -> TypeError:
    return TypeError(f"{loss}: {name} is {str(value.dtype).removeprefix('torch.')}; it {rule}")


def find_nan(
    data: Mapping[str, Any],
    keywords: Mapping[str, object],
    required_keys: Sequence[str] = (),
    next_token_keys: Collection[str] = frozenset(),
    is_wanted: Callable[[Tensor], Tensor] = torch.isnan,
) -> str | None:
    """Return the place of the first unmasked NaN, such as "data['advantages'][2, 5]", or None if there is none.

    It explains why a loss is NaN. The required data is searched first, then the model's streams, then all other data.

    Shapes: streams of data are [B, S, …] or [B]; keywords are [B, S-1, …], [B, S, …] or [B].

    Args:
        data: The batch.
        keywords: The streams that the loss got from the model.
        required_keys: The keys of data that the loss reads.
        next_token_keys: The keys of data whose entry t corresponds to token t+1.
        is_wanted: The test for the values to find. A caller may also look for infinite values, because ∞ − ∞ is NaN.
    """
    mask = (data["token_mask"] * data["sample_mask"][:, None]) != 0
    by_shape = {mask.shape: mask, mask[:, 1:].shape: mask[:, 1:], mask.shape[:1]: data["sample_mask"] != 0}
    rolled = {f"data[{key!r}]": pad(mask[:, 1:], (0, 1)) for key in next_token_keys}
    read = {f"data[{key!r}]": data[key] for key in (*required_keys, *sorted(next_token_keys)) if key in data}
    for name, value in (read | dict(keywords) | {f"data[{key!r}]": value for key, value in data.items()}).items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() == 0:
            continue
        counts = rolled.get(name, by_shape.get(value.shape[:2]))
        if counts is None:
            continue
        counts = counts.to(value.device).view(*counts.shape, *(1,) * (value.dim() - counts.dim()))
        positions = (is_wanted(value) & counts).nonzero()
        if len(positions):
            return f"{name}[{', '.join(map(str, positions[0].tolist()))}]"
    return None


@dataclass(frozen=True)
class TokenMask:
    """The mask of the tokens that count: m[b, t] = token_mask[b, t]·sample_mask[b].

    Values between 0 and 1 are weights. Positions with mask 0 are never read.

    Attributes:
        including_first: The mask m [B, S], aligned with input_ids.
        samples: sample_mask [B].
    """

    including_first: Shaped[Tensor, "batch sequence"]
    samples: Shaped[Tensor, " batch"]

    @classmethod
    def from_batch(cls, data: Mapping[str, object], loss: str) -> TokenMask:
        token_mask, sample_mask = require_mask(data, "token_mask", loss), require_mask(data, "sample_mask", loss)
        if token_mask.dim() != 2 or sample_mask.shape != token_mask.shape[:1]:
            raise ValueError(
                f"{loss}: token_mask must be [B, S] and sample_mask [B], "
                f"got {tuple(token_mask.shape)} and {tuple(sample_mask.shape)}"
            )
        if not token_mask.size(1):
            raise ValueError(f"{loss}: token_mask {tuple(token_mask.shape)} has no token; sequences need at least one")
        return cls(token_mask * sample_mask[:, None], sample_mask)

    @property
    def tokens(self) -> Shaped[Tensor, "batch tokens"]:
        """Return the mask [B, S-1] aligned with next-token logprobs. The first token is not predicted."""
        return self.including_first[:, 1:]


class TokenStreams:
    """A batch as [B, S-1] streams that are aligned with the model's next-token streams.

    `torch.where` sets the masked positions of every stream to 0. A NaN at such a position therefore reaches neither a
    value nor a gradient, and no formula has to handle it.

    Attributes:
        data: The batch.
        mask: The mask of the tokens that count, [B, S-1].
        sample_mask: The mask of the samples that count, [B].
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        like: Tensor,
        loss: str,
        required_keys: Sequence[str] = (),
        next_token_keys: Collection[str] = frozenset(),
    ) -> None:
        """Check `required_keys`, and read the masks of `data`.

        The streams have the device of `like`, and the wider of its dtype and fp32. `next_token_keys` are the keys of
        streams whose entry t corresponds to token t+1.
        """
        self.data, self._loss, self._next_token_keys = data, loss, next_token_keys
        for key in required_keys:
            require(data, key, loss)
        mask = TokenMask.from_batch(data, loss)
        self._like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
        self.mask = mask.tokens.to(self._like)
        self.sample_mask = mask.samples.to(self._like)

    @property
    def token_mask(self) -> Float[Tensor, "batch tokens"]:
        """Return token_mask [B, S-1], not multiplied by sample_mask, but 0 for masked samples."""
        token_mask = self.data["token_mask"][:, 1:].to(self._like)
        return torch.where(self.sample_mask[:, None] != 0, token_mask, 0.0)

    def select(
        self, name: str, stream: Shaped[Tensor, "batch tokens *more"], trailing: int = 0
    ) -> Float[Tensor, "batch tokens *more"]:
        """Return a stream [B, S-1, …] that has `trailing` more dimensions, with masked positions set to 0."""
        if stream.shape[: stream.dim() - trailing] != self.mask.shape:
            more = f" and {trailing} more dimension(s)" if trailing else ""
            raise ValueError(
                f"{self._loss}: {name} {tuple(stream.shape)} does not fit token_mask[:, 1:] "
                f"{tuple(self.mask.shape)}{more}"
            )
        counts = (self.mask != 0).view(*self.mask.shape, *(1,) * trailing)
        return torch.where(counts, require_real(stream, name, self._loss).to(self._like), 0.0)

    def __contains__(self, key: str) -> bool:
        return key in self.data

    def __getitem__(self, key: str) -> Float[Tensor, "batch tokens"]:
        """Return data[key], [B, S] (or [B], one value per sequence), without its first column: [B, S-1].

        If the key is one of the loss's next_token_keys, the last column is dropped instead.
        """
        value = require_real(require(self.data, key, self._loss), f"data[{key!r}]", self._loss)
        batch, length = self.mask.shape[0], self.mask.shape[1] + 1
        if value.shape == (batch,):
            value = value[:, None].expand(batch, length)
        if value.shape != (batch, length):
            hint = "" if is_token_key(key) else "; if it holds one value per token, declare it by declare_token_keys"
            raise ValueError(
                f"{self._loss}: data[{key!r}] {tuple(value.shape)} does not fit token_mask {(batch, length)}{hint}"
            )
        return self.select(f"data[{key!r}]", value[:, :-1] if key in self._next_token_keys else value[:, 1:])

    def get(self, key: str) -> Float[Tensor, "batch tokens"] | None:
        return self[key] if key in self else None  # noqa: SIM401  # this is `get`

    def per_sample(self, key: str) -> Float[Tensor, " batch"]:
        """Return data[key] [B], with 0 for masked samples."""
        value = require_real(require(self.data, key, self._loss), f"data[{key!r}]", self._loss)
        if value.shape != self.sample_mask.shape:
            raise ValueError(
                f"{self._loss}: data[{key!r}] {tuple(value.shape)} must be one value per sample "
                f"{tuple(self.sample_mask.shape)}"
            )
        return torch.where(self.sample_mask != 0, value.to(self._like), 0.0)
