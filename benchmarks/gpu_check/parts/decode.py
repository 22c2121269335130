"""Tokens per second of the embedded engine with and without CUDA graphs, beside `model.generate` of transformers.

All sides complete the same prompts with as many tokens, greedily, with the same weights in bf16. cuDNN's attention is
off on all sides: transformers would make one of its plans for every token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.gpu_check.profiling import profile_of
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting
from benchmarks.transformers_step import transformers_model
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy

FULL = ("qwen2_5_0_5b", 151936, 128, 128, (64, 256), 5)  # model, vocabulary, prompt, tokens, batches, rounds
TINY = ("nano", 1024, 16, 16, (2, 8), 1)
SIDES = ("CUDA graphs", "no graphs", "model.generate")
GOALS = {"CUDA graphs": 5.0, "no graphs": 1.5}  # times the tokens per second of model.generate
PREDICTIONS = {  # from the host's time of a step without a GPU
    ("CUDA graphs", 64): (15_000, 25_000), ("CUDA graphs", 256): (60_000, 100_000),
    ("no graphs", 64): (3_000, 5_000), ("no graphs", 256): (12_000, 20_000),
}  # fmt: skip
_PROFILED = (8, 16)  # tokens: reading the profile of a hundred would take minutes


def rows(tiny: bool) -> list[str]:
    *_, batches, _ = TINY if tiny else FULL
    names = [f"tokens/s, {side}, {count} sequences" for count in batches for side in SIDES]
    names += [f"{side} / model.generate, {count} sequences" for count in batches for side in GOALS]
    return [*names, *(f"kernels per token, {count} sequences" for count in batches)]


def run(setting: Setting, record: Record) -> None:
    model, vocab_size, prompt, tokens, batches, rounds = TINY if setting.tiny else FULL
    config = load_config([f"model={model}", f"model.max_sequence_length={prompt + tokens}"]).first
    layout = topology.build(ParallelConfig(), start_device(setting.device), 0)
    policy = MegatronPolicy(config.model, layout, vocab_size=vocab_size, precision="bf16")
    rival = transformers_model(policy).eval()
    greedy, generator = Sampling(tokens, temperature=0.0), torch.Generator().manual_seed(0)
    for count in batches:
        prompts = torch.randint(vocab_size, (count, prompt), generator=generator).tolist()
        graphs, plain = (EmbeddedEngine(policy, count, cuda_graphs=mode) for mode in ("auto", "off"))
        # What a side computes first compiles and loads kernels.
        sides: dict[str, Callable[[], torch.Tensor]] = {
            "CUDA graphs": lambda engine=graphs, texts=prompts: generate(engine, texts, greedy, 0)["input_ids"],
            "no graphs": lambda engine=plain, texts=prompts: generate(engine, texts, greedy, 0)["input_ids"],
            "model.generate": lambda texts=prompts: generate_with_transformers(rival, texts, tokens),
        }
        ids = {side: complete().cpu() for side, complete in sides.items()}
        record.equal(
            f"tokens with and without graphs, {count} sequences", *_shown(ids["CUDA graphs"], ids["no graphs"])
        )
        seconds = {
            side: [_seconds(complete) for _ in range(_rounds(rounds, setting))] for side, complete in sides.items()
        }
        speeds = {side: [count * tokens / each for each in of_side] for side, of_side in seconds.items()}
        for side, values in speeds.items():
            spread, predicted = (min(values), max(values)), PREDICTIONS.get((side, count))
            name = f"tokens/s, {side}, {count} sequences"
            record.figure(name, statistics.median(values), "tokens/s", spread=spread, prediction=predicted)
        for side, goal in GOALS.items():
            ratio = statistics.median(speeds[side]) / statistics.median(speeds["model.generate"])
            wanted = goal if setting.on_gpu and not setting.tiny else None
            record.figure(f"{side} / model.generate, {count} sequences", ratio, at_least=wanted)
        few, more = (_kernels(plain, prompts, number, layout.device) for number in _PROFILED)
        record.figure(f"kernels per token, {count} sequences", (more - few) / (_PROFILED[1] - _PROFILED[0]))
        record.at_least(f"kernels that the profiler saw, {count} sequences", more - few, 1)
    policy.shutdown()
    dist.destroy_process_group()


def generate_with_transformers(model: torch.nn.Module, prompts: list[list[int]], tokens: int) -> torch.Tensor:
    """Return what `model.generate` of transformers completes."""
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    with torch.no_grad():
        complete: Callable = model.generate  # pyright: ignore[reportAssignmentType]  # of transformers' mixin
        return complete(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, eos_token_id=None,
        )  # fmt: skip


def _shown(one: torch.Tensor, other: torch.Tensor) -> tuple[str, str]:
    """Return how many tokens agree, and how many there are."""
    same = (one == other).sum() if one.shape == other.shape else 0
    return f"{int(same)} of {one.numel()}", f"{other.numel()} of {other.numel()}"


def _rounds(rounds: int, setting: Setting) -> int:
    return rounds if setting.seconds_left > 40 else 1


def _seconds(complete: Callable[[], torch.Tensor]) -> float:
    began = time.perf_counter()
    complete().cpu()  # its result is on the host, so the GPU has ended
    return time.perf_counter() - began


def _kernels(engine: EmbeddedEngine, prompts: list[list[int]], tokens: int, device: torch.device) -> int:
    return profile_of(lambda: generate(engine, prompts, Sampling(tokens, temperature=0.0), 0), device).kernels
