"""Parse the command line, compose and check the configuration, and call the command.

torch is imported only by commands that need it, so that help and error messages come at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rl_megatron import disk, log
from rl_megatron.cli.parser import COMPOSED, WITHOUT_CONFIGURATION, command_parser
from rl_megatron.config.commands import override
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import RunConfig
from rl_megatron.workers.linux import die_with


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status: 0 for success, 2 for bad input, 1 for a failed run."""
    parser = command_parser()
    parsed, rest = parser.parse_known_args(arguments)  # overrides may come before and after an option
    if any(argument.startswith("-") for argument in rest) or (rest and parsed.command not in COMPOSED):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    log.setup()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # a launcher that is killed leaves no ranks, which would write to the run's directory
    if parsed.command in (*WITHOUT_CONFIGURATION, "plan", "show-batch") and not log.is_main_rank():
        return 0  # rank 0 alone does the work
    try:
        if parsed.command not in COMPOSED:
            return _without_configuration(parsed)
        parsed.overrides += rest
        if getattr(parsed, "replay_rollouts", None) is not None:
            parsed.overrides.append(override("rollout.replay", parsed.replay_rollouts))
        if parsed.info is not None or parsed.hydra_help:
            return _show_how_it_is_composed(parsed)
        if getattr(parsed, "multirun", False):
            if parsed.server_nodes is not None:
                parser.error("--server-nodes: the jobs of a sweep start their servers themselves; leave it out")
            return _sweep(parsed)
        if parsed.command == "doctor":
            return _doctor(parsed)
        return _with_configuration(parsed)
    except ConfigError as error:
        log.error(error)
        return 2


def _without_configuration(parsed: argparse.Namespace) -> int:
    """Run a command that reads no configuration."""
    if parsed.command == "rollouts":
        from rl_megatron.cli.rollouts import rollouts

        return rollouts(parsed)
    if parsed.command in ("report", "compare"):
        from rl_megatron.cli.report import compare, report

        return report(parsed.path) if parsed.command == "report" else compare(parsed.paths, parsed.output)
    from rl_megatron.config.loading.registry import import_plugins

    import_plugins(parsed.plugin, Path(parsed.config_dir) if parsed.config_dir else None)
    if parsed.command == "convert":
        from rl_megatron.cli.convert import export_checkpoint, import_directory

        if parsed.direction == "import":
            import_directory(parsed.source, parsed.target, parsed.base)
        else:
            options = parsed.max_shard_size, parsed.merge, parsed.adapter, parsed.cut_vocabulary
            export_checkpoint(parsed.source, parsed.target, *options)
        return 0
    from rl_megatron.cli.inspect import inspect

    return inspect(parsed.path, parsed.tensors, not parsed.no_verify, parsed.json)


def _with_configuration(parsed: argparse.Namespace) -> int:
    """Run a command that composes a configuration."""
    from rl_megatron.config.loading.load import load_config, to_yaml

    section = None
    if parsed.command == "plan":
        from rl_megatron.config.plan import split_overrides

        section, parsed.overrides = split_overrides(parsed.overrides)
    if parsed.command == "eval":
        from rl_megatron.cli.evaluate import with_weights

        parsed.overrides = with_weights(parsed.weights, parsed.overrides)
    if parsed.command in ("generate", "eval"):
        from rl_megatron.cli.generate import generation_run, model_at

        config = load_config(parsed.overrides, parsed.config_dir, parsed.config_name, read_model=model_at)
        config = generation_run(config, parsed)
    else:
        config = load_config(parsed.overrides, parsed.config_dir, parsed.config_name)
    if parsed.command == "train":
        from rl_megatron.cli.serve import with_server_nodes

        config = with_server_nodes(config, parsed.server_nodes)
    if parsed.print_config or parsed.cfg:
        if log.is_main_rank():
            print(to_yaml(config), end="")
        return 0
    if parsed.command == "train":
        from rl_megatron.cli.experiments import chooses_nothing, print_experiments

        if chooses_nothing(parsed.overrides, parsed.config_name):
            print_experiments(parsed.config_dir)
            return 2
    try:
        if parsed.command == "balance":
            from rl_megatron.cli.balance import balance

            return balance(config, parsed)
        if parsed.command == "generate":
            from rl_megatron.cli.generate import generate

            return generate(config, parsed)
        if parsed.command == "eval":
            from rl_megatron.cli.evaluate import evaluate

            return evaluate(config, parsed)
        if parsed.command == "serve":
            from rl_megatron.cli.serve import serve

            return serve(config, parsed)
        _check_early(config, parsed.command)
    except ConfigError as error:
        log.error(error, on_every_node=True)  # a file may be missing on one node only
        return 2
    if section is not None:
        from rl_megatron.plan.command import plan

        return plan(config, section, parsed)
    if parsed.command == "certify":
        from rl_megatron.certify.command import certify

        return certify(config)
    if parsed.command == "show-batch":
        from rl_megatron.cli.show_batch import show_batch

        return show_batch(config, parsed)
    from rl_megatron.runs.run import run

    disk.keep_printing()
    return run(config)


def _doctor(parsed: argparse.Namespace) -> int:
    """Check this machine and, if any override chooses one, an experiment."""
    from rl_megatron.doctor.command import doctor

    config = None
    if parsed.overrides or parsed.config_dir or parsed.print_config or parsed.cfg:
        from rl_megatron.cli.serve import with_server_nodes
        from rl_megatron.config.loading.load import load_config, to_yaml

        config = with_server_nodes(
            load_config(parsed.overrides, parsed.config_dir, parsed.config_name), parsed.server_nodes
        )
        if parsed.print_config or parsed.cfg:
            if log.is_main_rank():
                print(to_yaml(config), end="")
            return 0
    from rl_megatron.cli.early_checks import check_early

    return doctor(config, check_early, parsed.json)


def _check_early(config: RunConfig, command: str) -> None:
    """Check what needs no torch. Only `train` writes to the output directory, which may hold a run already."""
    from rl_megatron.cli.early_checks import check_data, check_early, check_losses
    from rl_megatron.runs.rerun import refuse_changes

    if command == "train":
        refuse_changes(config)
    if command == "show-batch":
        check_data(config)  # it neither writes to the output directory nor scores anything
    elif command in ("certify", "plan"):
        check_losses(config)  # they need neither data nor weights, and write nothing
    else:
        check_early(config)


def _sweep(parsed: argparse.Namespace) -> int:
    """Check the jobs of a sweep, and then run them."""
    from rl_megatron.cli.sweep import jobs_of, run_jobs

    jobs = jobs_of(parsed.overrides, parsed.config_dir, parsed.config_name)
    for job in jobs:
        _check_early(job.config, parsed.command)
    options = [] if parsed.config_dir is None else ["--config-dir", parsed.config_dir]
    return run_jobs(jobs, [*options, "--config-name", parsed.config_name], main)


def _show_how_it_is_composed(parsed: argparse.Namespace) -> int:
    """Print what `--info` or `--hydra-help` asks for, on rank 0."""
    from rl_megatron.cli.hydra_options import groups_and_presets, show_info

    if not log.is_main_rank():
        return 0
    if parsed.hydra_help:
        print(f"Options of Hydra: rl-megatron {parsed.command} --help\nOverrides: https://hydra.cc, and key=value\n")
        print(groups_and_presets(parsed.config_dir), end="")
        return 0
    if "=" in parsed.info:  # --info was followed by an override
        parsed.overrides.insert(0, parsed.info)
        parsed.info = "all"
    show_info(parsed.info, parsed.overrides, parsed.config_dir, parsed.config_name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
