"""Run the stages of a configuration in order, each from the weights of the stage before. A run can be resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from rl_megatron import disk, log
from rl_megatron.checkpoint.directory import find_checkpoints, put_back
from rl_megatron.checkpoint.exports import Exporter
from rl_megatron.config.algorithm_kinds import RolloutConfig
from rl_megatron.config.data_sources import describe_source
from rl_megatron.config.errors import STOPPED, ConfigError, RunFailed
from rl_megatron.config.schema import RunConfig
from rl_megatron.config.stages import find_previous_stage
from rl_megatron.observability.failures import Attempts, FailureFile
from rl_megatron.observability.html_report import start_writing_report
from rl_megatron.observability.run_watch import RunWatch
from rl_megatron.runs import preflight, verify
from rl_megatron.runs.desync import check_configuration
from rl_megatron.runs.lock import OutputLock
from rl_megatron.runs.next_commands import list_next_commands
from rl_megatron.runs.output import begin_output, open_metrics
from rl_megatron.runs.rerun import build_run_yaml, describe_weights, find_earlier_run
from rl_megatron.runs.roll_back import run_with_roll_backs
from rl_megatron.runs.stage_runner import StageRunner
from rl_megatron.runs.stop_signals import StopSignals
from rl_megatron.runs.stopping import RunStopped, Stopping
from rl_megatron.topology import degrees
from rl_megatron.topology.determinism import compute_deterministically
from rl_megatron.topology.device import join
from rl_megatron.topology.job_store import JOB
from rl_megatron.topology.ranks import Ranks, leave_together
from rl_megatron.topology.topology import Topology, build, keep_launch_order, keep_nccl_on_loopback


class DiskFull(RunFailed):
    """The error of a run that must write to continue, but whose disk is full. It may be raised on only some ranks."""


class RankFailed(Exception):
    """The error of a run of several ranks that an unexpected error ended. That error is printed and in failure.json."""


def run(config: RunConfig) -> int:
    """Run every stage and write `output_dir`. If the run fails, rank 0 prints the cause in one line.

    Returns:
        The exit status, the same on all ranks. It is 0 if the run succeeded, and 2 if the input is bad, which is nearly
        always found before the first step. It is 1 if a loss became NaN; if a rollout engine, a reward function or a
        user's advantage estimator failed; if a rank failed in another way; or if the last checkpoint of a stage could
        not be saved. It is `STOPPED` if the run ended early because of a signal or a time limit, and was saved.
    """
    try:
        run_stages(config)
    except (ConfigError, RunFailed) as error:
        log.error(error)
        leave_together()
        return 2 if isinstance(error, ConfigError) else 1
    except RunStopped as stopped:
        log.LOGGER.warning("%s; the same command continues the run (exit status %d)", stopped, STOPPED)
        leave_together()
        return STOPPED
    except RankFailed:
        return 1
    dist.destroy_process_group()
    return 0


@dataclass(frozen=True)
class RunResults:
    """The content of a finished run's summary.json, and the last checkpoint of its last stage."""

    summary: dict[str, Any]
    checkpoint: Path


def run_stages(config: RunConfig) -> RunResults:
    """Run every stage and write `output_dir`. The process group is not destroyed.

    Raises:
        ConfigError: The input is bad; it is raised on every rank.
        RunStopped: The run ended early because of a signal or a time limit. It is saved, and its report is written.
        RankFailed: An unexpected error on any rank ended a run of several ranks.
        RunFailed: The run failed. Once stages have begun, the message names the newest checkpoint.
    """
    started = time.perf_counter()
    first = config.first
    timeout_minutes = first.train.collective_timeout_minutes
    if first.train.deterministic:
        compute_deterministically()
    keep_launch_order(first.parallel)
    keep_nccl_on_loopback(_list_server_hosts(config))
    device, store = join(first.device, timeout_minutes)
    check_configuration(config, device)
    layout = build(first.parallel, device, first.train.seed, timeout_minutes, store)
    degrees.validate_model(first.model, first.parallel)
    lock = OutputLock(Path(config.output_dir))
    with StopSignals() as signals:
        stopping = Stopping(signals, layout.ranks, first.train.checkpoint_must_save_by)
        file, attempts = FailureFile(Path(config.output_dir)), Attempts(Path(config.output_dir))
        limit = first.train.hang_report_seconds
        with RunWatch(layout.store, layout.rank, layout.world_size, limit, timeout_minutes, file) as watch:
            try:
                return _run_locked(config, lock, layout, stopping, started, watch, attempts)
            except RunStopped:
                raise
            except Exception as error:
                foreseen = isinstance(error, (ConfigError, RunFailed))
                if isinstance(error, DiskFull) and layout.world_size > 1:
                    foreseen = False  # only this rank raises it
                watch.report_error(error, on_all_ranks=foreseen)
                attempts.end("failed", watch.position.place.describe())
                if layout.rank == 0 and file.has_begun:
                    with suppress(OSError):
                        # This writes report.html in a process that survives this one.
                        start_writing_report(file.path.parent)
                if foreseen or layout.world_size == 1:
                    raise
                raise RankFailed(f"rank {layout.rank} was ended by an error: {error}") from error
            finally:
                lock.release()


