"""The estimated time of a step, and the share of the GPU's FLOPs that it uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl_megatron.model.flops import count_forward_flops
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.estimate import PhaseSeconds, phase_seconds
from rl_megatron.plan.phases import PhaseName, PhaseUse, RankUse
from rl_megatron.plan.settings import Settings

_NOT_OF_STEP = ("build", "save")  # a step does not build, and rarely saves
_OF_ROLLOUTS = ("logprobs", "reference", "values")  # one pass over all sequences of a step, before its updates


@dataclass(frozen=True)
class StepEstimate:
    """An estimate of the time of a step.

    Attributes:
        phases: The time of each phase, on the pipeline stage that takes longest for it.
        uses: What that stage uses in the phase.
        seconds: The time of a step.
        mfu: Model FLOPs utilisation of training: the operations that its result depends on, as a share of what the
            GPUs can do in that time. Attention is causal, and the head counts for tokens that are learned from.
        tokens_per_second: Tokens that all GPUs learn from in a second of the step, prompts included.
    """

    phases: dict[str, PhaseSeconds]
    uses: dict[str, PhaseUse]
    seconds: float
    mfu: float
    tokens_per_second: float


def estimate_step(uses: Sequence[RankUse], settings: Settings, cluster: Cluster) -> StepEstimate:
    """Return an estimate of the time of a step.

    Args:
        uses: What ranks of the pipeline's stages use.
        settings: The settings of the workload.
        cluster: The cluster.
    """
    parallel, phases, chosen = settings.shape.parallel, {}, {}
    ranks_of_stage = cluster.world_size // parallel.pipeline
    for use in uses:
        for phase in use.phases:
            if phase.name in _NOT_OF_STEP:
                continue
            batches = settings.batches
            consecutive = settings.mean_number(batches.rollout if phase.name in _OF_ROLLOUTS else batches.step)
            computed = _computed_share(settings, phase.name, use.rank // ranks_of_stage)
            seconds = phase_seconds(phase, cluster, parallel, settings.precision, consecutive, computed)
            if phase.name not in phases or seconds.total > phases[phase.name].total:
                phases[phase.name], chosen[phase.name] = seconds, phase
    total = sum(seconds.total for seconds in phases.values())
    training, peak = phases["train"].total, cluster.gpu.tflops(settings.precision) * 1e12
    tokens = settings.batches.learned_sequences * (settings.prompt_tokens + settings.mean_response_tokens)
    return StepEstimate(phases, chosen, total, _model_flops(settings) / (training * peak), tokens / total)


def _model_flops(settings: Settings) -> float:
    """Return the mean operations of a training step on a rank that its result depends on.

    The model FLOPs utilisation is their share of what the GPU can do in the time of the step. Padding does not count,
    and the head counts for tokens that are learned from.
    """
    stages = settings.shape.parallel.pipeline
    whole = settings.microbatch
    real = replace(whole, padded_lengths=whole.lengths)
    total = sum(count_forward_flops(settings.shape, stage, real, fused_head=True).of_model for stage in range(stages))
    of_rank = settings.batches.learned_sequences / settings.shape.data
    return settings.useful_share * of_rank / len(whole.lengths) * total / stages


def _computed_share(settings: Settings, name: PhaseName, stage: int) -> float:
    """Return the share of a phase's operations that kernels compute: causal attention skips pairs of tokens.

    Args:
        settings: The settings of the workload.
        name: The phase.
        stage: The pipeline stage.
    """
    learns, reads = name in ("train", "train_critic"), name in ("logprobs", "reference", "values")
    if not learns and not reads:
        return 1.0
    head = "score" if name in ("train_critic", "values") else settings.shape.head
    shape = replace(settings.shape, head=head)
    flops = count_forward_flops(shape, stage, settings.microbatch, fused_head=settings.fused_head, all_tokens=reads)
    if reads:
        return flops.computed.total / flops.total
    recompute = shape.model.recompute
    return flops.computed.with_backward(recompute) / flops.with_backward(recompute)
