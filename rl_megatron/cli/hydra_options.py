"""Show how Hydra composes a configuration: `--info`, `--hydra-help` and the shell completion."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterable

from hydra._internal.core_plugins.bash_completion import BashCompletion
from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.compose import PRIMARY, as_additions, composed, hydra_session
from rl_megatron.config.loading.hints import schema_paths
from rl_megatron.config.schema import StageConfig

INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_ACTIONS = ("install=bash", "uninstall=bash", "query=bash")
_WITH_VALUE = ("--config-dir", "-cd", "--config-name", "-cn")


def show_info(what: str, overrides: list[str], config_dir: str | None, config_name: str) -> None:
    """Print what Hydra found: its search path, the defaults list or tree, the configuration, plugins, or all.

    Raises:
        ConfigError: There is no such information, or the configuration cannot be composed.
    """
    if what not in INFO:
        raise ConfigError(f"--info {what}: choose one of {', '.join(INFO)}")
    composed(overrides, config_dir, config_name)  # for its error messages
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        with hydra_session(config_dir) as hydra:
            hydra.show_info(what, config_name=config_name, overrides=as_additions(overrides))
    finally:  # Hydra prints by logging to stdout
        root.handlers[:], root.level = handlers, level


def groups_and_presets(config_dir: str | None) -> str:
    """Return the groups of the configuration with their presets, one group a line."""
    with hydra_session(config_dir) as hydra:
        return hydra.format_config_groups(lambda group: not group.startswith("hydra"))


def complete(action: str, commands: Iterable[str], with_overrides: Iterable[str]) -> None:
    """Print a script that installs the completion in bash, or the completions of the line that bash asks about.

    Args:
        action: "install=bash", "uninstall=bash" or "query=bash"; the last is what the script calls.
        commands: The names of all commands.
        with_overrides: The names of those that take overrides.

    Raises:
        ConfigError: There is no such action.
    """
    if action not in _ACTIONS:
        raise ConfigError(
            f"--shell-completion {action}: only bash is supported, and not zsh, fish or another shell; in bash, write "
            'eval "$(rl-megatron --shell-completion install=bash)"'
        )
    with hydra_session(None) as hydra:
        bash = _Bash(hydra.config_loader)
        if action == "install=bash":
            bash.install()
        elif action == "uninstall=bash":
            bash.uninstall()
    if action == "query=bash":
        print("\n".join(completions(os.environ.get("COMP_LINE", ""), commands, with_overrides)))


def completions(line: str, commands: Iterable[str], with_overrides: Iterable[str]) -> list[str]:
    """Return what may come next in a command line: a command, or a group, a preset, an experiment or a key."""
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
            found = _Bash(hydra.config_loader).candidates(name, shlex.join([*as_additions(overrides), current]))
    except (ConfigError, HydraException, OmegaConfBaseException, ValueError):
        return []  # the overrides before it are wrong, which the command itself will say
    return sorted({*(each for each in found if not each.startswith("hydra")), *_keys_of_stage(current)})


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options with a value, and the overrides, of the words after a command."""
    options, overrides, rest = {}, [], iter(words)
    for word in rest:
        if word in _WITH_VALUE:
            options[word] = next(rest, "")
        elif not word.startswith("-"):
            overrides.append(word)
    return options, overrides


def _keys_of_stage(current: str) -> list[str]:
    """Return the keys that a stage may set, which a composed configuration has at its top level only."""
    parts = current.split(".", 2)
    if len(parts) < 3 or parts[0] != "stages":
        return []
    paths = set(schema_paths(StageConfig))
    below = [path for path in paths if path.startswith(parts[2]) and "." not in path[len(parts[2]) :]]
    sections = {path.rpartition(".")[0] for path in paths}
    return [f"stages.{parts[1]}.{path}{'.' if path in sections else '='}" for path in below]


class _Bash(BashCompletion):
    """Hydra's completion for bash, for the command `rl-megatron`."""

    def __init__(self, config_loader: ConfigLoader):
        super().__init__(config_loader)

    def candidates(self, config_name: str, line: str) -> list[str]:
        """Return what may replace the last word of `line`, which consists of overrides only."""
        return self._query(config_name=config_name, line=line)

    @staticmethod
    def _get_exec() -> str:
        return "rl-megatron"
