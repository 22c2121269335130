"""Phi-3: Llama whose queries, keys and values are one weight, as are the gate and up projections of its MLP.

The longrope scaling of RoPE is refused, and so is RoPE on a part of each head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rl_megatron import Family, ModelConfig, register_family
from rl_megatron.model.families.decoder import read_decoder, write_decoder
from rl_megatron.model.families.table import WeightTable, dense_decoder


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the model section of a config.json."""
    return ModelConfig(**read_decoder(hf), sliding_window=hf.get("sliding_window"))


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return a config.json that `read_config` reads as `model`."""
    keys = write_decoder("Phi3ForCausalLM", "phi3", model, vocab_size)
    # The defaults of transformers are tokens of Phi-3's own vocabulary.
    return keys | {"sliding_window": model.sliding_window, "eos_token_id": None, "pad_token_id": None}


def fused_name(name: str) -> str:
    """Return the name of the weight of Phi-3 that holds a weight of Llama."""
    return re.sub(r"\b(gate|up)_proj\b", "gate_up_proj", re.sub(r"\b[qkv]_proj\b", "qkv_proj", name))


def fused_decoder(model: ModelConfig, vocab_size: int) -> WeightTable:
    """Return Llama's weight table, with the rows of fused weights below each other: q, k and v; gate and up."""
    llama = dense_decoder(model, vocab_size)
    hf_shapes: dict[str, tuple[int, ...]] = {}
    first_row: dict[str, int] = {}  # of a weight of Llama in the weight that holds it
    for name, (rows, *columns) in llama.hf_shapes.items():  # q comes before k, k before v, and gate before up
        holder = fused_name(name)
        first_row[name] = hf_shapes[holder][0] if holder in hf_shapes else 0
        hf_shapes[holder] = (first_row[name] + rows, *columns)
    moved = tuple(
        replace(rows, hf_name=fused_name(rows.hf_name), hf_row=first_row[rows.hf_name] + rows.hf_row)
        for rows in llama.rows
    )
    return replace(llama, hf_shapes=hf_shapes, rows=moved)


PHI3 = register_family(
    Family(
        architecture="Phi3ForCausalLM",
        read_config=read_config,
        write_config=write_config,
        table=fused_decoder,
        # Dropout of training by transformers; a length that only longrope reads; Python files of the Hub.
        ignored=frozenset({"resid_pdrop", "embd_pdrop", "original_max_position_embeddings", "auto_map"}),
    )
)
