"""The parser of calls that are written as a list of Python calls."""

from __future__ import annotations

import ast
import math
import re
import warnings

from rl_megatron.rollouts.tools.calls import MOST_CALLS, BadCall, FoundCall, Parameters, ToolCall, refuse_call

_MARKERS = ("<|python_start|>", "<|python_end|>")
_BEGIN = re.compile(r"\[\s*([A-Za-z_]\w*)\s*\(")


def parse_pythonic(text: str, parameters: Parameters) -> list[FoundCall]:
    """Return the calls of a text that is a list of Python calls: `[f(a=1), g(b="x")]`.

    Arguments have names, and their values are literals. For any other text, return no calls, or a malformed one if the
    text begins like a call of a known tool: `[f(`.
    """
    text = text.strip().removeprefix(_MARKERS[0]).removesuffix(_MARKERS[1]).strip()
    begin = _BEGIN.match(text)
    if begin is None:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # an escape that Python does not know
            warnings.simplefilter("ignore", DeprecationWarning)  # the same, before Python 3.12
            tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else []
        call_nodes = [node for node in nodes if isinstance(node, ast.Call)]
        if not isinstance(tree, ast.List) or len(call_nodes) < len(nodes):
            raise BadCall("is not a list of calls")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if begin[1] not in parameters:
            return []
        reason = error if isinstance(error, BadCall) else BadCall(f"is not Python: {_describe(error)}")
        return [refuse_call(text, reason)]
    calls: list[FoundCall] = []
    for node in call_nodes[:MOST_CALLS]:
        try:
            calls.append(_read_call(node))
        except BadCall as error:
            calls.append(refuse_call(_unparse(node, text), error))
    return calls


def _unparse(node: ast.Call, text: str) -> str:
    """Return the source of a call. `ast.get_source_segment` would split the whole text for each call."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return text


def _read_call(node: ast.Call) -> ToolCall:
    if not isinstance(node.func, ast.Name):
        raise BadCall("does not begin with the name of a tool")
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        raise BadCall("has an argument without a name; write name=value")
    arguments = {str(keyword.arg): _read_value(keyword) for keyword in node.keywords}
    if len(arguments) < len(node.keywords):
        raise BadCall("has an argument twice")
    return ToolCall("", node.func.id, arguments)


def _describe(error: Exception) -> str:
    return (error.msg if isinstance(error, SyntaxError) else str(error)) or type(error).__name__


def _read_value(keyword: ast.keyword) -> object:
    try:
        return _as_json(ast.literal_eval(keyword.value))
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BadCall(
            f"has a value of {keyword.arg!r} that is not a literal of numbers, strings, lists and dicts"
        ) from error


def _as_json(value: object) -> object:
    """Return a literal as a JSON value, with lists for tuples, or raise ValueError."""
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _as_json(item) for key, item in value.items()}
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"{value!r} is not a value of JSON")
