"""Evaluate a checkpoint or a Hugging Face directory on the sets of `eval.sets`, for `rl-megatron eval`.

Mistakes in options, paths and files are reported before torch is imported.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_megatron import log
from rl_megatron.cli.generate import build_weights_tokenizer, check_weights
from rl_megatron.config.commands import format_override
from rl_megatron.config.errors import ConfigError, convert_errors
from rl_megatron.config.schema import RunConfig
from rl_megatron.data.eval_problems import check_set_files
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rewards.loading import check_rewards


def add_weights(weights: str, overrides: list[str]) -> list[str]:
    """Return the overrides and `init_from=` the weights. Overrides that set `init_from` themselves are refused."""
    if "=" in weights and not Path(weights).exists():
        raise ConfigError(f"eval {weights}: the weights come first, as in rl-megatron eval CHECKPOINT {weights}")
    if any(text.startswith("init_from=") for text in overrides):
        raise ConfigError(f"eval evaluates {weights}, but init_from names other weights; leave init_from out")
    return [*overrides, format_override("init_from", weights)]


@dataclass(frozen=True)
class PreparedEvaluation:
    """The inputs of `eval`, which have passed all checks that do not need torch.

    Attributes:
        identity: What identifies the weights: their path, and the checkpoint's digest or the files' sizes.
        baseline: The directory of another evaluation's results, or None if `--baseline` is not set.
    """

    tokenizer: Tokenizer
    identity: Mapping[str, object]
    baseline: Path | None


def prepare(config: RunConfig, options: argparse.Namespace) -> PreparedEvaluation:
    """Create the output directory, and run all checks that do not need torch."""
    stage, weights, output = config.first, Path(str(config.init_from)), Path(options.output)
    if not stage.eval.sets:
        raise ConfigError("eval.sets is empty, so there is nothing to evaluate on; set it, or choose an experiment")
    baseline = None if options.baseline is None else Path(options.baseline)
    if baseline is not None and not baseline.is_dir():
        raise ConfigError(f"--baseline {baseline} is not a directory; give the --output of another evaluation")
    if log.is_main_rank():
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--output {output} cannot be made: {error.strerror}; choose another directory"
            ) from error
    tokenizer = build_weights_tokenizer(stage)
    identity = check_weights(weights, stage, tokenizer)
    convert_errors(lambda: check_set_files(stage, tokenizer))
    check_rewards(stage, loads=int(os.environ.get("WORLD_SIZE", "1")) == 1)
    return PreparedEvaluation(tokenizer, identity, baseline)


def evaluate(config: RunConfig, options: argparse.Namespace) -> int:
    """Evaluate the weights on all sets for a run from `prepare_run`, write the results, and return the exit status."""
    prepared = prepare(config, options)
    from rl_megatron.evaluation.evaluate_weights import EvalJob, evaluate_weights

    weights, output = Path(str(config.init_from)), Path(options.output)
    return evaluate_weights(
        EvalJob(config.first, weights, prepared.tokenizer, output, prepared.identity, prepared.baseline)
    )
