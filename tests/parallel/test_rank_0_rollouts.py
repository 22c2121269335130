"""Trajectories of a synchronous step are on rank 0 alone, and are those of one process, on every engine."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.records import Record
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.completions import requests_of
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Completion, Sampling
from rl_megatron.generation.transformers.engine import TransformersEngine
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rewards.samples import Sample
from rl_megatron.rollouts.runner import RolloutRules, RolloutRunner
from rl_megatron.rollouts.scored import ScoredRollouts
from rl_megatron.rollouts.trajectory import TokenLimits
from tests.parallel.layouts import VOCAB_SIZE, build_policy
from tests.parallel.test_generation import prompts
from tests.parallel.test_transformers_engine import LLAMA, SETTINGS, patched
from tests.unit.algorithms.fakes import Characters
from tests.unit.rollouts.test_runner import two_turns

NUM_PROMPTS = 12


class FewCharacters(Characters):
    """Characters as tokens of the tests' small vocabulary."""

    def encode(self, text):
        return [token % VOCAB_SIZE for token in super().encode(text)]


class ByLength:
    """A scorer whose reward is the length of the completion."""

    reads_sequences = False

    def score_samples(self, samples):
        return torch.tensor([float(len(sample.completion_ids)) for sample in samples]), RewardMetrics()


def made(parallel: dict, engine_name: str) -> tuple[dict | None, list[float], dict[str, int]]:
    """Return the batch, the rewards, and how many objects of each kind this rank has made or received."""
    policy = build_policy(parallel, LLAMA)
    engine = EmbeddedEngine(policy, 4) if engine_name == "embedded" else TransformersEngine(policy, SETTINGS, 10)
    ranks = policy.topology.ranks
    runner = RolloutRunner(two_turns, RolloutRules(TokenLimits(40, 40)), FewCharacters(), ranks, 60.0)
    encoded = [
        EncodedPrompt(ids, Problem("", ""), Record({}, f"x:{number}"))
        for number, ids in enumerate(prompts(NUM_PROMPTS))
    ]
    counts = {"completions": 0, "samples": 0}

    def counting(kind: str, call):
        def counted(self, *arguments, **keys):
            counts[kind] += 1
            return call(self, *arguments, **keys)

        return counted

    try:
        engine.sync()
        with (
            patched(Completion, "__init__", counting("completions", Completion.__init__)),
            patched(Completion, "__setstate__", counting("completions", Completion.__setstate__)),
            patched(Sample, "__init__", counting("samples", Sample.__init__)),
        ):
            scored = ScoredRollouts(runner, ByLength(), FewCharacters()).make(engine, encoded, Sampling(6), 3, 2)
    finally:
        runner.close()
        engine.close()
    return (None, [], counts) if scored is None else (scored.batch.get_dict(), scored.rewards.tolist(), counts)


@pytest.mark.parametrize(
    ("engine", "world_size", "parallel"),
    [
        ("embedded", 2, {}),
        ("embedded", 4, {"tensor": 2}),
        ("embedded", 4, {"pipeline": 2}),
        ("embedded", 2, {"context": 2}),
        ("transformers", 2, {}),
    ],
    ids=["data 2", "data 2 tensor 2", "data 2 pipeline 2", "context 2", "transformers data 2"],
)
def test_only_rank_0_has_the_trajectories_and_they_are_those_of_one_process(ranks, engine, world_size, parallel):
    wanted, rewards, _ = ranks.reference(made, {}, "embedded")
    (batch, found, _), *others = ranks.run(world_size, made, parallel, engine)
    assert found == rewards
    for key, values in wanted.items():
        torch.testing.assert_close(batch[key], values, atol=1e-4, rtol=0, msg=lambda said, key=key: f"{key}: {said}")
    for nothing, none, counts in others:
        assert nothing is None and none == [] and counts["samples"] == 0
        # Two turns each. A replica of the embedded engine makes the completions of its own requests only.
        assert counts["completions"] == (2 * NUM_PROMPTS // 2 if engine == "embedded" else 0)


def too_long(parallel: dict) -> str:
    """Return what a rank hears of a prompt that leaves no place for a completion, which only rank 0 has."""
    policy = build_policy(parallel, LLAMA)
    engine = EmbeddedEngine(policy, 4)
    requests = requests_of([[1] * 10_000, [1]], Sampling(4), 1)
    try:
        engine.complete(requests if policy.topology.rank == 0 else [])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_prompt_that_is_too_long_is_refused_on_every_rank(ranks):
    first, second = ranks.run(2, too_long, {})
    assert first == second and first.startswith("ConfigError: a prompt of 10000 tokens")