def _list_server_hosts(config: RunConfig) -> list[str]:
    kinds = [kind for stage in config.stages.values() for kind in (stage.generation.vllm, stage.generation.sglang)]
    return [urlsplit(url).hostname or "" for kind in kinds for url in kind.urls]


def _run_locked(
    config: RunConfig,
    lock: OutputLock,
    layout: Topology,
    stopping: Stopping,
    started: float,
    watch: RunWatch,
    attempts: Attempts,
) -> RunResults:
    output_dir, earlier = Path(config.output_dir), find_earlier_run(config)
    ranks = layout.ranks
    ranks.run_on_rank0(lock.acquire)
    _prepare(lambda: _put_back_checkpoints(earlier), output_dir, ranks)
    tokenizer = ranks.all_or_none(lambda: preflight.check(config, earlier))
    verify.refuse_damage(config, earlier, ranks)
    if ranks.leads:
        log.LOGGER.info("%s, %s, vocabulary of %d", layout.describe(), layout.device.type, tokenizer.vocab_size)
        for name, stage in config.stages.items():
            log.LOGGER.info("stage %s: %s", name, describe_source(stage))
            if isinstance(stage.algorithm, RolloutConfig):
                log.LOGGER.info("stage %s: %s", name, stage.algorithm.describe_step(stage.train))
    run_yaml = ranks.all_or_none(lambda: build_run_yaml(config, earlier))  # every rank has read before rank 0 writes
    _prepare(lambda: begin_output(config, run_yaml, lock, tokenizer), output_dir, ranks)
    watch.begin_writing()
    metrics_logger = ranks.all_or_none(lambda: open_metrics(config, layout, attempts))
    stages = StageRunner(config, layout, tokenizer, metrics_logger, run_yaml, stopping, watch.position)
    results: dict[str, object] = {}
    has_trained = False
    last: dict[str | None, Path | None] = {None: Path(config.init_from) if config.init_from else None}
    newest = None  # checkpoint of this run
    try:
        for name, stage_config in config.stages.items():
            directory = output_dir / "checkpoints" / name
            manifest = verify.find_last_manifest(directory, stage_config)
            if manifest is not None:  # the stage has its last checkpoint already, but perhaps not its export
                results[name] = manifest["results"]
                exporter = Exporter(directory, ranks, stage_config.train.export_hf)
                exporter.begin_missing()
                exporter.wait()
            else:
                has_trained = True
                source = last[find_previous_stage(config.stages, name)]
                run_stage = partial(stages.run, name, directory, source, describe_weights(config, output_dir, name))
                results[name] = run_with_roll_backs(run_stage, stage_config.train, directory)
            last[name] = newest = find_checkpoints(directory)[-1]
    except (ConfigError, RunFailed) as error:
        metrics_logger.close(has_failed=True)
        raise type(error)(f"{error}; {_describe_newest(newest, directory)}") from error
    except RunStopped as stopped:
        results[name] = stopped.results
        done = {name: result for name, result in results.items() if result}
        summary = _summarise(done, layout, time.perf_counter() - started)
        attempts.end("stopped", f"stage {stopped.stage}, step {stopped.step}")
        metrics_logger.finish(summary | {"stopped": {"stage": stopped.stage, "step": stopped.step}})
        raise
    except Exception as error:
        metrics_logger.close(has_failed=True)
        if disk.is_full(error):
            reason = disk.describe(error, output_dir)
            raise DiskFull(f"the disk is full: {reason}; free space; {_describe_newest(newest, directory)}") from error
        raise
    assert newest is not None  # the last stage's last checkpoint
    summary = _summarise(results, layout, time.perf_counter() - started)
    attempts.end("complete")
    is_job = JOB in os.environ  # a job of a sweep; the sweep lists commands at its end
    metrics_logger.finish(summary, [] if is_job else list_next_commands(config, tokenizer, newest), has_trained)
    return RunResults(summary, newest)


def _put_back_checkpoints(output_dir: Path) -> None:
    for stage in (output_dir / "checkpoints").glob("*/"):
        put_back(stage)


def _describe_newest(earlier: Path | None, directory: Path) -> str:
    """Describe the newest checkpoint in the stage's `directory` or, if it has none, the checkpoint `earlier`."""
    newest = [earlier, *find_checkpoints(directory)][-1]
    return f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"


def _prepare(action: Callable[[], object], output_dir: Path, ranks: Ranks) -> None:
    """Prepare the output directory on rank 0. If that fails, ConfigError is raised on every rank."""

    def describe(error: Exception) -> str:
        if isinstance(error, ConfigError):
            return str(error)
        return f"output_dir cannot be written: {disk.describe(error, output_dir)}"

    failure = ranks.try_on_rank0(action, describe)
    if failure is not None:
        raise ConfigError(failure)


def _summarise(results: dict[str, Any], layout: Topology, seconds: float) -> dict[str, object]:
    eval_metrics = {name: result["measures"] for name, result in results.items()}
    return {
        "accuracy": {name: m["accuracy"] for name, m in eval_metrics.items() if "accuracy" in m},
        "stages": eval_metrics,
        "samples": {name: result["samples"] for name, result in results.items() if result["samples"]},
        "seconds": round(seconds, 1),
        "world_size": layout.world_size,
        "layout": layout.describe(),
    }
