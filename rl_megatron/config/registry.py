"""`Registry`: the objects that a configuration can choose by name, such as losses, tasks, engines and algorithms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Generic, TypeVar

from rl_megatron.config.errors import nearest
from rl_megatron.config.import_strings import is_import_string, load_object

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """Objects of one kind by name. Modules add their objects when they are imported, by the package or as plugins."""

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
        """Put an object under a name, in place of the one that has it, if there is one."""
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
        return isinstance(name, str) and name in self._entries  # a user may give a list, which no dict accepts

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class UnknownName(KeyError, ValueError):
    """The error for a name that a registry does not have."""

    def __str__(self) -> str:
        return self.args[0]  # KeyError would show the quoted repr


def _is_same(one: object, other: object) -> bool:
    """Return whether both are the same definition, because a module was imported twice."""
    places = [(getattr(entry, "__module__", None), getattr(entry, "__qualname__", None)) for entry in (one, other)]
    return one is other or (None not in places[0] and places[0] == places[1])


def _describe(entry: object) -> str:
    name = getattr(entry, "__qualname__", None)
    return f"{entry.__module__}.{name}" if name else repr(entry)
