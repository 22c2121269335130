"""Choose the pipeline stages that stand for all: the first, the last, and of the others the fullest and the slowest."""

from __future__ import annotations

from rl_megatron.plan.closed_use import estimate_use
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.settings import Settings
from rl_megatron.plan.step import estimate_step


def stages_to_plan(settings: Settings, cluster: Cluster) -> list[int]:
    """Return the stages, in their order, by closed forms."""
    first, *middle = settings.shape.stages_of_kinds()
    last = middle.pop() if middle else first
    chosen = {first, last}
    if middle:
        uses = {stage: estimate_use(settings, stage) for stage in middle}
        chosen.add(max(middle, key=lambda stage: uses[stage].peak_phase.peak_bytes))
        chosen.add(max(middle, key=lambda stage: estimate_step([uses[stage]], settings, cluster).seconds))
    return sorted(chosen)
