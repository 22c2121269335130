"""Evaluate trained weights on named sets outside of training, for `rl-megatron eval`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_megatron import disk, log
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rollout import TrajectoryConfig
from rl_megatron.config.rules import check_vocabulary
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.evaluation.generate import load_engine, run_command
from rl_megatron.evaluation.results import write_results
from rl_megatron.evaluation.sets import COMPLETIONS_PER_BLOCK, EvalSet, ScoredCompletions
from rl_megatron.generation.completions_file import CompletionsFile
from rl_megatron.generation.engines import check_engine
from rl_megatron.generation.interfaces import RolloutEngine
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.rollouts.build import build_runner
from rl_megatron.rollouts.runner import RolloutRunner
from rl_megatron.topology import degrees
from rl_megatron.topology.ranks import Ranks
from rl_megatron.topology.topology import start_topology

METRICS = "metrics.json"


@dataclass(frozen=True)
class EvalJob:
    """Weights to evaluate, and everything that the results depend on.

    Attributes:
        stage: The model, the layout, the sets and the engine.
        weights: A checkpoint, or a Hugging Face directory.
        output: The directory of the results.
        identity: JSON values that identify the weights.
        baseline: The directory of another evaluation to compare with, or None.
    """

    stage: StageConfig
    weights: Path
    tokenizer: Tokenizer
    output: Path
    identity: Mapping[str, object]
    baseline: Path | None


@dataclass(frozen=True)
class _SetFile:
    """A set, and the file of its scored completions, from which a repeated command continues."""

    eval_set: EvalSet
    file: CompletionsFile


def evaluate_weights(job: EvalJob) -> int:
    """Write the results of all sets, and return the exit status, the same on all ranks.

    Completions that the output already has are not generated again.
    """
    opened: list[_SetFile] = []

    def close() -> None:
        for one in opened:
            one.file.close()
            one.eval_set.close()

    return run_command(lambda: _evaluate_weights(job, opened), close)


def _evaluate_weights(job: EvalJob, opened: list[_SetFile]) -> None:
    stage = job.stage
    timeout_minutes = stage.train.collective_timeout_minutes
    layout = start_topology(stage.parallel, device=stage.device, timeout_minutes=timeout_minutes)
    degrees.validate_model(stage.model, stage.parallel)
    ranks = layout.ranks
    opened += ranks.all_or_none(lambda: _open_sets(job, ranks))
    done = ranks.share(lambda: [one.file.open() for one in opened], (ConfigError,))
    left = [(one, number) for one, number in zip(opened, done, strict=True)]
    left = [(one, number) for one, number in left if number < one.eval_set.num_completions]
    if left:
        sampling = make_sampling(stage, job.tokenizer)
        runner = build_runner(stage, job.tokenizer, layout)
        try:
            with load_engine(stage, job.weights, job.tokenizer, layout, job.output, sampling) as engine:
                for one, number in left:
                    _generate(one, number, engine, runner)
        finally:
            runner.close()
    failure = ranks.try_on_rank0(lambda: _finish(job, opened))
    if failure is not None:
        raise SaveFailed(f"--output {job.output}: the results cannot be written: {failure}; free space, and repeat")


def _open_sets(job: EvalJob, ranks: Ranks) -> list[_SetFile]:
    """Return the sets with their files, which record the job's weights and settings."""
    stage = job.stage
    check_vocabulary(stage.model, job.tokenizer.vocab_size)
    check_engine(stage, job.tokenizer.vocab_size)
    files = []
    for config in stage.eval.sets:
        eval_set = EvalSet(stage, config, job.tokenizer, ranks)
        functions = repr(stage.reward.functions) if config.task is None else ""
        settings = {
            "weights": job.identity,
            "precision": stage.precision,
            "tokenizer": job.tokenizer.digest,
            "problems_and_sampling": eval_set.digest,
            "reward_functions": sha256(functions.encode()).hexdigest(),
            "trajectories": sha256(repr(_list_trajectory_settings(stage.rollout)).encode()).hexdigest(),
        }
        files.append(_SetFile(eval_set, CompletionsFile(job.output / f"{config.name}.jsonl", settings)))
    return files


def _list_trajectory_settings(rollout: TrajectoryConfig) -> list[object]:
    """Return the trajectory settings that completions depend on."""
    keys = (
        "worker", "worker_kwargs", "max_turns", "turn_sampling", "tools", "max_tokens", "max_sampled_tokens",
        "on_rewrite", "retries",
    )  # fmt: skip
    environment, agent = rollout.environment, rollout.agent
    return [*(getattr(rollout, key) for key in keys), environment.name, environment.kwargs, agent.command]


def _generate(one: _SetFile, done: int, engine: RolloutEngine, runner: RolloutRunner) -> None:
    """Generate and score the completions of a set from number `done` on, and write them block by block."""
    eval_set, total = one.eval_set, one.eval_set.num_completions
    for block in range(done // COMPLETIONS_PER_BLOCK, -(-total // COMPLETIONS_PER_BLOCK)):
        first = max(done, block * COMPLETIONS_PER_BLOCK)
        log.LOGGER.info("%s: %d of %d completions", eval_set.config.name, first, total)
        completions = eval_set.complete_block(engine, runner, block)
        failure = runner.ranks.try_on_rank0(
            lambda c=completions, b=block: one.file.append(_build_lines(c, b * COMPLETIONS_PER_BLOCK, done))
        )
        if failure is not None:
            raise SaveFailed(f"--output {one.file.path} cannot be written: {failure}; free space, and repeat")


def _build_lines(completions: ScoredCompletions, first: int, done: int) -> Iterator[dict[str, object]]:
    """Yield the lines of a block of completions, numbered from `first`, leaving out numbers below `done`."""
    columns = (completions.texts, completions.rewards, completions.lengths, completions.truncated)
    for number, (text, reward, length, truncated) in enumerate(zip(*columns, strict=True), first):
        if number >= done:
            yield {"number": number, "text": text, "reward": reward, "length": length, "truncated": truncated}


def _finish(job: EvalJob, opened: list[_SetFile]) -> None:
    """Write the results of every problem and the metrics, and print the metrics. Rank 0 alone calls it."""
    metrics: dict[str, float] = {}
    for one in opened:
        lines = one.file.read()
        columns = ([line[key] for line in lines] for key in ("text", "reward", "length", "truncated"))
        results, name = one.eval_set.build_results([ScoredCompletions(*columns)]), one.eval_set.config.name
        metrics |= one.eval_set.compute_metrics(
            results, None if job.baseline is None else job.baseline / f"{name}.parquet"
        )
        write_results(job.output / f"{name}.parquet", results, one.eval_set.config.right_from, one.eval_set.digest)
    disk.replace_file(job.output / METRICS, json.dumps(metrics, indent=1) + "\n")
    names = [name for one in opened for name in one.eval_set.metric_names]
    Console().print(_build_table(names, metrics, with_changes=job.baseline is not None))


def _build_table(names: list[str], metrics: dict[str, float], with_changes: bool) -> Table:
    table = Table("metric", "value", "standard error", *(("change", "p-value") if with_changes else ()))
    for name in names:
        keys = [name, f"{name}_se", *((f"{name}_change", f"{name}_change_p") if with_changes else ())]
        table.add_row(name, *(f"{metrics[key]:.4g}" if key in metrics else "" for key in keys))
    return table
