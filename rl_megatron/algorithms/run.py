"""Run the stages of a configuration in order, each from the weights of the stage before. A run can be resumed."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rl_megatron import log
from rl_megatron.algorithms import preflight, verify
from rl_megatron.algorithms.advantage_estimators import AdvantagesFailed
from rl_megatron.algorithms.desync import RanksDiffer, check_configuration
from rl_megatron.algorithms.endpoint_teacher import TeacherFailed
from rl_megatron.algorithms.eval_sets import EvalSets
from rl_megatron.algorithms.evaluate import build_evaluation
from rl_megatron.algorithms.logprob_check import LIMITS, EngineMismatch, LogprobCheck
from rl_megatron.algorithms.next_commands import next_commands
from rl_megatron.algorithms.registry import algorithm_of
from rl_megatron.algorithms.roll_back import RollBack, with_roll_backs
from rl_megatron.algorithms.run_output import begin_output, open_metrics
from rl_megatron.algorithms.stage import Stage
from rl_megatron.algorithms.step_meter import StepMeter
from rl_megatron.algorithms.stopping import RunStopped, Stopping
from rl_megatron.algorithms.synced_engine import SyncedEngine
from rl_megatron.batching.config import Batching
from rl_megatron.checkpoint.directory import check_head, complete_checkpoints, put_back, read_manifest
from rl_megatron.checkpoint.lock import OutputLock
from rl_megatron.checkpoint.rerun import earlier_run, recorded_config, weights_source
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.algorithm_kinds import RolloutConfig
from rl_megatron.config.data_sources import describe_source
from rl_megatron.config.errors import STOPPED, ConfigError
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.config.stages import stage_before
from rl_megatron.data.sources import build_source
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.execution import FusedHead, NonFiniteLoss
from rl_megatron.execution.phase_timer import timing
from rl_megatron.generation.engines import build_engine
from rl_megatron.generation.interfaces import EngineFailed
from rl_megatron.generation.stage_sampling import stage_sampling
from rl_megatron.model.build import Head
from rl_megatron.observability.attempts import Attempts
from rl_megatron.observability.failure_file import FailureFile
from rl_megatron.observability.html_report import start_to_write
from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.observability.position import Position
from rl_megatron.observability.recorded_metrics import RecordedMetrics
from rl_megatron.observability.run_watch import RunWatch
from rl_megatron.observability.step_profiler import StepProfiler
from rl_megatron.policy.megatron_policy import MegatronPolicy
from rl_megatron.rewards.reward_models import RewardModels
from rl_megatron.rewards.scorer import RewardFailed, Scorer
from rl_megatron.rollouts.build import build_runner
from rl_megatron.rollouts.runner import RolloutFailed
from rl_megatron.rollouts.scored import ScoredRollouts
from rl_megatron.topology import degrees
from rl_megatron.topology.collective_errors import on_all_or_none, run_on_rank0
from rl_megatron.topology.determinism import compute_deterministically
from rl_megatron.topology.device import join
from rl_megatron.topology.job_store import JOB
from rl_megatron.topology.stop_signals import StopSignals
from rl_megatron.topology.topology import Topology, build, keep_launch_order
from rl_megatron.weight_sync.plan import WeightsRefused

# Errors that end a run after its start, with exit status 1.
FAILURES = (
    NonFiniteLoss,
    WeightsRefused,
    EngineFailed,
    EngineMismatch,
    RewardFailed,
    RolloutFailed,
    AdvantagesFailed,
    TeacherFailed,
    SaveFailed,
    RanksDiffer,
)
_LEAVING_TIMEOUT = timedelta(seconds=30)


class RankFailed(Exception):
    """An error that no rank foresaw ended a run of several ranks. It has been printed, and failure.json has it."""


def run(config: RunConfig) -> int:
    """Run every stage and write `output_dir`. If the run fails, rank 0 prints one line that says why.

    Returns:
        The exit status, the same on all ranks. It is 0 if the run succeeded, and 2 if the input is bad, which is nearly
        always found before the first step. It is 1 if a loss became NaN, a rollout engine, a reward function or an own
        advantage estimator failed, a rank failed in another way, or the last checkpoint of a stage could not be saved.
        It is `STOPPED` if the run ended early because of a signal or a time limit, and was saved.
    """
    try:
        run_stages(config)
    except (ConfigError, *FAILURES) as error:
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
    """What a finished run has.

    Attributes:
        summary: The content of summary.json.
        checkpoint: The last checkpoint of the last stage.
    """

    summary: dict[str, Any]
    checkpoint: Path


def run_stages(config: RunConfig) -> RunResults:
    """Run every stage and write `output_dir`. The process group stays.

    Raises:
        ConfigError: The input is bad; it is raised on every rank.
        RunStopped: The run ended early because of a signal or a time limit. It is saved, and its report is written.
        RankFailed: Another error ended the run, on any of several ranks.
        Exception: One of `FAILURES` ended the run. Once stages have begun, every message names the newest checkpoint.
    """
    started = time.perf_counter()
    first = config.first
    timeout_minutes = first.train.collective_timeout_minutes
    if first.train.deterministic:
        compute_deterministically()
    keep_launch_order(first.parallel)
    device, store = join(first.device, timeout_minutes)
    check_configuration(config, device)
    layout = build(first.parallel, device, first.train.seed, timeout_minutes, store)
    degrees.validate_model(first.model, first.parallel)
    lock = OutputLock(Path(config.output_dir))
    with StopSignals() as signals:
        stopping = Stopping(signals, layout.device, first.train.checkpoint_must_save_by)
        file, attempts = FailureFile(Path(config.output_dir)), Attempts(Path(config.output_dir))
        limit = first.train.hang_report_seconds
        with RunWatch(layout.store, layout.rank, layout.world_size, limit, timeout_minutes, file) as watch:
            try:
                return _run_locked(config, lock, layout, stopping, started, watch, attempts)
            except RunStopped:
                raise
            except Exception as error:
                foreseen = isinstance(error, (ConfigError, *FAILURES))
                watch.failed(error, on_all_ranks=foreseen)
                attempts.end("failed", watch.position.place.describe())
                if layout.rank == 0 and file.has_begun:
                    with suppress(OSError):
                        start_to_write(file.path.parent)  # report.html, in a process that survives the end of this one
                if foreseen or layout.world_size == 1:
                    raise
                raise RankFailed(f"rank {layout.rank} was ended by an error: {error}") from error
            finally:
                lock.release()


def _run_locked(
    config: RunConfig,
    lock: OutputLock,
    layout: Topology,
    stopping: Stopping,
    started: float,
    watch: RunWatch,
    attempts: Attempts,
) -> RunResults:
    output_dir, earlier = Path(config.output_dir), earlier_run(config)
    on_all_or_none(lambda: lock.acquire() if dist.get_rank() == 0 else None)
    _refuse_failure(run_on_rank0(lambda: _put_back_checkpoints(earlier)))
    tokenizer = on_all_or_none(lambda: preflight.check(config, earlier))
    verify.refuse_damage(config, earlier)
    if dist.get_rank() == 0:
        log.LOGGER.info("%s, %s, vocabulary of %d", layout.describe(), layout.device.type, tokenizer.vocab_size)
        for name, stage in config.stages.items():
            log.LOGGER.info("stage %s: %s", name, describe_source(stage))
    run_yaml = on_all_or_none(lambda: recorded_config(config, earlier))  # every rank has read before rank 0 writes
    _refuse_failure(run_on_rank0(lambda: begin_output(config, run_yaml, lock, tokenizer)))
    watch.begin_writing()
    metrics_logger = on_all_or_none(lambda: open_metrics(config, layout, attempts))
    results: dict[str, Any] = {}
    has_trained = False
    last: dict[str | None, Path | None] = {None: Path(config.init_from) if config.init_from else None}
    newest = None  # checkpoint of this run
    try:
        for name, stage_config in config.stages.items():
            directory = output_dir / "checkpoints" / name
            results[name] = _finished_results(directory, stage_config)
            if results[name] is None:
                has_trained = True
                weights_from = weights_source(config, output_dir, name)
                run_stage = partial(
                    _run_stage,
                    config,
                    name,
                    layout,
                    tokenizer,
                    metrics_logger,
                    directory,
                    last[stage_before(config.stages, name)],
                    weights_from,
                    run_yaml,
                    stopping,
                    watch.position,
                )
                results[name] = with_roll_backs(run_stage, stage_config.train, directory)
            last[name] = newest = complete_checkpoints(directory)[-1]
    except (ConfigError, *FAILURES) as error:
        metrics_logger.close(has_failed=True)
        newest = [newest, *complete_checkpoints(directory)][-1]
        kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint yet"
        raise type(error)(f"{error}; {kept}") from error
    except RunStopped as stopped:
        results[name] = stopped.results
        done = {name: result for name, result in results.items() if result}
        summary = _summary(done, layout, time.perf_counter() - started)
        attempts.end("stopped", f"stage {stopped.stage}, step {stopped.step}")
        metrics_logger.finish(summary | {"stopped": {"stage": stopped.stage, "step": stopped.step}})
        raise
    except Exception:
        metrics_logger.close(has_failed=True)
        raise
    assert newest is not None  # the last stage's last checkpoint
    summary = _summary(results, layout, time.perf_counter() - started)
    attempts.end("complete")
    is_job = JOB in os.environ  # of a sweep, which says at its end what can be done
    metrics_logger.finish(summary, [] if is_job else next_commands(config, tokenizer, newest), has_trained)
    return RunResults(summary, newest)


def _put_back_checkpoints(output_dir: Path) -> None:
    for stage in (output_dir / "checkpoints").glob("*/"):
        put_back(stage)


def _refuse_failure(failure: str | None) -> None:
    """Raise ConfigError, on every rank, if `failure` is the message of a failure on rank 0."""
    if failure is not None:
        raise ConfigError(f"output_dir cannot be written: {failure}")


def leave_together() -> None:
    """Wait for all ranks, but not for long: when one rank exits, torchrun kills others that are still logging."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(RuntimeError):  # another rank may have ended in another way
            barrier = dist.barrier(async_op=True)
            if barrier is not None:  # never None on a member of the group
                barrier.wait(_LEAVING_TIMEOUT)


