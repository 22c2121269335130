"""Checks of tensors against the shapes in annotations, such as `Float[Tensor, "*tokens vocab_local"]`.

Only tests check them: `install` decorates the modules below when they are imported, and without it an annotation costs
nothing. Only shapes and dtypes are compared. Pyright checks the rest, so that tests may pass stand-ins.
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

CHECKED = (
    "rl_megatron.logprobs", "rl_megatron.losses", "rl_megatron.algorithms.advantages",
    "rl_megatron.rollouts.statistics",
)  # fmt: skip


@cache
def install() -> None:
    """Check all later calls of functions of the modules `CHECKED`, and all of their dataclasses, in this process.

    Raises:
        RuntimeError: One of the modules is already imported, so that its calls would not be checked.
    """
    imported = [name for name in sys.modules if name.startswith(CHECKED)]
    if imported:
        raise RuntimeError(f"shape checks come too late: {imported} are imported already; install them first")
    install_import_hook(CHECKED, "tests.shape_checks.compare_after_call")


@contextmanager
def paused() -> Iterator[None]:
    """Compare nothing within the block, because comparing takes longer than the loss of a few tokens."""
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)


def compare_after_call(function: Callable) -> Callable:
    """Return the function that jaxtyping calls to compare a call's arguments and its result with the annotations.

    jaxtyping calls it twice: before the call with the arguments only and Any as the return annotation, and after the
    call with the result. Only the second call compares, so that a function that refuses its arguments raises its own
    error.
    """
    annotations = function.__annotations__
    if annotations.get("return", Any) is Any:
        return function
    function.__annotations__ = {name: shapes_of(hint) or Any for name, hint in annotations.items()}
    return beartype(function, conf=BeartypeConf(is_pep484_tower=True))


def shapes_of(hint: Any) -> Any:
    """Return the part of a type hint that gives shapes, or None if it gives none.

    A named tuple counts as a tuple of its fields, so that its dimensions have to agree with those of the arguments.
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
