"""What asynchronous training needs is checked before the first step, and each message names the key and the remedy."""

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config

ASYNC = ("algorithm=grpo", "data=arithmetic", "generation.engine=transformers", "rollout.async_enabled=true")
ASYNC_FROM_FILES = (
    "algorithm=grpo", "generation.engine=transformers", "rollout.async_enabled=true", "data.path=x.jsonl",
    "data.source=prompts", "reward.functions=[exact_match]",
)  # fmt: skip
REFUSED = {
    "without it": (
        ("algorithm=grpo", "rollout.over_sampling=2"),
        "rollout.over_sampling has no effect without rollout.async_enabled=true",
    ),
    "embedded": (
        (*ASYNC, "generation.engine=embedded"),
        "generation.engine=embedded computes on the ranks that train.*set generation.engine=transformers or vllm",
    ),
    "shared memory": (
        (*ASYNC, "generation.engine=vllm", "generation.vllm.enable_sleep_mode=true"),
        "set enable_sleep_mode=false",
    ),
    "streaming": ((*ASYNC_FROM_FILES, "data.streaming=true"), "leave data.streaming out"),
    "partial": ((*ASYNC, "rollout.partial=false"), "rollout.partial=false has no effect with rollout.over_sampling=1"),
    "kept keys": (
        ("algorithm=grpo", "rollout.recompute_kv_cache_after_weight_updates=false"),
        "no rollout engine.*leave it true",
    ),
    "a loss without a correction": (
        (*ASYNC, "loss=nll"),
        "loss.name=nll has no key use_importance_sampling_correction.*=off for no correction",
    ),
    "a ratio that is always 1": (
        (*ASYNC, "rollout.importance_correction=engine", "loss.force_on_policy_ratio=true"),
        "set loss.force_on_policy_ratio=false, or rollout.importance_correction=recomputed",
    ),
    "both corrections": (
        (*ASYNC, "rollout.importance_correction=engine", "loss.use_importance_sampling_correction=true"),
        "set loss.use_importance_sampling_correction=false",
    ),
    "a pass for nothing": (
        (*ASYNC, "rollout.importance_correction=engine", "algorithm.recompute_logprobs=always"),
        "set recompute_logprobs=auto",
    ),
    "a negative age": ((*ASYNC, "rollout.max_trajectory_age_steps=-1"), "max_trajectory_age_steps"),
    "less than a step": ((*ASYNC, "rollout.over_sampling=0.5"), "over_sampling"),
    "NeMo RL's section": (("algorithm=grpo", "async_grpo.enabled=true"), "rollout.async_enabled"),
}


@pytest.mark.parametrize(("overrides", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_work_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(list(overrides))


@pytest.mark.parametrize(
    ("changes", "correction"),
    [
        ((), "recomputed"),
        (("rollout.max_trajectory_age_steps=0",), "off"),
        (("rollout.async_enabled=false",), "off"),
        (("rollout.importance_correction=engine",), "engine"),
        (("rollout.importance_correction=off",), "off"),
    ],
)
def test_old_trajectories_are_corrected_for_unless_it_is_off(changes, correction):
    rollout = load_config([*ASYNC, *changes]).first.rollout
    assert rollout.correction == correction
    assert rollout.is_asynchronous == (not changes or "importance" in changes[0])
