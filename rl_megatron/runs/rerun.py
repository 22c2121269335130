"""The rule for an output directory that holds a run already: what may have changed since, and what is kept of it.

A run that is started again goes on with the settings that it began with, so that its metrics, its checkpoints and its
config.yaml describe one and the same training. `MAY_CHANGE` lists all settings that may differ. This module needs no
torch.
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
from rl_megatron.config.errors import ConfigError, bad_input_named
from rl_megatron.config.loading.load import from_yaml, to_yaml
from rl_megatron.config.metrics import METRICS_FILE
from rl_megatron.config.model_shape import with_derived_sizes
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.config.secrets import without_secrets
from rl_megatron.config.stages import stage_before
from rl_megatron.data.sources import build_source
from rl_megatron.runs.user_files import changed_files, file_digests

# What may change in a stage that has begun → its keys; a key that ends in "." stands for its whole section. None of
# them changes what is learned from a step, up to rounding. An algorithm adds keys with `may_change_on_resume`.
MAY_CHANGE = {
    # A schedule that ends with the last step changes with them. So does the order of generated prompts, because a task
    # generates those of all steps at once, and they are shuffled together. A run that goes on to more steps is
    # therefore not the run that began with more steps.
    "steps": ("train.steps", "train.stop_at"),
    "evaluation": ("train.eval_every", "data.num_eval_examples", "eval."),
    "saving": (
        "train.save_every", "train.async_save", "train.keep_checkpoints", "train.keep_best", "train.export_hf",
        "rollout.save_every", "rollout.save_prompts",
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
    # Up to the first number that is not finite, all of them train the same.
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
    # All engines use the same random numbers, which follow from train.seed.
    "rollout engines": (
        "generation.engine", "generation.num_engines", "generation.engine_device", "generation.max_engine_restarts",
        "generation.refit", "generation.refit_bucket_mb", "generation.gate_prompts", "generation.gate_limit",
        "generation.batch_size", "generation.cuda_graphs", "generation.vllm.allow_insecure_serialization",
    ),
    # They get the same requests wherever they run.
    "places of servers": tuple(
        f"generation.{engine}.{key}"
        for engine in ("vllm", "sglang")
        for key in ("server_urls", "server_nodes", "num_servers", "host", "port", "startup_timeout_seconds")
    ),
}  # fmt: skip
# Of the keys of the whole run, init_from may not change, and the stages that have begun. metric_sinks and
# logger (logging), output_dir, plugins and resume may.
_ALLOWED = tuple(key for keys in MAY_CHANGE.values() for key in keys)
_SHAPES_MICROBATCHES = ("train.batching", "train.micro_batch_size", "train.micro_batch_tokens")
_PATHS = ("data.path", "tokenizer.path")  # the same place may be written in several ways
_SHOWN = 6  # settings that differ


def earlier_run(config: RunConfig) -> Path:
    """Return the directory of the run that this one goes on with.

    With `resume=false` the run begins anew. The result is then a directory that does not exist, so that nothing is
    found in it. If torchrun restarts the ranks, the run goes on nevertheless.
    """
    output_dir = Path(config.output_dir)
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return output_dir if config.resume or is_restart else output_dir / "resume=false"


def move_aside(config: RunConfig) -> None:
    """Move the run in `output_dir` to another directory if this run begins anew. Nothing is deleted."""
    output_dir = Path(config.output_dir)
    if earlier_run(config) != output_dir and _holds_a_run(output_dir):
        moved = _previous_directory(output_dir)
        output_dir.rename(moved)
        log.LOGGER.info("resume=false: the earlier run is now in %s", moved)


def refuse_changes(config: RunConfig) -> None:
    """Refuse to go on with the run in `output_dir` under settings that it did not begin with. Nothing is written.

    Raises:
        ConfigError: A setting that may not change differs; the message names each, before and now, and the ways on. Or
            the run begins anew, and would read files of the run that it moves aside.
    """
    directory = earlier_run(config)
    if directory != Path(config.output_dir):
        _refuse_files_of_the_moved_run(config)
    begun = [name for name in _recorded_stages(directory) if _has_begun(directory, name)]
    if list(config.stages)[: len(begun)] != begun:
        raise _refusal(config, [f"stages: {', '.join(begun)} → {', '.join(config.stages)}"])
    differing = []
    for name in config.stages:
        if not _has_begun(directory, name):
            continue
        before = _settings(directory, name)
        changed = {} if before is None else _changed(before, config.stages[name])
        where = f"stages.{name}." if len(config.stages) > 1 else ""
        refused = [key for key in changed if not _may_change(key, before, config.stages[name])]
        differing += [f"{where}{key}: {changed[key]}" for key in refused]
        differing += _other_weights(config, directory, name)
    if differing:
        raise _refusal(config, differing)


def recorded_config(config: RunConfig, output_dir: Path) -> str:
    """Return the YAML that config.yaml and new checkpoints get: finished stages keep the settings that they had.

    Call it before the first stage begins, on every rank. Rank 0 logs which stages are skipped, and what differs from
    the settings that a stage began with.
    """
    path, stages = output_dir / CONFIG, dict(config.stages)
    finished = 0
    for name, stage in config.stages.items():
        saved = find_checkpoints(output_dir / "checkpoints" / name)
        before = _settings(output_dir, name) if saved else None
        changed = "" if before is None else _listed([f"{key}: {was}" for key, was in _changed(before, stage).items()])
        if saved and _step_of(saved) >= stage.train.steps:
            finished += 1
            stages[name] = before or stage
            log.LOGGER.info("stage %s: skipped, it is complete at step %d: %s", name, _step_of(saved), saved[-1])
            if changed:
                log.LOGGER.warning("stage %s: settings that changed have no effect on it: %s", name, changed)
        elif changed:
            log.LOGGER.warning("stage %s: settings that changed apply from here on: %s", name, changed)
        _report_changed_files(name, stage, saved)
    if finished == len(stages) and path.is_file():
        return path.read_text()  # nothing is trained, so the record stays as it is
    return to_yaml(replace(config, stages=stages))


def _report_changed_files(name: str, stage: StageConfig, saved: list[Path]) -> None:
    """Warn of files and functions that changed since a stage read them; their settings did not, so none is refused."""
    if not saved:
        return
    changed = changed_files(read_manifest_alone(saved[-1]).get("user_files", {}), file_digests(stage))
    if changed:
        log.LOGGER.warning(
            "stage %s: %s changed since the stage began, so its steps up to %d were trained with other content",
            *(name, _listed(changed), _step_of(saved)),
        )


def weights_source(config: RunConfig, output_dir: Path, name: str) -> str:
    """Describe the weights that the stage `name` starts from: init_from, a step of the stage before, or new weights."""
    before = stage_before(config.stages, name)
    if before is not None:
        saved = find_checkpoints(output_dir / "checkpoints" / before)
        step = max(_step_of(saved), config.stages[before].train.steps)
        return f"step {step} of stage {before!r} (stages.{before}.train.steps)"
    if config.init_from:
        return f"init_from={Path(config.init_from).resolve()}"  # the same text for every way to write a path
    return f"init_from=null, new weights of train.seed={config.first.train.seed}"


def _recorded_stages(output_dir: Path) -> list[str]:
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


def _step_of(saved: list[Path]) -> int:
    return int(saved[-1].name.removeprefix("step-")) if saved else 0


def _settings(output_dir: Path, name: str) -> StageConfig | None:
    """Return the settings that a stage was trained with, or None if they are not recorded.

    A checkpoint has them. The run's config.yaml may have those of an attempt that failed before it saved.
    """
    saved = find_checkpoints(output_dir / "checkpoints" / name)
    for file in [*(path / CONFIG for path in saved[-1:]), output_dir / CONFIG]:
        if file.is_file() and (found := from_yaml(file.read_text(), str(file)).stages.get(name)) is not None:
            return found
    return None


def _changed(before: StageConfig, now: StageConfig) -> dict[str, str]:
    """Return the settings of a stage that differ: its key → "value before → value now"."""
    dump = TypeAdapter(StageConfig).dump_python
    dumped = [without_secrets(dump(stage, mode="json")) for stage in (before, now)]
    was, is_ = (dict(leaves({**stage, "model": with_derived_sizes(stage["model"])})) for stage in dumped)
    differing = [key for key in dict.fromkeys((*was, *is_)) if was.get(key) != is_.get(key)]
    return {
        key: f"{was.get(key)} → {is_.get(key)}"
        for key in differing
        if key not in _PATHS or _place(was.get(key)) != _place(is_.get(key))
    }


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key path with its value; a list of mappings has the paths `key[0].name`, and no value of its own."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        elif value and isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
            for index, each in enumerate(value):
                yield from leaves(each, f"{prefix}{key}[{index}].")
        else:
            yield f"{prefix}{key}", value


def _place(path: Any) -> Any:
    return os.path.realpath(path) if isinstance(path, str) else path


def _may_change(key: str, before: StageConfig | None, stage: StageConfig) -> bool:
    shapes_microbatches = key in _SHAPES_MICROBATCHES or key.startswith("parallel.")  # data parallelism divides them
    if shapes_microbatches and stage.model.router_aux_loss > 0 and stage.model.router_aux_loss_scope == "microbatch":
        return False  # the load-balancing loss is of each microbatch
    if key == "data.num_eval_examples" and before is not None:  # the other records are trained on
        was, is_ = (bad_input_named(lambda each=each: build_source(each).num_held_out) for each in (before, stage))
        return was == is_
    allowed = (*_ALLOWED, *(f"algorithm.{key}" for key in stage.algorithm.may_change_on_resume))
    return any(key == each or (each.endswith(".") and key.startswith(each)) for each in allowed)


def _other_weights(config: RunConfig, output_dir: Path, name: str) -> list[str]:
    """Return what differs about the weights that a stage began with, as a list of at most one text."""
    saved = find_checkpoints(output_dir / "checkpoints" / name)
    now = weights_source(config, output_dir, name)
    if saved:
        try:
            was = read_manifest_alone(saved[-1]).get("weights_from", now)
        except Damaged:
            was = now  # the preflight refuses the checkpoint, and says how to go on
    else:
        path = output_dir / CONFIG
        before = from_yaml(path.read_text(), str(path)) if path.is_file() else config
        was = weights_source(before, output_dir, name) if name in before.stages else now
    new = "init_from=null"  # then train.seed decides, which is compared as a setting
    return [] if was == now or (was.startswith(new) and now.startswith(new)) else [f"initial weights: {was} → {now}"]


def _refusal(config: RunConfig, differing: list[str]) -> ConfigError:
    output_dir = Path(config.output_dir)
    return ConfigError(
        f"output_dir={output_dir} holds a run with other settings ({_listed(differing)}); set another output_dir, or "
        "set them back to go on with that run, or begin anew with resume=false, which moves that run to "
        f"{_previous_directory(output_dir)}; when a run goes on, only these may change: {', '.join(MAY_CHANGE)}, "
        "logging"
    )


def _refuse_files_of_the_moved_run(config: RunConfig) -> None:
    output_dir = Path(config.output_dir)
    named = {"init_from": config.init_from, "tokenizer.path": config.first.tokenizer.path}
    named |= {f"stages.{name}.data.path": stage.data.path for name, stage in config.stages.items()}
    for key, path in named.items():
        if isinstance(path, str) and Path(path).resolve().is_relative_to(output_dir.resolve()) and Path(path).exists():
            raise ConfigError(
                f"{key}={path} lies in output_dir={output_dir}, and resume=false moves the run there aside; set "
                "another output_dir"
            )


def _holds_a_run(output_dir: Path) -> bool:
    return any((output_dir / name).exists() for name in (CONFIG, METRICS_FILE, "checkpoints"))


def _previous_directory(output_dir: Path) -> Path:
    """Return the first directory `output_dir.previous`, `output_dir.previous-2`, … that does not exist."""
    number, moved = 1, output_dir.with_name(f"{output_dir.name}.previous")
    while moved.exists():
        number += 1
        moved = output_dir.with_name(f"{output_dir.name}.previous-{number}")
    return moved


def _listed(changed: list[str]) -> str:
    more = len(changed) - _SHOWN
    return ", ".join(changed[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
