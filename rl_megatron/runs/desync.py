"""The desync check: compare configuration, batch and weights between ranks that must hold the same values.

Without it, a rank with another seed, another file or a flipped bit continues to train, and nobody notices that the sums
over ranks are wrong.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from rl_megatron.batching.batch import Batch
from rl_megatron.config.errors import ConfigError, RunFailed
from rl_megatron.config.loading.load import to_yaml
from rl_megatron.config.schema import RunConfig
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.model.shards import Piece, pieces
from rl_megatron.runs.rerun import iterate_leaves
from rl_megatron.topology.collectives import gather_from_ranks
from rl_megatron.topology.ranks import Ranks
from rl_megatron.topology.topology import Topology
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.weight_sync.buckets import fingerprint

_OF_BATCH = ("input_ids", "input_lengths", "token_mask", "sample_mask", "rewards")
_MOST_VALUES = 32  # digests that each rank sends: one per key or fact of the batch, the rest zeros
_MAY_DIFFER = "data.cache_dir"  # each node may have its own directory
_SHOWN = 4  # ranks in messages


class RanksDiffer(RunFailed):
    """The error of ranks that must hold the same values but do not. Every rank raises it."""


def digest(*parts: bytes) -> int:
    hashed = hashlib.blake2b(digest_size=8)
    for part in parts:
        hashed.update(part)
    return int.from_bytes(hashed.digest(), "big") >> 1


def check_configuration(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigError on every rank if ranks have different configurations. Collective.

    The message names the ranks and the first key that differs.
    """
    ranks = Ranks.detect()
    if ranks.size == 1:
        return
    sections = yaml.safe_load(to_yaml(config))
    settings = {key: value for key, value in iterate_leaves(sections) if not key.endswith(_MAY_DIFFER)}
    digests = _gather([digest(repr(sorted(settings.items())).encode())], device)
    odd, usual = _odd_ranks({0: list(range(len(digests)))}, [numbers[0] for numbers in digests])
    if not odd:
        return
    first = usual[odd[0]]
    usually, other = _share_from(settings, [first, odd[0]], ranks)
    key = min(key for key in {**usually, **other} if usually.get(key) != other.get(key))
    raise ConfigError(
        f"{_name_ranks(odd)} {'runs' if len(odd) == 1 else 'run'} another configuration than rank {first}: {key} is "
        f"{other.get(key)!r} on rank {odd[0]} and {usually.get(key)!r} on rank {first}; start all ranks with the same "
        "arguments and files"
    )


class DesyncCheck:
    """The comparison of batches and weights over ranks, before the first step and then at regular intervals.

    Ranks compare one digest per batch key and per kind of weights. If a digest of weights differs, they compare tensor
    by tensor.
    """

    def __init__(self, every: int):
        """Prepare to check before the first step and, unless `every` is 0, before steps that are multiples of it."""
        self._every, self._checked = every, 0

    def check(self, step: int, batch: Batch, models: Mapping[str, MegatronPolicy]) -> None:
        """Check the batch and the weights before a step, if a check is due. The check is collective.

        Every rank has the whole batch, or the ranks of a data-parallel replica have the same sequences of it. If ranks
        differ, RanksDiffer names them and the first batch key or weight that differs.
        """
        if step == self._checked or (self._checked and not (self._every and step % self._every == 0)):
            return
        self._checked = step
        topology = next(iter(models.values())).topology
        if topology.world_size == 1:
            return
        self._check_batch(batch, topology)
        for name, model in models.items():
            check_weights(name, model.model)

    def _check_batch(self, batch: Batch, topology: Topology) -> None:
        keys = [key for key in _OF_BATCH if isinstance(batch.get(key), Tensor)]
        values = {key: batch[key] for key in keys}
        values |= {f"{name} of all sequences": fact for name, fact in sorted(batch.facts.items())}
        numbers = [digest(str(value.shape).encode(), _to_bytes(value)) for value in values.values()]
        numbers += [0] * (_MOST_VALUES - len(numbers))
        by_rank = _gather([*numbers, topology.data_rank], topology.device)
        everybody = {0: list(range(len(by_rank)))}
        replicas: dict[int, list[int]] = {}
        for rank, rank_numbers in enumerate(by_rank):
            replicas.setdefault(rank_numbers[-1], []).append(rank)
        for column, key in enumerate(values):
            groups = replicas if key in keys and not batch.is_whole else everybody
            odd, usual = _odd_ranks(groups, [rank_numbers[column] for rank_numbers in by_rank])
            if odd:
                raise RanksDiffer(
                    f"ranks do not have the same batch: {key} of {_name_ranks(odd)} differs from that of rank "
                    f"{usual[odd[0]]}; data files, task files or the rollout engine's answers differ between ranks"
                )


