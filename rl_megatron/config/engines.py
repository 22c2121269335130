"""The rollout engines, the ways in which weights reach them, and the rules of the section `generation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.generation import VLLM_ADAPTER_RANKS, GenerationConfig
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.config.schema import StageConfig

UNVERIFIED = ("disk", "adapter")  # values of generation.refit with which the engine does not verify weights
_OF_ENGINES_IN_PROCESSES = ("collective", "shared_memory")
_MERGED = "set generation.refit=collective, which sends merged weights"  # the remedy
# The values of generation.refit that each engine supports. The engines' docs name those that are not tested.
_OF_ENGINES = {
    "transformers": (*_OF_ENGINES_IN_PROCESSES, "adapter"),
    "vllm": ("collective", "shared_memory", "disk", "adapter"),
    "sglang": ("collective",),
}


def check_refit(generation: GenerationConfig) -> None:
    """Check that the engine supports the chosen refit, and that every key of the refit has an effect."""
    engine, refit = generation.engine, generation.refit
    ways = _OF_ENGINES.get(engine, _OF_ENGINES_IN_PROCESSES)
    if refit not in ways:
        others = [other for other, its_ways in _OF_ENGINES.items() if refit in its_ways]
        raise ConfigError(
            f"generation.refit={refit}: generation.engine={engine} receives weights by {' or '.join(ways)}; set one of "
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
            f"generation.refit={refit} with generation.gate_prompts=0: the engine does not verify weights that it "
            "receives this way, so the logprob check must; set gate_prompts to 1 or more, or refit=collective"
        )
    if generation.vllm.allow_insecure_serialization:
        raise ConfigError(
            f"generation.vllm.allow_insecure_serialization=true does nothing: generation.refit={refit} uses no pickle; "
            "leave it out"
        )


def check_adapter_refit(stage: StageConfig) -> None:
    """Check that generation.refit=adapter has an adapter to send, and that the engine can apply it."""
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
        refused = f"peft.use_dora=true, and {generation.engine} does not support DoRA's magnitudes"
    elif is_vllm and stage.peft.modules_to_save:
        modules = ", ".join(stage.peft.modules_to_save)
        refused = f"peft.modules_to_save=[{modules}], and vLLM loads only the adapter itself"
    elif is_vllm and stage.peft.r > VLLM_ADAPTER_RANKS[-1]:
        refused = f"peft.r={stage.peft.r}, and vLLM supports adapters of rank {VLLM_ADAPTER_RANKS[-1]} at most"
    elif is_vllm and model.kv_lora_rank is not None:
        refused = f"model.kv_lora_rank={model.kv_lora_rank}, and vLLM expects adapters of such models in another format"
    elif is_vllm and stage.rollout.async_enabled:
        refused = "rollout.async_enabled=true, and vLLM finishes running completions with the previous adapter"
    elif is_vllm and generation.vllm.enable_sleep_mode:
        refused = "generation.vllm.enable_sleep_mode=true drops the base weights, which are sent only once"
        remedy = "set enable_sleep_mode=false, or generation.refit=collective"
    if refused is not None:
        raise ConfigError(f"generation.refit=adapter: {refused}; {remedy}")


def refuse_several(adapters: Sequence[LoraConfig]) -> None:
    """Refuse to send several adapters: an engine supports only one."""
    if len(adapters) > 1:
        names = ", ".join(adapter.adapter_name for adapter in adapters)
        raise ConfigError(
            f"generation.refit=adapter: the model has the adapters {names}, but an engine supports only one; {_MERGED}"
        )


def opens_memory(generation: GenerationConfig) -> bool:
    """Return whether engines read weights from memory that the policy's rank 0 shares."""
    return generation.refit == "shared_memory" or (generation.refit == "adapter" and generation.engine != "vllm")


def shares_gpus(generation: GenerationConfig) -> bool:
    """Return whether the run starts its vLLM servers on the policy's GPUs."""
    return generation.refit == "shared_memory" and not generation.vllm.urls


def releases_memory(generation: GenerationConfig) -> bool:
    """Return whether vLLM servers release GPU memory while the policy trains."""
    chosen = generation.vllm.enable_sleep_mode
    return generation.engine == "vllm" and (shares_gpus(generation) if chosen is None else chosen)


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
        section: The key of `GenerationConfig` with the settings of the engine's servers; None if it has no servers.
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
    """Check that the engine exists and that every key has an effect."""
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
            f"generation.stop_strings={list(generation.stop_strings)}: generation.engine={name} does not support stop "
            f"strings; set generation.engine={' or '.join(others)}, or generation.stop_tokens"
        )
    if generation.gate_prompts == 0 and generation.gate_limit is not None:
        raise ConfigError(
            f"generation.gate_limit={generation.gate_limit} does nothing: generation.gate_prompts=0 turns the logprob "
            "check off; set gate_prompts to 1 or more, or leave gate_limit out"
        )


def check_router_replay(generation: GenerationConfig, model: ModelConfig) -> None:
    """Check that the model has experts, and that the engine can record which of them it routes tokens to."""
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
    """Check the server sections, and refuse keys that have no effect on engines that run on servers."""
    default, chosen = GenerationConfig(), ENGINE_DECLARATIONS[generation.engine].section
    for engine, declaration in ENGINE_DECLARATIONS.items():
        section = declaration.section
        if section is not None and section != chosen and getattr(generation, section) != getattr(default, section):
            raise ConfigError(
                f"generation.{section} does nothing: generation.engine={generation.engine}; set "
                f"generation.engine={engine}, or leave the keys of generation.{section} out"
            )
    if chosen is None:
        return
    for key in _NOT_OF_SERVERS:
        value = getattr(generation, key)
        if value != getattr(default, key):
            raise ConfigError(
                f"generation.{key}={value} does nothing: generation.engine={generation.engine} runs on servers, which "
                f"the keys of generation.{chosen} describe; leave generation.{key} out"
            )
    getattr(generation, chosen).check()
    if chosen == "vllm":
        choose_vllm_logprobs_mode(generation)


def choose_vllm_logprobs_mode(generation: GenerationConfig) -> str:
    """Return the `--logprobs-mode` for which vLLM's logprobs are log softmax(logits/temperature), before top-k/top-p.

    vLLM computes logprobs either before temperature, top-k and top-p ("raw"), or after all three ("processed").
    Settings for which neither is right are refused.
    """
    filtered = generation.temperature > 0 and (generation.top_k > 0 or generation.top_p < 1)
    if not filtered:
        return "processed_logprobs"
    if generation.temperature == 1:
        return "raw_logprobs"
    raise ConfigError(
        f"generation.temperature={generation.temperature} with generation.top_k={generation.top_k} and "
        f"generation.top_p={generation.top_p}: vLLM gives logprobs before temperature, or after top_k and top_p, but "
        "the trainer needs those after temperature and before top_k and top_p; set temperature to 1, or top_k to 0 "
        "and top_p to 1, or generation.engine=transformers"
    )
