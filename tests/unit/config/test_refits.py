"""The rules of `generation.refit`."""

from __future__ import annotations

import pytest

from rl_megatron.config.engines import check_refit
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import GenerationConfig, VllmConfig
from rl_megatron.config.loading.load import load_config


@pytest.mark.parametrize(
    "keys, message",
    [
        (
            {"engine": "transformers", "refit": "disk"},
            "receives weights by collective or shared_memory or adapter; .*engine=vllm",
        ),
        (
            {"engine": "sglang", "refit": "disk"},
            "generation.engine=sglang receives weights by collective; .*engine=vllm",
        ),
        (
            {"engine": "vllm", "refit_directory": "/x"},
            "refit_directory=/x does nothing: .* generation.refit=collective",
        ),
        ({"engine": "vllm", "refit": "disk", "gate_prompts": 0}, "gate_prompts=0: the engine does not verify weights"),
        (
            {"engine": "vllm", "vllm": VllmConfig(allow_insecure_serialization=True)},
            "allow_insecure_serialization=true does nothing: generation.refit=collective",
        ),
    ],
)
def test_a_way_that_the_engine_does_not_take_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_refit(GenerationConfig(**keys))


ADAPTER = ("algorithm=grpo", "data=arithmetic", "generation.engine=vllm", "generation.refit=adapter", "init_from=base")


@pytest.mark.parametrize(
    "keys, message",
    [
        ((), "peft=null, so there is no adapter; set peft.r"),
        (("peft.r=513",), "peft.r=513, and vLLM supports adapters of rank 512 at most"),
        (("peft.r=4", "model=nano_moe"), "model.num_experts=.*set generation.refit=collective"),
        (
            ("peft.r=4", "rollout.async_enabled=true"),
            "rollout.async_enabled=true, and vLLM finishes running completions",
        ),
        (("peft.r=4", "generation.vllm.enable_sleep_mode=true"), "enable_sleep_mode=true drops the base"),
        (
            ("peft.r=4", "generation.engine=transformers", "model=nano_moe"),
            "num_experts=.*transformers stacks the experts",
        ),
        (
            ("peft.r=4", "generation.engine=transformers", "generation.refit_directory=/x"),
            "refit_directory=/x does nothing",
        ),
        (("peft.r=4", "peft.modules_to_save=[lm_head]"), "vLLM loads only the adapter itself; set .*=collective"),
        (("peft.r=4", "generation.gate_prompts=0"), "gate_prompts=0: the engine does not verify weights"),
    ],
)
def test_an_adapter_that_cannot_be_sent_alone_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        load_config([*ADAPTER, *keys])


@pytest.mark.parametrize(
    "keys", [("peft.r=513",), ("peft.r=4", "rollout.async_enabled=true"), ("peft.r=4", "generation.gate_prompts=0")]
)
def test_the_limits_of_vllm_are_not_those_of_transformers(keys):
    load_config([*ADAPTER, "generation.engine=transformers", *keys])


@pytest.mark.parametrize("refit", ["collective", "shared_memory", "disk", "adapter"])
def test_vllm_takes_weights_in_every_way(refit):
    check_refit(GenerationConfig(engine="vllm", refit=refit))


@pytest.mark.parametrize("refit", ["nccl", "ipc"])
def test_vllms_own_backends_are_refused_with_the_ways_to_use(refit):
    with pytest.raises(ConfigError, match=f"generation.refit='?{refit}.*collective.*shared_memory.*disk"):
        load_config(["algorithm=grpo", "generation.engine=vllm", f"generation.refit={refit}"])
