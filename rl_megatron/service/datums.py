"""`Datum`: a sequence with the inputs of a loss, as a client sends it; and the batch that datums form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_megatron.service.losses import COUNTS, TARGETS, NamedLoss, TargetLoss


@dataclass(frozen=True)
class Datum:
    """A sequence of N tokens with the inputs of a loss.

    Attributes:
        tokens: [N] int64.
        inputs: The tensors by name, [N] or [N, K]: `target_tokens` (int64) and those that the loss reads (float32).
            Entry t corresponds to the token after token t.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]

    @property
    def targets(self) -> np.ndarray:
        """Return the target tokens [N, K]."""
        return _with_targets(self.inputs[TARGETS])

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that the client gave the targets, and so gets for logprobs."""
        return self.inputs[TARGETS].shape

    @property
    def is_shifted(self) -> bool:
        """Return whether every target is the next token of the sequence, except the last one, which follows it."""
        targets = self.inputs[TARGETS]
        return targets.ndim == 1 and np.array_equal(targets[:-1], self.tokens[1:])


MOST_TARGETS = 2**26
"""The most targets of a request, counted as if every datum had as many as the largest: memory is taken for them."""


def check_data(data: Sequence[Datum], loss: TargetLoss, vocab_size: int, longest: int) -> None:
    """Raise ValueError if datums do not fit a loss or the model. The message names the datum and the rule.

    Args:
        data: The datums of a request.
        loss: The loss.
        vocab_size: The size of the vocabulary.
        longest: The maximum number of tokens of a sequence, with its last target.
    """
    if not data:
        raise ValueError("the request has no datum")
    for number, datum in enumerate(data):
        _check_datum(datum, f"data[{number}]", loss.name, loss.named, vocab_size, longest)
    length, targets = max(len(datum.tokens) for datum in data), max(datum.targets.shape[1] for datum in data)
    if len(data) * length * targets > MOST_TARGETS:
        raise ValueError(
            f"{len(data)} datums of up to {length} tokens with up to {targets} targets each are more than "
            f"{MOST_TARGETS} targets; send fewer datums at once"
        )


def _check_datum(datum: Datum, where: str, name: str, loss: NamedLoss, vocab_size: int, longest: int) -> None:
    length = len(datum.tokens)
    if not length:
        raise ValueError(f"{where}.model_input has no token")
    if length >= longest:
        raise ValueError(f"{where}.model_input has {length} tokens, but the model takes at most {longest - 1}")
    _check_tokens(datum.tokens, f"{where}.model_input", vocab_size)
    unknown = sorted(datum.inputs.keys() - {TARGETS, *loss.inputs})
    missing = [key for key in (TARGETS, *loss.required) if key not in datum.inputs]
    if unknown or missing:
        optional = f", and reads {', '.join(loss.optional)} if they are there" if loss.optional else ""
        raise ValueError(
            f"{where}.loss_fn_inputs has {', '.join(sorted(datum.inputs)) or 'nothing'}; {name} needs "
            f"{', '.join((TARGETS, *loss.required))}{optional}"
        )
    targets = datum.inputs[TARGETS]
    if targets.ndim not in ((1, 2) if loss.many_targets else (1,)) or targets.shape[0] != length or not targets.size:
        shapes = f"[{length}] or [{length}, K]" if loss.many_targets else f"[{length}]"
        raise ValueError(f"{where}.loss_fn_inputs.{TARGETS} has the shape {list(targets.shape)}; it must be {shapes}")
    _check_tokens(targets, f"{where}.loss_fn_inputs.{TARGETS}", vocab_size)
    for key in loss.inputs:
        if key in datum.inputs and datum.inputs[key].shape != targets.shape:
            raise ValueError(
                f"{where}.loss_fn_inputs.{key} has the shape {list(datum.inputs[key].shape)}, and {TARGETS} has "
                f"{list(targets.shape)}; they must be equal"
            )
        if key in datum.inputs and not np.isfinite(datum.inputs[key]).all():
            raise ValueError(f"{where}.loss_fn_inputs.{key} has a value that is not finite")


def _check_tokens(tokens: np.ndarray, name: str, vocab_size: int) -> None:
    wrong = (tokens < 0) | (tokens >= vocab_size)
    if wrong.any():
        raise ValueError(f"{name} has the token {tokens[wrong][0]}; tokens are 0 … {vocab_size - 1}")


def form_batch(data: Sequence[Datum], loss: TargetLoss) -> dict[str, Tensor]:
    """Return the datums as a batch for `MegatronPolicy`, the same on every rank.

    Each sequence gets one more token, so that its last position has a next token: its last target, or 0. If all targets
    are next tokens, the batch has no `target_tokens`.
    """
    is_shifted = all(datum.is_shifted for datum in data)
    width = max(len(datum.tokens) for datum in data) + 1
    num_targets = max(datum.targets.shape[1] for datum in data)
    input_ids = torch.zeros(len(data), width, dtype=torch.long)
    values = {key: torch.zeros(len(data), width, num_targets) for key in loss.named.inputs}
    counts = torch.zeros(len(data), width, num_targets)
    targets = torch.zeros(len(data), width, num_targets, dtype=torch.long)
    for index, datum in enumerate(data):
        length, chosen = len(datum.tokens), datum.targets
        input_ids[index, :length] = torch.from_numpy(datum.tokens)
        if is_shifted:
            input_ids[index, length] = int(chosen[-1, 0])
        filled = (index, slice(length), slice(chosen.shape[1]))
        counts[filled] = 1.0
        targets[filled] = torch.from_numpy(chosen)
        for key, value in values.items():
            sent = datum.inputs.get(key)
            value[filled] = loss.named.optional[key] if sent is None else torch.from_numpy(_with_targets(sent)).float()
    lengths = torch.tensor([len(datum.tokens) + 1 for datum in data])
    positions = torch.arange(width)
    token_mask = ((positions > 0) & (positions < lengths[:, None])).float()
    batch = {
        "input_ids": input_ids, "input_lengths": lengths, "token_mask": token_mask,
        "sample_mask": torch.ones(len(data)), COUNTS: counts, **values,
    }  # fmt: skip
    return batch if is_shifted else batch | {TARGETS: targets}


def _with_targets(values: np.ndarray) -> np.ndarray:
    return values[:, None] if values.ndim == 1 else values
