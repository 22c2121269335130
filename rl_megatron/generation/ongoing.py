"""A request on its way to a completion, and the compact form in which ranks exchange completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from rl_megatron.generation.interfaces import Completion, Request, WeightSpan


@dataclass
class Ongoing:
    """A request and the part of its completion that exists. It can continue on another rank, with other weights.

    Attributes:
        request: The request.
        ids: The tokens so far.
        logprobs: Their logprobs.
        spans: The versions of the weights that generated them.
        routed_experts: The experts of the tokens that the model has read, if they are recorded.
    """

    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    routed_experts: Tensor | None = None

    @property
    def all_ids(self) -> list[int]:
        """Return all token ids, those of the prompt first."""
        return [*self.request.prompt, *self.ids]

    @property
    def tokens_left(self) -> int:
        """Return how many more tokens it may get."""
        return self.request.sampling.max_new_tokens - len(self.ids)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens that weights of this version generated."""
        if not ids:
            return
        start = len(self.ids)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.ids += ids
        self.logprobs += logprobs
        self.spans.append(WeightSpan(version, start, len(self.ids)))

    def completion(self, reason: Literal["stop", "length", "abort"]) -> Completion:
        """Return the completion, which ended for this reason."""
        parts = tuple(self.ids), tuple(self.logprobs), tuple(self.spans)
        return Completion(self.request.request_id, *parts, reason, self.routed_experts)
