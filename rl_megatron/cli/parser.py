"""Declare the commands of `rl-megatron` and their options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import IO

from rl_megatron import __version__, log
from rl_megatron.config.errors import ConfigError

# The commands that compose a configuration.
COMPOSED = {
    "train": "run the stages of an experiment (alone or under torchrun)",
    "certify": "compare the layout of these ranks with one process: loss, every gradient, logprobs, metrics",
    "generate": "complete the prompts of a file on any rollout engine, and write completions with logprobs",
    "eval": "evaluate a checkpoint or a Hugging Face directory on the sets of eval.sets",
    "plan": "compute the memory, FLOPs and estimated time of a stage on a cluster, or search layouts; needs no GPU",
    "doctor": "check this machine, and what an experiment needs of it: versions, GPUs, network, storage, ports",
    "training-server": "serve a model to clients that write the training loop: gradients, steps and samples over HTTP",
    "serve": "start the servers of the rollout engine on this node, for a run on other nodes",
    "balance": "divide a job's nodes between training and the rollout engine, by a run's measured times",
    "show-batch": "show every token that the model sees in a step, with its loss mask, or the prompts of a step",
}
# The commands that read no configuration.
WITHOUT_CONFIGURATION = ("rollouts", "report", "compare", "inspect", "convert", "migrate")
_CONVERSIONS = {
    "import": ("HF_DIR", "CHECKPOINT", "make a checkpoint, which any layout can load, from a Hugging Face directory"),
    "export": ("CHECKPOINT", "HF_DIR", "make a Hugging Face directory, which transformers can load, from a checkpoint"),
}
_EXAMPLES = """examples:
  rl-megatron train experiment=quickstart
  torchrun --nproc-per-node 2 -m rl_megatron train experiment=quickstart parallel.tensor=2
  torchrun --nproc-per-node 4 -m rl_megatron certify experiment=quickstart parallel.tensor=2 parallel.context=2
  rl-megatron plan experiment=quickstart --nodes 1 --gpus-per-node 1 --gpu h100
  rl-megatron doctor experiment=quickstart
  rl-megatron convert import path/to/Qwen2.5-0.5B checkpoints/qwen
  rl-megatron convert export outputs/run/checkpoints/sft/step-000100 exported
  rl-megatron migrate grpo_math_1B.yaml --output my_configs/experiment/math.yaml
  rl-megatron show-batch experiment=gsm8k_sft data.path=path/to/gsm8k --html batch.html
  rl-megatron generate init_from=outputs/run/checkpoints/sft/step-000100 --prompts prompts.jsonl --output out.jsonl
  rl-megatron serve experiment=mine generation.engine=vllm --host 0.0.0.0 --port 8000
  rl-megatron training-server init_from=checkpoints/qwen --directory outputs/service
  rl-megatron balance experiment=mine generation.engine=vllm rollout.async_enabled=true --nodes 6
  rl-megatron eval outputs/run/checkpoints/grpo/step-000100 experiment=mine --output evaluated
  rl-megatron inspect outputs/run/checkpoints/sft/step-000100
  rl-megatron train experiment=gsm8k_sft data.path=path/to/gsm8k train.seed=1 output_dir=outputs/mine
  rl-megatron train experiment=gsm8k_sft data.path=path/to/gsm8k --multirun optimizer.lr=1e-3,3e-3
"""


class _Parser(argparse.ArgumentParser):
    """A parser that prints on rank 0 only, because under torchrun every rank parses the same arguments."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:
        if log.is_main_rank():
            super()._print_message(message, file)


class _ShellCompletion(argparse.Action):
    """The option `--shell-completion`, which needs no command."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> None:
        """Print the script or the completions, and exit."""
        from rl_megatron.cli.hydra_options import complete

        try:
            complete(str(values), [*COMPOSED, *WITHOUT_CONFIGURATION], COMPOSED)
        except ConfigError as error:
            parser.error(str(error))
        parser.exit()


class _Refused(argparse.Action):
    """An option of Hydra that has no meaning here; its `const` is the remedy."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: str | None = None
    ) -> None:
        """Refuse the option."""
        parser.error(f"{option_string}: {self.const}")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="rl-megatron",
        description="Train language models on megatron-core, from pretraining to DPO, GRPO and PPO.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    completion = 'in bash, complete commands, experiments, presets and keys: eval "$(rl-megatron -sc install=bash)"'
    parser.add_argument("-sc", "--shell-completion", action=_ShellCompletion, metavar="ACTION", help=completion)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in COMPOSED.items():
        command = commands.add_parser(name, help=help_text)
        if name == "eval":
            _add_eval(command)
        command.add_argument("overrides", nargs="*", help="Hydra overrides, key=value; experiment=NAME picks one")
        _add_hydra(command, sweeps=name == "train")
        if name == "train":
            replay = "learn from the rollouts of another run, in its directory rollouts/STAGE, instead of generating"
            command.add_argument("--replay-rollouts", metavar="DIR", help=replay)
        if name == "show-batch":
            _add_show_batch(command)
        if name == "generate":
            _add_generate(command)
        if name == "plan":
            _add_plan(command)
        if name in ("train", "doctor"):
            nodes = "comma-separated HOST:PORT of the nodes on which `serve` runs the rollout engine's servers"
            command.add_argument("--server-nodes", metavar="NODES", help=nodes)
        if name == "serve":
            _add_serve(command)
        if name == "training-server":
            _add_training_server(command)
        if name == "balance":
            _add_balance(command)
        if name == "doctor":
            command.add_argument("--json", action="store_true", help="print JSON")
    _add_rollouts(commands)
    _add_pages(commands)
    inspect = commands.add_parser("inspect", help="show the content of a checkpoint, or list the checkpoints of a run")
    where = "a checkpoint, the directory of a stage's checkpoints, or the output_dir of a run"
    inspect.add_argument("path", type=Path, help=where)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--no-verify", action="store_true", help="do not compare the files with their digests")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    _add_plugins(inspect)
    _add_convert(commands)
    _add_migrate(commands)
    return parser


