"""The teachers of a distillation: `algorithm.teachers`."""

from __future__ import annotations

from typing import Literal

from rl_megatron.config.field_types import PositiveFloat, section
from rl_megatron.config.parallel import ParallelConfig


@section
class TeacherConfig:
    """A frozen model that a student learns from."""

    path: str  # a checkpoint, or a Hugging Face directory
    weight: PositiveFloat = 1.0  # its share among several teachers; their weights need not sum to 1
    # Its own parallel layout on the same ranks, with all keys of the section parallel. null: that of the student. It is
    # for top-k logits and for advantages; loss=full_distillation compares both models in the student's layout.
    parallel: ParallelConfig | None = None
    # Where its weights are kept: on the device (resident), or in host memory between its forward passes (offload).
    placement: Literal["resident", "offload"] = "resident"
