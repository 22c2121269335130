"""`train.deterministic` refuses what depends on time, and says why."""

from dataclasses import replace

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.rules import check_deterministic

ON = ["algorithm=grpo", "train.deterministic=true"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["generation.engine=transformers"], ["generation.engine=transformers", "generation.engine=embedded"]),
        (["generation.engine=vllm"], ["batched together", "VLLM_BATCH_INVARIANT=1"]),
        (["generation.engine=vllm", "generation.vllm.server_urls=[http://a:1]"], ["let the run start its servers"]),
        (["generation.engine=sglang"], ["generation.sglang.enable_deterministic_inference=true"]),
        (["reward.on_timeout=zero"], ["reward.on_timeout=zero", "reward.on_timeout=error"]),
    ],
)
def test_what_depends_on_time_is_refused(monkeypatch, overrides, words):
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with pytest.raises(ConfigError) as error:
        load_config([*ON, *overrides])
    assert all(word in str(error.value) for word in ("train.deterministic=true", *words)), error.value
    load_config([*ON[:1], *overrides])


def test_engines_that_repeat_themselves_are_accepted():
    load_config(ON)
    load_config([*ON, "generation.engine=sglang", "generation.sglang.enable_deterministic_inference=true"])
    stage = load_config(["algorithm=grpo", "generation.engine=vllm"]).first
    stage = replace(stage, train=replace(stage.train, deterministic=True))
    check_deterministic(stage, {"VLLM_BATCH_INVARIANT": "1"})


def test_all_stages_are_deterministic_or_none():
    with pytest.raises(ConfigError, match=r"stages\.sft\.train\.deterministic"):
        load_config(["experiment=quickstart", "+stages.sft.train.deterministic=true"])


def test_deterministic_training_refuses_cudnn_attention():
    with pytest.raises(ConfigError, match="model.cudnn_attention=true: .*; set model.cudnn_attention=false"):
        load_config(
            ["algorithm=sft", "data.task.name=arithmetic", "train.deterministic=true", "model.cudnn_attention=true"]
        )
