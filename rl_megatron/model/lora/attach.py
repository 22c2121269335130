"""Attach adapters to the linears of a model chunk, find them, and switch them off."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.heads.score import ScoreHead
from rl_megatron.model.layers.latent_attention import ReplicatedLinear
from rl_megatron.model.lora.dora import DoraAdapter
from rl_megatron.model.lora.layers import LayerAdapters, LinearAdapter
from rl_megatron.model.lora.targets import Part, name_container
from rl_megatron.topology.topology import Topology

_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def attach_adapters(
    model_chunk: torch.nn.Module,
    config: LoraConfig,
    linears: dict[str, tuple[Part, ...]],
    megatron: TransformerConfig,
    topology: Topology,
    seed: int,
) -> None:
    """Add adapters to the linears of a model chunk, and freeze all other weights except those of a score head.

    Args:
        model_chunk: The model, without wrappers.
        config: The section `peft`.
        linears: The parts of each linear that gets an adapter, by its global name (`find_adapted_linears`).
        megatron: megatron-core's config of the model.
        topology: The layout.
        seed: The seed of the adapters' initial weights.
    """
    freeze_weights(model_chunk)
    _attach(model_chunk, config, linears, megatron, topology, seed)


def freeze_weights(model_chunk: torch.nn.Module) -> None:
    """Freeze all weights of a model chunk except those of a score head, so that gradients reach only adapters."""
    for module in model_chunk.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(isinstance(module, ScoreHead))
    if getattr(model_chunk, "pre_process", False):
        # A recomputed layer has gradients only if its input requires a gradient. A frozen embedding's output does not
        # require one.
        model_chunk.get_submodule("embedding").register_forward_hook(_require_gradient)


def attach_frozen(
    model_chunk: torch.nn.Module,
    config: LoraConfig,
    linears: dict[str, tuple[Part, ...]],
    megatron: TransformerConfig,
    topology: Topology,
) -> list[LinearAdapter]:
    """Add frozen adapters of another name, without dropout, to the linears of a model chunk, and return them.

    `config` is the section `peft` with which they were trained. The other arguments are those of `attach_adapters`.
    """
    attached = _attach(model_chunk, replace(config, lora_dropout=0.0), linears, megatron, topology, seed=0)
    for adapter in attached:
        adapter.requires_grad_(False)
        adapter.is_frozen = True
    return attached


def _attach(
    model_chunk: torch.nn.Module,
    config: LoraConfig,
    linears: dict[str, tuple[Part, ...]],
    megatron: TransformerConfig,
    topology: Topology,
    seed: int,
) -> list[LinearAdapter]:
    kind, attached = DoraAdapter if config.use_dora else LinearAdapter, []
    for layer in [module for module in model_chunk.modules() if isinstance(module, TransformerLayer)]:
        adapters = LayerAdapters()
        for local, module in layer.named_modules():
            name = f"decoder.layers.{layer.layer_number - 1}.{_find_global_name(local, megatron, topology)}"
            if name in linears and isinstance(module, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)):
                adapter = kind(config, linears[name], module, megatron, topology, seed)
                adapters.add_module(local.replace(".", "_"), adapter)
                module.register_forward_hook(_AddAdapter(adapter))
                attached.append(adapter)
        layer.add_module(name_container(config.adapter_name), adapters)
    return attached


def find_adapters(model_chunks: Sequence[torch.nn.Module]) -> Iterator[LinearAdapter]:
    """Yield the adapters of this rank."""
    for model_chunk in model_chunks:
        yield from (module for module in model_chunk.modules() if isinstance(module, LinearAdapter))


def find_trained_adapters(model_chunks: Sequence[torch.nn.Module]) -> Iterator[LinearAdapter]:
    """Yield the adapters of this rank that are not frozen."""
    return (adapter for adapter in find_adapters(model_chunks) if not adapter.is_frozen)


def find_dora_adapters(model_chunks: Sequence[torch.nn.Module]) -> Iterator[DoraAdapter]:
    """Yield the adapters of this rank that have magnitudes."""
    return (adapter for adapter in find_adapters(model_chunks) if isinstance(adapter, DoraAdapter))


@contextmanager
def switch_off(model_chunks: Sequence[torch.nn.Module], trained_only: bool = False) -> Iterator[None]:
    """Make the model compute without its adapters within the block; with `trained_only`, frozen adapters stay on."""
    adapters = list((find_trained_adapters if trained_only else find_adapters)(model_chunks))
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True


class _AddAdapter:
    """A forward hook that adds an adapter's output to a linear's. The linear does not own the adapter."""

    def __init__(self, adapter: LinearAdapter):
        self._adapter = adapter

    def __call__(
        self, module: torch.nn.Module, args: tuple, output: Tensor | tuple[Tensor, Tensor | None]
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        if not self._adapter.is_on:
            return output
        if isinstance(output, tuple):  # megatron-core's linears return their bias as well
            return self._adapter.add_to(output[0], args[0]), *output[1:]
        return self._adapter.add_to(output, args[0])


def _require_gradient(module: torch.nn.Module, args: tuple, output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
    return output


def _find_global_name(local: str, megatron: TransformerConfig, topology: Topology) -> str:
    """Return the name of a layer's module, with the global number of its expert if it belongs to one."""
    match = _LOCAL_EXPERT.search(local)
    if match is None:
        return local
    first = topology.groups.ep.rank() * (megatron.num_moe_experts or 0) // topology.expert
    return f"{local[: match.start()]}.{first + int(match[1])}.{local[match.end() :]}"
