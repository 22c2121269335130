"""The parts, in the order in which they run. Each is a module of this package with a function `run`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        name: The name of its module.
        meaning: What it says about a GPU.
        seconds: When it is ended.
    """

    name: str
    meaning: str
    seconds: int


PARTS = {
    part.name: part
    for part in (
        Part("environment", "the GPU is usable, and every package is there", 120),
        Part("tests", "`pytest tests/gpu`", 420),
        Part("equality", "loss, gradient norm and logprobs are those of the CPU", 300),
        Part("syncs", "the host waits for the GPU as often as was planned", 180),
        Part("memory", "the peak is the one that `rl-megatron plan` gives", 300),
        Part("kernels", "logprobs and the fused head against their lower bounds", 300),
        Part("train_step", "a step of GRPO against bare megatron-core", 240),
        Part("decode", "tokens per second of the embedded engine", 240),
        Part("weight_sync", "weights reach an engine's process by CUDA IPC", 240),
        Part("checkpoints", "a checkpoint is the same on a GPU and on the CPU", 240),
        Part("grpo", "a GRPO run in bf16 to its end", 300),
        Part("nccl", "layouts and a weight sync over NCCL, on two GPUs", 300),
    )
}
