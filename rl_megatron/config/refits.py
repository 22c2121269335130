"""The ways in which weights reach rollout engines (`generation.refit`), and their rules."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import GenerationConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.config.servers import VLLM_ADAPTER_RANKS

UNVERIFIED = ("disk", "adapter")  # the engine itself does not compare the weights that arrive with those sent
_OF_ENGINES_IN_PROCESSES = ("collective", "shared_memory")
_MERGED = "set generation.refit=collective, which sends merged weights"  # the remedy
# The ways of other engines. Each is tried with the engine, or its page says that it is not.
_OF_ENGINES = {
    "transformers": (*_OF_ENGINES_IN_PROCESSES, "adapter"),
    "vllm": ("collective", "shared_memory", "disk", "adapter"),
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
    writes_files = refit == "disk" or (refit == "adapter" and engine == "vllm")
    if generation.refit_directory is not None and not writes_files:
        raise ConfigError(
            f"generation.refit_directory={generation.refit_directory} does nothing: generation.engine={engine} with "
            f"generation.refit={refit} writes no files; set generation.refit=disk, or leave refit_directory out"
        )
    if refit in UNVERIFIED and engine != "transformers" and generation.gate_prompts == 0:
        raise ConfigError(
            f"generation.refit={refit} with generation.gate_prompts=0: the engine does not verify weights that come in "
            "this way, so the logprob check has to; set gate_prompts to 1 or more, or refit=collective"
        )
    if generation.vllm.allow_insecure_serialization:
        raise ConfigError(
            f"generation.vllm.allow_insecure_serialization=true does nothing: generation.refit={refit} pickles "
            "nothing; leave it out"
        )


def check_adapter_refit(stage: StageConfig) -> None:
    """Check that there is an adapter to send, and that the engine can apply it.

    Raises:
        ConfigError: `generation.refit` is "adapter", and it cannot be sent; the message names the key.
    """
    generation, model = stage.generation, stage.model
    if generation.refit != "adapter":
        return
    is_vllm = generation.engine == "vllm"
    refused, remedy = None, _MERGED
    if stage.peft is None:
        refused = "peft=null, so there is no adapter"
        remedy = "set peft.r, or generation.refit=collective"
    elif model.num_experts is not None:
        refused = f"model.num_experts={model.num_experts}, and {generation.engine} stacks the experts' weights"
    elif stage.peft.use_dora:
        refused = f"peft.use_dora=true, and {generation.engine} takes no magnitudes of adapters"
    elif is_vllm and stage.peft.modules_to_save:
        modules = ", ".join(stage.peft.modules_to_save)
        refused = f"peft.modules_to_save=[{modules}], and vLLM takes no modules beside an adapter"
    elif is_vllm and stage.peft.r > VLLM_ADAPTER_RANKS[-1]:
        refused = f"peft.r={stage.peft.r}, and vLLM takes adapters of rank {VLLM_ADAPTER_RANKS[-1]} at most"
    elif is_vllm and model.kv_lora_rank is not None:
        refused = f"model.kv_lora_rank={model.kv_lora_rank}, and vLLM's adapters of such models have another form"
    elif is_vllm and stage.rollout.async_enabled:
        refused = "rollout.async_enabled=true, and vLLM ends unfinished completions with the adapter before"
    elif is_vllm and generation.vllm.enable_sleep_mode:
        refused = "generation.vllm.enable_sleep_mode=true drops the base, which is sent once"
        remedy = "set enable_sleep_mode=false, or generation.refit=collective"
    if refused is not None:
        raise ConfigError(f"generation.refit=adapter: {refused}; {remedy}")


def refuse_several(adapters: Sequence[LoraConfig]) -> None:
    """Refuse to send adapters of several names, of which engines take one.

    Raises:
        ConfigError: There are several.
    """
    if len(adapters) > 1:
        names = ", ".join(adapter.adapter_name for adapter in adapters)
        raise ConfigError(
            f"generation.refit=adapter: the model has the adapters {names}, and an engine takes one; {_MERGED}"
        )


def opens_memory(generation: GenerationConfig) -> bool:
    """Return whether engines open the memory of the policy's rank 0 to read weights."""
    return generation.refit == "shared_memory" or (generation.refit == "adapter" and generation.engine != "vllm")


def shares_gpus(generation: GenerationConfig) -> bool:
    """Return whether the run starts its vLLM servers on the policy's GPUs."""
    return generation.refit == "shared_memory" and not generation.vllm.urls


def releases_memory(generation: GenerationConfig) -> bool:
    """Return whether vLLM servers release the memory of GPUs while the policy trains."""
    chosen = generation.vllm.enable_sleep_mode
    return generation.engine == "vllm" and (shares_gpus(generation) if chosen is None else chosen)
