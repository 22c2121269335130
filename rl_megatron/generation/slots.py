"""The decoding state of running sequences, one slot for each, and its update by new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rl_megatron.generation.requests import PartialCompletion, draw_uniforms
from rl_megatron.topology.transfer import send

_NO_TOKEN = -1


@dataclass
class Slots:
    """The decoding state of running sequences, one entry per slot in each attribute, equal on all ranks of a replica.

    Attributes:
        next_token: The token that the model reads next, [slots].
        position: Its position, which is the number of cached tokens, [slots].
        generated: The number of tokens generated in this slot, [slots].
        limit: The maximum number of tokens to generate in this slot, [slots].
        stop_ids: The tokens that end the completion, [slots, k], padded with −1.
        uniforms: The random number of each token to generate, [slots, tokens] fp64.
        tokens: The tokens generated in this slot, [slots, tokens].
        logprobs: Their logprobs, [slots, tokens] fp32.
        running: Whether the sequence continues, [slots].
        stopped: Whether a stop token ended it, [slots].
    """

    next_token: Tensor
    position: Tensor
    generated: Tensor
    limit: Tensor
    stop_ids: Tensor
    uniforms: Tensor
    tokens: Tensor
    logprobs: Tensor
    running: Tensor
    stopped: Tensor

    @classmethod
    def empty(cls, num_slots: int, device: torch.device) -> Slots:
        """Return slots without sequences."""

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        return cls(
            next_token=zeros(),
            position=zeros(),
            generated=zeros(),
            limit=zeros(),
            stop_ids=zeros(1) + _NO_TOKEN,
            uniforms=zeros(1, dtype=torch.float64),
            tokens=zeros(1),
            logprobs=zeros(1, dtype=torch.float32),
            running=zeros(dtype=torch.bool),
            stopped=zeros(dtype=torch.bool),
        )

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def resize(self, num_slots: int, num_tokens: int, num_stops: int) -> None:
        """Make more slots, or more columns of tokens and of stop ids, and keep their values."""
        widths = {"stop_ids": num_stops, "uniforms": num_tokens, "tokens": num_tokens, "logprobs": num_tokens}
        for field in fields(self):
            old: Tensor = getattr(self, field.name)
            shape = (num_slots, *((widths[field.name],) if field.name in widths else ()))
            new = old.new_full(shape, _NO_TOKEN if field.name == "stop_ids" else 0)
            new[tuple(slice(size) for size in old.shape)] = old
            setattr(self, field.name, new)

    def fill(self, first: int, sequences: Sequence[PartialCompletion]) -> None:
        """Begin sequences in the slots from `first` on. The caller then lets the model read all tokens but the last."""
        slots, device = slice(first, first + len(sequences)), self.tokens.device
        texts = [sequence.all_ids for sequence in sequences]
        generated = [len(sequence.ids) for sequence in sequences]
        limits = [sequence.tokens_left for sequence in sequences]
        num_uniforms = max(map(sum, zip(generated, limits, strict=True)))
        uniforms = draw_uniforms([sequence.request for sequence in sequences], num_uniforms)
        stop_ids = torch.full((len(sequences), self.stop_ids.size(1)), _NO_TOKEN)
        for index, sequence in enumerate(sequences):
            ids = sequence.request.sampling.stop_ids
            stop_ids[index, : len(ids)] = torch.tensor(ids, dtype=torch.long)
            uniforms[index] = uniforms[index].roll(-generated[index])
        width = min(uniforms.size(1), self.uniforms.size(1))
        last, positions = torch.tensor([(text[-1], len(text) - 1) for text in texts]).unbind(1)
        initial = send((last, positions, torch.tensor(limits), stop_ids, uniforms[:, :width]), device)
        targets = (self.next_token, self.position, self.limit, self.stop_ids, self.uniforms[:, :width])
        for tensor, values in zip(targets, initial, strict=True):
            tensor[slots] = values
        self.generated[slots].zero_()
        self.running[slots].fill_(True)
        self.stopped[slots].fill_(False)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to other slots."""
        for field in fields(self):
            tensor: Tensor = getattr(self, field.name)
            tensor[targets] = tensor[sources]

    def get_next_uniforms(self, count: int) -> Tensor:
        """Return the random numbers for the next tokens of the first `count` slots, [count]."""
        column = self.generated[:count].clamp(max=self.uniforms.size(1) - 1)
        return self.uniforms[:count].gather(1, column[:, None])[:, 0]

    def add(self, chosen: Tensor, logprobs: Tensor) -> None:
        """Append `chosen` [count] to the running sequences among the first slots, without waiting for the device.

        A sequence also ends at a token whose logits were NaN.
        """
        count = len(chosen)
        chosen = chosen.masked_fill(logprobs.isnan(), 0)  # a token drawn from NaN may lie outside the vocabulary
        running, generated = self.running[:count], self.generated[:count]
        column = generated.clamp(max=self.tokens.size(1) - 1)[:, None]
        for written, new in ((self.tokens[:count], chosen), (self.logprobs[:count], logprobs.float())):
            written.scatter_(1, column, torch.where(running[:, None], new[:, None], written.gather(1, column)))
        self.next_token[:count] = torch.where(running, chosen, self.next_token[:count])
        generated += running
        self.position[:count] += running
        at_stop = running & (chosen[:, None] == self.stop_ids[:count]).any(1)
        self.stopped[:count] |= at_stop
        self.running[:count] = running & ~at_stop & (generated < self.limit[:count]) & ~logprobs.isnan()
