"""The section `generation`: sampling, the rollout engine and the weight sync. Its rules are in engines.py."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from rl_megatron.config.field_types import NonNegative, NonNegativeFloat, Positive, PositiveFloat, section
from rl_megatron.config.servers import SglangConfig, VllmConfig


@section
class GenerationConfig:
    """How completions are generated, for the rollouts of grpo and ppo and to evaluate on problems.

    The keys from `num_engines` to `refit_bucket_mb` are for engines in their own processes, such as transformers.
    """

    max_new_tokens: Positive = 32  # most tokens of a completion
    # Divides the logits before sampling; 0: greedy. The evaluation on the stage's own problems is always greedy.
    temperature: NonNegativeFloat = 1.0
    top_k: NonNegative = 0  # sample from the k likeliest tokens; 0: off
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0  # sample from the likeliest tokens of this total mass; 1: off
    # Tokens that end a completion, besides end-of-sequence and the token that ends a turn in the chat template. Each is
    # one token, and may be a special one such as <|im_end|>.
    stop_tokens: tuple[str, ...] = ()
    # Texts of any number of tokens that end a completion, which includes them.
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    # For models with experts: the engine records to which experts it routes each token, and the trainer's logprobs and
    # training route the token to the same experts (router replay).
    router_replay: bool = False
    batch_size: Positive = 256  # sequences decoded together on one data-parallel rank, or in one engine process
    # auto: on a GPU, the embedded engine captures decoding steps in CUDA graphs, unless tensor or pipeline parallelism
    # splits the model, or it has experts or layers with the gated delta rule. off: it starts each kernel by itself.
    cuda_graphs: Literal["auto", "off"] = "auto"
    # Name of a registered rollout engine. embedded: the sharded training model itself generates. transformers: a
    # Hugging Face model in its own processes, which get the policy's weights after each change.
    engine: str = "embedded"
    num_engines: Positive = 1  # engine processes, among which the prompts are divided
    # auto: the CPU if the policy computes on the CPU; otherwise the GPUs after those of the machine's ranks, or rank
    # 0's GPU with refit=shared_memory. cpu: the CPU. cuda: GPUs 0, 1, …. cuda:N: GPUs N, N+1, ….
    engine_device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    engine_timeout_minutes: PositiveFloat = 30.0  # an engine that takes longer over an answer counts as dead
    max_engine_restarts: NonNegative = 3  # engine deaths that a stage survives by a restart; one more ends the run
    # How weights reach the engines. collective: one all-reduce per bucket; shared_memory: on one machine only; disk:
    # in files, for vLLM servers without our plugin. adapter: vLLM or transformers gets the base once and then the
    # adapter that peft trains, which it applies itself.
    refit: Literal["collective", "shared_memory", "disk", "adapter"] = "collective"
    # Directory that rank 0 and the servers reach under the same path, for refit=disk and adapter. null: the run's own.
    refit_directory: str | None = None
    refit_bucket_mb: PositiveFloat = 256.0  # MiB of weights sent together; each side holds two such buckets
    # The logprob check: once for each copy of the weights that an engine serves, it completes this many of the step's
    # prompts, and its logprobs are compared with the trainer's before anything is learned from it. 0: no check.
    gate_prompts: NonNegative = 4
    # Largest mean |trainer's − engine's logprob| of that check, in nats; more stops the run. null: fp32 1e-4, bf16 0.1.
    gate_limit: PositiveFloat | None = None
    vllm: VllmConfig = field(default_factory=VllmConfig)  # vLLM servers, for engine=vllm
    sglang: SglangConfig = field(default_factory=SglangConfig)  # SGLang servers, for engine=sglang
