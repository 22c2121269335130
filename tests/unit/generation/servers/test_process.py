"""The process of a server and its guardian: everything that a server started ends with it."""

import os
import signal
from types import SimpleNamespace

import psutil
import pytest

from rl_megatron.generation.servers.dialect import Launch
from rl_megatron.generation.servers.process import ServerProcess

SHELL = SimpleNamespace(name="shell", command=lambda launch: (["sh", "-c", "sleep 100 & sleep 100; true"], {}))


@pytest.mark.change
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_all_processes_of_a_server_end_if_its_guardian_gets_a_signal(tmp_path, number):
    directory = tmp_path / "model"
    directory.mkdir()
    server = ServerProcess(Launch(0, directory, None, "127.0.0.1", 1, (), ""), SHELL, tmp_path / "log")
    guardian, of_the_server = psutil.Process(server.pid), []
    while len(of_the_server) < 3:  # the shell and what it started
        of_the_server = guardian.children(recursive=True)
    os.kill(server.pid, number)
    server.end(seconds_to_leave=2.0)
    assert psutil.wait_procs(of_the_server, timeout=20)[1] == []
