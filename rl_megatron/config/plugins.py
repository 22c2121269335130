"""Import users' modules, which register losses, tasks, data sources, algorithms, engines, families or sinks.

A configuration lists them as `plugins: [my_package.my_module]`. An installed package can name them in the entry-point
group `rl_megatron.plugins` instead. Both kinds are imported on every rank, before the configuration is checked.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from rl_megatron.config.errors import ConfigError

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
    for entry_point in _installed():
        package = entry_point.dist.name if entry_point.dist is not None else "an installed package"
        remedy = f"{package} names it in its entry points ({ENTRY_POINT_GROUP}); repair or uninstall {package}"
        _imported(entry_point.value, entry_point.load, remedy)
    if names and directory is not None and str(directory.resolve()) not in sys.path:
        sys.path.append(str(directory.resolve()))
        importlib.invalidate_caches()
    for name in names:
        module = import_plugin(name)
        if directory is not None:
            _refuse_another(name, module, directory.resolve())


def import_plugin(name: str) -> ModuleType:
    """Import the module `name`.

    Raises:
        ConfigError: There is no such module, or importing it raises.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"plugins: {name!r} is not a module path; write it as in my_package.my_module")
    remedy = f"a plugin is an installed module, or {name.replace('.', '/')}.py in the directory of --config-dir"
    return _imported(name, lambda: importlib.import_module(name), remedy)


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
def _installed() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _imported(name: str, load: Callable[[], Any], remedy: str) -> Any:
    try:
        return load()
    except ConfigError:
        raise
    except Exception as error:  # a plugin is the user's code and may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name is not None and _is_within(name, error.name):
            raise ConfigError(f"plugins: there is no module {error.name!r}; {remedy}") from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        said = " ".join(str(error).split())
        raise ConfigError(
            f"plugins: importing {name!r} raised {type(error).__name__}: {said} ({last.filename}:{last.lineno})"
        ) from error


def _is_within(name: str, missing: str) -> bool:
    """Return whether `missing` is the module `name` or one of its parents."""
    return name == missing or name.startswith(f"{missing}.")


def _refuse_another(name: str, module: ModuleType, directory: Path) -> None:
    """Refuse an installed module that hides a plugin of the same name in the config directory."""
    top = name.partition(".")[0]
    if not (directory / f"{top}.py").is_file() and not (directory / top / "__init__.py").is_file():
        return
    places = [module.__file__] if module.__file__ else list(getattr(module, "__path__", ()))
    if not any(Path(place).resolve().is_relative_to(directory) for place in places):
        raise ConfigError(
            f"plugins: {name!r} is {', '.join(places)}, and not the module of this name in {directory}, which it "
            "hides; rename the one in the directory"
        )
