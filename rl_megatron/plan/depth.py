"""The same workload with fewer layers, from two of which the use of a deep stack of equal layers follows."""

from __future__ import annotations

from dataclasses import replace

from rl_megatron.model.sharded_shape import ShardedShape
from rl_megatron.plan.workload import Workload

_SHALLOW = 2  # equal layers of a model chunk, or periods of them, in the shallower of the two runs


def two_depths(workload: Workload, stage: int) -> tuple[Workload, Workload, float] | None:
    """Return a shallow and a deeper workload, and f so that use = shallow + f · (deeper − shallow) on a pipeline stage.

    Layers may differ in two ways. The first few may be dense while the others have experts: the runs then have as many
    dense layers, and fewer of the others. Every few layers, one may attend to all tokens while the others have a
    window or the gated delta rule: the runs then have whole periods. The result is None if the layers differ in another
    way, or are few.
    """
    model, parallel = workload.stage.model, workload.stage.parallel
    shape = ShardedShape(model, parallel, workload.world_size, workload.vocab_size, workload.head)
    model_chunks = shape.layers(stage)
    depth = len(model_chunks[0])
    if any(len(layers) != depth for layers in model_chunks):
        return None
    of_windows = model.global_attention_every if model.sliding_window is not None else None
    period = of_windows or model.full_attention_every or 1
    of_dense = model.first_dense_layers if model.num_experts is not None else 0
    if of_dense and (parallel.virtual_pipeline > 1 or of_dense > len(shape.layers(0)[0])):
        return None
    dense = of_dense if stage == 0 else 0  # dense layers of this stage
    varied = depth - dense
    shallow = _SHALLOW * period
    if varied % period or (period > 1 and any(layers.start % period for layers in model_chunks)):
        return None
    if varied <= 2 * shallow + 1 or (of_dense and not dense and of_dense > shallow):
        return None
    runs = [_with_depth(workload, dense + count) for count in (shallow, 2 * shallow)]
    return runs[0], runs[1], (varied - shallow) / shallow


def _with_depth(workload: Workload, depth: int) -> Workload:
    """Return the workload with `depth` layers in every model chunk."""
    stage = workload.stage
    parallel = replace(stage.parallel, first_stage_layers=None, last_stage_layers=None)
    model = replace(stage.model, num_layers=depth * parallel.pipeline * parallel.virtual_pipeline)
    return replace(workload, stage=replace(stage, model=model, parallel=parallel))
