"""`LocalServers`: the server processes that this node's first rank starts, watches, restarts and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from pathlib import Path

import httpx2
import psutil

from rl_megatron import disk, log
from rl_megatron.config.addresses import is_loopback
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import ServersConfig
from rl_megatron.generation.interfaces import EngineFailed
from rl_megatron.generation.servers.access import TOKEN
from rl_megatron.generation.servers.dialect import Launch, ServerDialect
from rl_megatron.topology.job_store import is_on_one_node
from rl_megatron.weight_sync.buckets import RefitPlan
from rl_megatron.weight_sync.servers import ServerDied
from rl_megatron.workers.child_process import build_server_environment

GUARDIAN = "rl_megatron.workers.guardian"
_SECONDS_OF_HEALTH = 2.0
_PRIVATE = 0o600  # a server may print its arguments, and with them the run's token
_NEEDS_A_TOKEN = "/v1/models"  # a path that reveals nothing about the model's weights
_POLL_SECONDS = 0.5
_LINES_SHOWN = 5
_BYTES_READ = 1 << 16
_PORT_IN_USE = "address already in use"
_EVERYWHERE = ("0.0.0.0", "::")  # hosts for all interfaces
# These variables make a server's processes listen at the loopback address, not at the address of the hostname.
_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, _PRIVATE)


class ServerProcess:
    """One server process with its guardian, and its log file."""

    def __init__(self, launch: Launch, dialect: ServerDialect, log_path: Path):
        """Start the server; its log is appended to `log_path`."""
        self.name, self.log_path, self._dialect = f"{dialect.name} {launch.index}", log_path, dialect
        self._token = launch.token
        host = socket.gethostname() if launch.host in _EVERYWHERE else launch.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{launch.port}"
        command, environment = dialect.command(launch)
        if is_loopback(launch.host) and is_on_one_node():
            environment = _ON_LOOPBACK | environment
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(log_path, "ab", opener=_open_private) as output:
            os.fchmod(output.fileno(), _PRIVATE)  # the file may exist with other permissions
            self._began = output.tell()
            self._guardian = subprocess.Popen(
                [sys.executable, "-m", GUARDIAN, str(launch.model_directory), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=build_server_environment(
                    environment, {"CUDA_VISIBLE_DEVICES": _name_visible(launch.devices), TOKEN: launch.token}
                ),
                # Ctrl-C must reach only the policy, which ends the server and all other processes of the new session.
                start_new_session=True,
            )
        self.is_ready = False

    @property
    def pid(self) -> int:
        """Return the process id of the guardian, whose child is the server."""
        return self._guardian.pid

    def has_ended(self) -> bool:
        return self._guardian.poll() is not None

    def check_start(self) -> None:
        """Ask the server whether it is ready, and set `is_ready`.

        Raises:
            ServerDied: The server ended because another process took its port in the meantime.
            EngineFailed: The server ended before it was ready, and would do so again.
        """
        if self.has_ended():
            printed = self.read_log()
            if _PORT_IN_USE in printed.lower():
                raise ServerDied(f"{self.name} found its port in use: {self.url}")
            remedy = self._dialect.explain(printed) or "look at the log"
            raise EngineFailed(
                f"{self.name} ended with status {self._guardian.returncode} before it was ready; {remedy}; "
                f"{self.describe_log()}"
            )
        try:
            url = self.url + self._dialect.health_path
            answer = httpx2.get(url, timeout=_SECONDS_OF_HEALTH, trust_env=False, verify=False)
            if answer.status_code == 200 and self._token:
                self._check_token()
            self.is_ready = answer.status_code == 200
        except httpx2.RequestError:
            self.is_ready = False

    def _check_token(self) -> None:
        """Raise EngineFailed if the server answers without the token of the run."""
        answer = httpx2.get(self.url + _NEEDS_A_TOKEN, timeout=_SECONDS_OF_HEALTH, trust_env=False, verify=False)
        if answer.status_code != 401:
            raise EngineFailed(
                f"{self.name} answers GET {_NEEDS_A_TOKEN} without the token of the run (status "
                f"{answer.status_code}), so that others could replace its weights; install a version of it that this "
                f"package was tried with, and remove from {self._dialect.key}.extra_args what turns its check off"
            )

    def read_log(self) -> str:
        """Return the end of this process's output, without the token."""
        with self.log_path.open("rb") as output:
            output.seek(max(self._began, output.seek(0, os.SEEK_END) - _BYTES_READ))
            printed = output.read().decode(errors="replace")
        return printed.replace(self._token, "***") if self._token else printed

    def describe_log(self) -> str:
        """Return the path of the log, and its last lines in one line, for a message."""
        lines = [line.strip() for line in self.read_log().splitlines() if line.strip()]
        return f"its log {self.log_path} ends: {' | '.join(lines[-_LINES_SHOWN:]) or 'it is empty'}"

    def end(self, seconds_to_leave: float = 15.0) -> None:
        """End the server and all its processes.

        The guardian may take `seconds_to_leave`; it needs ten seconds if the server ignores SIGTERM.
        """
        if self._guardian.stdin is not None:
            self._guardian.stdin.close()  # the guardian sees the end of its stdin, and ends the server
        try:
            self._guardian.wait(seconds_to_leave)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        if self._guardian.returncode < 0:  # the guardian was killed, and could not end the server's processes
            _kill_session(self.pid)


