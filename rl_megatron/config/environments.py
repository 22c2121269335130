"""The settings of environments, tools and agents, which answer the policy's turns."""

from __future__ import annotations

import shlex
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.extras import require_extra
from rl_megatron.config.loading.settings import Number, Positive, PositiveFloat, section


@section
class EnvironmentConfig:
    """The environment that answers the policy's turns, with `rollout.worker=conversation` or `verifiers`."""

    # The class of the environment, as file.py:Name or package.module:Name, or openenv. Each trajectory has its own
    # instance. With rollout.worker=verifiers: the name of an installed environment of that library, or a function that
    # loads one, as file.py:name. null: no environment.
    name: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the environment's class or function, by name
    # Worker processes of rank 0 that run the environments. null: one for each CPU that rank 0 may use, at most 32.
    processes: Positive | None = None
    # Time limit of one call of the environment. If a method that is not async exceeds it, its process is killed, and
    # the other trajectories in that process start again. With rollout.worker=verifiers: time limit of a whole rollout,
    # not counting waits for the rollout engine.
    seconds_per_call: PositiveFloat = 60.0
    # Memory of one process, in MiB; an allocation beyond it raises MemoryError in the environment. null: no limit.
    memory_mb: PositiveFloat | None = 4096.0
    # The Python interpreter of these processes, such as .venv-adapters/bin/python, if the environment's packages
    # conflict with the run's. It must be Python 3.11 or newer, and need not have rl_megatron installed. null: the run's
    # interpreter.
    python: str | None = None
    max_answer_mb: PositiveFloat = 1.0  # largest return value of a call of the environment, in MiB


@section
class ToolsConfig:
    """Functions that the policy may call in its turns, and the processes that run them."""

    # The functions: names of tools of the package (calculator, python) or of a plugin, and import strings as in
    # `my_tools.py:search`. Empty: no tools.
    functions: tuple[str, ...] = ()
    # How the model writes a call. auto: detected from the chat template. hermes: Hermes, Qwen 2.5 and 3. qwen: the
    # XML of Qwen3-Coder. llama: the JSON of Llama 3.1. pythonic: Llama 4 and the small models of Llama 3.2.
    format: Literal["auto", "hermes", "qwen", "llama", "mistral", "pythonic"] = "auto"
    # What to do if a call fails or cannot be read. answer: the model gets the text of the error. end: the trajectory
    # ends and counts as truncated. fail: the trajectory fails, as if the rollout worker had raised an error.
    on_error: Literal["answer", "end", "fail"] = "answer"
    max_calls: Positive = 8  # maximum calls in one turn; each further call is an error
    seconds_per_call: PositiveFloat = 10.0  # how long one call may take
    max_answer_characters: Positive = 8192  # a longer answer is cut, and the model is told so
    processes: Positive = 2  # processes that run the functions
    memory_mb: Positive = 1024  # memory limit of each process, and of each program of the tool python, in MiB


AGENT = "agent"  # the value of rollout.worker that runs the command
GATEWAY = ("gateway", "starlette", "uvicorn")  # the extra, and its packages
_GIVEN = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "RL_MEGATRON_RECORD", "RL_MEGATRON_RESULT")  # set by the worker


@section
class AgentConfig:
    """The program that makes a trajectory, and the gateway, which answers the program's requests like OpenAI's API."""

    # The program with its arguments, as in "python my_agent.py --turns 3". It is not run by a shell. null: none. It
    # needs rollout.worker=agent.
    command: str | None = None
    directory: str | None = None  # the directory in which it runs; null: the run's current directory
    # Time limit of the program, not counting waits for the rollout engine. null: no limit.
    timeout_seconds: PositiveFloat | None = 600.0
    max_processes: Positive = 64  # maximum number of programs that run at the same time
    host: str = "127.0.0.1"  # the address at which the gateway listens
    port: Annotated[int, Field(ge=0, le=65535), Number] = 0  # its port; 0: a free one
    # Further environment variables of the program. A value of null passes on the run's own variable. Secrets need this,
    # because variables whose names end in TOKEN, API_KEY and the like are not passed on by default.
    environment: dict[str, str | None] = field(default_factory=dict)
    # How the policy writes tool calls, so that the gateway can convert them to OpenAI's format: a value of
    # rollout.tools.format, or your own parser as file.py:name or package.module:name. auto: detected from the chat
    # template. null: agents get the text unchanged.
    tool_format: str | None = "auto"

    def check(self, worker: str) -> None:
        """Check that the command can be run, and that `rollout.worker` uses it."""
        if worker != AGENT:
            if self.command is not None:
                raise ConfigError(
                    f"rollout.agent.command={self.command!r} does nothing: rollout.worker={worker} does not run it; "
                    "set rollout.worker=agent, or leave rollout.agent.command out"
                )
            return
        if self.command is None:
            raise ConfigError("rollout.worker=agent needs rollout.agent.command, the program to run; set it")
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"rollout.agent.command={self.command!r}: {error}; correct its quotes") from error
        if not words:
            raise ConfigError("rollout.agent.command is empty; set it to the program to run")
        if self.directory is not None and not Path(self.directory).is_dir():
            raise ConfigError(f"rollout.agent.directory={self.directory}: there is no such directory; create it")
        reserved = sorted(set(self.environment) & set(_GIVEN))
        if reserved:
            raise ConfigError(f"rollout.agent.environment sets {reserved[0]}, which the run sets itself; leave it out")
        require_extra("rollout.worker=agent", *GATEWAY)
