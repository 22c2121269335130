"""Keys of rollout engines that are wrong, or that have no effect: the message names key, value and rule."""

from dataclasses import replace

import pytest

from rl_megatron.config.engines import ENGINE_DECLARATIONS, EngineDeclaration, choose_vllm_logprobs_mode
from rl_megatron.config.loading.load import load_config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("generation.num_engines=2", ["generation.num_engines=2 does nothing", "generation.engine=transformers"]),
        ("generation.refit=shared_memory", ["generation.refit=shared_memory does nothing"]),
        ("generation.engine_device=cpu", ["generation.engine_device=cpu does nothing"]),
        ("generation.max_engine_restarts=0", ["generation.max_engine_restarts=0 does nothing"]),
        ("generation.refit_bucket_mb=1", ["generation.refit_bucket_mb=1.0 does nothing"]),
        ("generation.engine_timeout_minutes=1", ["generation.engine_timeout_minutes=1.0 does nothing"]),
        ("generation.engine=vlm", ["generation.engine='vlm'", "no rollout engine", "vllm"]),
        ("generation.vllm.num_servers=2", ["generation.vllm does nothing", "set generation.engine=vllm"]),
        ("generation.engine_device=gpu", ["generation.engine_device='gpu'", "cuda"]),
        ("generation.gate_limit=0", ["generation.gate_limit=0", "greater than 0"]),
    ],
)
def test_wrong_keys_of_rollout_engines_are_refused(refused, override, words):
    message = refused("algorithm=grpo", override)
    assert all(word in message for word in words), message


def test_router_replay_is_refused_for_dense_models_and_for_engines_that_do_not_record(refused, monkeypatch):
    message = refused("algorithm=grpo", "generation.router_replay=true")
    assert "generation.router_replay=true does nothing: model.num_experts=null" in message
    for name in ENGINE_DECLARATIONS:
        silent = replace(ENGINE_DECLARATIONS[name], records_routing=name == "transformers")
        monkeypatch.setitem(ENGINE_DECLARATIONS, name, silent)
    message = refused("algorithm=grpo", "model=nano_moe", "generation.router_replay=true")
    assert "generation.engine=embedded cannot record" in message and "set generation.engine=transformers," in message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["generation.num_engines=2"], ["generation.num_engines=2 does nothing", "the keys of generation.vllm"]),
        (["generation.batch_size=2"], ["generation.batch_size=2 does nothing"]),
        (
            ["generation.vllm.server_urls=[http://a:1]", "generation.vllm.tensor_parallel_size=2"],
            ["generation.vllm.tensor_parallel_size=2 does nothing", "start the servers with this setting"],
        ),
        (["generation.vllm.server_urls=[http://a:1,http://a:1]"], ["names a server twice"]),
        (["generation.vllm.server_urls=[a:1]"], ["generation.vllm.server_urls"]),
        (["generation.vllm.server_urls=['http://a:99999']"], ["'http://a:99999', whose host or port is wrong"]),
        (
            ["generation.vllm.gpu_memory_utilization=0.5", "generation.vllm.kv_cache_memory_bytes=1000"],
            ["generation.vllm.gpu_memory_utilization=0.5 does nothing"],
        ),
        (["generation.temperature=0.7", "generation.top_k=5"], ["generation.temperature=0.7", "top_k to 0"]),
        (["generation.temperature=0.7", "generation.top_p=0.9"], ["generation.top_p=0.9", "set temperature to 1"]),
    ],
)
def test_keys_that_have_no_effect_on_vllm_servers_or_cannot_be_exact_are_refused(refused, overrides, words):
    message = refused("algorithm=grpo", "generation.engine=vllm", *overrides)
    assert all(word in message for word in words), message


def test_texts_are_refused_by_an_engine_that_does_not_stop_at_them(refused, monkeypatch):
    monkeypatch.setitem(ENGINE_DECLARATIONS, "own", EngineDeclaration(runs_in_processes=False))
    message = refused("algorithm=grpo", "generation.engine=own", "generation.stop_strings=[x]")
    assert "generation.engine=own does not support stop strings" in message and "stop_tokens" in message


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ([], "processed_logprobs"),
        (["temperature=0.7"], "processed_logprobs"),
        (["top_k=5"], "raw_logprobs"),
        (["top_p=0.9", "temperature=1.0"], "raw_logprobs"),
    ],
)
def test_vllm_servers_report_logprobs_in_the_mode_that_is_exact(overrides, mode):
    config = load_config(["algorithm=grpo", "generation.engine=vllm", *(f"generation.{each}" for each in overrides)])
    assert choose_vllm_logprobs_mode(config.first.generation) == mode


def test_gate_limit_is_refused_if_the_logprob_check_is_off(refused):
    message = refused("algorithm=grpo", "generation.gate_prompts=0", "generation.gate_limit=1")
    assert "generation.gate_limit=1.0 does nothing" in message and "generation.gate_prompts=0" in message
