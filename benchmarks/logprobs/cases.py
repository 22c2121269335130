"""Define the cases: shapes, modes, their tensors, and the exact answer in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Mode = Literal["logprob", "entropy", "gather", "inference", "fused"]
MODES: tuple[Mode, ...] = ("logprob", "entropy", "gather", "inference", "fused")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_CHECKED_ROWS = 16  # rows whose gradient is compared with fp64
_EXACT_ELEMENTS = 1 << 24  # of an fp64 block


@dataclass(frozen=True)
class Case:
    """One case: tokens × vocab logits, the vocabulary sharded over `tensor` ranks.

    `hidden` is the hidden size in mode fused, and `ids` is K of mode gather.
    """

    mode: Mode
    tokens: int
    vocab: int
    dtype: str
    tensor: int = 1
    hidden: int | None = None
    ids: int = 16

    @property
    def local_logits(self) -> int:
        return self.tokens * self.vocab // self.tensor

    @property
    def floor_bytes(self) -> int:
        """Return the fewest bytes per logit: one read in forward, one read and one write in backward."""
        return (1 if self.mode == "inference" else 3) * DTYPES[self.dtype].itemsize

    @property
    def title(self) -> str:
        head = f", H {self.hidden}" if self.hidden else ""
        ids = f", K {self.ids}" if self.mode == "gather" else ""
        return f"{self.mode}: N {self.tokens}, V {self.vocab}{head}{ids}, {self.dtype}, TP {self.tensor}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Grid:
    """Return the cases of a run: those of `further`, then the product of all lists. Only mode fused uses `hidden`."""

    tokens: tuple[int, ...]
    vocabs: tuple[int, ...]
    dtypes: tuple[str, ...]
    tensor: tuple[int, ...]
    hidden: tuple[int, ...]
    modes: tuple[Mode, ...] = MODES
    shards: tuple[int, ...] = (1,)  # V / shards is the vocabulary: the shape of a shard, without collectives
    further: tuple[Case, ...] = ()

    def cases(self, tensor: int) -> Iterator[Case]:
        """Return the cases for so many ranks."""
        if tensor == 1:
            yield from (case for case in self.further if case.mode in self.modes)
        for shards, tokens, vocab, dtype in product(self.shards, self.tokens, self.vocabs, self.dtypes):
            for mode in self.modes:
                for hidden in self.hidden if mode == "fused" else (None,):
                    if tensor in self.tensor:
                        yield Case(mode, tokens, vocab // shards, dtype, tensor, hidden)


CPU = Grid((256, 1024), (32768, 151936), ("bf16", "fp32"), (1, 2), (256, 1024))
QUICK = Grid((64,), (1024,), ("bf16", "fp32"), (1, 2), (32,))
GPU = Grid(
    (32768, 8192, 4096), (151936, 128256, 202048), ("bf16", "fp32"), (1,), (4096, 2048, 8192), shards=(4, 1, 2, 8),
    further=(Case("fused", 4096, 128256, "bf16", hidden=4096),),  # the shape for which Liger Kernel publishes figures
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """This rank's tensors of a case.

    Attributes:
        case: The case.
        group: Its tensor-parallel ranks.
        logits: [N, V/tp], unless the mode is fused.
        hidden: [N, H], in mode fused.
        weight: [V/tp, H], in mode fused.
        targets: [N] global ids.
        ids: [N, K] global ids.
        upstream: One gradient per output.
    """

    case: Case
    group: dist.ProcessGroup
    logits: Tensor | None
    hidden: Tensor | None
    weight: Tensor | None
    targets: Tensor
    ids: Tensor
    upstream: tuple[Tensor, ...]

    @classmethod
    def make(cls, case: Case, group: dist.ProcessGroup, device: torch.device) -> Problem:
        """Make logits N(0, 2²), or N(0, 1) for the GEMM of mode fused: far from uniform, and far from overflow."""
        shared = torch.Generator(device).manual_seed(case.tokens)  # equal on all ranks
        own = torch.Generator(device).manual_seed(1 + group.rank())
        dtype, local = DTYPES[case.dtype], case.vocab // case.tensor

        def normal(*shape: int, generator: torch.Generator, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

        logits = hidden = weight = None
        if case.mode == "fused":
            hidden = normal(case.tokens, case.hidden, generator=shared)
            weight = normal(local, case.hidden, generator=own, scale=case.hidden**-0.5)
        else:
            logits = normal(case.tokens, local, generator=own, scale=2.0)
        targets = torch.randint(case.vocab, (case.tokens,), generator=shared, device=device)
        ids = torch.randint(case.vocab, (case.tokens, case.ids), generator=shared, device=device)
        upstream = tuple(
            torch.randn(shape, generator=shared, device=device)
            for shape in (targets.shape, targets.shape, ids.shape)[: num_outputs(case.mode)]
        )
        return cls(case, group, logits, hidden, weight, targets, ids, upstream)

    @property
    def start(self) -> int:
        """Return the first id of this rank."""
        return self.group.rank() * self.case.vocab // self.case.tensor


def num_outputs(mode: Mode) -> int:
    return {"entropy": 2, "gather": 3}.get(mode, 1)


@dataclass(frozen=True)
class Exact:
    """Return log p(target) [N] in fp64, and the gradient of the first rows' logits on this rank, or None."""

    logprobs: Tensor
    gradient: Tensor | None

    @classmethod
    def of(cls, problem: Problem) -> Exact:
        """Compute block by block, so that no fp64 tensor has the logits' size."""
        rows = max(1, _EXACT_ELEMENTS // (problem.case.vocab // problem.case.tensor))
        blocks = [slice(first, first + rows) for first in range(0, problem.case.tokens, rows)]
        logprobs = torch.cat([_outputs(problem, block)[1][0] for block in blocks])
        if problem.case.mode in ("inference", "fused"):
            return cls(logprobs, None)
        return cls(logprobs, _gradient(problem, slice(0, _CHECKED_ROWS)))

    def logprob_error(self, logprobs: Tensor) -> float:
        """Return the error of the worst token, or the error per token of a sum over tokens."""
        if not logprobs.dim():
            return abs(logprobs.item() - self.logprobs.sum().item()) / len(self.logprobs)
        return (logprobs.double() - self.logprobs).abs().max().item()

    def gradient_error(self, gradient: Tensor) -> float | None:
        if self.gradient is None:
            return None
        difference = gradient[: len(self.gradient)].double() - self.gradient
        return (difference.abs().max() / self.gradient.abs().max()).item()


def _outputs(problem: Problem, rows: slice) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return log p of this rank's columns [n, V/tp], and the outputs of the mode."""
    if problem.logits is None:
        x = problem.hidden[rows].double() @ problem.weight.double().T
    else:
        x = problem.logits[rows].double()
    top = x.amax(-1)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=problem.group)
    sums = (x - top[:, None]).exp().sum(-1)
    dist.all_reduce(sums, group=problem.group)
    log_p = x - top[:, None] - sums.log()[:, None]

    def picked(ids: Tensor) -> Tensor:
        local = ids - problem.start
        mine = (local >= 0) & (local < x.size(-1))
        values = log_p.gather(1, local.clamp(0, x.size(-1) - 1)).masked_fill(~mine, 0.0)
        dist.all_reduce(values, group=problem.group)
        return values

    outputs = [picked(problem.targets[rows, None])[:, 0]]
    if num_outputs(problem.case.mode) > 1:
        entropy = -(log_p.exp() * log_p).sum(-1)
        dist.all_reduce(entropy, group=problem.group)
        outputs += [entropy, picked(problem.ids[rows])]
    return log_p, tuple(outputs)


def _gradient(problem: Problem, rows: slice) -> Tensor:
    """Return dz_v = Σ_j g_j·(1[v = y_j] − p_v) − g_H·p_v·(log p_v + H), over the target and the ids j."""
    log_p, outputs = _outputs(problem, rows)
    upstream = [gradient[rows].double() for gradient in problem.upstream]
    pulls, ids = upstream[0][:, None], problem.targets[rows, None]
    if len(upstream) > 2:
        pulls, ids = torch.cat([pulls, upstream[2]], dim=1), torch.cat([ids, problem.ids[rows]], dim=1)
    p = log_p.exp()
    gradient = -p * pulls.sum(1, keepdim=True)
    local = ids - problem.start
    mine = (local >= 0) & (local < p.size(-1))
    gradient.scatter_add_(1, local.clamp(0, p.size(-1) - 1), pulls.masked_fill(~mine, 0.0))
    if len(upstream) > 1:
        gradient -= upstream[1][:, None] * p * (log_p + outputs[1][:, None])
    return gradient
