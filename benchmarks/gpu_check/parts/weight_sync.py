"""Weights of a policy reach a rollout engine of transformers in another process: by CUDA IPC, or by shared memory.

The engine verifies every tensor. Its logprobs are compared with the policy's. An engine that is killed is started
again. The optimizer state is moved to the host and back.
"""

from __future__ import annotations

import time

import psutil
import torch
import torch.distributed as dist

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting
from benchmarks.train_step import rollouts
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.engines import build_engine
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.generation.logprob_check import LIMITS
from rl_megatron.generation.transformers.process import WORKER_MODULE
from rl_megatron.losses import build_loss
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy

FULL = ("qwen2_5_0_5b", 151936, 3)  # model, vocabulary, timed weight syncs
TINY = ("nano", 512, 1)
PHASES = {
    "refit_seconds": "seconds until the engine serves the weights",
    "refit_fill_seconds": "seconds of filling buckets and fingerprinting them",
    "refit_transfer_seconds": "seconds of waiting for collectives",
    "refit_verify_seconds": "seconds of verifying in the engine",
    "refit_copy_seconds": "seconds of copying in the engine",
}
OFFLOADING = ["seconds of moving the optimizer state to the host", "seconds of moving it back"]
_LENGTH, _SEQUENCES = 64, 4


def rows(tiny: bool) -> list[str]:
    return [*PHASES.values(), "weights sent", "error of the engine's logprobs", *OFFLOADING]


def run(setting: Setting, record: Record) -> None:
    model, vocab_size, repetitions = TINY if setting.tiny else FULL
    stage = load_config(
        [
            "algorithm=grpo", "data.task.name=arithmetic", f"model={model}", f"++model.vocab_size={vocab_size}",
            f"model.max_sequence_length={2 * _LENGTH}", "precision=bf16", f"device={setting.device}",
            "generation.engine=transformers", "generation.refit=shared_memory",
        ]
    ).first  # fmt: skip
    layout = topology.build(ParallelConfig(), start_device(setting.device), 0)
    policy = MegatronPolicy(
        stage.model, layout, vocab_size=vocab_size, precision="bf16", optimizer=stage.optimizer,
        total_steps=stage.train.steps, global_batch_size=_SEQUENCES,
    )  # fmt: skip
    engine = build_engine(policy, stage, setting.directory)
    try:
        syncs = []
        for _ in range(1 + repetitions):  # the first one also starts the engine
            train(policy)
            syncs.append(engine.sync())
        fastest = min(syncs[1:], key=lambda metrics: metrics["refit_seconds"])
        for metric, name in PHASES.items():
            record.figure(name, fastest[metric], "s")
        record.figure("weights sent", fastest["refit_bytes"] / 1e9, "GB")
        record.figure("error of the engine's logprobs", error_of(engine, policy), "nats", at_most=LIMITS["bf16"])
        if setting.on_gpu:
            offload(policy, record)
            record.at_most("error of the engine's logprobs after offloading", error_of(engine, policy), LIMITS["bf16"])
        else:
            record.cannot(OFFLOADING, "the optimizer state of the CPU is on the host already")
        record.at_least("engines that were killed", kill_engines(), 1)
        train(policy)
        engine.sync()
        record.at_most("error of the restarted engine's logprobs", error_of(engine, policy), LIMITS["bf16"])
    finally:
        engine.close()
    policy.shutdown()
    dist.destroy_process_group()


def train(policy: MegatronPolicy) -> None:
    """Take a step, so that the weights change."""
    policy.train(rollouts(policy.vocab_size, _SEQUENCES, _LENGTH, prompt=8), build_loss("nll", {}))


def error_of(engine: RolloutEngine, policy: MegatronPolicy) -> float:
    """Return the mean |engine's − policy's logprob| over sampled tokens."""
    prompts = torch.randint(policy.vocab_size, (8, 16), generator=torch.Generator().manual_seed(0)).tolist()
    batch = generate(engine, prompts, Sampling(16), 0)
    apart = (policy.get_logprobs(batch)["logprobs"] - batch["generation_logprobs"]).abs()
    return apart[batch["token_mask"] > 0].double().mean().item()


def offload(policy: MegatronPolicy, record: Record) -> None:
    """Time how long the optimizer state takes to the host and back; the first time, host memory is allocated."""
    for _ in range(2):
        seconds = []
        for move in (policy.offload_after_refit, policy.memory.restore_optimizer):
            torch.cuda.synchronize()
            began = time.perf_counter()
            move()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    for name, each in zip(OFFLOADING, seconds, strict=True):
        record.figure(name, each, "s")


def kill_engines() -> int:
    """Kill the processes of engines that this process has started, and return how many there were."""
    engines = [child for child in psutil.Process().children() if WORKER_MODULE in child.cmdline()]
    for process in engines:
        process.kill()
    return len(engines)
