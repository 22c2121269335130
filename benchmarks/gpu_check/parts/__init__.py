"""The parts, in the order in which they run. Each is a module of this package.

Its function `run(setting, record)` makes checks and reports figures, and `rows(tiny)` returns the figures' names. A
part that compares with values which need no GPU has `expect(setting)`. It computes all of them for a bundle, by the
keys that `run` gives to `setting.expected`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        name: The name of its module.
        meaning: What it says about a GPU.
        seconds: When it is ended.
        bundle_seconds: When it is ended on a GPU with a bundle, which has its expected values.
        least_seconds: It is not begun if less time is left.
        alone: Whether it runs alone, because it measures times. The others run at the same time as their neighbours.
        is_default: Whether it runs if no part is named.
    """

    name: str
    meaning: str
    seconds: int
    bundle_seconds: int
    least_seconds: int
    alone: bool = True
    is_default: bool = True


PARTS = {
    part.name: part
    for part in (
        Part("environment", "the GPU is usable, and every package is there", 120, 60, 10),
        Part("smoke", "losses, gradients, steps and greedy tokens are those of the CPU", 300, 75, 15),
        Part("attention", "the attention kernel beside torch's others", 120, 40, 10),
        Part("kernels", "logprobs and the fused head against their lower bounds", 300, 110, 30),
        Part("train_step", "a step of GRPO against bare megatron-core", 300, 110, 30),
        Part("decode", "tokens per second of the embedded engine", 240, 80, 25),
        Part("memory", "the peak is the one that `rl-megatron plan` gives", 300, 90, 30, alone=False),
        Part("syncs", "the host waits for the GPU as often as was planned", 240, 90, 30, alone=False),
        Part("tests", "`pytest tests/gpu`", 420, 110, 40, alone=False),
        Part("weight_sync", "weights reach an engine's process by CUDA IPC", 300, 90, 30, alone=False),
        Part("checkpoints", "a checkpoint is the same on a GPU and on the CPU", 300, 90, 30, alone=False),
        Part("grpo", "a GRPO run in bf16 to its end", 300, 90, 30, alone=False),
        Part("te", "Transformer Engine's layers beside the portable ones", 300, 90, 30),
        Part("nccl", "layouts and a weight sync over NCCL, on two GPUs", 300, 120, 30),
    )
}
