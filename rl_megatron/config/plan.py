"""The section `plan`, which only `rl-megatron plan` reads: lengths of sequences, and numbers of a cluster."""

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
    """What is planned besides the run itself. Every key is an override of `rl-megatron plan`."""

    # Tokens of a prompt, which are not learned from. null: half of model.max_sequence_length, and none for windows of
    # text.
    prompt_tokens: NonNegative | None = None
    # Tokens of a response, or of whatever is learned from. null: as many as the model and, if completions are sampled,
    # generation.max_new_tokens allow.
    response_tokens: Positive | None = None
    # Mean tokens of a response, at most response_tokens. Batches that are not padded take less time. null: all are the
    # longest.
    mean_response_tokens: Positive | None = None
    memory_margin: Fraction = 0.1  # share of a GPU's memory to leave free for CUDA, NCCL and fragmentation
    # How the GPUs of a node are connected, by its name in the table; null: as in the GPU's row.
    link: str | None = None
    network: str = "infiniband_ndr"  # how nodes are connected, by its name in the table
    # The numbers of a GPU, instead of those of the table. A GPU that the table lacks needs the first three.
    gpu_memory_gib: PositiveFloat | None = None  # memory that a process can use
    gpu_bf16_tflops: PositiveFloat | None = None  # dense matrix products in bf16 with fp32 sums
    gpu_memory_gb_per_s: PositiveFloat | None = None  # bandwidth of the memory
    gpu_fp32_tflops: PositiveFloat | None = None  # matrix products in fp32 without TF32; null: 1/16 of those in bf16
    link_gb_per_s: PositiveFloat | None = None  # bandwidth of a GPU within the node, in one direction
    network_gb_per_s: PositiveFloat | None = None  # bandwidth of a GPU between nodes, in one direction
    # What estimates assume that a computation achieves of the numbers above.
    compute_efficiency: Share = 0.7  # of the FLOPs, in matrix products
    memory_efficiency: Share = 0.8  # of the memory's bandwidth
    link_efficiency: Share = 0.8  # of the bandwidth of links and network


@section
class _Overrides:
    """The overrides of the command, for messages with whole key paths."""

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
