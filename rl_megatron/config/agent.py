"""The settings of agents that are programs of their own, and of the gateway that they send their requests to."""

from __future__ import annotations

import shlex
from dataclasses import field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.extras import require_extra
from rl_megatron.config.field_types import Number, Positive, PositiveFloat, section

AGENT = "agent"  # the value of rollout.worker that runs the command
GATEWAY = ("gateway", "starlette", "uvicorn")  # the extra, and its packages
_GIVEN = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "RL_MEGATRON_RECORD", "RL_MEGATRON_RESULT")  # by the worker itself


@section
class AgentConfig:
    """The program that makes a trajectory, and the gateway, which answers its requests as OpenAI's API does."""

    # The program with its arguments, as in "python my_agent.py --turns 3". It is not run by a shell. null: none. It
    # needs rollout.worker=agent.
    command: str | None = None
    directory: str | None = None  # the directory in which it runs; null: that of the run
    # How long it may take, without the time in which it waits for the rollout engine. null: any time.
    timeout_seconds: PositiveFloat | None = 600.0
    max_processes: Positive = 64  # programs that run at the same time
    host: str = "127.0.0.1"  # the address at which the gateway listens
    port: Annotated[int, Field(ge=0, le=65535), Number] = 0  # its port; 0: a free one
    # Further environment variables of the program. null as a value: the variable of the run, which is needed for
    # secrets: variables whose names end in TOKEN, API_KEY and the like are otherwise left out.
    environment: dict[str, str | None] = field(default_factory=dict)
    # How the policy writes tool calls, which agents get as OpenAI's API writes them: a format of rollout.tools.format,
    # or file.py:name or package.module:name, a parser of your own. auto: as the chat template says. null: agents get
    # the texts as they are.
    tool_format: str | None = "auto"

    def check(self, worker: str) -> None:
        """Check that the command can be run, and that the worker uses it.

        Args:
            worker: The value of `rollout.worker`.

        Raises:
            ConfigError: It cannot, or does not.
        """
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
            raise ConfigError(f"rollout.agent.directory={self.directory}: there is no such directory; make it")
        taken = sorted(set(self.environment) & set(_GIVEN))
        if taken:
            raise ConfigError(f"rollout.agent.environment sets {taken[0]}, which the run sets itself; leave it out")
        require_extra("rollout.worker=agent", *GATEWAY)
