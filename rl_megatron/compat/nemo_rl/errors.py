"""Errors that handlers written for NeMo RL catch: its rules are `assert` statements, ours are ValueErrors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RuleError(ValueError, AssertionError):
    """A rule of NeMo RL's is broken; the message states the rule."""


class RangeError(RuleError, IndexError):
    """Sequences are asked for that a batch does not have."""


def require(holds: bool, rule: str) -> None:
    """Raise `RuleError` with `rule` unless it holds."""
    if not holds:
        raise RuleError(rule)


@contextmanager
def rule_errors() -> Iterator[None]:
    """Raise every ValueError of the block as a `RuleError` with the same message."""
    try:
        yield
    except RuleError:
        raise
    except ValueError as error:
        raise RuleError(str(error)) from error
