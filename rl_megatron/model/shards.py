"""The place of every local parameter in the unsharded model, for initialisation, comparison, loading and export.

For each parameter of each model chunk, megatron-core's checkpoint metadata has the global name, the global shape and
this rank's offset (also for query/key/value and gate/up). `pieces` reads this metadata, and all code whose result must
be the same in every layout uses `pieces`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from rl_megatron.model.families.table import Rows, WeightTable
from rl_megatron.topology.ranks import Ranks

# Each layer has its own global names ("decoder.layers.3.…"). Tensors are not stacked along a layer axis.
SHARDING_METADATA = {"non_homogeneous_layers": True}
HEAD = "output_layer.weight"
PADDED = ("embedding.word_embeddings.weight", HEAD)  # global tensors that have rows beyond the vocabulary
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_INIT_THREADS = 8  # the largest number of threads that draw weights; each holds one block of rows
_INIT_ROWS = 1024  # rows per generator; a rank draws whole blocks, so this limits the memory and time for its part


@dataclasses.dataclass(frozen=True)
class Piece:
    """A rank's part of one global tensor.

    Attributes:
        name: The name of the global tensor.
        tensor: The rank's part, a view of the parameter.
        global_shape: The shape of the global tensor.
        offset: The index of the part's first element in the global tensor.
        is_first_replica: Whether this rank is the first of those that hold the same part.
        is_trained: Whether the part belongs to a parameter that is not frozen.
    """

    name: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_first_replica: bool
    is_trained: bool


def pieces(
    model_chunks: Iterable[torch.nn.Module], value: Callable[[torch.nn.Parameter], Tensor] | None = None
) -> Iterator[Piece]:
    """Yield the pieces of all weights, including the biases of routers, which are buffers.

    `value` returns a tensor to use in the place of each parameter, for example `lambda p: p.main_grad` for the
    gradients. Buffers and frozen parameters are then left out. By default the parameters themselves are used.
    """
    for model_chunk in model_chunks:
        for entry in _unwrap(model_chunk).sharded_state_dict(metadata=dict(SHARDING_METADATA)).values():
            if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
                continue  # the "extra state" of a module is not a tensor of the model
            tensor = _require_tensor(entry)
            if value is None:
                held = tensor.data
            elif isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
                held = value(tensor)
            else:
                continue
            is_trained = isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad
            for shard in _flatten(_replace_data(entry, held)):
                yield _piece(shard, is_trained)


def _unwrap(model_chunk: torch.nn.Module) -> MegatronModule:
    """Return the model inside DDP and precision wrappers."""
    while not isinstance(model_chunk, MegatronModule) or hasattr(model_chunk, "module"):
        model_chunk = model_chunk.get_submodule("module")
    return model_chunk


def _require_tensor(entry: ShardedTensor | ShardedTensorFactory) -> Tensor:
    if entry.data is None:
        raise RuntimeError(f"{entry.key} has metadata, but no tensor")
    return entry.data


def _piece(shard: ShardedTensor, is_trained: bool) -> Piece:
    """Return the piece of a shard.

    megatron-core's metadata stacks experts along a first axis that the tensors lack. Here each expert's weight is a
    separate global tensor.
    """
    name, stacked = shard.key, shard.prepend_axis_num
    if stacked:
        expert = shard.global_offset[0]
        name = name.replace(".experts.experts.", f".experts.{expert}.")
        if stacked > 1 or name == shard.key:
            raise RuntimeError(f"{shard.key} is stacked along {stacked} axes; only experts may be stacked, on one axis")
    replica = shard.replica_id if isinstance(shard.replica_id, tuple) else (shard.replica_id,)
    return Piece(
        name,
        _require_tensor(shard),
        tuple(shard.global_shape[stacked:]),
        tuple(shard.global_offset[stacked:]),
        all(index == 0 for index in replica),
        is_trained,
    )


def split_piece(piece: Piece, table: WeightTable) -> Iterator[tuple[Rows, tuple[int, ...], Tensor]]:
    """Split a piece into blocks of rows, each from one Hugging Face tensor. A piece of an adapter has no blocks.

    Yields:
        The block's entry in the table, the index of its first element in the Hugging Face tensor (or in its slab), and
        the block as a view of the piece.
    """
    yield from split_part(piece.name, piece.offset, piece.tensor, table)


def split_part(
    name: str, offset: tuple[int, ...], part: Tensor, table: WeightTable
) -> Iterator[tuple[Rows, tuple[int, ...], Tensor]]:
    """Split a part of a Megatron tensor into blocks of rows, as `split_piece` does.

    `offset` is the index of the part's first element in the tensor.
    """
    first, last = offset[0], offset[0] + part.size(0)
    for rows in table.by_name.get(name, ()):
        low, high = max(first, rows.row), min(last, rows.row + rows.count)
        if low < high:
            yield rows, (rows.hf_row + low - rows.row, *offset[1:]), part[low - first : high - first]


def split_name(name: str) -> tuple[str, int | None]:
    """Return the checkpoint key of the `Piece` named `name`, and the number of its expert (None if it has no expert).

    Checkpoints stack the experts of a layer under one key.
    """
    expert = _EXPERT.search(name)
    if expert is None:
        return name, None
    return f"{name[: expert.start()]}.experts.experts.{name[expert.end() :]}", int(expert[1])


def _replace_data(entry: ShardedTensor | ShardedTensorFactory, data: Tensor) -> ShardedTensor | ShardedTensorFactory:
    """Return `entry` with other data, which may have another dtype (fp32 gradients of bf16 weights)."""
    dtype = {"dtype": data.dtype} if isinstance(entry, ShardedTensor) else {}
    return dataclasses.replace(entry, data=data, **dtype)


def _flatten(entry: ShardedTensor | ShardedTensorFactory) -> Iterator[ShardedTensor]:
    if isinstance(entry, ShardedTensor):
        yield entry
        return
    built = entry.build()  # gate and up of a SwiGLU are two shards of one global tensor
    yield from built.values() if isinstance(built, dict) else built


def gather_full(
    model_chunks: Iterable[torch.nn.Module], value: Callable[[torch.nn.Parameter], Tensor] | None = None
) -> dict[str, Tensor]:
    """Return every whole global tensor in fp32 on the CPU of rank 0, and nothing on other ranks. Collective.

    This is for comparisons and small models, because rank 0 holds the whole model in memory. `value` is as in `pieces`.
    """
    local_pieces = [(p.name, p.global_shape, p.offset, p.tensor.float().cpu()) for p in pieces(model_chunks, value)]
    ranks = Ranks.detect()
    gathered: list = [None] * ranks.size
    dist.gather_object(local_pieces, gathered if ranks.leads else None)
    if not ranks.leads:
        return {}
    whole: dict[str, Tensor] = {}
    for name, shape, offset, tensor in (piece for rank in gathered for piece in rank):
        full = whole.setdefault(name, torch.full(shape, math.nan))
        full[tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True))] = tensor
    missing = [name for name, tensor in whole.items() if tensor.isnan().any() and not _any_nan(gathered, name)]
    if missing:
        raise RuntimeError(f"the ranks together do not hold all elements of {missing}")
    return whole


def _any_nan(gathered: list, name: str) -> bool:
    return any(tensor.isnan().any() for rank in gathered for n, _, _, tensor in rank if n == name)


def initialise_parameters(
    model_chunks: Sequence[torch.nn.Module], *, seed: int, std: float, num_layers: int, norm_weight: float = 1.0
) -> None:
    """Fill every parameter; the values depend only on seed, global name and block of rows, not on the layout.

    Weights are drawn from N(0, std²), and those that write into the residual stream from N(0, std²/(2·num_layers)), as
    in GPT-2. Norms are `norm_weight`, and biases are 0. In the gated delta rule, the output norm and `dt_bias` are 1,
    and decay rates are drawn from U(0.01, 16), as in transformers. Numbers are always drawn on the CPU, so that a run
    on a GPU starts from the same weights as a run on a CPU.
    """
    filled, drawn = 0, []
    for piece in pieces(model_chunks):
        filled += piece.tensor.numel()
        if piece.name.endswith((".out_norm.weight", ".dt_bias")):
            piece.tensor.fill_(1.0)
        elif piece.name.endswith(".A_log"):
            drawn += plan_drawing(
                piece, seed, lambda rows, generator: rows.uniform_(0.01, 16, generator=generator).log_()
            )
        elif piece.name.endswith(("norm.weight", "norm_weight")):
            piece.tensor.fill_(norm_weight)
        elif piece.name.endswith("bias"):
            piece.tensor.zero_()
        else:
            writes_residual = piece.name.endswith(("linear_proj.weight", "linear_fc2.weight"))
            piece_std = std / math.sqrt(2 * num_layers) if writes_residual else std
            drawn += plan_drawing(piece, seed, partial(_draw_normal, std=piece_std))
    # In a forked process, this call recreates torch's thread pool, because the threads below would fail to do so
    # concurrently.
    torch.set_num_threads(torch.get_num_threads())
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with ThreadPoolExecutor(max(1, min(_INIT_THREADS, len(os.sched_getaffinity(0)) // ranks))) as threads:
        deque(threads.map(lambda fill: fill(), drawn), maxlen=0)
    built = sum(tensor.numel() for tensor in _list_saved_tensors(model_chunks))
    if filled != built:
        raise RuntimeError(f"initialised {filled} of {built} parameters: the sharding metadata lacks a module")


@torch.no_grad()
def zero_parameters(model_chunks: Sequence[torch.nn.Module]) -> None:
    """Fill every parameter with 0, because loading may leave the vocabulary's padding rows as they are."""
    for tensor in _list_saved_tensors(model_chunks):
        tensor.zero_()


