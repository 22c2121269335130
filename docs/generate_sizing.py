"""Compute the memory that a run needs on each rank, and write the tables of docs/sizing.md.

    python docs/generate_sizing.py

The formulas are in rl_megatron/plan. They count bytes of tensors; they do not measure.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from rl_megatron.config.model import ModelConfig  # noqa: E402
from rl_megatron.config.parallel import ParallelConfig  # noqa: E402
from rl_megatron.model.sharded_shape import ShardedShape  # noqa: E402
from rl_megatron.plan import closed_forms  # noqa: E402
from rl_megatron.topology.degrees import validate_model  # noqa: E402

PAGE = REPOSITORY / "docs" / "sizing.md"
GIB = 2**30


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
    def device_gib(self) -> int:
        """The memory of one device, which the name states as "devices × GiB"."""
        return int(self.name.partition(" × ")[2].split()[0])

    @property
    def shape(self) -> ShardedShape:
        """The model in its layout."""
        return ShardedShape(self.model, self.parallel, self.world_size, self.vocab_size)


def total_parameters(case: Case) -> int:
    """Return the parameters of the whole model."""
    return sum(ShardedShape(case.model, ParallelConfig(), 1, case.vocab_size).elements(stage=0))


def training_bytes(case: Case) -> closed_forms.TrainingBytes:
    """Return the bytes of parameters, gradients and optimizer state, on the stage that has the most parameters."""
    shape = case.shape
    stage = max(range(shape.parallel.pipeline), key=lambda stage: sum(shape.elements(stage)))
    return closed_forms.mean_training_bytes(shape, stage, precision=case.precision, distributed=case.distributed)


def reference_bytes(case: Case) -> int:
    """Return the bytes of the reference policy on the device, between its calls."""
    return training_bytes(case).parameters if case.reference == "resident" else 0


def working_bytes(case: Case) -> tuple[float, float, int]:
    """Return the bytes of activations on the first pipeline stage, of logits on the last one, and of the KV cache."""
    shape, precision = case.shape, case.precision
    return (
        closed_forms.activation_bytes(shape, 0, tokens=case.tokens, precision=precision),
        closed_forms.logits_bytes(shape, tokens=case.tokens, precision=precision, fused_head=case.fused_head),
        closed_forms.cache_bytes(shape, 0, sequences=case.sequences, columns=case.columns, precision=precision),
    )


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
        trained = training_bytes(case)
        kept = [trained.parameters, trained.gradients, trained.optimizer, reference_bytes(case)]
        *working, cache = working_bytes(case)
        train, generate = (_peak(size, case) for size in (sum(kept + working), sum(kept) + cache))
        cells = [*(f"{size / GIB:.1f}" for size in kept + working), train, f"{cache / GIB:.1f}", generate]
        lines.append(f"| {case.name} | {total_parameters(case) / 1e9:.2f} B | " + " | ".join(cells) + " |")
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
