"""Functions as tools: their schemas, functions that cannot be tools, and the check of arguments."""

import sys
from typing import Literal

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.rollouts.tools.schema import ArgumentCheck, build_tool_schema


def search(query: str, most: int = 3, kind: Literal["page", "image"] | None = None, tags: list[str] | None = None):
    """Search for pages.

    Args:
        query: What to look for.
        most: The most results.
        kind: What is found.
        tags: What the results must have.
    """


def no_docstring(x: int): ...


def no_hint(x):
    """Do it.

    Args:
        x: A number.
    """


def no_description(x: int):
    """Do it."""


def strange(x: set):
    """Do it.

    Args:
        x: A set.
    """


def unknown(x: "Nothing"):  # noqa: F821
    """Do it.

    Args:
        x: What nobody has defined.
    """


def many(*x: int):
    """Do it.

    Args:
        x: Numbers.
    """


def test_a_schema_is_made_of_hints_and_the_docstring():
    schema = build_tool_schema(search, "key")["function"]
    assert schema["name"] == "search" and schema["description"] == "Search for pages."
    assert schema["parameters"]["required"] == ["query"]
    assert schema["parameters"]["properties"]["most"] == {"type": "integer", "description": "The most results."}


def test_hidden_arguments_are_not_in_the_schema():
    parameters = build_tool_schema(search, "key", {"query"})["function"]["parameters"]
    assert "query" not in parameters["properties"] and parameters["required"] == []


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (no_docstring, "it has no docstring"),
        (no_hint, "x is missing a type hint"),
        (no_description, "no description for the argument 'x'"),
        (strange, "Couldn't convert the type hint"),
        (unknown, "name 'Nothing' is not defined"),
        (many, "the argument 'x' cannot be given by its name"),
        (dict, r"is not a function \(type\); name a function"),
        (print, "is not a function"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function, rule):
    with pytest.raises(ConfigError, match=rf"functions\[0\]=x\.py:f.*{rule}"):
        build_tool_schema(function, "rollout.tools.functions[0]=x.py:f")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": "Rome"}, None),
        ({"query": "Rome", "most": 2, "kind": "page", "tags": ["old"]}, None),
        ({"query": "Rome", "kind": None, "tags": None}, None),
        ({}, "the argument 'query' is missing; the arguments are: query, most, kind, tags"),
        ({"query": "Rome", "more": 1}, "there is no argument 'more'; the arguments are: query, most, kind, tags"),
        ({"query": 5}, "the argument 'query' is wrong: 5 is not of type 'string'"),
        ({"query": "Rome", "most": True}, "the argument 'most' is wrong: True is not of type 'integer'"),
        ({"query": "Rome", "kind": "film"}, "the argument 'kind' is wrong: 'film' is not valid under any"),
        ({"query": "Rome", "tags": [1]}, "the argument 'tags' is wrong: "),
    ],
)
def test_arguments_are_compared_with_the_schema(arguments, problem):
    found = ArgumentCheck(build_tool_schema(search, "key")).find_problem(arguments)
    assert found == problem or (problem is not None and found is not None and found.startswith(problem))


def test_a_long_message_about_an_argument_is_cut():
    found = ArgumentCheck(build_tool_schema(search, "key")).find_problem({"query": "Rome", "most": "x" * 1000})
    assert found == "the argument 'most' is wrong: '" + "x" * 299


def test_without_jsonschema_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match=r"rollout.tools.functions needs .* pip install 'rl_megatron\[tools\]'"):
        ArgumentCheck(build_tool_schema(search, "key"))
