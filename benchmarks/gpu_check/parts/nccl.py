"""Layouts of two GPUs against one process, and a GRPO run whose weights reach an engine on another GPU over NCCL."""

from __future__ import annotations

import subprocess
import sys

import torch

from benchmarks.gpu_check.parts.grpo import check_metrics
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.runner import REPOSITORY
from benchmarks.gpu_check.setting import Setting

LAYOUTS = {
    "tensor 2 with sequence parallelism": ("parallel.tensor=2", "parallel.sequence=true"),
    "pipeline 2": ("parallel.pipeline=2",),
    "context 2": ("parallel.context=2", "train.batching=packed"),
    "data 2, overlapped": ("optimizer.distributed=true", "optimizer.overlap=true", "train.fused_head=true"),
    "expert 2": ("model=nano_moe", "parallel.expert=2"),
}
STEPS = 2
GRPO = (
    "algorithm=grpo", "data=arithmetic", "model=nano", "model.num_layers=1", "tokenizer.vocab_size=260",
    "data.num_eval_examples=4", "data.num_demonstrations=32", "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=2", "train.global_batch_size=8", f"train.steps={STEPS}",
    "generation.max_new_tokens=4", "generation.engine=transformers", "generation.refit=collective", "resume=false",
)  # fmt: skip


def rows(tiny: bool) -> list[str]:
    return ["seconds of a step of GRPO"]


def run(setting: Setting, record: Record) -> None:
    if setting.on_gpu and torch.cuda.device_count() < 2:
        record.skip(f"it needs two GPUs, and there are {torch.cuda.device_count()}")
        return
    device = f"device={setting.device}"
    for name in ["data 2, overlapped"] if setting.tiny else LAYOUTS:
        command = ["certify", "experiment=quickstart", device, *LAYOUTS[name]]
        record.equal(f"certify, {name}: exit status", finish(command, ranks=2), 0)
    run_directory = setting.directory / "run"
    # The policy is on the first GPU, and its engine on the second.
    status = finish(["train", *GRPO, device, f"output_dir={run_directory}"], ranks=1)
    record.equal("GRPO with a collective weight sync: exit status", status, 0)
    check_metrics(run_directory / "metrics.jsonl", STEPS, record)


def finish(arguments: list[str], ranks: int) -> int:
    """Return the exit status of `rl-megatron` on so many ranks of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "rl_megatron", *arguments]
    return subprocess.run(command, cwd=REPOSITORY).returncode
