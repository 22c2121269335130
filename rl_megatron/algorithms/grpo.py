"""GRPO: sample groups of completions, score them, and move towards the better ones of each group.

Source: DeepSeekMath, arXiv 2402.03300; dynamic sampling from DAPO, 2503.14476.
"""

from __future__ import annotations

from rl_megatron.algorithms.inputs import sampling, stage_task, training_problems
from rl_megatron.algorithms.rollout import join, keep_informative, logprob_mismatch, sample_groups, statistics
from rl_megatron.algorithms.stage import Stage
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.order import BatchSchedule
from rl_megatron.losses import build_loss

# What rollouts carry when they reach the loss.
ROLLOUT_KEYS = frozenset(
    "input_ids input_lengths token_mask sample_mask rewards advantages temperature generation_logprobs prev_logprobs "
    "reference_policy_logprobs".split()
)
_ROUNDS_PER_SEED = 1000  # seeds of a step's rounds lie apart


def grpo(stage: Stage) -> None:
    algorithm = stage.config.algorithm
    loss_fn = build_loss(**split_name(stage.config.loss))
    needs_reference = "reference_policy_logprobs" in loss_fn.required_keys
    if needs_reference:
        stage.policy.freeze_reference()
    collect = _collector(stage)

    for step in stage.steps():
        rollouts, outcome = collect(step)
        rollouts["prev_logprobs"] = stage.policy.get_logprobs(rollouts)["logprobs"]
        if needs_reference:
            reference = stage.policy.get_reference_policy_logprobs(rollouts)
            rollouts["reference_policy_logprobs"] = reference["reference_logprobs"]
        for _ in range(algorithm.updates_per_rollout):
            report = stage.train(step, rollouts, loss_fn)
        stage.record(step, report | outcome | logprob_mismatch(rollouts))


def split_name(loss: dict) -> dict:
    """{name, **keys} → the arguments of `build_loss`."""
    return {"name": loss["name"], "cfg": {key: value for key, value in loss.items() if key != "name"}}


def _collector(stage: Stage):
    """step → (rollouts, statistics). Which prompts and random numbers a step uses depends on its number alone."""
    config, algorithm = stage.config, stage.config.algorithm
    task = stage_task(config)
    problems = training_problems(config, task)
    order = BatchSchedule(len(problems), algorithm.prompts_per_step, config.train.seed)
    drawn = sampling(config, stage.tokenizer)
    group_size = algorithm.samples_per_prompt
    max_rounds = algorithm.dynamic_sampling_max_rounds if algorithm.dynamic_sampling else 1

    def collect(step: int) -> tuple[BatchedDataDict, dict[str, float]]:
        kept, seen = [], []
        wanted = algorithm.prompts_per_step * group_size
        for round_ in range(max_rounds):
            chosen = [problems[row] for row in order.rows_at((step - 1) * max_rounds + round_)]
            seed = (config.train.seed * 1_000_003 + step) * _ROUNDS_PER_SEED + round_
            rollouts = sample_groups(stage.engine, stage.tokenizer, task, chosen, drawn, seed, algorithm)
            seen.append(rollouts)
            kept.append(keep_informative(rollouts, group_size) if algorithm.dynamic_sampling else rollouts)
            if sum(part.size for part in kept) >= wanted:
                break
        outcome = statistics(join(seen, max_rounds * wanted), group_size)
        if algorithm.dynamic_sampling:
            outcome["sampling_rounds"] = float(len(seen))
            kept = [part for part in kept if part.size] or seen[-1:]  # no group differed: a step without gradient
        return join(kept, wanted), outcome

    return collect
