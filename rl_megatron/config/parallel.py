"""The section `parallel`: the parallel layout. Rules that depend on the world size are in `topology`."""

from __future__ import annotations

from rl_megatron.config.loading.settings import Positive, section


@section
class ParallelConfig:
    """Parallel degrees. The data-parallel degree follows: world size / (tensor · pipeline · context)."""

    tensor: int = 1  # tensor-parallel degree: ranks that split each layer's matrices
    sequence: bool = False  # sequence parallelism: tensor-parallel ranks also split activations between those matrices
    pipeline: int = 1  # pipeline-parallel degree: stages that split the layers
    virtual_pipeline: int = 1  # model chunks per pipeline stage (interleaved schedule); 1: not interleaved
    context: int = 1  # context-parallel degree: ranks that split each sequence
    # Expert-parallel degree: ranks that split the experts. expert · expert_tensor must divide the number of ranks per
    # pipeline stage, tensor · context · data.
    expert: int = 1
    # Expert-tensor-parallel degree: ranks that split the matrices of every expert; 1: an expert is whole on its
    # rank. The degree tensor splits the matrices of attention and of dense and shared MLPs.
    expert_tensor: int = 1
    first_stage_layers: Positive | None = None  # layers of the first pipeline stage; null: as many as other stages
    last_stage_layers: Positive | None = None  # layers of the last pipeline stage; null: as many as other stages
