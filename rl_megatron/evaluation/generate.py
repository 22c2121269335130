"""Complete prompts from files on a rollout engine, outside of training, for `rl-megatron generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rl_megatron import log
from rl_megatron.checkpoint.hf_weights import open_hugging_face
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.errors import ConfigError, RunFailed
from rl_megatron.config.rules import check_vocabulary
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.prompt_files import FilePrompt, FilePrompts
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.completions_file import COMPLETIONS_PER_BLOCK, CompletionsFile
from rl_megatron.generation.engines import build_engine, check_engine
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.generation.logprob_check import LIMITS, LogprobCheck
from rl_megatron.generation.requests import derive_seed
from rl_megatron.generation.stage_sampling import make_sampling
from rl_megatron.generation.synced_engine import SyncedEngine
from rl_megatron.topology import degrees
from rl_megatron.topology.ranks import Ranks, leave_together
from rl_megatron.topology.topology import Topology, start_topology
from rl_megatron.training.megatron_policy import MegatronPolicy

_SECONDS_PER_LINE = 30.0  # between lines of progress, if the console is not a terminal


@dataclass(frozen=True)
class CompletionJob:
    """Prompts to complete, and everything that their completions depend on.

    Attributes:
        stage: The model, the layout, the sampling and the engine.
        weights: A checkpoint, or a Hugging Face directory.
        output: The file of the completions.
        samples_per_prompt: How many completions each prompt gets.
        seed: The seed of the random numbers of sampling.
        greedy: Whether to take the likeliest token instead of sampling.
    """

    stage: StageConfig
    weights: Path
    tokenizer: Tokenizer
    prompts: FilePrompts
    output: CompletionsFile
    samples_per_prompt: int
    seed: int
    greedy: bool

    @property
    def num_completions(self) -> int:
        """Return how many completions the finished output has, one per line."""
        return len(self.prompts.prompts) * self.samples_per_prompt

    def locate(self, number: int) -> tuple[FilePrompt, int]:
        """Return the prompt of completion `number`, and the completion's number among the prompt's samples."""
        prompt, sample = divmod(number, self.samples_per_prompt)
        return self.prompts.prompts[prompt], sample

    def sampling(self) -> Sampling:
        return make_sampling(self.stage, self.tokenizer, self.greedy, self.prompts.end_of_turn_ids)


def complete_prompts(job: CompletionJob) -> int:
    """Write the completions of all prompts, and return the exit status, the same on all ranks.

    Completions that the output already has are not generated again. If the command fails, rank 0 prints the cause in
    one line.
    """
    return run_command(lambda: _complete_prompts(job), job.output.close)


def run_command(work: Callable[[], None], close: Callable[[], None]) -> int:
    """Call `work`, then `close`, and return the command's exit status, the same on all ranks."""
    try:
        work()
    except (ConfigError, RunFailed) as error:
        log.error(error)
        leave_together()
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        close()
    dist.destroy_process_group()
    return 0


def _complete_prompts(job: CompletionJob) -> None:
    stage = job.stage
    timeout_minutes = stage.train.collective_timeout_minutes
    layout = start_topology(stage.parallel, device=stage.device, timeout_minutes=timeout_minutes)
    degrees.validate_model(stage.model, stage.parallel)
    ranks = layout.ranks
    sampling = ranks.all_or_none(lambda: _check_sampling(job))
    done = ranks.share(job.output.open, (ConfigError,))
    if done:
        log.LOGGER.info("%s: %d of %d completions exist already", job.output.path, done, job.num_completions)
    if done >= job.num_completions:
        return
    with load_engine(stage, job.weights, job.tokenizer, layout, job.output.path.parent, sampling) as engine:
        _generate(job, sampling, engine, done, ranks)


def _check_sampling(job: CompletionJob) -> Sampling:
    check_vocabulary(job.stage.model, job.tokenizer.vocab_size)
    check_engine(job.stage, job.tokenizer.vocab_size)
    return job.sampling()


