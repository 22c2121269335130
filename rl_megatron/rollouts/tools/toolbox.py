"""`Tools`, the tools of a stage, and `ToolBox`, which reads and answers the calls of one trajectory."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rl_megatron import log
from rl_megatron.config.environments import ToolsConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import is_import_string, load_object
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.chat_template import ChatTemplate, load_template
from rl_megatron.data.conversations import Message
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.rollouts.hosts import HostedCallFailed, HostLimits, HostLost, ProcessHosts
from rl_megatron.rollouts.tools.calls import FoundCall, MalformedCall, Parser, ToolCall, drop_thinking
from rl_megatron.rollouts.tools.formats import PARSERS, detect_format
from rl_megatron.rollouts.tools.registry import TOOLS
from rl_megatron.rollouts.tools.schema import ArgumentCheck, build_import_string, build_tool_schema
from rl_megatron.rollouts.tools.turns import check_tool_turns

COUNTS = ("tool_calls", "tool_errors", "malformed_calls")  # of a trajectory, in its metadata and as metrics
_ATTEMPTS = 3  # of a call, if another call ends its process
_LONGEST_NAME = 64
_BYTES_PER_CHARACTER, _SPARE = 6, 1 << 20  # an answer that will be cut may be somewhat longer
_ID = re.compile(r"[0-9A-Za-z]{9}")  # what Mistral's templates accept


class ToolFailed(RuntimeError):
    """A call of a tool failed or could not be read, and `rollout.tools.on_error` is "fail"."""


class Hosts(Protocol):
    """The processes that run functions."""

    async def call(self, target: str, kwargs: Mapping[str, object], timeout: float) -> Any:
        """Call the function with the import string `target`, and return its result within `timeout` seconds.

        Raises:
            HostedCallFailed: It raised an error, took longer, or returned too much.
            HostLost: The process ended, but not because of this call.
        """
        ...


@dataclass(frozen=True)
class _Tool:
    """A function that the model may call.

    Attributes:
        schema: Its JSON schema, as chat templates take it.
        target: The import string with which a process loads it.
        bound: Further arguments, which the model does not give.
    """

    schema: Mapping[str, Any]
    target: str
    bound: Mapping[str, Any]
    check: ArgumentCheck


class Tools:
    """The tools of a stage.

    Attributes:
        schemas: Their JSON schemas, as chat templates take them.
    """

    def __init__(self, settings: ToolsConfig):
        """Load the functions, without running them."""
        self.settings = settings
        self.tools: dict[str, _Tool] = {}
        for index, entry in enumerate(settings.functions):
            where = f"rollout.tools.functions[{index}]={entry}"
            tool = _load_tool(entry, where, settings)
            name = tool.schema["function"]["name"]
            if name in self.tools:
                raise ConfigError(f"{where}: another tool is called {name!r}, too; rename one of the functions")
            self.tools[name] = tool
        self.schemas: Sequence[Mapping[str, object]] = [tool.schema for tool in self.tools.values()]
        self.parameters = {name: tool.schema["function"]["parameters"] for name, tool in self.tools.items()}
        self._parsers: dict[ChatTemplate | None, Parser] = {}

    def build_hosts(self) -> ProcessHosts:
        """Return the processes that run the functions, without starting one."""
        settings = self.settings
        most_bytes = _BYTES_PER_CHARACTER * settings.max_answer_characters + _SPARE
        return ProcessHosts(settings.processes, HostLimits(settings.memory_mb, most_bytes), "tools")

    def choose_parser(self, template: ChatTemplate | None) -> Parser:
        """Return the parser of calls for `template`, which is None if prompts are plain text.

        Raise ConfigError if the format cannot be determined, or the chat template accepts no answers of tools.
        """
        if template not in self._parsers:
            parser = PARSERS[_choose_format(self.settings, template)]
            if template is not None:
                check_tool_turns(template, self.schemas)
            self._parsers[template] = parser
        return self._parsers[template]

    def open_box(self, hosts: Hosts, template: ChatTemplate | None) -> ToolBox:
        """Return the tool box of a trajectory; `template` is None if the prompt is plain text."""
        return ToolBox(self, hosts, self.choose_parser(template))


def check_tools(stage: StageConfig, tokenizer: Tokenizer) -> None:
    """Check the tools of a stage before its first step.

    With data.format=auto, the first trajectory checks them, because the records determine whether there is a template.
    """
    tools = build_tools(stage.rollout.tools)
    if tools is not None and stage.data.format != "auto":
        tools.choose_parser(load_template(stage.data, tokenizer) if stage.data.format == "chat" else None)


def build_tools(settings: ToolsConfig) -> Tools | None:
    """Return the tools of the section `rollout.tools`, or None if it names none."""
    return Tools(settings) if settings.functions else None


@dataclass
class ToolBox:
    """The calls of one trajectory, which are read, answered and counted.

    Attributes:
        counts: The numbers of calls (`tool_calls`), of failed calls (`tool_errors`), and of failed calls that could not
            be read (`malformed_calls`). A rollout worker adds them to the metadata of its trajectory.
    """

    tools: Tools
    hosts: Hosts
    parse: Parser
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    _num_named: int = 0

    @property
    def schemas(self) -> Sequence[Mapping[str, object]]:
        """Return the JSON schemas of the tools, as chat templates take them."""
        return self.tools.schemas

    def find_calls(self, text: str) -> Sequence[FoundCall]:
        """Return the calls in the text of a turn, in their order, without those in its thinking."""
        calls = self.parse(drop_thinking(text), self.tools.parameters)
        return [call if _ID.fullmatch(call.id) else replace(call, id=self._new_id()) for call in calls]

    async def answer(self, calls: Sequence[FoundCall]) -> tuple[list[Message], bool]:
        """Run the calls of a turn, all at the same time.

        Returns:
            The messages that answer the calls, in the calls' order; and whether the trajectory ends because a call
            failed and `rollout.tools.on_error` is "end".

        Raises:
            ToolFailed: A call failed, and `rollout.tools.on_error` is "fail".
            HostLost: In every attempt of a call, another call ended its process.
        """
        outcomes = await asyncio.gather(
            *(self._answer_call(call, number) for number, call in enumerate(calls)), return_exceptions=True
        )
        messages: list[Message] = []
        failures: list[str] = []
        for call, outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            text, has_failed = outcome
            self.counts["tool_calls"] += 1
            self.counts["tool_errors"] += has_failed
            self.counts["malformed_calls"] += isinstance(call, MalformedCall)
            if has_failed:
                failures.append(text)
            messages.append({"role": "tool", "tool_call_id": call.id, "name": self._choose_name(call), "content": text})
        on_error = self.tools.settings.on_error
        if failures and on_error == "fail":
            raise ToolFailed(f"a call of a tool failed: {failures[0]}")
        return messages, bool(failures) and on_error == "end"

    async def _answer_call(self, call: FoundCall, number: int) -> tuple[str, bool]:
        """Return the answer to a call, and whether the call has failed."""
        settings = self.tools.settings
        if number >= settings.max_calls:
            return f"Error: not run, because a turn has at most {settings.max_calls} calls", True
        if isinstance(call, MalformedCall):
            return self._cut(f"Error: the call {call.text} {call.reason}"), True
        tool = self.tools.tools.get(call.name)
        if tool is None:
            return f"Error: there is no tool of this name; the tools are: {', '.join(self.tools.tools)}", True
        problem = tool.check.find_problem(call.arguments)
        if problem is not None:
            return self._cut(f"Error: {problem}"), True
        try:
            answer = await self._run(tool, call)
        except HostedCallFailed as error:
            return self._cut(f"Error: {error}"), True
        try:
            return self._cut(_as_text(answer)), False
        except (TypeError, ValueError, RecursionError) as error:
            return self._cut(f"Error: what the tool returned cannot be written as JSON: {error}"), True

    async def _run(self, tool: _Tool, call: ToolCall) -> object:
        for left in reversed(range(_ATTEMPTS)):
            try:
                return await self.hosts.call(
                    tool.target, {**call.arguments, **tool.bound}, self.tools.settings.seconds_per_call
                )
            except HostLost:
                if not left:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _cut(self, text: str) -> str:
        """Return a text that a tokenizer can read, cut if it is long."""
        text = text.encode("utf-8", "replace").decode()  # half of a surrogate pair becomes a question mark
        most = self.tools.settings.max_answer_characters
        return text if len(text) <= most else f"{text[:most]}… (cut after {most} of {len(text)} characters)"

    def _choose_name(self, call: FoundCall) -> str:
        """Return the name of the tool that answers. In a made-up name, special characters become underscores."""
        if isinstance(call, MalformedCall):
            return "malformed"
        return call.name if call.name in self.tools.tools else re.sub(r"\W", "_", call.name, flags=re.A)[:_LONGEST_NAME]

    def _new_id(self) -> str:
        self._num_named += 1
        return f"call{self._num_named:05d}"


def _load_tool(entry: str, where: str, settings: ToolsConfig) -> _Tool:
    """Return the tool that an entry of `rollout.tools.functions` names."""
    if is_import_string(entry):
        function, bound, target = load_object(entry, "rollout.tools.functions"), {}, entry
    else:
        registered = TOOLS.find(entry, "rollout.tools.functions")
        function = registered.function
        bound = {key: getattr(settings, key) for key in registered.settings}
        target = build_import_string(function, where)
    schema = build_tool_schema(function, where, bound)
    return _Tool(schema, target, bound, ArgumentCheck(schema))


def _choose_format(settings: ToolsConfig, template: ChatTemplate | None) -> str:
    if settings.format != "auto":
        format_ = settings.format
    elif template is None:
        raise ConfigError(
            "rollout.tools.format=auto needs a chat template, but prompts are plain text; set it to one of "
            f"{', '.join(PARSERS)}, or data.format=chat"
        )
    else:
        format_ = detect_format(template.text_with_tools)
    if template is None or "tools" not in template.text_with_tools:
        where = "prompts are plain text, which does" if template is None else "the chat template does"
        log.once(f"{where} not describe tools, so the prompt itself must describe them to the model")
    return format_


def _as_text(value: object) -> str:
    """Return a function's result as the text of a message: a string as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