def _add_hydra(command: argparse.ArgumentParser, sweeps: bool) -> None:
    """Add the options that users of Hydra know."""
    command.add_argument("--config-dir", "-cd", metavar="DIR", help="a directory with your own configs and plugins")
    name = "the primary configuration, such as DIR/NAME.yaml of --config-dir"
    command.add_argument("--config-name", "-cn", metavar="NAME", default="config", help=name)
    instead = "the shipped configurations are always found; name a directory of your own with --config-dir"
    command.add_argument("--config-path", "-cp", action=_Refused, const=instead, help=argparse.SUPPRESS)
    mode = command.add_mutually_exclusive_group()
    mode.add_argument("--print-config", action="store_true", help="print the effective configuration and stop")
    mode.add_argument("--cfg", "-c", choices=["job"], help="the same as --print-config")
    info = "print how the configuration is composed: all, config, defaults, defaults-tree, plugins or searchpath"
    mode.add_argument("--info", "-i", nargs="?", const="all", metavar="WHAT", help=info)
    mode.add_argument("--hydra-help", action="store_true", help="print these options, and all presets")
    if sweeps:
        sweep = "run a job for each combination of values, one after the other, as in train.seed=0,1"
        mode.add_argument("--multirun", "-m", action="store_true", help=sweep)


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


def _add_serve(command: argparse.ArgumentParser) -> None:
    command.add_argument("--stage", metavar="NAME", help="the stage; by default the last that completes prompts")
    command.add_argument("--host", metavar="ADDRESS", help="the address to bind to, such as 0.0.0.0; default: key host")
    port = "the port of the first server; the next ones follow; by default that of the configuration"
    command.add_argument("--port", type=int, metavar="N", help=port)


def _add_training_server(command: argparse.ArgumentParser) -> None:
    command.add_argument("--stage", metavar="NAME", help="the stage with the model and layout; by default the last")
    where = "the directory of the journal, the states and the saved weights; a killed server continues from it"
    command.add_argument("--directory", metavar="DIR", required=True, help=where)
    command.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="default: 127.0.0.1")
    command.add_argument("--port", type=int, metavar="N", default=8000, help="default: 8000; 0 takes a free one")
    command.add_argument("--keys", metavar="FILE", help="lines 'KEY OWNER'; by default the server makes one key")
    command.add_argument("--name", metavar="NAME", help="the model's name for clients; by default that of init_from")
    most = "how many training runs are in memory; the others wait on the disk; default: 32"
    command.add_argument("--runs-in-memory", type=int, default=32, metavar="N", help=most)


def _add_balance(command: argparse.ArgumentParser) -> None:
    command.add_argument("--nodes", type=int, required=True, metavar="N", help="the number of nodes of the job")
    command.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="ranks of a node; by default 8")
    first = "nodes for servers until a step has been measured; by default half of the nodes"
    command.add_argument("--engine-nodes", type=int, metavar="N", help=first)