def _kill_session(leader: int) -> None:
    """Kill the processes of a session, whose first process may have ended."""
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def _name_visible(devices: Sequence[int]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for these of the GPUs that this process sees; empty for none."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if seen is None else seen.split(",")
    return ",".join(str(device) if names is None else names[device] for device in devices)


class LocalServers:
    """The servers that this rank starts on its node, possibly none."""

    def __init__(
        self,
        count: int,
        dialect: ServerDialect,
        settings: ServersConfig,
        plan: RefitPlan,
        devices: Sequence[tuple[int, ...]],
        log_directory: Path,
        token: str = "",
        weights: Path | None = None,
    ):
        """Prepare; nothing is started yet. This rank starts `count` servers; see `Launch` for the other arguments."""
        self._weights = weights
        self._dialect, self._settings, self._plan, self._token = dialect, settings, plan, token
        self._devices, self._directory = devices, log_directory
        self._servers: list[ServerProcess | None] = [None] * count
        self._began = 0.0

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers if server is not None]

    @property
    def processes(self) -> list[ServerProcess]:
        return [server for server in self._servers if server is not None]

    def start(self, broken: Collection[str] = ()) -> None:
        """Start the servers that do not run, and restart those at the addresses `broken`.

        Raises:
            ConfigError: The configured port is in use.
        """
        self._began = time.monotonic()
        for index, server in enumerate(self._servers):
            if server is not None and (server.has_ended() or server.url in broken):
                server.end()
                server = self._servers[index] = None
            if server is None:
                self._servers[index] = self._start(index)

    def _start(self, index: int) -> ServerProcess:
        port = self._find_port(index)
        directory = Path(tempfile.mkdtemp(prefix=disk.make_temporary_prefix("server")))
        (directory / "config.json").write_text(json.dumps(self._plan.hf_config, indent=1))
        devices = self._devices[index] if self._devices else ()
        host, weights = self._settings.host, self._weights
        launch = Launch(index, directory, self._plan, host, port, devices, self._token, weights)
        path = self._directory / f"{self._dialect.key.rpartition('.')[2]}-{socket.gethostname()}-{index}.log"
        server = ServerProcess(launch, self._dialect, path)
        log.LOGGER.info("%s starts at %s; its log is %s", server.name, server.url, path)
        return server

    def _find_port(self, index: int) -> int:
        host, first = self._settings.host, self._settings.port
        port = 0 if first is None else first + index
        with closing(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                key = self._dialect.key
                raise ConfigError(
                    f"{key}.host={host} and {key}.port={first}: {self._dialect.name} {index} cannot listen at port "
                    f"{port} ({error.strerror}); set {key}.port=null, which takes a free port, or free this one"
                ) from error
            return probe.getsockname()[1]

    def are_ready(self) -> bool:
        """Return whether all servers of this node are ready.

        Raises:
            ServerDied: A server ended because its port was in use, so a new start may help.
            EngineFailed: A server ended for another reason, or was not ready within `startup_timeout_seconds`.
        """
        for server in self.processes:
            if not server.is_ready:
                server.check_start()
        slow = next((server for server in self.processes if not server.is_ready), None)
        limit = self._settings.startup_timeout_seconds
        if slow is not None and time.monotonic() - self._began > limit:
            raise EngineFailed(
                f"{slow.name} was not ready within {self._dialect.key}.startup_timeout_seconds={limit:g}; raise this "
                f"limit, or stop other programs on the machine; {slow.describe_log()}"
            )
        return slow is None

    def wait(self) -> None:
        """Wait until all servers of this node are ready; see `are_ready`."""
        while not self.are_ready():
            time.sleep(_POLL_SECONDS)

    def describe(self, url: str) -> str | None:
        """Return the end of the log of the server at `url`, or None if this node has no such server."""
        return next((server.describe_log() for server in self.processes if server.url == url), None)

    def end(self) -> None:
        """End all servers."""
        for server in self.processes:
            server.end()
        self._servers = [None] * len(self._servers)
