"""The state of running sequences on the device, one slot for each, and what every token does to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from rl_megatron.generation.completions import request_uniforms
from rl_megatron.generation.ongoing import Ongoing
from rl_megatron.topology.transfer import send

_NO_TOKEN = -1


@dataclass
class Slots:
    """The running sequences. Each attribute has one entry for each slot; all ranks of a model replica have the same.

    Attributes:
        next_token: The token that the model reads next, [slots].
        position: Its position, which is the number of cached tokens, [slots].
        generated: The number of tokens generated in this slot, [slots].
        limit: The number of tokens that may be, [slots].
        stop_ids: The tokens that end the completion, [slots, k], filled up with −1.
        uniforms: The random number of each token, [slots, tokens] fp64.
        tokens: The tokens generated in this slot, [slots, tokens].
        logprobs: Their logprobs, [slots, tokens] fp32.
        running: Whether the sequence goes on, [slots].
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
        """Return all tensors."""
        return [getattr(self, field.name) for field in fields(self)]

    def resize(self, num_slots: int, num_tokens: int, num_stops: int) -> None:
        """Make more slots, or more columns of tokens and of stop ids. Nothing is lost."""
        width_of = {"stop_ids": num_stops, "uniforms": num_tokens, "tokens": num_tokens, "logprobs": num_tokens}
        for field in fields(self):
            old: Tensor = getattr(self, field.name)
            shape = (num_slots, *((width_of[field.name],) if field.name in width_of else ()))
            new = old.new_full(shape, _NO_TOKEN if field.name == "stop_ids" else 0)
            new[tuple(slice(size) for size in old.shape)] = old
            setattr(self, field.name, new)

    def fill(self, first: int, sequences: Sequence[Ongoing]) -> None:
        """Begin sequences in the slots from `first` on. All their tokens but the last are cached by the caller."""
        place, device = slice(first, first + len(sequences)), self.tokens.device
        texts = [sequence.all_ids for sequence in sequences]
        begun = [len(sequence.ids) for sequence in sequences]
        limits = [sequence.tokens_left for sequence in sequences]
        uniforms = request_uniforms(
            [each.request for each in sequences], max(map(sum, zip(begun, limits, strict=True)))
        )
        stop_ids = torch.full((len(sequences), self.stop_ids.size(1)), _NO_TOKEN)
        for index, sequence in enumerate(sequences):
            own = sequence.request.sampling.stop_ids
            stop_ids[index, : len(own)] = torch.tensor(own, dtype=torch.long)
            uniforms[index] = uniforms[index].roll(-begun[index])
        width = min(uniforms.size(1), self.uniforms.size(1))
        last, positions = torch.tensor([(text[-1], len(text) - 1) for text in texts]).unbind(1)
        begin = send((last, positions, torch.tensor(limits), stop_ids, uniforms[:, :width]), device)
        of_slots = (self.next_token, self.position, self.limit, self.stop_ids, self.uniforms[:, :width])
        for tensor, values in zip(of_slots, begin, strict=True):
            tensor[place] = values
        self.generated[place].zero_()
        self.running[place].fill_(True)
        self.stopped[place].fill_(False)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to other slots."""
        for field in fields(self):
            tensor: Tensor = getattr(self, field.name)
            tensor[targets] = tensor[sources]

    def next_uniforms(self, count: int) -> Tensor:
        """Return the random numbers of the next token of the first `count` slots, [count]."""
        column = self.generated[:count].clamp(max=self.uniforms.size(1) - 1)
        return self.uniforms[:count].gather(1, column[:, None])[:, 0]

    def add(self, chosen: Tensor, logprobs: Tensor) -> None:
        """Append one token to the running ones of the first slots. Nothing waits for the device.

        A sequence also ends at a token whose logits were NaN.

        Args:
            chosen: Token ids, [count].
            logprobs: Their logprobs, [count].
        """
        count = len(chosen)
        chosen = chosen.masked_fill(logprobs.isnan(), 0)  # a token drawn from NaN may be none of the vocabulary
        running, generated = self.running[:count], self.generated[:count]
        column = generated.clamp(max=self.tokens.size(1) - 1)[:, None]
        for kept, new in ((self.tokens[:count], chosen), (self.logprobs[:count], logprobs.float())):
            kept.scatter_(1, column, torch.where(running[:, None], new[:, None], kept.gather(1, column)))
        self.next_token[:count] = torch.where(running, chosen, self.next_token[:count])
        generated += running
        self.position[:count] += running
        at_stop = running & (chosen[:, None] == self.stop_ids[:count]).any(1)
        self.stopped[:count] |= at_stop
        self.running[:count] = running & ~at_stop & (generated < self.limit[:count]) & ~logprobs.isnan()
