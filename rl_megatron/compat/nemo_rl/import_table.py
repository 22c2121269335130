"""A table of modules and their contents, answered by the import system as if they were a package that is installed."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from rl_megatron.config.errors import nearest


def answer(package: str, modules: Mapping[str, Mapping[str, Any]], replace: bool = False) -> None:
    """From here on imports of `package` find `modules` (dotted name → contents), and what is not there is named with
    what is. A second call changes nothing.

    Args:
        replace: whether an installed `package` may be shadowed.

    Raises: ImportError if `package` is installed and `replace` is not set, or if it is imported already: what was
        imported would go on using the other one.
    """
    present = sys.modules.get(package)
    if isinstance(present, _Module):
        return
    if present is not None:
        raise ImportError(f"{package} is imported already: install rl_megatron in its place before anything imports it")
    found = importlib.util.find_spec(package)
    if found is not None and not replace:
        where = found.origin or list(found.submodule_search_locations or [])
        raise ImportError(
            f"{package} itself is installed ({where}): uninstall it, or call install(replace=True) to have rl_megatron "
            "in its place"
        )
    packages = {name.rsplit(".", depth)[0] for name in modules for depth in range(1, name.count(".") + 1)}
    for name in sorted(packages | modules.keys()):  # a package comes before what it holds
        module = sys.modules[name] = _Module(name, modules.get(name, {}))
        parent, _, own_name = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own_name, module)
    if _Missing not in sys.meta_path:
        sys.meta_path.insert(0, _Missing)


class _Module(ModuleType):
    """A module of a table. `__path__` makes it a package to the import system, which then asks `_Missing` about every
    name that a `from … import` does not find.
    """

    __path__: list[str] = []

    def __init__(self, name: str, members: Mapping[str, Any]) -> None:
        super().__init__(name, f"{name}, answered by rl_megatron.")
        self.__spec__ = ModuleSpec(name, loader=None, origin="rl_megatron", is_package=True)
        self.__all__ = sorted(members)
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_what_is_missing(self, name))


class _Missing:
    """A finder that says what there is: whatever reaches it is not in the table."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        # Behind the import system's frame stands who wants to know: an import, or code that asks whether there is one.
        if sys._getframe(2).f_code is importlib.util.find_spec.__code__:
            return
        parent, _, own_name = name.rpartition(".")
        if isinstance(module := sys.modules.get(parent), _Module):
            raise ModuleNotFoundError(_what_is_missing(module, own_name))


def _what_is_missing(module: ModuleType, name: str) -> str:
    known = [key for key in vars(module) if not key.startswith("_")]
    return f"rl_megatron answers for {module.__name__}, but not for its {name!r}{nearest(name, known)}"
