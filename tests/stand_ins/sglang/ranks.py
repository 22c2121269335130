"""The tensor-parallel ranks of the stand-in: each joins process groups, receives buckets and has checksums of its own.

Rank 0 is in the server's process. Others are processes that keep the weights and compute nothing.
"""

import hashlib
import multiprocessing

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, default_pg_timeout, rendezvous

EMBEDDING = "model.embed_tokens.weight"
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Rank:
    """One rank, with its tensors under the names of a checkpoint."""

    def __init__(self, rank, size, tensors):
        self.rank, self.size, self.tensors, self.groups = rank, size, tensors, {}

    def init_group(self, master_address, master_port, rank_offset, world_size, group_name, backend):
        """Join a group as SGLang does: torch's own store and prefixes, with rank `rank_offset` + this rank."""
        rank = rank_offset + self.rank
        store, rank, world_size = next(rendezvous(f"tcp://{master_address}:{master_port}", rank, world_size))
        store = dist.PrefixStore(group_name, store)
        self.groups[group_name], _ = _new_process_group_helper(
            world_size, rank, [], dist.Backend(backend), store, group_name=group_name, timeout=default_pg_timeout
        )
        dist.distributed_c10d._world.pg_group_ranks[self.groups[group_name]] = {i: i for i in range(world_size)}

    def destroy_group(self, group_name):
        dist.destroy_process_group(self.groups.pop(group_name))

    def receive(self, names, dtypes, shapes, group_name, load_format):
        """Return the tensors of one broadcast: a bucket of bytes without gaps, or one broadcast for each tensor."""
        group = self.groups[group_name]
        if load_format != "flattened_bucket":
            received = [
                torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(dtypes, shapes, strict=True)
            ]
            for tensor in received:
                dist.broadcast(tensor, src=0, group=group)
            return dict(zip(names, received, strict=True))
        sizes = [
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for dtype, shape in zip(dtypes, shapes, strict=True)
        ]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        for name, dtype, start in zip(names, dtypes, starts, strict=True):
            if start % getattr(torch, dtype).itemsize:
                raise ValueError(f"Unaligned received tensor {name}: byte offset {start}, dtype {dtype}")
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        dist.broadcast(flat, src=0, group=group)
        return {
            name: flat[start : start + size].view(getattr(torch, dtype)).reshape(shape)
            for name, dtype, shape, start, size in zip(names, dtypes, shapes, starts, sizes, strict=True)
        }

    def load(self, received, skipped=(), altered=()):
        """Copy tensors, the embedding also to a head of its own; faults leave some out, or change them."""
        received = dict(received)
        if "lm_head.weight" in self.tensors and EMBEDDING in received:
            received.setdefault("lm_head.weight", received[EMBEDDING])
        for name, tensor in received.items():
            if name not in skipped:
                self.tensors[name].copy_(tensor + (0.5 if name in altered else 0.0))

    def update(self, arguments, skipped, altered):
        self.load(self.receive(**arguments), skipped, altered)

    def checksums(self):
        """Return a checksum of this rank's part of every tensor of SGLang's model, whose projections are fused."""
        found = {}
        for name, tensor in self.tensors.items():
            fused = next((fused for fused, parts in FUSED.items() if f".{parts[0]}." in name), None)
            if fused is not None:
                first = FUSED[fused][0]
                parts = [self.tensors[name.replace(f".{first}.", f".{part}.")] for part in FUSED[fused]]
                found[name.replace(f".{first}.", f".{fused}.")] = self._hash(torch.cat(parts))
            elif not any(f".{part}." in name for parts in FUSED.values() for part in parts[1:]):
                found[name] = self._hash(tensor)
        overall = hashlib.sha256("".join(f"{name}{found[name]}" for name in sorted(found)).encode()).hexdigest()
        place = {"role": "target", "tp_rank": self.rank, "tp_size": self.size}
        return {"checksums": found, "per_gpu_checksum": overall, "parallelism_info": [place]}

    def _hash(self, tensor):
        part = tensor.chunk(self.size)[self.rank] if tensor.dim() > 1 else tensor
        return hashlib.sha256(part.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def serve(pipe, rank, size, tensors):
    """Run a rank in a process of its own."""
    here = Rank(rank, size, tensors)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(here, method)(*arguments)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


class Ranks:
    """All ranks, which do the same at the same time."""

    def __init__(self, size, tensors):
        self.first = Rank(0, size, tensors)
        self.pipes = []
        for rank in range(1, size):
            ours, theirs = multiprocessing.Pipe()
            copy = {name: tensor.clone() for name, tensor in tensors.items()}
            arguments = (theirs, rank, size, copy)
            multiprocessing.get_context("fork").Process(target=serve, args=arguments, daemon=True).start()
            self.pipes.append(ours)

    def call(self, method, *arguments):
        """Return what the ranks return, in order."""
        for pipe in self.pipes:
            pipe.send((method, arguments))
        found = [getattr(self.first, method)(*arguments)]
        for well, value in [pipe.recv() for pipe in self.pipes]:
            if not well:
                raise RuntimeError(value)
            found.append(value)
        return found
