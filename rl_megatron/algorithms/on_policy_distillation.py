"""On-policy distillation: the student samples, and learns the teacher's next-token distributions on its own samples.

Source: Agarwal et al. 2023, arXiv:2306.13649; the reverse KL as an advantage, Lu et al. 2025, "On-Policy Distillation",
Thinking Machines Lab.
"""

from __future__ import annotations

from rl_megatron.algorithms.registry import LossNeeds, register_algorithm
from rl_megatron.algorithms.rollout import (
    ROLLOUT_KEYS,
    ROLLOUT_LOSS,
    add_logprobs,
    check_policy_gradient,
    needs_reference,
    recomputes_logprobs,
    rollout_loss,
    uses_reference,
)
from rl_megatron.algorithms.teachers import TOPK_KEYS, WHOLE_KEYS, Teachers, check_each_teacher, uses_teacher
from rl_megatron.config.algorithms import OnPolicyDistillationConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.losses.contract import LossFunction
from rl_megatron.rollouts.sampler import Sampler
from rl_megatron.rollouts.statistics import (
    correction_statistics,
    learned_statistics,
    logprob_mismatch,
    mean_over_tokens,
)
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy


def _uses_advantages(loss_fn: LossFunction) -> bool:
    return ROLLOUT_LOSS.suits(loss_fn)


_LOSS = LossNeeds(
    "a teacher's logits or advantages",
    lambda loss_fn: uses_teacher(loss_fn) or _uses_advantages(loss_fn),
    ROLLOUT_KEYS | TOPK_KEYS | WHOLE_KEYS,
    "full_distillation, distillation or clipped_pg",
)


def _check_data(stage: StageConfig, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    algorithm: OnPolicyDistillationConfig = stage.algorithm  # pyright: ignore[reportAssignmentType] registered only for this class
    lengths, by_advantage = check_policy_gradient(stage, tokenizer), _uses_advantages(rollout_loss(stage))
    urls = [teacher.url for teacher in algorithm.teachers if teacher.url is not None]
    if urls and stage.generation.temperature != 1 and by_advantage:
        raise ConfigError(
            f"generation.temperature={stage.generation.temperature}: {urls[0]} gives logprobs of temperature "
            "1, but advantages need logprobs of the sampling temperature; set generation.temperature=1, or "
            "loss=distillation"
        )
    check_each_teacher(algorithm.teachers, stage, tokenizer, lengths, 1 if by_advantage else algorithm.top_k)
    return lengths


@register_algorithm(
    OnPolicyDistillationConfig, loss=_LOSS, uses_reference=uses_reference, check_data=_check_data,
    progress_metric="reward",
)  # fmt: skip
def on_policy_distillation(
    loop: Loop, policy: MegatronPolicy, sampler: Sampler, algorithm: OnPolicyDistillationConfig
) -> None:
    """Train the policy, which is the student, to match its teachers' next-token distributions on its own samples.

    If the loss reads a teacher's logits, this is `distillation` on the student's samples. If it reads advantages, that
    of a token y is log p(y) − log q(y) (p: teacher, q: student), and their mean estimates minus the reverse KL.
    """
    loss_fn = rollout_loss(loop.config)
    by_advantage = _uses_advantages(loss_fn)
    recompute = by_advantage and recomputes_logprobs(loop.config, algorithm, loss_fn)
    reference = needs_reference(loss_fn)
    if reference:
        policy.freeze_reference()
    from_engine = loop.config.rollout.correction == "engine"
    teachers = Teachers.load(loop, policy, algorithm.teachers, algorithm.top_k)
    whole = teachers.find_whole_teacher(loss_fn)

    for step in loop.steps():
        rollouts, outcome = sampler.collect(step)
        rollouts = policy.distribute(rollouts)
        rollouts = add_logprobs(rollouts, policy, recompute=recompute, reference=reference, from_engine=from_engine)
        rollouts = teachers.add_topk(rollouts, loss_fn)
        if by_advantage:
            student = rollouts["prev_logprobs"] if "prev_logprobs" in rollouts else rollouts["generation_logprobs"]
            difference = teachers.logprobs(rollouts) - student
            rollouts["advantages"] = difference.masked_fill(rollouts["token_mask"] == 0, 0.0)
            outcome["teacher_kl"] = -mean_over_tokens(rollouts["advantages"], rollouts)
        sampler.keep(step, rollouts)
        outcome |= learned_statistics(rollouts, policy.weight_version)
        for _ in range(algorithm.updates_per_rollout):
            report = loop.train(step, rollouts, loss_fn, teacher=whole)
        report |= correction_statistics(report)
        loop.record(step, report | outcome | logprob_mismatch(rollouts))
