"""Race optimizer steps of GRPO that compute common prefixes once against steps that compute every sequence whole:

    python -m benchmarks.shared_prefixes

One policy takes the steps in turn, on the same batches; both kinds are packed, with the same limit of tokens. The
shapes are a prompt as long as its samples, a prompt four times as long, four trajectories of six turns for each prompt,
with a segment for every turn that repeats the turns before it, and prompts without a common token. The ratio is that of
the medians. A part of the time, such as the optimizer's, does not depend on the tokens, so ratios are below those of
the tokens. `--memory` compares the peak memory of processes, each of which takes two steps of one kind.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch

from rl_megatron.batching.config import Batching
from rl_megatron.batching.shared_prefixes import PREFIX_SET
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss
from rl_megatron.topology.topology import start_topology
from rl_megatron.training.megatron_policy import MegatronPolicy

VOCABULARY, TOKENS = 4096, 4096
LOSS = ("clipped_pg", {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2, "reference_policy_kl_penalty": 0.0})


def draw_groups(generator: torch.Generator, prompts: int, samples: int, prompt: int, response: int) -> list[list[int]]:
    """Return `samples` sequences for each prompt."""
    return [
        question + _draw(generator, response)
        for question in (_draw(generator, prompt) for _ in range(prompts))
        for _ in range(samples)
    ]


def draw_turns(generator: torch.Generator, prompts: int, samples: int, turns: int, turn: int) -> list[list[int]]:
    """Return the segments of trajectories, `samples` for each prompt. Each repeats the last one, and adds a turn."""
    sequences = []
    for _ in range(prompts):
        prompt = _draw(generator, turn)
        for _ in range(samples):
            whole = prompt + _draw(generator, turn * turns)
            sequences += [whole[: turn * (number + 2)] for number in range(turns)]
    return sequences


def _draw(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(1, VOCABULARY, (count,), generator=generator).tolist()


SHAPES: dict[str, tuple[int, Callable[[torch.Generator], list[list[int]]]]] = {
    "8 samples, prompt = response": (8, lambda generator: draw_groups(generator, 8, 8, 96, 96)),
    "8 samples, prompt = 4 responses": (8, lambda generator: draw_groups(generator, 8, 8, 256, 64)),
    "6 turns, 4 branches": (24, lambda generator: draw_turns(generator, 4, 4, 6, 48)),
    "nothing shared": (8, lambda generator: draw_groups(generator, 64, 1, 96, 96)),
}


def build_batch(sequences: list[list[int]], group_size: int, generator: torch.Generator) -> BatchedDataDict:
    """Return a batch for GRPO, in which all tokens but the first count."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    width = int(lengths.max())
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    mask = (torch.arange(width) < lengths[:, None]).float()
    mask[:, 0] = 0
    return BatchedDataDict(
        input_ids=ids,
        input_lengths=lengths,
        token_mask=mask,
        sample_mask=torch.ones(len(ids)),
        advantages=torch.randn(ids.shape, generator=generator),
        prev_logprobs=torch.full(ids.shape, -8.3),
        generation_logprobs=torch.full(ids.shape, -8.3),
        **{PREFIX_SET: torch.arange(len(ids)) // group_size},
    )


def race(policy: MegatronPolicy, batch: BatchedDataDict, warmup: int, steps: int) -> tuple[float, float, float]:
    """Return (median seconds of a whole step, of a step with shared prefixes, packing efficiency of the latter)."""
    loss = build_loss(*LOSS)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    efficiency = 0.0
    for number in range(warmup + steps):
        for shares in (False, True) if number % 2 else (True, False):
            policy.batching = replace(policy.batching, share_prefixes=shares)
            began = time.perf_counter()
            metrics = policy.train(batch, loss, gbs=batch.size)
            if number >= warmup:
                seconds[shares].append(time.perf_counter() - began)
            if shares:
                efficiency = metrics["packing_efficiency"]
    return statistics.median(seconds[False]), statistics.median(seconds[True]), efficiency


def measure_memory(options: argparse.Namespace, shape: str, shares: bool) -> float:
    """Return the peak memory in GiB of a new process that takes two steps of a shape."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_find_peak, (options, shape, shares))


def _find_peak(options: argparse.Namespace, shape: str, shares: bool) -> float:
    policy, batch = build_policy(options), build_shape(shape)
    policy.batching = replace(policy.batching, share_prefixes=shares)
    for _ in range(2):
        policy.train(batch, build_loss(*LOSS), gbs=batch.size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def build_policy(options: argparse.Namespace) -> MegatronPolicy:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = ModelConfig(
        num_layers=options.layers, hidden_size=options.hidden, ffn_hidden_size=4 * options.hidden,
        max_sequence_length=512,
    )  # fmt: skip
    return MegatronPolicy(
        model, start_topology(device="cpu"), vocab_size=VOCABULARY, optimizer=OptimizerConfig(lr=1e-6),
        batching=Batching("packed", tokens=TOKENS), total_steps=1000,
    )  # fmt: skip


def build_shape(name: str) -> BatchedDataDict:
    """Return the batch of a shape."""
    group_size, draw = SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    return build_batch(draw(generator), group_size, generator)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--warmup", type=int, default=1, help="pairs of steps before those that are timed")
    parser.add_argument("--steps", type=int, default=7, help="timed pairs of steps")
    parser.add_argument("--shape", help="only the shapes whose name contains this text")
    parser.add_argument("--memory", action="store_true", help="compare the peak memory instead of the time")
    options = parser.parse_args(arguments)
    shapes = [name for name in SHAPES if (options.shape or "") in name]
    if options.memory:
        print("| shape | whole (GiB) | shared (GiB) | ratio |\n|---|---:|---:|---:|")
        for name in shapes:
            whole, shared = (measure_memory(options, name, shares) for shares in (False, True))
            print(f"| {name} | {whole:.2f} | {shared:.2f} | {shared / whole:.2f} |", flush=True)
        return 0
    policy = build_policy(options)
    print("| shape | whole (s) | shared (s) | ratio | tokens per computed token |\n|---|---:|---:|---:|---:|")
    for name in shapes:
        whole, shared, efficiency = race(policy, build_shape(name), options.warmup, options.steps)
        print(f"| {name} | {whole:.3f} | {shared:.3f} | {whole / shared:.2f} | {efficiency:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
