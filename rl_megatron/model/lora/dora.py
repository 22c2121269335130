"""DoRA: an adapter that scales each row of W + s·B·A to a length of its own, which is trained.

With the length |·| of a row as a constant in the backward pass, as in peft, row i of the linear is

    y_i = m_i / |(W + s·B·A)_i| · (W + s·B·A)_i · x

m starts as the rows' lengths, so that training starts from the base. It is split as the rows of W are. The length of a
row needs all of its columns, so the ranks of a row-parallel linear sum their squares.

Source: Liu et al. 2024 (arXiv:2402.09353), sections 4.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.lora.layers import LinearAdapter, merged
from rl_megatron.model.lora.targets import MAGNITUDE, Part

_ROWS = 1024  # rows that are added in fp32 at once; this limits the memory


class DoraAdapter(LinearAdapter):
    """The adapters of one Megatron linear: A, B and the magnitudes m of each of its parts that has one."""

    _letters = ("A", "B", MAGNITUDE)

    def __init__(self, config: LoraConfig, parts: Sequence[Part], module: torch.nn.Module, *others: Any):
        """Build the adapter of `module`; see `LinearAdapter`. Call `start` when the weights of the base are there."""
        super().__init__(config, parts, module, *others)
        self._linear = (module,)  # a tuple, because the adapter does not own it
        self._lengths: dict[str, Tensor] | None = None
        self._kept_factors: Tensor | None = None

    def _shapes(self, part: Part, r: int) -> dict[str, tuple[int, ...]]:
        shapes = super()._shapes(part, r)
        return shapes | {MAGNITUDE: shapes["B"][:1]}

    @torch.no_grad()
    def start(self) -> None:
        """Set the magnitudes to the lengths of the rows. Collective."""
        for part, lengths in self._row_lengths().items():
            self.get_parameter(f"{part}_{MAGNITUDE}").copy_(lengths)

    def keep_lengths(self) -> None:
        """Keep the lengths of the rows for evaluation and merging, until the next call. Collective."""
        self._lengths = self._row_lengths()
        self._kept_factors = self._factors(self._lengths).detach()

    def added_to(self, output: Tensor, x: Tensor) -> Tensor:
        """Return the linear's output on this rank with that of the adapter. `x` is the input of both.

        As in peft, dropout also acts on what the magnitudes add to the product with W.
        """
        (module,) = self._linear
        dropped = self._dropped(x)
        added, direction = self(dropped), output
        if dropped is not x:
            through: Any = module.forward(dropped)
            direction = through[0] if isinstance(through, tuple) else through
        bias = getattr(module, "bias", None)
        if bias is not None and not getattr(module, "skip_bias_add", False):
            direction = direction - bias
        factors = self._kept_factors
        if self.training or factors is None:
            factors = self._factors(self._row_lengths())
        return output + added + (factors - 1).to(output.dtype) * (direction + added)

    def _factors(self, lengths: dict[str, Tensor]) -> Tensor:
        """Return m / |W + s·B·A| [rows] fp32 of this rank's rows; 1 for parts without an adapter."""
        factors = []
        for part in self.parts:
            if part.has_adapter:
                factors.append(self._weight(part, MAGNITUDE).float() / lengths[part.key])
            else:
                rows = part.out_features // self._out_shards
                factors.append(torch.ones(rows, device=self._topology.device))
        return self._stacked(factors)

    @torch.no_grad()
    def _row_lengths(self) -> dict[str, Tensor]:
        """Return the lengths [rows] fp32 of this rank's rows of each part. Collective."""
        (module,) = self._linear
        weight = module.get_parameter("weight")
        sizes = [part.out_features // self._out_shards // self._groups for part in self.parts]
        found = {}
        for part, rows in zip(self.parts, weight.unflatten(0, (self._groups, -1)).split(sizes, dim=1), strict=True):
            if part.has_adapter:
                up, down = self._weight(part, "B"), self._weight(part, "A")
                squares = squared_lengths(rows.flatten(0, 1), up, down, self.scaling)
                if self._is_sharded("A"):
                    dist.all_reduce(squares, group=self._group)
                found[part.key] = rounded_lengths(squares, weight.dtype)
        return found

    def merged(self, part: Part, offset: tuple[int, ...], block: Tensor) -> Tensor:
        """Return a block of one part's weight with the adapter merged, in fp32; see `LinearAdapter`.

        `keep_lengths` must have been called since the weights changed.
        """
        assert self._lengths is not None, "the adapter has not kept the lengths of its rows"
        magnitude = self._weight(part, MAGNITUDE)
        first = offset[0] - self._start(magnitude, MAGNITUDE)
        factors = (magnitude.detach().float() / self._lengths[part.key])[first : first + block.size(0)]
        return factors[:, None] * super().merged(part, offset, block)


@torch.no_grad()
def squared_lengths(block: Tensor, up: Tensor, down: Tensor, scaling: float) -> Tensor:
    """Return the sum of squares [rows] fp32 of each row of a block of W + s·B·A; see `merged`."""
    rows = zip(block.split(_ROWS), up.split(_ROWS), strict=True)
    return torch.cat([merged(of_block, of_up, down, scaling).square().sum(1) for of_block, of_up in rows])


def rounded_lengths(squares: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the lengths of rows in fp32, rounded to the dtype of W, from their sums of squares.

    The magnitudes have this dtype, so the factors of an adapter that has not been trained are exactly 1.
    """
    return squares.sqrt().to(dtype).float()


def start_magnitudes(adapters: Iterable[LinearAdapter]) -> None:
    """Set the magnitudes of adapters to the lengths of the rows. Collective."""
    for adapter in adapters:
        if isinstance(adapter, DoraAdapter):
            adapter.start()


def keep_lengths(adapters: Iterable[LinearAdapter]) -> None:
    """Let adapters with magnitudes keep the lengths of their rows; see `DoraAdapter.keep_lengths`. Collective."""
    for adapter in adapters:
        if isinstance(adapter, DoraAdapter):
            adapter.keep_lengths()
