"""Check the file system of `output_dir`: renames, locks, free space for checkpoints, and the speed of writing."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.doctor.findings import Finding, ok, problem, warning
from rl_megatron.model.sharded_shape import ShardedShape, element_bytes, optimizer_bytes_per_element

_CHECK = "storage"
_PROBE_BYTES = 32 << 20  # the size of the file that is written to measure the speed
_BLOCK = 1 << 20
_LONG_SAVE = 900.0  # seconds; a warning follows if one rank would need longer to write a checkpoint
_GB = 1e9


def estimate_checkpoint_bytes(stage: StageConfig) -> int:
    """Return the size of a checkpoint: trained weights and optimizer state of the policy and, if any, the critic."""
    shape = ShardedShape(stage.model, ParallelConfig(), 1, stage.tokenizer.vocab_size, lora=stage.peft)
    per_element = element_bytes(stage.precision) + optimizer_bytes_per_element(stage.precision)
    models = 2 if stage.algorithm.has_critic else 1
    return models * per_element * sum(shape.trained_elements(0))


def estimate_export_bytes(stage: StageConfig) -> int:
    """Return the size of a checkpoint's export in the format of Hugging Face; 0 if checkpoints are not exported."""
    if not stage.train.export_hf:
        return 0
    shape = ShardedShape(stage.model, ParallelConfig(), 1, stage.tokenizer.vocab_size, lora=stage.peft)
    return element_bytes(stage.precision) * sum(shape.trained_elements(0))


def estimate_run_bytes(config: RunConfig) -> int:
    """Return the bytes of all checkpoints and exports that are kept, and of one more while it is written."""
    total = largest = 0
    for stage in config.stages.values():
        train = stage.train
        saved = train.most_saves
        kept = min(saved, train.keep_checkpoints + (train.keep_best is not None))
        size = estimate_checkpoint_bytes(stage) + estimate_export_bytes(stage)
        total, largest = total + kept * size, max(largest, size if saved > kept else 0)
    return total + largest


def check_storage(output_dir: Path, config: RunConfig | None = None) -> list[Finding]:
    """Check that a run can keep its checkpoints in `output_dir`, by writing to a temporary directory there."""
    home = output_dir.absolute()
    while not home.exists():
        home = home.parent
    if not home.is_dir():
        return [problem(_CHECK, f"output_dir={output_dir}: {home} is a file", "set output_dir to another path")]
    try:
        with tempfile.TemporaryDirectory(prefix=".rl_megatron_doctor_", dir=home) as scratch:
            findings, speed = _check_files(Path(scratch))
    except OSError as error:
        message = f"{home} cannot be written: {error.strerror or error}"
        return [problem(_CHECK, message, "free space there, change its owner or mode, or set another output_dir")]
    return findings + _check_space(home, config, speed)


def _check_files(scratch: Path) -> tuple[list[Finding], float]:
    """Return the findings about renames and locks, and the speed of writing in bytes per second."""
    findings, old, new = [], scratch / "step.incomplete", scratch / "step"
    old.mkdir()
    (old / "file").write_text("1")
    (scratch / "replaced").write_text("0")
    (scratch / "replacing").write_text("1")
    try:
        old.rename(new)
        (scratch / "replacing").replace(scratch / "replaced")
        is_atomic = (new / "file").read_text() == (scratch / "replaced").read_text() == "1" and not old.exists()
    except OSError:
        is_atomic = False
    if not is_atomic:
        message = f"{scratch.parent} does not rename directories and replace files in one step, as checkpoints need"
        findings.append(problem(_CHECK, message, "set output_dir to a POSIX file system, not to an object store"))
    with (scratch / "lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            message = f"{scratch.parent} has no locks ({error.strerror}), so a second run in it would not be noticed"
            findings.append(warning(_CHECK, message, "mount it with locks, or let only one run at a time use it"))
    block, began = os.urandom(_BLOCK), time.perf_counter()
    with (scratch / "speed").open("wb", buffering=0) as file:
        for _ in range(_PROBE_BYTES // _BLOCK):
            file.write(block)
        os.fsync(file.fileno())
    return findings, _PROBE_BYTES / max(time.perf_counter() - began, 1e-9)


def _check_space(home: Path, config: RunConfig | None, speed: float) -> list[Finding]:
    free = shutil.disk_usage(home).free
    message = f"{home} has {free / _GB:,.1f} GB free and writes {speed / 1e6:,.0f} MB/s from one process"
    if config is None:
        return [ok(_CHECK, message)]
    needed, largest = estimate_run_bytes(config), max(map(estimate_checkpoint_bytes, config.stages.values()))
    if needed > free:
        message = f"{home} has {free / _GB:,.1f} GB free, and the run's checkpoints need {needed / _GB:,.1f} GB"
        return [problem(_CHECK, message, "free space, set another output_dir, or lower train.keep_checkpoints")]
    if largest / speed > _LONG_SAVE:
        message = f"{message}: a checkpoint of {largest / _GB:,.1f} GB takes {largest / speed / 60:,.0f} min of writing"
        remedy = "use a faster file system; several ranks may write faster than one"
        return [warning(_CHECK, message, remedy)]
    return [ok(_CHECK, f"{message}; checkpoints need {needed / _GB:,.1f} GB")]
