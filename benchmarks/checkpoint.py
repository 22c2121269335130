"""Measure how long a checkpoint stops training, if it is written synchronously or in the background:

    python benchmarks/checkpoint.py
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py --directory /path/to/the/file/system

The two kinds of save alternate in one run, on one model with its optimizer's moments. The columns are:

    pause       seconds without a training step; a background save pauses to plan and copy, and to complete
    of it, end  the part of the pause that completes the save: ranks agree, the index and the manifest are written, and
                the directory is renamed
    written     seconds from the start of the save until the checkpoint is complete, digests included
    step        seconds of a training step during the save, beside those of a step without a save

All figures are medians of the repetitions, on the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from rl_megatron import log
from rl_megatron.checkpoint.directory import read_manifest
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import NLLLoss
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy

_VOCABULARY, _ROWS, _LENGTH = 8192, 4, 64


@dataclass(frozen=True)
class EvalResult:
    """The seconds of one save. `steps` has the seconds of the training steps during it."""

    pause: float
    end: float
    written: float
    steps: list[float]


def build(hidden: int, layers: int) -> MegatronPolicy:
    model = ModelConfig(num_layers=layers, hidden_size=hidden, ffn_hidden_size=3 * hidden, max_sequence_length=_LENGTH)
    layout = topology.build(ParallelConfig(), start_device(), seed=0)
    return MegatronPolicy(
        model, layout, vocab_size=_VOCABULARY, optimizer=OptimizerConfig(), total_steps=1000, global_batch_size=_ROWS
    )


def step(policy: MegatronPolicy) -> float:
    ids = torch.randint(_VOCABULARY, (_ROWS, _LENGTH), generator=torch.Generator().manual_seed(0))
    batch = BatchedDataDict(
        input_ids=ids, input_lengths=torch.full((_ROWS,), _LENGTH), token_mask=torch.ones(_ROWS, _LENGTH),
        sample_mask=torch.ones(_ROWS),
    )  # fmt: skip
    started = time.perf_counter()
    policy.train(batch, NLLLoss())
    return time.perf_counter() - started


def save(policy: MegatronPolicy, directory: Path, number: int, background: bool) -> EvalResult:
    dist.barrier()
    started = time.perf_counter()
    under_way = policy.begin_checkpoint(directory, number)
    if not background:
        while not under_way.is_written():
            time.sleep(0.005)
    begun = time.perf_counter() - started
    steps = []
    while not under_way.is_written():
        steps.append(step(policy))
    finishing = time.perf_counter()
    under_way.finish()
    done = time.perf_counter()
    return EvalResult(begun + done - finishing, done - finishing, done - started, steps)


def slowest(seconds: list[float]) -> float:
    """Return the median, on the rank where it is longest."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, statistics.median(seconds) if seconds else 0.0)
    return max(found)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where to write; default: the directory for temporary files")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parsed = parser().parse_args(arguments)
    log.setup()
    policy = build(parsed.hidden, parsed.layers)
    scratch = tempfile.TemporaryDirectory(dir=parsed.directory)  # every rank makes one; rank 0's is used
    names: list = [scratch.name]
    dist.broadcast_object_list(names, src=0)
    race(policy, Path(names[0]), parsed.repetitions)
    dist.barrier()
    scratch.cleanup()
    dist.destroy_process_group()
    return 0


def race(policy: MegatronPolicy, directory: Path, repetitions: int) -> None:
    quiet = [step(policy) for _ in range(3)]
    measured: dict[bool, list[EvalResult]] = {True: [], False: []}
    for number in range(repetitions + 1):
        for background in (False, True):
            found = save(policy, directory, 1, background)
            if number:  # the first of each kind warms up memory, the page cache and imports
                measured[background].append(found)
        quiet.append(step(policy))
    manifest = read_manifest(directory / "step-000001")
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    table = Table("", "pause s", "of it, end s", "written s", "step s", box=None, padding=(0, 2, 0, 0))
    pauses = {}
    for background, saves in measured.items():
        pauses[background] = slowest([each.pause for each in saves])
        row = [pauses[background], slowest([each.end for each in saves]), slowest([each.written for each in saves])]
        steps = [seconds for each in saves for seconds in each.steps]
        shown = f"{slowest(steps):.3f}" if background else "–"
        table.add_row("background" if background else "foreground", *(f"{value:.3f}" for value in row), shown)
    undisturbed = slowest(quiet[1:])
    if dist.get_rank() == 0:
        console = Console(highlight=False)
        console.print(f"{size:,} bytes from {dist.get_world_size()} rank(s), torch {torch.__version__}")
        console.print(table)
        console.print(f"a step when nothing is written: {undisturbed:.3f} s")
        console.print(f"pause, background / foreground: {pauses[True] / pauses[False]:.2f}")


if __name__ == "__main__":
    sys.exit(main())
