"""Declarations of the rollout engines that a configuration can choose, and the rules of the generation section."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.generation import GenerationConfig
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.refits import check_refit
from rl_megatron.config.registry import Registry

_KEYS_OF_PROCESSES = (
    "num_engines",
    "engine_device",
    "engine_timeout_minutes",
    "max_engine_restarts",
    "refit",
    "refit_bucket_mb",
    "refit_directory",
)
_NOT_OF_SERVERS = ("num_engines", "engine_device", "batch_size")


@dataclass(frozen=True)
class EngineDeclaration:
    """The properties of a rollout engine that the generation section is checked against.

    Attributes:
        runs_in_processes: Whether the engine runs in its own processes, so that weights have to be sent to it.
        stops_at_strings: Whether the engine ends completions at `Sampling.stop_strings`.
        records_routing: Whether the engine can record to which experts it routes each token.
        section: The key of `GenerationConfig` with the settings of the engine's servers, if it runs on servers.
    """

    runs_in_processes: bool
    stops_at_strings: bool = False
    records_routing: bool = False
    section: str | None = None


ENGINE_DECLARATIONS: Registry[EngineDeclaration] = Registry("rollout engine")
ENGINE_DECLARATIONS.register("embedded")(
    EngineDeclaration(runs_in_processes=False, stops_at_strings=True, records_routing=True)
)
ENGINE_DECLARATIONS.register("transformers")(
    EngineDeclaration(runs_in_processes=True, stops_at_strings=True, records_routing=True)
)
ENGINE_DECLARATIONS.register("vllm")(
    EngineDeclaration(runs_in_processes=True, stops_at_strings=True, records_routing=True, section="vllm")
)
ENGINE_DECLARATIONS.register("sglang")(
    EngineDeclaration(runs_in_processes=True, stops_at_strings=True, section="sglang")
)


def check_generation(generation: GenerationConfig) -> None:
    """Check that the engine exists and that every key has an effect.

    Raises:
        ConfigError: The engine is unknown, or a key has no effect; the message names it.
    """
    name, default = generation.engine, GenerationConfig()
    if name not in ENGINE_DECLARATIONS:
        raise ConfigError(
            f"generation.engine={name!r}: there is no rollout engine {name!r}{nearest(name, ENGINE_DECLARATIONS)}"
        )
    if not ENGINE_DECLARATIONS[name].runs_in_processes:
        for key in _KEYS_OF_PROCESSES:
            value = getattr(generation, key)
            if value != getattr(default, key):
                others = [
                    other
                    for other, engine in ENGINE_DECLARATIONS.items()
                    if engine.runs_in_processes and not (key in _NOT_OF_SERVERS and engine.section)
                ]
                raise ConfigError(
                    f"generation.{key}={value} does nothing: generation.engine={name} has no processes and no copy of "
                    f"the weights; set generation.engine={' or '.join(others)}, or leave generation.{key} out"
                )
    _check_servers(generation)
    check_refit(generation)
    if generation.stop_strings and not ENGINE_DECLARATIONS[name].stops_at_strings:
        others = [other for other, engine in ENGINE_DECLARATIONS.items() if engine.stops_at_strings]
        raise ConfigError(
            f"generation.stop_strings={list(generation.stop_strings)}: generation.engine={name} does not stop at "
            f"texts; set generation.engine={' or '.join(others)}, or generation.stop_tokens"
        )
    if generation.gate_prompts == 0 and generation.gate_limit is not None:
        raise ConfigError(
            f"generation.gate_limit={generation.gate_limit} does nothing: generation.gate_prompts=0 turns the logprob "
            "check off; set gate_prompts to 1 or more, or leave gate_limit out"
        )


def check_router_replay(generation: GenerationConfig, model: ModelConfig) -> None:
    """Check that the model has experts to replay, and that the engine can record them.

    Raises:
        ConfigError: `generation.router_replay` is on and does nothing, or the engine cannot record.
    """
    if not generation.router_replay:
        return
    if model.num_experts is None:
        raise ConfigError(
            "generation.router_replay=true does nothing: model.num_experts=null is a dense model; leave router_replay "
            "out, or choose a model with experts"
        )
    if not ENGINE_DECLARATIONS[generation.engine].records_routing:
        others = [other for other, engine in ENGINE_DECLARATIONS.items() if engine.records_routing]
        raise ConfigError(
            f"generation.router_replay=true: generation.engine={generation.engine} cannot record routed experts; set "
            f"generation.engine={' or '.join(others)}, or router_replay=false"
        )


def _check_servers(generation: GenerationConfig) -> None:
    """Check the sections of engines on servers, and the keys that have no effect on such engines."""
    default, own = GenerationConfig(), ENGINE_DECLARATIONS[generation.engine].section
    for engine, declaration in ENGINE_DECLARATIONS.items():
        section = declaration.section
        if section is not None and section != own and getattr(generation, section) != getattr(default, section):
            raise ConfigError(
                f"generation.{section} does nothing: generation.engine={generation.engine}; set "
                f"generation.engine={engine}, or leave the keys of generation.{section} out"
            )
    if own is None:
        return
    for key in _NOT_OF_SERVERS:
        value = getattr(generation, key)
        if value != getattr(default, key):
            raise ConfigError(
                f"generation.{key}={value} does nothing: generation.engine={generation.engine} runs on servers, which "
                f"the keys of generation.{own} describe; leave generation.{key} out"
            )
    getattr(generation, own).check()
    if own == "vllm":
        vllm_logprobs_mode(generation)


def vllm_logprobs_mode(generation: GenerationConfig) -> str:
    """Return the `--logprobs-mode` with which vLLM's logprobs are log softmax(logits/temperature), before top-k/top-p.

    vLLM gives logprobs at temperature 1 before everything ("raw"), or after temperature, top-k and top-p ("processed").

    Raises:
        ConfigError: Neither is that of these settings.
    """
    filtered = generation.temperature > 0 and (generation.top_k > 0 or generation.top_p < 1)
    if not filtered:
        return "processed_logprobs"
    if generation.temperature == 1:
        return "raw_logprobs"
    raise ConfigError(
        f"generation.temperature={generation.temperature} with generation.top_k={generation.top_k} and "
        f"generation.top_p={generation.top_p}: vLLM gives logprobs before temperature, or after top_k and top_p, and "
        "the trainer needs those in between; set temperature to 1, or top_k to 0 and top_p to 1, or "
        "generation.engine=transformers"
    )
