"""The rules for a run whose output directory holds an earlier run: which settings may differ, and what is recorded.

A run that is started again continues with the settings that it began with, so that its metrics, its checkpoints and its
config.yaml describe the same training. `MAY_CHANGE` lists all settings that may differ. This module needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rl_megatron import log
from rl_megatron.checkpoint.directory import CONFIG, Damaged, find_checkpoints, read_manifest_alone
from rl_megatron.config.algorithm_kinds import RolloutConfig
from rl_megatron.config.errors import ConfigError, convert_errors
from rl_megatron.config.loading.load import from_yaml, to_yaml
from rl_megatron.config.metrics import METRICS_FILE
from rl_megatron.config.model_shape import with_derived_sizes
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.config.secrets import without_secrets
from rl_megatron.config.stages import find_previous_stage
from rl_megatron.data.sources import build_source
from rl_megatron.rollouts.rows import check_replay
from rl_megatron.runs.user_files import digest_files, find_changed_files

# Kinds of settings that may change in a stage that has begun, with their keys; a key that ends in "." stands for its
# whole section. None of them changes what is learned from a step, except for rounding. An algorithm adds keys with
# `may_change_on_resume`.
MAY_CHANGE = {
    # A schedule that ends with the last step depends on train.steps. So does the order of generated prompts, because a
    # task generates the prompts of all steps at once, and they are shuffled together. A run that continues to more
    # steps is therefore not the run that began with more steps.
    "steps": ("train.steps", "train.stop_at"),
    "evaluation": ("train.eval_every", "data.num_eval_examples", "eval."),
    "saving": (
        "train.save_every", "train.save_every_seconds", "train.async_save", "train.keep_checkpoints", "train.keep_best",
        "train.export_hf", "rollout.save_every", "rollout.save_prompts",
    ),
    # Gradients do not depend on the layout, because losses are divided by counts over the whole batch.
    "layout and device": (
        "parallel.", "device", "optimizer.distributed", "optimizer.overlap", "model.backend", "model.cudnn_attention",
    ),
    "microbatches and memory": (
        "train.batching", "train.micro_batch_size", "train.micro_batch_tokens", "train.fused_head", "train.reference",
        "model.recompute",
    ),
    "time limits": (
        "train.collective_timeout_minutes", "train.hang_report_seconds", "train.checkpoint_must_save_by",
        "generation.engine_timeout_minutes", "reward.timeout_seconds", "rollout.environment.seconds_per_call",
    ),
    # These have no effect until a loss or norm is not finite.
    "numbers that are not finite": ("train.on_nonfinite", "train.max_nonfinite_steps"),
    "warnings": (
        "train.anomaly_window", "train.loss_spike_deviations", "train.reward_collapse_fraction",
        "train.equal_rewards_steps",
    ),
    "determinism": ("train.deterministic",),
    "desync checks": ("train.desync_check_every",),
    "profiles": ("profile.",),
    "kept tokens": ("data.cache_dir",),
    "reward workers": ("reward.num_workers", "reward.concurrency", "reward.memory_limit_mb"),
    # All engines use the same random numbers, which are derived from train.seed.
    "rollout engines": (
        "generation.engine", "generation.num_engines", "generation.engine_device", "generation.max_engine_restarts",
        "generation.refit", "generation.refit_bucket_mb", "generation.gate_prompts", "generation.gate_limit",
        "generation.batch_size", "generation.cuda_graphs", "generation.vllm.allow_insecure_serialization",
    ),
    # Servers get the same requests wherever they run.
    "places of servers": tuple(
        f"generation.{engine}.{key}"
        for engine in ("vllm", "sglang")
        for key in ("server_urls", "server_nodes", "num_servers", "host", "port", "startup_timeout_seconds")
    ),
}  # fmt: skip
# Of the keys of the whole run, init_from and the stages that have begun may not change. metric_sinks and logger
# (logging), output_dir, plugins and resume may change.
_ALLOWED = tuple(key for keys in MAY_CHANGE.values() for key in keys)
_SHAPES_MICROBATCHES = ("train.batching", "train.micro_batch_size", "train.micro_batch_tokens")
_PATHS = ("data.path", "tokenizer.path")  # the same path may be written in several ways
_SHOWN = 6  # a message lists at most this many differing settings


def find_earlier_run(config: RunConfig) -> Path:
    """Return the directory of the run that this one continues.

    With `resume=false` no run is continued, and the result is a directory that does not exist. But a run whose ranks
    torchrun has restarted always continues.
    """
    output_dir = Path(config.output_dir)
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return output_dir if config.resume or is_restart else output_dir / "resume=false"


def move_aside(config: RunConfig) -> None:
    """Move the run in `output_dir` to another directory if this run does not continue it. Nothing is deleted."""
    output_dir = Path(config.output_dir)
    if find_earlier_run(config) != output_dir and _holds_a_run(output_dir):
        moved = _previous_directory(output_dir)
        output_dir.rename(moved)
        log.LOGGER.info("resume=false: the earlier run is now in %s", moved)


def check_replays(config: RunConfig) -> None:
    """Check that the steps that stages with `rollout.replay` still have to take are recorded.

    Only the first of them is sure if `train.stop_at` can end the stage, as it may have ended the recorded one.
    """
    for name, stage in config.stages.items():
        if stage.rollout.replay is not None and isinstance(stage.algorithm, RolloutConfig):
            saved = find_checkpoints(find_earlier_run(config) / "checkpoints" / name)
            first = 1 + (int(saved[-1].name.removeprefix("step-")) if saved else 0)
            last = min(first, stage.train.steps) if stage.train.stop_at else stage.train.steps
            check_replay(Path(stage.rollout.replay), range(first, last + 1))


def refuse_changes(config: RunConfig) -> None:
    """Refuse to continue the run in `output_dir` with settings that it did not begin with. Nothing is written.

    The message names each setting with its value before and now, and the remedies. A run with `resume=false` is also
    refused if it would read files of the run that it moves aside.
    """
    directory = find_earlier_run(config)
    if directory != Path(config.output_dir):
        _refuse_files_of_the_moved_run(config)
    begun = [name for name in _read_stages(directory) if _has_begun(directory, name)]
    if list(config.stages)[: len(begun)] != begun:
        raise _refusal(config, [f"stages: {', '.join(begun)} → {', '.join(config.stages)}"])
    differing = []
    for name in config.stages:
        if not _has_begun(directory, name):
            continue
        recorded = _read_settings(directory, name)
        changed = {} if recorded is None else _diff(recorded, config.stages[name])
        where = f"stages.{name}." if len(config.stages) > 1 else ""
        refused = [key for key in changed if not _may_change(key, recorded, config.stages[name])]
        differing += [f"{where}{key}: {changed[key]}" for key in refused]
        differing += _other_weights(config, directory, name)
    if differing:
        raise _refusal(config, differing)


def build_run_yaml(config: RunConfig, output_dir: Path) -> str:
    """Return the YAML for config.yaml and new checkpoints, in which finished stages keep the settings that they had.

    Call it before the first stage begins, on every rank. Rank 0 logs which stages are skipped, and how settings
    differ from those that a stage began with.
    """
    path, stages = output_dir / CONFIG, dict(config.stages)
    finished = 0
    for name, stage in config.stages.items():
        saved = find_checkpoints(output_dir / "checkpoints" / name)
        recorded = _read_settings(output_dir, name) if saved else None
        changed = "" if recorded is None else _list([f"{key}: {was}" for key, was in _diff(recorded, stage).items()])
        if saved and _last_step(saved) >= stage.train.steps:
            finished += 1
            stages[name] = recorded or stage
            log.LOGGER.info("stage %s: skipped, it is complete at step %d: %s", name, _last_step(saved), saved[-1])
            if changed:
                log.LOGGER.warning("stage %s: settings that changed have no effect on it: %s", name, changed)
        elif changed:
            log.LOGGER.warning("stage %s: settings that changed apply from here on: %s", name, changed)
        _report_changed_files(name, stage, saved)
    if finished == len(stages) and path.is_file():
        return path.read_text()  # nothing is trained, so the record stays as it is
    return to_yaml(replace(config, stages=stages))


def _report_changed_files(name: str, stage: StageConfig, saved: list[Path]) -> None:
    """Warn if the content of a stage's files or functions has changed since the stage read them."""
    if not saved:
        return
    changed = find_changed_files(read_manifest_alone(saved[-1]).get("user_files", {}), digest_files(stage))
    if changed:
        log.LOGGER.warning(
            "stage %s: %s changed since the stage began, so its steps up to %d were trained with other content",
            *(name, _list(changed), _last_step(saved)),
        )


