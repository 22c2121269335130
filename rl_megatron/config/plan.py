"""The section `plan`, which only `rl-megatron plan` reads: sequence lengths, and properties of a cluster."""

from __future__ import annotations

from typing import Annotated, Any

from omegaconf import OmegaConf
from pydantic import Field

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.sections import build_section
from rl_megatron.config.loading.settings import Fraction, NonNegative, Number, Positive, PositiveFloat, section

_PREFIX = "plan."
Share = Annotated[float, Field(gt=0.0, le=1.0), Number]


@section
class PlanConfig:
    """The assumptions of a plan about sequence lengths and hardware. Every key is an override of `rl-megatron plan`."""

    # Tokens of a prompt, which are not trained on. null: half of model.max_sequence_length, less if a sequence would
    # exceed a microbatch; 0 for pretraining.
    prompt_tokens: NonNegative | None = None
    # Tokens of the longest response, or of any other text that is trained on. null: the rest of
    # model.max_sequence_length, at most generation.max_new_tokens if completions are sampled; for pretraining,
    # data.sequence_length.
    response_tokens: Positive | None = None
    # Mean response length, at most response_tokens. A lower mean shortens the estimated time, unless batches are
    # padded. null: all responses have response_tokens.
    mean_response_tokens: Positive | None = None
    memory_margin: Fraction = 0.1  # share of a GPU's memory to leave free for CUDA, NCCL and fragmentation
    # Link between the GPUs of a node, by its name in the table of links. null: the GPU's usual link.
    link: str | None = None
    network: str = "infiniband_ndr"  # network between nodes, by its name in the table of networks
    # The next six keys replace a GPU's values in the table. A GPU that the table lacks needs the first three of them.
    gpu_memory_gib: PositiveFloat | None = None  # memory that a process can use
    gpu_bf16_tflops: PositiveFloat | None = None  # TFLOP/s of dense matrix products in bf16 with fp32 accumulation
    gpu_memory_gb_per_s: PositiveFloat | None = None  # bandwidth of the memory
    gpu_fp32_tflops: PositiveFloat | None = None  # TFLOP/s in fp32 without TF32; null: 1/16 of bf16
    link_gb_per_s: PositiveFloat | None = None  # bandwidth of a GPU within the node, in one direction
    network_gb_per_s: PositiveFloat | None = None  # bandwidth of a GPU between nodes, in one direction
    compute_efficiency: Share = 0.7  # share of the TFLOP/s that matrix products are assumed to achieve
    memory_efficiency: Share = 0.8  # share of the memory bandwidth that is assumed to be achieved
    link_efficiency: Share = 0.8  # share of the bandwidth of links and network that is assumed to be achieved


@section
class _Overrides:
    """A section that holds `plan`, so that messages have whole key paths."""

    plan: PlanConfig = PlanConfig()


def split_overrides(overrides: list[str]) -> tuple[PlanConfig, list[str]]:
    """Return the section `plan` that overrides give, and the other overrides."""
    of_plan = [override for override in overrides if override.lstrip("+").startswith(_PREFIX)]
    for override in of_plan:
        if "=" not in override:
            raise ConfigError(f"override {override!r}: write {override}=VALUE")
    values: Any = OmegaConf.to_container(OmegaConf.from_dotlist([override.lstrip("+") for override in of_plan]))
    section: _Overrides = build_section(_Overrides, values, "")
    return section.plan, [override for override in overrides if override not in of_plan]
