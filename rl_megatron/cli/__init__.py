"""Parse the command line, compose and check the configuration, and call the command.

Only commands that need torch import it, so that help and error messages appear at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rl_megatron import disk, log
from rl_megatron.cli.parser import COMPOSED, WITHOUT_CONFIGURATION, build_parser
from rl_megatron.config.commands import format_override
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import RunConfig
from rl_megatron.workers.linux import die_with


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status: 0 for success, 2 for bad input, 1 for a failed run."""
    parser = build_parser()
    parsed, rest = parser.parse_known_args(arguments)  # overrides may come before and after an option
    if any(argument.startswith("-") for argument in rest) or (rest and parsed.command not in COMPOSED):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    log.setup()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # otherwise, ranks of a killed launcher would continue to write to the run's directory
    if parsed.command in (*WITHOUT_CONFIGURATION, "plan", "show-batch") and not log.is_main_rank():
        return 0  # rank 0 alone does the work
    try:
        if parsed.command not in COMPOSED:
            return _run_without_configuration(parsed)
        parsed.overrides += rest
        if getattr(parsed, "replay_rollouts", None) is not None:
            parsed.overrides.append(format_override("rollout.replay", parsed.replay_rollouts))
        if parsed.info is not None or parsed.hydra_help:
            return _show_composition(parsed)
        if getattr(parsed, "multirun", False):
            if parsed.server_nodes is not None:
                parser.error("--server-nodes: the jobs of a sweep start their servers themselves; omit this option")
            return _run_sweep(parsed)
        if parsed.command == "doctor":
            return _run_doctor(parsed)
        return _run_with_configuration(parsed)
    except ConfigError as error:
        log.error(error)
        return 2


def _run_without_configuration(parsed: argparse.Namespace) -> int:
    """Run a command that reads no configuration."""
    if parsed.command == "rollouts":
        from rl_megatron.cli.rollouts import rollouts

        return rollouts(parsed)
    if parsed.command in ("report", "compare"):
        from rl_megatron.cli.report import compare, report

        return report(parsed.path) if parsed.command == "report" else compare(parsed.paths, parsed.output)
    if parsed.command == "migrate":
        from rl_megatron.cli.migrate import migrate

        return migrate(parsed.file, parsed.library, parsed.output)
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


def _run_with_configuration(parsed: argparse.Namespace) -> int:
    """Run a command that composes a configuration."""
    from rl_megatron.cli.early_checks import check_layout
    from rl_megatron.config.loading.load import load_config, to_yaml

    plan_section = None
    if parsed.command == "plan":
        from rl_megatron.config.plan import split_overrides

        plan_section, parsed.overrides = split_overrides(parsed.overrides)
    if parsed.command == "eval":
        from rl_megatron.cli.evaluate import add_weights

        parsed.overrides = add_weights(parsed.weights, parsed.overrides)
    if parsed.command in ("generate", "eval", "plan", "training-server"):
        from rl_megatron.cli.generate import prepare_run, read_model

        config = load_config(parsed.overrides, parsed.config_dir, parsed.config_name, read_model=read_model)
        config = config if parsed.command == "plan" else prepare_run(config, parsed)
    else:
        config = load_config(parsed.overrides, parsed.config_dir, parsed.config_name)
    if parsed.command == "train":
        from rl_megatron.cli.serve import set_server_nodes

        config = set_server_nodes(config, parsed.server_nodes)
    if parsed.print_config or parsed.cfg:
        if log.is_main_rank():
            print(to_yaml(config), end="")
        return 0
    if parsed.command == "train":
        from rl_megatron.cli.hydra_options import has_no_choice, print_experiments

        if has_no_choice(parsed.overrides, parsed.config_name):
            print_experiments(parsed.config_dir)
            return 2
    try:
        if parsed.command in ("train", "generate", "eval", "training-server"):
            check_layout(config)
        if parsed.command == "training-server":
            from rl_megatron.cli.training_server import training_server

            return training_server(config, parsed)
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
        log.error(error, on_every_node=True)  # a file may be missing on only one node
        return 2
    if plan_section is not None:
        from rl_megatron.plan.command import plan

        return plan(config, plan_section, parsed)
    if parsed.command == "certify":
        from rl_megatron.certify.command import certify

        return certify(config)
    if parsed.command == "show-batch":
        from rl_megatron.cli.show_batch import show_batch

        return show_batch(config, parsed)
    from rl_megatron.runs.run import run

    disk.keep_printing()
    return run(config)


def _run_doctor(parsed: argparse.Namespace) -> int:
    """Check this machine and, if options or overrides choose a configuration, that configuration."""
    from rl_megatron.doctor.command import doctor

    config = None
    if parsed.overrides or parsed.config_dir or parsed.print_config or parsed.cfg:
        from rl_megatron.cli.serve import set_server_nodes
        from rl_megatron.config.loading.load import load_config, to_yaml

        config = set_server_nodes(
            load_config(parsed.overrides, parsed.config_dir, parsed.config_name), parsed.server_nodes
        )
        if parsed.print_config or parsed.cfg:
            if log.is_main_rank():
                print(to_yaml(config), end="")
            return 0
    from rl_megatron.cli.early_checks import check_early

    return doctor(config, check_early, parsed.json)


def _check_early(config: RunConfig, command: str) -> None:
    """Run the checks that need no torch. For `train`, also refuse changed settings of a run that it would continue."""
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


def _run_sweep(parsed: argparse.Namespace) -> int:
    """Check the jobs of a sweep, then run them."""
    from rl_megatron.cli.early_checks import check_layout
    from rl_megatron.cli.sweep import expand_sweep, run_jobs

    jobs = expand_sweep(parsed.overrides, parsed.config_dir, parsed.config_name)
    for job in jobs:
        check_layout(job.config)
        _check_early(job.config, parsed.command)
    options = [] if parsed.config_dir is None else ["--config-dir", parsed.config_dir]
    return run_jobs(jobs, [*options, "--config-name", parsed.config_name], main)


def _show_composition(parsed: argparse.Namespace) -> int:
    """Print the output of `--info` or `--hydra-help`, on rank 0."""
    from rl_megatron.cli.hydra_options import list_presets, show_info

    if not log.is_main_rank():
        return 0
    if parsed.hydra_help:
        print(f"Options of Hydra: rl-megatron {parsed.command} --help\nOverrides: key=value; see https://hydra.cc\n")
        print(list_presets(parsed.config_dir), end="")
        return 0
    if "=" in parsed.info:  # an override after --info was parsed as its value
        parsed.overrides.insert(0, parsed.info)
        parsed.info = "all"
    show_info(parsed.info, parsed.overrides, parsed.config_dir, parsed.config_name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