def _add_plan(command: argparse.ArgumentParser) -> None:
    command.add_argument("--nodes", type=int, default=1, metavar="N", help="the number of nodes; by default 1")
    command.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node; by default 8")
    command.add_argument("--gpu", default="h100", metavar="NAME", help="a GPU named in docs/plan.md; default: h100")
    command.add_argument("--stage", metavar="NAME", help="the stage; by default the last")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--exact", action="store_true", help="run all layers; by default deep stacks run at two depths")
    how.add_argument("--closed-forms", action="store_true", help="estimate by closed forms, without running anything")
    command.add_argument("--search", action="store_true", help="rank the layouts of these GPUs, fastest first")
    command.add_argument("--top", type=int, default=10, metavar="N", help="layouts that --search shows; by default 10")
    verify = "run the best layouts of --search until N of them fit; by default 1"
    command.add_argument("--verify", type=int, default=1, metavar="N", help=verify)
    command.add_argument("--picture", metavar="FILE", help="write a PNG of the memory over the phases of a step")
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_generate(command: argparse.ArgumentParser) -> None:
    prompts = "a file, pattern or directory of prompts: JSON lines, Parquet, or text with a prompt on each line"
    command.add_argument("--prompts", metavar="PATH", required=True, help=prompts)
    output = "the file of completions, as JSON lines; if it is incomplete, the command continues it"
    command.add_argument("--output", metavar="FILE", required=True, help=output)
    command.add_argument("--samples-per-prompt", "-n", type=int, default=1, metavar="N", help="completions per prompt")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="the seed of sampling; by default 0")
    command.add_argument("--greedy", action="store_true", help="take the likeliest token instead of sampling")
    command.add_argument("--stage", metavar="NAME", help="the stage whose settings are used; by default the last")


def _add_pages(commands: argparse._SubParsersAction) -> None:
    report = commands.add_parser("report", help="write report.html of a run, which may still be running")
    report.add_argument("path", type=Path, metavar="RUN", help="the output_dir of the run")
    compare = commands.add_parser("compare", help="write a page with the curves and the settings of several runs")
    compare.add_argument("paths", type=Path, nargs="+", metavar="RUN", help="the output_dir of each run")
    compare.add_argument("--output", type=Path, default=Path("compare.html"), metavar="FILE", help="compare.html")


def _add_rollouts(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser("rollouts", help="show the rollouts that a run has written (rollout.save_every)")
    where = "the output_dir of a run, a directory of such files, or a file"
    command.add_argument("path", type=Path, metavar="RUN", help=where)
    command.add_argument("--stage", metavar="NAME", help="the stage; by default all")
    command.add_argument("--step", type=int, metavar="N", help="the step; by default all")
    command.add_argument("--min-reward", type=float, metavar="X", help="the lowest reward that is shown")
    command.add_argument("--max-reward", type=float, metavar="X", help="the highest reward that is shown")
    command.add_argument("--prompt", metavar="TEXT", help="show only prompts that contain this text")
    command.add_argument(
        "--limit", type=int, default=10, metavar="N", help="trajectories that are shown; by default 10"
    )
    command.add_argument("--json", action="store_true", help="print all columns as JSON, one trajectory per line")


def _add_eval(command: argparse.ArgumentParser) -> None:
    weights = "the weights: a checkpoint, or a Hugging Face directory"
    command.add_argument("weights", metavar="CHECKPOINT|HF_DIR", help=weights)
    output = "the directory of the results; if they are incomplete, the command continues them"
    command.add_argument("--output", metavar="DIR", required=True, help=output)
    baseline = "the --output of another evaluation, with which every problem is compared"
    command.add_argument("--baseline", metavar="DIR", help=baseline)
    command.add_argument("--stage", metavar="NAME", help="the stage whose settings are used; by default the last")


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
            cut = "leave out the rows of the embedding and the head that belong to no token of the tokenizer"
            direction.add_argument("--cut-vocabulary", action="store_true", help=cut)
            how = direction.add_mutually_exclusive_group()
            merge = "for adapters: write their base with all of them merged, instead of a directory for peft"
            how.add_argument("--merge", action="store_true", help=merge)
            alone = "for adapters: write only the one with this name; by default all, in subdirectories of their names"
            how.add_argument("--adapter", metavar="NAME", help=alone)
        else:
            base = "for adapters in peft's format: the checkpoint of the model that they were trained on"
            direction.add_argument("--base", metavar="CHECKPOINT", help=base)
        _add_plugins(direction)


def _add_migrate(commands: argparse._SubParsersAction) -> None:
    help_text = "print an experiment with the settings of a file for NeMo RL, verl or TRL"
    command = commands.add_parser("migrate", help=help_text)
    file = "a YAML file of NeMo RL or verl, or a script of TRL, which is read and not executed"
    command.add_argument("file", type=Path, metavar="FILE", help=file)
    libraries = ("nemo_rl", "verl", "trl")
    recognised = "the library of the file; by default recognised by its keys"
    command.add_argument("--from", dest="library", choices=libraries, help=recognised)
    output = "write the experiment to this file, which must not exist, instead of printing it"
    command.add_argument("--output", type=Path, metavar="FILE", help=output)


def _add_plugins(command: argparse.ArgumentParser) -> None:
    """Add the options that name plugins, for commands that read no configuration."""
    plugin = "a module to import first, such as one with your model family; can be given several times"
    command.add_argument("--plugin", action="append", default=[], metavar="MODULE", help=plugin)
    command.add_argument("--config-dir", help="a directory whose modules can be plugins")
