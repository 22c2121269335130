"""Hugging Face models with random weights, and policies with the same weights in any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from rl_megatron.model.families import find_family_of_config
from rl_megatron.model.families.table import WeightTable
from rl_megatron.model.shards import pieces
from rl_megatron.training.megatron_policy import MegatronPolicy
from tests.parallel.layouts import build_policy


def save_random(config: PreTrainedConfig, directory: Path, std: float = 0.15) -> AutoModelForCausalLM:
    """Save a model of `config` in fp32 and return it; no weight, norm or router bias has its initial value."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *(b for name, b in model.named_buffers() if name.endswith("_bias"))]:
            tensor.add_(std * torch.randn_like(tensor))
    model.save_pretrained(directory)
    return model


def policy_of(directory: Path, parallel: dict, model_keys: dict | None = None, **policy_keys: Any) -> MegatronPolicy:
    """Return a policy in the layout `parallel` with the weights of a Hugging Face directory.

    Args:
        directory: The directory with config.json and the weights.
        parallel: The keys of `ParallelConfig`.
        model_keys: Keys of the model that replace those that the directory's config gives.
        policy_keys: More arguments of `build_policy`.
    """
    hf = json.loads((directory / "config.json").read_text())
    family = find_family_of_config(hf, str(directory))
    model = family.read_config(hf)
    table = family.table(model, hf["vocab_size"])
    tensors = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == table.hf_shapes
    model = replace(model, **(model_keys or {}))
    policy = build_policy(parallel, model=model, vocab_size=model.vocab_size, **policy_keys)
    fill(policy, table, tensors)
    if not model_keys and policy.topology.world_size == 1:
        assert {piece.name for piece in pieces(policy.model.model_chunks)} == table.shapes.keys()
    return policy


def fill(policy: MegatronPolicy, table: WeightTable, tensors: dict[str, Tensor]) -> None:
    """Copy Hugging Face tensors into this rank's shards of the policy's weights."""
    for piece in pieces(policy.model.model_chunks):
        whole = torch.zeros(piece.global_shape)  # the padding of the vocabulary stays 0
        wanted = table.shapes[piece.name]
        assert piece.global_shape[1:] == wanted[1:] and piece.global_shape[0] >= wanted[0], piece.name
        for rows in table.by_name[piece.name]:
            source = tensors[rows.hf_name]
            if rows.slab is not None:
                source = rows.slab.rows(source[rows.slab.expert])
            whole[rows.row : rows.row + rows.count] = source[rows.hf_row : rows.hf_row + rows.count]
        part = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))
        piece.tensor.copy_(whole[part])
    if policy.optimizer is not None:
        policy.optimizer.reload_model_params()
