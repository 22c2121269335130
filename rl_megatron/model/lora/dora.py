"""DoRA: an adapter that scales each row i of W + s·B·A to a trained length m_i, its magnitude.

As in peft, the length |·| of a row is a constant in the backward pass. Row i of the linear is

    y_i = m_i / |(W + s·B·A)_i| · (W + s·B·A)_i · x

m starts as the rows' lengths, so that training starts from the base. It is sharded like the rows of W, and is fp32 for
weights of any dtype, because rounding m to bf16 would scale whole rows. The length of a row needs all of its columns,
so the ranks of a row-parallel linear sum their squares. A row of zeros is not scaled.

Source: Liu et al. 2024 (arXiv:2402.09353), sections 4.1 and 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.lora.layers import LinearAdapter, add_update
from rl_megatron.model.lora.targets import MAGNITUDE, Part

_ROWS = 1024  # rows that are added in fp32 at once; this limits the memory


class DoraAdapter(LinearAdapter):
    """The adapters of one Megatron linear: A, B and the magnitudes m of each part that has an adapter.

    It keeps the lengths of the rows until `forget_lengths`, which must be called after W, A or B has changed.
    """

    _letters = ("A", "B", MAGNITUDE)

    def __init__(self, config: LoraConfig, parts: Sequence[Part], module: torch.nn.Module, *others: Any):
        """Build the adapter of `module`; see `LinearAdapter`. Call `start` after the base's weights are loaded."""
        super().__init__(config, parts, module, *others)
        self._linear = (module,)  # in a tuple, so that torch does not register it
        self._lengths: dict[str, Tensor] | None = None

    def _shapes(self, part: Part, r: int) -> dict[str, tuple[int, ...]]:
        shapes = super()._shapes(part, r)
        return shapes | {MAGNITUDE: shapes["B"][:1]}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DoraAdapter:
        """Convert the module by `fn`, but keep the magnitudes in fp32."""
        super()._apply(fn, recurse)
        for part in self._adapted:
            magnitude = self._weight(part, MAGNITUDE)
            magnitude.data = magnitude.data.float()
        return self

    @torch.no_grad()
    def start(self) -> None:
        """Set the magnitudes to the lengths of the rows. Collective."""
        self.forget_lengths()
        for part, lengths in self.lengths().items():
            self.get_parameter(f"{part}_{MAGNITUDE}").copy_(lengths)

    def forget_lengths(self) -> None:
        """Drop the kept lengths of the rows, after weights have changed."""
        self._lengths = None

    @torch.no_grad()
    def lengths(self) -> dict[str, Tensor]:
        """Return the lengths [rows] fp32 of this rank's rows of each part. Collective if they are not kept."""
        if self._lengths is not None:
            return self._lengths
        (module,) = self._linear
        by_group = module.get_parameter("weight").unflatten(0, (self._groups, -1))
        sizes = [part.out_features // self._out_shards // self._groups for part in self.parts]
        self._lengths = {}
        for part, rows in zip(self.parts, by_group.split(sizes, dim=1), strict=True):
            if part.has_adapter:
                up, down = self._weight(part, "B"), self._weight(part, "A")
                squares = compute_squared_lengths(rows.flatten(0, 1), up, down, self.scaling)
                if self._is_sharded("A"):
                    dist.all_reduce(squares, group=self._group)
                self._lengths[part.key] = squares.sqrt()
        return self._lengths

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """Return the linear's output on this rank plus that of the adapter. `x` is the input of both.

        As in peft, dropout also applies to the term that the magnitudes add, (m/|·| − 1)·W·x.
        """
        (module,) = self._linear
        dropped = self._drop(x)
        # `self` is called first: its hooks wait until weights that an overlapped step left scattered are gathered.
        added, direction = self(dropped), output
        if dropped is not x:
            through: Tensor | tuple[Tensor, ...] = module.forward(dropped)
            direction = through[0] if isinstance(through, tuple) else through
        bias = getattr(module, "bias", None)
        if bias is not None and not getattr(module, "skip_bias_add", False):
            direction = direction - bias
        return output + added + (self._compute_factors() - 1).to(output.dtype) * (direction + added)

    def _compute_factors(self) -> Tensor:
        """Return m / |W + s·B·A| [rows] fp32 of this rank's rows; 1 for parts without an adapter."""
        lengths, factors = self.lengths(), []
        for part in self.parts:
            if part.has_adapter:
                factors.append(compute_factors(self._weight(part, MAGNITUDE), lengths[part.key]))
            else:
                rows = part.out_features // self._out_shards
                factors.append(torch.ones(rows, device=self._topology.device))
        return self._stack(factors)

    def merge_block(self, part: Part, offset: tuple[int, ...], block: Tensor) -> Tensor:
        """Return a block of one part's weight with the adapter merged, in fp32; see `LinearAdapter`.

        `lengths` must have been called since the weights changed.
        """
        assert self._lengths is not None, "the lengths of the rows are not known"
        magnitude = self._weight(part, MAGNITUDE).detach()
        first = offset[0] - self._get_start(magnitude, MAGNITUDE)
        factors = compute_factors(magnitude, self._lengths[part.key])[first : first + block.size(0)]
        return factors[:, None] * super().merge_block(part, offset, block)


@torch.no_grad()
def compute_squared_lengths(block: Tensor, up: Tensor, down: Tensor, scaling: float) -> Tensor:
    """Return the sum of squares [rows] fp32 of each row of a block of W + s·B·A; see `add_update`."""
    slices = zip(block.split(_ROWS), up.split(_ROWS), strict=True)
    return torch.cat([add_update(rows, up_rows, down, scaling).square().sum(1) for rows, up_rows in slices])


def compute_factors(magnitudes: Tensor, lengths: Tensor) -> Tensor:
    """Return m / |·| [rows] fp32, the factors of rows with these lengths [rows]; 1 for rows of zeros."""
    is_zero = lengths == 0
    return torch.where(is_zero, 1.0, magnitudes.float() / torch.where(is_zero, 1.0, lengths))
