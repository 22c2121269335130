"""`Registry`: the objects that a configuration can choose by name, such as losses, tasks, engines and algorithms.

Users' modules register their own. A configuration lists them as `plugins: [my_package.my_module]`. An installed package
can name them in the entry-point group `rl_megatron.plugins` instead. Both kinds are imported on every rank, before the
configuration is checked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.loading.import_strings import import_user_code, is_import_string, load_object, refuse_another

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """A mapping of names to objects of one kind. Plugins and the package's modules add theirs when imported."""

    def __init__(self, kind: str):
        """Initialize an empty registry; `kind` is the word for an entry in error messages, for example "loss"."""
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that adds an object under `name` and returns the object.

        Raises:
            ValueError: Another object has this name already.
        """

        def add(entry: T) -> T:
            if name in self._entries and not _is_same(self._entries[name], entry):
                raise ValueError(f"{self.kind} {name!r} is registered already, as {_describe(self._entries[name])}")
            self._entries[name] = entry
            return entry

        return add

    def __setitem__(self, name: str, entry: T) -> None:
        """Register an object under a name; replace an existing one."""
        self._entries[name] = entry

    def __delitem__(self, name: str) -> None:
        del self._entries[name]

    def __getitem__(self, name: str) -> T:
        """Return the entry `name`.

        Raises:
            UnknownName: No entry has this name; the message gives the nearest one.
        """
        if name not in self:
            raise UnknownName(f"there is no {self.kind} {name!r}{nearest(name, self._entries)}")
        return self._entries[name]

    def find(self, name: str, where: str) -> T:
        """Return the entry `name` or, if `name` is an import string, the user's object that it names.

        Args:
            name: A registered name, `file.py:name` or `package.module:name`.
            where: The configuration key, for messages.

        Raises:
            UnknownName: No entry has this name.
            ConfigError: The import string cannot be loaded.
        """
        return load_object(name, where) if is_import_string(name) else self[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries  # a user may give a list, which cannot be hashed

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class UnknownName(KeyError, ValueError):
    """The error for a name that a registry does not have."""

    def __str__(self) -> str:
        return self.args[0]  # KeyError would show the quoted repr


def _is_same(one: object, other: object) -> bool:
    """Return whether both objects have the same definition, possibly in a module that was imported twice."""
    places = [(getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)) for entry in (one, other)]
    return one is other or (None not in places[0] and places[0] == places[1])


def _describe(entry: object) -> str:
    name = getattr(entry, "__qualname__", None)
    return f"{entry.__module__}.{name}" if name else repr(entry)


ENTRY_POINT_GROUP = "rl_megatron.plugins"


def import_plugins(names: Sequence[str], directory: Path | None = None) -> None:
    """Import the plugins of all installed packages, then the modules `names` that a configuration lists.

    The user's config directory is added at the end of `sys.path`, so that no file in it hides an installed module.
    """
    for entry_point in find_installed_plugins():
        package = entry_point.dist.name if entry_point.dist is not None else "an installed package"
        remedy = f"{package} names it in its entry points ({ENTRY_POINT_GROUP}); repair or uninstall {package}"
        import_user_code("plugins", entry_point.value, entry_point.load, remedy)
    if names and directory is not None and str(directory.resolve()) not in sys.path:
        sys.path.append(str(directory.resolve()))
        importlib.invalidate_caches()
    for name in names:
        module = import_plugin(name)
        if directory is not None:
            refuse_another("plugins", module, directory.resolve())


def import_plugin(name: str) -> ModuleType:
    """Import the module `name`."""
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"plugins: {name!r} is not a module path; write it as in my_package.my_module")
    remedy = f"a plugin is an installed module, or {name.replace('.', '/')}.py in the directory of --config-dir"
    return import_user_code("plugins", name, lambda: importlib.import_module(name), remedy)


def parse_plugins(value: object, where: str = "plugins") -> tuple[str, ...]:
    """Return the module paths that a configuration's key `plugins` lists; null is an empty list."""
    if value is None:
        return ()
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise ConfigError(f"{where}={value!r}: must be a list of module paths, as in plugins: [my_package.my_module]")


@lru_cache(maxsize=1)
def find_installed_plugins() -> tuple[EntryPoint, ...]:
    """Return the entry points of the group `rl_megatron.plugins` of all installed packages."""
    return tuple(entry_points(group=ENTRY_POINT_GROUP))
