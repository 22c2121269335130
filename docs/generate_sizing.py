"""Compute the memory that a run needs on each rank, and write the tables of docs/sizing.md.

    python docs/generate_sizing.py

The formulas are those of docs/sizing.md, in the same order. They count bytes of dense tensors; they do not measure.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rl_megatron.config.model_shape import head_size  # noqa: E402
from rl_megatron.config.schema import ModelConfig, ParallelConfig  # noqa: E402
from rl_megatron.topology.degrees import padded_vocab_size, validate, validate_model  # noqa: E402

PAGE = REPOSITORY / "docs" / "sizing.md"
GIB = 2**30
FUSED_HEAD_BYTES = 512 * 2**20  # one token block of bf16 logits on a GPU


@dataclass(frozen=True)
class Case:
    """A model, its layout and its batch sizes.

    Attributes:
        tokens: Tokens of one microbatch, over all ranks that share it.
        sequences: Sequences that the embedded engine decodes together on one rank.
        columns: Tokens of the longest prompt and of a completion.
    """

    name: str
    model: ModelConfig
    vocab_size: int
    world_size: int
    parallel: ParallelConfig
    precision: str = "bf16"
    distributed: bool = True
    fused_head: bool = True
    reference: str = "resident"
    tokens: int = 8192
    sequences: int = 64
    columns: int = 2048

    def __post_init__(self) -> None:
        validate_model(self.model, self.parallel)

    @property
    def data(self) -> int:
        """The data-parallel degree."""
        return validate(self.parallel, self.world_size)

    @property
    def device_gib(self) -> int:
        """The memory of one device, which the name states as "devices × GiB"."""
        return int(self.name.partition(" × ")[2].split()[0])

    @property
    def weight_bytes(self) -> int:
        return 2 if self.precision == "bf16" else 4


@dataclass(frozen=True)
class Parameters:
    """Parameters on the fullest rank: those of experts, and all others."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def parameters(case: Case) -> Parameters:
    """Return the parameters on a rank of the fuller end of the pipeline."""
    model, parallel = case.model, case.parallel
    layers = layers_of_stage(case)
    rows = padded_vocab_size(model.vocab_size or case.vocab_size, parallel.tensor) // parallel.tensor
    embedding = rows * model.hidden_size
    copies = 1 if parallel.pipeline > 1 or model.tie_embeddings else 2  # embedding and head on one stage
    dense_layers = min(model.first_dense_layers, layers) if model.num_experts else layers
    dense = layers * _attention(model, parallel.tensor) + copies * embedding + model.hidden_size
    dense += dense_layers * 3 * model.hidden_size * model.ffn_hidden_size // parallel.tensor
    if model.num_experts is None:
        return Parameters(dense, 0)
    expert_size = model.expert_ffn_hidden_size or model.ffn_hidden_size
    shared = 3 * model.hidden_size * (model.shared_expert_ffn_hidden_size or 0) // parallel.tensor
    router = model.hidden_size * model.num_experts + model.hidden_size * model.shared_expert_gate
    sparse_layers = layers - dense_layers
    dense += sparse_layers * (shared + router)
    return Parameters(dense, sparse_layers * model.num_experts // parallel.expert * 3 * model.hidden_size * expert_size)


def layers_of_stage(case: Case) -> int:
    """Return the layers of the stage that has the most."""
    model, parallel = case.model, case.parallel
    ends = [count for count in (parallel.first_stage_layers, parallel.last_stage_layers) if count is not None]
    between = parallel.pipeline - len(ends)
    return max([*ends, (model.num_layers - sum(ends)) // between] if between else ends)


def _attention(model: ModelConfig, tensor: int) -> int:
    """Return the parameters of a layer's attention and norms."""
    if model.kv_lora_rank is not None:
        raise ValueError("the formulas here are not those of latent attention (model.kv_lora_rank)")
    size = head_size(model)
    queries, keys_and_values = size * model.num_attention_heads, 2 * size * model.num_query_groups
    linears = model.hidden_size * (2 * queries + keys_and_values) + model.qkv_bias * (queries + keys_and_values)
    norms = (4 if model.sandwich_norms else 2) * model.hidden_size + 2 * size * model.qk_norm
    return linears // tensor + norms


def training_bytes(case: Case) -> tuple[float, float, float]:
    """Return the bytes of parameters, of gradients and of the optimizer state."""
    count, stage_ranks = parameters(case), case.world_size // case.parallel.pipeline
    per_parameter = 12 if case.precision == "bf16" else 8  # fp32 master weight and two moments; fp32: two moments
    shards = stage_ranks // case.parallel.tensor if case.distributed else 1
    expert_shards = stage_ranks // case.parallel.expert if case.distributed else 1
    optimizer = per_parameter * (count.dense / shards + count.experts / expert_shards)
    return case.weight_bytes * count.total, 4 * count.total, optimizer


def reference_bytes(case: Case) -> float:
    """Return the bytes of the reference policy on the device, between its calls."""
    return case.weight_bytes * parameters(case).total if case.reference == "resident" else 0


def activation_elements(model: ModelConfig) -> int:
    """Return the elements that a layer keeps of each token for backward, without recomputation."""
    size = head_size(model)
    attention = (2 + model.qk_norm) * size * (model.num_attention_heads + model.num_query_groups)
    if model.num_experts is None:
        return 4 * model.hidden_size + attention + 4 * model.ffn_hidden_size
    expert_size = model.expert_ffn_hidden_size or model.ffn_hidden_size
    experts = model.experts_per_token * (2 * model.hidden_size + 4 * expert_size)
    return 4 * model.hidden_size + attention + experts + 4 * (model.shared_expert_ffn_hidden_size or 0)


def activation_bytes(case: Case) -> float:
    """Return the bytes of activations on the first pipeline stage, with sequence parallelism if tensor exceeds 1."""
    model, parallel = case.model, case.parallel
    tokens = case.tokens / parallel.context / parallel.tensor
    layer, layers = activation_elements(model), model.num_layers  # all p microbatches of its layers / p
    if model.recompute == "full":
        return case.weight_bytes * tokens * (layers * model.hidden_size + layer)
    return case.weight_bytes * tokens * layers * layer


def logits_bytes(case: Case) -> float:
    """Return the bytes of the logits of one microbatch on the last stage."""
    columns = padded_vocab_size(case.model.vocab_size or case.vocab_size, case.parallel.tensor) / case.parallel.tensor
    whole = case.weight_bytes * case.tokens / case.parallel.context * columns
    return min(whole, FUSED_HEAD_BYTES) if case.fused_head else whole


def cache_bytes(case: Case) -> float:
    """Return the bytes of the embedded engine's keys and values, and of those of one layer repeated to all heads."""
    model, tensor = case.model, case.parallel.tensor
    column = 2 * head_size(model) * case.weight_bytes * case.sequences * case.columns
    repeated = model.num_attention_heads if model.num_query_groups != model.num_attention_heads else 0
    return column * (layers_of_stage(case) * model.num_query_groups + repeated) / tensor


def preset(name: str, **changes: object) -> ModelConfig:
    """Return a model of configs/model with some keys changed."""
    text = (REPOSITORY / "configs" / "model" / f"{name}.yaml").read_text()
    return replace(ModelConfig(**yaml.safe_load(text)), **changes)  # pyright: ignore[reportArgumentType]


LLAMA_8B = ModelConfig(
    num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
    max_sequence_length=8192, tie_embeddings=False,
)  # fmt: skip
QWEN, QWEN_MOE, FULL = preset("qwen2_5_0_5b"), preset("qwen3_30b_a3b"), {"recompute": "full"}
TENSOR_2 = ParallelConfig(tensor=2, sequence=True)
CASES = [
    Case("0.5 B, 1 × 24 GiB", QWEN, 151_936, 1, ParallelConfig(), fused_head=False, sequences=128, columns=1024),
    Case("0.5 B, 1 × 24 GiB, fused head", QWEN, 151_936, 1, ParallelConfig(), sequences=128, columns=1024),
    Case("0.5 B, 1 × 24 GiB, fused head, full recompute", replace(QWEN, **FULL), 151_936, 1, ParallelConfig(),
         sequences=128, columns=1024),
    Case("8 B, 8 × 80 GiB: data 8", replace(LLAMA_8B, **FULL), 128_256, 8, ParallelConfig()),
    Case("8 B, 8 × 80 GiB: tensor 2, data 4", replace(LLAMA_8B, **FULL), 128_256, 8, TENSOR_2),
    Case("8 B, 8 × 80 GiB: tensor 2, data 4, no recompute", LLAMA_8B, 128_256, 8, TENSOR_2),
    Case("8 B, 8 × 80 GiB: tensor 2, data 4, not `optimizer.distributed`", replace(LLAMA_8B, **FULL), 128_256, 8,
         TENSOR_2, distributed=False),
    Case("8 B, 8 × 80 GiB: tensor 4, context 2, 65,536 tokens", replace(LLAMA_8B, **FULL), 128_256, 8,
         ParallelConfig(tensor=4, sequence=True, context=2), tokens=65_536, sequences=8, columns=65_536),
    Case("30B-A3B, 8 × 80 GiB: expert 8, data 8", replace(QWEN_MOE, **FULL), 151_936, 8, ParallelConfig(expert=8)),
    Case("30B-A3B, 16 × 80 GiB: expert 8, data 16", replace(QWEN_MOE, **FULL), 151_936, 16, ParallelConfig(expert=8)),
    Case("30B-A3B, 16 × 80 GiB: pipeline 2, expert 8, data 8", replace(QWEN_MOE, **FULL), 151_936, 16,
         ParallelConfig(pipeline=2, expert=8)),
    Case("30B-A3B, 32 × 80 GiB: pipeline 2, expert 8, data 16", replace(QWEN_MOE, **FULL), 151_936, 32,
         ParallelConfig(pipeline=2, expert=8)),
]  # fmt: skip


def table() -> str:
    """Return the worked examples as a Markdown table, in GiB on the fullest rank.

    Peaks that exceed the memory of one device are bold.
    """
    lines = [
        "| run | parameters, total | parameters | gradients | optimizer | reference | activations | logits | train "
        "| KV cache | generate |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in CASES:
        whole = parameters(replace(case, parallel=ParallelConfig(), world_size=1)).total
        kept = [*training_bytes(case), reference_bytes(case)]
        working, cache = [activation_bytes(case), logits_bytes(case)], cache_bytes(case)
        train, generate = (_peak(size, case) for size in (sum(kept + working), sum(kept) + cache))
        cells = [*(f"{size / GIB:.1f}" for size in kept + working), train, f"{cache / GIB:.1f}", generate]
        lines.append(f"| {case.name} | {whole / 1e9:.2f} B | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _peak(size: float, case: Case) -> str:
    """Return a peak in GiB, bold if it exceeds the memory of one device."""
    shown = f"{size / GIB:.1f}"
    return f"**{shown}**" if size / GIB > case.device_gib else shown


def page(text: str) -> str:
    """Return the page's text with its table replaced."""
    block = f"<!-- table: written by docs/generate_sizing.py -->\n{table()}\n<!-- end of table -->"
    replaced, count = re.subn(r"<!-- table: .*?<!-- end of table -->", lambda _: block, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE} has {count} places for the table")
    return replaced


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    print(f"wrote {PAGE}")
