"""Compares tensors with the shapes that annotations give, such as `Float[Tensor, "*tokens vocab_local"]`.

The modules below are decorated when they are imported, in tests alone: without `install` an annotation costs nothing.
Only shapes and dtypes are compared. What else annotations say is pyright's to check, so that tests may pass stand-ins.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, reduce
from operator import or_
from typing import Any, Union, get_args, get_origin, get_type_hints

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, config, install_import_hook

CHECKED = ("rl_megatron.logprobs", "rl_megatron.losses", "rl_megatron.algorithms.advantages")


@cache
def install() -> None:
    """Check every call of the functions in `CHECKED`, and every dataclass made there, from now on in this process.

    Raises:
        RuntimeError: One of them has been imported already, so that its calls would go unchecked.
    """
    imported = [name for name in sys.modules if name.startswith(CHECKED)]
    if imported:
        raise RuntimeError(f"shape checks come too late: {imported} are imported already; install them first")
    install_import_hook(CHECKED, "tests.shape_checks.compare_after_call")


@contextmanager
def paused() -> Iterator[None]:
    """Compare nothing within the block: comparing takes longer than a loss of a few tokens."""
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)


def compare_after_call(function: Callable) -> Callable:
    """Return what jaxtyping calls to compare a call's arguments, and its result, with the annotations.

    jaxtyping calls it before the function, with the arguments alone and any return annotation replaced by Any, and once
    more with the result. Only the second is checked: a call that the function refuses is left to its own message.
    """
    annotations = function.__annotations__
    if annotations.get("return", Any) is Any:
        return function
    function.__annotations__ = {name: shapes_of(hint) or Any for name, hint in annotations.items()}
    return beartype(function, conf=BeartypeConf(is_pep484_tower=True))


def shapes_of(hint: Any) -> Any:
    """Return the part of a type hint that gives shapes, or None if it gives none.

    A named tuple counts as a tuple of its fields, whose dimensions are then the function's.
    """
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return hint
    if hasattr(hint, "_fields"):
        fields = get_type_hints(hint, include_extras=True)
        return shapes_of(tuple[tuple(fields[name] for name in hint._fields)])
    parts = get_args(hint)
    if not any(shapes_of(part) for part in parts):
        return None
    if get_origin(hint) in (Union, types.UnionType):
        return reduce(or_, (shapes_of(part) or part for part in parts))
    if get_origin(hint) is tuple:
        return tuple[tuple(part if part is ... else shapes_of(part) or Any for part in parts)]
    return hint
