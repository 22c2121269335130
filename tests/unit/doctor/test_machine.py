"""`rl-megatron doctor` finds too little shared memory, ports in use, and file systems that do not fit checkpoints."""

import itertools
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from rl_megatron.config.loading.load import load_config
from rl_megatron.doctor import machine, storage
from rl_megatron.doctor.machine import check_limits_of_programs, check_ports, check_shared_memory
from rl_megatron.doctor.storage import check_storage, estimate_checkpoint_bytes, estimate_run_bytes

Usage = namedtuple("Usage", ["total", "used", "free"])
VLLM = ("algorithm=grpo", "data=arithmetic", "generation.engine=vllm")


@pytest.fixture
def free(monkeypatch):
    """Return a function that sets the free bytes of every file system."""
    return lambda size: monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(size, 0, size))


@pytest.fixture
def busy():
    """Yield a port at which something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


# --- shared memory ---


@pytest.mark.parametrize(("size", "state"), [(64 << 20, "problem"), (512 << 20, "warning"), (16 << 30, "ok")])
def test_the_shared_memory_of_a_container_is_compared_with_what_nccl_needs(tmp_path, free, size, state):
    free(size)
    (finding,) = check_shared_memory(path=tmp_path)
    assert finding.state == state
    assert state == "ok" or "--ipc=host" in finding.remedy


def test_a_weight_sync_through_shared_memory_needs_two_buckets(tmp_path, free):
    free(400 << 20)
    config = load_config([*VLLM, "generation.refit=shared_memory", "generation.refit_bucket_mb=256"])
    (finding,) = check_shared_memory(config, tmp_path)
    assert finding.state == "problem" and "needs 512 MiB" in finding.message and "refit_bucket_mb" in finding.remedy


def test_a_machine_without_shared_memory_is_a_problem(tmp_path):
    assert check_shared_memory(path=tmp_path / "absent")[0].state == "problem"


# --- ports ---


def test_a_master_port_in_use_is_a_problem_before_the_ranks_start(busy):
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(busy)}
    (finding,) = check_ports(environment=variables)
    assert finding.state == "problem" and f"MASTER_PORT={busy}" in finding.message and "in use" in finding.message
    assert check_ports(environment={**variables, "RANK": "0"})[0].state == "ok"  # the launcher uses it


def test_a_master_address_of_another_node_is_not_checked(busy):
    assert check_ports(environment={"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(busy)})[0].state == "ok"


@pytest.mark.parametrize("port", ["http", "0", "70000"])
def test_a_master_port_that_is_no_port_is_a_problem(port):
    assert "is not a port" in check_ports(environment={"MASTER_PORT": port})[0].message


def test_the_port_of_a_server_that_is_in_use_is_a_problem(busy):
    config = load_config([*VLLM, f"generation.vllm.port={busy - 1}", "generation.vllm.num_servers=2"])
    findings = check_ports(config, environment={})
    assert any(f"listen at port {busy}: " in finding.message for finding in findings)
    assert all("port=null" in finding.remedy for finding in findings if finding.state == "problem")


# --- storage ---


def test_a_directory_that_can_be_used_is_left_as_it_was(tmp_path):
    (finding,) = check_storage(tmp_path / "outputs" / "run", load_config(["experiment=quickstart"]))
    assert finding.state == "ok" and "checkpoints need" in finding.message
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_a_problem(tmp_path, free):
    free(1 << 20)
    (finding,) = check_storage(tmp_path, load_config(["experiment=quickstart"]))
    assert finding.state == "problem" and "checkpoints need" in finding.message
    assert "keep_checkpoints" in finding.remedy


def test_an_output_directory_that_cannot_be_written_is_a_problem(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "is a file" in check_storage(tmp_path / "file" / "run")[0].message

    def refuse(*arguments, **keywords):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage.tempfile, "TemporaryDirectory", refuse)
    (finding,) = check_storage(tmp_path)
    assert finding.state == "problem" and "cannot be written: Permission denied" in finding.message


def test_a_file_system_that_copies_instead_of_renaming_is_a_problem(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "rename", refuse)
    problems = [finding for finding in check_storage(tmp_path) if finding.state == "problem"]
    assert len(problems) == 1 and "does not rename" in problems[0].message and "object store" in problems[0].remedy


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(storage.fcntl, "lockf", refuse)
    assert [f.state for f in check_storage(tmp_path) if "locks" in f.message] == ["warning"]


def test_a_checkpoint_that_takes_long_to_write_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.time, "perf_counter", itertools.count(step=1e6).__next__)
    (finding,) = check_storage(tmp_path, load_config(["experiment=quickstart"]))
    assert finding.state == "warning" and "min of writing" in finding.message


def test_checkpoints_have_weights_and_optimizer_state_and_the_critics():
    grpo, ppo = (load_config([f"algorithm={name}", "data=arithmetic"]) for name in ("grpo", "ppo"))
    assert estimate_checkpoint_bytes(ppo.first) == 2 * estimate_checkpoint_bytes(grpo.first)
    once = load_config(["algorithm=grpo", "data=arithmetic", "train.save_every_seconds=0"])
    by_time = load_config(["algorithm=grpo", "data=arithmetic"])
    many = load_config(["algorithm=grpo", "data=arithmetic", "train.save_every=1", "train.keep_checkpoints=3"])
    assert estimate_run_bytes(once) == estimate_checkpoint_bytes(once.first)
    assert estimate_run_bytes(by_time) == 3 * estimate_checkpoint_bytes(once.first)
    assert estimate_run_bytes(many) == 4 * estimate_checkpoint_bytes(
        many.first
    )  # three are kept while the next one is written


def test_the_shared_memory_is_that_of_linux():
    assert Path("/dev/shm") == machine.SHARED_MEMORY


def test_limits_that_the_system_does_not_have_are_found_if_a_model_writes_programs(monkeypatch):
    monkeypatch.setattr("rl_megatron.doctor.machine.find_missing_limits", lambda: ["programs can do it"])
    grpo = ("algorithm=grpo", "data.task.name=gsm8k")
    assert check_limits_of_programs(load_config([*grpo])) == []
    tools = ("rollout.tools.functions=[python]", "rollout.tools.format=hermes", "rollout.worker=conversation")
    for keys in (("reward.functions=[code]",), tools):
        (finding,) = check_limits_of_programs(load_config([*grpo, *keys]))
        assert (finding.state, finding.message) == ("warning", "programs can do it")
