"""The tool `calculator`: the value of an arithmetic expression."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from rl_megatron.rollouts.tools.registry import register_tool

Value = int | float
_LONGEST = 1000  # characters of an expression
_MOST_BITS = 10_000  # of an integer
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FORM = "write numbers with + - * / // % ** and parentheses"


@register_tool("calculator")
def calculator(expression: str) -> str:
    """Return the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, for example (2 + 3) * 4.

    Returns:
        The value.

    Raises:
        ValueError: It is not such an expression, has no value, or its value is too large.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, but may have at most {_LONGEST}")
    try:
        return _write_number(_evaluate(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an arithmetic expression; {_FORM}") from error
    except ZeroDivisionError as error:
        raise ValueError(f"{expression!r} divides by zero") from error
    except OverflowError as error:
        raise ValueError(f"the value of {expression!r} is too large") from error


def _evaluate(node: ast.expr) -> Value:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _check_size(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _check_size(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        raise ValueError("^ is not the power; write **")
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not arithmetic; {_FORM}")


def _check_power(base: Value, exponent: Value) -> None:
    """Refuse a power that would take too long to compute, or that is not a real number."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        if abs(base) > 1 and base.bit_length() * exponent > 2 * _MOST_BITS:
            raise ValueError("the power is too large")
    elif base < 0 and exponent != int(exponent):
        raise ValueError("a fractional power of a negative number is not a real number")


def _check_size(value: Value) -> Value:
    """Return the number, or raise ValueError if it is too large."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError("a number is too large")
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ValueError("a number is too large")
    return value


def _write_number(value: Value) -> str:
    """Return a number as text; a float with an integer value is written as an integer."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return repr(value)
