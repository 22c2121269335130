"""A rollout engine in other processes: which parts of it a plan omits, and how much GPU memory its servers use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from rl_megatron.config.engines import releases_memory, shares_gpus
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.model.sharded_shape import ShardedShape
from rl_megatron.plan.closed_forms import element_bytes
from rl_megatron.plan.devices import GIB, Cluster
from rl_megatron.plan.phases import PhaseUse
from rl_megatron.plan.workload import Workload

_SHARE = 0.92  # vLLM's default of gpu_memory_utilization
_WITHOUT_SERVERS = ("build",)  # servers start after the policy was built


@dataclass(frozen=True)
class Servers:
    """The engine's processes.

    Attributes:
        releases_memory: Whether the servers release their memory while the policy trains.
        bytes_on_gpu: The memory of a server on a GPU that it shares with the policy, or 0 on GPUs of its own.
    """

    engine: str
    releases_memory: bool
    bytes_on_gpu: int

    @classmethod
    def from_workload(cls, workload: Workload, cluster: Cluster) -> Self | None:
        """Return the processes of a workload's engine, or None if there are none, as if the policy itself generates."""
        if not workload.syncs_weights:
            return None
        stage, generation, num_bytes = workload.stage, workload.stage.generation, 0
        if generation.engine == "vllm" and shares_gpus(generation):
            settings = generation.vllm
            num_bytes = round((settings.gpu_memory_utilization or _SHARE) * cluster.gpu.memory_gib * GIB)
            if settings.kv_cache_memory_bytes is not None:
                weights = element_bytes(stage.precision) * sum(
                    ShardedShape(stage.model, ParallelConfig(), 1, workload.vocab_size).elements(0)
                )
                num_bytes = settings.kv_cache_memory_bytes + weights // settings.tensor_parallel_size
        return cls(generation.engine, releases_memory(generation), num_bytes)

    def add_memory_to(self, phases: Iterable[PhaseUse]) -> tuple[PhaseUse, ...]:
        """Add the memory of servers on the policy's GPUs to each phase in which they hold it.

        All servers hold it during `refit`: at the first weight sync, they have just started.
        """
        return tuple(
            replace(phase, peak=replace(phase.peak, servers=self.bytes_on_gpu))
            if phase.name == "refit" or not (self.releases_memory or phase.name in _WITHOUT_SERVERS)
            else phase
            for phase in phases
        )

    @property
    def note(self) -> str:
        """Return what the plan omits, for the reader."""
        runs = f"Generation runs in processes of engine {self.engine}"
        if not self.bytes_on_gpu:
            return f"{runs} and is in neither the time nor the memory."
        when = "in the phase refit" if self.releases_memory else "in every phase"
        return (
            f"{runs} and is not in the time. Servers on the policy's GPUs take {self.bytes_on_gpu / GIB:.1f} GiB of "
            f"each, counted {when}."
        )