@contextmanager
def load_engine(
    stage: StageConfig, weights: Path, tokenizer: Tokenizer, layout: Topology, directory: Path, sampling: Sampling
) -> Iterator[RolloutEngine]:
    """Load trained weights without an optimizer; yield the stage's rollout engine for them, and close it afterwards.

    `weights` is a checkpoint or a Hugging Face directory. The engine shares files with its processes in `directory`,
    and the logprob check uses `sampling`.
    """
    policy = MegatronPolicy(
        stage.model,
        layout,
        vocab_size=tokenizer.vocab_size,
        precision=stage.precision,
        initialise=False,
    )
    if (weights / MANIFEST).is_file():
        policy.load_checkpoint(weights, weights_only=True)
    else:
        layout.ranks.all_or_none(lambda: open_hugging_face(weights)).load_into(policy.model)
    limit = stage.generation.gate_limit or LIMITS[stage.precision]
    check = LogprobCheck(policy, tokenizer, sampling, stage.generation.gate_prompts, limit)
    engine = SyncedEngine(build_engine(policy, stage, directory), check, layout.ranks, lambda metrics: None)
    try:
        yield engine
    finally:
        engine.close()
    policy.shutdown()


def _generate(job: CompletionJob, sampling: Sampling, engine: RolloutEngine, done: int, ranks: Ranks) -> None:
    """Generate the completions from number `done` on, and write them block by block.

    The random numbers of a completion depend on `--seed`, on the number of its block and on its index in the block.
    They do not depend on where the command continues, on the engine, or on which completions are decoded together.
    """
    total, began, tokens, first = job.num_completions, time.perf_counter(), 0, done
    with _show_progress(total) as show:
        while done < total:
            block = done // COMPLETIONS_PER_BLOCK
            numbers = range(block * COMPLETIONS_PER_BLOCK, min((block + 1) * COMPLETIONS_PER_BLOCK, total))
            show(numbers.start, len(numbers))
            prompts = [list(job.locate(number)[0].ids) for number in numbers]
            rollouts = generate(engine, prompts, sampling, derive_seed(job.seed, block))
            failure = ranks.try_on_rank0(
                lambda n=numbers, r=rollouts, d=done: job.output.append(_build_lines(job, n, r, d))
            )
            if failure is not None:
                raise SaveFailed(f"--output {job.output.path} cannot be written: {failure}; free space, and repeat")
            tokens += int((rollouts["input_lengths"] - rollouts["prompt_lengths"]).sum())
            done = numbers.stop
    seconds = time.perf_counter() - began
    log.LOGGER.info(
        "%s: %d completions, together %d tokens, in %.1f s (%.0f tokens/s, weight sync and logprob check included)",
        *(job.output.path, done - first, tokens, seconds, tokens / seconds),
    )


def _build_lines(
    job: CompletionJob, numbers: range, rollouts: BatchedDataDict, done: int
) -> Iterator[dict[str, object]]:
    """Yield the line of each completion from number `done` on."""
    columns = [rollouts[key].tolist() for key in ("prompt_lengths", "input_lengths", "stopped", "weight_version")]
    for index, (number, start, end, stopped, version) in enumerate(zip(numbers, *columns, strict=True)):
        if number < done:
            continue  # its line was written before the command was killed
        prompt, sample = job.locate(number)
        ids = rollouts["input_ids"][index, start:end].tolist()
        yield {
            "prompt": prompt.number,
            "sample": sample,
            "location": prompt.record.location,
            "prompt_ids": prompt.ids,
            "text": job.tokenizer.decode(ids),
            "ids": ids,
            "logprobs": rollouts["generation_logprobs"][index, start:end].tolist(),
            "reason": "stop" if stopped else "length",
            "weight_version": version,
        }


@contextmanager
def _show_progress(total: int) -> Iterator[Callable[[int, int], None]]:
    """Show the number of completions on rank 0. Yield a function to call with the start and size of each block.

    Within a block, the engine's progress reports update the number.
    """
    console = Console(stderr=True, quiet=not log.is_main_rank())
    columns = (TextColumn("generate"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    line_shown = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("generate", total=total)

        def show(done: int) -> None:
            nonlocal line_shown
            bar.update(task, completed=done)
            if not console.is_terminal and time.monotonic() - line_shown >= _SECONDS_PER_LINE:
                line_shown = time.monotonic()
                log.LOGGER.info("generate: %d of %d completions", done, total)

        def begin(start: int, size: int) -> None:
            show(start)
            log.watch_progress(lambda part, of, noun, detail: show(start + part * size // max(of, 1)))

        try:
            yield begin
        finally:
            log.watch_progress(None)