def _run_stage(
    run_config: RunConfig,
    name: str,
    layout: Topology,
    tokenizer: Tokenizer,
    metrics_logger: MetricsLogger,
    directory: Path,
    weights: Path | None,
    weights_from: str,
    run_yaml: str,
    stopping: Stopping,
    position: Position,
    roll_back: RollBack,
) -> dict[str, Any]:
    config = run_config.stages[name]
    algorithm, settings = algorithm_of(config), config.algorithm
    position.begin_stage(name, config.train.steps)
    steps = settings.optimizer_steps(config.train)
    policy = _model(config, layout, tokenizer, weights, config.optimizer, steps, algorithm.head)
    critic = None
    if algorithm.critic is not None:
        steps = algorithm.critic.optimizer_steps(settings, config.train)
        critic = _model(config, layout, tokenizer, weights, algorithm.critic.optimizer(settings), steps, "score")
    check, replays = _logprob_check(config, policy, tokenizer), config.generation.router_replay
    engine = build_engine(policy, config, metrics_logger.output_dir)
    engine = SyncedEngine(engine, check, metrics_logger.note, needs_routing=replays)
    models = RewardModels(config, layout, tokenizer, lambda stage: complete_checkpoints(directory.parent / stage)[-1])
    scorer = Scorer(config.reward, lambda: build_source(config).task(), models=models.of(config.reward))
    runner = build_runner(config, tokenizer, layout)
    components = isinstance(settings, RolloutConfig) and settings.reads_components
    rollouts = ScoredRollouts(runner, scorer, tokenizer, with_components=components)
    evaluation = build_evaluation(config, tokenizer).made_by(rollouts)
    meter = StepMeter(layout, config.precision)
    profiles = metrics_logger.output_dir / "profiles" / name
    of_sets = config, name, tokenizer, runner
    profiler = StepProfiler(config.profile, profiles, meter.timer, layout.rank, layout.is_cuda)
    stage = Stage(
        name, config, policy, engine, tokenizer, metrics_logger, directory,
        rollouts, lambda: evaluation.evaluate(policy, engine), weights_from, critic, run_yaml,
        algorithm.progress_metric, timer=meter.timer, meter=meter, profiler=profiler, stopping=stopping,
        roll_back=roll_back, position=position,
        eval_sets=EvalSets(*of_sets, metrics_logger.output_dir, models) if config.eval.sets else None,
        reward_models=models,
    )  # fmt: skip
    stage.keep("metrics", RecordedMetrics(metrics_logger.output_dir))
    try:
        _run_algorithm(stage, engine)
    except NonFiniteLoss:  # the stage may roll back, and build its models again
        _shut_down(policy, critic)
        raise
    finally:
        runner.close()
        scorer.close()
        models.close()
    _shut_down(policy, critic)
    return stage.results


