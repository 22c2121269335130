"""Run one stage: build its models, rollout engine and rewards, run its training loop, and close them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rl_megatron.algorithms.registry import get_algorithm
from rl_megatron.batching.config import Batching
from rl_megatron.checkpoint.directory import check_head, find_checkpoints, read_manifest
from rl_megatron.config.algorithm_kinds import RolloutConfig
from rl_megatron.config.errors import ConfigError, RunFailed
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.data.sources import build_source
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import build_dataset_loader
from rl_megatron.evaluation.heldout import build_evaluation
from rl_megatron.evaluation.sets import EvalSets
from rl_megatron.generation.engines import build_engine
from rl_megatron.generation.logprob_check import LIMITS, LogprobCheck
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.generation.synced_engine import SyncedEngine
from rl_megatron.model.build import Head
from rl_megatron.observability.liveness import Position
from rl_megatron.observability.metrics_logger import MetricsLogger
from rl_megatron.observability.recorded_metrics import RecordedMetrics
from rl_megatron.observability.step_profiler import StepProfiler
from rl_megatron.rewards.reward_models import RewardModels
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.rollouts.build import build_runner
from rl_megatron.rollouts.sampler import Sampler
from rl_megatron.rollouts.scored import FailureRule, ScoredRollouts
from rl_megatron.runs.evaluations import Evaluations
from rl_megatron.runs.roll_back import RollBack
from rl_megatron.runs.stage import Stage
from rl_megatron.runs.step_meter import StepMeter
from rl_megatron.runs.stopping import Stopping
from rl_megatron.timing import use_timer
from rl_megatron.topology.topology import Topology
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.metrics import NonFiniteLoss
from rl_megatron.training.runner import FusedHead


@dataclass(frozen=True)
class StageRunner:
    """The runner of a run's stages. Checkpoints store `run_yaml`; reports of hangs and failures show `position`."""

    config: RunConfig
    layout: Topology
    tokenizer: Tokenizer
    metrics_logger: MetricsLogger
    run_yaml: str
    stopping: Stopping
    position: Position

    def run(
        self, name: str, directory: Path, weights: Path | None, weights_from: str, roll_back: RollBack
    ) -> dict[str, object]:
        """Run a stage and return its results.

        Args:
            name: The name of the stage.
            directory: The directory of its checkpoints.
            weights: The checkpoint that it starts from; None: random weights.
            weights_from: A description of these weights, which its checkpoints record.
            roll_back: Its roll-backs so far.
        """
        config, layout = self.config.stages[name], self.layout
        tokenizer, logger = self.tokenizer, self.metrics_logger
        algorithm, settings = get_algorithm(config), config.algorithm
        self.position.begin_stage(name, config.train.steps)
        steps = settings.optimizer_steps(config.train)
        policy = _build_model(config, layout, tokenizer, weights, config.optimizer, steps, algorithm.head)
        critic = None
        if algorithm.critic is not None:
            steps = algorithm.critic.optimizer_steps(settings, config.train)
            optimizer = algorithm.critic.optimizer(settings)
            critic = _build_model(config, layout, tokenizer, weights, optimizer, steps, "score")
        check, replays = _build_logprob_check(config, policy, tokenizer), config.generation.router_replay
        engine = build_engine(policy, config, logger.output_dir)
        engine = SyncedEngine(engine, check, layout.ranks, logger.note, needs_routing=replays)
        models = RewardModels(config, layout, tokenizer, lambda other: find_checkpoints(directory.parent / other)[-1])
        scorer = Scorer(
            config.reward, lambda: build_source(config).task(), layout.ranks, models=models.load(config.reward)
        )
        runner = build_runner(config, tokenizer, layout)
        components = isinstance(settings, RolloutConfig) and settings.reads_components
        least = settings.least_samples if isinstance(settings, RolloutConfig) else 1
        on_failure = FailureRule(masks_group=config.rollout.on_failure != "mask_sample", least_samples=least)
        rollouts = ScoredRollouts(runner, scorer, tokenizer, with_components=components, on_failure=on_failure)
        heldout = build_evaluation(config, tokenizer).with_rollouts(rollouts)
        meter = StepMeter(layout, config.precision)
        sets = None
        if config.eval.sets:
            sets = EvalSets(config, name, tokenizer, runner, logger.output_dir, models)
        evaluations = Evaluations(
            name, config.train, policy, engine, heldout, logger, meter.timer, sets=sets, reward_models=models
        )
        profiles = logger.output_dir / "profiles" / name
        stage = Stage(
            name=name,
            config=config,
            policy=policy,
            critic=critic,
            tokenizer=tokenizer,
            metrics_logger=logger,
            checkpoints=directory,
            evaluations=evaluations,
            weights_from=weights_from,
            run_config=self.run_yaml,
            progress_metric=algorithm.progress_metric,
            timer=meter.timer,
            meter=meter,
            profiler=StepProfiler(config.profile, profiles, meter.timer, layout.rank, layout.is_cuda),
            stopping=self.stopping,
            roll_back=roll_back,
            position=self.position,
        )
        if models.keeps_statistics:
            stage.keep("reward_models", models)
        stage.keep("metrics", RecordedMetrics(logger.output_dir))
        try:
            _run_algorithm(stage, engine, rollouts)
        except NonFiniteLoss:  # the stage may roll back, and build its models again
            _shut_down(policy, critic)
            raise
        finally:
            runner.close()
            scorer.close()
            models.close()
        _shut_down(policy, critic)
        return evaluations.results


def _run_algorithm(stage: Stage, engine: SyncedEngine, rollouts: ScoredRollouts) -> None:
    config, policy, critics = stage.config, stage.policy, () if stage.critic is None else (stage.critic,)
    try:
        with use_timer(stage.timer), _shorten_collections():
            if isinstance(config.algorithm, RolloutConfig):
                source = Sampler(stage, policy, engine, rollouts)
            else:
                source = build_dataset_loader(config, stage.tokenizer)
            get_algorithm(config).run(stage, policy, source, config.algorithm, *critics)
    except (ConfigError, RunFailed):  # every rank raises it, once a step has begun
        stage.checkpointer.complete()
        raise
    finally:
        if stage.profiler is not None:
            stage.profiler.abandon()
        stage.checkpointer.exporter.close()
        for part in stage.closing:
            part.close()
        engine.close()
        stage.evaluations.close()


@contextmanager
def _shorten_collections() -> Iterator[None]:
    """Let Python's garbage collector skip the objects that exist at the beginning of the block.

    Otherwise a full collection scans a million objects of imported modules every few steps, which takes a quarter of a
    second on one rank while the others wait. If the program has frozen objects itself, nothing is changed.
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


def _build_logprob_check(config: StageConfig, policy: MegatronPolicy, tokenizer: Tokenizer) -> LogprobCheck:
    generation = config.generation
    limit = LIMITS[config.precision] if generation.gate_limit is None else generation.gate_limit
    return LogprobCheck(policy, tokenizer, make_sampling(config, tokenizer), generation.gate_prompts, limit)


def _build_model(
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
        batching=Batching.from_config(config.train),
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
