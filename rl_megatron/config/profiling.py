"""The settings of profiles: what the ranks and their GPUs do in chosen steps."""

from __future__ import annotations

from rl_megatron.config.field_types import NonNegative, Positive, section


@section
class ProfileConfig:
    """Profiles of chosen steps, in the directory profiles/STAGE of output_dir."""

    steps: tuple[Positive, ...] = ()  # the steps that are profiled
    ranks: tuple[NonNegative, ...] = (0,)  # ranks whose operators and kernels are recorded; phases are those of all
    with_stack: bool = False  # record the Python stack of each operator, which makes steps much slower
    memory: bool = True  # on a GPU, also write a snapshot of every allocation of these ranks
