"""Replacements of torch's tensor functions whose C++ code asks the CUDA driver or returns the wrong device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rl_megatron.plan.fake_cuda.sides import CPU, CUDA, META, Sides, is_meta, names_cuda, report_launch

aten = torch.ops.aten


class Functions(TorchFunctionMode):
    """A mode that replaces functions whose C++ code asks the CUDA driver, and passes "meta" for "cuda" to others."""

    def __init__(self, sides: Sides):
        super().__init__()
        self._sides = sides
        self._special: dict[object, Callable] = {
            Tensor.device.__get__: self._device,  # pyright: ignore[reportAttributeAccessIssue]
            Tensor.is_cuda.__get__: self._is_cuda,  # pyright: ignore[reportAttributeAccessIssue]
            Tensor.is_cpu.__get__: self._is_cpu,  # pyright: ignore[reportAttributeAccessIssue]
            Tensor.is_meta.__get__: lambda tensor: False,  # pyright: ignore[reportAttributeAccessIssue]
            Tensor.to: self._to,
            Tensor.cuda: lambda tensor, *args, **kwargs: self._to(tensor, CUDA, **kwargs),
            Tensor.cpu: lambda tensor, *args, **kwargs: self._to(tensor, CPU, **kwargs),
            Tensor.type: self._type,
            Tensor.pin_memory: lambda tensor, *args, **kwargs: tensor,
            Tensor.is_pinned: lambda tensor, *args, **kwargs: not is_meta(tensor),
            Tensor.record_stream: lambda tensor, stream: None,
            Tensor.get_device: lambda tensor: -1 if sides.find_device(tensor) == CPU else 0,
            Tensor.new_tensor: self._new_tensor,
            torch.tensor: self._tensor,
            torch.as_tensor: self._as_tensor,
            torch.nn.functional.scaled_dot_product_attention: _attention,
            torch.nn.functional.rms_norm: _rms_norm,
        }

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> object:
        """Return what the function returns on a GPU, without its values."""
        special = self._special.get(func)
        if special is not None:
            with self:  # the replacement may call other functions
                return special(*args, **(kwargs or {}))
        if kwargs:
            kwargs = dict(kwargs)
            if names_cuda(kwargs.get("device")):
                kwargs["device"] = META
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False  # only the driver can pin memory
        return func(*args, **(kwargs or {}))

    def _device(self, tensor: Tensor) -> torch.device:
        return self._sides.find_device(tensor)

    def _is_cuda(self, tensor: Tensor) -> bool:
        return self._sides.find_device(tensor) == CUDA

    def _is_cpu(self, tensor: Tensor) -> bool:
        return self._sides.find_device(tensor) == CPU

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return `tensor.to(…)`. Decide here whether to copy, because C++ would see only meta devices."""
        device, dtype, flags = kwargs.pop("device", None), kwargs.pop("dtype", None), []
        for arg in args:
            if isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, Tensor):
                device, dtype = self._sides.find_device(arg), arg.dtype
            elif isinstance(arg, bool):
                flags.append(arg)
            elif arg is not None:
                device = arg
        other = kwargs.pop("other", None)
        if other is not None:
            device, dtype = self._sides.find_device(other), other.dtype
        kwargs |= dict(zip(("non_blocking", "copy"), flags, strict=False))
        here, dtype = self._sides.find_device(tensor), dtype or tensor.dtype
        there = here if device is None else CUDA if names_cuda(device) else torch.device(device)
        if there == here and dtype == tensor.dtype and not kwargs.get("copy"):
            return tensor
        if there != here and (kwargs.get("copy") or dtype != tensor.dtype):
            kwargs.pop("copy", None)
        with torch._C.DisableTorchFunction():
            if there == here:
                return tensor.to(dtype, **kwargs)
            if there == CUDA:
                if not is_meta(tensor):
                    return tensor.to(META, dtype, **kwargs)
                return self._move(tensor, dtype, CUDA)
            return self._move(tensor, dtype, CPU, **kwargs)

    def _move(self, tensor: Tensor, dtype: torch.dtype, there: torch.device, **kwargs: Any) -> Tensor:
        """Return a copy, on the device `there`, of a tensor without data."""
        if there == CPU:
            return tensor.to(CPU, dtype, **kwargs)  # the mode of operators.py replaces this copy
        moved = torch.empty(tensor.shape, dtype=dtype, device=META)
        self._sides.observer.on_launch(aten._to_copy.default, (tensor,), {}, moved)
        return moved

    def _type(self, tensor: Tensor, *args: Any, **kwargs: Any) -> object:
        with torch._C.DisableTorchFunction():
            if args or kwargs:
                return tensor.type(*args, **kwargs)
            return str(tensor.type()).replace("torch.meta.", "torch.cuda.")

    def _tensor(self, data: object, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        with torch._C.DisableTorchFunction():
            tensor = torch.tensor(_read(data), dtype=dtype, **kwargs)
        return tensor if device is None else self._to(tensor, device)

    def _as_tensor(self, data: object, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        if isinstance(data, Tensor):
            return self._to(data, device, dtype)
        return self._tensor(data, dtype=dtype, device=device)

    def _new_tensor(
        self, like: Tensor, data: object, *, dtype: torch.dtype | None = None, device: Any = None, **kwargs: Any
    ) -> Tensor:
        return self._tensor(data, dtype=dtype or like.dtype, device=device or self._sides.find_device(like), **kwargs)


def _read(data: object) -> object:
    """Read the tensors in nested lists, because C++ would read them without calling the mode of operators.py."""
    if isinstance(data, Tensor):
        return data.tolist()
    if isinstance(data, (list, tuple)) and any(isinstance(value, (Tensor, list, tuple)) for value in data):
        return [_read(value) for value in data]
    return data


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Call the attention operator that torch would choose on a GPU, so that the same tensors are stored.

    A mask excludes flash attention, and memory-efficient attention takes it as a bias, not as booleans. Grouped queries
    exclude memory-efficient attention. If both are excluded, all scores are stored.
    """
    with torch._C.DisableTorchFunction():
        on_device, head = is_meta(query), query.size(-1)
        half = query.dtype in (torch.bfloat16, torch.float16)
        grouped = query.size(1) != key.size(1)
        if on_device and attn_mask is None and half and head <= 256 and head == value.size(-1):
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if on_device and not grouped:
            bias = attn_mask
            if bias is not None:
                if bias.dtype == torch.bool:
                    bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), -math.inf)
                bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
            )[0]
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Compute RMSNorm with one operator, as torch does on a GPU; torch built without CUDA would call many operators."""
    if is_meta(x) and weight is not None:
        return _RmsNorm.apply(x, weight)
    with torch._C.DisableTorchFunction():
        return torch.rms_norm(x, shape, weight, eps)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm with the memory of torch's GPU kernel: it keeps its input and one fp32 factor per normalized vector."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        factors = x.new_empty(*x.shape[: -weight.dim()], *(1 for _ in weight.shape), dtype=torch.float32)
        ctx.save_for_backward(x, weight, factors)
        return report_launch(aten._fused_rms_norm.default, (x, weight), torch.empty_like(x))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, factors = ctx.saved_tensors
        result = torch.empty_like(x), torch.empty_like(weight)
        return report_launch(aten._fused_rms_norm_backward.default, (gradient, x, factors, weight), result)
