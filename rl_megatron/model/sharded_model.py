"""`ShardedModel`: the part of a model that this rank holds, for everything that reads or writes its weights."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel

from rl_megatron.config.schema import ModelConfig
from rl_megatron.model.build import Head, build_model, unwrap
from rl_megatron.topology.topology import Topology


class ShardedModel:
    """The model chunks of this rank, and what a reader of their weights has to know about them.

    It owns the weights: their version, and whether the last optimizer step left them scattered over ranks.

    Attributes:
        config: The model's shape.
        topology: How the model is sharded over ranks.
        vocab_size: The tokenizer's vocabulary size; padded rows of the embedding beyond it are never used.
        precision: "fp32" or "bf16".
        head: "lm" (logits) or "score" (one number per token).
        chunks: One model chunk per virtual pipeline stage. Training wraps them in megatron-core's DDP.
        version: A number that changes whenever the weights change.
        is_scattered: Whether each rank only has the new values of the weights that it updated itself.
    """

    def __init__(
        self,
        config: ModelConfig,
        topology: Topology,
        *,
        vocab_size: int,
        precision: str = "fp32",
        seed: int = 0,
        head: Head = "lm",
    ):
        """Build the chunks, initialized from `seed` alike in every layout.

        Raises:
            ConfigError: A parallel degree does not divide the model's shape, or the vocabulary does not fit.
        """
        self.config = config
        self.topology = topology
        self.vocab_size = vocab_size
        self.precision = precision
        self.head: Head = head
        self.model_chunks: list[torch.nn.Module] = build_model(
            config, topology, vocab_size=vocab_size, precision=precision, seed=seed, head=head
        )
        self.version = 0
        self.is_scattered = False

    @property
    def wrapped_model_chunks(self) -> list[DistributedDataParallel]:
        """The chunks that are wrapped in megatron-core's DDP: all of a model that is trained, and none of another."""
        return [model_chunk for model_chunk in self.model_chunks if isinstance(model_chunk, DistributedDataParallel)]

    def gather_parameters(self) -> None:
        """Give every rank the current weights if an overlapped optimizer step left them scattered; collective then.

        The next training forward would gather them too, module by module.
        """
        if self.is_scattered:
            for model_chunk in self.wrapped_model_chunks:
                if model_chunk.ddp_config.overlap_param_gather:
                    model_chunk.start_param_sync(force_sync=True)
            self.is_scattered = False

    def mark_updated(self, changed: bool) -> None:
        """Note an optimizer step, and whether it changed weights. An overlapped step leaves them scattered."""
        self.version += int(changed)
        self.is_scattered = any(
            model_chunk.ddp_config.overlap_param_gather for model_chunk in self.wrapped_model_chunks
        )

    def mark_gathered(self) -> None:
        """Note that a training forward has gathered the weights."""
        self.is_scattered = False

    def require_head(self, head: Head, call: str) -> None:
        """Refuse `call` if the model has another head than the call is for.

        Raises:
            RuntimeError: The heads differ; the message names `call`.
        """
        if self.head != head:
            raise RuntimeError(f"{call} is for a model built with head={head!r}; this one has head={self.head!r}")

    def set_training(self, training: bool) -> None:
        """Put every chunk into training or evaluation mode."""
        for model_chunk in self.model_chunks:
            model_chunk.train(training)

    def frozen_copy(self) -> ShardedModel:
        """Return a second model with the same weights, in evaluation mode and without gradients. Collective."""
        self.gather_parameters()
        copy = ShardedModel(
            self.config, self.topology, vocab_size=self.vocab_size, precision=self.precision, head=self.head
        )
        for own, copied in zip(self.model_chunks, copy.model_chunks, strict=True):
            unwrap(copied).load_state_dict(unwrap(own).state_dict())
            copied.eval().requires_grad_(False)
        return copy

    def release(self) -> bool:
        """Drop the chunks and return whether there were any. Whoever shares the list `chunks` loses them too."""
        held = bool(self.model_chunks)
        self.model_chunks.clear()
        return held
