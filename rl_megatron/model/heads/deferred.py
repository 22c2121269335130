"""What a language model's head gives the losses: its input, from which they take the logits they need, or the logits
as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from rl_megatron.logprobs import DeferredLogits
from rl_megatron.model.build import unwrap
from rl_megatron.model.heads.score import ScoreHead


@dataclass(frozen=True)
class DeferredHead:
    """The head of the model's last stage, where this rank has it and it is a language model's.

    The head is still called as the module that it is: whatever hooks it has (megatron-core's DDP waits in one for
    parameters that are being gathered) run in their place.
    """

    model: GPTModel
    sequence_shards: int  # parts of its input's first dimension over sequence-parallel ranks
    block_tokens: int | None

    @classmethod
    def of(cls, model_chunks: list[torch.nn.Module], block_tokens: int | None) -> DeferredHead | None:
        """None where no chunk of this rank has a language model's head."""
        model = _model_with_head(model_chunks)
        if model is None:
            return None
        shards = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
        return cls(model, shards, block_tokens)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the model gives the head's input [S, B, H] in the place of logits [B, S, V/tp]."""
        head = self.model.output_layer

        def forward(hidden: Tensor, weight: Tensor | None = None, **unused) -> tuple[Tensor, None]:
            return hidden.transpose(0, 1), None  # the model transposes what the head gives: hidden again, uncopied

        with _forward_of(head, forward):
            yield

    def logits(self, hidden: Tensor) -> DeferredLogits:
        """Return the logits of `hidden`, the model's output while `in_use`, computed when they are read."""
        head, shared = self.model.output_layer, self.model.share_embeddings_and_output_weights
        weight = self.model.shared_embedding_or_output_weight() if shared else head.weight
        if weight is None:
            raise RuntimeError("the head has no weight of its own, and the model shares none with it")
        return DeferredLogits(hidden, weight, self.sequence_shards, self.block_tokens)


@dataclass(frozen=True)
class UncopiedHead:
    """The head of the model's last stage, whose logits [S, B, V/tp] the losses see as [B, S, V/tp]. Left to itself the
    model copies them into that order, and autograd copies their gradient back."""

    model: GPTModel

    @classmethod
    def of(cls, model_chunks: list[torch.nn.Module]) -> UncopiedHead | None:
        """None where no chunk of this rank has a language model's head."""
        model = _model_with_head(model_chunks)
        return None if model is None else cls(model)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the model gives [S, B, V/tp]."""
        head = self.model.output_layer
        compute = head.forward

        def forward(*args, **kwargs) -> tuple[Tensor, Tensor | None]:
            logits, bias = compute(*args, **kwargs)
            return logits.transpose(0, 1), bias  # the model transposes what the head gives: as it was, uncopied

        with _forward_of(head, forward):
            yield

    def logits(self, output: Tensor) -> Tensor:
        """[B, S, V/tp], a view of what the model gave."""
        return output.transpose(0, 1)


def _model_with_head(model_chunks: list[torch.nn.Module]) -> GPTModel | None:
    models = map(unwrap, model_chunks)
    return next((m for m in models if m.post_process and not isinstance(m.output_layer, ScoreHead)), None)


@contextmanager
def _forward_of(head: torch.nn.Module, forward: Callable) -> Iterator[None]:
    """Puts `forward` on the module itself, before its class's, and then back what was there."""
    before = vars(head).get("forward")
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before