def describe_weights(config: RunConfig, output_dir: Path, name: str) -> str:
    """Describe the weights that the stage `name` starts from: init_from, a step of the stage before, or new weights."""
    previous = find_previous_stage(config.stages, name)
    if previous is not None:
        saved = find_checkpoints(output_dir / "checkpoints" / previous)
        step = max(_last_step(saved), config.stages[previous].train.steps)
        return f"step {step} of stage {previous!r} (stages.{previous}.train.steps)"
    if config.init_from:
        return f"init_from={Path(config.init_from).resolve()}"  # the same text for every way to write a path
    return f"init_from=null, new weights of train.seed={config.first.train.seed}"


def _read_stages(output_dir: Path) -> list[str]:
    path = output_dir / CONFIG
    return list(from_yaml(path.read_text(), str(path)).stages) if path.is_file() else []


def _has_begun(output_dir: Path, name: str) -> bool:
    """Return whether a stage has a checkpoint, or has at least recorded a training step."""
    if find_checkpoints(output_dir / "checkpoints" / name):
        return True
    path = output_dir / METRICS_FILE
    if not path.is_file():
        return False
    with path.open(errors="replace") as lines:
        return any(f'"stage": "{name}"' in line and '"kind": "train"' in line for line in lines)


def _last_step(saved: list[Path]) -> int:
    return int(saved[-1].name.removeprefix("step-")) if saved else 0


