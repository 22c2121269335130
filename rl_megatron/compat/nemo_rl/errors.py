"""ValueErrors that are also AssertionErrors: NeMo RL checks with `assert`, and callers may catch AssertionError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RuleError(ValueError, AssertionError):
    """The error of a broken rule of NeMo RL. The message states the rule."""


class RangeError(RuleError, IndexError):
    """The error of a request for sequences that a batch does not have."""


class MissingKeyError(RuleError, KeyError):
    """The error of a key that a batch does not have."""

    __str__ = Exception.__str__  # KeyError's would show the message in quotes


def require(holds: bool, rule: str) -> None:
    """Raise `RuleError` with the message `rule` unless `holds` is true."""
    if not holds:
        raise RuleError(rule)


@contextmanager
def rule_errors() -> Iterator[None]:
    """Convert every ValueError of a `with` block to a `RuleError` with the same message."""
    try:
        yield
    except RuleError:
        raise
    except ValueError as error:
        raise RuleError(str(error)) from error
