"""Make the checks that need neither torch nor megatron-core, so that mistakes in paths and files are reported at once.

Each check is a function of the package that uses the checked files, and the preflight repeats it on every rank. Each
section of the configuration that names files has a check.

Every rank makes these checks, so that no rank waits for one that has found a mistake. With several ranks, only the
preflight imports reward functions: there, the first rank of each node runs the user's file and informs the others, but
here every rank would run it.
"""

from __future__ import annotations

import os
from pathlib import Path

from rl_megatron.checkpoint.directory import check_checkpoint, check_output_dir
from rl_megatron.config.data_sources import require_place
from rl_megatron.config.errors import convert_errors
from rl_megatron.config.loggers import check_loggers
from rl_megatron.config.losses import check_own_loss
from rl_megatron.config.schema import RunConfig
from rl_megatron.data.eval_problems import check_set_files
from rl_megatron.data.run_tokenizer import load_known_tokenizer
from rl_megatron.data.sources import build_source
from rl_megatron.observability.sinks import check_sinks
from rl_megatron.rewards.loading import check_rewards
from rl_megatron.runs.rerun import check_replays, find_earlier_run
from rl_megatron.topology.degrees import validate, validate_model


def check_early(config: RunConfig) -> None:
    """Check the paths and files that a configuration names. The errors are those of the preflight."""
    check_output_dir(Path(config.output_dir))
    check_sinks(config.metric_sinks)
    check_loggers(config.logger)
    check_data(config)
    check_replays(config)
    for stage in config.stages.values():
        convert_errors(lambda stage=stage: check_rewards(stage, loads=int(os.environ.get("WORLD_SIZE", "1")) == 1))


def check_layout(config: RunConfig) -> None:
    """Check the parallel degrees against the number of ranks and the model. All ranks raise the same error."""
    validate(config.first.parallel, int(os.environ.get("WORLD_SIZE", "1")))
    validate_model(config.first.model, config.first.parallel)


def check_data(config: RunConfig) -> None:
    """Check the data, the tokenizer and the initial weights that a configuration names."""
    for stage in config.stages.values():
        require_place(stage.data)
    check_losses(config)
    tokenizer = convert_errors(lambda: load_known_tokenizer(config.first, find_earlier_run(config)))
    for stage in config.stages.values():
        convert_errors(lambda stage=stage: build_source(stage).check_files(tokenizer))
        check_set_files(stage, tokenizer)
    if config.init_from:
        digest = None if tokenizer is None else tokenizer.digest
        check_checkpoint(Path(config.init_from), config.first.model, digest)


def check_losses(config: RunConfig) -> None:
    """Check the losses that a configuration names in the user's files."""
    for stage in config.stages.values():
        check_own_loss(stage.loss)
