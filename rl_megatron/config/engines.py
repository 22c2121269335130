"""Declarations of the rollout engines that a configuration can choose, and the rules of the generation section."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.registry import Registry
from rl_megatron.config.schema import GenerationConfig

_KEYS_OF_PROCESSES = (
    "num_engines",
    "engine_device",
    "engine_timeout_minutes",
    "max_engine_restarts",
    "refit",
    "refit_bucket_mb",
)


@dataclass(frozen=True)
class EngineDeclaration:
    """The properties of a rollout engine that the generation section is checked against.

    Attributes:
        runs_in_processes: Whether the engine runs in its own processes, so that weights have to be sent to it.
        stops_at_strings: Whether the engine ends completions at `Sampling.stop_strings`.
    """

    runs_in_processes: bool
    stops_at_strings: bool = False


ENGINE_DECLARATIONS: Registry[EngineDeclaration] = Registry("rollout engine")
ENGINE_DECLARATIONS.register("embedded")(EngineDeclaration(runs_in_processes=False, stops_at_strings=True))
ENGINE_DECLARATIONS.register("transformers")(EngineDeclaration(runs_in_processes=True, stops_at_strings=True))


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
                others = [other for other, engine in ENGINE_DECLARATIONS.items() if engine.runs_in_processes]
                raise ConfigError(
                    f"generation.{key}={value} does nothing: generation.engine={name} has no processes and no copy of "
                    f"the weights; set generation.engine={' or '.join(others)}, or leave generation.{key} out"
                )
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
