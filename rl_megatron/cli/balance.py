"""`rl-megatron balance`: divide a job's nodes between training and the rollout engine, by times measured in a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_megatron import log
from rl_megatron.cli.serve import find_stages_with_servers, get_servers
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.metrics import METRICS_FILE
from rl_megatron.config.schema import RunConfig
from rl_megatron.observability.recorded_metrics import read_metric_lines
from rl_megatron.rollouts.pace import DeviceBalance, Division, count_devices_per_server
from rl_megatron.topology.degrees import validate


def balance(config: RunConfig, options: argparse.Namespace) -> int:
    """Print how many of a job's nodes should run servers, and return the exit status; `config` is the run's."""
    print(choose_engine_nodes(config, options.nodes, options.ranks_per_node, options.engine_nodes))
    return 0


def choose_engine_nodes(config: RunConfig, nodes: int, ranks_per_node: int, first: int | None) -> int:
    """Return how many of `nodes` nodes should run the servers of the rollout engine.

    Until a step has been measured, the number is as near as possible to `first` or, if that is None, to half of
    `nodes`.
    """
    for option, value, least in (("nodes", nodes, 2), ("ranks-per-node", ranks_per_node, 1)):
        if value < least:
            raise ConfigError(f"--{option} {value}: must be at least {least}")
    if first is not None and not 1 <= first < nodes:
        raise ConfigError(f"--engine-nodes {first}: must be at least 1 and less than the {nodes} nodes of the job")
    served = find_stages_with_servers(config, "balance")
    name, stage = next(
        ((name, stage) for name, stage in reversed(served.items()) if stage.rollout.is_asynchronous), (None, None)
    )
    if name is None or stage is None:
        raise ConfigError(
            "balance: no stage trains while servers generate, so nodes cannot be divided by how busy they are; "
            "set rollout.async_enabled=true, or choose a number of nodes yourself (ENGINE_NODES=1)"
        )
    possible = _list_possible(config, nodes, ranks_per_node)
    file = Path(config.output_dir) / METRICS_FILE
    lines = read_metric_lines(file) if file.is_file() else []
    measured = DeviceBalance.from_steps(line for line in lines if line["stage"] == name and line["kind"] == "train")
    devices_per_node = get_servers(stage).num_servers * count_devices_per_server(stage.generation)
    divisions = {Division((nodes - engine) * ranks_per_node, engine * devices_per_node): engine for engine in possible}
    best = measured.find_best(divisions)
    if best is None:
        wanted = nodes // 2 if first is None else first
        chosen = min(possible, key=lambda engine: (abs(engine - wanted), engine))
        log.LOGGER.info(
            "stage %s: %s has no asynchronous step yet; %d of %d nodes run servers", name, file, chosen, nodes
        )
        return chosen
    log.LOGGER.info("stage %s: %s; %d of %d nodes run servers", name, measured.describe(), divisions[best], nodes)
    return divisions[best]


def _list_possible(config: RunConfig, nodes: int, ranks_per_node: int) -> list[int]:
    """Return every possible number of server nodes: the remaining nodes must fit the layout of every stage."""
    possible, refusal = [], None
    for engine in range(1, nodes):
        try:
            for stage in config.stages.values():
                validate(stage.parallel, (nodes - engine) * ranks_per_node)
            possible.append(engine)
        except ConfigError as error:
            refusal = refusal or error
    if not possible:
        raise ConfigError(f"--nodes {nodes} --ranks-per-node {ranks_per_node}: no division fits: {refusal}")
    return possible
