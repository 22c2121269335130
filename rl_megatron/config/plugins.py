"""Import users' modules, which register losses, tasks, data sources, algorithms, engines, families or sinks.

A configuration lists them as `plugins: [my_package.my_module]`. An installed package can name them in the entry-point
group `rl_megatron.plugins` instead. Both kinds are imported on every rank, before the configuration is checked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.importing import imported, refuse_another

ENTRY_POINT_GROUP = "rl_megatron.plugins"


def import_plugins(names: Sequence[str], directory: Path | None = None) -> None:
    """Import the plugins of all installed packages, then those that a configuration lists.

    Args:
        names: Module paths, such as "my_package.my_module".
        directory: The user's config directory. It is added at the end of `sys.path`, so that no file in it hides an
            installed module.

    Raises:
        ConfigError: A plugin cannot be imported, or is a different module than the one in `directory`.
    """
    for entry_point in installed_plugins():
        package = entry_point.dist.name if entry_point.dist is not None else "an installed package"
        remedy = f"{package} names it in its entry points ({ENTRY_POINT_GROUP}); repair or uninstall {package}"
        imported("plugins", entry_point.value, entry_point.load, remedy)
    if names and directory is not None and str(directory.resolve()) not in sys.path:
        sys.path.append(str(directory.resolve()))
        importlib.invalidate_caches()
    for name in names:
        module = import_plugin(name)
        if directory is not None:
            refuse_another("plugins", module, directory.resolve())


def import_plugin(name: str) -> ModuleType:
    """Import the module `name`.

    Raises:
        ConfigError: There is no such module, or importing it raises.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"plugins: {name!r} is not a module path; write it as in my_package.my_module")
    remedy = f"a plugin is an installed module, or {name.replace('.', '/')}.py in the directory of --config-dir"
    return imported("plugins", name, lambda: importlib.import_module(name), remedy)


def listed_plugins(value: Any, where: str = "plugins") -> tuple[str, ...]:
    """Return the module paths that a configuration's key `plugins` lists; null is an empty list.

    Args:
        value: The value of the key.
        where: The key's path, for the message.

    Raises:
        ConfigError: The value is not a list of strings.
    """
    if value is None:
        return ()
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise ConfigError(f"{where}={value!r}: must be a list of module paths, as in plugins: [my_package.my_module]")


@lru_cache(maxsize=1)
def installed_plugins() -> tuple[EntryPoint, ...]:
    """Return the entry points of all installed packages in the group of plugins."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))
