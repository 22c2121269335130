"""The search ranks what fits, accounts for every combination, and its command line starts the layout it found."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter

import pytest

from rl_megatron.config.loading.load import load_config
from rl_megatron.config.plan import PlanConfig
from rl_megatron.plan import search as searching
from rl_megatron.plan.closed_use import estimate_use
from rl_megatron.plan.command import build_command_line, build_workload
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.estimate import estimate_step
from rl_megatron.plan.search import search, without_layout
from rl_megatron.plan.settings import Settings
from rl_megatron.topology.degrees import validate, validate_model

DEFAULTS = PlanConfig()
DENSE = ["model=llama3_1_70b", "model.vocab_size=128256", "precision=bf16"]
EXPERTS = ["model=qwen3_235b_a22b", "model.vocab_size=151936", "precision=bf16"]
ROLLOUTS = [
    "algorithm=grpo", "data=arithmetic", "generation.max_new_tokens=2048", "algorithm.prompts_per_step=256",
    "train.global_batch_size=2048",
]  # fmt: skip
PAIRS = ["algorithm=dpo", "loss=dpo", "train.global_batch_size=256"]


def searched(overrides: list[str], nodes: int, gpu: str = "h200", section: PlanConfig = DEFAULTS):
    cluster = Cluster.from_config(section, gpu, nodes, 8)
    stage = load_config(overrides).first
    workload = build_workload(without_layout(stage), cluster.world_size, section)
    return search(workload, cluster, section.mean_response_tokens), cluster


def chosen_stage(candidate, overrides: list[str], cluster: Cluster):
    """Return the stage that the command line of a candidate starts."""
    options = argparse.Namespace(overrides=overrides, config_dir=None)
    words = shlex.split(build_command_line(candidate, options, None, cluster))
    return load_config(words[words.index("train") + 1 :]).first


@pytest.mark.parametrize(
    ("overrides", "nodes"),
    [
        pytest.param([*DENSE, *ROLLOUTS], 512, marks=pytest.mark.change),
        pytest.param([*EXPERTS, *ROLLOUTS], 512, marks=pytest.mark.change),
        ([*DENSE, *PAIRS], 2),
    ],
)
def test_every_combination_is_ranked_or_rejected_and_the_best_command_starts_what_was_found(overrides, nodes):
    found, cluster = searched(overrides, nodes)
    assert len(found.ranked) + sum(found.rejected.values()) == found.considered
    seconds = [candidate.estimate.seconds for candidate in found.ranked]
    assert seconds == sorted(seconds) and found.ranked
    layouts = Counter(candidate.settings.shape.parallel for candidate in found.ranked)
    assert max(layouts.values()) == 1

    for best in (found.ranked[0], found.ranked[-1]):
        stage = chosen_stage(best, overrides, cluster)
        assert stage.parallel == best.settings.shape.parallel
        validate(stage.parallel, cluster.world_size)
        validate_model(stage.model, stage.parallel)
        # The command's own plan is the candidate's.
        settings = Settings.from_workload(build_workload(stage, cluster.world_size, PlanConfig()))
        stages = range(stage.parallel.pipeline)
        uses = [estimate_use(settings, number) for number in stages]
        assert max(use.peak_phase.peak_bytes for use in uses) == best.peak_bytes <= cluster.usable_bytes
        assert estimate_step(uses, settings, cluster).seconds == pytest.approx(best.estimate.seconds, rel=1e-3)


def test_a_model_that_is_too_large_has_no_layout_and_the_reason_is_named():
    found, _ = searched([*DENSE, *PAIRS], 1, "l40s")
    assert found.ranked == ()
    assert found.rejected[searching.REASONS["state"]] > 0


@pytest.mark.change
def test_a_tenth_of_the_memory_changes_what_fits():
    overrides = ["model=llama3_1_8b", "model.vocab_size=128256", "precision=bf16", *PAIRS]
    large, _ = searched(overrides, 1, "h200")
    small, cluster = searched(overrides, 1, "h200", PlanConfig(memory_margin=0.8))
    assert len(small.ranked) < len(large.ranked)
    assert all(candidate.peak_bytes <= cluster.usable_bytes for candidate in small.ranked)
    assert any(candidate.settings.shape.model.recompute == "full" for candidate in small.ranked)


@pytest.mark.change
def test_shorter_mean_responses_take_less_time_and_as_much_memory():
    overrides = ["model=llama3_1_8b", "model.vocab_size=128256", "precision=bf16", *ROLLOUTS]
    longest, _ = searched(overrides, 1, section=PlanConfig(prompt_tokens=64))
    mean, _ = searched(overrides, 1, section=PlanConfig(prompt_tokens=64, mean_response_tokens=512))
    assert mean.ranked[0].estimate.seconds < 0.5 * longest.ranked[0].estimate.seconds
    layouts = [{candidate.settings.shape.parallel for candidate in found.ranked} for found in (mean, longest)]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize(
    ("message", "rule"),
    [
        (
            "parallel.tensor=16 must divide model.num_query_groups=8; degrees that fit: [1, 2]",
            "parallel.tensor must divide model.num_query_groups",
        ),
        (
            "parallel.tensor=2 × parallel.pipeline=8 × parallel.context=1 = 16 does not divide the world size 8; with",
            "parallel.tensor × parallel.pipeline × parallel.context does not divide the world size",
        ),
        (
            "parallel.expert=3 must divide the 8 ranks of a pipeline stage; degrees that fit: [1]",
            "parallel.expert must divide the ranks of a pipeline stage",
        ),
    ],
)
def test_rules_are_grouped_without_their_numbers(message, rule):
    assert searching.extract_rule(searching.ConfigError(message)) == rule
