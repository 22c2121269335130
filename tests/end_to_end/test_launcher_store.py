"""The store of the launcher: who reaches it, and that nobody runs code through it."""

import base64
import os
import pickle
import time
from datetime import timedelta

import psutil
import pytest
from torch.distributed import TCPStore

from tests.end_to_end.launch import INTERRUPTED
from tests.end_to_end.listening import listening, reached_from_outside
from tests.ports import free_port

pytestmark = pytest.mark.change


class Evil:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


def store_at(port):
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)


def test_only_this_machine_reaches_a_run_on_one_node_and_its_store_holds_no_pickle(tmp_path, forks):
    with forks.launch(tmp_path, *INTERRUPTED, ranks=2) as running:
        running.wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), "the first step")
        (launcher,) = running.pids
        addresses = listening([launcher])
        assert addresses and reached_from_outside(addresses) == []
        ports = [
            each.laddr.port for each in psutil.Process(launcher).net_connections("inet") if each.status == "LISTEN"
        ]
        (port,) = ports
        keys = store_at(port).list_keys()
        assert keys and not [key for key in keys if "rendezvous" in key]
        running.kill()


def test_a_pickle_in_the_store_of_several_nodes_runs_no_code(tmp_path, forks):
    port, evil = free_port(), tmp_path / "evil"
    meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job")
    with forks.launch(tmp_path, *INTERRUPTED, ranks=1, meeting=(*meeting, "--local-addr", "127.0.0.1")) as running:
        (launcher,) = running.pids
        running.wait_until(lambda: port in [number for _, number in listening([launcher])], "the store")
        store = store_at(port)
        running.wait_until(lambda: any("rendezvous.job" in key for key in store.list_keys()), "the rendezvous")
        (key,) = (key for key in store.list_keys() if "rendezvous.job" in key)
        value = base64.b64encode(pickle.dumps(Evil(evil)))
        until = time.monotonic() + 20
        while running.is_running and time.monotonic() < until:  # the other side writes its state again
            store.set(key.removeprefix("/"), value)
            time.sleep(0.05)
        finished = running.finish()
    assert finished.status == 1 and "the state of the rendezvous names posix.mkdir" in finished.err
    assert not evil.exists()
