"""Start the servers of a run's rollout engine on this node (`rl-megatron serve`), and give their addresses to runs."""

from __future__ import annotations

import argparse
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path

from rl_megatron import log
from rl_megatron.config.engines import ENGINE_DECLARATIONS
from rl_megatron.config.errors import ConfigError, convert_errors, nearest
from rl_megatron.config.generation import MAX_PORT, NODE, ServersConfig
from rl_megatron.config.schema import RunConfig, StageConfig
from rl_megatron.data.run_tokenizer import get_run_tokenizer

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)


def set_server_nodes(config: RunConfig, nodes: str | None) -> RunConfig:
    """Return the run with the servers that `rl-megatron serve` runs on `nodes` (HOST:PORT,…) as its rollout engines.

    Without `nodes`, return `config`.
    """
    if nodes is None:
        return config
    served = find_stages_with_servers(config, f"--server-nodes {nodes}")
    addresses = tuple(nodes.split(","))
    for address in addresses:
        if not re.match(NODE, address):
            raise ConfigError(f"--server-nodes {nodes}: {address!r} is not HOST:PORT; write it as 10.0.0.5:8000")
    stages = {name: _replace_servers(stage, server_nodes=addresses) for name, stage in served.items()}
    for stage in stages.values():
        get_servers(stage).check()
    return replace(config, stages=config.stages | stages)


def serve(config: RunConfig, options: argparse.Namespace) -> int:
    """Start the servers of a stage's rollout engine, run them until a signal arrives, and return the exit status."""
    stages = {name: _set_address(stage, options) for name, stage in _choose_stages(config, options.stage).items()}
    from rl_megatron.generation.engines import ENGINES
    from rl_megatron.generation.interfaces import EngineFailed
    from rl_megatron.generation.servers.node import NodeServers, ServerLauncher

    output_dir = Path(config.output_dir)
    tokenizer = convert_errors(lambda: get_run_tokenizer(config.first, output_dir))
    launchers: dict[str, ServerLauncher] = {}
    for name, stage in stages.items():
        make_launcher = ENGINES[stage.generation.engine].launcher
        assert make_launcher is not None  # an engine with a section for servers has a launcher
        launchers[name] = make_launcher(stage, tokenizer.vocab_size)
    last = list(launchers)[-1]
    for name, launcher in launchers.items():
        if launcher.command() != launchers[last].command():
            raise ConfigError(f"the stages {name} and {last} start their servers differently; choose one with --stage")
    restarts = stages[last].generation.max_engine_restarts
    servers = NodeServers(launchers[last], output_dir / "servers", restarts)
    stop = threading.Event()
    for number in _END_SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    # SIGUSR1 asks the ranks to end after a step, and that step may need the servers.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        servers.run(stop)
    except EngineFailed as error:
        log.error(error)
        return 1
    return 0


def _choose_stages(config: RunConfig, name: str | None) -> dict[str, StageConfig]:
    """Return the stages whose servers are started: the named one, or all that use servers."""
    served = find_stages_with_servers(config, "serve")
    if name is None:
        return served
    if name not in served:
        raise ConfigError(f"--stage {name}: no stage that uses servers has this name{nearest(name, served)}")
    return {name: served[name]}


def _set_address(stage: StageConfig, options: argparse.Namespace) -> StageConfig:
    """Return the stage with the host and the port that the options set."""
    section = get_servers(stage)
    if section.urls:
        raise ConfigError(f"{section.key}.server_urls and server_nodes name servers that run already; leave them out")
    if options.port is not None and not 0 < options.port <= MAX_PORT + 1 - section.num_servers:
        raise ConfigError(f"--port {options.port}: must be from 1 to {MAX_PORT + 1 - section.num_servers}")
    return _replace_servers(stage, host=options.host or section.host, port=options.port or section.port)


def find_stages_with_servers(config: RunConfig, what: str) -> dict[str, StageConfig]:
    """Return the stages whose rollout engine runs on servers, or raise an error that begins with `what`."""
    served = {
        name: stage
        for name, stage in config.stages.items()
        if stage.scores_completions and ENGINE_DECLARATIONS[stage.generation.engine].section is not None
    }
    if not served:
        engines = ", ".join(dict.fromkeys(stage.generation.engine for stage in config.stages.values()))
        raise ConfigError(
            f"{what}: no stage completes prompts on servers (generation.engine={engines}); set generation.engine=vllm "
            "or sglang"
        )
    return served


def get_servers(stage: StageConfig) -> ServersConfig:
    """Return the settings of the servers of a stage that uses servers."""
    return getattr(stage.generation, str(ENGINE_DECLARATIONS[stage.generation.engine].section))


def _replace_servers(stage: StageConfig, **changes: object) -> StageConfig:
    """Return the stage with changed settings of its servers."""
    section = str(ENGINE_DECLARATIONS[stage.generation.engine].section)
    servers = replace(get_servers(stage), **changes)  # pyright: ignore[reportArgumentType]  # they come from options
    return replace(stage, generation=replace(stage.generation, **{section: servers}))
