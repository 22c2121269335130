"""How a policy is built from files: from a Hugging Face directory, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rl_megatron.checkpoint.adapters import holds_adapter, saved_base
from rl_megatron.checkpoint.directory import check_head, read_manifest, saved_model
from rl_megatron.checkpoint.hf_load import open_hugging_face
from rl_megatron.checkpoint.load import start_from_weights
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.topology.topology import start_topology


class Loadable(Protocol):
    """What a policy offers to those who load weights into it."""

    model: ShardedModel
    optimizer: Any

    def load_checkpoint(self, path: str | Path, weights_only: bool = False) -> Any:
        """Load a checkpoint of any layout."""


PolicyT = TypeVar("PolicyT", bound=Loadable)


def open_hf(
    build: Callable[..., PolicyT],
    directory: Path,
    parallel: ParallelConfig | None,
    device: str,
    options: Mapping[str, Any],
) -> PolicyT:
    """Return the policy of `build` with the weights of a Hugging Face directory; see `MegatronPolicy.from_hf`."""
    weights = open_hugging_face(directory)
    topology = start_topology(parallel, device=device, seed=options.get("seed", 0))
    initialise = options.get("head", "lm") != "lm"  # a score head starts from random weights
    policy = build(weights.model, topology, vocab_size=weights.vocab_size, initialise=initialise, **options)
    weights.load_into(policy.model)
    start_from_weights(policy.model, policy.optimizer)
    return policy


def open_checkpoint(
    build: Callable[..., PolicyT],
    path: Path,
    parallel: ParallelConfig | None,
    device: str,
    weights_only: bool,
    options: Mapping[str, Any],
) -> PolicyT:
    """Return the policy of `build` with what a checkpoint holds; see `MegatronPolicy.from_checkpoint`."""
    manifest = read_manifest(path)
    if holds_adapter(manifest):
        saved_base(path, manifest)  # an adapter alone does not make a policy
    topology = start_topology(parallel, device=device, seed=options.get("seed", 0))
    saved: dict[str, Any] = {k: manifest[k] for k in ("vocab_size", "head", "precision") if k in manifest}
    arguments = saved | {**options}
    initialise = check_head(path, manifest, arguments.get("head", "lm"), weights_only)
    policy = build(saved_model(path, manifest), topology, initialise=initialise, **arguments)
    policy.load_checkpoint(path, weights_only=weights_only)
    return policy
