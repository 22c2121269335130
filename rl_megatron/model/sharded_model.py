"""`ShardedModel`: the part of a model that this rank holds. Code that reads or writes weights uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from megatron.core.distributed import DistributedDataParallel

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.peft import LoraConfig, check_together
from rl_megatron.model.build import Head, attach_frozen_adapters, build_model, unwrap
from rl_megatron.model.lora.attach import find_dora_adapters, switch_off
from rl_megatron.model.lora.originals import use_originals
from rl_megatron.topology.topology import Topology


@dataclass(frozen=True)
class Base:
    """The base on which adapters are trained: the path of its checkpoint, and the digest of its tensors."""

    path: str
    digest: str


class ShardedModel:
    """The model chunks of this rank. It owns the weights, their version and whether they are scattered over ranks.

    Attributes:
        config: The model's shape.
        topology: How the model is sharded over ranks.
        vocab_size: The tokenizer's vocabulary size. The embedding's rows beyond it are padding.
        precision: "fp32" or "bf16".
        head: "lm" (logits) or "score" (one number per token).
        lora: The section `peft` of the trained adapters, or None if the weights themselves are trained.
        frozen_adapters: The sections `peft` of the frozen adapters, which have other names.
        base: The checkpoint of the frozen weights under the adapters, or None if the weights are not from a checkpoint.
        adapters_are_new: Whether the adapters are untrained, so that the model computes the same as without them.
        model_chunks: One model chunk per virtual pipeline stage. Training wraps them in megatron-core's DDP.
        version: A number that changes whenever the weights change.
        is_scattered: Whether each rank has new values only for the weights that it updated itself, because the last
            optimizer step was overlapped.
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
        initialise: bool = True,
        lora: LoraConfig | None = None,
    ):
        """Build the model chunks. Every layout starts from the same weights, which depend only on `seed`.

        With `initialise=False` all weights are 0, for a caller that loads them next. Adapters are always initialised.
        """
        if lora is not None:
            config = _with_portable_layers(config)
        self.config = config
        self.topology = topology
        self.vocab_size = vocab_size
        self.precision = precision
        self.head: Head = head
        self.lora = lora
        self.frozen_adapters: tuple[LoraConfig, ...] = ()
        self.base: Base | None = None
        self.adapters_are_new = lora is not None and lora.init_lora_weights
        self.model_chunks: list[torch.nn.Module] = build_model(
            config,
            topology,
            vocab_size=vocab_size,
            precision=precision,
            seed=seed,
            head=head,
            initialise=initialise,
            lora=lora,
        )
        self.version = 0
        self.is_scattered = False

    @property
    def wrapped_model_chunks(self) -> list[DistributedDataParallel]:
        """Return the model chunks that are wrapped in DDP: all of them if the model is trained, otherwise none."""
        return [model_chunk for model_chunk in self.model_chunks if isinstance(model_chunk, DistributedDataParallel)]

    def gather_parameters(self) -> None:
        """Gather the current weights on every rank if an overlapped optimizer step left them scattered.

        It is collective in that case. With DoRA it is also collective if weights have changed, because adapters then
        compute the lengths of the rows. Otherwise it does nothing. The next training forward would gather the weights
        too, module by module.
        """
        if self.is_scattered:
            for model_chunk in self.wrapped_model_chunks:
                if model_chunk.ddp_config.overlap_param_gather:
                    model_chunk.start_param_sync(force_sync=True)
            self.is_scattered = False
        for adapter in find_dora_adapters(self.model_chunks):
            adapter.lengths()

    def mark_changed(self) -> None:
        """Record that weights have changed."""
        self.version += 1
        for adapter in find_dora_adapters(self.model_chunks):
            adapter.forget_lengths()

    def mark_updated(self, changed: bool) -> None:
        """Record an optimizer step and whether it `changed` the weights. An overlapped step leaves them scattered."""
        if changed:
            self.mark_changed()
        self.adapters_are_new = self.adapters_are_new and not changed
        self.is_scattered = any(
            model_chunk.ddp_config.overlap_param_gather for model_chunk in self.wrapped_model_chunks
        )

    def mark_gathered(self) -> None:
        """Record that a training forward has gathered the weights."""
        self.is_scattered = False

    def require_head(self, head: Head, call: str) -> None:
        """Refuse `call` if the model's head is not `head`."""
        if self.head != head:
            raise RuntimeError(f"{call} needs a model with head={head!r}; this model has head={self.head!r}")

    def set_training(self, training: bool) -> None:
        """Put every model chunk into training or evaluation mode."""
        for model_chunk in self.model_chunks:
            model_chunk.train(training)

    def frozen_copy(self) -> ShardedModel:
        """Return a second model with the same weights, in evaluation mode and without gradients. Collective."""
        self.gather_parameters()
        copy = ShardedModel(
            self.config,
            self.topology,
            vocab_size=self.vocab_size,
            precision=self.precision,
            head=self.head,
            initialise=False,
            lora=self.lora,
        )
        copy.add_frozen_adapters(self.frozen_adapters)
        for original, copied in zip(self.model_chunks, copy.model_chunks, strict=True):
            unwrap(copied).load_state_dict(unwrap(original).state_dict())
            copied.eval().requires_grad_(False)
        return copy

    def add_frozen_adapters(self, adapters: Sequence[LoraConfig]) -> None:
        """Add frozen adapters to a model that trains adapters. The caller loads their weights next."""
        assert not adapters or self.lora is not None, "only a model that trains adapters has frozen ones"
        check_together([lora for lora in (self.lora, *self.frozen_adapters, *adapters) if lora is not None])
        for lora in adapters:
            attach_frozen_adapters(self.model_chunks, self.config, self.topology, self.vocab_size, lora)
        self.frozen_adapters += tuple(adapters)

    @contextmanager
    def adapters_off(self, trained_only: bool = False) -> Iterator[None]:
        """Make the model compute the same as its base within the block. Its weights must be gathered.

        With `trained_only`, frozen adapters still take part.
        """
        with switch_off(self.model_chunks, trained_only), use_originals(self.model_chunks):
            yield

    def release(self) -> bool:
        """Drop the model chunks and return whether there were any.

        The list `model_chunks` is emptied in place, so objects that share it drop them too.
        """
        held = bool(self.model_chunks)
        self.model_chunks.clear()
        return held


def _with_portable_layers(config: ModelConfig) -> ModelConfig:
    """Return the model section with portable layers, the only ones that support adapters."""
    if config.backend == "transformer_engine":
        raise ConfigError(
            "model.backend=transformer_engine: its layers do not support adapters (peft); set model.backend=auto"
        )
    return replace(config, backend="portable")
