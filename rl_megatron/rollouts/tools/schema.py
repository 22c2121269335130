"""JSON schemas of tools from their type hints and docstrings, and the check of the arguments of calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError

_HAS_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_LONGEST_MESSAGE = 300  # characters; a message of jsonschema contains the whole wrong value


def build_tool_schema(function: object, where: str, hidden: Collection[str] = ()) -> dict[str, object]:
    """Return the JSON schema of a function, as chat templates take it, without its `hidden` arguments.

    Raise ConfigError, which names the key `where`, if the function lacks named arguments, type hints or descriptions.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    if not inspect.isfunction(function):
        raise ConfigError(
            f"{where} is not a function ({type(function).__name__}); name a function that is written with def"
        )
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in _HAS_NAME:
            raise ConfigError(f"{where}: the argument {name!r} cannot be given by its name; leave out *, ** and /")
    try:
        schema = get_json_schema(function)
    except Exception as error:  # of transformers, or of a type hint that cannot be evaluated
        rule = " ".join(str(error).split()).rstrip(".!")
        raise ConfigError(
            f"{where}: the function {function.__name__} cannot be described to the model: {rule}; a tool has a type "
            "hint for every argument, and a docstring that describes each of them under Args:"
        ) from error
    parameters = schema["function"]["parameters"]
    for name in hidden:
        parameters["properties"].pop(name)
        parameters["required"].remove(name)
    return schema


class ArgumentCheck:
    """The check of arguments against the schema of one tool."""

    def __init__(self, schema: Mapping[str, Any]):
        """Use a schema of `build_tool_schema`."""
        try:
            from jsonschema import Draft202012Validator
        except ImportError as error:
            raise ConfigError(
                f"rollout.tools.functions needs the library jsonschema ({error}): pip install 'rl_megatron[tools]'"
            ) from error
        parameters = schema["function"]["parameters"]
        self._names = list(parameters["properties"])
        self._required = parameters.get("required", [])
        self._validators = {
            name: Draft202012Validator(_replace_nullable(property_))
            for name, property_ in parameters["properties"].items()
        }

    def find_problem(self, arguments: Mapping[str, Any]) -> str | None:
        """Return what is wrong with arguments, in words for the model, or None if they are valid."""
        takes = ", ".join(self._names) or "none"
        for name in arguments:
            if name not in self._validators:
                return f"there is no argument {name!r}; the arguments are: {takes}"
        for name in self._required:
            if name not in arguments:
                return f"the argument {name!r} is missing; the arguments are: {takes}"
        for name, value in arguments.items():
            error = next(iter(self._validators[name].iter_errors(value)), None)
            if error is not None:
                return f"the argument {name!r} is wrong: {str(error.message)[:_LONGEST_MESSAGE]}"
        return None


def _replace_nullable(schema: object) -> Any:
    """Replace `nullable`, which JSON Schema does not know, with a choice between null and the rest of the schema."""
    if isinstance(schema, list):
        return [_replace_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {key: _replace_nullable(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [rest, {"type": "null"}]} if schema.get("nullable") is True else rest


def build_import_string(function: Callable[..., Any], where: str) -> str:
    """Return the import string with which another process finds a registered function."""
    if not re.fullmatch(r"[\w.]+", function.__qualname__):  # it has "<locals>"
        raise ConfigError(f"{where}: {function.__qualname__} is inside another function; define it in its module")
    return f"{function.__module__}:{function.__qualname__}"
