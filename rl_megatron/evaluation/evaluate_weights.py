"""Evaluate trained weights on named sets outside of training, for `rl-megatron eval`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_megatron import disk, log
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rollout import TrajectoryConfig
from rl_megatron.config.rules import check_vocabulary
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.evaluation.generate import exit_status, loaded_engine
from rl_megatron.evaluation.results import write_results
from rl_megatron.evaluation.sets import COMPLETIONS_PER_BLOCK, Answered, EvalSet
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
        tokenizer: The tokenizer.
        output: The directory of the results.
        identity: What identifies the weights, as JSON values.
        baseline: The directory of another evaluation to compare with, or None.
    """

    stage: StageConfig
    weights: Path
    tokenizer: Tokenizer
    output: Path
    identity: dict[str, Any]
    baseline: Path | None


@dataclass(frozen=True)
class _SetFile:
    """A set, and the file of its scored completions, which a command that was killed goes on with."""

    each: EvalSet
    file: CompletionsFile


def evaluate_weights(job: EvalJob) -> int:
    """Write the results of all sets, and return the exit status, the same on all ranks.

    Completions that the output has already are not generated again.
    """
    opened: list[_SetFile] = []

    def close() -> None:
        for one in opened:
            one.file.close()
            one.each.close()

    return exit_status(lambda: _evaluate_weights(job, opened), close)


def _evaluate_weights(job: EvalJob, opened: list[_SetFile]) -> None:
    stage = job.stage
    timeout_minutes = stage.train.collective_timeout_minutes
    layout = start_topology(stage.parallel, device=stage.device, timeout_minutes=timeout_minutes)
    degrees.validate_model(stage.model, stage.parallel)
    ranks = layout.ranks
    opened += ranks.all_or_none(lambda: _sets(job, ranks))
    done = ranks.share(lambda: [one.file.open() for one in opened], (ConfigError,))
    left = [(one, number) for one, number in zip(opened, done, strict=True)]
    left = [(one, number) for one, number in left if number < one.each.num_completions]
    if left:
        sampling = make_sampling(stage, job.tokenizer)
        runner = build_runner(stage, job.tokenizer, layout)
        try:
            with loaded_engine(stage, job.weights, job.tokenizer, layout, job.output, sampling) as engine:
                for one, number in left:
                    _generate(one, number, engine, runner)
        finally:
            runner.close()
    failure = ranks.try_on_rank0(lambda: _finish(job, opened))
    if failure is not None:
        raise SaveFailed(f"--output {job.output}: the results cannot be written: {failure}; free space, and repeat")


def _sets(job: EvalJob, ranks: Ranks) -> list[_SetFile]:
    """Return the sets with their files.

    Raises:
        ConfigError: The problems of a set cannot be used, or a file is of other weights or settings.
    """
    stage = job.stage
    check_vocabulary(stage.model, job.tokenizer.vocab_size)
    check_engine(stage, job.tokenizer.vocab_size)
    found = []
    for config in stage.eval.sets:
        each = EvalSet(stage, config, job.tokenizer, ranks)
        functions = repr(stage.reward.functions) if config.task is None else ""
        settings = {
            "weights": job.identity,
            "precision": stage.precision,
            "tokenizer": job.tokenizer.digest,
            "problems_and_sampling": each.digest,
            "reward_functions": sha256(functions.encode()).hexdigest(),
            "trajectories": sha256(repr(_of_completions(stage.rollout)).encode()).hexdigest(),
        }
        found.append(_SetFile(each, CompletionsFile(job.output / f"{config.name}.jsonl", settings)))
    return found


def _of_completions(rollout: TrajectoryConfig) -> list[object]:
    """Return the settings of trajectories that completions depend on."""
    keys = (
        "worker", "worker_kwargs", "max_turns", "turn_sampling", "tools", "max_tokens", "max_sampled_tokens",
        "on_rewrite", "retries",
    )  # fmt: skip
    environment, agent = rollout.environment, rollout.agent
    return [*(getattr(rollout, key) for key in keys), environment.name, environment.kwargs, agent.command]


def _generate(one: _SetFile, done: int, engine: RolloutEngine, runner: RolloutRunner) -> None:
    """Generate and score the completions of a set from number `done` on, and write them block by block."""
    each, total = one.each, one.each.num_completions
    for block in range(done // COMPLETIONS_PER_BLOCK, -(-total // COMPLETIONS_PER_BLOCK)):
        log.LOGGER.info("%s: %d of %d completions", each.config.name, max(done, block * COMPLETIONS_PER_BLOCK), total)
        answered = each.answered(engine, runner, block)
        failure = runner.ranks.try_on_rank0(
            lambda a=answered, b=block: one.file.append(_lines(a, b * COMPLETIONS_PER_BLOCK, done))
        )
        if failure is not None:
            raise SaveFailed(f"--output {one.file.path} cannot be written: {failure}; free space, and repeat")


def _lines(answered: Answered, first: int, done: int) -> Iterator[dict[str, Any]]:
    """Yield the line of each completion of a block, whose first number is `first`, from number `done` on."""
    columns = (answered.texts, answered.rewards, answered.lengths, answered.truncated)
    for number, (text, reward, length, truncated) in enumerate(zip(*columns, strict=True), first):
        if number >= done:
            yield {"number": number, "text": text, "reward": reward, "length": length, "truncated": truncated}


def _finish(job: EvalJob, opened: list[_SetFile]) -> None:
    """Write the results of every problem and the metrics, and print the metrics. Rank 0 alone calls it."""
    metrics: dict[str, float] = {}
    for one in opened:
        lines = one.file.read()
        columns = ([line[key] for line in lines] for key in ("text", "reward", "length", "truncated"))
        results, name = one.each.results([Answered(*columns)]), one.each.config.name
        metrics |= one.each.metrics(results, None if job.baseline is None else job.baseline / f"{name}.parquet")
        write_results(job.output / f"{name}.parquet", results, one.each.config.right_from, one.each.digest)
    disk.replace_file(job.output / METRICS, json.dumps(metrics, indent=1) + "\n")
    names = [name for one in opened for name in one.each.metric_names]
    Console().print(_table(names, metrics, with_changes=job.baseline is not None))


def _table(names: list[str], metrics: dict[str, float], with_changes: bool) -> Table:
    table = Table("metric", "value", "standard error", *(("change", "p-value") if with_changes else ()))
    for name in names:
        keys = [name, f"{name}_se", *((f"{name}_change", f"{name}_change_p") if with_changes else ())]
        table.add_row(name, *(f"{metrics[key]:.4g}" if key in metrics else "" for key in keys))
    return table
