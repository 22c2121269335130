"""Rules of the generation section: keys that would do nothing where they stand."""

from __future__ import annotations

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import GenerationConfig

_OF_PROCESSES = (
    "num_engines",
    "engine_device",
    "engine_timeout_minutes",
    "max_engine_restarts",
    "refit",
    "refit_bucket_mb",
)


def check_generation(generation: GenerationConfig) -> None:
    """Raises: ConfigError naming a key that has no effect."""
    default = GenerationConfig()
    if generation.engine == "megatron":
        for key in _OF_PROCESSES:
            value = getattr(generation, key)
            if value != getattr(default, key):
                raise ConfigError(
                    f"generation.{key}={value} does nothing: generation.engine=megatron has no process or weights of "
                    f"its own; set generation.engine=transformers, or leave generation.{key} out"
                )
    if generation.gate_prompts == 0 and generation.gate_limit is not None:
        raise ConfigError(
            f"generation.gate_limit={generation.gate_limit} does nothing: generation.gate_prompts=0 compares nothing; "
            "set gate_prompts to 1 or more, or leave gate_limit out"
        )
