"""Show what the model sees in a step, for `rl-megatron show-batch`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from rl_megatron.config.errors import ConfigError, convert_errors, nearest
from rl_megatron.config.schema import RunConfig
from rl_megatron.data.run_tokenizer import get_run_tokenizer
from rl_megatron.observability.batch_view import BatchView, print_batch, render_batch_page
from rl_megatron.observability.step_view import view_heldout, view_step
from rl_megatron.runs.rerun import find_earlier_run

_SEQUENCES_SHOWN = 4  # in a terminal


def show_batch(config: RunConfig, options: argparse.Namespace) -> int:
    """Print the batch or the prompts of a step, or write them to an HTML page, and return the exit status."""
    name = next(iter(config.stages)) if options.stage is None else options.stage
    if name not in config.stages:
        raise ConfigError(f"--stage {name}: the run has no such stage{nearest(name, config.stages)}")
    parallel = config.stages[name].parallel
    one_replica = parallel.tensor * parallel.pipeline * parallel.context
    ranks = one_replica if options.ranks is None else options.ranks
    for option, value in (("--sequences", options.sequences), ("--ranks", ranks)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")
    view = convert_errors(lambda: _make_view(config, name, options, ranks))
    console = Console(highlight=False)
    if options.html is None:
        print_batch(console, view.shorten(options.sequences or _SEQUENCES_SHOWN), options.ids)
        return 0
    page = render_batch_page(view if options.sequences is None else view.shorten(options.sequences))
    try:
        Path(options.html).write_text(page, "utf-8")
    except OSError as error:
        raise ConfigError(f"--html {options.html} cannot be written: {error.strerror}") from error
    console.print(f"{view.title}: written to {options.html}", soft_wrap=True, markup=False)
    return 0


def _make_view(config: RunConfig, name: str, options: argparse.Namespace, ranks: int) -> BatchView:
    stage, tokenizer = config.stages[name], get_run_tokenizer(config.first, find_earlier_run(config))
    if options.heldout:
        return view_heldout(name, stage, tokenizer, ranks)
    return view_step(name, stage, tokenizer, options.step, ranks)
