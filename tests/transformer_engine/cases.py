"""What a rank of a model consists of, for every family that runs on Transformer Engine's layers, in several layouts.

`described` is called with Transformer Engine's layers and optimizer to record the answers, and without it to compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from rl_megatron.checkpoint.optimizer_state import list_parts, set_step_count
from rl_megatron.checkpoint.training_state import TrainingState
from rl_megatron.config.loading.load import load_config
from rl_megatron.model.build import unwrap
from rl_megatron.model.shards import pieces
from rl_megatron.plan.fake_cuda import FakeCuda
from rl_megatron.topology.topology import leave, start_topology
from rl_megatron.training.megatron_policy import MegatronPolicy

VOCABULARY = 30  # padded to 32 rows with tensor=2
# No two sizes are equal, so that an exchange of two dimensions shows.
SMALL = (
    "hidden_size=20", "ffn_hidden_size=44", "num_attention_heads=4", "num_query_groups=2", "head_dim=6",
    "max_sequence_length=64", f"vocab_size={VOCABULARY}",
)  # fmt: skip
EXPERTS = ("num_experts=4", "experts_per_token=2")
FAMILIES = {
    "llama": ("model=llama3_1_8b",),
    "qwen2": ("model=qwen2_5_0_5b",),
    "qwen3": ("model=qwen3_0_6b",),
    "mistral": ("model=llama3_1_8b", "model.sliding_window=5", "model.rope_scaling=null"),
    "mixtral": ("model=mixtral_8x7b", *(f"model.{key}" for key in EXPERTS)),
    "qwen3_moe": ("model=qwen3_30b_a3b", *(f"model.{key}" for key in EXPERTS), "model.expert_ffn_hidden_size=12"),
}
# Layout → (number of ranks, overrides).
LAYOUTS = {
    "one rank": (1, ()),
    "data 2": (2, ()),
    "tensor 2": (2, ("parallel.tensor=2", "parallel.sequence=true")),
    "pipeline 2": (2, ("parallel.pipeline=2",)),
    "expert 2": (2, ("parallel.expert=2",)),
}

PREFIXES = ("optimizer.exp_avg.", "optimizer.exp_avg_sq.", "optimizer.param.")  # of names in a checkpoint


def layouts_of(family: str) -> list[str]:
    """Return the layouts of a family. Experts can be spread, and one family is enough for the distributed optimizer."""
    has_experts = family in ("mixtral", "qwen3_moe")
    left_out = [] if has_experts else ["expert 2"]
    return [name for name in LAYOUTS if name not in left_out and (name != "data 2" or family == "llama")]


def of_family(family: str) -> dict[str, Any]:
    """Return what a family's models consist of in each layout. No device may have been started.

    Returns:
        For each layout the "ranks", as `described` returns them, and what they have in common: the names in a
        "checkpoint" with the prefixes under which they are there, and the shape and dtype of each tensor that engines
        get, "export".
    """
    layouts = {}
    for layout in layouts_of(family):
        ranks = [described(family, layout, rank) for rank in range(LAYOUTS[layout][0])]
        exports = [rank.pop("export") for rank in ranks]
        assert all(export == exports[0] for export in exports)
        keys = sorted({key for rank in ranks for key in rank.pop("checkpoint")})
        checkpoint: dict[str, list[str]] = {}
        for key in keys:
            prefix = next((prefix for prefix in PREFIXES if key.startswith(prefix)), "")
            checkpoint.setdefault(key.removeprefix(prefix), []).append(prefix)
        layouts[layout] = {"checkpoint": checkpoint, "export": exports[0], "ranks": ranks}
    return layouts


def described(family: str, layout: str, rank: int) -> dict[str, Any]:
    """Return what a rank consists of, on a fake GPU, as the project builds it.

    Returns:
        "backend": whose layers they are. "parameters": the shape of each parameter, under the names of its modules.
        "extra_states": the names of the modules' states that are no tensors. "pieces": the shape of each global tensor,
        and the offset and the shape of each part that the rank has. "checkpoint": the names in a checkpoint. "export":
        the shape and dtype of each tensor that engines get. "adam": what the optimizer keeps at first and at step 5.
    """
    world_size, overrides = LAYOUTS[layout]
    small = [f"model.{key}" for key in (*SMALL, f"num_layers={2 if layout == 'pipeline 2' else 1}")]
    stage = load_config([*FAMILIES[family], *small, *overrides, "precision=bf16"]).first
    with FakeCuda(rank, world_size):
        topology = start_topology(stage.parallel, device="cuda", seed=0)
        policy = MegatronPolicy(
            stage.model,
            topology,
            vocab_size=VOCABULARY,
            precision="bf16",
            optimizer=stage.optimizer,
            total_steps=stage.train.steps,
        )
        optimizer, (chunk,) = policy.optimizer, [unwrap(each) for each in policy.model.model_chunks]
        assert optimizer is not None
        held: dict[str, list] = {}
        for piece in sorted(pieces([chunk]), key=lambda piece: (piece.name, piece.offset)):
            parts_of_tensor = held.setdefault(piece.name, [[*piece.global_shape]])
            parts_of_tensor.append([[*piece.offset], [*piece.tensor.shape]])
        result = {
            "backend": policy.runner.backend,
            "parameters": {name: [*parameter.shape] for name, parameter in chunk.named_parameters()},
            "extra_states": sorted(name for name in chunk.state_dict() if name.endswith("_extra_state")),
            "pieces": held,
            "checkpoint": set(_keys(TrainingState(policy.model, optimizer, policy.scheduler).build_sharded())),
            "export": {
                spec.name: [[*spec.shape], spec.dtype]
                for bucket in policy.weights.exporter().plan.buckets
                for spec in bucket.tensors
            },
            "adam": [_adam(part) for part in list_parts(optimizer)],
        }
        set_step_count(optimizer, 5)
        result["adam at step 5"] = [_adam(part) for part in list_parts(optimizer)]
        policy.shutdown()
        leave()
    return result


def _keys(state: object) -> Iterator[str]:
    """Yield the names in a checkpoint: those of its tensors, and of what else is sharded."""
    if isinstance(state, dict):
        for value in state.values():
            yield from _keys(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _keys(value)
    elif isinstance(state, ShardedTensor | ShardedTensorFactory) or hasattr(state, "replica_id"):
        yield state.key  # pyright: ignore


def _adam(part: Any) -> dict[str, Any]:
    """Return the form of an Adam's state: the types of its states and of each group's number of steps."""
    adam = part.optimizer
    states = [
        {name: _kind(value) for name, value in sorted(state.items())}
        for parameter, state in adam.state.items()
        if parameter.numel()
    ]
    assert all(state == states[0] for state in states)
    return {
        "class": f"{type(adam).__module__}.{type(adam).__name__}",
        "known_states": " ".join(sorted(getattr(adam, "name_to_dtype_map", ()))),
        "state": states[0],
        "steps": ", ".join(_kind(group.get("step")) for group in adam.param_groups),
    }


def _kind(value: object) -> str:
    return f"tensor of {value.dtype}" if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value}"