def check_weights(name: str, model: ShardedModel) -> None:
    """Raise RanksDiffer on every rank if ranks hold different copies of the same weights. Collective.

    Data- and context-parallel ranks hold copies of all weights except experts. Tensor-parallel ranks hold copies of the
    weights that are not split, and expert-data-parallel ranks of their experts. The message names the ranks and the
    first tensor that differs.
    """
    model.gather_parameters()
    topology = model.topology
    kinds = ("dense", "replicated", "expert")
    totals = {kind: torch.zeros((), dtype=torch.int64, device=topology.device) for kind in kinds}
    for piece in pieces(model.model_chunks):
        number = _fingerprint(piece)
        for kind in _list_kinds(piece):
            totals[kind] += number
    experts = dist.get_process_group_ranks(topology.groups.expt_dp)[0]  # identifies this rank's experts
    numbers = [*(totals[kind].item() for kind in kinds), topology.pipeline_rank, topology.tensor_rank, experts]
    by_rank = _gather([int(value) for value in numbers], topology.device)
    same: dict[str, Callable[[Sequence[int]], Hashable]] = {
        "dense": lambda numbers: (numbers[3], numbers[4]),  # pipeline stage and tensor-parallel rank
        "replicated": lambda numbers: numbers[3],
        "expert": lambda numbers: numbers[5],
    }
    for column, kind in enumerate(kinds):
        groups: dict[Hashable, list[int]] = {}
        for rank, numbers in enumerate(by_rank):
            groups.setdefault(same[kind](numbers), []).append(rank)
        odd, usual = _odd_ranks(groups, [numbers[column] for numbers in by_rank])
        if odd:
            tensor = _first_difference(model, kind, [usual[odd[0]], odd[0]])
            raise RanksDiffer(
                f"ranks do not have the same weights of the {name}: {tensor} of {_name_ranks(odd)} differs from that "
                f"of rank {usual[odd[0]]}; start again from a checkpoint, and check the memory of the node of rank "
                f"{odd[0]} if this repeats"
            )


def _list_kinds(piece: Piece) -> Iterator[str]:
    """Yield the kinds of `check_weights` ("dense", "replicated", "expert") to which a piece belongs."""
    if ".experts." in piece.name:
        yield "expert"
        return
    yield "dense"
    if tuple(piece.tensor.shape) == piece.global_shape:
        yield "replicated"  # on all tensor-parallel ranks, because it is whole


def _fingerprint(piece: Piece) -> Tensor:
    """Return a scalar int64 that changes with any bit of the piece, with its name and with its offset."""
    factor = digest(piece.name.encode()) | 1  # odd, so that different fingerprints have different products
    return factor * fingerprint(piece.tensor, (*piece.offset, 0)[:2])


def _first_difference(model: ShardedModel, kind: str, ranks: Sequence[int]) -> str:
    """Return the name of the first tensor in which two ranks differ. Collective over all ranks."""
    numbers = {
        piece.name: int(_fingerprint(piece).item())
        for piece in pieces(model.model_chunks)
        if kind in _list_kinds(piece)
    }
    usual, other = _share_from(numbers, ranks, model.topology.ranks)
    return next((name for name in usual if usual[name] != other.get(name)), "a tensor")


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _gather(numbers: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the numbers of every rank. Collective."""
    return gather_from_ranks(torch.tensor(list(numbers), dtype=torch.int64, device=device), dist.group.WORLD).tolist()


def _share_from(value: object, senders: Sequence[int], ranks: Ranks) -> list[Any]:
    """Return the values of the ranks `senders`, in this order, on every rank. Collective."""
    everywhere = ranks.gather(value if ranks.rank in senders else None)
    return [everywhere[sender] for sender in senders]


def _odd_ranks(groups: Mapping[Any, Sequence[int]], values: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Return the ranks whose value is unusual in their group, and a map from each to a rank with the usual value.

    The usual value is the one that most ranks have; at a tie, the value of the lowest rank.
    """
    odd: list[int] = []
    usual: dict[int, int] = {}
    for ranks in groups.values():
        most, _ = Counter(values[rank] for rank in ranks).most_common(1)[0]  # the first one at a tie
        have_it = next(rank for rank in ranks if values[rank] == most)
        others = [rank for rank in ranks if values[rank] != most]
        odd += others
        usual |= dict.fromkeys(others, have_it)
    return sorted(odd), usual


def _name_ranks(ranks: Sequence[int]) -> str:
    more = len(ranks) - _SHOWN
    listed = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