def _list_saved_tensors(model_chunks: Iterable[torch.nn.Module]) -> Iterator[Tensor]:
    """Yield parameters, and the buffers that are saved."""
    for model_chunk in model_chunks:
        saved = model_chunk.state_dict().keys()
        yield from model_chunk.parameters()
        yield from (buffer for name, buffer in model_chunk.named_buffers() if name in saved)


def _draw_normal(rows: Tensor, generator: torch.Generator, std: float) -> Tensor:
    return rows.normal_(0.0, std, generator=generator)


def plan_drawing(
    piece: Piece, seed: int, draw: Callable[[Tensor, torch.Generator], Tensor]
) -> Iterator[Callable[[], None]]:
    """Yield functions that each fill one block of a piece's rows.

    `draw` fills these rows of the whole, unsharded tensor; the piece then copies the part that it holds.
    """
    start, stop = piece.offset[0], piece.offset[0] + piece.tensor.size(0)
    for block in range(start // _INIT_ROWS, -(-stop // _INIT_ROWS)):
        yield partial(_fill, piece, seed, draw, block)


@torch.no_grad()
def _fill(piece: Piece, seed: int, draw: Callable[[Tensor, torch.Generator], Tensor], block: int) -> None:
    start, stop = piece.offset[0], piece.offset[0] + piece.tensor.size(0)
    columns = tuple(slice(o, o + n) for o, n in zip(piece.offset[1:], piece.tensor.shape[1:], strict=True))
    low, high = block * _INIT_ROWS, min((block + 1) * _INIT_ROWS, piece.global_shape[0])
    digest = hashlib.blake2b(f"{seed}/{piece.name}/{block}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    rows = draw(torch.empty(high - low, *piece.global_shape[1:]), generator)
    first, last = max(low, start), min(high, stop)
    piece.tensor[first - start : last - start].copy_(rows[(slice(first - low, last - low), *columns)])
