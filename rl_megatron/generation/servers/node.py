"""`NodeServers`: the servers of a node without ranks, which a run on other nodes uses (`rl-megatron serve`)."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_megatron import log
from rl_megatron.config.addresses import is_loopback
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import ServersConfig
from rl_megatron.config.model import ModelConfig
from rl_megatron.generation.interfaces import EngineFailed
from rl_megatron.generation.servers.access import TOKEN
from rl_megatron.generation.servers.dialect import Launch, ServerDialect
from rl_megatron.generation.servers.process import LocalServers
from rl_megatron.model.families import family_of_model
from rl_megatron.weight_sync.buckets import RefitPlan
from rl_megatron.weight_sync.servers import ServerDied

_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class ServerLauncher:
    """The settings with which a node without ranks starts the servers of a stage."""

    settings: ServersConfig
    dialect: ServerDialect
    model: RefitPlan  # without tensors; the run sends the weights later
    devices: Sequence[tuple[int, ...]]  # the GPU numbers of each server; empty for the CPU

    def command(self) -> tuple[list[str], dict[str, str]]:
        """Return a server's command and environment, with an example address and an example directory."""
        devices = self.devices[0] if self.devices else ()
        return self.dialect.command(Launch(0, Path("model"), self.model, "host", 1, devices))


def describe_model(model: ModelConfig, dtype: str, vocab_size: int) -> RefitPlan:
    """Return a refit plan without tensors, which servers need to start. `dtype` is a torch name such as "bfloat16".

    Raises:
        ConfigError: No Hugging Face family can express the model.
    """
    size = model.vocab_size or vocab_size
    hf_config = family_of_model(model, size).write_config(model, size)
    return RefitPlan(hf_config | {"dtype": dtype}, vocab_size, ())


class NodeServers:
    """The servers of this node. A server that ends is started again at the same address, where the run waits for it."""

    def __init__(self, launcher: ServerLauncher, log_directory: Path, max_restarts: int):
        """Prepare; no server is started yet. After `max_restarts` restarts, another death ends all servers.

        Raises:
            ConfigError: The port is not set, or other machines can reach the servers and there is no token.
        """
        settings = launcher.settings
        if settings.port is None:
            raise ConfigError(
                f"{settings.key}.port=null: the run has to know where the servers listen; add --port 8000 here, "
                "and --server-nodes HOST:8000 to the run"
            )
        token = os.environ.get(TOKEN, "")
        if not token and not is_loopback(settings.host):
            raise ConfigError(
                f"{TOKEN} is not set, and {settings.key}.host={settings.host} lets other machines reach the servers, "
                "whose weights anybody could replace; set the variable to the same secret here and for the run"
            )
        self._settings, self._max_restarts, self._restarts = settings, max_restarts, 0
        self._servers = LocalServers(
            settings.num_servers, launcher.dialect, settings, launcher.model, launcher.devices, log_directory, token
        )  # fmt: skip

    def run(self, stop: threading.Event) -> None:
        """Start the servers, and keep them running until `stop` is set. Then end them.

        Raises:
            ConfigError: A port is in use.
            EngineFailed: A server cannot be started, or servers ended too often.
        """
        try:
            self._servers.start()
            was_ready = False
            while not stop.wait(_POLL_SECONDS):
                is_ready = self._are_ready()
                if is_ready and not was_ready:
                    log.LOGGER.info(
                        "%d server(s) are ready: %s", len(self._servers.urls), ", ".join(self._servers.urls)
                    )
                was_ready = is_ready
        finally:
            self._servers.end()

    def _are_ready(self) -> bool:
        """Restart servers that have ended, and return whether all servers are ready."""
        processes = self._servers.processes
        ended = next((process for process in processes if process.is_ready and process.has_ended()), None)
        try:
            if ended is None:
                return self._servers.are_ready()
            death = f"{ended.name} ended; {ended.describe_log()}"
        except ServerDied as error:
            death = str(error)
        if self._restarts == self._max_restarts:
            raise EngineFailed(f"{death}; generation.max_engine_restarts={self._max_restarts} allows no other start")
        self._restarts += 1
        log.LOGGER.warning("%s; restart %d of at most %d", death, self._restarts, self._max_restarts)
        self._servers.start()
        return False
