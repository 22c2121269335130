"""Show a command's choices, and how Hydra composes its keys: experiments, presets, `--info` and shell completion."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.compose import PRIMARY, as_additions, compose_config, config_directory, hydra_session
from rl_megatron.config.loading.hints import get_override_key, schema_paths
from rl_megatron.config.schema import StageConfig

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_ACTIONS = ("install=bash", "uninstall=bash", "query=bash")
_WITH_VALUE = ("--config-dir", "-cd", "--config-name", "-cn")
# The keys that choose what is trained. Without any of them, a command would train a default that nobody wants.
_CHOICES = ("experiment", "algorithm", "data", "model", "init_from", "stages", "tokenizer", "loss")


def has_no_choice(overrides: list[str], config_name: str) -> bool:
    """Return whether a command chooses neither what to train nor what to train it on."""
    return config_name == PRIMARY and not any(
        get_override_key(override).split(".")[0] in _CHOICES for override in overrides
    )


def print_experiments(config_dir: str | None) -> None:
    """Print an error on rank 0 because nothing was chosen, with a list of all experiments and their descriptions."""
    if not log.is_main_rank():
        return
    lines = ["error: nothing says what to train; add experiment=NAME, or algorithm=… and data=… of your own", ""]
    for title, directory in (("experiments", config_directory()), (f"in {config_dir}", config_dir)):
        experiments = [] if directory is None else _list_experiments(Path(directory))
        if experiments:
            width = max(len(name) for name, _ in experiments)
            lines.append(f"{title}:")
            lines += [f"  {name:{width}}  {description}".rstrip() for name, description in experiments]
    lines += ["", "rl-megatron train experiment=NAME --print-config shows what an experiment does in full."]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _list_experiments(directory: Path) -> list[tuple[str, str]]:
    """Return the name and the description of every experiment in a directory of configurations."""
    parent = directory / "experiment"
    paths = sorted(parent.rglob("*.yaml"))
    return [(str(path.relative_to(parent).with_suffix("")), _read_description(path)) for path in paths]


def _read_description(path: Path) -> str:
    """Return the first sentence of the comment that begins a YAML file; "" if there is none.

    Hydra's lines, such as `# @package`, are no part of it.
    """
    comment = takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    texts = [text for line in comment if not (text := line.lstrip("# ")).startswith("@")]
    return " ".join(texts).partition(". ")[0].removesuffix(".") + "." if texts else ""


def show_info(what: str, overrides: list[str], config_dir: str | None, config_name: str) -> None:
    """Print Hydra's search path, the defaults list or tree, the configuration, plugins, or all of them."""
    if what not in INFO:
        raise ConfigError(f"--info {what}: choose one of {', '.join(INFO)}")
    compose_config(overrides, config_dir, config_name)  # for its error messages
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with hydra_session(config_dir) as hydra:
            hydra.show_info(what, config_name=config_name, overrides=as_additions(overrides))
    finally:  # Hydra prints by logging to stdout
        root.handlers[:], root.level = handlers, level


def list_presets(config_dir: str | None) -> str:
    """Return the groups of the configuration with their presets, one group per line."""
    with hydra_session(config_dir) as hydra:
        return hydra.format_config_groups(lambda group: not group.startswith("hydra"))


def complete(action: str, commands: Iterable[str], with_overrides: Iterable[str]) -> None:
    """Print a script that installs or uninstalls the completion in bash, or the completions of the line `COMP_LINE`.

    Args:
        action: "install=bash", "uninstall=bash", or "query=bash", which the installed script calls.
        commands: The names of all commands.
        with_overrides: The names of the commands that take overrides.
    """
    if action not in _ACTIONS:
        raise ConfigError(
            f"--shell-completion {action}: only bash is supported, not zsh, fish or another shell; in bash, write "
            'eval "$(rl-megatron --shell-completion install=bash)"'
        )
    with hydra_session(None) as hydra:
        bash = _Bash(hydra.config_loader)
        if action == "install=bash":
            bash.install()
        elif action == "uninstall=bash":
            bash.uninstall()
    if action == "query=bash":
        print("\n".join(list_completions(os.environ.get("COMP_LINE", ""), commands, with_overrides)))


def list_completions(line: str, commands: Iterable[str], with_overrides: Iterable[str]) -> list[str]:
    """Return the completions of the last word of a command line: commands, groups, presets, experiments or keys."""
    words = line.split()[1:]
    current = "" if line.endswith(" ") or not words else words.pop()
    if not words:
        return [name for name in commands if name.startswith(current)]
    if words[0] not in with_overrides or current.startswith("-"):
        return []  # then bash completes names of files
    options, overrides = _split(words[1:])
    config_dir = options.get("--config-dir", options.get("-cd"))
    try:
        with hydra_session(config_dir) as hydra:
            name = options.get("--config-name", options.get("-cn", PRIMARY))
            words = _Bash(hydra.config_loader).complete(name, shlex.join([*as_additions(overrides), current]))
    except (ConfigError, HydraException, OmegaConfBaseException, ValueError):
        return []  # an earlier override is wrong, and the command itself will report it
    return sorted({*(word for word in words if not word.startswith("hydra")), *_complete_stage_key(current)})


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words after a command into options with their values, and overrides."""
    options, overrides, rest = {}, [], iter(words)
    for word in rest:
        if word in _WITH_VALUE:
            options[word] = next(rest, "")
        elif not word.startswith("-"):
            overrides.append(word)
    return options, overrides


def _complete_stage_key(current: str) -> list[str]:
    """Return the completions of a key `stages.NAME.…`; Hydra itself completes only keys without this prefix."""
    parts = current.split(".", 2)
    if len(parts) < 3 or parts[0] != "stages":
        return []
    paths = set(schema_paths(StageConfig))
    candidates = [path for path in paths if path.startswith(parts[2]) and "." not in path[len(parts[2]) :]]
    sections = {path.rpartition(".")[0] for path in paths}
    return [f"stages.{parts[1]}.{path}{'.' if path in sections else '='}" for path in candidates]


class _Bash(BashCompletion):
    """Hydra's completion for bash, for the command `rl-megatron`."""

    def __init__(self, config_loader: ConfigLoader):
        super().__init__(config_loader)

    def complete(self, config_name: str, line: str) -> list[str]:
        """Return the completions of the last word of `line`, which has only overrides."""
        return self._query(config_name=config_name, line=line)

    @staticmethod
    def _get_exec() -> str:
        return "rl-megatron"
