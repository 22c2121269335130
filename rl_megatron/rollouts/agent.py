"""The rollout worker `agent`: a separate program produces the trajectory by requests to the gateway."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from rl_megatron import disk, log
from rl_megatron.config.environments import AGENT, AgentConfig
from rl_megatron.config.errors import nearest, shorten_value
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts.client import RolloutClient
from rl_megatron.rollouts.gateway.session import Session
from rl_megatron.rollouts.trajectory import Trajectory
from rl_megatron.rollouts.worker import register_rollout_worker
from rl_megatron.workers.child_process import build_module_command, build_server_environment

# The guardian ends the program and all its processes when this process ends, for any reason. It gets the path of this
# package as an argument, because the program would inherit an environment variable.
_GUARDIAN = build_module_command("rl_megatron.workers.guardian", sys.executable)[0]
_MOST_RESULT_BYTES = 1 << 20
_BYTES_SHOWN = 2000  # of a failed program's output
_SECONDS_TO_END = 10.0  # more than the guardian needs to end a program that ignores SIGTERM


class AgentFailed(RuntimeError):
    """The error if the program of a trajectory failed, took too long, or wrote a result that cannot be used."""


@dataclass(frozen=True)
class AgentResult:
    """The result that the program has written to the file named by RL_MEGATRON_RESULT.

    Attributes:
        reward: The reward for the whole trajectory.
        metadata: The `metadata` that reward functions get.
    """

    reward: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=dict)


@register_rollout_worker(AGENT)
class AgentWorker:
    """The worker that runs the command of `rollout.agent` for each trajectory."""

    def __init__(self, settings: AgentConfig):
        self._settings = settings
        self._command = shlex.split(settings.command or "")

    async def rollout(self, client: RolloutClient, record: Mapping[str, Any], sampling: Sampling) -> list[Trajectory]:
        """Run the program, and return the trajectory of its requests."""
        async with client.openai(sampling=sampling) as session:
            with TemporaryDirectory(prefix=disk.make_temporary_prefix("agent")) as scratch:
                directory = Path(scratch)
                (directory / "record.json").write_text(_write_json(record), "utf-8")
                await self._run(client, session, directory)
                result = read_result(directory / "result.json")
            return [session.trajectory(result.reward, metadata=result.metadata)]

    async def _run(self, client: RolloutClient, session: Session, directory: Path) -> None:
        guarded = directory / "guarded"  # the guardian removes it
        with (directory / "output").open("w+b") as output:
            process = await asyncio.create_subprocess_exec(
                *_GUARDIAN, str(guarded), *self._command,
                stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output,
                cwd=self._settings.directory, env=self._build_environment(session, directory),
                # Ctrl-C reaches only the run; when the run ends, the guardian ends the program.
                start_new_session=True,
            )  # fmt: skip
            try:
                await self._wait(process, client)
            finally:
                await asyncio.shield(_end(process))
            if process.returncode != 0:
                raise AgentFailed(f"{self._shown} ended with status {process.returncode}; {_describe_output(output)}")

    async def _wait(self, process: asyncio.subprocess.Process, client: RolloutClient) -> None:
        """Wait until the program ends; raise AgentFailed at its time limit, which excludes waits for the engine."""
        limit, began = self._settings.timeout_seconds, time.monotonic()
        of_engine = client.seconds_of_engine
        ended = asyncio.ensure_future(process.wait())
        while not ended.done():
            used = time.monotonic() - began - (client.seconds_of_engine - of_engine)
            if limit is not None and used >= limit:
                raise AgentFailed(f"{self._shown} took longer than rollout.agent.timeout_seconds={limit:g}")
            await asyncio.wait({ended}, timeout=None if limit is None else limit - used)

    @property
    def _shown(self) -> str:
        return f"rollout.agent.command={shorten_value(self._settings.command)}"

    def _build_environment(self, session: Session, directory: Path) -> dict[str, str]:
        """Return the program's environment variables: those of the run, without secrets, and those of the gateway."""
        configured = self._settings.environment
        variables = {name: os.environ.get(name) if value is None else value for name, value in configured.items()}
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), os.environ.get("no_proxy"), self._settings.host)))
        paths = (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
        always = {
            "PATH": os.pathsep.join(paths),  # "python" is the one that runs this
            "NO_PROXY": direct,  # the gateway must not be reached through a proxy
            "no_proxy": direct,
            **{name: value for name, value in variables.items() if value is not None},
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "RL_MEGATRON_RECORD": str(directory / "record.json"),
            "RL_MEGATRON_RESULT": str(directory / "result.json"),
        }
        whole = build_server_environment({}, always)
        return {name: value for name, value in whole.items() if name in always or not log.is_secret_variable(name)}


def read_result(path: Path) -> AgentResult:
    """Return the result that a program has written; without a file, the reward is 0.

    The file is a JSON object, in which `reward` (a finite number) and `metadata` (an object) are optional.
    """
    if not path.exists():
        return AgentResult()
    if not path.is_file() or path.stat().st_size > _MOST_RESULT_BYTES:
        raise AgentFailed(f"RL_MEGATRON_RESULT is not a file of at most {_MOST_RESULT_BYTES} bytes")
    try:
        result = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise AgentFailed(f"RL_MEGATRON_RESULT is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise AgentFailed(f'RL_MEGATRON_RESULT is {shorten_value(result)}; write an object such as {{"reward": 1.0}}')
    keys = ("reward", "metadata")
    unknown = next((name for name in result if name not in keys), None)
    if unknown is not None:
        raise AgentFailed(f"RL_MEGATRON_RESULT has the unknown key {unknown!r}{nearest(unknown, keys)}")
    reward, metadata = result.get("reward", 0.0), result.get("metadata", {})
    if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
        raise AgentFailed(f"RL_MEGATRON_RESULT: reward is {shorten_value(reward)}, but must be a finite number")
    if not isinstance(metadata, dict):
        raise AgentFailed(f"RL_MEGATRON_RESULT: metadata is {shorten_value(metadata)}, but must be an object")
    return AgentResult(float(reward), metadata)


def _write_json(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(record), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise AgentFailed(f"the record cannot be written as JSON for the agent: {error}") from error


def _describe_output(output: BinaryIO) -> str:
    size = output.seek(0, os.SEEK_END)
    output.seek(max(0, size - _BYTES_SHOWN))
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return f"its output ends: {' | '.join(lines)}" if lines else "it has printed nothing"


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program and all its processes."""
    if process.stdin is not None:
        process.stdin.close()  # the guardian reads the end of the stream
    try:
        await asyncio.wait_for(process.wait(), _SECONDS_TO_END)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()  # the kernel then kills the program, too (`die_with`)
        await process.wait()
