"""Make a table of modules importable, as if they were an installed package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from rl_megatron.config.errors import nearest


def answer(
    package: str,
    modules: Mapping[str, Mapping[str, Any]],
    replace: bool = False,
    left_out: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Make imports of `package` find `modules`. A second call changes nothing.

    An import of a name that is not in the table is an error that suggests the nearest name.

    Args:
        package: The top-level package.
        modules: Dotted module name → its members.
        replace: Whether an installed `package` may be replaced.
        left_out: Dotted name of a module or member that is not in the table → the reason, for the error.

    Raises:
        ImportError: `package` is installed and `replace` is false, or `package` is already imported: code that imported
            it would keep using the installed package.
    """
    present = sys.modules.get(package)
    if isinstance(present, _Module):
        return
    if present is not None:
        raise ImportError(f"{package} is already imported; call install() before anything imports {package}")
    spec = importlib.util.find_spec(package)
    if spec is not None and not replace:
        location = spec.origin or list(spec.submodule_search_locations or [])
        raise ImportError(
            f"{package} itself is installed ({location}); uninstall it, or call install(replace=True) to use "
            "rl_megatron instead"
        )
    packages = {name.rsplit(".", depth)[0] for name in modules for depth in range(1, name.count(".") + 1)}
    for name in sorted(packages | modules.keys()):  # a package comes before its modules
        module = sys.modules[name] = _Module(name, modules.get(name, {}), left_out)
        parent, _, own_name = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own_name, module)
    if _Missing not in sys.meta_path:
        sys.meta_path.insert(0, _Missing)


class _Module(ModuleType):
    """A module of a table.

    `__path__` makes it a package for the import system, which then calls `_Missing` for every name that a
    `from … import` does not find.
    """

    __path__: list[str] = []

    def __init__(self, name: str, members: Mapping[str, Any], left_out: Mapping[str, str]) -> None:
        super().__init__(name, f"{name}, provided by rl_megatron.")
        self.__spec__ = ModuleSpec(name, loader=None, origin="rl_megatron", is_package=True)
        self.__all__ = sorted(members)
        self.__dict__.update(members)
        self._left_out = left_out

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_missing_name_message(self, name))


class _Missing:
    """A finder whose errors suggest names of the table. It is called only for names that are not in the table."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Raise ModuleNotFoundError for a missing module of a table, unless `importlib.util.find_spec` called it."""
        # An import is an error, but `importlib.util.find_spec` only asks whether the module exists.
        if sys._getframe(2).f_code is importlib.util.find_spec.__code__:
            return
        parent, _, own_name = name.rpartition(".")
        if isinstance(module := sys.modules.get(parent), _Module):
            raise ModuleNotFoundError(_missing_name_message(module, own_name))


def _missing_name_message(module: _Module, name: str) -> str:
    """Return a message with the reason why the module lacks the name, if that is known, and the nearest name."""
    names = [key for key in vars(module) if not key.startswith("_")]
    reason = vars(module)["_left_out"].get(f"{module.__name__}.{name}")
    message = f"rl_megatron provides {module.__name__}, but not its {name!r}{nearest(name, names)}"
    return message if reason is None else f"{message}. {reason[0].upper()}{reason[1:]}"
