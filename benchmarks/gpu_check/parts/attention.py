"""The attention of a padded batch, a pack, a prefix tree and a decoding step, beside other kernels for the same.

Ours is torch's flash kernel, called by its operator. cuDNN's builds a plan for every new shape, so the first call of a
shape is timed apart from the later ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.profiling import profile_of
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting
from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.model.layers.attention import attend, attend_by_cudnn
from rl_megatron.model.layers.attention_kernels import attend_within_pack
from rl_megatron.model.layers.packed import build_causal_bias
from rl_megatron.model.layers.packed_tree import PackedTree
from rl_megatron.model.layers.tree_attention import attend_in_tree, attend_in_tree_by_flash
from rl_megatron.topology.device import start_device
from rl_megatron.topology.transfer import send

HEADS, GROUPS, WIDTH = 14, 2, 64  # of Qwen2.5-0.5B
SHAPES = (  # sequences, tokens of each
    (1, 512), (1, 1024), (1, 2048), (1, 4096), (2, 512), (2, 2048), (4, 256), (4, 1024), (8, 512), (8, 1024), (16, 256),
    (3, 777),
)  # fmt: skip
TINY_SHAPES = ((1, 16), (2, 32))
TREES = ((4, 1024, 8, 256), (8, 512, 8, 512), (1, 4096, 16, 256))  # prompts, tokens of each, samples, their tokens
TINY_TREES = ((2, 5, 3, 4),)
SLOTS, WIDTHS, TINY_WIDTHS = 64, (160, 256, 384, 512, 768, 1024, 1536, 2048), (32, 64)
OURS, MATH = "ours", "math"
_LATER, _ERROR = 10, 2e-2
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, MATH: SDPBackend.MATH}

# The sides of each kind, on a GPU and (tiny) on the CPU. The rival of a pack is the same sequences, padded; that of a
# tree is a batch of its whole sequences.
SIDES = {
    False: {
        "causal": (OURS, "cuDNN", "flash", "efficient"), "decoding": (OURS, "cuDNN", "efficient"),
        "packed": (OURS, "padded"), "tree": (OURS, "unshared"),
    },
    True: {"causal": (OURS, "flash", MATH), "decoding": (OURS, MATH), "tree": (OURS, "unshared")},
}  # fmt: skip

Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Times:
    """Of one side: the seconds of the first calls of all shapes, and the sum of the medians of the later ones."""

    first: float
    later: float


def rows(tiny: bool) -> list[str]:
    sides = SIDES[tiny]
    names = [
        f"{kind}: {calls} calls, {side}"
        for kind, of_kind in sides.items() for side in of_kind for calls in ("first", "later")
    ]  # fmt: skip
    return [*names, *(f"{kind}: later calls, ours / fastest other" for kind in sides)]


def run(setting: Setting, record: Record) -> None:
    device = start_device(setting.device)
    for kind, of_kind in SIDES[setting.tiny].items():
        times: dict[str, Times] = {}
        for side in of_kind:
            found = _time(kind, side, setting, device, record)
            if found is None:
                continue
            times[side] = found
            predicted = (0.5, 30.0) if (kind, side) == ("causal", "cuDNN") and not setting.tiny else None
            record.figure(f"{kind}: first calls, {side}", found.first, "s", prediction=predicted)
            record.figure(f"{kind}: later calls, {side}", 1000 * found.later, "ms")
        others = [found.later for side, found in times.items() if side != OURS]
        if OURS in times and others:
            record.figure(f"{kind}: later calls, ours / fastest other", times[OURS].later / min(others))


def _time(kind: str, side: str, setting: Setting, device: torch.device, record: Record) -> Times | None:
    first, later = 0.0, 0.0
    for shape, reference, call in _calls(kind, side, setting.tiny, device):
        try:
            began = time.perf_counter()
            output = _ended(call, device)
            first += time.perf_counter() - began
        except RuntimeError as error:  # torch has no such kernel here
            text = str(error).splitlines()[0]
            record.cannot([f"{kind}: first calls, {side}", f"{kind}: later calls, {side}"], f"{shape}: {text}")
            return None
        seconds = []
        for _ in range(_LATER):
            began = time.perf_counter()
            _ended(call, device)
            seconds.append(time.perf_counter() - began)
        later += statistics.median(seconds)
        wanted = reference().float()[: len(output)]  # that of a tree also has the gradients
        error = ((output.float() - wanted).abs() / wanted.abs().clamp(min=1.0)).max().item()
        record.at_most(f"{kind}, {side}: error, {shape}", error, _ERROR)
    longest = profile_of(call, device).longest
    record.fact(f"{kind}, {side}: longest kernel", longest[0][0][:120] if longest else "none")
    return Times(first, later)


def _ended(call: Call, device: torch.device) -> Tensor:
    output = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return output


def _calls(kind: str, side: str, tiny: bool, device: torch.device) -> Iterator[tuple[str, Call, Call]]:
    """Yield (name, what gives the right output, the call) of each shape. A call takes the backward pass as well."""
    torch.manual_seed(0)
    if kind == "decoding":
        for width in TINY_WIDTHS if tiny else WIDTHS:
            count = 4 if tiny else SLOTS
            queries = _random(count, GROUPS, HEADS // GROUPS, WIDTH, device=device)
            keys, values = (_random(count, GROUPS, width, WIDTH, device=device) for _ in range(2))
            positions = torch.arange(count, device=device) % width
            mask = build_causal_bias(positions, width, None, queries.dtype)[:, None, None]
            ours = _decoding(OURS, queries, keys, values, mask)
            yield f"{width} columns", ours, _decoding(side, queries, keys, values, mask)
        return
    if kind == "tree":
        for numbers in TINY_TREES if tiny else TREES:
            yield _tree(*numbers, side, device)
        return
    for count, length in TINY_SHAPES if tiny else SHAPES:
        tensors = [_random(length, count, heads, WIDTH, device=device) for heads in (HEADS, GROUPS, GROUPS)]
        for tensor in tensors:
            tensor.requires_grad_()
        padded = _with_backward(lambda q, k, v: attend(q, k, v, None, None), tensors)
        if kind == "packed":
            call = _with_backward(_packed, tensors) if side == OURS else padded
        else:
            call = padded if side == OURS else _with_backward(_causal(side), tensors)
        yield f"{count} x {length}", padded, call


def _random(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _with_backward(attention: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]) -> Call:
    def call() -> Tensor:
        output = attention(*tensors)
        torch.autograd.grad(output, tensors, torch.ones_like(output))
        return output.detach()

    return call


def _tree(
    prompts: int, prompt: int, samples: int, response: int, side: str, device: torch.device
) -> tuple[str, Call, Call]:
    """Return the calls of a tree: output and mean gradients of its tokens, flattened; unshared only the output."""
    count = prompts * samples
    tree = PrefixTree.build([prompt + response] * count, ([0] + [prompt] * (samples - 1)) * prompts)
    lengths = [segment.length for segment in tree.segments]
    starts = [0, *accumulate(lengths)]
    packed = send(PackedTree.from_tree(tree, lengths, None), device)
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for path in tree.paths for i in path]).to(device)
    tensors = [_random(len(packed.positions), heads, WIDTH, device=device) for heads in (HEADS, GROUPS, GROUPS)]
    for tensor in tensors:
        tensor.requires_grad_()
    whole = [x.detach()[rows].requires_grad_() for x in tensors]

    def shared() -> Tensor:
        query, key, value = tensors
        if device.type == "cuda":
            output = attend_in_tree_by_flash(query, key, value, packed.flash_calls, None, None)
        else:
            parts = [(part, None) for part in packed.list_ancestors()]
            output = attend_in_tree(query, key, value, packed, [None] * len(packed.buckets), parts, None)
        weights = torch.bincount(rows)[:, None].expand_as(output).to(output)  # sequences that have the token
        gradients = [x / samples for x in torch.autograd.grad(output, tensors, weights)]
        return torch.cat([x.detach().flatten() for x in (output[rows], *gradients)])

    def attend_whole(tokens: list[Tensor]) -> tuple[Tensor, ...]:
        query, key, value = (x.unflatten(0, (count, -1)).transpose(0, 1) for x in tokens)
        output = attend(query, key, value, None, None).transpose(0, 1).flatten(0, 1)
        return output.detach().flatten(), *torch.autograd.grad(output, tokens, torch.ones_like(output))

    def reference() -> Tensor:
        output, *gradients = attend_whole([x.detach().float().requires_grad_() for x in whole])
        sums = [
            torch.zeros(x.shape, device=device).index_add_(0, rows, gradient.float()).flatten()
            for x, gradient in zip(tensors, gradients, strict=True)
        ]
        return torch.cat([output, *(x / samples for x in sums)])

    name = f"{prompts} prompts of {prompt}, {samples} samples of {response}"
    return name, reference, shared if side == OURS else lambda: attend_whole(whole)[0]


def _causal(side: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if side == "cuDNN":
        return lambda q, k, v: attend_by_cudnn(q, k, v, None)

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (x.repeat_interleave(HEADS // GROUPS, dim=2) for x in (key, value))
        with sdpa_kernel(_BACKENDS[side]):
            query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            return scaled_dot_product_attention(query, key, value, is_causal=True).permute(2, 0, 1, 3).flatten(2)

    return attention


def _packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the output [S, B, N·D] of the same sequences, one behind the other."""
    length, count = query.shape[:2]
    starts = torch.arange(0, (count + 1) * length, length, device=query.device, dtype=torch.int32)
    query, key, value = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    return attend_within_pack(query, key, value, starts, length, None).view(count, length, -1).transpose(0, 1)


def _decoding(side: str, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            if side == OURS:
                return scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            backend = SDPBackend.CUDNN_ATTENTION if side == "cuDNN" else _BACKENDS[side]
            with sdpa_kernel(backend):
                every = mask.expand(*queries.shape[:3], -1)
                return scaled_dot_product_attention(queries, keys, values, attn_mask=every)

    return call