def _run_algorithm(stage: Stage, engine: SyncedEngine) -> None:
    """Run the training loop of a stage, and shut down its engine."""
    try:
        with timing(stage.timer), _short_collections():
            algorithm_of(stage.config).run(stage, stage.config.algorithm)
    except (ConfigError, *FAILURES):  # on every rank, once a step has begun
        stage.checkpointer.complete()
        raise
    finally:
        if stage.profiler is not None:
            stage.profiler.abandon()
        for part in stage.closing:
            part.close()
        engine.shutdown()
        if stage.eval_sets is not None:
            stage.eval_sets.close()


@contextmanager
def _short_collections() -> Iterator[None]:
    """Let Python's garbage collections skip the objects that exist before the steps, within the block.

    Otherwise a full collection scans a million objects of imported modules every few steps, which takes a quarter of a
    second on one rank while the others wait. A program that has frozen objects itself keeps its own choice.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _shut_down(policy: MegatronPolicy, critic: MegatronPolicy | None) -> None:
    policy.shutdown()
    if critic is not None:
        critic.shutdown()


def _logprob_check(config: StageConfig, policy: MegatronPolicy, tokenizer: Tokenizer) -> LogprobCheck:
    generation = config.generation
    limit = LIMITS[config.precision] if generation.gate_limit is None else generation.gate_limit
    return LogprobCheck(policy, tokenizer, stage_sampling(config, tokenizer), generation.gate_prompts, limit)


def _model(
    config: StageConfig,
    layout: Topology,
    tokenizer: Tokenizer,
    weights: Path | None,
    optimizer: OptimizerConfig,
    total_steps: int,
    head: Head,
) -> MegatronPolicy:
    """Return the stage's policy, or its critic, with the weights of the checkpoint `weights` if it is given."""
    model = MegatronPolicy(
        config.model,
        layout,
        vocab_size=tokenizer.vocab_size,
        precision=config.precision,
        seed=config.train.seed,
        optimizer=optimizer,
        total_steps=total_steps,
        global_batch_size=config.train.global_batch_size,
        batching=Batching.of(config.train),
        head=head,
        fused_head=FusedHead() if config.train.fused_head else None,
        max_skipped_steps=config.train.max_nonfinite_steps if config.train.on_nonfinite == "skip" else 0,
        reference_placement=config.train.reference,
        peft=config.peft,
        initialise=weights is None or check_head(weights, read_manifest(weights), head, weights_only=True),
    )
    if weights is not None:
        model.load_checkpoint(weights, weights_only=True, verify=False)  # written by this run, or verified at its start
    return model


def _finished_results(directory: Path, config: StageConfig) -> dict[str, Any] | None:
    """Return the results of a stage that has its last checkpoint already, or None."""
    manifest = verify.manifest_at_the_end(directory, config)
    return None if manifest is None else manifest["results"]


def _summary(results: dict[str, Any], layout: Topology, seconds: float) -> dict[str, Any]:
    eval_metrics = {name: result["measures"] for name, result in results.items()}
    return {
        "accuracy": {name: m["accuracy"] for name, m in eval_metrics.items() if "accuracy" in m},
        "stages": eval_metrics,
        "samples": {name: result["samples"] for name, result in results.items() if result["samples"]},
        "seconds": round(seconds, 1),
        "world_size": layout.world_size,
        "layout": layout.describe(),
    }
