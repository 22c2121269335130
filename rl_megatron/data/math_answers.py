"""Read and compare mathematical answers with the library math-verify.

It parses LaTeX, and limits its own time by a signal, which only the main thread of a process can receive. Rewards are
computed there.
"""

from __future__ import annotations

from typing import Any

from rl_megatron.config.errors import ConfigError


def require_math_verify(user: str) -> None:
    """Refuse what needs math-verify if it is missing.

    Args:
        user: What needs it, for the message.

    Raises:
        ConfigError: math-verify is not installed.
    """
    try:
        import math_verify  # noqa: F401  # here, because most runs do without it
    except ImportError as error:
        raise ConfigError(
            f"{user} needs the library math-verify ({error}): pip install 'rl_megatron[rewards]'"
        ) from error


def read_answer(text: str, seconds: int) -> list[Any]:
    """Return the answers that math-verify finds in a text, the likeliest first; empty if there is none.

    Raises:
        TimeoutError: Reading took too long.
    """
    from math_verify import parse
    from math_verify.errors import TimeoutException

    try:
        return parse(text, parsing_timeout=seconds, raise_on_error=True)
    except TimeoutException as error:
        raise TimeoutError(f"math-verify read for {seconds} seconds") from error
    except Exception:  # the library's own default: what it cannot read is no answer
        return []


def read_reference(answer: str, seconds: int) -> list[Any]:
    r"""Return a reference answer. One that cannot be read as it is, such as `\frac{1}{2}`, is read within `\boxed{}`.

    Raises:
        ValueError: It cannot be read.
        TimeoutError: Reading took too long.
    """
    found = read_answer(answer, seconds) or read_answer(rf"\boxed{{{answer}}}", seconds)
    if not found:
        raise ValueError(f"math-verify cannot read the reference answer {answer!r}")
    return found


def are_equal(reference: list[Any], given: list[Any], seconds: int) -> bool:
    """Return whether math-verify says that an answer equals the reference answer.

    Raises:
        TimeoutError: Comparing took too long.
    """
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        return verify(reference, given, timeout_seconds=seconds, raise_on_error=True)
    except TimeoutException as error:
        raise TimeoutError(f"math-verify compared for {seconds} seconds") from error
    except Exception:  # the library's own default: what it cannot compare is unequal, and other pairs may be equal
        return verify(reference, given, timeout_seconds=seconds)
