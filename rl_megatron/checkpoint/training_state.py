"""`TrainingState`: a model, its optimizer and its schedule in the form that `dist_checkpointing` saves and loads."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from rl_megatron.checkpoint.optimizer_state import (
    collect_optimizer_state,
    list_parts,
    load_optimizer_state,
    request_optimizer_state,
)
from rl_megatron.model.build import unwrap
from rl_megatron.model.lora.targets import parse_adapter
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.model.shards import SHARDING_METADATA

HEAD_PREFIX = "output_layer."  # the prefix of the head's names in a model's state
Selection = Literal["all", "base", "adapters", "frozen adapters"]
"""The weights that a checkpoint holds: all; the base's; adapters and other trained weights; or the same
without the trained adapter."""


@dataclass(frozen=True)
class TrainingState:
    """The state that a checkpoint holds. Optimizer and scheduler are None if the model is not trained.

    If the model has adapters, `selection` can restrict the state to the base, or to adapters and trained weights.
    """

    model: ShardedModel
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    selection: Selection = "all"

    @property
    def model_chunks(self) -> list[GPTModel]:
        """Return the model chunks without DDP and precision wrappers."""
        return [unwrap(model_chunk) for model_chunk in self.model.model_chunks]

    def build_sharded(self) -> dict[str, object]:
        """Return the sharded state dict to save. Collective."""
        models = self._models()
        state: dict[str, object] = {f"model{index}": model for index, model in enumerate(models)}
        if self.optimizer is not None and self.scheduler is not None:
            state["optimizer"] = collect_optimizer_state(self.optimizer, models)
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def build_request(self, weights_only: bool, new_head: bool) -> dict[str, Any]:
        """Return the sharded state dict to fill from a checkpoint.

        `weights_only` leaves out the optimizer, and `new_head` the model's head.
        """
        models = self._models()
        state: dict[str, Any] = {}
        for index, model in enumerate(models):
            kept = {key: entry for key, entry in model.items() if not (new_head and key.startswith(HEAD_PREFIX))}
            state[f"model{index}"] = kept
        if self.optimizer is not None and not weights_only:
            state["optimizer"] = request_optimizer_state(self.optimizer, models)
        return state

    def load_optimizer(self, loaded: dict[str, Any]) -> None:
        """Load optimizer and schedule from the state dict `loaded`. Weights must have been loaded before. Collective.

        `loaded` is the filled result of `build_request`, with the checkpoint's values that are not tensors.
        """
        assert self.optimizer is not None and self.scheduler is not None
        load_optimizer_state(self.optimizer, self._models(), loaded["optimizer"])
        self.scheduler.num_steps = 0  # because loading adds the checkpoint's steps to it
        self.scheduler.load_state_dict(loaded["scheduler"])

    def list_trained_tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that training changes in place."""
        for model_chunk in self.model_chunks:
            yield from model_chunk.parameters()
            yield from model_chunk.buffers()
        for part in [] if self.optimizer is None else list_parts(self.optimizer):
            yield from part.get_parameters()
            for state in part.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _models(self) -> list[dict[str, ShardedTensor | ShardedTensorFactory]]:
        models = [collect_model_state(model_chunk) for model_chunk in self.model_chunks]
        if self.selection == "all":
            return models
        if self.selection == "base":  # includes the score head, which is trained, but starts from the base's
            return [{key: entry for key, entry in model.items() if parse_adapter(key) is None} for model in models]
        beside = [{key: entry for key, entry in model.items() if _is_beside_base(key, entry)} for model in models]
        if self.selection == "adapters" or self.model.lora is None:
            return beside
        trained = self.model.lora.adapter_name
        return [{key: entry for key, entry in model.items() if parse_adapter(key) != trained} for model in beside]


def _is_beside_base(key: str, entry: ShardedTensor | ShardedTensorFactory) -> bool:
    return parse_adapter(key) is not None or (isinstance(entry.data, torch.nn.Parameter) and entry.data.requires_grad)


def collect_model_state(model_chunk: GPTModel) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Return the tensors of a model chunk with their places in the unsharded model.

    The "extra states" of modules are left out: they are for FP8, are empty here, and differ between backends.
    """
    entries = model_chunk.sharded_state_dict(metadata=dict(SHARDING_METADATA))
    return {key: entry for key, entry in entries.items() if isinstance(entry, ShardedTensor | ShardedTensorFactory)}


def load_model(model_chunk: torch.nn.Module, loaded: dict[str, torch.Tensor], without: Collection[str] = ()) -> None:
    """Fill all tensors of a model chunk, except those whose names are in `without`."""
    absent, unknown = model_chunk.load_state_dict(loaded, strict=False)
    absent = [key for key in absent if not key.endswith("_extra_state") and key not in without]
    if absent or unknown:
        raise RuntimeError(f"the loaded state lacks {absent} of the model, and has {unknown}, which the model lacks")
