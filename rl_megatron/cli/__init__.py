"""Parse the command line, compose and check the configuration, and call the command.

torch is imported only by commands that need it, so that help and error messages come at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import IO

from rl_megatron import __version__, log
from rl_megatron.config.errors import ConfigError

_COMMANDS = {
    "train": "run the stages of an experiment (alone or under torchrun)",
    "certify": "compare the layout of these ranks with one process: loss, every gradient, logprobs, metrics",
    "show-batch": "show every token that the model sees in a step, with its loss mask, or the prompts of a step",
}
_CONVERSIONS = {
    "import": ("HF_DIR", "CHECKPOINT", "make a checkpoint, which any layout can load, from a Hugging Face directory"),
    "export": ("CHECKPOINT", "HF_DIR", "make a Hugging Face directory, which transformers can load, from a checkpoint"),
}
_EXAMPLES = """examples:
  rl-megatron train experiment=quickstart
  torchrun --nproc-per-node 2 -m rl_megatron train experiment=quickstart parallel.tensor=2
  torchrun --nproc-per-node 4 -m rl_megatron certify experiment=quickstart parallel.tensor=2 parallel.context=2
  rl-megatron convert import path/to/Qwen2.5-0.5B checkpoints/qwen
  rl-megatron convert export outputs/run/checkpoints/sft/step-000100 exported
  rl-megatron show-batch experiment=gsm8k_sft data.path=path/to/gsm8k --html batch.html
  rl-megatron inspect outputs/run/checkpoints/sft/step-000100
  rl-megatron train experiment=gsm8k_sft data.path=path/to/gsm8k train.seed=1 output_dir=outputs/mine
"""


class _Parser(argparse.ArgumentParser):
    """A parser that prints on rank 0 only, because under torchrun every rank parses the same arguments."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if log.is_main_rank():
            super()._print_message(message, file)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rl-megatron",
        description="Train language models on megatron-core, from pretraining to DPO, GRPO and PPO.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in _COMMANDS.items():
        command = commands.add_parser(name, help=help_text)
        command.add_argument("overrides", nargs="*", help="Hydra overrides, key=value; experiment=NAME picks one")
        command.add_argument("--config-dir", help="a directory with your own configs and plugins")
        command.add_argument("--print-config", action="store_true", help="print the effective configuration and stop")
        if name == "show-batch":
            _add_show_batch(command)
    inspect = commands.add_parser("inspect", help="show the content of a checkpoint, or list the checkpoints of a run")
    where = "a checkpoint, the directory of a stage's checkpoints, or the output_dir of a run"
    inspect.add_argument("path", type=Path, help=where)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--no-verify", action="store_true", help="do not compare the files with their digests")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    _add_plugins(inspect)
    _add_convert(commands)
    return parser


def _add_show_batch(command: argparse.ArgumentParser) -> None:
    command.add_argument("--stage", metavar="NAME", help="the stage; by default the first")
    step = command.add_mutually_exclusive_group()
    step.add_argument("--step", type=int, default=1, metavar="N", help="the training step; by default 1")
    step.add_argument("--heldout", action="store_true", help="show the held-out data instead of a step")
    command.add_argument("--sequences", type=int, metavar="N", help="show N sequences; by default 4, and all in HTML")
    ranks = "plan the microbatches for N ranks; by default for one data-parallel rank"
    command.add_argument("--ranks", type=int, metavar="N", help=ranks)
    command.add_argument("--ids", action="store_true", help="list the token ids of each sequence too")
    command.add_argument("--html", metavar="FILE", help="write a self-contained HTML page, and print no sequences")


def _add_convert(commands: argparse._SubParsersAction) -> None:
    help_text = "convert a Hugging Face directory to a checkpoint and back, without a GPU"
    convert = commands.add_parser("convert", help=help_text)
    directions = convert.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    for name, (source, target, help_text) in _CONVERSIONS.items():
        direction = directions.add_parser(name, help=help_text)
        direction.add_argument("source", metavar=source)
        direction.add_argument("target", metavar=target, help="must not exist")
        if name == "export":
            limit = "largest file of weights, such as 500MB or 5GB (the default)"
            direction.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help=limit)
        _add_plugins(direction)


def _add_plugins(command: argparse.ArgumentParser) -> None:
    """Add the options that name plugins, for commands that do not read a configuration."""
    plugin = "a module to import first, such as one with your model family; can be given several times"
    command.add_argument("--plugin", action="append", default=[], metavar="MODULE", help=plugin)
    command.add_argument("--config-dir", help="a directory whose modules can be plugins")


def _convert(parsed: argparse.Namespace) -> int:
    from rl_megatron.cli.convert import convert

    convert(parsed.direction, parsed.source, parsed.target, getattr(parsed, "max_shard_size", None))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status: 0 for success, 2 for bad input, 1 for a failed run."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)  # overrides may come before and after an option
    if any(argument.startswith("-") for argument in rest) or (rest and parsed.command in ("inspect", "convert")):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    log.setup()
    if parsed.command in ("convert", "inspect", "show-batch") and not log.is_main_rank():
        return 0  # rank 0 alone does the work
    try:
        if parsed.command in ("convert", "inspect"):
            from rl_megatron.config.plugins import import_plugins

            import_plugins(parsed.plugin, Path(parsed.config_dir) if parsed.config_dir else None)
        if parsed.command == "convert":
            return _convert(parsed)
        if parsed.command == "inspect":
            from rl_megatron.cli.inspect import inspect

            return inspect(parsed.path, parsed.tensors, not parsed.no_verify, parsed.json)
        parsed.overrides += rest
        from rl_megatron.config.load import load_config, to_yaml

        config = load_config(parsed.overrides, parsed.config_dir)
        if parsed.print_config:
            if log.is_main_rank():
                print(to_yaml(config), end="")
            return 0
        if log.is_main_rank():  # it answers for all ranks; what is wrong on another node alone, the preflight finds
            from rl_megatron.cli.early_checks import check_early

            if parsed.command == "train":
                from rl_megatron.checkpoint.rerun import refuse_changes

                refuse_changes(config)
            check_early(config)
        if parsed.command == "certify":
            from rl_megatron.certify.command import certify

            return certify(config)
        if parsed.command == "show-batch":
            from rl_megatron.cli.show_batch import show_batch

            return show_batch(config, parsed)
        from rl_megatron.algorithms.run import run

        return run(config)
    except ConfigError as error:
        log.error(error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
