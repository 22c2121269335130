"""Show what the model sees in a step, for `rl-megatron show-batch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from rl_megatron.config.errors import ConfigError, bad_input_named, nearest
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.data.run_tokenizer import run_tokenizer
from rl_megatron.observability.batch_html import batch_page
from rl_megatron.observability.batch_text import print_batch
from rl_megatron.observability.batch_view import BatchView
from rl_megatron.observability.step_view import view_heldout, view_step
from rl_megatron.runs.rerun import find_earlier_run

_SEQUENCES_SHOWN = 4  # in a terminal


def show_batch(config: RunConfig, options: argparse.Namespace) -> int:
    """Print the batch or the prompts of a step, or write them to an HTML page, and return the exit status.

    Args:
        config: The run.
        options: The options of the command, which rl_megatron/cli/__init__.py declares.

    Raises:
        ConfigError: There is no such stage or step, the data cannot be used, or the page cannot be written.
    """
    name, stage = _stage(config, options.stage)
    ranks = _ranks(stage.parallel) if options.ranks is None else options.ranks
    for option, value in (("--sequences", options.sequences), ("--ranks", ranks)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")
    view = bad_input_named(lambda: _view(config, name, stage, options, ranks))
    console = Console(highlight=False)
    if options.html is None:
        print_batch(console, view.shortened(options.sequences or _SEQUENCES_SHOWN), options.ids)
        return 0
    page = batch_page(view if options.sequences is None else view.shortened(options.sequences))
    try:
        Path(options.html).write_text(page, "utf-8")
    except OSError as error:
        raise ConfigError(f"--html {options.html} cannot be written: {error.strerror}") from error
    console.print(f"{view.title}: written to {options.html}", soft_wrap=True, markup=False)
    return 0


def _view(config: RunConfig, name: str, stage: StageConfig, options: argparse.Namespace, ranks: int) -> BatchView:
    tokenizer = run_tokenizer(config.first, find_earlier_run(config))
    if options.heldout:
        return view_heldout(name, stage, tokenizer, ranks)
    return view_step(name, stage, tokenizer, options.step, ranks)


def _stage(config: RunConfig, name: str | None) -> tuple[str, StageConfig]:
    name = next(iter(config.stages)) if name is None else name
    if name not in config.stages:
        raise ConfigError(f"--stage {name}: the run has no such stage{nearest(name, config.stages)}")
    return name, config.stages[name]


def _ranks(parallel: ParallelConfig) -> int:
    """Return the smallest world size: one data-parallel rank."""
    return parallel.tensor * parallel.pipeline * parallel.context
