"""A checkpoint that is saved on a GPU, loaded and saved on the CPU, and loaded on a GPU again keeps every bit.

The next step after resuming is the one of the run that was not interrupted. A step whose loss is not finite is refused
on every backend of collectives, and changes no weight.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.setting import Setting, in_new_process
from benchmarks.train_step import rollouts
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.losses import build_loss
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.metrics import NonFiniteLoss
from rl_megatron.weight_sync.exporter import digest_weights

VOCAB_SIZE, SEQUENCES, LENGTH, STEPS = 1024, 8, 64, 2
SHAPE = {
    False: ("model=micro", "model.hidden_size=1024", "model.ffn_hidden_size=3072", "model.num_layers=8"),
    True: ("model=nano", "model.num_layers=2"),
}
CASES = {  # name → (precision, distributed optimizer); the one that matters most first
    "bf16, distributed optimizer": ("bf16", True),
    "fp32": ("fp32", False),
    "bf16": ("bf16", False),
}
# A step on the same device is the same up to the order of sums; on the other device it is as close as one in fp32.
SAME_DEVICE, OTHER_DEVICE = {"fp32": 1e-5, "bf16": 1e-3}, {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True)
class Saved:
    """A checkpoint, the digest of its weights, and what the step after it gives.

    Attributes:
        path: Its directory.
        digest: The digest of the weights.
        step: The loss and the gradient norm of the next step, or None if none was taken.
        seconds: How long saving and loading took.
    """

    path: Path
    digest: str
    step: tuple[float, float]
    seconds: tuple[float, float]


def rows(tiny: bool) -> list[str]:
    return ["seconds of saving", "seconds of loading"]


def run(setting: Setting, record: Record) -> None:
    refused, changed = in_new_process(refuse, setting.device, setting.tiny)
    record.equal("a step whose loss is not finite is refused", refused, True)
    record.equal("and changes a weight", changed, False)
    seconds, case_seconds = (0.0, 0.0), 0.0
    for number, name in enumerate(list(CASES)[:1] if setting.tiny else CASES):
        if setting.seconds_left < 1.3 * case_seconds:
            record.fact(f"not checked: {name}", "the part's time was over")
            continue
        began = time.monotonic()
        found = pass_over_the_cpu(name, setting, setting.directory / f"{number}", record)
        seconds, case_seconds = (found, time.monotonic() - began) if number == 0 else (seconds, case_seconds)
    for name, of_first in zip(rows(setting.tiny), seconds, strict=True):
        record.figure(name, of_first, "s")


def pass_over_the_cpu(name: str, setting: Setting, directory: Path, record: Record) -> tuple[float, float]:
    """Check a checkpoint that goes to the CPU and back, and return the seconds of saving and of loading it."""
    precision, distributed = CASES[name]

    def side(which: str, device: str, source: Path | None = None) -> Saved:
        target = Path(f"{directory}_{which}")
        return in_new_process(save, device, setting.tiny, precision, distributed, source, target)

    first = side("first", setting.device)
    on_cpu = side("cpu", "cpu", first.path)
    back = side("back", setting.device, on_cpu.path)
    for place, other in (("the CPU", on_cpu), ("the CPU and back", back)):
        record.equal(f"{name}: weights after a way over {place}", other.digest, first.digest)
        record.equal(f"{name}: state after a way over {place}", difference(first.path, other.path), None)
    for place, other, limits in (("CPU", on_cpu, OTHER_DEVICE), (setting.device, back, SAME_DEVICE)):
        error = max(abs(a - b) / abs(a) for a, b in zip(first.step, other.step, strict=True))
        record.at_most(f"{name}: next step, resumed on {place}", error, limits[precision])
    return first.seconds[0], back.seconds[1]


def build(device: str, tiny: bool, precision: str = "fp32", distributed: bool = False) -> MegatronPolicy:
    layout = topology.build(ParallelConfig(), start_device(device), 0)
    model = load_config([*SHAPE[tiny], f"model.max_sequence_length={LENGTH}"]).first.model
    return MegatronPolicy(
        model, layout, vocab_size=VOCAB_SIZE, precision=precision, total_steps=10, global_batch_size=SEQUENCES,
        optimizer=OptimizerConfig(lr=1e-3, distributed=distributed),
    )  # fmt: skip


def train(policy: MegatronPolicy) -> tuple[float, float]:
    metrics = policy.train(rollouts(VOCAB_SIZE, SEQUENCES, LENGTH, prompt=8), build_loss("nll", {}))
    return metrics["loss"], metrics["grad_norm"]


def save(device: str, tiny: bool, precision: str, distributed: bool, source: Path | None, target: Path) -> Saved:
    """Train, or load a checkpoint; save one, and take the next step; in a process of its own."""
    policy = build(device, tiny, precision, distributed)
    loading = time.perf_counter()
    if source is None:
        for _ in range(STEPS):
            train(policy)
    else:
        policy.load_checkpoint(source)
    saving = time.perf_counter()
    path = policy.save_checkpoint(target, STEPS)
    saved = time.perf_counter()
    digest = digest_weights(policy.model)
    result = Saved(path, digest, train(policy), (saved - saving, saving - loading))
    policy.shutdown()
    dist.destroy_process_group()
    return result


def refuse(device: str, tiny: bool) -> tuple[bool, bool]:
    """Return whether a loss that is NaN is refused, and whether it changes a weight; in a process of its own."""
    policy = build(device, tiny)
    batch = rollouts(VOCAB_SIZE, SEQUENCES, LENGTH, prompt=8)
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    batch["advantages"] = torch.full_like(batch["advantages"], torch.nan)
    before, refused = digest_weights(policy.model), False
    try:
        policy.train(batch, build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0}))
    except NonFiniteLoss:
        refused = True
    changed = digest_weights(policy.model) != before
    policy.shutdown()
    dist.destroy_process_group()
    return refused, changed


def difference(one: Path, other: Path) -> str | None:
    """Return the first thing in which two checkpoints differ, or None."""
    (tensors, common), (other_tensors, other_common) = state_of(one), state_of(other)
    if tensors.keys() != other_tensors.keys():
        return f"only one has {min(tensors.keys() ^ other_tensors.keys())}"
    for name, tensor in tensors.items():
        if not _same(tensor, other_tensors[name]):
            return name
    return None if _same(common, other_common) else "a value that is not a tensor"


def state_of(path: Path) -> tuple[dict[str, Tensor], Any]:
    """Return all tensors of a checkpoint, and all else that it has."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    distributed_checkpoint.load(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    return tensors, torch.load(path / "common.pt", weights_only=False)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other
