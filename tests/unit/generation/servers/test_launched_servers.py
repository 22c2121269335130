"""Servers that the engine starts: their ends, restarts and failures to start, with fake servers."""

import os
import signal
import threading
import time

import psutil
import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import VllmConfig
from rl_megatron.generation.completion_batch import generate
from rl_megatron.generation.interfaces import EngineFailed, Served
from tests.child_processes import servers
from tests.fake_vllm import FakeVllm
from tests.unit.generation.servers.engines_of_fakes import PROMPTS, SAMPLING, make


@pytest.mark.change
def test_launched_servers_answer_log_into_the_run_and_end_with_the_engine(engines, tmp_path):
    engine = engines(settings={"num_servers": 2})
    engine.sync()
    assert generate(engine, PROMPTS, SAMPLING, seed=1)["input_ids"][0].tolist() == [3, 4, 5, 6, 7, 8, 9]
    processes = servers()
    assert all(process.environ()["GLOO_SOCKET_IFNAME"] == "lo" for process in processes), "for this machine only"
    logs = sorted((tmp_path / "servers").glob("vllm-*-[01].log"))
    assert len(logs) == 2 and all("the fake server starts" in path.read_text() for path in logs)
    assert {path.stat().st_mode & 0o777 for path in logs} == {0o600}, "a server may print the token of the run"
    engine.close()
    assert not any(process.is_running() for process in processes)


@pytest.mark.change
def test_a_killed_server_is_started_again_and_the_batch_is_completed(engines):
    engine = engines("seconds=1.5")
    engine.sync()
    (server,) = servers()
    threading.Timer(0.5, lambda: os.kill(server.pid, signal.SIGKILL)).start()
    assert generate(engine, PROMPTS, SAMPLING, seed=1)["input_ids"][0].tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert engine.served == Served(1, 2) and servers()[0].pid != server.pid


@pytest.mark.change
def test_a_server_ends_if_the_process_that_started_it_is_killed(tmp_path):
    """The guardian reads the end of its standard input, and ends the server."""
    pid = os.fork()
    if pid == 0:
        engine = make(tmp_path, VllmConfig(startup_timeout_seconds=30.0))
        engine.sync()
        (tmp_path / "pids").write_text(" ".join(str(process.pid) for process in servers()))
        time.sleep(60)
        os._exit(0)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pids").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    server = psutil.Process(int((tmp_path / "pids").read_text()))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    server.wait(20)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("exit=ValueError: Model architectures ['X'] are not supported for now.", "does not know the model's arch"),
        ("exit=No module named vllm", "run scripts/install_vllm.sh, or set the key to the Python"),
        (
            "exit=something else",
            r"with status 3 before it was ready; look at the log; its log .* ends: .*something",
        ),
        ("token=", r"answers GET /v1/models without the token of the run \(status 404\), so that others could"),
        ("after=60", r"not ready within generation.vllm.startup_timeout_seconds=2; raise this limit, or stop"),
    ],
)
@pytest.mark.change
def test_a_server_that_does_not_start_ends_the_run_and_says_why(engines, option, message):
    engine = engines(option, settings={"startup_timeout_seconds": 2.0 if "after" in option else 30.0})
    with pytest.raises(EngineFailed, match=message):
        engine.sync()


def test_a_port_in_use_is_named_before_a_server_starts(engines):
    fake = FakeVllm()
    port = int(fake.url.rpartition(":")[2])
    engine = engines(settings={"port": port})
    message = rf"generation.vllm.port={port}: vLLM server 0 cannot listen at port {port}"
    with pytest.raises(ConfigError, match=message):
        engine.sync()
    fake.close()
