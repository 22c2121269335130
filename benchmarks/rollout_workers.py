"""Measure what rollout workers cost where a completion is all that is wanted: steps of GRPO with and without them.

    python -m benchmarks.rollout_workers completion
    torchrun --nproc-per-node 2 -m benchmarks.rollout_workers completion parallel.tensor=2

It prints what the worker `completion` adds to a step, from pairs of steps with the same samples (see paired_steps.py).
The steps without give their prompts to the rollout engine at once, and score what it returns. Other arguments are
overrides.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from benchmarks.paired_steps import Switch, compare, parser, when_on
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.rewards.samples import Sample
from rl_megatron.rollouts.scored import Scored, ScoredRollouts
from rl_megatron.timing import phase


def directly(
    rollouts: ScoredRollouts,
    engine: RolloutEngine,
    prompts: Sequence[EncodedPrompt],
    sampling: Sampling,
    seed: int,
    group_size: int = 1,
) -> Scored | None:
    """Return what `ScoredRollouts.make` returns, without trajectories."""
    leads = rollouts.runner.ranks.leads
    batch = generate(engine, [prompt.ids for prompt in prompts], sampling, seed)
    with phase("reward"):
        ids = [
            sequence[start:end]
            for sequence, start, end in zip(
                batch["input_ids"].tolist(), batch["prompt_lengths"].tolist(), batch["input_lengths"].tolist(),
                strict=True,
            )
        ]  # fmt: skip
        stopped = batch["stopped"].tolist()
        samples = [
            Sample(prompt.problem, rollouts.tokenizer.decode(own), own, not is_whole)
            for prompt, own, is_whole in zip(prompts, ids, stopped, strict=True)
        ]
        rewards, metrics = rollouts.scorer.score_samples(samples if leads else ())
    if not leads:
        return None
    batch["rewards"] = rewards
    made = torch.ones(len(samples), dtype=torch.bool)
    return Scored(samples, made, rewards, metrics, batch, [len(each) for each in ids])


def without_workers(switch: Switch) -> None:
    """Let every second step go without rollout workers."""
    when_on(switch, ScoredRollouts, "make", directly)


MEASURED = {"completion": without_workers}


def main(arguments: list[str]) -> int:
    """Run the steps, and print on rank 0 what is added to a step."""
    given = parser(__doc__, list(MEASURED)).parse_args(arguments)
    return compare(given.what, MEASURED[given.what], given.overrides)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
