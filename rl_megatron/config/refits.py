"""The ways in which weights reach rollout engines (`generation.refit`), and their rules."""

from __future__ import annotations

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import GenerationConfig

UNVERIFIED = ("disk", "nccl", "ipc")  # the engine itself does not compare the weights that arrive with those sent
_OF_ENGINES_IN_PROCESSES = ("collective", "shared_memory")
# The ways of other engines. Each is tried with the engine, or its page says that it is not.
_OF_ENGINES = {
    "vllm": ("collective", "shared_memory", "disk", "nccl", "ipc"),
    "sglang": ("collective",),
}


def check_refit(generation: GenerationConfig) -> None:
    """Check that the engine takes weights in the way that is chosen.

    Raises:
        ConfigError: It does not, or a key has no effect; the message names it.
    """
    engine, refit = generation.engine, generation.refit
    ways = _OF_ENGINES.get(engine, _OF_ENGINES_IN_PROCESSES)
    if refit not in ways:
        others = [other for other, its_ways in _OF_ENGINES.items() if refit in its_ways]
        raise ConfigError(
            f"generation.refit={refit}: generation.engine={engine} takes weights by {' or '.join(ways)}; set one of "
            f"these, or generation.engine={' or '.join(others)}"
        )
    if generation.refit_directory is not None and refit != "disk":
        raise ConfigError(
            f"generation.refit_directory={generation.refit_directory} does nothing: generation.refit={refit} writes no "
            "files; set generation.refit=disk, or leave refit_directory out"
        )
    if refit in UNVERIFIED and generation.gate_prompts == 0:
        raise ConfigError(
            f"generation.refit={refit} with generation.gate_prompts=0: the engine does not verify weights that come in "
            "this way, so the logprob check has to; set gate_prompts to 1 or more, or refit=collective"
        )
    insecure = generation.vllm.allow_insecure_serialization
    if refit == "ipc" and not insecure:
        raise ConfigError(
            "generation.refit=ipc: vLLM unpickles what comes to its port, so whoever reaches it can run code; set "
            "generation.vllm.allow_insecure_serialization=true if only this run reaches it, or refit=shared_memory"
        )
    if insecure and refit != "ipc":
        raise ConfigError(
            f"generation.vllm.allow_insecure_serialization=true does nothing: generation.refit={refit} pickles "
            "nothing; leave it out"
        )


def shares_gpus(generation: GenerationConfig) -> bool:
    """Return whether the run starts its vLLM servers on the policy's GPUs."""
    return generation.refit in ("shared_memory", "ipc") and not generation.vllm.urls


def releases_memory(generation: GenerationConfig) -> bool:
    """Return whether vLLM servers release the memory of GPUs while the policy trains."""
    chosen = generation.vllm.enable_sleep_mode
    return generation.engine == "vllm" and (shares_gpus(generation) if chosen is None else chosen)
