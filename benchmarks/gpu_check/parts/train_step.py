"""A step of GRPO beside a bare step of megatron-core, by benchmarks/train_step.py; and how busy the GPU is."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

from benchmarks import train_step
from benchmarks.gpu_check.profiling import Profile, profile_of
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting, in_new_process
from rl_megatron.batching.config import Batching
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.losses import build_loss
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.runner import FusedHead

GOAL = 1.05
OF_TRANSFORMERS = 0.90  # of a step of the NLL loss in transformers, packed against padded
CASES = {"packed, fused head": ["--packed", "--fused-head"], "padded": []}
FULL = ("qwen2_5_0_5b", 151936, 16384, 1024, 8192, 7)
TINY = ("nano", 256, 256, 32, 128, 1)
_STEPS = 3


def rows(tiny: bool) -> list[str]:
    steps = [
        name
        for case in _cases(tiny)
        for name in (
            f"GRPO step / bare step, {case}", f"GRPO step, {case}", f"NLL step / transformers, {case}",
            f"NLL step, {case}", f"NLL step of transformers, {case}",
        )
    ]  # fmt: skip
    return [*steps, "share of a step in which the device is busy", "kernels of a step"]


def _cases(tiny: bool) -> list[str]:
    return ["packed, fused head"] if tiny else list(CASES)


def arguments(setting: Setting, case: str) -> list[str]:
    """Return the arguments of benchmarks/train_step.py."""
    model, vocab_size, tokens, length, micro, steps = TINY if setting.tiny else FULL
    return [
        "--device", setting.device, "--precision", "bf16", "--model", model, "--vocab-size", f"{vocab_size}",
        "--tokens", f"{tokens}", "--length", f"{length}", "--micro-batch-tokens", f"{micro}", "--steps", f"{steps}",
        *CASES[case],
    ]  # fmt: skip


def run(setting: Setting, record: Record) -> None:
    names = iter(rows(setting.tiny))
    for number, case in enumerate(_cases(setting.tiny)):
        output = setting.directory / f"{number}.json"
        status = in_new_process(train_step.main, [*arguments(setting, case), "--output", str(output)])
        record.equal(f"exit status, {case}", status, 0)  # 1 if the gradient norms differ
        figures = json.loads(output.read_text())["figures"]
        goal = GOAL if setting.on_gpu and not setting.tiny else None
        of_transformers = OF_TRANSFORMERS if goal is not None and case.startswith("packed") else None
        grpo, _, nll, transformers = ([1000 * each for each in spread] for spread in figures["spreads"])
        record.figure(next(names), figures["ratio"], at_most=goal)
        record.figure(next(names), 1000 * figures["grpo"], "ms", spread=(grpo[0], grpo[1]))
        record.figure(next(names), figures["nll"] / figures["transformers"], at_most=of_transformers)
        record.figure(next(names), 1000 * figures["nll"], "ms", spread=(nll[0], nll[1]))
        record.figure(next(names), 1000 * figures["transformers"], "ms", spread=(transformers[0], transformers[1]))
    busy, found = in_new_process(_profiled, setting)
    (setting.directory / "top_kernels.txt").write_text(found.table())
    record.figure(next(names), busy, prediction=(0.8, 1.0))
    record.figure(next(names), found.kernels)
    record.at_least("kernels that the profiler saw", found.kernels, 1)


def _profiled(setting: Setting) -> tuple[float, Profile]:
    """Return the share of a step in which the device is busy, and the profile of the step; in a process of its own."""
    model, vocab_size, tokens, length, micro, _ = TINY if setting.tiny else FULL
    config = load_config([f"model={model}", f"model.max_sequence_length={length}"]).first
    layout = topology.build(ParallelConfig(), start_device(setting.device), 0)
    policy = MegatronPolicy(
        config.model, layout, vocab_size=vocab_size, precision="bf16", optimizer=OptimizerConfig(lr=1e-7),
        total_steps=10, global_batch_size=tokens // length, batching=Batching("packed", 1, micro),
        fused_head=FusedHead(),
    )  # fmt: skip
    loss = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0})
    batch = train_step.rollouts(vocab_size, tokens // length, length, prompt=length // 8)
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]

    def seconds() -> float:
        began = time.perf_counter()
        policy.train(batch, loss)
        if layout.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    fastest = min(seconds() for _ in range(1 + _STEPS))
    found = profile_of(lambda: policy.train(batch, loss), layout.device)
    policy.shutdown()
    dist.destroy_process_group()
    return found.busy_seconds / fastest, found
