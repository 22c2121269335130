"""Run one training step of large models on fake GPUs, and print what each rank needs:

    python benchmarks/plan_memory.py                        # all cases, less than two minutes on one core
    python benchmarks/plan_memory.py --case llama --places  # the cases with this in their name, with what holds memory

No GPU and no weights are needed. The layers are the portable ones, the precision is bf16, and a microbatch has one
sequence of 8,192 tokens unless the case says otherwise. All layers are run.

The columns are:

    static       weights, gradients and optimizer state, in GiB
    peak         the highest sum of live tensors in the step, in GiB; without the allocator's own overhead, and without
                 what CUDA and NCCL need
    TFLOP        matrix products and attention of the step on this rank; causal attention counts as if it were whole
    operators    kernels launched in the step
    waits        how often the host waits for the GPU in the step
    seconds      how long the plan took
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from rl_megatron.config.loading.load import load_config
from rl_megatron.plan.ledger import Ledger
from rl_megatron.plan.run import find_stage, run_phases
from rl_megatron.plan.workload import Workload

_GIB = 2**30
_TOKENS = 8192
_COMMON = (
    "algorithm=grpo", "data.task.name=arithmetic", "precision=bf16", "loss.reference_policy_kl_penalty=0",
    f"model.max_sequence_length={_TOKENS}", "train.batching=padded", "train.micro_batch_size=1",
)  # fmt: skip
_LLAMA = ("model=llama3_1_8b", "model.vocab_size=128256")
_QWEN = ("model=qwen3_30b_a3b", "model.vocab_size=151936")
_DEEP = ("parallel.sequence=true", "parallel.pipeline=4", "parallel.context=2")


@dataclass(frozen=True)
class Case:
    """A model in a layout.

    Attributes:
        name: What the table calls it.
        world_size: The number of ranks.
        stages: The pipeline stages of which one rank is run.
        overrides: The configuration.
        microbatches: The microbatches of the step on each data-parallel rank.
        tokens: The tokens of a sequence.
    """

    name: str
    world_size: int
    overrides: tuple[str, ...]
    stages: tuple[int, ...] = (0,)
    microbatches: int = 8
    tokens: int = _TOKENS

    def workload(self) -> Workload:
        """Return what is planned."""
        stage = load_config([*_COMMON, *self.overrides]).first
        assert stage.model.vocab_size is not None  # the overrides set it
        workload = Workload(stage, self.world_size, stage.model.vocab_size, 64, self.tokens - 64)
        packed = stage.train.micro_batch_tokens // self.tokens if stage.train.batching == "packed" else 1
        sequences = self.microbatches * packed * workload.data
        algorithm = replace(stage.algorithm, prompts_per_step=sequences // 2, samples_per_prompt=2)
        train = replace(stage.train, global_batch_size=sequences)
        return replace(workload, stage=replace(stage, algorithm=algorithm, train=train))


_TP8 = (*_DEEP, "parallel.tensor=8")
_TP4 = ("parallel.tensor=4", "parallel.sequence=true")
CASES = (
    Case("llama, 1,024 ranks: tensor 8, pipeline 4, context 2", 1024, (*_LLAMA, *_TP8), (0, 1, 3)),
    Case("llama, 1,024 ranks, fused head", 1024, (*_LLAMA, *_TP8, "train.fused_head=true"), (3,)),
    Case(
        "llama, 1,024 ranks, interleaved 2, full recomputation", 1024,
        (*_LLAMA, *_TP8, "parallel.virtual_pipeline=2", "model.recompute=full"),
    ),
    Case("llama, 8 ranks", 8, _LLAMA, microbatches=2),
    Case(
        "llama, 8 ranks, full recomputation, fused head", 8, (*_LLAMA, "model.recompute=full", "train.fused_head=true"),
        microbatches=2,
    ),
    Case("llama, 8 ranks: tensor 4", 8, (*_LLAMA, *_TP4), microbatches=2),
    Case(
        "llama, 8 ranks: tensor 4, packs of 32,768 tokens", 8,
        (*_LLAMA, *_TP4, "train.batching=packed", "train.micro_batch_tokens=32768"), microbatches=2,
    ),
    Case(
        "llama, 4 layers, 2 ranks: context 2, 32,768 tokens", 2,
        (*_LLAMA, "model.num_layers=4", "parallel.context=2", "model.max_sequence_length=32768"),
        microbatches=2, tokens=32768,
    ),
    Case(
        "qwen3 30b-a3b, 512 ranks: tensor 4, pipeline 4, context 2, expert 16", 512,
        (*_QWEN, *_DEEP, "parallel.tensor=4", "parallel.expert=16"), (0, 1, 3),
    ),
    Case(
        "qwen3 30b-a3b, 8 ranks: expert 8, fused head", 8, (*_QWEN, "parallel.expert=8", "train.fused_head=true"),
        microbatches=2,
    ),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="run the cases that have this in their name")
    parser.add_argument(
        "--places", type=int, nargs="?", const=8, default=0, help="print so many places that hold memory"
    )
    options = parser.parse_args(arguments)
    console = Console(width=160)
    table = Table("case", "stage", "static", "peak", "TFLOP", "operators", "waits", "seconds")
    for case in CASES:
        if options.case not in case.name:
            continue
        workload = case.workload()
        for stage in case.stages:
            rank, ledger = stage * case.world_size // workload.stage.parallel.pipeline, Ledger(bool(options.places))
            began = time.perf_counter()
            build, train = (each.use() for each in run_phases(workload, rank, ledger, ["train"]))
            seconds = time.perf_counter() - began
            static = build.peak.parameters + build.peak.gradients + build.peak.optimizer
            table.add_row(
                case.name, f"{find_stage(workload, rank)}", f"{static / _GIB:.2f}", f"{train.peak_bytes / _GIB:.2f}",
                f"{train.flops / 1e12:.1f}", f"{train.kernels:,}", f"{sum(count for _, count in train.syncs):,}",
                f"{seconds:.1f}",
            )  # fmt: skip
            for place, num_bytes in ledger.held_at_peak.most_common(options.places or None) if options.places else ():
                console.print(f"{num_bytes / _GIB:8.2f} GiB {place}")
    console.print(table)


if __name__ == "__main__":
    main()
