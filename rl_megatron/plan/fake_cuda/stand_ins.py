"""Replacements of this package's functions on fake CUDA: Triton kernels, and functions that read or write values.

The package itself does not know of fake devices. Everything that it does differently on fake devices is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from rl_megatron.logprobs import kernels as logprob_kernels
from rl_megatron.logprobs.kernels.backends import TORCH
from rl_megatron.model import layers, shards
from rl_megatron.model.layers.attention import PortableAttention
from rl_megatron.model.layers.packed_tree import FlashCall
from rl_megatron.model.lora.layers import LinearAdapter
from rl_megatron.plan.fake_cuda.sides import report_launch
from rl_megatron.weight_sync.exporter import WeightExporter

aten = torch.ops.aten


def list_stand_ins() -> list[tuple[object, str, object]]:
    """Return the replacements: (owner, name of the attribute, its new value)."""
    triton_layers = SimpleNamespace(
        turn_heads=_turn_heads, gated_silu=_gated_silu, gated_silu_gradient=_gated_silu_gradient
    )
    triton = TORCH._replace(row_stats=_row_stats, write_row_gradients=_write_row_gradients)
    return [
        (layers, "triton_layers", triton_layers),
        (logprob_kernels, "triton", triton),
        # Parameters have no data to fill, and drawing numbers for a large model would take minutes.
        (shards, "plan_drawing", _draw_nothing),
        (LinearAdapter, "fill", _do_nothing),
        # The flash kernel for packs needs the lengths on the device. For equal lengths, the other path does the same
        # work.
        (PortableAttention, "attends_within_pack", _return_false),
        # The numbers of a tree's queries and keys are on the device, too. One pair of the same size takes their place.
        (FlashCall, "sizes", property(_take_one_pair)),
        # The check needs reports of other ranks, but these ranks do not run.
        (WeightExporter, "check_coverage", _do_nothing),
    ]


def _do_nothing(*args: object) -> None:
    pass


def _take_one_pair(call: FlashCall) -> tuple[Tensor, Tensor, int, int]:
    return call.query_starts[:2], call.key_starts[:2], call.num_pairs, 1


def _return_false(*args: object) -> bool:
    return False


def _draw_nothing(*args: object) -> tuple[Callable[[], None], ...]:
    return ()


def _turn_heads(mixed: Tensor, parts: Sequence[Tensor], turns: Tensor, interleaved: bool, back: bool) -> None:
    report_launch(aten.mul.Tensor, (mixed, turns), mixed if back else parts[0])


def _gated_silu(both: Tensor) -> Tensor:
    out = both.new_empty(*both.shape[:-1], both.size(-1) // 2)
    return report_launch(aten.silu.default, (both,), out)


def _gated_silu_gradient(both: Tensor, gradient: Tensor) -> Tensor:
    return report_launch(aten.silu_backward.default, (both, gradient), torch.empty_like(both))


def _row_stats(logits: Tensor, *args: object, **kwargs: object) -> Tensor:
    stats = logits.new_empty(logits.shape[0], 4, dtype=torch.float32)
    return report_launch(aten.logsumexp.default, (logits,), stats)


def _write_row_gradients(out: Tensor, logits: Tensor, *args: object, **kwargs: object) -> None:
    report_launch(aten._log_softmax_backward_data.default, (logits,), out)
