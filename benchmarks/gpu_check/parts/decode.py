"""Tokens per second of the embedded engine, and the kernels that a token of all sequences takes."""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.generation import of_engine
from benchmarks.gpu_check.profiling import profile_of
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting
from rl_megatron.config.load import load_config
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.policy.megatron_policy import MegatronPolicy
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device

FULL = ("qwen2_5_0_5b", 151936, 128, 256, (64, 256), 3)  # model, vocabulary, prompt, tokens, batches, rounds
TINY = ("nano", 1024, 16, 8, (2, 8), 1)


def rows(tiny: bool) -> list[str]:
    *_, batches, _ = TINY if tiny else FULL
    return [f"{what}, {count} sequences" for count in batches for what in ("tokens/s", "kernels per token")]


def run(setting: Setting, record: Record) -> None:
    model, vocab_size, prompt, tokens, batches, rounds = TINY if setting.tiny else FULL
    config = load_config([f"model={model}", f"model.max_sequence_length={prompt + tokens}"]).first
    layout = topology.build(ParallelConfig(), start_device(setting.device), 0)
    policy = MegatronPolicy(config.model, layout, vocab_size=vocab_size, precision="bf16")
    names, generator = iter(rows(setting.tiny)), torch.Generator().manual_seed(0)
    for count in batches:
        prompts = torch.randint(vocab_size, (count, prompt), generator=generator).tolist()
        engine = EmbeddedEngine(policy, batch_size=count)
        complete, seconds = of_engine(engine, prompts, tokens), []
        for number in range(1 + rounds):
            began = time.perf_counter()
            lengths = complete("equal", number)  # its result is on the host, so the GPU has ended
            seconds.append(time.perf_counter() - began)
        record.equal(f"lengths of the completions of {count} prompts", set(lengths), {tokens})
        record.figure(next(names), count * tokens / statistics.median(seconds[1:]), "tokens/s")
        # The difference leaves out what reads the prompts.
        few, more = (_kernels(engine, prompts, number, layout.device) for number in (tokens // 2, tokens))
        record.figure(next(names), (more - few) / (tokens - tokens // 2))
        record.at_least(f"kernels that the profiler saw, {count} sequences", more - few, 1)
    policy.shutdown()
    dist.destroy_process_group()


def _kernels(engine: EmbeddedEngine, prompts: list[list[int]], tokens: int, device: torch.device) -> int:
    return profile_of(lambda: engine.generate(prompts, Sampling(tokens), 0), device).kernels
