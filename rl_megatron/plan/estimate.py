"""Estimate the time of a step from what ranks use and from the numbers of a cluster: a roofline, not a measurement.

docs/plan.md has the formulas, and what they leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.model.flops import count_forward_flops
from rl_megatron.plan.closed_use import estimate_use
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.phases import Collective, PhaseName, PhaseUse, RankUse
from rl_megatron.plan.settings import Settings

SECONDS_PER_LAUNCH = 5e-6  # host time to launch an operator; the host runs ahead of the GPU unless operators are small
_SECONDS_PER_COLLECTIVE = 20e-6  # in addition to the time for its bytes
# How often one of n ranks sends (n − 1) / n of the whole tensor's bytes; once if not listed.
_TIMES_SENT = {"all_reduce": 2.0}
_ROLLOUT_PASSES = ("logprobs", "reference", "values")  # one pass over all sequences of a step, before its updates
_SEQUENCE_PHASES = (*_ROLLOUT_PASSES, "train_critic", "train")  # whole sequences, in pipelined microbatches
_OUTSIDE_STEP = ("build", "save")  # a step builds no model, and rarely saves a checkpoint
_MESSAGES = frozenset({"send", "recv"})
_WHOLE = _MESSAGES | {"broadcast"}  # these send the whole tensor


@dataclass(frozen=True)
class PhaseSeconds:
    """An estimate of the time of a phase.

    Attributes:
        compute: Matrix products and attention.
        memory: Reading and writing the operands of all operators.
        launch: The host's time to launch the operators.
        communication: Collectives, none of which is assumed to overlap with computation.
        waiting: The time in which a pipeline stage waits for others.
    """

    compute: float
    memory: float
    launch: float
    communication: float
    waiting: float

    @property
    def total(self) -> float:
        """Return the time of the phase. Launching overlaps with computing, so only the longer one counts."""
        return max(self.compute + self.memory, self.launch) + self.communication + self.waiting


def estimate_phase(
    use: PhaseUse,
    cluster: Cluster,
    parallel: ParallelConfig,
    precision: str,
    microbatches: int,
    computed_share: float = 1.0,
) -> PhaseSeconds:
    """Estimate the time of a phase on a pipeline stage from what a rank of the stage uses.

    Args:
        use: What the phase uses on a rank of the stage.
        cluster: The cluster.
        parallel: The layout.
        precision: "bf16" or "fp32".
        microbatches: The number of microbatches that pass through the pipeline back to back.
        computed_share: The share of the phase's operations that kernels compute.
    """
    compute = computed_share * use.flops / (cluster.compute_efficiency * cluster.gpu.tflops(precision) * 1e12)
    memory = use.memory_bytes / (cluster.memory_efficiency * cluster.gpu.memory_gb_per_s * 1e9)
    launch = use.kernels * SECONDS_PER_LAUNCH
    seconds = [(collective, estimate_collective(collective, cluster, parallel)) for collective in use.collectives]
    communication = sum(time for _, time in seconds)
    in_pipeline = sum(time for collective, time in seconds if collective.group not in ("data", "world"))
    busy = max(compute + memory, launch) + in_pipeline
    return PhaseSeconds(compute, memory, launch, communication, busy * _waiting_share(use, parallel, microbatches))


def _waiting_share(use: PhaseUse, parallel: ParallelConfig, microbatches: int) -> float:
    """Return the time that a stage waits for others, as a share of the time in which it computes."""
    others = parallel.pipeline - 1
    if use.name == "generate":
        return float(others)  # a token passes all stages before the next token begins
    if use.name in _SEQUENCE_PHASES:
        return others / (microbatches * parallel.virtual_pipeline)
    return 0.0


def estimate_collective(collective: Collective, cluster: Cluster, parallel: ParallelConfig) -> float:
    """Estimate the time of equal collectives: to send their bytes over the slowest link, plus a latency for each.

    Each GPU has a network card of its own. If a group spans several nodes, it uses one ring for each of its ranks on a
    node, so these ranks' network cards share the bytes. In an all-to-all, each rank sends to ranks of its own node over
    the link, and to all others over its own network card.
    """
    size = collective.group_size
    if size < 2:
        return 0.0
    span = _span(collective, cluster, parallel)
    link, network = (x * 1e9 * cluster.link_efficiency for x in (cluster.link_gb_per_s, cluster.network_gb_per_s))
    within = max(1, min(size, size * cluster.gpus_per_node // span))  # ranks of the group in a node
    share = 1.0 if collective.kind in _WHOLE else _TIMES_SENT.get(collective.kind, 1.0) * (size - 1) / size
    if within == size:
        seconds_per_byte = share / link
    elif collective.kind == "all_to_all":
        seconds_per_byte = max((size - within) / size / network, (within - 1) / size / link)
    elif collective.kind in _MESSAGES:
        seconds_per_byte = share / network
    else:
        seconds_per_byte = share / min(link, within * network)
    return collective.count * (_SECONDS_PER_COLLECTIVE + collective.bytes * seconds_per_byte)


def _span(collective: Collective, cluster: Cluster, parallel: ParallelConfig) -> int:
    """Return how many consecutive ranks the group of a collective spans."""
    stage_ranks = cluster.world_size // parallel.pipeline
    return {
        "tensor": parallel.tensor,
        "context": parallel.tensor * parallel.context,
        "expert": parallel.expert * parallel.expert_tensor,
        "data": stage_ranks,
        "pipeline": cluster.world_size if parallel.pipeline > 2 else 2 * stage_ranks,
        "world": cluster.world_size,
    }[collective.group]


@dataclass(frozen=True)
class StepEstimate:
    """An estimate of the time of a step.

    Attributes:
        phases: The time of each phase, on the pipeline stage that is slowest in it.
        uses: What that stage uses in the phase.
        mfu: Model FLOPs utilisation of training: the operations that the result depends on, as a share of what the GPUs
            can do in the phase's time. Attention counts as causal, and the head only for tokens that are trained on.
        tokens_per_second: The tokens of all sequences that a step trains on, prompts included, divided by the time of
            the step.
    """

    phases: dict[str, PhaseSeconds]
    uses: dict[str, PhaseUse]
    seconds: float
    mfu: float
    tokens_per_second: float


def estimate_step(uses: Sequence[RankUse], settings: Settings, cluster: Cluster) -> StepEstimate:
    """Estimate the time of a step from what one rank of each planned pipeline stage uses."""
    parallel, phases, chosen = settings.shape.parallel, {}, {}
    ranks_of_stage = cluster.world_size // parallel.pipeline
    for use in uses:
        for phase in use.phases:
            if phase.name in _OUTSIDE_STEP:
                continue
            batches = settings.batches
            consecutive = settings.mean_number(batches.rollout if phase.name in _ROLLOUT_PASSES else batches.step)
            computed = _computed_share(settings, phase.name, use.rank // ranks_of_stage)
            seconds = estimate_phase(phase, cluster, parallel, settings.precision, consecutive, computed)
            if phase.name not in phases or seconds.total > phases[phase.name].total:
                phases[phase.name], chosen[phase.name] = seconds, phase
    total = sum(seconds.total for seconds in phases.values())
    training, peak = phases["train"].total, cluster.gpu.tflops(settings.precision) * 1e12
    tokens = settings.batches.learned_sequences * (settings.prompt_tokens + settings.mean_response_tokens)
    return StepEstimate(phases, chosen, total, _model_flops(settings) / (training * peak), tokens / total)


def _model_flops(settings: Settings) -> float:
    """Return the model FLOPs of a training step, as the mean over ranks: the operations that its result depends on.

    Padding does not count, and the head counts only for tokens that are trained on.
    """
    stages = settings.shape.parallel.pipeline
    whole = settings.microbatch
    real = replace(whole, padded_lengths=whole.lengths)
    total = sum(count_forward_flops(settings.shape, stage, real, fused_head=True).of_model for stage in range(stages))
    rank_sequences = settings.batches.learned_sequences / settings.shape.data
    return settings.useful_share * rank_sequences / len(whole.lengths) * total / stages


def _computed_share(settings: Settings, name: PhaseName, stage: int) -> float:
    """Return the share of a phase's operations that kernels compute; kernels of causal attention skip masked tokens."""
    reads = name in _ROLLOUT_PASSES
    if name not in _SEQUENCE_PHASES:
        return 1.0
    head = "score" if name in ("train_critic", "values") else settings.shape.head
    shape = replace(settings.shape, head=head)
    flops = count_forward_flops(shape, stage, settings.microbatch, fused_head=settings.fused_head, all_tokens=reads)
    if reads:
        return flops.computed.total / flops.total
    recompute = shape.model.recompute
    return flops.computed.with_backward(recompute) / flops.with_backward(recompute)