def _read_settings(output_dir: Path, name: str) -> StageConfig | None:
    """Return the settings that a stage was trained with, or None if they are not recorded.

    They are read from a checkpoint if there is one, because config.yaml may be that of an attempt that never saved.
    """
    saved = find_checkpoints(output_dir / "checkpoints" / name)
    for file in [*(path / CONFIG for path in saved[-1:]), output_dir / CONFIG]:
        if file.is_file() and (stage := from_yaml(file.read_text(), str(file)).stages.get(name)) is not None:
            return stage
    return None


def _diff(recorded: StageConfig, now: StageConfig) -> dict[str, str]:
    """Return "value before → value now" for each key of a stage whose value differs."""
    dump = TypeAdapter(StageConfig).dump_python
    dumped = [without_secrets(dump(stage, mode="json")) for stage in (recorded, now)]
    was, is_ = (dict(iterate_leaves({**stage, "model": with_derived_sizes(stage["model"])})) for stage in dumped)
    differing = [key for key in dict.fromkeys((*was, *is_)) if was.get(key) != is_.get(key)]
    return {
        key: f"{was.get(key)} → {is_.get(key)}"
        for key in differing
        if key not in _PATHS or _resolve(was.get(key)) != _resolve(is_.get(key))
    }


def iterate_leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key path with its value; a list of mappings yields paths such as `key[0].name` instead of a value."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from iterate_leaves(value, f"{prefix}{key}.")
        elif value and isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            for index, item in enumerate(value):
                yield from iterate_leaves(item, f"{prefix}{key}[{index}].")
        else:
            yield f"{prefix}{key}", value


def _resolve(path: object) -> Any:
    return os.path.realpath(path) if isinstance(path, str) else path


def _may_change(key: str, recorded: StageConfig | None, stage: StageConfig) -> bool:
    shapes_microbatches = key in _SHAPES_MICROBATCHES or key.startswith("parallel.")  # the data-parallel size matters
    if shapes_microbatches and stage.model.router_aux_loss > 0 and stage.model.router_aux_loss_scope == "microbatch":
        return False  # the load-balancing loss is computed per microbatch
    if key == "data.num_eval_examples" and recorded is not None:  # records that are not held out are trained on
        was, is_ = (
            convert_errors(lambda config=config: build_source(config).num_held_out) for config in (recorded, stage)
        )
        return was == is_
    allowed = (*_ALLOWED, *(f"algorithm.{key}" for key in stage.algorithm.may_change_on_resume))
    return any(key == name or (name.endswith(".") and key.startswith(name)) for name in allowed)


def _other_weights(config: RunConfig, output_dir: Path, name: str) -> list[str]:
    """Describe how a stage's initial weights differ from the recorded ones; the list is empty if they are the same."""
    saved = find_checkpoints(output_dir / "checkpoints" / name)
    now = describe_weights(config, output_dir, name)
    if saved:
        try:
            was = read_manifest_alone(saved[-1]).get("weights_from", now)
        except Damaged:
            was = now  # the preflight refuses the checkpoint, and names the remedy
    else:
        path = output_dir / CONFIG
        recorded = from_yaml(path.read_text(), str(path)) if path.is_file() else config
        was = describe_weights(recorded, output_dir, name) if name in recorded.stages else now
    new = "init_from=null"  # new weights depend on train.seed, which is compared as a setting
    return [] if was == now or (was.startswith(new) and now.startswith(new)) else [f"initial weights: {was} → {now}"]


def _refusal(config: RunConfig, differing: list[str]) -> ConfigError:
    output_dir = Path(config.output_dir)
    return ConfigError(
        f"output_dir={output_dir} holds a run with other settings ({_list(differing)}); set another output_dir, or "
        "set them back to continue that run, or start again with resume=false, which moves that run to "
        f"{_previous_directory(output_dir)}; when a run continues, only these may change: {', '.join(MAY_CHANGE)}, "
        "logging"
    )


def _refuse_files_of_the_moved_run(config: RunConfig) -> None:
    output_dir = Path(config.output_dir)
    named = {"init_from": config.init_from, "tokenizer.path": config.first.tokenizer.path}
    named |= {f"stages.{name}.data.path": stage.data.path for name, stage in config.stages.items()}
    for key, path in named.items():
        if isinstance(path, str) and Path(path).resolve().is_relative_to(output_dir.resolve()) and Path(path).exists():
            raise ConfigError(
                f"{key}={path} is in output_dir={output_dir}, whose run resume=false moves aside; set "
                "another output_dir"
            )


def _holds_a_run(output_dir: Path) -> bool:
    return any((output_dir / name).exists() for name in (CONFIG, METRICS_FILE, "checkpoints"))


def _previous_directory(output_dir: Path) -> Path:
    """Return the first of the paths `output_dir.previous`, `output_dir.previous-2`, … that does not exist."""
    number, moved = 1, output_dir.with_name(f"{output_dir.name}.previous")
    while moved.exists():
        number += 1
        moved = output_dir.with_name(f"{output_dir.name}.previous-{number}")
    return moved


def _list(changed: list[str]) -> str:
    more = len(changed) - _SHOWN
    return ", ".join(changed[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
