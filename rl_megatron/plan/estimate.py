"""Estimate the time of a phase from what it uses and from the numbers of a cluster: a roofline, not a measurement.

docs/plan.md has the formulas, and what they leave out.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.phases import Collective, PhaseUse

SECONDS_PER_LAUNCH = 5e-6  # the host's time for one operator; it runs ahead of the GPU, unless operators are small
_SECONDS_PER_COLLECTIVE = 20e-6  # besides the time for its bytes
# The bytes that a rank sends, as a multiple of the whole tensor's bytes · (n − 1) / n.
_TIMES_SENT = {"all_reduce": 2.0}
_WITH_MICROBATCHES = ("logprobs", "reference", "values", "train_critic", "train")  # pipelined phases
_MESSAGES = frozenset({"send", "recv"})
_WHOLE = _MESSAGES | {"broadcast"}  # these send the whole tensor


@dataclass(frozen=True)
class PhaseSeconds:
    """An estimate of the time of a phase.

    Attributes:
        compute: Matrix products and attention.
        memory: Reading and writing the operands of all operators.
        launch: What the host takes to launch the operators.
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
        """Return the time of the phase: the host launches operators while the GPU computes."""
        return max(self.compute + self.memory, self.launch) + self.communication + self.waiting


def phase_seconds(
    use: PhaseUse,
    cluster: Cluster,
    parallel: ParallelConfig,
    precision: str,
    microbatches: int,
    computed_share: float = 1.0,
) -> PhaseSeconds:
    """Return an estimate of the time of a phase.

    Args:
        use: What the phase uses on a rank of the slowest pipeline stage.
        cluster: The cluster.
        parallel: The layout.
        precision: "bf16" or "fp32".
        microbatches: The microbatches that follow each other in the pipeline without a pause.
        computed_share: The share of the phase's operations that kernels compute.
    """
    compute = computed_share * use.flops / (cluster.compute_efficiency * cluster.gpu.tflops(precision) * 1e12)
    memory = use.memory_bytes / (cluster.memory_efficiency * cluster.gpu.memory_gb_per_s * 1e9)
    launch = use.kernels * SECONDS_PER_LAUNCH
    seconds = [(collective, collective_seconds(collective, cluster, parallel)) for collective in use.collectives]
    communication = sum(time for _, time in seconds)
    in_pipeline = sum(time for collective, time in seconds if collective.group not in ("data", "world"))
    busy = max(compute + memory, launch) + in_pipeline
    return PhaseSeconds(compute, memory, launch, communication, busy * _waiting_share(use, parallel, microbatches))


def _waiting_share(use: PhaseUse, parallel: ParallelConfig, microbatches: int) -> float:
    """Return the time that a stage waits for others, as a share of the time in which it computes."""
    others = parallel.pipeline - 1
    if use.name == "generate":
        return float(others)  # a token passes all stages before the next one
    if use.name in _WITH_MICROBATCHES:
        return others / (microbatches * parallel.virtual_pipeline)
    return 0.0


def collective_seconds(collective: Collective, cluster: Cluster, parallel: ParallelConfig) -> float:
    """Return an estimate of the time of equal collectives: their bytes over the slowest link, and a latency each.

    Each GPU has a network card of its own. A ring over several nodes enters and leaves a node once for each of the
    group's ranks there, so these share its bytes. In an all-to-all, each rank sends to ranks of its own node over the
    link, and to all others over its own network card.
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
    """Return how many consecutive ranks the group of a collective lies in."""
    stage_ranks = cluster.world_size // parallel.pipeline
    return {
        "tensor": parallel.tensor,
        "context": parallel.tensor * parallel.context,
        "expert": parallel.expert * parallel.expert_tensor,
        "data": stage_ranks,
        "pipeline": cluster.world_size if parallel.pipeline > 2 else 2 * stage_ranks,
        "world": cluster.world_size,
    }[collective.group]
