"""Two ways to give losses the logits of a language model's head without a copy: computed when read, or as a view.

Both replace the head's forward function while the model runs.
"""

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
    """The language model head of this rank, whose logits are computed only when the loss reads them.

    The model still calls the head module, so its hooks run as usual. megatron-core's DDP, for example, waits in a hook
    for parameters that are being gathered.

    Attributes:
        model: The model chunk that has the head.
        sequence_shards: The number of sequence-parallel ranks over which the head's input is split.
        block_tokens: The number of tokens of a token block, or None to choose it automatically.
    """

    model: GPTModel
    sequence_shards: int
    block_tokens: int | None

    @classmethod
    def find(cls, model_chunks: list[torch.nn.Module], block_tokens: int | None) -> DeferredHead | None:
        """Return the head of the model chunks, or None if none of them has a language model head."""
        model = _find_model_with_head(model_chunks)
        if model is None:
            return None
        shards = model.config.tensor_model_parallel_size if model.config.sequence_parallel else 1
        return cls(model, shards, block_tokens)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the model return the head's input [S, B, H] instead of logits [B, S, V/tp] within the block."""
        head = self.model.output_layer

        def forward(hidden: Tensor, weight: Tensor | None = None, **unused) -> tuple[Tensor, None]:
            return hidden.transpose(0, 1), None  # the model transposes the head's output back, without a copy

        with _replace_forward(head, forward):
            yield

    def logits(self, hidden: Tensor) -> DeferredLogits:
        """Return the logits of `hidden`, which is the model's output within `in_use`. They are computed when read."""
        head, shared = self.model.output_layer, self.model.share_embeddings_and_output_weights
        weight = self.model.shared_embedding_or_output_weight() if shared else head.weight
        if weight is None:
            raise RuntimeError("the head has no weight, and the model shares none with it")
        return DeferredLogits(hidden, weight, self.sequence_shards, self.block_tokens)


@dataclass(frozen=True)
class UncopiedHead:
    """The language model head of this rank. Losses get its logits [S, B, V/tp] as a view [B, S, V/tp].

    By default the model copies the logits into that order, and autograd copies their gradient back.
    """

    model: GPTModel

    @classmethod
    def find(cls, model_chunks: list[torch.nn.Module]) -> UncopiedHead | None:
        """Return the head of the model chunks, or None if none of them has a language model head."""
        model = _find_model_with_head(model_chunks)
        return None if model is None else cls(model)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the model return logits [S, B, V/tp] within the block."""
        head = self.model.output_layer
        compute = head.forward

        def forward(*args, **kwargs) -> tuple[Tensor, Tensor | None]:
            logits, bias = compute(*args, **kwargs)
            return logits.transpose(0, 1), bias  # the model transposes the head's output back, without a copy

        with _replace_forward(head, forward):
            yield

    def logits(self, output: Tensor) -> Tensor:
        """Return logits [B, S, V/tp] as a view of the model's output within `in_use`."""
        return output.transpose(0, 1)


def _find_model_with_head(model_chunks: list[torch.nn.Module]) -> GPTModel | None:
    models = map(unwrap, model_chunks)
    return next((m for m in models if m.post_process and not isinstance(m.output_layer, ScoreHead)), None)


@contextmanager
def _replace_forward(head: torch.nn.Module, forward: Callable) -> Iterator[None]:
    """Replace `head.forward` by `forward` within the block, for this instance only."""
    original = vars(head).get("forward")
    head.forward = forward
    try:
        yield
    finally:
        del head.forward
        if original is not None:
            head.forward = original
