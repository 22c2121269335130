"""The servers of a node without ranks, which are fake ones: they are started again where they were, and all end."""

import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import psutil
import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import VllmConfig
from rl_megatron.generation.interfaces import EngineFailed
from rl_megatron.generation.servers.access import TOKEN
from rl_megatron.generation.servers.node import NodeServers, ServerLauncher, describe_model
from rl_megatron.weight_sync.buckets import RefitPlan
from rl_megatron.weight_sync.exporter import WeightExporter
from tests import child_processes
from tests.parallel.layouts import MODEL, build_policy
from tests.ports import free_port
from tests.unit.generation.servers.engines_of_fakes import FakeDialect

LLAMA = replace(MODEL, qk_norm=False, qkv_bias=False)


def node(directory, settings, *options, max_restarts=3):
    launcher = ServerLauncher(settings, FakeDialect(settings, *options), RefitPlan({}, 8, ()), ())
    return NodeServers(launcher, directory / "servers", max_restarts)


@contextmanager
def running(servers):
    """Run the servers in a thread, and yield what the run raised once it has ended."""
    stop, raised = threading.Event(), []

    def run():
        try:
            servers.run(stop)
        except EngineFailed as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield raised
    finally:
        stop.set()
        thread.join(30)


def wait_for_server(logged, start=1):
    """Wait until a server has been started and ready that many times; return its process and its address."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        addresses = [line.partition(" are ready: ")[2] for line in logged if "server(s) are ready: " in line]
        if len(addresses) == start:
            return child_processes.servers()[0], addresses[-1]
        time.sleep(0.05)
    raise AssertionError("no server is ready")


@pytest.mark.change
def test_a_killed_server_is_started_again_at_its_address_and_all_end_when_asked(tmp_path, logged):
    servers = node(tmp_path, VllmConfig(port=free_port(), startup_timeout_seconds=30.0), max_restarts=1)
    with running(servers) as raised:
        first, address = wait_for_server(logged)
        first.kill()
        second, same_address = wait_for_server(logged, start=2)
        assert second != first and same_address == address
        os.kill(second.pid, signal.SIGUSR1)  # it asks ranks to save, and SLURM sends it to all processes
        time.sleep(0.2)
        assert second.is_running() and second.status() != psutil.STATUS_ZOMBIE and not raised
    assert not second.is_running()


@pytest.mark.change
def test_servers_that_end_more_often_than_allowed_end_the_command(tmp_path, logged):
    servers = node(tmp_path, VllmConfig(port=free_port(), startup_timeout_seconds=30.0), max_restarts=0)
    with running(servers) as raised:
        wait_for_server(logged)[0].kill()
        deadline = time.monotonic() + 30
        while not raised and time.monotonic() < deadline:
            time.sleep(0.05)
    assert re.search(r"vLLM server 0 ended; .*max_engine_restarts=0 allows no other start", str(raised[0]))


def test_servers_need_a_port_that_the_run_knows_and_a_token_if_other_machines_reach_them(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ConfigError, match="generation.vllm.port=null: the run has to know"):
        node(tmp_path, VllmConfig())
    for host in ("0.0.0.0", "127.evil.example", "localhost.evil.example", "::1234:5"):
        with pytest.raises(ConfigError, match=f"{TOKEN} is not set, and generation.vllm.host={host} lets other"):
            node(tmp_path, VllmConfig(host=host, port=8000))
    for host in ("127.0.0.2", "::1", "localhost"):
        node(tmp_path, VllmConfig(host=host, port=8000))
    monkeypatch.setenv(TOKEN, "a secret")
    node(tmp_path, VllmConfig(host="0.0.0.0", port=8000))


def test_servers_are_told_of_the_model_what_the_run_will_send(ranks):
    told = ranks.reference(_plan_of_policy)
    assert describe_model(LLAMA, "float32", told.vocab_size).hf_config == told.hf_config


def _plan_of_policy():
    return WeightExporter(build_policy({}, LLAMA).model).plan