def choose_stages(settings: Settings, cluster: Cluster) -> list[int]:
    """Choose the pipeline stages to plan: the first, the last, and of the middle ones, the fullest and the slowest.

    Closed forms find the latter two. The stages are returned in their order.
    """
    first, *middle = settings.shape.stages_of_kinds()
    last = middle.pop() if middle else first
    chosen = {first, last}
    if middle:
        uses = {stage: estimate_use(settings, stage) for stage in middle}
        chosen.add(max(middle, key=lambda stage: uses[stage].peak_phase.peak_bytes))
        chosen.add(max(middle, key=lambda stage: estimate_step([uses[stage]], settings, cluster).seconds))
    return sorted(chosen)


def apply_mean_lengths(use: RankUse, settings: Settings) -> RankUse:
    """Scale a rank's use, counted with the longest responses, to responses of mean length. Peaks are unchanged."""
    response_share = settings.mean_response_tokens / settings.response_tokens
    batches = settings.batches
    shares = {"generate": (response_share, response_share)}
    for name in _SEQUENCE_PHASES:
        is_training = name.startswith("train")
        batch = batches.training if is_training else batches.rollout
        number = settings.mean_number(batch, batches.optimizer_steps if is_training else 1)
        shares[name] = (settings.computed_share, number / batch.number)
    return replace(use, phases=tuple(_scale(phase, *shares.get(phase.name, (1.0, 1.0))) for phase in use.phases))


def _scale(phase: PhaseUse, share: float, call_share: float) -> PhaseUse:
    """Scale the operations and bytes of a phase by `share`, and the number of its calls by `call_share`."""
    if share == call_share == 1.0:
        return phase
    return replace(
        phase,
        flops=round(share * phase.flops),
        kernels=round(call_share * phase.kernels),
        memory_bytes=round(share * phase.memory_bytes),
        collectives=tuple(
            replace(
                collective,
                bytes=round(collective.bytes * share / call_share),
                count=max(1, round(collective.count * call_share)),
            )
            if _is_of_tokens(collective)
            else collective
            for collective in phase.collectives
        ),
    )


def _is_of_tokens(collective: Collective) -> bool:
    """Return whether a collective communicates activations, not gradients or weights."""
    return collective.group in ("tensor", "context", "expert") or collective.kind in ("send", "recv")
